"""A training step as one compiled function: forward, backward and update, for `run.compile`.

The step is traced once into a graph whose inputs are all that it reads and changes (weights, buffers, scratch,
optimiser state, sums of what is logged, the batch, noise); the same compiled code then serves every slot. While it is
traced, convolutions of small batches become matrix products of the same parameters, and batch norm is written out: a
compiler can fuse those with what is around them, and fewer kernels are what makes small models fast.

What it computes equals the plain step to rounding, not bit by bit.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedprism.config import OptimizerConfig
from fedprism.engines.passes import Work, precision
from fedprism.errors import ConfigError, FedprismError
from fedprism.methods.base import Draw, Me
from fedprism.methods.leaves import Place, places

ENGINE = "cuda-graphs"  # whose steps are compiled
LONG = 50  # rounds from which on compiling, which takes half a minute or more, is chosen by `auto`
SMALL = 3_000_000  # numbers of a convolution's unfolded input up to which it becomes a matrix product
WINDOW = 25  # pixels of a pooling's window up to which each is looked at by itself
LARGE = 4_000_000  # numbers of a matrix from which on a product with it is left to cuBLAS
BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch.optim.Adam's

STREAMS, CALLS, LONGEST = 8, 25, 2e-3  # on which, how often and for how many seconds a kernel is run to tune it

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
LAUNCHES = (0, 1, 2)  # the driver's numbers for a graph's kernels, copies and fills

OPTIONS: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",  # whose products take what follows them along
    "max_autotune_conv_backends": "ATEN",  # cuDNN's: what is left as a convolution is large
    "benchmark_epilogue_fusion": False,
    "combo_kernels": True,
    "shape_padding": False,
    "triton.cudagraphs": False,
}
RELUS = {functional.relu, torch.relu, torch.Tensor.relu}
PRODUCTS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}

PLAIN = {  # cross-entropy without settings
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}

Function = Callable[..., Any]
Name = tuple[str, str]
Noises = tuple[str, tuple[int, ...]]  # the name and the shape of some noise


class Untraceable(FedprismError):
    """A step that cannot be compiled; the message says why."""


@dataclass
class Step:
    """A compiled step, and the tensors of one slot that it reads and changes.

    Weights and optimiser state come out as new tensors, which the next step takes; they are written back after the last
    one. An update in place could not be part of the matrix product that it is made of.
    """

    function: Function
    held: list[Tensor]
    changed: list[int]  # which of these come out anew
    noises: list[Noises]
    logged: dict[str, int]  # how often a step logs what
    me: Me

    @contextmanager
    def stretch(self) -> Iterator[None]:
        """Within: steps that follow each other."""
        self.now = list(self.held)
        with torch.no_grad():
            yield
            torch._foreach_copy_([self.held[i] for i in self.changed], [self.now[i] for i in self.changed])
        self.now = []

    def __call__(self, x: Tensor, y: Tensor, draw: Draw) -> None:
        noise = [draw(name, *shape) for name, shape in self.noises]
        for place, tensor in zip(self.changed, self.function(*self.now, x, y, *noise), strict=True):
            self.now[place] = tensor
        for name, times in self.logged.items():
            self.me.counts[name] = self.me.counts.get(name, 0) + times


@dataclass(frozen=True)
class Layout:
    """Where in the list of inputs each kind of tensor stands, and what is trained."""

    slots: list[Place]  # of the model and of scratch
    trained: list[int]  # which of these are trained
    state: int  # tensors of the optimiser, a parameter
    logged: list[str]
    noises: list[Noises]


def trace(
    work: Work, layout: Layout, examples: Sequence[Tensor]
) -> tuple[torch.fx.GraphModule, list[int], dict[str, int]]:
    """The step as a graph of tensor operations, which of its inputs come out of it anew, and how often it logs what."""
    me, settings = work.me, work.settings
    changed: list[int] = []
    logged: dict[str, int] = {}

    def step(*tensors: Tensor) -> list[Tensor]:
        rest = list(tensors)
        held = [rest.pop(0) for _ in layout.slots]
        state = [rest.pop(0) for _ in range(layout.state * len(layout.trained))]
        rate = rest.pop(0)
        sums = {name: rest.pop(0) for name in layout.logged}
        x, y = rest.pop(0), rest.pop(0)
        noise = dict(zip(layout.noises, rest, strict=True))
        inner = list(held)
        for place in layout.trained:
            inner[place] = held[place].detach().requires_grad_(True)
        logs: dict[str, Tensor] = {}
        logged.clear()
        with _swapped(layout.slots, inner), _listening(me, noise, logs, logged), torch.enable_grad():
            with Rewritten(y), precision(work.config, x.device):
                loss = work.each.loss(me, x, y)
            assert loss is not None
            trained = [inner[place] for place in layout.trained]
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            me.log(f"loss/{work.each.name}", loss)
        with torch.no_grad():
            grads = _clipped(found, work.config.train.clip)
            for name, value in logs.items():
                sums[name].add_(value)
            changed.clear()
            new: list[Tensor] = []
            for i, (place, grad) in enumerate(zip(layout.trained, grads, strict=True)):
                if grad is not None:  # else the loss does not reach it, and an optimiser leaves it as it is
                    own = range(i * layout.state, (i + 1) * layout.state)
                    new += _updated(settings, held[place], grad, [state[each] for each in own], rate)
                    changed.extend([place, *(len(layout.slots) + each for each in own)])
            return new

    # What is not among the inputs is the same for every client: a matrix that an adapter holds.
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    _one_product_at_a_time(traced)
    _leave_large_products(traced)
    return traced, changed, logged


class Compiler:
    """Compiles a step once for all slots."""

    def __init__(self, device: torch.device, tell: Callable[[str, float | None], None]) -> None:
        self.device, self.tell = device, tell  # told before with a text, and after with the seconds that it took
        # By key: what a step takes, which of that it changes, and how often it logs what.
        self.known: dict[Any, tuple[Function, list[Name], list[int], dict[str, int]]] = {}
        self.build: Callable[[torch.fx.GraphModule, Sequence[Tensor]], Function] = inductor

    def step(self, key: Any, work: Work, trainer: Any, noises: list[Noises], batch: tuple[Tensor, Tensor]) -> Step:
        """The compiled step of a pass, with the tensors of this slot."""
        me, tensors = work.me, everything(work.me)
        states = [trainer.optimizer.state[p] for p in trainer.trained]
        ordered = [t for each in states for t in each.values() if isinstance(t, Tensor)]
        inputs: dict[Name, Tensor] = {
            **tensors,
            **{("state", str(place)): tensor for place, tensor in enumerate(ordered)},
            ("rate", ""): trainer.optimizer.param_groups[0]["lr"],
            **{("sum", name): tensor for name, tensor in me.sums.items()},
        }
        named = {**tensors, ("x", ""): batch[0], ("y", ""): batch[1]}
        kinds = tuple((name, t.shape, t.stride(), t.dtype) for name, t in named.items())
        key = (key, kinds)
        if key not in self.known:
            self.tell(f"compiling the step of pass {work.each.name!r}, once", None)
            begun = time.perf_counter()
            where = {id(held[leaf]): place for place, (_, held, leaf) in enumerate(slots(me).values())}
            trained = [where[id(parameter)] for parameter in trainer.trained]
            size = len(ordered) // max(1, len(trained))
            layout = Layout(list(slots(me).values()), trained, size, list(me.sums), noises)
            noise = [torch.rand(shape, device=self.device) for _, shape in noises]
            examples = [*inputs.values(), *batch, *noise]
            try:
                graph, changed, logged = trace(work, layout, examples)
                used = _without_unused(graph, len(inputs))
                examples = [each for place, each in enumerate(examples) if place in used or place >= len(inputs)]
                order = [place for place in range(len(inputs)) if place in used]
                names = [name for place, name in enumerate(inputs) if place in used]
                function = self.build(graph, examples)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever cannot be compiled runs as it is
                words = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                raise Untraceable(f"it cannot be compiled ({words})") from error
            self.known[key] = (function, names, [order.index(place) for place in changed], logged)
            self.tell("", time.perf_counter() - begun)
        function, names, changes, logged = self.known[key]
        return Step(function, [inputs[name] for name in names], changes, noises, logged, me)


def _without_unused(graph: torch.fx.GraphModule, count: int) -> set[int]:
    """Take inputs away that the step does not use, of the first `count`; those that stay."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][:count]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    left = set(graph.graph.nodes)
    return {place for place, node in enumerate(inputs) if node in left}


