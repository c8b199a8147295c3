"""The conformance suite itself: each promise can be broken, and the reason says what is wrong; and its command."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import fedprism.cli.check  # noqa: F401
from fedprism.cli import app
from fedprism.conformance import PROMISES, Case, find, judge, judge_all
from fedprism.conformance.capturing import watched
from fedprism.conformance.compare import same
from fedprism.conformance.spies import PoisonedSlots, Reversed, over_the_wire
from fedprism.engines.cuda.guard import NotCapturable
from fedprism.errors import ConfigError
from fedprism.methods import leaves
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Output, Pass, State, Upload, load

pytestmark = pytest.mark.full

MLP = {"model": {"name": "mlp", "hidden": [32]}}  # quick; `lenet-bn` where batch norm matters
Box = dict[Any, Any]  # what a method must not have: a place on itself that outlives a call


def box() -> Any:
    return field(default_factory=dict)


@dataclass(frozen=True)
class Scaled(Method):
    """The loss depends on what is kept as `scale`."""

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(client, x, y) * client["scale"]


# --- one broken method per promise -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Impossible(Method):
    bn = "locl"


@dataclass(frozen=True)
class Undeclared(Method):
    def upload(self, client: Client, ctx: Context) -> State:
        return {**super().upload(client, ctx), "mine": torch.zeros(1)}


@dataclass(frozen=True)
class Diverges(Method):
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(client, x, y) * torch.nan


@dataclass(frozen=True)
class LearnsNothing(Method):
    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, optimizer={"lr": 1e-4})]


@dataclass(frozen=True)
class ShowsAnotherThing(Method):
    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model(x)

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        return Output(2 * model(x))


@dataclass(frozen=True)
class NoWords(Method):
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        client.log("secret", y.float())
        return super().loss(client, x, y)


@dataclass(frozen=True)
class Unkeyed(Scaled):
    def start(self, client: Client, ctx: Context) -> None:
        client.keep("scale", 1 + 0.1 * random.SystemRandom().random())


@dataclass(frozen=True)
class OneSeed(Method):
    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return arch.model(0)


@dataclass(frozen=True)
class CountsOnSelf(Scaled):
    uploaded: Box = box()

    def start(self, client: Client, ctx: Context) -> None:
        client.keep("scale", 1 + 0.01 * self.uploaded.get(ctx.client_id, 0))

    def upload(self, client: Client, ctx: Context) -> State:
        self.uploaded[ctx.client_id] = self.uploaded.get(ctx.client_id, 0) + 1
        return super().upload(client, ctx)


@dataclass(frozen=True)
class FirstComesFirst(Method):
    places: Box = box()

    def upload(self, client: Client, ctx: Context) -> State:
        place = self.places[ctx.round] = self.places.get(ctx.round, 0) + 1
        sent = super().upload(client, ctx)
        return {n: t * (1 + 0.01 * place) if t.is_floating_point() else t for n, t in sent.items()}


@dataclass(frozen=True)
class ReadsByPlace(Scaled):
    def start(self, client: Client, ctx: Context) -> None:
        client.keep("scale", 1 + 0.1 * next(iter(ctx.download.values())).ndim)


@dataclass(frozen=True)
class KeepsOnce(Scaled):
    def start(self, client: Client, ctx: Context) -> None:
        if "scale" not in client.scratch:
            client.keep("scale", 0.9)


@dataclass(frozen=True)
class MarksTheClient(Scaled):
    def start(self, client: Client, ctx: Context) -> None:
        client.turn = getattr(client, "turn", 0) + 1  # type: ignore[attr-defined]
        client.keep("scale", 1 + 0.01 * client.turn)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RemembersAdapting(Method):
    adapted: Box = box()

    def adapt(self, client: Client, ctx: Context) -> list[Pass]:
        self.adapted["once"] = True
        return super().adapt(client, ctx)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, epochs=2 if self.adapted else 1)]


@dataclass(frozen=True)
class SeedsTheWorld(Scaled):
    def start(self, client: Client, ctx: Context) -> None:
        torch.manual_seed(ctx.round)
        client.keep("scale", 1 + 0.1 * torch.rand(()))


@dataclass(frozen=True)
class ChangesTheServer(Method):
    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        for name, mean in super().aggregate(server, uploads, ctx).items():
            server[name].copy_(mean)
        return server


@dataclass(frozen=True)
class Grows(Method):
    def server(self, model: Net, ctx: Context) -> State:
        return {**super().server(model, ctx), "rounds": torch.zeros(())}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        return {**super().aggregate(server, uploads, ctx), "rounds": server["rounds"].reshape(1) + 1}


@dataclass(frozen=True)
class NeedsTwo(Method):
    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        mean = super().aggregate(server, uploads, ctx)
        spread = {n: torch.stack([u.state[n].float() for u in uploads]).std(0) for n in mean}
        return {n: t + 0.001 * spread[n] if t.is_floating_point() else t for n, t in mean.items()}


@dataclass(frozen=True)
class WithBuffer(Method):
    """Every client has a number of its own, which is not a number at first."""

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        model.register_buffer("own", torch.tensor(torch.nan))
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return [name for name in leaves.everything(model) if name != "own"]


@dataclass(frozen=True)
class AsksTheRound(WithBuffer, Scaled):
    def start(self, client: Client, ctx: Context) -> None:
        if ctx.round == 0:  # instead of ctx.is_new
            client.model.own.fill_(1.0)
        client.keep("scale", client.model.own)


@dataclass(frozen=True)
class FilledByTraining(WithBuffer):
    def receive(self, client: Client, ctx: Context) -> None:
        super().receive(client, ctx)
        client.model.own.fill_(torch.nan)

    def start(self, client: Client, ctx: Context) -> None:
        client.model.own.fill_(1.0)


@dataclass(frozen=True)
class ReadsUnstored(Method):
    """A client goes half of the way from where it was to what it receives, but it does not store where it was."""

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return ()

    def receive(self, client: Client, ctx: Context) -> None:
        own = leaves.tensors(client.model)
        load(client.model, {n: (own[n] + t) / 2 if t.is_floating_point() else t for n, t in ctx.download.items()})


@dataclass(frozen=True)
class PredictsUnstored(WithBuffer):
    """Only a test reads what training has left in the model."""

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return ()

    def start(self, client: Client, ctx: Context) -> None:
        client.model.own.fill_(1.0)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model(x) * torch.where(model.own == 1, 2.0, 1.0)


@dataclass(frozen=True)
class ServesUnstored(Method):
    moment = "trained"

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return ()


@dataclass(frozen=True)
class InStep(WithBuffer):
    """A client counts its rounds, and expects the server to have counted as many."""

    def server(self, model: Net, ctx: Context) -> State:
        return {**super().server(model, ctx), **{f"count/{c}": torch.zeros(()) for c in ctx.info.clients}}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        count = {"count": server[f"count/{client_id}"]} if client_id in ctx.info.clients else {}
        return {**super().send(server, client_id, ctx), **count}

    def receive(self, client: Client, ctx: Context) -> None:
        load(client.model, {n: ctx.download[n] for n in ctx.shared})
        if ctx.is_new:
            client.model.own.zero_()

    def start(self, client: Client, ctx: Context) -> None:
        if client.model.own != ctx.download.get("count", client.model.own):
            raise RuntimeError("the server has missed a round")
        client.model.own.add_(1)

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        known = [f"count/{u.client_id}" for u in uploads if u.client_id in ctx.info.clients]
        return {**super().aggregate(server, uploads, ctx), **{name: server[name] + 1 for name in known}}


@dataclass(frozen=True)
class Leaks(Method):
    """The server reads what it was never sent."""

    trained: Box = box()

    def upload(self, client: Client, ctx: Context) -> State:
        self.trained.setdefault(ctx.round, set()).add(ctx.client_id)
        return super().upload(client, ctx)

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        scale = 1 + 0.001 * len(self.trained.get(ctx.round, ()))
        mean = super().aggregate(server, uploads, ctx)
        return {n: t * scale if t.is_floating_point() else t for n, t in mean.items()}


@dataclass(frozen=True)
class Repairs(Method):
    def decode(self, state: State, ctx: Context) -> State:
        return {name: tensor.nan_to_num() for name, tensor in state.items()}


@dataclass(frozen=True)
class SingleImages(Method):
    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, min_batch=1)]


@dataclass(frozen=True)
class MembersOnly(Method):
    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        place = ctx.info.index[client_id]  # type: ignore[index]
        return super().send(server, ctx.info.clients[place], ctx)


@dataclass(frozen=True)
class Waits(Method):
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(client, x, y)
        return loss * 2 if loss.item() > 1e9 else loss


@dataclass(frozen=True)
class Anew(Method):
    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        marks = [ctx.round]
        return [Pass(lambda client, x, y: Method.loss(self, client, x, y) * (1.0 if marks else 0.0))]


@dataclass(frozen=True)
class ScaleOnSelf(Method):
    """Sound as long as one client runs after the other."""

    scale: Box = box()

    def start(self, client: Client, ctx: Context) -> None:
        self.scale["now"] = 1 + 0.01 * len(ctx.client_id or "")

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(client, x, y) * self.scale["now"]


# --- and one per promise of settings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnStep(Method):
    """A step of its own, as it should be."""

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, step=self.step, trains=leaves.everything(client.model))]

    def step(self, client: Client, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.loss(client, x, y).backward()
        if client.config.clip is not None:
            nn.utils.clip_grad_norm_(client.model.parameters(), client.config.clip)
        optimizer.step()


@dataclass(frozen=True)
class WantsMomentum(OwnStep):
    def step(self, client: Client, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        assert optimizer.param_groups[0]["momentum"] >= 0
        super().step(client, x, y, optimizer)


@dataclass(frozen=True)
class NeverClips(OwnStep):
    def step(self, client: Client, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.loss(client, x, y).backward()
        optimizer.step()


@dataclass(frozen=True)
class Unscheduled(Method):
    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, scheduled=False)]


@dataclass(frozen=True)
class SinglePrecision(Method):
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        scores = client.model(x)
        sums = torch.zeros(10, scores.shape[1]).index_add(0, y, scores)  # both must be of one type
        return cross_entropy(scores, y) + 0 * sums.sum()


@dataclass(frozen=True)
class Flattens(Method):
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(client, x.view(len(x), -1).view(x.shape), y)


@dataclass(frozen=True)
class SendsAll(Method):
    """`shared` in the place of `ctx.shared`."""

    def everything(self, ctx: Context, model: Net) -> Context:
        return ctx.replace(shared=tuple(self.shared(model, ctx)))

    def uploads(self, model: Net, ctx: Context) -> Any:
        return super().uploads(model, self.everything(ctx, model))

    def server(self, model: Net, ctx: Context) -> State:
        return super().server(model, self.everything(ctx, model))

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        return dict(server)

    def upload(self, client: Client, ctx: Context) -> State:
        return super().upload(client, self.everything(ctx, client.model))


@dataclass(frozen=True)
class WantsNorms(Method):
    def start(self, client: Client, ctx: Context) -> None:
        client.keep("first", leaves.tensors(client.model)[leaves.norms(client.model)[0]])


@dataclass(frozen=True)
class SendsConstants(Method):
    def upload(self, client: Client, ctx: Context) -> State:
        kept = leaves.everything(client.model)
        return {**super().upload(client, ctx), **{n: b for n, b in client.model.named_buffers() if n not in kept}}


@dataclass(frozen=True)
class NotReallyMixed(Method):
    mixed = True  # type: ignore[assignment]


@dataclass(frozen=True)
class Bad:
    """A method that breaks a promise, words of the reason, the model, and promises that are broken with it."""

    key: str
    method: Callable[[], Method]
    reason: str
    base: Mapping[str, Any] = field(default_factory=lambda: MLP)
    also: frozenset[str] = frozenset()
    outcome: str = "broken"


LENET: Mapping[str, Any] = {}
BAD = [
    Bad("says", Impossible, "unknown value of bn 'locl'. Did you mean 'local'?"),
    Bad("declared", Undeclared, "round 1, client plain: the server refused the upload: .* mine missing or unknown"),
    Bad("runs", Diverges, "round 1: client plain failed: .* is not finite after local training"),
    Bad("learns", LearnsNothing, "% of the test images are recognised at the moment 'received'; expected more than 40"),
    Bad("details", ShowsAnotherThing, "forward_details.* are not what predict"),
    Bad("words", NoWords, "it logs or shows secret; `shows` should say", outcome="note"),
    Bad("same-seed", Unkeyed, "differ, after round 1: client plain: .* differs by up to"),
    Bad("other-seed", OneSeed, "with seed 1 the first weights of client plain are those with seed 0"),
    Bad("resume", CountsOnSelf, "departs from the straight one after round 3: client plain: .* differs"),
    Bad("order", FirstComesFirst, "last to first, .* after round 1: the server: .* differs"),
    Bad("wire", ReadsByPlace, "as bytes on the way, .* after round 1: client plain: .* differs"),
    Bad("slots", KeepsOnce, "overwritten with NaN .* client tinted failed: .* not finite"),
    Bad(
        "slots",
        MarksTheClient,
        "with a `client` object of its own .* client tinted: ",
        also=frozenset({"resume", "order", "evaluation"}),
    ),
    Bad("evaluation", RemembersAdapting, "where every moment is evaluated, training is another one: after round 1"),
    Bad("generators", SeedsTheWorld, "the global generator of torch in another state"),
    Bad(
        "shape",
        Grows,
        "round 1: the server's state has changed its shape: rounds is float32 .1.; at first it was float32",
    ),
    Bad("subset", NeedsTwo, "aggregate makes .* not finite of the uploads of plain"),
    Bad("inputs", ChangesTheServer, "aggregate changes the server's state in place: .* differs by up to"),
    Bad("stored", ReadsUnstored, "held no number .* after round 1: .* scores/received/test/plain/loss is nan"),
    Bad("stored", ServesUnstored, "held no number .* at the end: the trained model of client plain, .* differs"),
    Bad("stored", PredictsUnstored, "held no number .* after round 1: .* what is recorded: scores/received/test/"),
    Bad("few", AsksTheRound, "client .* failed: own is not finite", also=frozenset({"all-receive", "newcomer"})),
    Bad("all-train", InStep, "RuntimeError: the server has missed a round\n.*test_check.py:[0-9]+, in start"),
    Bad("all-receive", FilledByTraining, "after round 1, own of .* is not finite"),
    Bad("small", SingleImages, "ValueError: Expected more than 1 value per channel", LENET),
    Bad("newcomer", MembersOnly, "KeyError: None\n.*test_check.py:[0-9]+, in send"),
    Bad("bad-upload", Repairs, "was made bad on its way .not a number., but it was averaged"),
    Bad("failing", Leaks, "client tinted failed, and the round is not what it is where this client does not answer"),
    Bad(
        "capture",
        Waits,
        "step by step on a GPU: it waits for the device: .item.*test_check.py:[0-9]+, in loss",
        outcome="note",
    ),
    Bad("capture", Anew, "pass 'train' runs step by step on a GPU: its loss is made anew", outcome="note"),
    Bad("capture", ScaleOnSelf, "on the engine for GPUs, .* departs from the straight one after round 2"),
    Bad("adam", WantsMomentum, "KeyError: 'momentum'"),
    Bad("clip", NeverClips, "with train.clip 0.0001, parameters of client plain move by up to"),
    Bad("cosine", Unscheduled, "changes nothing in round 2 of client plain"),
    Bad("bfloat16", SinglePrecision, "RuntimeError: .*index_add"),
    Bad("channels-last", Flattens, "RuntimeError: view size is not compatible"),
    Bad("batch-norm", SendsAll, "with train.bn 'local', .*bn1.* travels down in round 1 at client", LENET),
    Bad("no-norm", WantsNorms, "IndexError: tuple index out of range", LENET, frozenset({"bfloat16", "constants"})),
    Bad("constants", SendsConstants, "round 1: client plain failed: its upload is not what the method declares"),
    Bad("mixed", NotReallyMixed, "failed|cannot|KeyError|Error"),
]
every_bad = pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.key}-{bad.method.__name__}")


@pytest.mark.filterwarnings("ignore:std..")
@every_bad
def test_a_broken_promise_is_found(bad: Bad) -> None:
    verdict = judge(Case(bad.method, base=bad.base), PROMISES[bad.key])
    assert verdict.outcome == bad.outcome, str(verdict)
    assert re.search(bad.reason, verdict.reason, re.DOTALL), verdict.reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:std..")
@every_bad
def test_nothing_else_is_broken(bad: Bad) -> None:
    case = Case(bad.method, base=bad.base)
    found = {verdict.promise.key for verdict in judge_all(case, list(PROMISES.values())) if verdict.outcome == "broken"}
    assert found == {*bad.also, *([bad.key] if bad.outcome == "broken" else [])}


def test_every_promise_can_be_broken() -> None:
    assert {bad.key for bad in BAD} == set(PROMISES)


def test_a_hint_says_what_to_do() -> None:
    verdict = judge(Case(KeepsOnce, base=MLP), PROMISES["slots"])
    assert "call client.keep or client.freeze in start()" in verdict.hint
    assert str(verdict).splitlines()[-1] == f"Hint: {verdict.hint}"


def test_what_is_read_and_not_stored_is_named_with_what_to_do() -> None:
    case = Case(ReadsUnstored, base=MLP)
    verdicts = {key: judge(case, PROMISES[key]) for key in ("runs", "stored", "resume")}
    assert "name it in `stored`" in verdicts["stored"].hint
    assert "(stored), which is broken" in verdicts["runs"].reason
    assert verdicts["resume"].because == "stored"


def test_what_follows_from_a_broken_promise_does_not_apply() -> None:
    """Only the first cause is called broken, however far it is."""
    case = Case(Impossible, base=MLP)
    verdicts = {verdict.promise.key: verdict for verdict in judge_all(case)}
    assert [key for key, verdict in verdicts.items() if verdict.outcome == "broken"] == ["says"]
    assert verdicts["failing"].outcome == "does not apply"
    assert verdicts["failing"].reason == "it needs 'what it says of itself is possible' (says), which is broken"


def test_promises_are_found_by_key_and_group() -> None:
    assert [each.key for each in find(["order", "resume"])] == ["resume", "order"]
    assert {each.group for each in find()} == {"structure"}
    assert len(find(groups=("structure", "settings"))) == len(PROMISES)
    with pytest.raises(ConfigError, match="unknown promise 'resum'"):
        find(["resum"])


# --- engines that watch and disturb ----------------------------------------------------------------------------------


def test_the_reversed_engine_runs_clients_last_to_first() -> None:
    run = Case(Method, base=MLP).run(engine=Reversed, until=1)
    assert list(run.answers[0]) == list(reversed(run.loop.info.clients))


def test_the_wire_sorts_what_it_carries_and_changes_no_bit() -> None:
    state = {"b": torch.rand(2, 3).T, "a": torch.tensor(3)}
    carried = over_the_wire(state)
    assert list(carried) == ["a", "b"]
    assert same(carried, {"a": state["a"], "b": state["b"]})


def test_poison_leaves_nothing_of_the_last_client() -> None:
    case = Case(Method, base={})
    run = case.run(until=1)
    slot = next(iter(run.engine.slots.values()))  # type: ignore[attr-defined]
    PoisonedSlots.before_a_client(run.engine)  # type: ignore[arg-type]
    for tensor in slot.model.state_dict().values():
        assert tensor.isnan().all() if tensor.is_floating_point() else (tensor == 77).all()


# --- what a captured step cannot do ----------------------------------------------------------------------------------

WAITS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda z, y: z.sum().item(),
    "float": lambda z, y: float(y.sum()),
    "if": lambda z, y: 1 if z.sum() > 0 else 2,
    "tolist": lambda z, y: sum(y.tolist()),
    "cpu": lambda z, y: z.cpu().sum(),
    "numpy": lambda z, y: float(z.detach().numpy().sum()),
    "mask": lambda z, y: z[y == 1].sum(),
    "mask-put": lambda z, y: y.index_put((y > 0,), y[:1]).sum(),
    "masked-select": lambda z, y: z.masked_select(z > 0).sum(),
    "unique": lambda z, y: y.unique().sum(),
    "nonzero": lambda z, y: torch.nonzero(y).sum(),
    "where": lambda z, y: torch.where(y > 1)[0].sum(),
    "bincount": lambda z, y: torch.bincount(y).sum(),
    "tensor": lambda z, y: torch.tensor(2.0),
}


@pytest.mark.parametrize("waits", WAITS)
def test_the_watch_sees_what_waits(waits: str) -> None:
    class Waiting(Method):
        def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(client, x, y) + 0 * WAITS[waits](client.model(x), y)

    with pytest.raises(NotCapturable, match="it waits for the device"):
        watched(Case(Waiting, base=MLP))


# --- the command -----------------------------------------------------------------------------------------------------

FILE = """
from dataclasses import dataclass, field
from fedprism.config import required
from fedprism.conformance.capturing import watched
from fedprism.conformance.compare import same
from fedprism.conformance.spies import PoisonedSlots, Reversed, over_the_wire
from fedprism.engines.cuda.guard import NotCapturable
from fedprism.methods.base import Method, leaves, load, setting


