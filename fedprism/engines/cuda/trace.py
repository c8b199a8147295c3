"""A training step as one compiled function: forward, backward and update, for `run.compile`.

The step is traced once into a graph whose inputs are all that it reads and changes: weights, buffers, scratch,
optimiser state, sums of what is logged, the batch, noise. The same compiled code then serves every slot. What it
computes equals the plain step to rounding, not bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedprism.config import OptimizerConfig
from fedprism.engines.cuda.identity import Name, readable, readable_tensors
from fedprism.engines.cuda.rewrite import Rewritten, leave_large_products, one_product_at_a_time
from fedprism.engines.cuda.tune import Function, inductor
from fedprism.errors import FedprismError
from fedprism.methods.base import Client, Draw, logged
from fedprism.methods.leaves import Place
from fedprism.round.training import PassRun, precision

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch.optim.Adam's

Noises = tuple[str, tuple[int, ...]]  # the name and the shape of some noise


class Untraceable(FedprismError):
    """A step that cannot be compiled; the message says why."""


@dataclass
class CompiledStep:
    """A compiled step, and the tensors of one slot that it reads and changes.

    Weights and optimiser state come out as new tensors, which the next step takes; they are written back after the last
    one. An update in place could not be part of the matrix product that it is made of.
    """

    function: Function
    tensors: list[Tensor]
    changed: list[int]  # which of these come out anew
    noises: list[Noises]
    log_counts: dict[str, int]  # how often a step logs what
    client: Client

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Within: steps that follow each other."""
        self.current = list(self.tensors)
        with torch.no_grad():
            yield
            torch._foreach_copy_([self.tensors[i] for i in self.changed], [self.current[i] for i in self.changed])
        self.current = []

    def __call__(self, x: Tensor, y: Tensor, draw: Draw) -> None:
        noise = [draw(name, *shape) for name, shape in self.noises]
        for place, tensor in zip(self.changed, self.function(*self.current, x, y, *noise), strict=True):
            self.current[place] = tensor
        for name, times in self.log_counts.items():
            self.client.log_counts[name] = self.client.log_counts.get(name, 0) + times


@dataclass(frozen=True)
class Layout:
    """Where in the list of inputs each kind of tensor stands, and what is trained."""

    places: list[Place]  # in the model and in scratch
    trained: list[int]  # which of these are trained
    state: int  # tensors of the optimiser per parameter
    logs: list[str]
    noises: list[Noises]


def trace(
    run: PassRun, layout: Layout, examples: Sequence[Tensor]
) -> tuple[torch.fx.GraphModule, list[int], dict[str, int]]:
    """The step as a graph of tensor operations, which of its inputs come out of it anew, and how often it logs what."""
    client, settings = run.client, run.optimizer_settings
    changed: list[int] = []
    log_counts: dict[str, int] = {}

    def step(*tensors: Tensor) -> list[Tensor]:
        rest = list(tensors)
        kept = [rest.pop(0) for _ in layout.places]
        state = [rest.pop(0) for _ in range(layout.state * len(layout.trained))]
        rate = rest.pop(0)
        sums = {name: rest.pop(0) for name in layout.logs}
        x, y = rest.pop(0), rest.pop(0)
        noise = dict(zip(layout.noises, rest, strict=True))
        inner = list(kept)
        for place in layout.trained:
            inner[place] = kept[place].detach().requires_grad_(True)
        logs: dict[str, Tensor] = {}
        log_counts.clear()
        with _swapped(layout.places, inner), _listening(client, noise, logs, log_counts), torch.enable_grad():
            with Rewritten(y), precision(run.config, x):
                loss = run.spec.loss(client, x, y)
            assert loss is not None
            trained = [inner[place] for place in layout.trained]
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            client.log(f"loss/{run.spec.name}", loss)
        with torch.no_grad():
            grads = _clipped(found, run.config.train.clip)
            for name, value in logs.items():
                sums[name].add_(value)
            changed.clear()
            new: list[Tensor] = []
            for i, (place, grad) in enumerate(zip(layout.trained, grads, strict=True)):
                if grad is not None:  # else the loss does not reach it, and an optimiser leaves it as it is
                    own = range(i * layout.state, (i + 1) * layout.state)
                    new += _updated(settings, kept[place], grad, [state[k] for k in own], rate)
                    changed.extend([place, *(len(layout.places) + k for k in own)])
            return new

    # What is not among the inputs is the same for every client: a matrix that an adapter holds.
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    one_product_at_a_time(traced)
    leave_large_products(traced)
    return traced, changed, log_counts


