"""The baseline: a handwritten serial loop over the clients for each measured method, without an engine.

Initial weights, batch order and noise use the same keys as the engines, so that results can be compared. PyTorch's
defaults apply: no deterministic algorithms, and TF32 if the other side uses it. Images are on the device as bytes and
batches are gathered there. Methods have their default settings.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, normalize

from fedprism import keys
from fedprism.bench.machine import wait
from fedprism.config import Config
from fedprism.federation import Federation
from fedprism.methods import make
from fedprism.methods.base import Info
from fedprism.methods.collecting import client_key
from fedprism.round.noise import Noise

LARGE = 1024  # images per evaluation batch

State = dict[str, Tensor]


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds of one round."""

    train: float  # download, training, upload
    aggregate: float
    evaluate: float
    whole: float


@contextmanager
def defaults(tf32: bool, threads: int) -> Iterator[None]:
    """PyTorch's defaults, except for TF32 and the number of threads."""
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

    by_samples = True  # False: a plain mean
    tests_trained = False  # test a client's model after training (True) or at the end of the round (False)

    def __init__(self, config: Config, info: Info, federation: Federation, device: torch.device) -> None:
        self.config, self.info, self.device = config, info, device
        last = config.run.memory_format == "channels_last"
        self.layout = torch.channels_last if last else torch.contiguous_format
        clients = federation.clients.items()
        self.train = {name: (data.train.x.to(device), data.train.y.to(device)) for name, data in clients}
        self.test = {name: (data.test.x.to(device), data.test.y.to(device)) for name, data in clients}
        self.accuracy: dict[str, float] = {}
        self.begin()

    # --- methods override these --------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.model = self.placed(self.info.arch.model(self.info.seed))

    def train_client(self, round: int, client: str) -> State:
        """Run one client's round and return its upload."""
        model = copy.deepcopy(self.model).train()
        self.fit(round, client, model.parameters(), lambda x, y: cross_entropy(model(x), y))
        return model.state_dict()

    def arrive(self, mean: State) -> None:
        """Store the new average."""
        self.model.load_state_dict({**self.model.state_dict(), **mean})

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        return self.model.eval()

    def weights(self) -> dict[str, State]:
        """Copies of the server's leaves and of each client's local leaves."""
        return {"server": copied(self.model.state_dict())}

    # --- common to all methods ---------------------------------------------------------------------------------------

    def one_round(self, round: int) -> RoundSeconds:
        begun = time.perf_counter()
        sent = {}
        for client in self.train:
            sent[client] = self.train_client(round, client)
            if self.tests_trained:
                self.accuracy[client] = self.evaluate(client)
        wait(self.device)
        trained = time.perf_counter()
        sizes = {client: len(y) if self.by_samples else 1 for client, (_, y) in self.train.items()}
        self.arrive(mean(sent, sizes))
        wait(self.device)
        averaged = time.perf_counter()
        if not self.tests_trained:
            self.accuracy = {client: self.evaluate(client) for client in self.test}
        ended = time.perf_counter()
        return RoundSeconds(trained - begun, averaged - trained, ended - averaged, ended - begun)

    def fit(
        self,
        round: int,
        client: str,
        parameters: Iterable[nn.Parameter],
        loss: Callable[[Tensor, Tensor], Tensor],
        before_step: Callable[[], None] = lambda: None,
    ) -> int:
        """Train one epoch with SGD and return the number of steps."""
        settings, steps = self.config.train.optimizer, 0
        optimizer = torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)
        images, labels = self.train[client]
        for rows in self.batches(round, client, len(labels)):
            optimizer.zero_grad()
            loss(self.inputs(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            before_step()
            optimizer.step()
            steps += 1
        return steps

    @torch.no_grad()
    def evaluate(self, client: str) -> float:
        score, (images, labels) = self.scores(client), self.test[client]
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for x, y in zip(torch.split(images, LARGE), torch.split(labels, LARGE), strict=True):
            right += (score(self.inputs(x)).argmax(dim=1) == y).sum()
        return right.item() / len(labels)

    def batches(self, round: int, client: str, count: int) -> Iterator[Tensor]:
        """Batches of one epoch in random order; a single leftover image joins the last batch."""
        order = torch.randperm(count, generator=keys.generator(self.info.seed, "batches", "", round, client, 0))
        order, size = order.to(self.device), self.config.train.batch_size
        ends = [*range(size, count, size), count]
        if len(ends) > 1 and ends[-1] - ends[-2] == 1:
            del ends[-2]
        for start, end in zip([0, *ends], ends, strict=False):
            yield order[start:end]

    def inputs(self, images: Tensor) -> Tensor:
        return (images.float() / 127.5 - 1).contiguous(memory_format=self.layout)

    def placed(self, module: nn.Module) -> nn.Module:
        return module.to(self.device, memory_format=self.layout)  # type: ignore[call-overload]


class SerialPersonal(Serial):
    """One module per client; some of its parts are shared, and the server stores their mean."""

    parts: tuple[str, ...] = ("",)  # prefixes of the leaves that are sent; batch norm stays local

    def begin(self) -> None:
        self.method: Any = make(self.config.method)
        self.clients: dict[str, Any] = {
            client: self.placed(self.method.build(self.info.arch, client, self.info, self.info.seed))
            for client in self.train
        }
        first = next(iter(self.clients.values()))
        self.shared = self.travelling(first)
        self.server = self.sent(first)

    def travelling(self, model: Any) -> list[str]:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
        norms = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, kinds))
        return [n for n in model.state_dict() if n.startswith(self.parts) and not n.startswith(norms)]

    def sent(self, model: Any) -> State:
        state = model.state_dict()
        return copied({name: state[name] for name in self.shared})

    def received(self, client: str) -> Any:
        model = self.clients[client]
        model.load_state_dict(self.server, strict=False)
        return model

    def arrive(self, mean: State) -> None:
        self.server = mean

    def weights(self) -> dict[str, State]:
        own = {
            client: copied({n: t for n, t in model.state_dict().items() if n not in self.shared})
            for client, model in self.clients.items()
        }
        return {"server": copied(self.server), **own}


