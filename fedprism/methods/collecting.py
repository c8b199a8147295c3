"""The base of methods whose server keeps something per client besides the average: heads, whole models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedprism import keys
from fedprism.methods import leaves
from fedprism.methods.base import Client, Context, Method, Net, State, Upload, UploadKind
from fedprism.methods.states import average, load


class Collecting(Method):
    """FedAvg of the shared leaves; the `collected` leaves are kept per client and sent to all others."""

    def collected(self, model: Net, ctx: Context) -> Collection[str]:
        """The leaves that the server keeps per client."""
        raise NotImplementedError

    def server(self, model: Net, ctx: Context) -> State:
        state, own = leaves.tensors(model), set(self.collected(model, ctx))
        averaged = {n: state[n].detach().clone() for n in ctx.shared if n not in own}
        first = {n: state[n].detach() for n in state if n in own}
        return averaged | {client_key(c, n): t.clone() for c in ctx.info.clients for n, t in first.items()}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        return {n: t for n, t in server.items() if owner(n) is None or owner(n) != client_id}

    def receive(self, client: Client, ctx: Context) -> None:
        load(client.model, {n: t for n, t in ctx.download.items() if owner(n) is None})

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        # A client that joined later has no entry here.
        own = {n: t for u in uploads for n, t in u.state.items() if owner(n) is not None and n in server}
        shared = [{n: t for n, t in u.state.items() if owner(n) is None} for u in uploads]
        return {**server, **average(shared, ctx.weights(uploads)), **own}

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        trained = set(leaves.parameters(model))
        return {name: "weights" if n in trained else "buffers" for name, n in self._sent(model, ctx).items()}

    def upload(self, client: Client, ctx: Context) -> State:
        state = leaves.tensors(client.model)
        return {name: state[n] for name, n in self._sent(client.model, ctx).items()}

    def _sent(self, model: Net, ctx: Context) -> dict[str, str]:
        """The leaves that a client sends, by the names under which it sends them."""
        own = set(self.collected(model, ctx))
        names = [n for n in leaves.tensors(model) if n in own or n in ctx.shared]
        return {client_key(ctx.client_id, n) if n in own else n: n for n in names}


def client_key(client_id: str | None, leaf: str) -> str:
    """The name under which a client's own leaf is sent."""
    return f"of.{client_id}/{leaf}"


def owner(name: str) -> str | None:
    """The client of a name; None for averaged leaves. Client names may contain slashes, leaf names may not.

    >>> owner(client_key("site/a.b", "head.fc2.weight")), owner("head.fc2.weight")
    ('site/a.b', None)
    """
    return name.removeprefix("of.").rpartition("/")[0] if name.startswith("of.") else None


def owners(ctx: Context) -> list[str]:
    """The clients whose leaves are in the download, in order."""
    found = {owner(name) for name in ctx.download}
    return [client_id for client_id in ctx.info.clients if client_id in found]


def epsilon_greedy(scores: Mapping[str, float], count: int, epsilon: float, *purpose: int | str) -> list[str]:
    """Pick `count` names, each time the best that is left or, with probability epsilon, a random one; ties are random.

    >>> epsilon_greedy({"a": 1.0, "b": 3.0, "c": 2.0}, 2, 0.0, "example")
    ['b', 'c']
    """
    names, draw = list(scores), keys.numpy_generator("epsilon greedy", *purpose)
    mixed = [names[i] for i in draw.permutation(len(names))]
    best, found = sorted(mixed, key=lambda name: -scores[name]), list[str]()
    for explores in draw.random(min(count, len(names))) < epsilon:
        found.append(next(name for name in (mixed if explores else best) if name not in found))
    return found
