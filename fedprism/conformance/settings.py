"""Whatever is configured: optimisers, schedules, precision, memory formats, batch norm and models."""

from __future__ import annotations

from typing import Any

from fedprism.conformance.case import Case, Trained, cut, sound, trained
from fedprism.conformance.compare import distance, first_difference, same, shapes
from fedprism.conformance.reproducible import as_stored
from fedprism.conformance.spies import PoisonedSlots
from fedprism.conformance.verdicts import Broken, DoesNotApply, promise
from fedprism.errors import ConfigError
from fedprism.round.engine import Result

SELDOM = {"every": 99}
CLIP, MOST = 1e-4, 1e-3


@promise("Adam works in place of SGD", "settings")
def adam(case: Case) -> None:
    optimizer = {"name": "adam", "lr": 0.003}
    trained(case, case.run(case.config(train={"rounds": 2, "optimizer": optimizer}, evaluate=SELDOM)))


@promise("clipped gradients move little", "settings")
def clip(case: Case) -> None:
    """A step moves by at most lr * clip / (1 - momentum) = 1e-5; no method makes a hundred of them in a round here."""
    run = case.run(case.config(train={"rounds": 1, "clip": CLIP}, evaluate=SELDOM))
    sound(run)
    for client_id in run.loop.info.clients:
        moved, freely = run.moved(client_id), case.straight.moved(client_id)
        if not 0 < moved < MOST:
            raise Broken(
                f"with train.clip {CLIP:g}, parameters of client {client_id} move by up to {moved:.2g} in a round; "
                f"expected more than 0 and less than {MOST:g} (without it: {freely:.2g} in four rounds).",
                "a step of one's own clips for itself: nn.utils.clip_grad_norm_(parameters, client.config.clip) where "
                "that is not None.",
            )


@promise("the learning rate follows the schedule", "settings", needs=("runs", "same-seed"))
def cosine(case: Case) -> None:
    """The first round has the full learning rate; the later ones have less."""
    run = case.run(case.config(train={"schedule": "cosine"}, evaluate=SELDOM), until=2)
    sound(run)
    for client_id in run.loop.info.clients:
        first, second = (same(run.model(client_id, n), case.straight.model(client_id, n)) for n in (0, 1))
        if not first:
            raise Broken(f"a cosine schedule changes the first round of client {client_id}, which has the full rate.")
        if second:
            raise Broken(
                f"a cosine schedule changes nothing in round 2 of client {client_id}: its learning rate stays.",
                "a pass that trains is `scheduled`, and a step of one's own uses the learning rate of its optimizer.",
            )


@promise("bfloat16 follows single precision", "settings", needs=("runs", "same-seed"))
def bfloat16(case: Case) -> None:
    """Layers compute in it; weights stay what they are, and a round ends near that in single precision."""
    half: dict[str, Any] = {"run": {"precision": "bf16"}}
    normed, full = case.run(case.config(**half), until=1), case.straight
    sound(normed)
    for client_id in normed.loop.info.clients:
        if shapes(normed.model(client_id)) != shapes(full.model(client_id, 0)):
            raise Broken(
                f"in bfloat16 the model of client {client_id} has other types or shapes; weights stay float32."
            )
        here, there = (run.records[1].scores["received"]["test"][client_id].loss for run in (normed, full))
        if not 0 < abs(here - there) < 0.05 * there:
            raise Broken(
                f"after round 1 the test loss of client {client_id} is {here:.5g} in bfloat16 and {there:.5g} in "
                "single precision; expected a difference, and one of less than 5 %."
            )
    # How far weights are apart: without batch norm, which makes much of rounding errors.
    model = {"name": "mlp"}
    one, other = (case.run(case.config(**more, model=model), until=1) for more in (half, {}))
    for client_id in one.loop.info.clients:
        first = {n: p.detach() for n, p in one.first_model(client_id).named_parameters()}
        ends = [{n: run.model(client_id)[n] for n in first} for run in (one, other)]
        apart, moved = distance(*ends), distance(first, ends[1])
        if not 0 < apart < 0.25 * moved:
            raise Broken(
                f"after round 1 the weights of client {client_id} are {apart:.3g} from those of single precision, "
                f"which have moved by {moved:.3g}; expected more than 0 and less than a quarter of that.",
                "keep sums over a round in float32 or float64: cast what a layer gives.",
            )


@promise("another memory format changes only roundings", "settings", needs=("runs", "same-seed", "resume"))
def channels_last(case: Case) -> None:
    """It sums in another order: close to the plain run, and its own bits after a resume."""
    train = {"rounds": 2, "batch_size": 40}  # one step: batch norm makes much of rounding errors in a few more
    config = case.config(train=train, run={"memory_format": "channels_last"}, evaluate=SELDOM)
    plain = case.run(case.config(train=train, evaluate=SELDOM), until=1)
    run = case.run(config)
    sound(run)
    for client_id in run.loop.info.clients:
        # Parameters alone: the sign of a basis, which a method may keep in a buffer, can turn with a rounding.
        first = {n: p.detach() for n, p in run.first_model(client_id).named_parameters()}
        model, like = run.model(client_id, 0), plain.model(client_id)
        apart, moved = distance({n: model[n] for n in first}, like), distance(first, model)
        if not apart < 0.01 * moved:
            raise Broken(
                f"with channels_last, the weights of client {client_id} are {apart:.3g} from the plain ones after "
                f"round 1, and have moved by {moved:.3g}; expected less than a hundredth of that."
            )
    differs = first_difference(case.run(config, start=as_stored(run.snapshots[1])), run, states_only=True)
    if differs is not None:
        raise Broken(f"with channels_last, a resumed run departs from the straight one {differs}.")


