"""What the server refuses: updates that run away, and what is no upload. The others go on without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedprism as fp
from fedprism import api
from fedprism.config import Config, structure
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.engines.processes.handle import Pool
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Client, Context, Method, Net, State, Upload, UploadKind
from fedprism.methods.states import length, malformed, rest_length, update_length
from fedprism.records import RunDirectory
from fedprism.round.client import make_info
from fedprism.round.engine import Engine, Failure, Request, Result
from fedprism.round.events import Callback, Snapshot
from fedprism.round.loop import Loop
from fedprism.round.server import FAR, LARGEST, UNKNOWN, longest_update
from tests.harness import CPU, MLP, Borrowed, Collect, config_of, loop_for, same

pytestmark = pytest.mark.full

VICTIM = "tinted"
Change = Callable[[State, State], Any]  # the upload and the download -> what is sent


class Sends(InProcess):
    """From some round on, one client sends something else."""

    change: Change | None  # None: nothing at all
    since: int
    victims: tuple[str, ...]

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, answer in super().train(round, requests):
            if client_id not in self.victims or round < self.since or not isinstance(answer, Result):
                yield client_id, answer
            elif self.change is None:
                yield client_id, Failure("gone", non_finite=True)
            else:
                changed = self.change(dict(answer.upload), requests[client_id].download)
                yield client_id, replace(answer, upload=changed)


def run(
    method: Method,
    federation: Federation,
    change: Change | None,
    since: int = 0,
    victims: tuple[str, ...] = (VICTIM,),
    start: Snapshot | None = None,
    **sections: Any,
) -> tuple[Loop, Collect]:
    settings = config_of(**{"model": MLP, **sections})
    info = make_info(settings, federation.names, federation.classes, federation.shape)
    engine, seen = Sends(method, settings, info, federation, CPU), Collect()
    engine.change, engine.since, engine.victims = change, since, victims
    loop = loop_for(method, settings, federation, engine)
    loop.run([seen], start)
    return loop, seen


def enormous(upload: State, download: State) -> State:
    """Every floating number is finite, and nearly as large as it can be."""
    return {n: torch.full_like(t, 3e38) if t.is_floating_point() else t for n, t in upload.items()}


def one_number(upload: State, download: State) -> State:
    name, tensor = next((n, t) for n, t in upload.items() if t.is_floating_point())
    changed = tensor.clone()
    changed.view(-1)[0] = 3e38
    return {**upload, name: changed}


def moved_by(distance: float) -> Change:
    """An update of this length, in the first leaf."""

    def change(upload: State, download: State) -> State:
        name = next(iter(download))
        step = torch.zeros_like(download[name])
        step.view(-1)[0] = distance
        return {**download, name: download[name] + step}

    return change


# --- updates that run away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("change", [enormous, one_number])
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedamp", "scaffold", "fedkd"])
def test_what_is_finite_and_enormous_is_refused(method: str, change: Change, since: int, tiny: Federation) -> None:
    """FedProto's server holds zeros at first, FedAMP's a model per client: as if that client had never answered."""
    loop, seen = run(METHODS[method](), tiny, change, since)
    without, _ = run(METHODS[method](), tiny, None, since)
    assert seen.status == "finished"
    for record in seen.records[1:]:
        assert list(record.failed) == ([VICTIM] if record.round > since else [])
        assert VICTIM not in record.up or record.round <= since
    reason = seen.records[-1].failed[VICTIM]
    if method == "fedkd" and change is enormous:  # the product of such factors is too large for a number
        assert reason == "update.student.body.fc1.weight in its upload is not finite"
    elif change is enormous and method in ("fedproto", "scaffold"):  # counts, and changes of control variates
        assert "its buffers and scalars have length" in reason
        assert reason.endswith(": the limit is 1e+12")
    else:
        assert "its update has length" in reason
        assert "far from what is usual: the limit is" in reason
    assert same(loop.server, without.server)
    assert all(same(loop.states[c], without.states[c]) for c in tiny.names)
    assert not same(loop.server, seen.snapshots[since].server), "the others' uploads count"
    assert loop.usual_length == without.usual_length


@pytest.mark.parametrize(
    ("method", "name"), [("fedproto", "prototypes.count"), ("pfedvem", "rho2"), ("fedsce", "distance/parameters")]
)
def test_a_scalar_has_a_limit(method: str, name: str, tiny: Federation) -> None:
    """One count of 3e38 would make infinity of the products that FedProto adds up."""
    for size, refused in ((0.9 * LARGEST, False), (1.1 * LARGEST, True), (3e38, True)):

        def change(upload: State, download: State, size: float = size) -> State:
            numbers = torch.zeros_like(upload[name])
            numbers.view(-1)[0] = size
            return {**upload, name: numbers}

        loop, seen = run(METHODS[method](), tiny, change, since=1, train={"rounds": 3})
        assert seen.status == "finished"
        assert [list(record.failed) == [VICTIM] for record in seen.records] == [False, False, refused, refused]
        assert all(tensor.isfinite().all() for tensor in loop.server.values())


def test_a_counter_has_a_limit(tiny: Federation) -> None:
    """The mean of whole numbers of 64 bits does not fit in 64 bits."""

    def change(upload: State, download: State) -> State:
        return {n: t if t.is_floating_point() else torch.full_like(t, 2**63 - 1) for n, t in upload.items()}

    _, seen = run(fp.FedAvg(), tiny, change, model="lenet-bn", train={"rounds": 1})
    assert "its buffers and scalars have length 1.6e+19: the limit is 1e+12" in seen.records[1].failed[VICTIM]


def test_a_variance_of_nothing_gives_no_infinite_confidence(tiny: Federation) -> None:
    """1 / 1e-320 is infinite, in double precision, too."""
    change: Change = lambda upload, download: {**upload, "rho2": torch.tensor(1e-320, dtype=torch.float64)}  # noqa: E731
    loop, seen = run(fp.PFedVEM(), tiny, change, train={"rounds": 2})
    assert seen.status == "finished"
    assert all(tensor.isfinite().all() for tensor in loop.server.values())


def test_statistics_of_large_inputs_are_no_runaway_updates(tiny: Federation) -> None:
    """Inputs of some thousand: the variances of batch norm move far more than a thousand times the weights' length."""
    settings = {"data": {"normalize": {"mean": [0.0, 0.0, 0.0], "std": [1 / 2550] * 3}}, "model": "lenet-bn"}
    loop, seen = run(fp.FedAvg(), tiny, None, since=9, train={"rounds": 2, "optimizer": {"lr": 0.01}}, **settings)
    assert not any(record.failed for record in seen.records)
    first = seen.snapshots[0].server
    assert float(length({n: t - first[n] for n, t in loop.server.items()})) > FAR * float(length(first))