def _one_product_at_a_time(graph: torch.fx.GraphModule) -> None:
    """The sum of two matrix products becomes a product that is added to the other.

    The compiler has a kernel of its own for such a sum, but not where the products are over less than 17 numbers: the
    gradient of a head that scores a small batch twice could not be compiled.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
            one, two = (_untransposed(each) for each in node.args)
            if one is not None and two is not None and one.meta["val"].shape == two.meta["val"].shape:
                node.target, node.args = torch.ops.aten.addmm.default, (one, *two.args)
    graph.recompile()


def _untransposed(node: Any) -> torch.fx.Node | None:
    """The product that a node is, or is but for being transposed twice."""
    transposed = torch.ops.aten.t.default
    while getattr(node, "target", None) is transposed and getattr(node.args[0], "target", None) is transposed:
        node = node.args[0].args[0]
    return node if getattr(node, "target", None) is torch.ops.aten.mm.default else None


@torch.library.custom_op("fedprism::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product that the compiler does not look into."""
    return a @ b


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _leave_large_products(graph: torch.fx.GraphModule) -> None:
    """Products with a large matrix, such as a wide layer's weights, become cuBLAS's.

    They take as long as the matrix takes to be read. cuBLAS shares that out along the sum, too, which Triton's do not:
    of a small batch's product with a large matrix they read at a third of the speed.
    """
    for node in graph.graph.nodes:
        if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) or node.kwargs:
            continue
        added, factors = node.args[:-2], node.args[-2:]
        if max(each.meta["val"].numel() for each in factors) >= LARGE:
            if added:
                with graph.graph.inserting_before(node):
                    plain = graph.graph.call_function(torch.ops.fedprism.product.default, factors)
                node.target, node.args = torch.ops.aten.add.Tensor, (plain, *added)
            else:
                node.target = torch.ops.fedprism.product.default
    graph.recompile()


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