@promise("the batch-norm policy decides what travels", "settings", needs=("runs", "few"))
def batch_norm(case: Case) -> None:
    """What travels under `local` is what travels under `shared` less all of batch norm, both ways; and so on."""
    crossing = {policy: _crossing(case, policy) for policy in ("shared", "local", "local-stats", "local-affine")}
    # In this model every norm layer is called bn1, bn2 or bn3, and nothing else is.
    shared = crossing["shared"]
    norms = {each for each in shared if ".bn" in each[-1]}
    counted = {each for each in shared if each[-1].endswith(("running_mean", "running_var", "num_batches_tracked"))}
    expected = {
        "local": shared - norms,
        "local-stats": shared - counted,
        "local-affine": (shared - norms) | counted,
    }
    for policy, wanted in expected.items():
        odd = crossing[policy] ^ wanted
        if odd:
            round, client_id, way, name = min(odd)
            does = "travels" if (round, client_id, way, name) in crossing[policy] else "does not travel"
            raise Broken(
                f"with train.bn {policy!r}, {name} {does} {way} in round {round + 1} at client {client_id}.",
                "`ctx.shared` are the leaves that travel, after the policy; `self.shared(...)` are those before it.",
            )


def _crossing(case: Case, policy: str) -> set[tuple[int, str, str, str]]:
    """(round, client, way, name) of all that crosses."""
    config = case.config(
        train={"bn": policy, "rounds": 2},
        model={"name": "lenet-bn", "head_layers": 2},
        clients={"participation": 0.67},
        evaluate=SELDOM,
    )
    run = case.run(config, federation=cut(case.federation, [8, 8, 8]))
    sound(run)
    sent = {(r, c, "down", n) for r, of in run.requests.items() for c in of for n in of[c].download}
    for r, answers in run.answers.items():
        sent |= {(r, c, "up", n) for c, a in answers.items() if isinstance(a, Result) for n in a.upload}
    # What is sent of one client alone (`of.<client>/...`) is not averaged and goes whole.
    return {each for each in sent if not each[-1].startswith("of.")}


@promise("models without norm layers work", "settings", needs=("runs", "same-seed", "slots"))
def no_norm(case: Case) -> None:
    config = case.config(
        model={"name": "mlp", "hidden": [16, 8], "head_layers": 2}, train={"rounds": 3}, evaluate=SELDOM
    )
    run = case.run(config)
    trained(case, run)
    differs = first_difference(case.run(config, PoisonedSlots), run)
    if differs is not None:
        raise Broken(f"with a model without norm layers, something passes from client to client, {differs}.")


@promise("a model's constants are neither kept nor sent", "settings")
def constants(case: Case) -> None:
    """A constant is a buffer that is not in the state: here the matrix that brings features to one width."""
    model = {"name": "mlp", "hidden": [16, 12], "features": 8, "adapter": "pool"}
    run = case.run(case.config(model=model, train={"rounds": 1}, evaluate=SELDOM))
    sound(run)
    first = run.first_model(run.loop.info.clients[0])
    kept = set(dict(first.named_buffers())) - set(first.state_dict())
    if not kept:
        raise DoesNotApply("`build` gives a model without the constants of its architecture")
    states = [("the server", run.last.server), *run.last.clients.items(), *run.models[0].items()]
    for owner, state in states:
        odd = sorted(kept & set(state or ()))
        if odd:
            raise Broken(
                f"{odd[0]} is a buffer that the model does not keep, but it is in the state of {owner}.",
                "leaves come from `ctx.shared` or `leaves.everything(model)`, not from named_buffers().",
            )


@promise("clients may have different architectures", "settings")
def mixed(case: Case) -> None:
    models = [{"name": "mlp", "hidden": [24, 16]}, {"name": "mlp", "hidden": [16]}]
    config = case.config(train={"rounds": 2}, model={"per_client": models}, evaluate=SELDOM)
    run = _refused_unless_mixed(case, config)
    sound(run)
    one, two, three = (set(run.model(client_id)) for client_id in run.loop.info.clients)
    if one == two or one != three:
        raise Broken("clients of two architectures do not have the leaves of their own.")


def _refused_unless_mixed(case: Case, config: Any) -> Trained:
    if case.method.mixed:
        return case.run(config)
    try:
        case.run(config)
    except ConfigError as error:
        raise DoesNotApply(str(error)) from None
    raise Broken("`mixed` is False, but clients of different architectures are not refused.")
