"""FediOS: generic and personal features are in orthogonal subspaces, which are fixed before training."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism import keys
from fedprism.config import positive, setting
from fedprism.errors import ConfigError
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Output, Parts, Tensors
from fedprism.models import fresh, initialise


@register
@dataclass(frozen=True)
class FediOS(Method):
    id = "fedios"
    paper = (
        "Gao et al., FediOS: Decoupling Orthogonal Subspaces for Personalization in Feature-skew Federated Learning, "
        "preprint 2023"
    )
    idea = "A shared and a personal body write into fixed subspaces that are orthogonal; one shared head reads both."
    shares = "the generic body and the head"
    stays = "the personal body"
    group = "two models"
    broadcast = "all"
    moment = "trained"
    has_global = True
    shows = {
        "generic": "the head on generic features alone",
        "personal": "the head on personal features alone",
        "inner/raw": "size of the inner product of both bodies' features",
        "inner/projected": "the same after the projections: zero but for rounding, if they are orthogonal",
    }

    alpha: float = setting(0.5, "share of the generic features when fused", lambda v: 0 <= v <= 1, "from 0 to 1")
    lam: float = setting(0.1, "weight of the orthogonality loss; digits: 0", lambda v: v >= 0, "0 or more")
    without: tuple[Literal["projections", "personal", "re"], ...] = setting(
        (), "parts to leave out (Table 7): the projections, the personal bodies, the orthogonality loss"
    )
    re_on: Literal["projected", "raw"] = setting(
        "projected", "features of the orthogonality loss; projected ones (as printed) are orthogonal already"
    )
    subspaces: Literal["orthogonal", "random", "tall"] = setting(
        "orthogonal", "blocks of one orthogonal matrix; independent random ones; or (N + 1) K dimensions"
    )
    rank: int | None = setting(
        None,
        "dimensions of a subspace; null: features / (max_clients + 1) rounded down, or a quarter for random ones",
        positive,
        "1 or more",
    )
    max_clients: int | None = setting(
        None, "number of subspaces, to allow for later clients; null: the number of clients", positive, "1 or more"
    )

    def __post_init__(self) -> None:
        if self.rank is not None and self.subspaces == "tall":
            raise ConfigError("method.rank is for orthogonal and random subspaces; with tall ones all features stay.")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        net, width = arch.model(seed), arch.width
        parts: dict[str, nn.Module] = {"net": net}
        if "personal" not in self.without:
            parts["personal"] = copy.deepcopy(net.body)
            initialise(parts["personal"], seed, "personal")
        if "projections" not in self.without:
            places = self.max_clients or len(info.clients)
            mine = {"generic": 0, "personal": self.place(client_id, info, places)}
            basis = {which: self.basis(place, places + 1, arch, seed) for which, place in mine.items()}
            if self.subspaces == "tall":
                basis |= {f"{which}_block": torch.eye(places + 1)[place] for which, place in mine.items()}
                first: Net = net.head[0]
                net.head[0] = fresh(lambda: nn.Linear((places + 1) * width, first.out_features), seed, "wide")
            parts["basis"] = Tensors(basis)
        return Parts(**parts)

    # --- the projections: made from the seed, stored at the client, neither sent nor trained -------------------------

    def place(self, client_id: str | None, info: Info, places: int) -> int:
        """The index of a client's subspace (for the server, the last client's); 0 is the generic one."""
        mine = info.index[client_id or info.clients[-1]] + 1
        if mine > places and self.subspaces != "random":
            raise ConfigError(
                f"{client_id!r} cannot join: FediOS has one subspace per client, and all {places} are taken. "
                f"Train with method.max_clients of {mine} or more from the start, or with method.subspaces: random."
            )
        return mine

    def basis(self, place: int, blocks: int, arch: Arch, seed: int) -> Tensor:
        """O `[width, rank]` with orthonormal columns: P = O O^T. In `tall`, P = E O^T, and E embeds a block."""
        width, dtype = arch.width, torch.get_default_dtype()
        if self.subspaces == "tall":
            return keys.orthogonal(width, width, seed, "block", place).to(dtype)
        rank = self.rank or (max(1, width // 4) if self.subspaces == "random" else width // blocks)
        if self.subspaces == "random":
            if rank >= width:
                raise ConfigError(f"method.rank is {rank}, but {arch.name} has {width} features; a subspace has fewer.")
            return keys.orthogonal(width, rank, seed, "subspace", place).to(dtype)
        if rank < 1 or rank * blocks > width:
            raise ConfigError(
                f"FediOS needs {blocks} orthogonal subspaces (one per client, and the generic one): with "
                f"{max(rank, 1)} dimensions each that is {blocks * max(rank, 1)}, and {arch.name} has {width} "
                f"features. Choose a wider model, fewer clients{' or a smaller method.rank' if self.rank else ''}; "
                "or set method.subspaces to random (independent of each other, not orthogonal) or tall (a wider head)."
            )
        return keys.orthogonal(width, width, seed, "projections")[:, place * rank : (place + 1) * rank].to(dtype)

    def project(self, model: Net, z: Tensor, which: str) -> Tensor:
        """P z."""
        if "projections" in self.without:
            return z
        o = model.basis[which]
        if self.subspaces == "tall":
            return (model.basis[f"{which}_block"][:, None] * (z @ o)[:, None, :]).flatten(1)
        return (z @ o) @ o.T

    # --- training and inference --------------------------------------------------------------------------------------

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net")

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        z = model.net.body(x)
        a = self.project(model, z, "generic")  # Eq. 8
        if "personal" in self.without:
            scores = model.net.head(a)
            return Output(scores, {"generic": scores})
        own = model.personal(x)
        b = self.project(model, own, "personal")  # Eq. 8
        branches = {"generic": model.net.head(a), "personal": model.net.head(b)}
        inner = {"inner/raw": (z * own).sum(1).abs(), "inner/projected": (a * b).sum(1).abs()}
        return Output(model.net.head(self.alpha * a + (1 - self.alpha) * b), branches, inner)  # Eq. 9

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        output = self.forward_details(client.model, x, client.draw)
        branches = sum(cross_entropy(scores, y) for scores in output.branches.values())
        loss = cross_entropy(output.scores, y) + branches  # Eq. 10
        for name, value in output.means.items():
            client.log(name, value)
        if output.means and "re" not in self.without:
            loss = loss + self.lam * output.means[f"inner/{self.re_on}"].mean()  # Eq. 11 and 12
        return loss

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.net.head(self.project(model, model.net.body(x), "generic"))
