"""What one would write by hand: a plain loop over the clients, one after the other, for FedAvg, FedBN and FedCP.

Nothing of an engine is in it. First weights and the order of batches come from the same keys as everywhere, so that
what it computes can be compared, and PyTorch's own defaults hold: no deterministic algorithms, TF32 where the other
side has it. Images lie on the device as bytes and a batch is gathered there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fedprism import keys
from fedprism.bench.machine import wait
from fedprism.config import Config
from fedprism.federation import Federation
from fedprism.methods import make
from fedprism.methods.base import Info

LARGE = 1024  # images of an evaluation's batch

State = dict[str, Tensor]


@dataclass(frozen=True)
class Taken:
    """Seconds of one round."""

    train: float  # download, training, upload
    aggregate: float
    evaluate: float
    whole: float


@contextmanager
def defaults(tf32: bool, threads: int) -> Iterator[None]:
    """PyTorch as it comes, but for TF32 and the number of threads."""
    before, cudnn, matmul = torch.get_num_threads(), torch.backends.cudnn, torch.backends.cuda.matmul
    flags = (cudnn.allow_tf32, matmul.allow_tf32)
    torch.set_num_threads(threads)
    cudnn.allow_tf32 = matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_num_threads(before)
        cudnn.allow_tf32, matmul.allow_tf32 = flags


class Serial:
    """FedAvg: copy the global model, train it, average by samples, test on every client's images."""

    by_samples = True

    def __init__(self, config: Config, info: Info, federation: Federation, device: torch.device) -> None:
        self.config, self.info, self.device = config, info, device
        last = config.run.memory_format == "channels_last"
        self.layout = torch.channels_last if last else torch.contiguous_format
        clients = federation.clients.items()
        self.train = {name: (data.train.x.to(device), data.train.y.to(device)) for name, data in clients}
        self.test = {name: (data.test.x.to(device), data.test.y.to(device)) for name, data in clients}
        self.accuracy: dict[str, float] = {}
        self.begin()

    # --- what differs between the three ------------------------------------------------------------------------------

    def begin(self) -> None:
        self.model = self.placed(self.info.arch.model(self.info.seed))

    def train_client(self, round: int, client: str) -> State:
        """One client's round; what it sends."""
        model = copy.deepcopy(self.model).train()
        self.fit(round, client, model.parameters(), lambda x, y: cross_entropy(model(x), y))
        return model.state_dict()

    def arrive(self, mean: State) -> None:
        """The new average is there."""
        self.model.load_state_dict({**self.model.state_dict(), **mean})

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        return self.model.eval()

    def weights(self) -> dict[str, State]:
        """Copies of the server's leaves, and of what each client keeps."""
        return {"server": copied(self.model.state_dict())}

    # --- what they have in common ------------------------------------------------------------------------------------

    def one_round(self, round: int) -> Taken:
        begun = time.perf_counter()
        sent = {client: self.train_client(round, client) for client in self.train}
        wait(self.device)
        trained = time.perf_counter()
        sizes = {client: len(y) if self.by_samples else 1 for client, (_, y) in self.train.items()}
        self.arrive(mean(sent, sizes))
        wait(self.device)
        averaged = time.perf_counter()
        self.accuracy = {client: self.evaluate(client) for client in self.test}
        ended = time.perf_counter()
        return Taken(trained - begun, averaged - trained, ended - averaged, ended - begun)

    def fit(
        self, round: int, client: str, parameters: Iterable[nn.Parameter], loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        settings = self.config.train.optimizer
        optimiser = torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)
        images, labels = self.train[client]
        for rows in self.batches(round, client, len(labels)):
            optimiser.zero_grad()
            loss(self.inputs(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    @torch.no_grad()
    def evaluate(self, client: str) -> float:
        score, (images, labels) = self.scores(client), self.test[client]
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for x, y in zip(torch.split(images, LARGE), torch.split(labels, LARGE), strict=True):
            right += (score(self.inputs(x)).argmax(dim=1) == y).sum()
        return right.item() / len(labels)

    def batches(self, round: int, client: str, count: int) -> Iterator[Tensor]:
        """An epoch in random order; a single image that is left over joins the last batch."""
        order = torch.randperm(count, generator=keys.generator(self.info.seed, "batches", "", round, client, 0))
        order, size = order.to(self.device), self.config.train.batch
        ends = [*range(size, count, size), count]
        if len(ends) > 1 and ends[-1] - ends[-2] == 1:
            del ends[-2]
        for start, end in zip([0, *ends], ends, strict=False):
            yield order[start:end]

    def inputs(self, images: Tensor) -> Tensor:
        return (images.float() / 127.5 - 1).contiguous(memory_format=self.layout)

    def placed(self, module: nn.Module) -> nn.Module:
        return module.to(self.device, memory_format=self.layout)  # type: ignore[call-overload, no-any-return]


class SerialFedBN(Serial):
    """FedBN: a model a client, into which everything but batch norm is copied; a plain mean."""

    by_samples = False

    def begin(self) -> None:
        first = self.placed(self.info.arch.model(self.info.seed))
        self.models = {client: copy.deepcopy(first) for client in self.train}
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
        norms = tuple(f"{name}." for name, part in first.named_modules() if isinstance(part, kinds))
        self.shared = [name for name in first.state_dict() if not name.startswith(norms)] if norms else None
        self.server = self.sent(first)

    def sent(self, model: nn.Module) -> State:
        state = model.state_dict()
        return copied({name: state[name] for name in self.shared or state})

    def received(self, client: str) -> nn.Module:
        model = self.models[client]
        model.load_state_dict(self.server, strict=False)
        return model

    def train_client(self, round: int, client: str) -> State:
        model = self.received(client).train()
        self.fit(round, client, model.parameters(), lambda x, y: cross_entropy(model(x), y))
        return self.sent(model)

    def arrive(self, mean: State) -> None:
        self.server = mean

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        return self.received(client).eval()

    def weights(self) -> dict[str, State]:
        own = {
            client: copied({n: t for n, t in model.state_dict().items() if n not in self.server})
            for client, model in self.models.items()
        }
        return {"server": copied(self.server), **own}


class SerialFedCP(Serial):
    """FedCP: a policy shares each image's features out between a frozen global head and the client's own."""

    def begin(self) -> None:
        method = make(self.config.method)
        self.lam = float(getattr(method, "lam"))  # noqa: B009  (a field of FedCP's)
        self.clients: dict[str, Any] = {
            client: self.placed(method.build(self.info.arch, client, self.info, self.info.seed))
            for client in self.train
        }
        for me in self.clients.values():
            me.common.requires_grad_(False)
        first = next(iter(self.clients.values()))
        self.shared = [n for n, _ in first.named_parameters() if n.startswith(("net.body.", "policy.", "common."))]
        self.server = self.sent(first)

    def sent(self, me: Any) -> State:
        state = me.state_dict()
        return copied({name: state[name] for name in self.shared})

    def received(self, client: str) -> Any:
        me = self.clients[client]
        me.load_state_dict(self.server, strict=False)
        me.client["v"].copy_(normalize(me.net.head[-1].weight.detach().sum(0), dim=0))
        return me

    def score(self, me: Any, z: Tensor) -> Tensor:
        share = me.policy(me.client["v"] * z).view(len(z), 2, -1).softmax(dim=1)
        scores: Tensor = me.common(share[:, 0] * z) + me.net.head(share[:, 1] * z)
        return scores

    def train_client(self, round: int, client: str) -> State:
        me = self.received(client).train()
        frozen = copy.deepcopy(me.net.body).requires_grad_(False)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = me.net.body(x)
            return cross_entropy(self.score(me, z), y) + self.lam * apart(z, frozen(x))

        self.fit(round, client, [*me.net.parameters(), *me.policy.parameters()], loss)
        sent, own = self.sent(me), me.net.head.state_dict()
        halves = {n: (t + own[n.removeprefix("common.")]) / 2 for n, t in sent.items() if n.startswith("common.")}
        return {**sent, **halves}

    def arrive(self, mean: State) -> None:
        self.server = mean

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        me = self.received(client).eval()
        return lambda x: self.score(me, me.net.body(x))

    def weights(self) -> dict[str, State]:
        heads = {
            client: copied({f"net.head.{n}": t for n, t in me.net.head.state_dict().items()})
            for client, me in self.clients.items()
        }
        return {"server": copied(self.server), **heads}


SERIAL: Mapping[str, type[Serial]] = {"fedavg": Serial, "fedbn": SerialFedBN, "fedcp": SerialFedCP}


def apart(a: Tensor, b: Tensor) -> Tensor:
    """Squared maximum mean discrepancy of two batches of features, with four Gaussian kernels."""
    both = torch.cat([a, b])
    squares = (both[:, None] - both[None]).square().sum(dim=2)
    kernel = sum((-squares / (2 * width)).exp() for width in (10, 15, 20, 50))
    assert isinstance(kernel, Tensor)
    n = len(a)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


@torch.no_grad()
def mean(states: Mapping[str, State], sizes: Mapping[str, int]) -> State:
    """The weighted mean; what is not a float is the first one's."""
    total, first = sum(sizes.values()), next(iter(states.values()))
    result = {}
    for name, tensor in first.items():
        if tensor.is_floating_point():
            result[name] = sum(
                (sizes[client] / total * state[name] for client, state in states.items()), torch.zeros_like(tensor)
            )
        else:
            result[name] = tensor
    return result


def copied(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}