class SerialFedBN(SerialPersonal):
    """FedBN: one model per client, which receives everything but batch norm; a plain mean."""

    by_samples = False

    def train_client(self, round: int, client: str) -> State:
        model = self.received(client).train()
        self.fit(round, client, model.parameters(), lambda x, y: cross_entropy(model(x), y))
        return self.sent(model)

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        return self.received(client).eval()


class SerialFedCP(SerialPersonal):
    """FedCP: a policy divides each image's features between a frozen global head and the client's own."""

    parts = ("net.body.", "policy.", "common.")

    def begin(self) -> None:
        super().begin()
        for model in self.clients.values():
            model.common.requires_grad_(False)

    def travelling(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if name.startswith(self.parts)]

    def received(self, client: str) -> Any:
        model = super().received(client)
        model.client["v"].copy_(normalize(model.net.head[-1].weight.detach().sum(0), dim=0))
        return model

    def score(self, model: Any, z: Tensor) -> Tensor:
        share = model.policy(model.client["v"] * z).view(len(z), 2, -1).softmax(dim=1)
        return model.common(share[:, 0] * z) + model.net.head(share[:, 1] * z)

    def train_client(self, round: int, client: str) -> State:
        model = self.received(client).train()
        snapshot = copy.deepcopy(model.net.body).requires_grad_(False)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = model.net.body(x)
            return cross_entropy(self.score(model, z), y) + self.method.lam * apart(z, snapshot(x))

        self.fit(round, client, [*model.net.parameters(), *model.policy.parameters()], loss)
        sent, own = self.sent(model), model.net.head.state_dict()
        halves = {n: (t + own[n.removeprefix("common.")]) / 2 for n, t in sent.items() if n.startswith("common.")}
        return {**sent, **halves}

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        model = self.received(client).eval()
        return lambda x: self.score(model, model.net.body(x))


class SerialDitto(SerialPersonal):
    """Ditto: the common model, then a personal one that is pulled towards the received model."""

    by_samples, parts = False, ("common.",)

    def train_client(self, round: int, client: str) -> State:
        model = self.received(client).train()
        anchor = [parameter.detach().clone() for parameter in model.common.parameters()]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            pairs = zip(model.personal.parameters(), anchor, strict=True)
            pull = sum((mine - received).square().sum() for mine, received in pairs)
            return cross_entropy(model.personal(x), y) + self.method.lam / 2 * pull

        self.fit(round, client, model.common.parameters(), lambda x, y: cross_entropy(model.common(x), y))
        self.fit(round, client, model.personal.parameters(), loss)
        return self.sent(model)

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        return self.clients[client].personal.eval()


class SerialScaffold(SerialPersonal):
    """SCAFFOLD: every gradient is corrected by the server's control variate minus the client's."""

    by_samples, parts = False, ("net.",)

    def begin(self) -> None:
        super().begin()
        net = next(iter(self.clients.values())).net
        self.server |= {f"c.{name}": torch.zeros_like(each) for name, each in net.named_parameters()}

    def train_client(self, round: int, client: str) -> State:
        model = self.received(client).train()
        mine, weights = model.control.tensors(), dict(model.net.named_parameters())
        before = copied(weights)
        correction = {name: self.server[f"c.{name}"] - mine[name] for name in weights}

        def correct() -> None:
            for name, weight in weights.items():
                weight.grad.add_(correction[name])

        steps = self.fit(round, client, weights.values(), lambda x, y: cross_entropy(model.net(x), y), correct)
        rate = steps * self.config.train.optimizer.lr
        change = {n: (before[n] - w.detach()) / rate - correction[n] - mine[n] for n, w in weights.items()}
        for name, each in change.items():
            mine[name].add_(each)
        return {**self.sent(model), **{f"c.{name}": each for name, each in change.items()}}

    def arrive(self, mean: State) -> None:
        control = {name: each + mean[name] for name, each in self.server.items() if name.startswith("c.")}
        self.server = {**mean, **control}

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        return self.received(client).net.eval()