def test_what_a_client_sends_is_quoted_in_one_short_line(tiny: Federation) -> None:
    change: Change = lambda upload, download: {**upload, "\x1b[31m" + "w" * 10**6: torch.ones(1)}  # noqa: E731
    _, seen = run(fp.FedAvg(), tiny, change, train={"rounds": 1})
    reason = seen.records[1].failed[VICTIM]
    assert len(reason) < 320
    assert reason.startswith("its upload is not what the method declares: \\x1b[31mwww")


def test_all_that_run_away_is_diverged(tiny: Federation) -> None:
    loop, seen = run(fp.FedAvg(), tiny, enormous, since=1, victims=tiny.names)
    assert seen.status == "diverged"
    assert [record.round for record in seen.records] == [0, 1, 2]
    assert set(seen.records[2].failed) == set(tiny.names)
    assert same(loop.server, seen.snapshots[1].server)
    assert loop.usual_length == seen.snapshots[1].usual_length, "a round without an update has no usual length"


def test_limits_by_hand() -> None:
    """The server's weights are (3, 4), 5 long; counters are no weights."""
    server = {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(10**6)}
    assert longest_update(server, None) == FAR * 5
    assert longest_update(server, 2.0) == FAR * 2
    assert longest_update(server, 1e-6) == 5, "it may always be as long as the weights"
    assert longest_update(server, 0.0) == 5
    nothing = {"w": torch.zeros(4)}
    assert longest_update(nothing, None) == longest_update(nothing, 1.0) == FAR * UNKNOWN * 2
    assert longest_update(nothing, 1e9) == FAR * 1e9
    assert longest_update({"n": torch.tensor(3)}, None) == longest_update({}, None) == LARGEST, (
        "nothing to compare with"
    )


