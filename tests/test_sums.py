"""Uploads are added up as they come: the bits of all at once, in client order, with few of them in memory."""

from __future__ import annotations

import math
import os
import random
import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import fedprism as fp
from fedprism.config import Config, structure
from fedprism.conformance.spies import Reversed, Spy, Without
from fedprism.engines import EngineFactory
from fedprism.engines.cuda import engine as cuda_engine
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.engines.processes import engine as processes
from fedprism.engines.processes.handle import Pool
from fedprism.engines.queue import ClientQueue
from fedprism.errors import FedprismError
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Client, Context, Mean, Method, Net, State, Upload, UploadKind
from fedprism.methods.states import WeightedSum, average
from fedprism.round.client import Job, client_receive, make_info
from fedprism.round.engine import Failure, Request, Result
from fedprism.round.loop import Loop, in_order
from fedprism.store.serialize import size
from tests.harness import CPU, MLP, Borrowed, Collect, config_of, cut, engine_run, loop_for, same

pytestmark = pytest.mark.full

FAILING = ["fedavg", "scaffold", "feddyn", "lg-fedavg", "fedkd"]


def loop_with(engine: Any, method: Method, settings: Config, federation: Federation) -> Loop:
    info = make_info(settings, federation.names, federation.classes, federation.shape)
    return loop_for(method, settings, federation, engine(method, settings, info, federation, CPU))


def decoded(loop: Loop, answers: Mapping[str, Result | Failure], ctx: Context) -> list[Upload]:
    """What arrived, as the server sees it, in client order."""
    return [
        Upload(c, len(loop.federation.clients[c].train), loop.method.decode(answer.upload, ctx.replace(client_id=c)))
        for c, answer in answers.items()
        if isinstance(answer, Result)
    ]


@pytest.fixture(scope="module")
def small(tiny: Federation) -> Federation:
    """8, 9 and 10 training images."""
    return cut(tiny, (8, 9, 10))


@pytest.fixture(scope="module")
def thirty() -> Federation:
    return fp.make_federation("digits-skew", clients=30, seed=0, samples=6, split={"validation": 0.02, "test": 0.05})


# --- the sum ---------------------------------------------------------------------------------------------------------


def test_a_sum_by_hand() -> None:
    """A quarter of (1, 2) and three quarters of (5, 6); counters are rounded at the end, and not before."""
    total = WeightedSum()
    total.add({"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(1)}, 0.25)
    total.add({"w": torch.tensor([5.0, 6.0]), "n": torch.tensor(2)}, 0.75)
    found = total.result()
    assert found["w"].tolist() == [4.0, 5.0]
    assert (found["n"].item(), found["n"].dtype) == (2, torch.int64)
    assert total.result(2.0)["w"].tolist() == [8.0, 10.0]
    assert total.result(2.0)["n"].item() == 4, "1.75 times two is 3.5, and not two times 2"


def test_adding_changes_no_upload_and_no_result_that_was_given() -> None:
    upload, total = {"w": torch.ones(2)}, WeightedSum()
    total.reserve(upload)
    assert total.result()["w"].tolist() == [0.0, 0.0]
    total.add(upload, 0.5)
    assert upload["w"].tolist() == [1.0, 1.0]
    assert total.result()["w"].tolist() == [0.5, 0.5]


def test_a_sum_is_the_average_of_all_at_once() -> None:
    draw = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(9, generator=draw), "n": torch.tensor(place)} for place in range(7)]
    total = WeightedSum()
    for state in states:
        total.add(state, 1 / 7)
    assert same(total.result(), average(states, [1 / 7] * 7))
    torch.testing.assert_close(total.result()["w"], torch.stack([s["w"] for s in states]).mean(0))


def test_short_floats_are_added_up_in_longer_ones() -> None:
    """5,000 times 1/5000 is 1; bfloat16 stops at 1/16, where the next number is too far away."""
    for dtype in (torch.bfloat16, torch.float16):
        total = WeightedSum()
        for _ in range(5000):
            total.add({"w": torch.ones(1, dtype=dtype), "c": torch.ones(1) * 1j}, 1 / 5000)
        found = total.result()
        assert (found["w"].item(), found["w"].dtype) == (1.0, dtype)
        assert found["c"].item() == pytest.approx(1j, rel=1e-3), "numbers of two parts have a mean, too"


# --- in client order -------------------------------------------------------------------------------------------------


