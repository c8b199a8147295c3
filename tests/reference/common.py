"""What the references share, and how to use them.

A reference is a second, independent writing of a method: plain PyTorch, at most 65 lines (155 with all its options),
from the paper's equations and not from the package (it imports nothing of it). Each file has `run(setup, **hyper)`,
which trains a federation and returns one `Scorer` a client: call it with images to get the scores that the client gives
at the moment `received` (or at the file's `MOMENT`), that is with the server's newest state after the last round, in
eval mode. `Scorer.model` holds the weights behind them. `HYPER` has the settings with which a method is compared to its
reference, `VARIANTS` more of them; `RELATIVE` is what it must not be taken for: the same with its idea off or a little
off, or its nearest relative. `QUICK`: settings for the conformance suite, where four rounds of the defaults would not
show all.

A test fills a `Setup` from the same first models, the same batches in the same order and the same participants as a run
of the package, and compares scores. What holds everywhere: an optimiser starts afresh in every pass; what is averaged
includes batch norm's running statistics unless the method keeps them at home; the counters of batch norm are left out,
because no score depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

State = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def no_noise(round: int, client: int, of: str, step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    raise AssertionError("this setup has no noise")


@dataclass
class Setup:
    """A federation to train. Inputs are floats, as the network gets them."""

    models: list[nn.Module]  # each client's first model, with a `body` and a `head`; references train copies of them
    batches: Callable[
        [int, int, int], list[tuple[Tensor, Tensor]]
    ]  # (round, client, epoch): what to train on, in order
    train: list[tuple[Tensor, Tensor]]  # each client's whole training set
    rounds: int
    epochs: int
    lr: float
    momentum: float
    samples: list[int]  # each client's number of training samples
    participants: Callable[[int], list[int]]  # who takes part in a round
    built: list[nn.Module] = field(default_factory=list)  # each client's first module with all the parts that a method
    # adds to a model: first weights are chance, so both sides start from the same; a reference trains copies of them
    noise: Callable[[int, int, str, int, str, tuple[int, ...]], Tensor] = no_noise
    # (round, client, pass, step, name, shape): the uniform noise that a step of training drew; steps count from 0, on
    # over the epochs
    server: State = field(default_factory=dict)  # the server's first state, for what of it is chance


@dataclass
class Scorer:
    """Scores `[batch, classes]` of one client."""

    model: nn.Module
    scores: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        self.model.eval()
        return self.scores(self.model, x)


def train(
    setup: Setup, round: int, client: int, parameters: Iterable[Tensor], loss: Loss, epochs: int | None = None
) -> None:
    """One pass of SGD over a client's batches; momentum starts at zero."""
    sgd = torch.optim.SGD(list(parameters), lr=setup.lr, momentum=setup.momentum)
    for epoch in range(setup.epochs if epochs is None else epochs):
        for x, y in setup.batches(round, client, epoch):
            sgd.zero_grad()
            loss(x, y).backward()
            sgd.step()


def plain(model: nn.Module) -> Loss:
    """Cross-entropy of a model in training mode."""
    model.train()
    return lambda x, y: cross_entropy(model(x), y)


def leaves(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the parameters and float buffers, or of those under a part: `leaves(model, "body.")`."""
    return [name for name, t in module.state_dict().items() if t.is_floating_point() and name.startswith(prefix)]


def norm_leaves(
    module: nn.Module, kinds: Collection[str] = ("weight", "bias", "running_mean", "running_var")
) -> set[str]:
    """Names of batch norm's leaves of these kinds, found by the layer's type."""
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    return {f"{name}.{kind}" for name in norms for kind in kinds}


def get(module: nn.Module, names: Iterable[str]) -> State:
    """Copies of these leaves."""
    state = module.state_dict()
    return {name: state[name].clone() for name in names}


def put(module: nn.Module, state: State) -> None:
    """Overwrite the leaves that `state` names."""
    assert not module.load_state_dict(state, strict=False).unexpected_keys


def mean(states: list[State], sizes: list[float]) -> State:
    """The mean of states, weighted by sizes."""
    return {
        name: sum(size / sum(sizes) * state[name] for size, state in zip(sizes, states, strict=True))
        for name in states[0]
    }


def distance(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    """Squared Euclidean distance between two lists of parameters."""
    return sum((p - a).square().sum() for p, a in zip(parameters, anchors, strict=True))
