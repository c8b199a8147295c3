"""A run is a function of its configuration and seed: nothing else passes from run to run, or from client to client."""

from __future__ import annotations

from fedprism.conformance.case import Case
from fedprism.conformance.compare import first_difference, same
from fedprism.conformance.spies import FreshSlots, PoisonedSlots, Reversed, Wire
from fedprism.conformance.verdicts import Broken, promise
from fedprism.round.events import Snapshot
from fedprism.store.serialize import deserialize, serialize

SHORT = 3  # rounds of a run that is compared with the plain one

_NOT_ON_SELF = (
    "nothing lives on the method itself (self, its class or its module) from one call to the next, nor in scratch from "
    "one round to the next. What must outlive a round belongs into the model that `build` returns, or into the "
    "server's state."
)


@promise("the same seed gives the same bits")
def same_seed(case: Case) -> None:
    differs = first_difference(case.run(), case.straight)
    if differs is not None:
        raise Broken(
            f"two runs with the same seed differ, {differs}.",
            "every draw is keyed: `client.draw(name, *shape)` in a loss, `ctx.rng(purpose)` in a hook. Nothing on the "
            "method's class or module may go from one run to the next.",
        )


@promise("another seed gives other bits")
def other_seed(case: Case) -> None:
    other = case.run(case.config(seed=1), until=1)
    for client_id in other.loop.info.clients:
        first, plain = (run.first_model(client_id).state_dict() for run in (other, case.straight))
        if same(first, plain):
            raise Broken(
                f"with seed 1 the first weights of client {client_id} are those with seed 0.",
                "`build(arch, client_id, info, seed)` is given the seed of the run: arch.model(seed).",
            )
        if same(other.model(client_id), case.straight.model(client_id, 0)):
            raise Broken(f"with seed 1 client {client_id} has the same model after round 1 as with seed 0.")


@promise("a resumed run is the straight run", needs=("runs", "same-seed"))
def resume(case: Case) -> None:
    """From what a checkpoint of round 2 would hold, as bytes and back."""
    differs = first_difference(case.run(start=as_stored(case.straight.snapshots[2])), case.straight)
    if differs is not None:
        raise Broken(
            f"resumed from its states of round 2, the run departs from the straight one {differs}.", _NOT_ON_SELF
        )


@promise("the order of clients does not matter", needs=("runs", "same-seed"))
def order(case: Case) -> None:
    differs = first_difference(case.run(engine=Reversed, until=SHORT), case.straight)
    if differs is not None:
        raise Broken(f"with clients run last to first, the run departs from the straight one {differs}.", _NOT_ON_SELF)


@promise("what crosses survives serialisation", needs=("runs", "same-seed"))
def wire(case: Case) -> None:
    differs = first_difference(case.run(engine=Wire, until=SHORT), case.straight)
    if differs is not None:
        raise Broken(
            f"with downloads and uploads as bytes on the way, the run departs from the straight one {differs}.",
            "find what was sent by its name: the order of a state changes on the way, and nothing but tensors crosses.",
        )


@promise("nothing passes from client to client", needs=("runs", "same-seed"))
def slots(case: Case) -> None:
    differs = first_difference(case.run(engine=PoisonedSlots, until=2), case.straight)
    if differs is not None:
        raise Broken(
            f"what the last client left in the model and in scratch was overwritten with NaN before the next client, "
            f"and the run departs from the straight one {differs}.",
            "something is read before it is written: call client.keep or client.freeze in start(), for every client "
            "and round, and keep what must outlive a round in the state of the model that `build` returns.",
        )
    differs = first_difference(case.run(engine=FreshSlots, until=2), case.straight)
    if differs is not None:
        raise Broken(
            f"with a `client` object of its own for every client, the run departs from the straight one {differs}.",
            "set no attributes on `client` or its model: one object serves many clients, one after the other.",
        )


@promise("evaluation does not change training", needs=("runs", "same-seed"))
def evaluation(case: Case) -> None:
    rarely = case.run(case.config(evaluate={"moments": ["received"], "every": 99}), until=SHORT)
    for run, how in ((case.often, "every moment is evaluated"), (rarely, "nothing is evaluated")):
        differs = first_difference(run, case.straight, states_only=True)
        if differs is not None:
            raise Broken(
                f"where {how}, training is another one: {differs}.",
                "predict, forward_details and adapt leave nothing behind, on the method or elsewhere.",
            )


@promise("the global generators are left alone")
def generators(case: Case) -> None:
    changed = dict.fromkeys((*case.straight.generators_changed, *case.often.generators_changed))
    if changed:
        raise Broken(
            f"a run leaves the global generator of {' and '.join(changed)} in another state.",
            "draw from a keyed generator: `client.draw(name, *shape)` in a loss, `ctx.rng(purpose)` in a hook, "
            "`keys.generator(seed, purpose)` in `build`.",
        )


def as_stored(snapshot: Snapshot) -> Snapshot:
    """A snapshot as bytes and back."""
    clients = {c: None if state is None else deserialize(serialize(state)) for c, state in snapshot.clients.items()}
    return Snapshot(snapshot.round, deserialize(serialize(snapshot.server)), clients, snapshot.usual_length)
