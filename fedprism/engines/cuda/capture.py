"""CUDA graphs: capture what some work launches, replay it, and count its kernels."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
LAUNCHES = (0, 1, 2)  # the driver's numbers for a graph's kernels, copies and fills


class GraphCapture:
    """Captures a function as a CUDA graph on the current stream. All its graphs share one memory pool: the slot's."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.pool, self.seconds = torch.cuda.graph_pool_handle(), seconds
        self.first = torch.cuda.CUDAGraph()  # of nothing: a pool whose last graph is gone cannot be used again
        place = torch.zeros(1, device=torch.cuda.current_stream().device)
        capture(self.first, place.zero_, self.pool)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph, begun = torch.cuda.CUDAGraph(), time.perf_counter()
        try:
            capture(graph, work, self.pool)
        finally:
            self.seconds["capture_seconds"] += time.perf_counter() - begun
        return CapturedGraph(graph, work)


@dataclass(frozen=True)
class CapturedGraph:
    """A graph and the function that it was captured from: a graph reads addresses, so what that holds must live as
    long."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def capture(graph: torch.cuda.CUDAGraph, work: Callable[[], Any], pool: Any) -> None:
    """Capture what some work launches on the current stream, which must not be the default one."""
    collecting = gc.isenabled()
    gc.disable()  # a graph that is freed while another is captured would spoil it
    torch.cuda.current_stream().synchronize()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # of a broken capture; the error that broke it is the one to report
                graph.capture_end()
            raise
        graph.capture_end()
    except RuntimeError as error:
        if "CUDA error: out of memory" in str(error):  # not PyTorch's allocator, but a graph or a library
            raise torch.OutOfMemoryError(str(error)) from None
        raise
    finally:
        if collecting:
            gc.enable()


def launches(work: Callable[[], Any], pool: Any = None) -> int | None:
    """Kernels, copies and fills that some work launches on the current stream, which must not be the default one.

    They are counted in a capture of it; None before PyTorch 2.8, which cannot be asked for one. A profiler would see
    them, too, but is known to make what the process launches after it slower.
    """
    try:
        graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return None
    capture(graph, work, pool)
    driver, captured, count = ctypes.CDLL(DRIVER), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    if failed := driver.cuGraphGetNodes(captured, None, ctypes.byref(count)):
        raise RuntimeError(f"CUDA does not give the nodes of a graph: error {failed}.")
    nodes, kind = (ctypes.c_void_p * count.value)(), ctypes.c_int()
    driver.cuGraphGetNodes(captured, nodes, ctypes.byref(count))
    found = 0
    for node in nodes:
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        found += kind.value in LAUNCHES
    return found
