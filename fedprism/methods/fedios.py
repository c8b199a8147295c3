"""FediOS: generic and personal features live in orthogonal subspaces that are fixed before training begins."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism import keys
from fedprism.config import positive, setting
from fedprism.errors import ConfigError, unknown
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Draw, Info, Me, Method, Net, Now, Parts, Seen, Tensors
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
        "dimensions of a subspace; null: features / (max_clients + 1) rounded down, or of random ones a quarter",
        positive,
        "1 or more",
    )
    max_clients: int | None = setting(
        None, "subspaces to keep ready for clients that come later; null: as many as there are", positive, "1 or more"
    )

    def __post_init__(self) -> None:
        if self.rank is not None and self.subspaces == "tall":
            raise ConfigError("method.rank is for orthogonal and random subspaces; with tall ones all features stay.")

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        net, width = arch.model(seed), arch.width
        parts: dict[str, nn.Module] = {"net": net}
        if "personal" not in self.without:
            parts["personal"] = copy.deepcopy(net.body)
            initialise(parts["personal"], seed, "personal")
        if "projections" not in self.without:
            places = self.places(info)
            mine = {"generic": 0, "personal": self.place(client, info)}
            basis = {which: self.basis(place, places, arch, seed) for which, place in mine.items()}
            if self.subspaces == "tall":
                basis |= {f"{which}_block": torch.eye(places + 1)[place] for which, place in mine.items()}
                first: Net = net.head[0]
                net.head[0] = fresh(lambda: nn.Linear((places + 1) * width, first.out_features), seed, "wide")
            parts["basis"] = Tensors(basis)
        return Parts(**parts)

    # --- the projections: made from the seed, kept with the client, neither sent nor trained -------------------------

    def places(self, info: Info) -> int:
        """How many personal subspaces there are."""
        count = len(info.clients)
        if self.max_clients is not None and self.max_clients < count:
            raise ConfigError(
                f"method.max_clients is {self.max_clients}, but there are {count} clients; set it higher."
            )
        return self.max_clients or count

    def place(self, client: str | None, info: Info) -> int:
        """Which subspace is a client's; 0 is the generic one."""
        known, places = (*info.clients, *info.later), self.places(info)
        if client is not None and client not in known:
            raise ConfigError(unknown("client", client, known))
        mine = known.index(client) + 1 if client is not None else 1
        if mine > places and self.subspaces != "random":
            raise ConfigError(
                f"{client!r} cannot join: FediOS keeps a subspace a client, and all {places} are taken. Train with "
                f"method.max_clients of {mine} or more from the start, or with method.subspaces: random."
            )
        return mine

    def basis(self, place: int, places: int, arch: Arch, seed: int) -> Tensor:
        """O `[width, rank]` with orthonormal columns: P = O O^T. In `tall`, P = E O^T, and E embeds a block."""
        width, blocks, dtype = arch.width, places + 1, torch.get_default_dtype()
        if self.subspaces == "tall":
            return _orthogonal(seed, f"block {place}", width).to(dtype)
        if self.subspaces == "random":
            rank = self.rank or max(1, width // 4)
            if rank >= width:
                raise ConfigError(f"method.rank is {rank}, but {arch.name} has {width} features; a subspace has fewer.")
            return _orthogonal(seed, f"subspace {place}", width)[:, :rank].to(dtype)
        rank = self.rank or width // blocks
        if rank < 1 or rank * blocks > width:
            wanted = "one dimension" if self.rank is None else f"method.rank of {self.rank}"
            raise ConfigError(
                f"FediOS needs {blocks} orthogonal subspaces (one a client and the generic one) of {wanted} or more, "
                f"and {arch.name} has {width} features. Choose a wider model, fewer clients or a smaller method.rank; "
                "or set method.subspaces to random (independent of each other, not orthogonal) or tall (a wider head)."
            )
        return _orthogonal(seed, "projections", width)[:, place * rank : (place + 1) * rank].to(dtype)

    def project(self, model: Net, z: Tensor, which: str) -> Tensor:
        """P z."""
        if "projections" in self.without:
            return z
        o = model.basis[which]
        if self.subspaces == "tall":
            return (model.basis[f"{which}_block"][:, None] * (z @ o)[:, None, :]).flatten(1)
        return (z @ o) @ o.T

    # --- training and inference --------------------------------------------------------------------------------------

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "net")

    def look(self, model: Net, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Scores of the fused features, of each path, and |inner products| an image, raw and projected."""
        z = model.net.body(x)
        a = self.project(model, z, "generic")  # Eq. 8
        if "personal" in self.without:
            scores = model.net.head(a)
            return scores, {"generic": scores}, {}
        own = model.personal(x)
        b = self.project(model, own, "personal")  # Eq. 8
        fused = self.alpha * a + (1 - self.alpha) * b  # Eq. 9
        paths = {"generic": model.net.head(a), "personal": model.net.head(b)}
        return model.net.head(fused), paths, {"raw": (z * own).sum(1).abs(), "projected": (a * b).sum(1).abs()}

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        fused, paths, inner = self.look(me.model, x)
        loss = cross_entropy(fused, y) + sum(cross_entropy(scores, y) for scores in paths.values())  # Eq. 10
        for name, value in inner.items():
            me.log(f"inner/{name}", value)
        if inner and "re" not in self.without:
            loss = loss + self.lam * inner[self.re_on].mean()  # Eq. 11 and 12
        return loss

    def examine(self, model: Net, x: Tensor, draw: Draw) -> Seen:
        fused, paths, inner = self.look(model, x)
        return Seen(fused, paths, {f"inner/{name}": value for name, value in inner.items()})

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return self.examine(model, x, draw).scores

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.net.head(self.project(model, model.net.body(x), "generic"))


@lru_cache(maxsize=8)
def _orthogonal(seed: int, name: str, width: int) -> Tensor:
    """A random orthogonal matrix, uniformly distributed: Q of a Gaussian, with the signs that make R's positive."""
    noise = torch.randn(width, width, dtype=torch.float64, generator=keys.generator(seed, "projections", name))
    q, r = torch.linalg.qr(noise)
    return q * r.diagonal().sign()