@dataclass(frozen=True)
class Mine(Method):
    bn = "local"

    keep: float = setting(0.5, "share of the own head", lambda v: 0 <= v <= 1, "0 to 1")

    def receive(self, client, ctx):
        own, head = leaves.tensors(client.model), leaves.part(client.model, "head")
        mixed = {n: self.keep * own[n] + (1 - self.keep) * ctx.download[n] for n in head if n in ctx.download}
        load(client.model, {**ctx.download, **mixed})


@dataclass(frozen=True)
class Counts(Method):
    rounds: dict = field(default_factory=dict)

    def start(self, client, ctx):
        self.rounds[ctx.client_id] = self.rounds.get(ctx.client_id, 0) + 1
        client.keep("scale", 1 / self.rounds[ctx.client_id])

    def loss(self, client, x, y):
        return super().loss(client, x, y) * client["scale"]


@dataclass(frozen=True)
class Raises(Method):
    def loss(self, client, x, y):
        return super().loss(client, x, y) + distance(client)


def distance(client):
    return client["anchor"].sum()


@dataclass(frozen=True)
class Needs(Method):
    mu: float = required("how much")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return "mine.py"


def call(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", *arguments])


def line_of(result: Any, text: str) -> str:
    return next(line for line in result.output.splitlines() if line.startswith(text))


def test_a_good_method_from_outside_keeps_every_promise(file: str) -> None:
    result = call(f"{file}:Mine", "--all", "--set", "method.keep=0.8")
    assert result.exit_code == 0, result.output
    assert f"mine: {len(PROMISES) - 1} promises kept, 0 broken, 1 not applicable." in result.output
    for each in PROMISES.values():
        outcome = "does not apply" if each.key == "mixed" else "ok"
        assert re.search(rf"  {outcome} +[0-9.]+ s$", line_of(result, each.text))
    assert "does not apply: clients may have different architectures (mixed)\n  mine needs one" in result.output


def test_a_broken_promise_is_printed_in_full(file: str) -> None:
    result = call(f"{file}:Counts", "--only", "resume,order,shape")
    assert result.exit_code == 1
    assert re.search(r"  broken +[0-9.]+ s$", line_of(result, "a resumed run is the straight run"))
    assert re.search(r"  ok +[0-9.]+ s$", line_of(result, "the order of clients does not matter"))
    assert len([line for line in result.output.splitlines() if line.endswith(" s")]) == 3
    printed = result.output[result.output.index("broken: a resumed run is the straight run (resume)") :]
    assert "departs from the straight one after round 3: client plain: " in printed
    assert "Hint: nothing lives on the method itself" in printed
    assert "counts: 2 promises kept, 1 broken." in printed


def test_an_exception_is_shown_by_the_frames_of_its_author(file: str) -> None:
    result = call(f"{file}:Raises", "--only", "runs,resume")
    assert result.exit_code == 1
    lines = FILE.splitlines()
    in_loss, in_distance = (next(n for n, line in enumerate(lines, 1) if text in line) for text in ("+ dist", '["anch'))
    printed = result.output[result.output.index("broken: it trains") :].splitlines()
    assert printed[1:6] == [
        "  KeyError: 'anchor'",
        f"    mine.py:{in_loss}, in loss",
        "      return super().loss(client, x, y) + distance(client)",
        f"    mine.py:{in_distance}, in distance",
        '      return client["anchor"].sum()',
    ]
    assert "site-packages" not in result.output
    assert "round/training.py" not in result.output
    assert "does not apply: a resumed run is the straight run (resume)" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no method to check; name one, such as `fedprism check my_method.py:MyMethod`"),
        (["mine.py:Needs"], "mine.py:Needs has no default for mu, so it cannot be tried; .* --set method.mu=VALUE"),
        (["mine.py:Mine", "--set", "method.keep=2"], "expected 0 to 1"),
        (["mine.py:Mine", "--set", "train.rounds=2"], "takes settings of the method only"),
        (["mine.py:Mine", "--only", "resum"], "unknown promise 'resum'. Did you mean 'resume'?"),
        (["mine.py:Other"], "holds the methods"),
        (["fedavgg"], "Did you mean 'fedavg'?"),
    ],
)
def test_what_cannot_be_checked_is_an_error(arguments: list[str], words: str, file: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert re.search(words, " ".join(result.output.split()))


@pytest.mark.parametrize("name", ["fedbn", "fedprism.methods.fedbn:FedBN"])
def test_a_method_is_named_in_any_way(name: str) -> None:
    result = call(name, "--only", "says")
    assert result.exit_code == 0, result.output
    assert "fedbn: 1 promise kept, 0 broken." in result.output


def test_every_promise_is_listed() -> None:
    result = call("--list")
    assert result.exit_code == 0
    listed = [line.split()[:2] for line in result.output.splitlines()[1:]]
    assert listed == [[each.key, each.group] for each in PROMISES.values()]
    assert all(each.text in result.output for each in PROMISES.values())
