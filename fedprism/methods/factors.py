"""Updates instead of weights, and matrices as the factors of their singular value decomposition (SVD)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fedprism.methods import leaves
from fedprism.methods.base import Kind, Me, Method, Net, Now, Parts, State, Tensors, Upload, average, load
from fedprism.methods.states import copy_all

Factors = tuple[Tensor, Tensor, Tensor]  # U [rows, rank], S [rank], V [rank, columns...]

MARK = "|"  # between a leaf's name and U, S or V
UPDATE, OLD = "update.", "old."
ROUND = "round"  # in which a client last trained, beside what it trained from
SINCE = "since"  # the first round that begins with the weights after an update

# What goes to many is factored once: a state's tensors are never changed.
_known: MutableMapping[Tensor, tuple[float, Factors | None]] = WeakTensorKeyDictionary()


class Updates(Method):
    """FedAvg in updates: what was shared moves by the mean of the clients' updates, compressed on both ways.

    A client keeps what it last trained from, and in which round, in the part `received` of its model (`room`). The
    server knows who has trained from its newest weights but one, and sends the last update to those, and the weights to
    all others. With an update goes the round since which it counts: where nobody's upload arrives it is sent again, and
    who has trained from it meanwhile must not add it twice. So both go on from the same weights, whatever an update
    loses on its way.
    """

    def energy(self, now: Now) -> float:
        """Which share is sent of an update that is new in this round."""
        raise NotImplementedError

    # --- the server: the weights before their last update, that update and its round, and who has them ---------------

    def server(self, model: Net, now: Now) -> State:
        first, nobody = super().server(model, now), torch.zeros(len(now.info.clients), dtype=torch.bool)
        updates = {UPDATE + name: torch.zeros_like(tensor) for name, tensor in first.items()}
        old = {OLD + name: tensor for name, tensor in first.items()}
        return {**old, **updates, SINCE: torch.tensor(0), "has": nobody}

    def send(self, server: State, client: str | None, now: Now) -> State:
        if client in now.info.clients and server["has"][now.info.place[client]]:
            return self.update(server, now)
        return self.moved(server, now)

    def update(self, server: State, now: Now) -> State:
        """The last update, before it is compressed, and the round since which it counts."""
        return {**{UPDATE + name: server[UPDATE + name] for name in now.shared}, SINCE: server[SINCE]}

    def moved(self, server: State, now: Now) -> State:
        """The weights with their last update, as it is sent."""
        update = self.decode(self.encode(self.update(server, now), now), now)
        return {name: server[OLD + name] + update[UPDATE + name] for name in now.shared}

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        has = torch.zeros_like(server["has"])
        has[[now.info.place[u.client] for u in uploads if u.client in now.info.clients]] = True
        old = {OLD + name: tensor for name, tensor in self.moved(server, now).items()}
        since = torch.full_like(server[SINCE], now.round + 1)
        mean = average([u.state for u in uploads], now.weights(uploads))
        return {**server, **old, **mean, SINCE: since, "has": has}

    # --- the client --------------------------------------------------------------------------------------------------

    def receive(self, me: Me, now: Now) -> None:
        down, old = now.down, me.model.received
        if SINCE in down:
            older = old[ROUND] < down[SINCE]
            down = {name: torch.where(older, old[name] + down[UPDATE + name], old[name]) for name in now.shared}
        load(me.model, down)

    def start(self, me: Me, now: Now) -> None:
        own = leaves.tensors(me.model)
        copy_all([me.model.received[name] for name in now.shared], [own[name] for name in now.shared])
        me.model.received[ROUND].fill_(now.round)

    def uploads(self, model: Net, now: Now) -> Mapping[str, Kind]:
        return {UPDATE + name: kind for name, kind in super().uploads(model, now).items()}

    def upload(self, me: Me, now: Now) -> State:
        return {UPDATE + name: t - me.model.received[name] for name, t in super().upload(me, now).items()}

    # --- the wire: updates as factors, weights as they are -----------------------------------------------------------

    def encode(self, state: State, now: Now) -> State:
        if not all(name.startswith(UPDATE) or name == SINCE for name in state):
            return state
        since = int(state[SINCE]) if SINCE in state else now.round  # sent again, an update is what it was
        return factored(state, self.energy(now.but(round=since)))

    def decode(self, state: State, now: Now) -> State:
        return multiplied(state)


def room(**parts: nn.Module) -> Tensors:
    """For what a client trained from, and when: the part `received` of the model of which these are parts."""
    return Tensors({**Parts(**parts).state_dict(), ROUND: torch.tensor(-1)})


@torch.no_grad()
def factored(state: State, energy: float) -> State:
    """Every leaf of two or more dimensions as three: U, S and V of the matrix that has a row for each output.

    The rank is the smallest that keeps this share of the squared singular values. A leaf stays as it is where factors
    would take no less room; those come first.
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
def multiplied(state: State) -> State:
    """The inverse of `factored`, but for what that left out."""
    whole = {name: tensor for name, tensor in state.items() if MARK not in name}
    for name in dict.fromkeys(name.rpartition(MARK)[0] for name in state if MARK in name):
        u, s, v = (state[f"{name}{MARK}{part}"] for part in "USV")
        whole[name] = torch.tensordot(u.double() * s, v.double(), 1).to(u.dtype)  # not in TF32
    return whole


def _factors(tensor: Tensor, energy: float) -> Factors | None:
    """The factors, or None where they would take no less room."""
    found = _known.get(tensor)
    if found is None or found[0] != energy:
        found = _known[tensor] = (energy, _decomposed(tensor, energy))
    return found[1]


def _decomposed(tensor: Tensor, energy: float) -> Factors | None:
    """By eigenvectors of the smaller Gram matrix in double precision: faster than an SVD, as exact as weights are."""
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