def test_answers_are_taken_in_order_each_as_soon_as_it_can_be() -> None:
    def answers() -> Iterator[tuple[str, Failure]]:
        for client_id in "bdac":
            asked.append(client_id)
            yield client_id, Failure(client_id)

    asked: list[str] = []
    taken = [(client_id, answer.reason, "".join(asked)) for client_id, answer in in_order("abcde", answers())]
    assert taken == [
        ("a", "a", "bda"),
        ("b", "b", "bda"),
        ("c", "c", "bdac"),
        ("d", "d", "bdac"),
        ("e", "gave no answer", "bdac"),
    ]


class Shuffled(Spy):
    """Clients run, and answer, in another order every time."""

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        order = list(requests)
        random.Random(round).shuffle(order)
        return super().train(round, {client_id: requests[client_id] for client_id in order})


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "fedfomo"])
@pytest.mark.parametrize("engine", [Reversed, Shuffled])
def test_the_order_of_answers_changes_no_bit(engine: type[Spy], method: str, unequal: Federation) -> None:
    settings, found = config_of(model=MLP), []
    for each in (InProcess, engine):
        loop, seen = loop_with(each, METHODS[method](), settings, unequal), Collect()
        assert loop.run([seen]) == "finished"
        found.append((loop, [replace(record, seconds={}) for record in seen.records]))
    (one, records), (other, shuffled) = found
    assert records == shuffled
    assert [list(record.up) for record in shuffled[1:]] == [list(unequal.names)] * 3
    assert same(one.server, other.server)
    assert all(same(one.states[c], other.states[c]) for c in unequal.names)
    assert one.usual_length == other.usual_length


@pytest.mark.parametrize("name", METHODS)
def test_one_by_one_has_the_bits_of_all_at_once(name: str, small: Federation) -> None:
    """`aggregate` of a list of all uploads gives what the round made of them."""
    method = METHODS[name]()
    loop = loop_with(Spy, method, config_of(train={"batch_size": 8}, evaluate={"every": 9}), small)
    assert isinstance(loop.engine, Spy)
    for round in range(2):
        server, ctx = loop.server, loop.context(round)
        record, _ = loop.one_round(round)
        assert not record.failed
        uploads = decoded(loop, loop.engine.answers[round], ctx)
        assert same(loop.server, method.aggregate(server, uploads, ctx))


# --- who is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAILING)
def test_without_one_client_it_is_the_mean_of_the_others(name: str, unequal: Federation) -> None:
    """Weighted by samples or alike, as the method says; totals are over all clients, missing ones included."""
    method, victim = METHODS[name](), unequal.names[1]
    loop = loop_with(partial(Without, victim), method, config_of(), unequal)
    assert isinstance(loop.engine, Spy)
    for round in range(2):
        server, ctx = loop.server, loop.context(round)
        record, _ = loop.one_round(round)
        assert record.failed == {victim: "gone"}
        uploads = decoded(loop, loop.engine.answers[round], ctx)
        assert [upload.client_id for upload in uploads] == [unequal.names[0], unequal.names[2]]
        expected = method.aggregate(server, uploads, ctx)
        assert expected.keys() == loop.server.keys()
        for leaf, tensor in expected.items():
            torch.testing.assert_close(loop.server[leaf], tensor, rtol=1e-6, atol=1e-6)
        samples = [upload.samples for upload in uploads]
        shares = [s / sum(samples) for s in samples] if ctx.weighting == "samples" else [0.5, 0.5]
        if name == "fedavg":
            for leaf in (leaf for leaf, tensor in server.items() if tensor.is_floating_point()):
                mean = sum(share * u.state[leaf].double() for share, u in zip(shares, uploads, strict=True))
                torch.testing.assert_close(loop.server[leaf], mean.float(), rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]


