"""What decides the bits besides the seed: threads, determinism, precision. Set for a run and put back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedprism.config import RunConfig
from fedprism.engines.compiler import compiler_cache
from fedprism.errors import ConfigError, shown


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one; a device that is not there is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"run.device is {shown(name)}; expected auto, cpu, cuda or cuda:INDEX.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device is {shown(name)}; expected auto, cpu, cuda or cuda:INDEX.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device is {shown(name)}, but PyTorch sees {torch.cuda.device_count()} GPUs; set run.device: cpu."
        )
    # With its number, as tensors name theirs: else nothing on it would seem to be there already.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_precision(name: str, device: torch.device) -> str:
    """`auto` is tf32 on a GPU that has it, fp32 elsewhere; bf16 is there everywhere, if not fast everywhere."""
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "tf32" and not has_tf32:
        raise ConfigError(f"run.precision is tf32, which {device} does not have; set run.precision: auto.")
    return ("tf32" if has_tf32 else "fp32") if name == "auto" else name


@contextmanager
def numerics(run: RunConfig, device: torch.device) -> Iterator[None]:
    """Within: `run.threads` threads, deterministic algorithms and the precision asked for."""
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    tf32 = choose_precision(run.precision, device) == "tf32"
    torch.set_num_threads(run.threads)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
        # Deterministic algorithms, and a warning where there are none. `use_deterministic_algorithms` does the same and
        # loads PyTorch's compiler, which takes a second.
        torch.set_deterministic_debug_mode("warn")
        memory.fill_uninitialized_memory = False  # nothing here reads what it did not write
    cudnn.deterministic, cudnn.benchmark = run.deterministic, not run.deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = tf32
    try:
        with compiler_cache(compiled=run.compile is True):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)
        memory.fill_uninitialized_memory = filled
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
