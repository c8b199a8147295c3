"""FedAMP (Huang et al., AAAI 2021): the server mixes one model per client, mostly from models that are near it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.config import positive, setting
from fedprism.errors import ConfigError
from fedprism.methods import leaves, register
from fedprism.methods.base import Client, Context, Net, State, Upload, UploadKind
from fedprism.methods.fedprox import FedProx


@register
@dataclass(frozen=True)
class FedAMP(FedProx):  # a client trains as in FedProx, near its own received model
    id = "fedamp"
    paper = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    idea = "The server mixes a cloud model for each client, mostly of those near it; the client starts and stays there."
    shares = "the whole model; each client is sent a mixture of its own"
    group = "mixture"
    reveals = "a mixture of the other clients' models, in which near ones weigh most; the server: each model by itself"
    newcomers = "get the plain mean of all clients' last models; at the moment `adapted` they have trained one round"
    weighting = "contribution"
    moment = "trained"
    has_global = False
    shows = {**FedProx.shows, "weight/own": "share of a client's own model in its next cloud model"}

    mu: float = setting(0.1, "weight of the pull, mu/2 |w - cloud|^2: lambda/alpha", lambda v: v >= 0, "0 or more")
    sigma: float | None = setting(
        None, "scale of squared distances; null: the median of the round's uploads", positive, "above 0"
    )
    alpha: float | None = setting(None, "step of the mixing; null: sigma / clients", positive, "above 0")

    # The server keeps each client's last upload (`LEAF/all`), which clients have sent one, and the mixing weights: one
    # row per client, and the last row for new clients. Their model (`model/LEAF`) also defines the upload's kinds.
    def server(self, model: Net, ctx: Context) -> State:
        count, first = len(ctx.info.clients), super().server(model, ctx)
        if self.alpha and self.alpha * (count - 1) > (self.sigma or 0) * (1 + 1e-9):  # 0.1 * 3 is more than 0.3
            raise ConfigError(
                f"method.alpha is {self.alpha}, method.sigma {self.sigma}; with {count} clients alpha may be at most "
                f"sigma / {count - 1}, else a client's own weight could be below 0. Set both, or leave alpha at null."
            )
        mix = torch.eye(count, dtype=torch.float64)
        state = {"sent": torch.zeros(count, dtype=torch.bool), "mix": torch.cat([mix, mix[:1]])}
        kept = {f"{n}/all": torch.stack([t] * count) for n, t in first.items()}
        return {**state, **kept, **{f"model/{n}": t for n, t in first.items()}}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        row = server["mix"][ctx.info.index[client_id] if client_id in ctx.info.clients else -1]
        return {n: mixed(row, server[f"{n}/all"]) for n in ctx.shared}

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        return {f"model/{n}": kind for n, kind in super().uploads(model, ctx).items()}

    def upload(self, client: Client, ctx: Context) -> State:
        return {f"model/{n}": t for n, t in super().upload(client, ctx).items()}

    def origin(self, ctx: Context) -> State:
        return {f"model/{n}": t for n, t in ctx.download.items()}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        uploads = [u for u in uploads if u.client_id in ctx.info.clients]  # later clients have no entry
        if not uploads:
            return server
        count, sent_by = len(ctx.info.clients), [ctx.info.index[u.client_id] for u in uploads]
        at = torch.tensor(sent_by, device=server["sent"].device)
        new = {n: torch.stack([u.state[f"model/{n}"] for u in uploads]).detach() for n in ctx.shared}
        kept = {n: server[f"{n}/all"].index_copy(0, at, rows) for n, rows in new.items()}
        sent = server["sent"].index_fill(0, at, True)
        known = sent.nonzero().flatten()
        far = distances(kept[n][known] for n in leaves.parameters(ctx.info.arch.hollow()) if n in kept)
        mix = (sent.double() / len(known)).repeat(count + 1, 1)  # clients without an upload get a plain mean
        fresh = torch.isin(known, at) if len(uploads) > 1 else slice(None)  # a single upload has no distances
        sigma = self.sigma or typical(far[fresh][:, fresh])
        mix[known[:, None], known] = self.attention(far, sigma, count)
        for upload, own in zip(uploads, mix.diagonal()[at].tolist(), strict=True):
            ctx.log("weight/own", upload.client_id, own)
        plain = {f"model/{n}": mixed(mix[-1], rows) for n, rows in kept.items()}
        return {"sent": sent, "mix": mix, **{f"{n}/all": rows for n, rows in kept.items()}, **plain}

    def attention(self, far: Tensor, sigma: float, count: int) -> Tensor:
        """xi_kj = alpha A'(|w_k - w_j|^2) with A'(x) = exp(-x / sigma) / sigma; the rest is a client's own weight."""
        xi = (-far / sigma).exp() * (self.alpha / sigma if self.alpha else 1 / count)
        return xi.fill_diagonal_(0) + (1 - xi.sum(1)).clamp(min=0).diag()


def typical(far: Tensor) -> float:
    """The median of the off-diagonal entries; 1 if there are none."""
    pairs = far[~torch.eye(len(far), dtype=torch.bool, device=far.device)]
    return float(pairs.median().clamp(min=1e-300)) if len(pairs) else 1.0


def distances(models: Iterable[Tensor]) -> Tensor:
    """|w_k - w_j|^2, `[clients, clients]`, from leaves `[clients, ...]`; in double, as differences are small."""
    vectors = (rows.reshape(len(rows), -1).double() for rows in models)
    return torch.stack([torch.cdist(w, w).square() for w in vectors]).sum(0)


def mixed(weights: Tensor, rows: Tensor) -> Tensor:
    """The weighted mean of `[clients, ...]`; integer counters are rounded."""
    if not rows.is_floating_point():
        return mixed(weights, rows.double()).round().to(rows.dtype)
    return (weights.to(rows.dtype) @ rows.reshape(len(rows), -1)).view(rows.shape[1:])
