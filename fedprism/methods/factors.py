"""The base of methods that send updates, compressed by a truncated singular value decomposition (SVD)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fedprism.errors import FedprismError
from fedprism.methods import leaves
from fedprism.methods.base import Client, Context, Mean, Method, Net, Parts, State, Tensors, UploadKind, load
from fedprism.methods.states import copy_all

Factors = tuple[Tensor, Tensor, Tensor]  # U [rows, rank], S [rank], V [rank, columns...]

MARK = "|"  # between a leaf's name and U, S or V
UPDATE, OLD = "update.", "old."
ROUND = "round"  # the round in which a client last trained
SINCE = "since"  # the first round that starts from the weights after an update

# A cache of factors: the same tensor goes to many clients, and a state's tensors are never changed.
_known: MutableMapping[Tensor, tuple[float, Factors | None]] = WeakTensorKeyDictionary()


class Updates(Method):
    """FedAvg of updates: the shared weights move by the mean of the clients' updates, compressed in both directions.

    A client stores the weights that it last trained from, and the round, in the part `received` of its model (`room`).
    The server sends the last update to clients that trained from the weights before it, and the weights to all others.
    An update carries the round since which it applies: if no upload arrives, it is sent again, and a client that has
    already trained from it must not add it twice. Server and clients thus continue from the same weights, whatever the
    compression loses.
    """

    def energy(self, ctx: Context) -> float:
        """The share of energy to send of an update that is new in this round."""
        raise NotImplementedError

    # --- the server: the weights before the last update, that update, its round, and which clients have the weights --

    def server(self, model: Net, ctx: Context) -> State:
        first, has = super().server(model, ctx), torch.zeros(len(ctx.info.clients), dtype=torch.bool)
        updates = {UPDATE + name: torch.zeros_like(tensor) for name, tensor in first.items()}
        old = {OLD + name: tensor for name, tensor in first.items()}
        return {**old, **updates, SINCE: torch.tensor(0), "has": has}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        if client_id in ctx.info.clients and server["has"][ctx.info.index[client_id]]:
            return self.update(server, ctx)
        return self.moved(server, ctx)

    def update(self, server: State, ctx: Context) -> State:
        """The last update, uncompressed, and the round since which it applies."""
        return {**{UPDATE + name: server[UPDATE + name] for name in ctx.shared}, SINCE: server[SINCE]}

    def moved(self, server: State, ctx: Context) -> State:
        """The weights after the last update, as the compressed update gives them."""
        update = self.decode(self.encode(self.update(server, ctx), ctx), ctx)
        return {name: server[OLD + name] + update[UPDATE + name] for name in ctx.shared}

    def combine(self, server: State, mean: Mean, ctx: Context) -> State:
        has = torch.zeros_like(server["has"])
        has[[ctx.info.index[c] for c in mean.clients if c in ctx.info.clients]] = True
        old = {OLD + name: tensor for name, tensor in self.moved(server, ctx).items()}
        since = torch.full_like(server[SINCE], ctx.round + 1)
        return {**server, **old, **mean.state, SINCE: since, "has": has}

    # --- the client --------------------------------------------------------------------------------------------------

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def receive(self, client: Client, ctx: Context) -> None:
        down, old = ctx.download, client.model.received
        if SINCE in down:
            older = old[ROUND] < down[SINCE]
            down = {name: torch.where(older, old[name] + down[UPDATE + name], old[name]) for name in ctx.shared}
        load(client.model, down)

    def start(self, client: Client, ctx: Context) -> None:
        own = leaves.tensors(client.model)
        copy_all([client.model.received[name] for name in ctx.shared], [own[name] for name in ctx.shared])
        client.model.received[ROUND].fill_(ctx.round)

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        kinds = super().uploads(model, ctx)
        return {UPDATE + name: "factors" if kind == "weights" else kind for name, kind in kinds.items()}

    def upload(self, client: Client, ctx: Context) -> State:
        return {UPDATE + name: t - client.model.received[name] for name, t in super().upload(client, ctx).items()}

    def origin(self, ctx: Context) -> State:
        return {}  # what is sent is an update already

    # --- serialisation: updates as factors, weights unchanged --------------------------------------------------------

    def encode(self, state: State, ctx: Context) -> State:
        if not all(name.startswith(UPDATE) or name == SINCE for name in state):
            return state
        since = int(state[SINCE]) if SINCE in state else ctx.round  # a repeated update stays the same
        return factored(state, self.energy(ctx.replace(round=since)))

    def decode(self, state: State, ctx: Context) -> State:
        # Both ends know the shapes of what was sent: nobody makes the server multiply out something larger.
        return multiplied(state, {UPDATE + n.removeprefix(UPDATE): t.shape for n, t in ctx.download.items()})


def room(**parts: nn.Module) -> Tensors:
    """The part `received` of a model with these parts: the weights that a client trained from, and the round."""
    return Tensors({**Parts(**parts).state_dict(), ROUND: torch.tensor(-1)})


@torch.no_grad()
def factored(state: State, energy: float) -> State:
    """Replace each leaf of two or more dimensions by U, S and V of its matrix, which has one row per output.

    The rank is the smallest that keeps this share of the squared singular values. A leaf whose factors would not be
    smaller is unchanged; such leaves come first.
    """
    plain, factors = {}, {}
    for name, tensor in state.items():
        parts = _factors(tensor, energy) if tensor.ndim > 1 and tensor.is_floating_point() else None
        if parts is None:
            plain[name] = tensor
        else:
            factors.update({f"{name}{MARK}{part}": t for part, t in zip("USV", parts, strict=True)})
    return {**plain, **factors}


@torch.no_grad()
def multiplied(state: State, shapes: Mapping[str, torch.Size]) -> State:
    """The inverse of `factored`, except for the truncation. `shapes`: all that may be made; empty if nobody knows."""
    whole = {name: tensor for name, tensor in state.items() if MARK not in name}
    for name in dict.fromkeys(name.rpartition(MARK)[0] for name in state if MARK in name):
        u, s, v = (state[f"{name}{MARK}{part}"] for part in "USV")
        shape = torch.Size((*u.shape[:1], *v.shape[1:]))
        if shapes and shapes.get(name) != shape:
            expected = tuple(shapes[name]) if name in shapes else "no such leaf"
            raise FedprismError(f"the factors of {name!r} make {tuple(shape)}, expected {expected}")
        whole[name] = torch.tensordot(u.double() * s, v.double(), 1).to(u.dtype)  # not in TF32
    return whole


def _factors(tensor: Tensor, energy: float) -> Factors | None:
    """The factors, or None if they would not be smaller."""
    found = _known.get(tensor)
    if found is None or found[0] != energy:
        found = _known[tensor] = (energy, _decomposed(tensor, energy))
    return found[1]


def _decomposed(tensor: Tensor, energy: float) -> Factors | None:
    """By eigenvectors of the smaller Gram matrix in double precision: faster than an SVD, and as exact as weights."""
    matrix = tensor.flatten(1).double()
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    squares, left = torch.linalg.eigh(wide @ wide.T)  # in ascending order
    squares, left = squares.clamp(min=0).flip(0), left.flip(1)
    kept = squares.cumsum(0)
    rank = min(len(kept), 1 + int((kept < energy * kept[-1]).sum()))
    if rank * (sum(matrix.shape) + 1) >= matrix.numel():
        return None
    s, u = squares[:rank].sqrt(), left[:, :rank]
    v = (u.T @ wide) / s.clamp(min=torch.finfo(s.dtype).tiny).unsqueeze(1)
    u, v = (v.T, u.T) if tall else (u, v)
    made = (u, s, v.reshape(rank, *tensor.shape[1:]))
    u, s, v = (part.to(tensor.dtype).contiguous() for part in made)
    return u, s, v