def capture(graph: torch.cuda.CUDAGraph, work: Callable[[], Any], pool: Any) -> None:
    """Record what some work launches on the current stream, which must not be the default one."""
    collecting = gc.isenabled()
    gc.disable()  # a graph that is freed while another is recorded would spoil it
    torch.cuda.current_stream().synchronize()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # of a recording that is spoilt; what spoilt it is what is told
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

    They are counted in a recording of it; None before PyTorch 2.8, which cannot be asked for one. A profiler would see
    them, too, but is known to make what the process launches after it slower.
    """
    try:
        graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return None
    capture(graph, work, pool)
    driver, recorded, count = ctypes.CDLL(DRIVER), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    if failed := driver.cuGraphGetNodes(recorded, None, ctypes.byref(count)):
        raise RuntimeError(f"CUDA does not tell the nodes of a graph: error {failed}.")
    nodes, kind = (ctypes.c_void_p * count.value)(), ctypes.c_int()
    driver.cuGraphGetNodes(recorded, nodes, ctypes.byref(count))
    found = 0
    for node in nodes:
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        found += kind.value in LAUNCHES
    return found


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


# --- what stands for what while a step is traced ---------------------------------------------------------------------


def slots(me: Me) -> dict[Name, Place]:
    """All that a loss may read or change, by where it is: the model and scratch."""
    found = {("model", place[0]): place for place in places(me.model)}
    for name, held in me.scratch.items():
        if isinstance(held, Tensor):
            found["scratch", name] = (name, me.scratch, name)
        elif isinstance(held, nn.Module):
            found |= {(f"scratch {name}", place[0]): place for place in places(held)}
        else:
            found |= {(f"scratch {name}", leaf): (leaf, held, leaf) for leaf in held}
    return found


def everything(me: Me) -> dict[Name, Tensor]:
    """The tensors of `slots`, by name."""
    return {name: held[leaf].detach() for name, (_, held, leaf) in slots(me).items()}


@contextmanager
def _swapped(slots: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within: these tensors are the model's and scratch's."""
    before = [held[leaf] for _, held, leaf in slots]
    try:
        for (_, held, leaf), tensor in zip(slots, tensors, strict=True):
            held[leaf] = tensor
        yield
    finally:
        for (_, held, leaf), tensor in zip(slots, before, strict=True):
            held[leaf] = tensor