@dataclass(frozen=True)
class Votes(Method):
    """The server holds a whole number alone: how many numbers that were sent are above 0."""

    who: tuple[str, ...] = ()  # whose numbers are enormous

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return ()

    def server(self, model: Net, ctx: Context) -> State:
        return {"votes": torch.tensor(0)}

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        return {"scores": "weights"}

    def upload(self, client: Client, ctx: Context) -> State:
        return {"scores": torch.full((4,), 3e38 if ctx.client_id in self.who else 0.5)}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        return {"votes": server["votes"] + sum(int((u.state["scores"] > 0).sum()) for u in uploads)}


def test_a_server_without_weights_has_a_limit_too(tiny: Federation, tmp_path: Path) -> None:
    """There is no length that could be recorded of what is enormous."""
    for who, status in (((), "finished"), ((VICTIM,), "finished"), (tuple(tiny.names), "diverged")):
        out, settings = tmp_path / str(len(who)), ["run.engine=inprocess", "run.device=cpu"]
        made = fp.train(tiny, Votes(who), rounds=2, out=out, settings=settings)
        assert made.status == status
        assert all(list(record.failed) == list(who) for record in made.record.rounds[1:])
        with RunDirectory.open(out) as directory:
            last = directory.latest()
        assert last is not None
        assert int(last.server["votes"]) == 4 * 2 * (3 - len(who))


def test_lengths_by_hand() -> None:
    """(3, 4) from (0, 0) and 12 from nothing are 13 together; a scalar's 2, a counter's 3 and statistics' 6 are 7."""
    upload = {"a": torch.tensor([4.0, 5.0]), "b": torch.tensor([12.0]), "s": torch.tensor(2.0), "n": torch.tensor(3)}
    upload["m"] = torch.tensor([0.0, -6.0])
    kinds = {"a": "weights", "b": "prototype", "s": "scalar", "n": "buffers", "m": "buffers"}
    origin = {"a": torch.tensor([1.0, 1.0]), "m": torch.tensor([5.0, 5.0])}
    assert update_length(upload, origin, kinds).item() == pytest.approx(13)
    assert rest_length(upload, kinds).item() == pytest.approx(7)
    assert rest_length({"a": upload["a"]}, kinds).item() == 0
    assert length({}).item() == 0
    assert length({"e": torch.empty(0), "n": torch.tensor(5)}).item() == 0
    mixed = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float64), "c": torch.zeros(1).bfloat16()}
    assert length(mixed).item() == pytest.approx(5), "of several precisions"


def test_a_federation_that_stands_still_may_move_again(tiny: Federation) -> None:
    """With a rate of nearly nothing, an update of most of the weights' length is far more than usual: it is fine."""
    slow = {"rounds": 2, "optimizer": {"lr": 1e-9}}
    first, _ = run(fp.FedAvg(), tiny, None, since=9, train={**slow, "rounds": 1})
    usual, weights = first.usual_length, float(length(first.server))
    assert usual is not None
    assert 0 < FAR * usual < 0.1 * weights
    for share, refused in ((0.9, False), (1.1, True)):
        _, seen = run(fp.FedAvg(), tiny, moved_by(share * weights), since=1, train=slow)
        assert (VICTIM in seen.records[2].failed) == refused
        assert (VICTIM in seen.records[2].up) != refused


def test_the_limit_is_a_thousand_times_the_usual_length(tiny: Federation) -> None:
    """Of the round before: its median, of all clients that were accepted."""
    settings = {"rounds": 2, "optimizer": {"lr": 0.05}}
    first, _ = run(fp.FedAvg(), tiny, None, since=9, train={**settings, "rounds": 1})
    assert first.usual_length is not None
    limit = FAR * first.usual_length
    assert limit > float(length(first.server))
    for share, refused in ((0.99, False), (1.01, True)):
        _, seen = run(fp.FedAvg(), tiny, moved_by(share * limit), since=1, train=settings)
        assert (VICTIM in seen.records[2].failed) == refused
    assert f"the limit is {limit:.3g}" in seen.records[2].failed[VICTIM]