class SerialFedPick(SerialPersonal):
    """FedPick: a mask network picks the features that a personal head sees; both heads learn from each other."""

    parts = ("net.",)

    def picked(self, model: Any, z: Tensor, noise: Tensor | float) -> Tensor:
        soft = ((model.mask(z) + noise) / self.method.tau).sigmoid()
        return (soft >= self.method.threshold).float() + soft - soft.detach()

    def train_client(self, round: int, client: str) -> State:
        model, method, steps = self.received(client).train(), self.method, count()
        noise = Noise(next(model.parameters()), self.info.seed, "noise", round, client, "train", 0)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z, draw = model.net.body(x), noise.at(next(steps))
            one, two = (-(-draw(name, *z.shape).log()).log() for name in ("plus", "minus"))
            mask = self.picked(model, z, one - two)
            g, p = model.net.head(z), model.relevant(z * mask)
            u = model.irrelevant(z * (1 - mask)).log_softmax(1)
            log_g, log_p = g.log_softmax(1), p.log_softmax(1)
            apart = ((log_p.exp() - log_g.exp()) * (log_p - log_g)).sum(1).mean()  # both divergences at once
            unsure = (u.exp() * u).sum(1).mean()
            both = cross_entropy(g, y) + method.lam_lce * cross_entropy(p, y)
            return both + method.lam_ent * unsure + method.lam_dis * apart

        self.fit(round, client, model.parameters(), loss)
        return self.sent(model)

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        model = self.received(client).eval()

        def score(x: Tensor) -> Tensor:
            z = model.net.body(x)
            personal = model.relevant(z * self.picked(model, z, 0.0))
            return model.net.head(z).softmax(1) + personal.softmax(1)

        return score


class SerialFediOS(SerialPersonal):
    """FediOS: two bodies, whose features are projected into separate subspaces, and one head."""

    parts, tests_trained = ("net.",), True

    def features(self, model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Generic, personal and fused features."""
        a, b = (
            z @ o @ o.T
            for z, o in ((model.net.body(x), model.basis["generic"]), (model.personal(x), model.basis["personal"]))
        )
        return a, b, self.method.alpha * a + (1 - self.method.alpha) * b

    def train_client(self, round: int, client: str) -> State:
        model = self.received(client).train()

        def loss(x: Tensor, y: Tensor) -> Tensor:
            every = self.features(model, x)
            inner = (every[0] * every[1]).sum(1).abs().mean()
            losses = torch.stack([cross_entropy(model.net.head(z), y) for z in every])
            return losses.sum() + self.method.lam * inner

        self.fit(round, client, [*model.net.parameters(), *model.personal.parameters()], loss)
        return self.sent(model)

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        model = self.clients[client].eval()
        return lambda x: model.net.head(self.features(model, x)[2])


class SerialFedCO2(SerialPersonal):
    """Fed-CO2: an online and an offline model teach each other, then learn under all other clients' heads."""

    by_samples, parts = False, ("online.",)

    def begin(self) -> None:
        super().begin()
        self.heads = {client: copy.deepcopy(model.offline.head) for client, model in self.clients.items()}
        self.next = dict(self.heads)  # those of the next round

    def train_client(self, round: int, client: str) -> State:
        model = self.received(client).train()
        teachers = [copy.deepcopy(each).eval().requires_grad_(False) for each in (model.offline, model.online)]
        others = [head.eval().requires_grad_(False) for name, head in self.heads.items() if name != client]
        for student, teacher in zip((model.online, model.offline), teachers, strict=True):
            self.fit(round, client, student.parameters(), self.taught(student, teacher))
        for branch in (model.online, model.offline):
            self.fit(round, client, branch.parameters(), self.under(branch, others))
        self.next[client] = copy.deepcopy(model.offline.head)
        return self.sent(model)

    def taught(self, student: nn.Module, teacher: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher(x).softmax(1)
            return kl_div(student(x).log_softmax(1), target, reduction="batchmean")

        return loss

    def under(self, model: Any, others: list[nn.Module]) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = model.body(x)
            total = cross_entropy(model.head(z), y)
            for head in others:
                total = total + self.method.mu * cross_entropy(head(z), y)
            return total

        return loss

    def arrive(self, mean: State) -> None:
        super().arrive(mean)
        self.heads = dict(self.next)

    def scores(self, client: str) -> Callable[[Tensor], Tensor]:
        model = self.received(client).eval()
        return lambda x: model.online(x) + model.offline(x)

    def weights(self) -> dict[str, State]:
        found = super().weights()
        for client, head in self.heads.items():
            found["server"] |= copied({client_key(client, name): each for name, each in head.state_dict().items()})
        return found


SERIAL: Mapping[str, type[Serial]] = {
    "fedavg": Serial,
    "fedbn": SerialFedBN,
    "fedcp": SerialFedCP,
    "fedpick": SerialFedPick,
    "fedios": SerialFediOS,
    "fed-co2": SerialFedCO2,
    "ditto": SerialDitto,
    "scaffold": SerialScaffold,
}


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
    """The weighted mean; tensors that are not floats are copied from the first client."""
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