@contextmanager
def _listening(me: Me, noise: dict[Any, Tensor], logs: dict[str, Tensor], logged: dict[str, int]) -> Iterator[None]:
    """Within: noise is what is given; what is logged is added up in `logs`, and how often it was in `logged`."""
    before = me.draw

    def log(name: str, value: Tensor) -> None:
        me.log_into(logs, name, value)
        logged[name] = logged.get(name, 0) + 1

    me.draw = lambda name, *shape: noise[name, shape]
    me.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        me.draw = before
        del me.log  # the instance's: the class's is there again


class Rewritten(TorchFunctionMode):
    """Within: convolutions of small batches are matrix products; pooling, batch norm and losses are written out."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.labels = labels

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d:
            product = _conv2d(*args, **kwargs)
            if product is not None:
                return product
        if func in RELUS and args[0].ndim == 4 and args[0].stride(1) == 1:
            # As rows of a matrix, which is how a product before it comes: the compiler then makes one kernel of both.
            x = args[0].permute(0, 2, 3, 1)
            return x.reshape(-1, x.shape[-1]).relu().view(x.shape).permute(0, 3, 1, 2)
        if func is functional.max_pool2d and (pooled := _max_pool2d(*args, **kwargs)) is not None:
            return pooled
        if func is functional.batch_norm:
            return _batch_norm(*args, **kwargs)
        if func is functional.cross_entropy and args[1] is self.labels and kwargs == PLAIN:
            return _cross_entropy(*args)
        if func in PRODUCTS and args[0].dtype == torch.float64 and args[0].ndim == args[1].ndim == 2:
            return (args[0].unsqueeze(1) * args[1].T.unsqueeze(0)).sum(2)
        return func(*args, **kwargs)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """A convolution as a matrix product; None where it is better left as it is."""
    if isinstance(padding, str) or groups != 1 or {*_pair(stride), *_pair(dilation)} != {1}:
        return None
    if not weight.is_contiguous():  # channels last, which cuDNN takes as they are
        return None
    (high, wide), kernel = _pair(padding), weight.shape[2:]
    rows, columns = x.shape[2] + 2 * high - kernel[0] + 1, x.shape[3] + 2 * wide - kernel[1] + 1
    if not weight.numel() <= len(x) * rows * columns * weight[0].numel() <= SMALL:
        return None
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    if torch.is_autocast_enabled(x.device.type):  # as a convolution: its backward runs in the same precision
        x, weight, bias = (each.to(torch.get_autocast_dtype(x.device.type)) for each in (x, weight, bias))
    product: Tensor = Product.apply(x, weight, bias, (high, wide))  # type: ignore[no-untyped-call]
    return product


class Product(torch.autograd.Function):
    """Unfold, multiply; and back without a scatter.

    A window's numbers stand in the order of the input's memory, so that neighbours are read together: channels last
    behind another product, whose result has them so; channels first in images, and the weights are then a matrix as
    they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
        out, _, high, wide = weight.shape
        ctx.padding, ctx.shape, ctx.window, ctx.last = padding, x.shape, (high, wide), x.stride(1) == 1
        x = _whole(x)
        padded = functional.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        windows = padded.unfold(2, high, 1).unfold(3, wide, 1)  # [batch, channels, rows, columns, high, wide]
        n, c, rows, columns = windows.shape[:4]
        windows, weight = (
            (windows.permute(0, 2, 3, 4, 5, 1), weight.permute(0, 2, 3, 1))
            if ctx.last
            else (windows.permute(0, 2, 3, 1, 4, 5), weight)
        )
        unfolded, matrix = windows.reshape(n * rows * columns, high * wide * c), weight.reshape(out, -1)
        ctx.save_for_backward(unfolded, matrix)
        return torch.addmm(bias, unfolded, matrix.T).view(n, rows, columns, out).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unfolded, matrix = ctx.saved_tensors
        (high, wide), c = ctx.window, ctx.shape[1]
        n, out, rows, columns = grads[0].shape
        window, order = ((high, wide, c), (2, 0, 1)) if ctx.last else ((c, high, wide), (0, 1, 2))
        grad = grads[0].permute(0, 2, 3, 1).reshape(n * rows * columns, out)
        of_weight = of_bias = of_x = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad.T @ unfolded).view(out, *window).permute(0, *(1 + place for place in order))
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        if ctx.needs_input_grad[0]:
            # Each pixel takes part in high x wide windows: the sum over them, each shifted to its place.
            parts = (grad @ matrix).view(n, rows, columns, *window).permute(0, *(3 + place for place in order), 1, 2)
            shifted = [
                functional.pad(parts[:, :, i, j], (j, wide - 1 - j, i, high - 1 - i))
                for i in range(high)
                for j in range(wide)
            ]
            of_x = sum(shifted[1:], shifted[0])
            (top, left), (_, _, height, width) = ctx.padding, ctx.shape
            of_x = of_x[:, :, top : top + height, left : left + width]
        return of_x, of_weight, of_bias, None