def test_nobody_left_out_is_not_rescaled(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 40, 25 and 10 in 75 add up to one but for rounding; once, at the end, where somebody is missing."""
    scales: list[float] = []
    plain = WeightedSum.result

    def result(total: WeightedSum, scale: float = 1.0) -> State:
        scales.append(scale)
        return plain(total, scale)

    monkeypatch.setattr(WeightedSum, "result", result)
    loop_with(Spy, fp.FedAvg(), config_of(model=MLP), unequal).one_round(0)
    assert set(scales) == {1.0}
    scales.clear()
    loop_with(partial(Without, unequal.names[0]), fp.FedAvg(), config_of(model=MLP), unequal).one_round(0)
    assert [scale for scale in scales if scale != 1.0] == [pytest.approx(75 / 35)]


# --- memory ----------------------------------------------------------------------------------------------------------


class Counted:
    """How many uploads are alive whenever there is another one."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def watch(self, answers: Iterator[tuple[str, Result | Failure]]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, answer in answers:
            assert isinstance(answer, Result)
            self.seen += [weakref.ref(next(iter(answer.upload.values())))]
            self.alive.append(sum(each() is not None for each in self.seen))
            yield client_id, answer
            del answer


SHORT = {"model": MLP, "train": {"rounds": 1}}


def most_alive(method: Method, federation: Federation, workers: int = 0, spare: Pool | None = None) -> int:
    """The most uploads at a time in a round, in this process or with so many workers."""
    counted, settings = Counted(), config_of(**SHORT)
    info = make_info(settings, federation.names, federation.classes, federation.shape)

    class Here(InProcess):
        def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
            return counted.watch(super().train(round, requests))

    class There(Borrowed):
        def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
            return counted.watch(super().train(round, requests))

    here = Here(method, settings, info, federation, CPU)
    engine = here if spare is None else There.of(spare, workers, method, settings, federation)
    assert loop_for(method, settings, federation, engine).run([]) == "finished"
    assert len(counted.alive) == 30
    return max(counted.alive)


@dataclass(frozen=True)
class Short(fp.FedAvg):
    """What the server sends is made for each client."""

    def encode(self, state: State, ctx: Context) -> State:
        return {name: tensor.half() for name, tensor in state.items()}

    def decode(self, state: State, ctx: Context) -> State:
        return {name: tensor.float() for name, tensor in state.items()}


@pytest.mark.parametrize(("method", "where"), [(Short(), "memory"), (Short(), "disk"), (fp.FedAMP(), "memory")])
def test_few_downloads_are_in_memory_at_a_time(method: Method, where: str, thirty: Federation) -> None:
    """In a round, and in an evaluation of all clients: that of the client whose turn it is, and of the one before. Also
    where all uploads wait for the end of the round."""
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watched(InProcess):
        def place(self, state: State) -> State:
            seen.extend(weakref.ref(tensor) for tensor in list(state.values())[:1])  # a client stores nothing
            alive.append(sum(each() is not None for each in seen))
            return state

    settings = config_of(**SHORT, clients={"state": where})
    engine = Watched(method, settings, make_info(settings, thirty.names, thirty.classes, thirty.shape), thirty, CPU)
    assert loop_for(method, settings, thirty, engine).run([]) == "finished"
    assert len(seen) > 90
    assert max(alive) <= 4


def test_few_uploads_are_in_memory_at_a_time(thirty: Federation) -> None:
    """The one that is added; all thirty where the method needs them together."""
    assert most_alive(fp.FedAvg(), thirty) <= 2
    assert most_alive(AllAtOnce(), thirty) == 30


@pytest.mark.skipif(os.name != "posix", reason="worker processes need Linux or macOS")
def test_workers_answer_within_their_window(thirty: Federation, spare: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers with two clients each, and one answer that has just been read."""
    monkeypatch.setattr(processes, "WAITING", 0)
    assert most_alive(fp.FedAvg(), thirty, 2, spare) <= 5


@dataclass(frozen=True)
class AllAtOnce(fp.FedAvg):
    """FedAvg that looks at all uploads; one client's is not a number."""

    who: str = ""
    saw: list[list[str]] = field(default_factory=list)

    def upload(self, client: Client, ctx: Context) -> State:
        scale = math.nan if ctx.client_id == self.who else 1.0
        return {n: t * scale for n, t in super().upload(client, ctx).items()}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        self.saw.append([upload.client_id for upload in uploads])
        return super().aggregate(server, uploads, ctx)


def test_a_method_with_an_aggregation_of_its_own_is_given_all(unequal: Federation) -> None:
    """All that were accepted, in client order, at once: the bits of FedAvg."""
    settings = config_of(model=MLP)
    method, broken = AllAtOnce(), AllAtOnce(unequal.names[1])
    assert method.needs_all_uploads
    loop = loop_with(Reversed, method, settings, unequal)
    assert loop.run([]) == "finished"
    assert method.saw == [list(unequal.names)] * 3
    plain = loop_with(InProcess, fp.FedAvg(), settings, unequal)
    plain.run([])
    assert same(loop.server, plain.server)
    assert loop_with(InProcess, broken, settings, unequal).run([]) == "finished"
    assert broken.saw == [[unequal.names[0], unequal.names[2]]] * 3


def test_a_queue_with_a_window_never_hands_out_beyond_it() -> None:
    """Whoever answers first, and whoever dies; everybody is handed out, and nobody waits for ever."""
    for seed in range(200):
        draw = random.Random(seed)
        names = [str(number) for number in range(draw.randint(1, 20))]
        cost = {name: draw.choice([1.0, 2.0, 9.0]) for name in names}
        window, workers = draw.randint(1, 6), draw.randint(1, 4)
        queue, under_way, answered = ClientQueue(names, cost.__getitem__, window), list[str](), set[str]()
        while len(answered) < len(names):
            while len(under_way) < workers and (client_id := queue.take()) is not None:
                first = next(place for place, name in enumerate(names) if name not in answered)
                assert names.index(client_id) < first + window
                assert client_id not in answered
                assert client_id not in under_way
                under_way.append(client_id)
            assert under_way, "somebody can always work"
            place = draw.randrange(len(under_way))
            if draw.random() < 0.2:
                queue.put_back([under_way.pop(place)])
                continue
            answered.add(under_way[place])
            queue.answered(under_way.pop(place))
        assert len(queue) == 0
        assert queue.take() is None


# --- groups of clients on a GPU --------------------------------------------------------------------------------------


class Tight(CudaGraphs):
    """A device that holds the answers of two clients at a time."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.limit = 1
        self.groups: list[tuple[int, ...]] = []
        self.heard: list[tuple[int, int]] = []

    def _all(self, work: Any, read: Any, round: int, requests: Mapping[str, Request], *place: Any) -> Any:
        self.groups.append((len(requests), *place))
        return super()._all(work, read, round, requests, *place)

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        told = self.on_progress
        self.on_progress = lambda done, total: (self.heard.append((done, total)), told(done, total))[1]
        yield from super().train(round, requests)
        self.on_progress = told


@pytest.fixture(scope="module")
def five() -> Federation:
    return fp.make_federation("digits-skew", clients=5, seed=0, samples=20, split={"validation": 0.02, "test": 0.05})


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedfomo", "scaffold"])
def test_groups_of_clients_give_the_same_bits(method: str, five: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clients with one slot on a device that holds two answers: two, two and one."""
    monkeypatch.setattr(cuda_engine, "MAX_SLOTS", 1)
    raw = {"train": {"rounds": 2, "batch_size": 8}, "evaluate": {"moments": ["received"]}}
    kinds: list[EngineFactory] = [InProcess, Tight]
    (one, seen), (two, grouped) = (engine_run(kind, METHODS[method](), structure(raw, Config), five) for kind in kinds)
    assert isinstance(two.engine, Tight)
    rounds = [group for group in two.engine.groups if len(group) > 1]  # evaluations have no groups
    assert rounds == [(2, 0, 5), (2, 2, 5), (1, 4, 5)] * 2
    assert two.engine.heard == [(done, 5) for done in (1, 2, 3, 4, 5)] * 2
    assert same(one.server, two.server)
    assert all(same(one.states[c], two.states[c]) for c in five.names)
    plain, other = ([replace(record, seconds={}) for record in each.records] for each in (seen, grouped))
    assert plain == other


def test_clients_that_only_receive_go_in_groups_too(five: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "MAX_SLOTS", 1)
    raw = {"train": {"rounds": 2, "batch_size": 8}, "clients": {"participation": 0.2, "broadcast": "all"}}
    kinds: list[EngineFactory] = [InProcess, Tight]
    (one, _), (two, _) = (engine_run(kind, METHODS["fedbn"](), structure(raw, Config), five) for kind in kinds)
    assert isinstance(two.engine, Tight)
    assert [group for group in two.engine.groups if len(group) > 1] == [(1, 0, 1), (2, 0, 4), (2, 2, 4)] * 2
    assert all(same(one.states[c], two.states[c]) for c in five.names)


@dataclass(frozen=True)
class Diverges(fp.FedAvg):
    """A loss that is infinite at the first two of five clients."""

    at: tuple[str, ...] = ()

    def start(self, client: Client, ctx: Context) -> None:
        client.keep("scale", math.inf if ctx.client_id in self.at else 1.0)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(client, x, y) * client["scale"]


def test_a_group_that_fails_says_nothing_about_the_size_of_answers(
    five: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next group would be as large as if they took no room."""

    class Roomy(Tight):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.limit = 1000  # bytes: much more than a byte per client, and less than an answer

    monkeypatch.setattr(cuda_engine, "MAX_SLOTS", 1)
    settings = structure({"train": {"rounds": 1, "batch_size": 8}, "evaluate": {"moments": ["received"]}}, Config)
    loop, seen = engine_run(Roomy, Diverges(five.names[:2]), settings, five)
    assert isinstance(loop.engine, Roomy)
    assert [group for group in loop.engine.groups if len(group) > 1] == [(2, 0, 5), (2, 2, 5), (1, 4, 5)]
    assert list(seen.records[1].failed) == list(five.names[:2])
    assert loop.engine.answer_size is not None
    assert loop.engine.answer_size > 1000


def test_what_is_packed_takes_its_whole_room_on_the_device(five: Federation) -> None:
    """Groups are as large as uploads allow that transforms have not packed yet: these lie there together."""
    settings = {"model": MLP, "train": {"rounds": 1}, "transforms": [{"name": "quantize", "bits": 4}]}
    loop, _ = engine_run(CudaGraphs, fp.FedAvg(), config_of(**settings), five)
    assert isinstance(loop.engine, CudaGraphs)
    assert loop.engine.answer_size == size(loop.server)


# --- uploads of which there is no mean -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extra(Method):
    """Beside its leaves a client sends one more; the first client sends another one, or none at all."""

    odd: Literal["shape", "type", "names", "unknown", "totals", "nothing"]

    def server(self, model: Net, ctx: Context) -> State:
        return {**super().server(model, ctx), **({} if self.odd == "unknown" else {"extra": torch.zeros(3)})}

    def uploads(self, model: Net, ctx: Context) -> dict[str, UploadKind]:
        if self.odd == "names" and ctx.client_id == "plain":
            return {}
        return {**super().uploads(model, ctx), "extra": "buffers"}

    def upload(self, client: Client, ctx: Context) -> State:
        if self.odd == "names" and ctx.client_id == "plain":
            return {}
        extra = torch.ones(3)
        if ctx.client_id == "plain":
            extra = extra[:2].clone() if self.odd == "shape" else extra.double() if self.odd == "type" else extra
        return {**super().upload(client, ctx), "extra": extra}

    def totals(self, server: State, ctx: Context) -> Collection[str]:
        return ["extr"] if self.odd == "totals" else []

    def combine(self, server: State, mean: Mean, ctx: Context) -> State:
        return None if self.odd == "nothing" else {**server, **mean.state}  # type: ignore[return-value]


@pytest.mark.parametrize("aggregator", ["mean", "median"])
@pytest.mark.parametrize("odd", ["shape", "type"])
def test_a_leaf_unlike_that_of_the_server_is_a_failure(odd: Any, aggregator: str, unequal: Federation) -> None:
    """Of whoever sends it: also of the first client, with which all others differ."""
    settings = config_of(model=MLP, train={"rounds": 1}, server={"aggregator": aggregator})
    loop, seen = loop_for(Extra(odd), settings, unequal), Collect()
    assert loop.run([seen]) == "finished"
    ((client_id, reason),) = seen.records[1].failed.items()
    assert client_id == "plain"
    assert re.fullmatch(r"extra in its upload is torch\.\w+ of .*, expected torch\.float32 of shape \(3,\)", reason)
    assert loop.server["extra"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        # Its weight must not be in a mean that it is not in.
        ("names", "'tinted' uploads other names than the clients before it .* override `aggregate`"),
        ("unknown", "'plain' uploads extra, which the server does not hold.* Let `server` return"),
        ("totals", "extra.totals names extr, which 'plain' does not upload"),
        ("nothing", "extra.combine returned None; expected the server's next state"),
    ],
)
def test_a_method_whose_uploads_have_no_mean_is_refused(odd: Any, words: str, unequal: Federation) -> None:
    with pytest.raises(FedprismError, match=words):
        loop_for(Extra(odd), config_of(model=MLP), unequal).run([])


@dataclass(frozen=True)
class Forgets(Method):
    """Its download leaves out what it shares."""

    def decode(self, state: State, ctx: Context) -> State:
        return {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}

    def encode(self, state: State, ctx: Context) -> State:
        return state


def test_what_is_shared_must_be_received_or_stored(unequal: Federation) -> None:
    words = "num_batches_tracked of client 'plain' is neither received nor stored"
    loop = loop_for(Forgets(), config_of(), unequal)
    client_id = unequal.names[0]
    job = Job(loop.method, loop.config, loop.info, unequal.clients[client_id], 1)
    with pytest.raises(FedprismError, match=words):
        client_receive(job, {}, loop.server)
