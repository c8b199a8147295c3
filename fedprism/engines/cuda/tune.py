"""PyTorch's compiler for a traced step: its options, and kernels that are tuned as they will run."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from fedprism.engines.cuda.capture import capture

STREAMS, CALLS, LONGEST = 8, 25, 2e-3  # on how many, how often and for how many seconds a kernel is run to tune it

OPTIONS: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",  # whose products take what follows them along
    "max_autotune_conv_backends": "ATEN",  # cuDNN's: what is left as a convolution is large
    "benchmark_epilogue_fusion": False,
    "combo_kernels": True,
    "shape_padding": False,
    "triton.cudagraphs": False,
}

Function = Callable[..., Any]


def inductor(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Function:
    """PyTorch's compiler, with every matrix product tuned."""
    from torch._inductor import compile as build

    _one_assembler()
    with torch.no_grad(), quiet(), _tuned_under_load():
        function: Function = build(graph, list(examples), options=OPTIONS)
        function(*(example.clone() for example in examples))  # some kernels are tuned when they first run
    return function


def _one_assembler() -> None:
    """PyTorch's assembler here, too, as in the processes in which its compiler compiles.

    By itself Triton takes its own here. What those processes compiled, it then compiles again, one kernel at a time.
    """
    torchs = Path(torch.__file__).parent / "bin" / "ptxas"
    if torchs.is_file() and os.access(torchs, os.X_OK):
        os.environ.setdefault("TRITON_PTXAS_PATH", str(torchs))


@contextmanager
def quiet() -> Iterator[None]:
    """Within: the compiler's tables of what it tried, and why some of it does not fit this GPU, are not printed.

    An error that matters is raised. What other threads print, such as progress, is printed.
    """
    compiler = logging.getLogger("torch._inductor")
    level = compiler.level
    compiler.setLevel(logging.CRITICAL + 1)
    try:
        with redirect_stderr(_OthersOnly(sys.stderr)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        compiler.setLevel(level)


class _OthersOnly:
    """A stream that swallows what the thread that made it writes."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.silent = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.silent else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _tuned_under_load() -> Iterator[None]:
    """Within: the compiler compares kernels as they will run, in graphs on several streams at once.

    By itself it times one launch at a time, and of kernels as short as these that is the time of the launch. Runs that
    compile side by side measure one after the other.
    """
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    plain = benchmarker.benchmark_gpu
    alone = FileLock(Path(cache_dir()) / ".fedprism-measures.lock")

    def measured(call: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with alone:
            return measure(call, *args, **kwargs)

    def measure(call: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.current_stream() == torch.cuda.default_stream():  # which cannot be captured
            return plain(call, *args, **kwargs)
        call()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        calls = max(1, min(CALLS, int(LONGEST / (time.perf_counter() - begun))))
        graphs = [torch.cuda.CUDAGraph() for _ in range(STREAMS)]
        pool = torch.cuda.graph_pool_handle()  # which lives as long as they do
        try:
            for graph in graphs:
                capture(graph, lambda: [call() for _ in range(calls)], pool)
        except RuntimeError:  # something that cannot be captured
            return plain(call, *args, **kwargs)
        return _milliseconds(graphs) / (STREAMS * calls)

    benchmarker.benchmark_gpu = measured  # type: ignore[method-assign]
    try:
        yield
    finally:
        del benchmarker.benchmark_gpu  # the instance's: the class's is there again


def _milliseconds(graphs: list[torch.cuda.CUDAGraph]) -> float:
    """How long graphs take together, each on a stream of its own; the best of three."""
    stream: Any = torch.cuda.Stream
    streams = [stream() for _ in graphs]
    best = float("inf")
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return 1000 * best