def _whole(x: Tensor) -> Tensor:
    """The same, but the compiler has to store it: it would compute again for each of its uses what led to it.

    Not a part of something larger, such as a slice: the compiler reads those at the wrong places.
    """
    if x.storage_offset() or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        return x
    return x.as_strided(x.shape, x.stride())


def _max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Pooling without indices of pixels; None where it is better left as it is."""
    kernel, stride = _pair(kernel_size), _pair(stride or kernel_size)
    if x.ndim != 4 or ceil_mode or return_indices or (*_pair(padding), *_pair(dilation)) != (0, 0, 1, 1):
        return None
    if kernel[0] * kernel[1] > WINDOW:
        return None
    pooled: Tensor = Maxima.apply(x, kernel, stride)  # type: ignore[no-untyped-call]
    return pooled


class Maxima(torch.autograd.Function):
    """The largest of each window; and back without a scatter, for which a compiler needs two more kernels.

    What is kept is which pixel of its window was the largest, the first one if several were.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        sides = zip(x.shape[2:], kernel, stride, strict=True)
        rows, columns = ([range(i, side - wide + i + 1, step) for i in range(wide)] for side, wide, step in sides)
        pixels = [x[:, :, r.start : r.stop : r.step, c.start : c.stop : c.step] for r in rows for c in columns]
        largest, which = pixels[0], torch.zeros_like(pixels[0], dtype=torch.int8)
        for place, pixel in enumerate(pixels[1:], start=1):
            larger = (pixel > largest) | pixel.isnan()
            largest, which = torch.where(larger, pixel, largest), torch.where(larger, place, which)
        ctx.save_for_backward(_whole(which))
        ctx.kernel, ctx.stride, ctx.sides, ctx.last = kernel, stride, x.shape[2:], x.stride(1) == 1
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Each pixel asks the windows that it is in, two a side if they overlap, whether it was the largest there."""
        (which,), (grad,), kernel, stride, sizes = ctx.saved_tensors, grads, ctx.kernel, ctx.stride, grads[0].shape[2:]
        rows, columns = (torch.arange(side, device=grad.device) for side in ctx.sides)
        rows = rows[:, None]
        every: tuple[slice, ...] = (slice(None),) * 2
        if ctx.last:  # what is computed is stored in the order of its dimensions
            which, grad, every = which.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1), every[1:]
        parts = []
        for up in range(-(-kernel[0] // stride[0])):
            for left in range(-(-kernel[1] // stride[1])):
                r, c = rows // stride[0] - up, columns // stride[1] - left
                place = (rows - r * stride[0]) * kernel[1] + columns - c * stride[1]
                inside = (rows - r * stride[0] < kernel[0]) & (columns - c * stride[1] < kernel[1])
                there = inside & (r >= 0) & (r < sizes[0]) & (c >= 0) & (c < sizes[1])
                window = (*every, r.clamp(0, sizes[0] - 1), c.clamp(0, sizes[1] - 1))
                place, there = (place[..., None], there[..., None]) if ctx.last else (place, there)
                parts.append(torch.where(there & (which[window] == place), grad[window], 0))
        total = sum(parts[1:], parts[0])
        return total.permute(0, 3, 1, 2) if ctx.last else total, None, None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm by its definition."""
    over = [0, *range(2, x.ndim)]
    shape = [1, -1] + [1] * (x.ndim - 2)
    if training:
        var, mean = torch.var_mean(x, over, correction=0)
        if running_mean is not None and running_var is not None:
            count = x.numel() / x.shape[1]
            with torch.no_grad():
                running_mean.mul_(1 - momentum).add_(mean.detach(), alpha=momentum)
                running_var.mul_(1 - momentum).add_(var.detach(), alpha=momentum * count / (count - 1))
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = running_mean, running_var
    scale = (var + eps).rsqrt() * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - mean * scale
    return x * scale.view(shape) + shift.view(shape)


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Of the labels of a batch, which are classes: PyTorch's counts those first that are to be left out."""
    right = torch.arange(scores.shape[1], device=scores.device) == labels.unsqueeze(1)
    return -torch.where(right, scores.log_softmax(1), 0).sum(1).mean()