def test_the_usual_length_is_the_median_of_what_was_accepted(tiny: Federation) -> None:
    """Of lengths 1, 2 and 9 it is 2; without the third, which is refused, 1.5."""
    distances = iter((1.0, 2.0, 9.0))
    lengths = {c: moved_by(next(distances)) for c in tiny.names}

    class Each(Sends):
        def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
            for client_id, answer in InProcess.train(self, round, requests):
                assert isinstance(answer, Result)
                yield client_id, replace(answer, upload=lengths[client_id](answer.upload, requests[client_id].download))

    settings = config_of(model=MLP, train={"rounds": 1})
    info = make_info(settings, tiny.names, tiny.classes, tiny.shape)
    for expected in (2.0, 1.5):
        loop = loop_for(fp.FedAvg(), settings, tiny, Each(fp.FedAvg(), settings, info, tiny, CPU))
        loop.run([])
        assert loop.usual_length == pytest.approx(expected, rel=1e-6)
        lengths[tiny.names[2]] = enormous


# --- after a resume --------------------------------------------------------------------------------------------------


def test_the_usual_length_is_part_of_a_snapshot(tiny: Federation) -> None:
    """An update of two limits is refused after a resume as it is without one; without that memory it would not be."""
    slow = {"rounds": 2, "optimizer": {"lr": 1e-9}}
    _, seen = run(fp.FedAvg(), tiny, None, since=9, train=slow)
    start = seen.snapshots[1]
    assert seen.snapshots[0].usual_length is None
    assert start.usual_length is not None
    far = moved_by(2 * float(length(start.server)))
    straight, expected = run(fp.FedAvg(), tiny, far, since=1, train=slow)
    resumed, found = run(fp.FedAvg(), tiny, far, since=1, train=slow, start=start)
    assert found.records[-1].failed == expected.records[-1].failed
    assert list(found.records[-1].failed) == [VICTIM]
    assert same(resumed.server, straight.server)
    assert resumed.usual_length == straight.usual_length
    _, forgetful = run(fp.FedAvg(), tiny, far, since=1, train=slow, start=replace(start, usual_length=None))
    assert not forgetful.records[-1].failed


class Stop(Callback):
    def round(self, record: Any, snapshot: Snapshot) -> None:
        if snapshot.round == 2:
            raise KeyboardInterrupt


def test_the_usual_length_is_in_every_checkpoint(tmp_path: Path) -> None:
    """To its last bit, and also where a round had no update of its own."""
    raw = {
        "data": {"name": "digits-skew", "partition": {"name": "domain", "clients": 3}, "samples": 30},
        "model": MLP,
        "train": {"rounds": 4, "batch_size": 16},
        "clients": {"participation": 0.34, "dropout": 0.4},
        "run": {"device": "cpu", "engine": "inprocess", "checkpoint_every": 1},
    }
    settings = structure(raw, Config)
    seen = Collect()
    straight = api.run_config(settings, "x", out=tmp_path / "straight", callbacks=[seen])
    with pytest.raises(KeyboardInterrupt):
        api.run_config(settings, "x", out=tmp_path / "stopped", callbacks=[Stop()])
    with RunDirectory.open(tmp_path / "stopped") as directory:
        stopped = directory.latest()
    assert stopped is not None
    assert stopped.usual_length == seen.snapshots[stopped.round].usual_length is not None
    assert api.resume(tmp_path / "stopped").status == straight.status == "finished"
    with RunDirectory.open(tmp_path / "stopped") as directory:
        last = directory.latest()
    assert last is not None
    assert last.usual_length == seen.snapshots[-1].usual_length
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "stopped")]
    assert metrics[0] == metrics[1]


# --- what is no upload -----------------------------------------------------------------------------------------------

LEAF = "body.fc1.weight"


def with_leaf(change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda upload, download: {**upload, LEAF: change(upload[LEAF])}


IN_BETA = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta state",
    "ignore:torch.quantize_per_tensor",
    "ignore:The PyTorch API of nested",
)