class Compiler:
    """Compiles a step once for all slots."""

    def __init__(self, device: torch.device, on_compile: Callable[[str, float | None], None]) -> None:
        self.device = device
        self.on_compile = on_compile  # called before with a text, and after with the seconds that it took
        # By key: what a step takes, which of that it changes, and how often it logs what.
        self.known: dict[Any, tuple[Function, list[Name], list[int], dict[str, int]]] = {}
        self.build: Callable[[torch.fx.GraphModule, Sequence[Tensor]], Function] = inductor

    def step(
        self,
        key: Any,
        run: PassRun,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        noises: list[Noises],
        batch: tuple[Tensor, Tensor],
    ) -> CompiledStep:
        """The compiled step of a pass, with the tensors of this slot."""
        client, tensors = run.client, readable_tensors(run.client)
        states = [optimizer.state[p] for p in parameters]
        ordered = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        inputs: dict[Name, Tensor] = {
            **tensors,
            **{("state", str(place)): tensor for place, tensor in enumerate(ordered)},
            ("rate", ""): optimizer.param_groups[0]["lr"],
            **{("sum", name): tensor for name, tensor in client.log_sums.items()},
        }
        named = {**tensors, ("x", ""): batch[0], ("y", ""): batch[1]}
        kinds = tuple((name, t.shape, t.stride(), t.dtype) for name, t in named.items())
        key = (key, kinds)
        if key not in self.known:
            self.on_compile(f"compiling the step of pass {run.spec.name!r}, once", None)
            begun = time.perf_counter()
            where = {id(kept[leaf]): place for place, (_, kept, leaf) in enumerate(readable(client).values())}
            trained = [where[id(parameter)] for parameter in parameters]
            size = len(ordered) // max(1, len(trained))
            layout = Layout(list(readable(client).values()), trained, size, list(client.log_sums), noises)
            noise = [torch.rand(shape, device=self.device) for _, shape in noises]
            examples = [*inputs.values(), *batch, *noise]
            try:
                graph, changed, counts = trace(run, layout, examples)
                used = _without_unused(graph, len(inputs))
                examples = [example for place, example in enumerate(examples) if place in used or place >= len(inputs)]
                order = [place for place in range(len(inputs)) if place in used]
                names = [name for place, name in enumerate(inputs) if place in used]
                function = self.build(graph, examples)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever cannot be compiled runs as it is
                words = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                raise Untraceable(f"it cannot be compiled ({words})") from error
            self.known[key] = (function, names, [order.index(place) for place in changed], counts)
            self.on_compile("", time.perf_counter() - begun)
        function, names, changes, counts = self.known[key]
        return CompiledStep(function, [inputs[name] for name in names], changes, noises, counts, client)


def _without_unused(graph: torch.fx.GraphModule, count: int) -> set[int]:
    """Take inputs away that the step does not use, of the first `count`; those that stay."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][:count]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    left = set(graph.graph.nodes)
    return {place for place, node in enumerate(inputs) if node in left}


# --- while a step is traced ------------------------------------------------------------------------------------------


@contextmanager
def _swapped(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within: these tensors are the model's and scratch's."""
    before = [kept[leaf] for _, kept, leaf in places]
    try:
        for (_, kept, leaf), tensor in zip(places, tensors, strict=True):
            kept[leaf] = tensor
        yield
    finally:
        for (_, kept, leaf), tensor in zip(places, before, strict=True):
            kept[leaf] = tensor


@contextmanager
def _listening(
    client: Client, noise: dict[Any, Tensor], logs: dict[str, Tensor], counts: dict[str, int]
) -> Iterator[None]:
    """Within: noise is what is given; what is logged is added up in `logs`, and how often it was in `counts`."""
    before = client.draw

    def log(name: str, value: Tensor) -> None:
        value = logged(value).to(torch.float64, copy=True)
        logs[name] = value if name not in logs else logs[name].add_(value)
        counts[name] = counts.get(name, 0) + 1

    client.draw = lambda name, *shape: noise[name, shape]
    client.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        client.draw = before
        del client.log  # the instance's: the class's is there again


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
