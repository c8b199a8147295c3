"""FedCP (Zhang et al. 2023): a policy splits every feature between a frozen global head h and a personal head h_i.

Eq. (8): CE(h(r z) + h_i(s z)) + lam MMD(z, f(x)), where z = f_i(x), (r, s) = softmax over pairs of CPN_i(v_i z) and
v_i is the normalised sum of the rows of h_i (of several layers: of their product), taken on arrival. Sent: f_i, CPN_i,
(h + h_i) / 2. Batch norm's statistics stay at home; in the frozen head (the paper's has none) they are those of h_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, get, leaves, mean, norm_leaves, put, train

HYPER = {"lam": 2.0}
RELATIVE = ("fedcp", {"lam": 1.5})
TABLE_1 = ["cs", "ss", "cs ss", "gfm", "cpn", "cpn gfm", "cpn gh", "cpn gfm gh"]
VARIANTS = [
    *({"without": row.split()} for row in TABLE_1),
    {"gumbel": "training"},
    {"first_vector": "random"},
    {"gumbel": "training", "without": ["ss", "gfm"]},
    *({"cpn_layers": layers, "lam": 0.5} for layers in (2, 3, 4)),
    *({"cpn_norm": norm} for norm in ("batch", "group")),
    *({"cpn_activation": activation} for activation in ("tanh", "sigmoid")),
    {"cpn_layers": 2, "cpn_norm": "batch", "cpn_activation": "tanh"},
]
NORMS = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "group": lambda width: nn.GroupNorm(2, width)}


class Policy(nn.Module):
    """Appendix C: layers K to K with a ReLU after each, then K to 2K, a norm and an activation."""

    def __init__(self, k: int, layers: int, norm: str, activation: str, first: nn.Module) -> None:
        super().__init__()
        widths = [k] * layers + [2 * k]
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.norm = NORMS[norm](2 * k)
        self.activation = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[activation]
        for mine, given in zip(self.parameters(), first.parameters(), strict=True):
            mine.data.copy_(given)

    def forward(self, c: Tensor) -> tuple[Tensor, Tensor]:
        *front, last = self.layers
        for layer in front:
            c = layer(c).relu()
        return self.activation(self.norm(last(c))).chunk(2, dim=1)  # a_1 for r, a_2 for s


class Client(nn.Module):
    """f_i (body), h_i (head), the received h (common), CPN_i (policy) and v_i."""

    def __init__(self, model: nn.Module, built: nn.Module, without: set[str], *shape: int | str) -> None:
        super().__init__()
        self.body, self.head, self.without, self.keep = model.body, model.head, without, False
        self.common = None if "gh" in without else deepcopy(model.head).requires_grad_(False)
        self.v = None if "cpn" in without else built.client["v"].clone()
        self.policy = None if "cpn" in without else Policy(len(self.v), *shape, built.policy)

    def arrive(self, w: dict[str, Tensor]) -> None:
        if self.common is not None:
            put(self.common, get(self.head, leaves(self.head)))
        put(self, w)
        if not {"cs", "ss"} <= self.without and not self.keep:
            rows = torch.eye(len(list(self.head.parameters())[-1]), dtype=next(self.head.parameters()).dtype)
            for part in reversed([part for part in self.head.modules() if isinstance(part, nn.Linear)]):
                rows = rows @ part.weight.detach()
            self.v = rows.sum(dim=0) / rows.sum(dim=0).norm()

    def out(self, z: Tensor, noise: Tensor | None = None) -> Tensor:
        if self.common is None:
            return self.head(z)
        if self.policy is None:
            return self.common(z) + self.head(z)
        v, out = self.v.expand_as(z), self.without
        a, b = self.policy(v if "ss" in out else z if "cs" in out else v * z)
        if noise is not None:
            a, b = a - (-noise[:, 0].log()).log(), b - (-noise[:, 1].log()).log()
        r = a.exp() / (a.exp() + b.exp())
        return self.common(r * z) + self.head((1 - r) * z)


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Biased, over the rows of a batch; four Gaussian kernels of variance 10, 15, 20 and 50."""

    def k(u: Tensor, w: Tensor) -> Tensor:
        d = (u[:, None] - w[None]).square().sum(dim=2)
        return sum((-d / (2 * q)).exp().mean() for q in (10, 15, 20, 50))

    return k(a, a) + k(b, b) - 2 * k(a, b)


def local(me: Client, lam: float, noise: Callable[[int, str, tuple[int, ...]], Tensor] | None) -> Loss:
    teacher, steps = deepcopy(me.body).train(), count()
    me.train()
    if me.common is not None:
        me.common.eval()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = me.body(x)
        scores = me.out(z, noise(next(steps), "policy", (len(z), 2, z.shape[1])) if noise else None)
        far = 0.0 if "gfm" in me.without else lam * mmd(z, teacher(x).detach())
        return cross_entropy(scores, y) + far

    return loss


def run(
    setup: Setup,
    lam: float = 1.0,
    without: Sequence[str] = (),
    gumbel: str = "never",
    first_vector: str = "head",
    cpn_layers: int = 1,
    cpn_norm: str = "layer",
    cpn_activation: str = "relu",
) -> list[Scorer]:
    shape = (cpn_layers, cpn_norm, cpn_activation)
    pairs = zip(deepcopy(setup.models), setup.built, strict=True)
    clients = [Client(model, built, set(without), *shape) for model, built in pairs]
    for client in clients:
        client.keep = first_vector == "random"  # until it has trained
    home = norm_leaves(clients[0], ("running_mean", "running_var"))
    names = [n for part in ("body.", "policy.", "common.") for n in leaves(clients[0], part) if n not in home]
    w = get(clients[0], names)
    for t in range(setup.rounds):
        who, sent = setup.participants(t), []
        for i in who:
            me = clients[i]
            me.arrive(w)
            me.keep = False
            noise = None if gumbel == "never" else partial(setup.noise, t, i, "train")
            train(setup, t, i, [p for p in me.parameters() if p.requires_grad], local(me, lam, noise))
            own = {f"common.{n}": value for n, value in me.head.state_dict().items()}
            sent.append({n: (v + own[n]) / 2 if n in own else v for n, v in get(me, names).items()})  # Eq. (6)
        w = mean(sent, [setup.samples[i] for i in who])
    for me in clients:
        me.arrive(w)
    return [Scorer(me, lambda me, x: me.out(me.body(x))) for me in clients]