WRONG: dict[str, tuple[Change, str]] = {
    "nothing": (lambda upload, download: None, "its upload is None, not a dict of tensors"),
    "a list": (lambda upload, download: list(upload.values()), "its upload is a list, not a dict of tensors"),
    "a tensor": (lambda upload, download: upload[LEAF], "its upload is a Parameter, not a dict of tensors"),
    "an empty dict": (lambda upload, download: {}, "its upload is not what the method declares: "),
    "a leaf that is none": (with_leaf(lambda t: None), f"'{LEAF}' in its upload is None, not a tensor"),
    "a number": (with_leaf(lambda t: 3.0), f"'{LEAF}' in its upload is a float, not a tensor"),
    "an array": (with_leaf(lambda t: t.detach().numpy()), f"'{LEAF}' in its upload is a ndarray, not a tensor"),
    "a nested dict": (with_leaf(lambda t: {"w": t}), f"'{LEAF}' in its upload is a dict, not a tensor"),
    "a key that is no name": (
        lambda upload, download: {**upload, 3: upload[LEAF]},
        "3 in its upload is a int, not the name of a leaf",
    ),
    "sparse": (with_leaf(lambda t: t.detach().to_sparse()), f"'{LEAF}' in its upload is sparse, nested or packed"),
    "compressed rows": (
        with_leaf(lambda t: t.detach().to_sparse_csr()),
        f"'{LEAF}' in its upload is sparse, nested or packed",
    ),
    "quantised": (
        with_leaf(lambda t: torch.quantize_per_tensor(t.detach(), 0.1, 0, torch.qint8)),
        f"'{LEAF}' in its upload is sparse, nested or packed",
    ),
    "nested": (
        with_leaf(lambda t: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
        f"'{LEAF}' in its upload is sparse, nested or packed",
    ),
    "8 bits": (with_leaf(lambda t: t.detach().to(torch.float8_e5m2)), f"{LEAF} in its upload is torch.float8_e5m2 of"),
    "meta": (with_leaf(lambda t: t.detach().to("meta")), f"'{LEAF}' in its upload has no values (device meta)"),
    "double": (with_leaf(lambda t: t.detach().double()), f"{LEAF} in its upload is torch.float64 of shape"),
    "half": (with_leaf(lambda t: t.detach().half()), f"{LEAF} in its upload is torch.float16 of shape"),
    "whole": (with_leaf(lambda t: t.detach().long()), f"{LEAF} in its upload is torch.int64 of shape"),
    "yes or no": (with_leaf(lambda t: t.detach() > 0), f"{LEAF} in its upload is torch.bool of shape"),
    "complex": (with_leaf(lambda t: t.detach() * 1j), f"{LEAF} in its upload is torch.complex64 of shape"),
    "more dimensions": (
        with_leaf(lambda t: t.detach().unsqueeze(0)),
        f"{LEAF} in its upload is torch.float32 of shape",
    ),
}


def assert_refused(seen: Collect, reason: str) -> None:
    assert seen.status == "finished"
    for record in seen.records[1:]:
        assert list(record.failed) == [VICTIM]
        assert reason in record.failed[VICTIM]
        assert len(record.up) == 2
    assert not same(seen.snapshots[0].server, seen.snapshots[-1].server)


@IN_BETA
@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_upload_is_refused_whoever_sends_it(what: str, tiny: Federation) -> None:
    """An engine, for instance one whose clients are far machines."""
    change, reason = WRONG[what]
    reason = reason.replace("a Parameter", "a Tensor")  # what an engine gives back is copied
    _, seen = run(fp.FedAvg(), tiny, change, train={"rounds": 2})
    assert_refused(seen, reason)


@dataclass(frozen=True)
class Odd(fp.FedAvg):
    """FedAvg in which one client's `upload` returns something else."""

    what: str = ""

    def upload(self, client: Client, ctx: Context) -> State:
        upload = super().upload(client, ctx)
        return WRONG[self.what][0](upload, ctx.download) if ctx.client_id == VICTIM else upload  # type: ignore[no-any-return]


@IN_BETA
@pytest.mark.parametrize("transforms", [(), ("clip_norm",), ("clip_norm", "quantize")], ids=len)
@pytest.mark.parametrize("engine", [InProcess, CudaGraphs])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_upload_is_refused_if_a_method_makes_it(
    what: str, engine: type[InProcess] | type[CudaGraphs], transforms: tuple[str, ...], tiny: Federation
) -> None:
    evaluate = {"moments": ["received"]}
    settings = config_of(model=MLP, train={"rounds": 1}, transforms=list(transforms), evaluate=evaluate)
    info = make_info(settings, tiny.names, tiny.classes, tiny.shape)
    made: Engine = engine(Odd(what), settings, info, tiny, CPU)
    loop, seen = loop_for(Odd(what), settings, tiny, made), Collect()
    loop.run([seen])
    if what == "half" and "quantize" in transforms:  # an update of a leaf in full precision has full precision
        assert not seen.records[1].failed
        return
    assert_refused(seen, WRONG[what][1])
    assert loop.states[VICTIM] is None


@dataclass(frozen=True)
class EncodesOddly(fp.FedAvg):
    """FedAvg in which one client's `encode` returns something else."""

    what: str = ""

    def encode(self, state: State, ctx: Context) -> State:
        odd = ctx.data is not None and ctx.client_id == VICTIM  # at the client: the server has no data
        return WRONG[self.what][0](state, ctx.download) if odd else state  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", [InProcess, CudaGraphs, None], ids=["inprocess", "cuda-graphs", "processes"])
@pytest.mark.parametrize("what", ["nothing", "a list", "a leaf that is none", "a number", "sparse", "meta"])
def test_what_is_no_upload_is_refused_if_encode_makes_it(
    what: str, engine: type[InProcess] | type[CudaGraphs] | None, tiny: Federation, spare: Pool
) -> None:
    """Whatever is between the client and the server: workers cannot even send such things."""
    method, seen = EncodesOddly(what), Collect()
    settings = config_of(model=MLP, train={"rounds": 1}, evaluate={"moments": ["received"]})
    info = make_info(settings, tiny.names, tiny.classes, tiny.shape)
    if engine is None:
        made: Engine = Borrowed.of(spare, 1, method, settings, tiny)
    else:
        made = engine(method, settings, info, tiny, CPU)
    loop_for(method, settings, tiny, made).run([seen])
    assert_refused(seen, WRONG[what][1])


@pytest.mark.parametrize("engine", [InProcess, CudaGraphs])
def test_what_runs_away_is_refused_if_a_client_makes_it(
    engine: type[InProcess] | type[CudaGraphs], tiny: Federation
) -> None:
    """The client itself has found every number finite, and its length. A bound on the length lets it go on."""
    info = make_info(config_of(model=MLP), tiny.names, tiny.classes, tiny.shape)
    for transforms in ([], ["clip_norm"]):
        settings = config_of(model=MLP, transforms=transforms)
        loop, seen = loop_for(RunsAway(), settings, tiny, engine(RunsAway(), settings, info, tiny, CPU)), Collect()
        loop.run([seen])
        if not transforms:
            assert_refused(seen, "its update has length inf, far from what is usual: the limit is ")
        else:
            assert not any(record.failed for record in seen.records)
            assert all(record.logs[VICTIM]["clip_norm/length"] > 1e38 for record in seen.records[1:])


@dataclass(frozen=True)
class RunsAway(fp.FedAvg):
    def upload(self, client: Client, ctx: Context) -> State:
        upload = super().upload(client, ctx)
        return enormous(upload, upload) if ctx.client_id == VICTIM else upload


def test_what_is_no_upload_is_refused_if_a_worker_makes_it(tiny: Federation, spare: Pool) -> None:
    settings = config_of(model=MLP, train={"rounds": 1})
    for what in ("nothing", "sparse", "double"):
        seen = Collect()
        engine = Borrowed.of(spare, 1, Odd(what), settings, tiny)
        loop_for(Odd(what), settings, tiny, engine).run([seen])
        assert_refused(seen, WRONG[what][1])


def test_a_sound_upload_is_any_dict_of_dense_tensors() -> None:
    assert malformed({}) is None
    assert malformed({"w": torch.ones(2), "n": torch.tensor(3), "p": torch.nn.Parameter(torch.ones(1))}) is None
    assert malformed({"w": torch.ones(2).t(), "e": torch.empty(0)}) is None
    assert math.isinf(float(length({"w": torch.full((2,), 3e38)}))), "a square that overflows"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize(("method", "name"), [("pfedvem", "rho2"), ("fedsce", "distance/parameters")])
def test_a_number_of_a_type_that_has_no_mean_is_refused(
    method: str, name: str, dtype: torch.dtype, tiny: Federation
) -> None:
    """The server holds no such leaf that could say which type it must have."""
    change: Change = lambda upload, download: {**upload, name: torch.ones((), dtype=dtype)}  # noqa: E731
    _, seen = run(METHODS[method](), tiny, change, train={"rounds": 2})
    assert_refused(seen, f"{name} in its upload is {dtype} of shape (), of which there is no mean")
