"""pFedVEM (Zhu et al. 2023): the fully connected layers of a client's head are Gaussian, q_k = N(mu_k, sigma_k^2).

sigma_k = sigma log(1 + exp(s_k / sigma)), at first sigma. All else (the body, norm layers in the head) is theta, an
ordinary number each. A round:
M-step      rho_k^2 = mean over the head's d entries of sigma_k^2 + (mu_k - m)^2, m: as received
E-step      full-batch descent on sum_x E_q[CE] + kl KL(q_k || N(m, rho_k^2)) over mu_k and s_k, theta frozen, with the
            learning rate head_lr / n_k (that is head_lr for the mean over images)
theta       minibatches, E_q[CE], q_k frozen
server      theta <- sum n_k theta_k / sum n_k,  m <- sum (mu_k / rho_k^2) / sum (1 / rho_k^2), over participants
All clients train in every round and are sent theta and m. E_q is the mean over some sampled heads; the test takes mu_k.
Where a client has more than head_batch images, steps are on minibatches, here those of theta.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import count, islice

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, linear

from .common import Scorer, Setup, get, leaves, mean, put, train

HYPER = {"samples": 3, "sigma": 0.2, "head_steps": 4, "head_lr": 0.1, "kl": 1.0}
RELATIVE = ("pfedvem", {**HYPER, "kl": 0.8})
VARIANTS = [
    {**HYPER, "kl": 0.0},
    {**HYPER, "samples": 1, "head_steps": 1},
    {**HYPER, "sigma": 1.0, "head_lr": None},
    {**HYPER, "head_batch": 11},  # the size of theta's batches
    {**HYPER, "head_batch": 11, "head_steps": 9},
]
Noise = Callable[[str, tuple[int, ...]], Tensor]  # uniform; a row for each head, its entries layer by layer


class Client:
    """theta and mu in `model`, s beside them by the layer's name."""

    def __init__(self, model: nn.Module, sigma: float) -> None:
        self.model, self.rho2 = model, None
        self.layers = {name: part for name, part in model.head.named_children() if isinstance(part, nn.Linear)}
        self.mu = {f"{n}.{leaf}": p for n, part in self.layers.items() for leaf, p in part.named_parameters()}
        self.sigma, first = sigma, sigma * torch.tensor(1.0).expm1().log()
        self.s = {name: nn.Parameter(torch.zeros_like(p) + first) for name, p in self.mu.items()}
        heads = {f"head.{name}" for name in self.mu}
        self.names = [name for name in leaves(model) if name not in heads]
        self.theta = [p for name, p in model.named_parameters() if name not in heads]

    def q(self, name: str) -> Normal:
        return Normal(self.mu[name], self.sigma * (1 + (self.s[name] / self.sigma).exp()).log())

    @torch.no_grad()
    def m_step(self, m: dict[str, Tensor]) -> None:
        squares = [self.q(n).variance + (self.mu[n] - m[n]) ** 2 for n in m]
        self.rho2 = torch.cat([each.reshape(-1) for each in squares]).mean()

    def expected(self, x: Tensor, y: Tensor, samples: int, noise: Noise) -> Tensor:
        """The mean over sampled heads of the mean cross-entropy."""
        z, total, sizes = self.model.body(x), 0.0, [mu.numel() for mu in self.mu.values()]
        for uniform in noise("head", (samples, sum(sizes))):
            pieces = dict(zip(self.mu, Normal(0.0, 1.0).icdf(uniform).split(sizes), strict=True))
            w = {n: self.q(n).loc + self.q(n).scale * pieces[n].reshape(mu.shape) for n, mu in self.mu.items()}
            h = z
            for name, part in self.model.head.named_children():
                h = linear(h, w[f"{name}.weight"], w[f"{name}.bias"]) if name in self.layers else part(h)
            total = total + cross_entropy(h, y) / samples
        return total

    def divergence(self, m: dict[str, Tensor]) -> Tensor:
        return sum(kl_divergence(self.q(n), Normal(m[n], self.rho2.sqrt())).sum() for n in m)


def run(
    setup: Setup,
    samples: int = 5,
    sigma: float = 0.1,
    head_steps: int = 10,
    head_lr: float | None = None,
    kl: float = 1.0,
    head_batch: int = 1024,
) -> list[Scorer]:
    clients = [Client(model, sigma) for model in deepcopy(setup.models)]
    theta = get(clients[0].model, clients[0].names)
    m = {name: mu.detach().clone() for name, mu in clients[0].mu.items()}

    def fit_head(me: Client, t: int, i: int) -> None:
        a, full = len(setup.batches(t, i, 0)), setup.samples[i] <= head_batch
        me.model.eval()
        me.m_step(m)
        sgd = torch.optim.SGD(
            [*me.mu.values(), *me.s.values()], lr=(head_lr or setup.lr) / setup.samples[i], momentum=setup.momentum
        )
        # Noise is counted by minibatches of an epoch: a full batch is the first of an epoch that has no other.
        every = ((e * a + b, xy) for e in count() for b, xy in enumerate(setup.batches(t, i, e)))
        steps = ((e * a, setup.train[i]) for e in count()) if full else every
        for step, (x, y) in islice(steps, head_steps):
            sgd.zero_grad()
            loss = setup.samples[i] * me.expected(
                x, y, samples, lambda name, shape, step=step: setup.noise(t, i, "head", step, name, shape)
            )
            (loss + kl * me.divergence(m)).backward()
            sgd.step()

    def fit_theta(me: Client, t: int, i: int) -> None:
        steps = count()
        me.model.train()

        def loss(x: Tensor, y: Tensor) -> Tensor:
            step = next(steps)
            return me.expected(x, y, samples, lambda name, shape: setup.noise(t, i, "body", step, name, shape))

        train(setup, t, i, me.theta, loss)

    for t in range(setup.rounds):
        for i, me in enumerate(clients):
            put(me.model, theta)
            fit_head(me, t, i)
            fit_theta(me, t, i)
        who = setup.participants(t)
        theta = mean([get(clients[i].model, clients[0].names) for i in who], [setup.samples[i] for i in who])
        m = mean([{n: mu.detach() for n, mu in clients[i].mu.items()} for i in who], [1 / clients[i].rho2 for i in who])
    for me in clients:
        put(me.model, theta)
    return [Scorer(me.model) for me in clients]