# --- the update ------------------------------------------------------------------------------------------------------


def _clipped(grads: Sequence[Tensor | None], most: float | None) -> list[Tensor | None]:
    """As `clip_grad_norm_`."""
    if most is None:
        return list(grads)
    norm = torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt()
    return [None if g is None else g * (most / (norm + 1e-6)).clamp(max=1.0) for g in grads]


def _updated(
    settings: OptimizerConfig, parameter: Tensor, grad: Tensor, state: list[Tensor], rate: Tensor
) -> list[Tensor]:
    """A parameter and its optimiser state after a step of SGD or Adam, as PyTorch's."""
    if settings.weight_decay:
        grad = grad + settings.weight_decay * parameter
    if settings.name == "adam":
        step, first, second = state
        step, first = step + 1, first.lerp(grad, 1 - BETAS[0])
        second = BETAS[1] * second + (1 - BETAS[1]) * grad.square()
        size = (second / (1 - BETAS[1] ** step)).sqrt() + EPSILON
        return [parameter - rate * (first / (1 - BETAS[0] ** step)) / size, step, first, second]
    if settings.momentum:
        moved = settings.momentum * state[0] + grad
        return [parameter - rate * moved, moved]
    return [parameter - rate * grad]


def settle(asked: bool | str, rounds: int, device: torch.device, engine: str = "auto") -> bool:
    """Is the step compiled? `auto`: on a GPU with Triton, in runs that are long enough to pay for it."""
    triton = importlib.util.find_spec("triton") is not None
    other = engine not in ("auto", ENGINE)
    if asked == "auto":
        return device.type == "cuda" and triton and rounds >= LONG and not other
    if asked and other:
        raise ConfigError(f"run.compile is true, which is for {ENGINE}, and run.engine is {engine}; drop one of them.")
    if asked and device.type != "cuda":
        raise ConfigError("run.compile is true, which is for a GPU, and this is a CPU; set it to false or auto.")
    if asked and not triton:
        raise ConfigError("run.compile is true, which needs Triton (`pip install triton`); set it to false or auto.")
    return bool(asked)
