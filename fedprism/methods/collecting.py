"""For methods whose server keeps something of each client by itself, beside what it averages: heads, whole models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedprism import keys
from fedprism.methods import leaves
from fedprism.methods.base import Kind, Me, Method, Net, Now, State, Upload
from fedprism.methods.states import average, load


class Collecting(Method):
    """FedAvg of what is shared; but leaves that are `collected` are kept client by client, and sent to all others."""

    def collected(self, model: Net, now: Now) -> Collection[str]:
        """The leaves of which the server keeps everybody's own."""
        raise NotImplementedError

    def server(self, model: Net, now: Now) -> State:
        state, own = leaves.tensors(model), set(self.collected(model, now))
        averaged = {n: state[n].detach().clone() for n in now.shared if n not in own}
        return averaged | {of(c, n): state[n].detach().clone() for c in now.info.clients for n in state if n in own}

    def send(self, server: State, client: str | None, now: Now) -> State:
        return {n: t for n, t in server.items() if owner(n) is None or owner(n) != client}

    def receive(self, me: Me, now: Now) -> None:
        load(me.model, {n: t for n, t in now.down.items() if owner(n) is None})

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        # What a client sends that came later has no place here.
        own = {n: t for u in uploads for n, t in u.state.items() if owner(n) is not None and n in server}
        shared = [{n: t for n, t in u.state.items() if owner(n) is None} for u in uploads]
        return {**server, **average(shared, now.weights(uploads)), **own}

    def uploads(self, model: Net, now: Now) -> Mapping[str, Kind]:
        trained = set(leaves.parameters(model))
        return {name: "weights" if n in trained else "buffers" for name, n in self._sent(model, now).items()}

    def upload(self, me: Me, now: Now) -> State:
        state = leaves.tensors(me.model)
        return {name: state[n] for name, n in self._sent(me.model, now).items()}

    def _sent(self, model: Net, now: Now) -> dict[str, str]:
        """The names under which a client's leaves travel, and the leaves."""
        own = set(self.collected(model, now))
        names = [n for n in leaves.tensors(model) if n in own or n in now.shared]
        return {of(now.client, n) if n in own else n: n for n in names}


def of(client: str | None, leaf: str) -> str:
    """The name under which a client's own leaf travels."""
    return f"of.{client}/{leaf}"


def owner(name: str) -> str | None:
    """Whose a name is; None for what is averaged. A leaf's name has no slash after its client's, which may have some.

    >>> owner(of("site/a.b", "head.fc2.weight")), owner("head.fc2.weight")
    ('site/a.b', None)
    """
    return name.removeprefix("of.").rpartition("/")[0] if name.startswith("of.") else None


def owners(now: Now) -> list[str]:
    """The clients of whom something was sent, in order."""
    found = {owner(name) for name in now.down}
    return [client for client in now.info.clients if client in found]


def epsilon_greedy(scores: Mapping[str, float], count: int, epsilon: float, *purpose: int | str) -> list[str]:
    """Place by place the name of the best score that is left or, with a chance of epsilon, any; of equals, any.

    >>> epsilon_greedy({"a": 1.0, "b": 3.0, "c": 2.0}, 2, 0.0, "example")
    ['b', 'c']
    """
    names, draw = list(scores), keys.numpy_generator("epsilon greedy", *purpose)
    mixed = [names[i] for i in draw.permutation(len(names))]
    best, found = sorted(mixed, key=lambda name: -scores[name]), list[str]()
    for explores in draw.random(min(count, len(names))) < epsilon:
        found.append(next(name for name in (mixed if explores else best) if name not in found))
    return found
