"""Aggregators against a few lines of NumPy each; whom they protect from; which methods may use them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import fedprism as fp
from fedprism import aggregators, api
from fedprism.aggregators import AGGREGATORS, AcceptedUpload, Aggregator, Median, NormBounded, TrimmedMean, WeightedMean
from fedprism.config import Config, Named, structure
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Context, Method, State, UploadKind
from fedprism.methods.states import update_length
from fedprism.planning import resolve
from fedprism.round.engine import Result
from fedprism.round.loop import Loop
from fedprism.round.server import RoundUploads
from tests.harness import MLP, Collect, config_of, loop_for, same

Arrays = dict[str, np.ndarray[Any, Any]]  # leaf -> values `[uploads, ...]`

KINDS: dict[str, UploadKind] = {"w": "weights", "b": "weights", "mean": "buffers", "count": "buffers", "s": "scalar"}
NEEDS_ALL = [name for name, cls in METHODS.items() if cls().needs_all_uploads]


def uploads_of(count: int, seed: int = 0) -> list[AcceptedUpload]:
    """Random uploads with weights that differ, some of whose updates are long, and their download."""
    draw = torch.Generator().manual_seed(seed)
    origin = {"w": torch.randn(3, 4, generator=draw), "b": torch.randn(5, generator=draw), "mean": torch.zeros(2)}
    sent = []
    for place in range(count):
        far = 1.0 + 9.0 * (place % 3 == 1)
        state = {n: t + far * torch.randn(t.shape, generator=draw) for n, t in origin.items()}
        state["count"] = torch.randint(-50, 2**40, (), generator=draw)
        state["s"] = torch.randn((), generator=draw)
        length = float(update_length(state, origin, KINDS))
        sent.append(AcceptedUpload(state, KINDS, origin, length, (place + 1) / (count * (count + 1) / 2)))
    return sent


def rows(sent: Sequence[AcceptedUpload]) -> Arrays:
    """Leaf by leaf, in double precision."""
    return {n: np.stack([each.state[n].numpy() for each in sent]).astype(np.float64) for n in sent[0].state}


def assert_is(found: State, expected: Mapping[str, Any], like: State) -> None:
    assert found.keys() == expected.keys() == like.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (like[name].dtype, like[name].shape)
        value = np.asarray(expected[name])
        if tensor.is_floating_point():
            np.testing.assert_allclose(tensor.numpy(), value, rtol=1e-5, atol=1e-5)
        else:
            assert tensor.item() == np.rint(value)


# --- each by NumPy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10, 25])
@pytest.mark.parametrize("trim", [0, 0.1, 0.2, 0.28, 0.49])
def test_trimmed_mean(trim: float, count: int) -> None:
    """The share is exact: 0.28 of 25 are 7 at each end, although 0.28 x 25 is a little more in floating point."""
    sent = uploads_of(count)
    cut = min(math.ceil(Fraction(str(trim)) * count), (count - 1) // 2)
    expected = {n: np.sort(values, axis=0)[cut : count - cut].mean(0) for n, values in rows(sent).items()}
    assert_is(TrimmedMean(trim=trim).aggregate(sent), expected, sent[0].state)


@pytest.mark.parametrize(
    ("trim", "count", "cut"), [(0.28, 25, 7), (0.28, 26, 8), (0.2, 5, 1), (0.49, 3, 1), (0.49, 100, 49)]
)
def test_how_many_are_trimmed(trim: float, count: int, cut: int) -> None:
    """Of 0, 1, 4, 9, ... so many at each end are left out."""
    sent = [
        AcceptedUpload({"w": torch.tensor([float(i * i)])}, {"w": "weights"}, {}, 1.0, 1 / count) for i in range(count)
    ]
    left = [i * i for i in range(count)][cut : count - cut]
    assert TrimmedMean(trim=trim).aggregate(sent)["w"].item() == pytest.approx(sum(left) / len(left))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10, 30])
def test_median(count: int) -> None:
    """NumPy's, which is the mean of the middle two of an even number."""
    sent = uploads_of(count)
    assert_is(Median().aggregate(sent), {n: np.median(v, axis=0) for n, v in rows(sent).items()}, sent[0].state)


@pytest.mark.parametrize("aggregator", [TrimmedMean(), Median()])
def test_leaves_are_sorted_in_parts_of_any_size(aggregator: Aggregator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number at a time, or two: an odd one is left at the end of a leaf."""
    sent = uploads_of(5)
    whole = aggregator.aggregate(sent)
    for numbers in (1, 2):
        monkeypatch.setattr(aggregators, "AT_ONCE", numbers * len(sent))
        assert same(aggregator.aggregate(sent), whole)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_mean(count: int) -> None:
    sent = uploads_of(count)
    weights = np.array([each.weight for each in sent])
    expected = {n: np.tensordot(weights, values, 1) for n, values in rows(sent).items()}
    assert_is(WeightedMean().aggregate(sent), expected, sent[0].state)


@pytest.mark.parametrize("bound", [None, 0.5, 5.0, 1e9])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_norm_bounded(count: int, bound: float | None) -> None:
    """Weights together, and statistics by themselves. Scalars and counters are neither measured nor scaled."""
    sent = uploads_of(count)
    origin = {n: t.numpy().astype(np.float64) for n, t in sent[0].origin.items()}
    weights = np.array([each.weight for each in sent])
    expected = {n: np.tensordot(weights, values, 1) for n, values in rows(sent).items()}
    for names in (("w", "b"), ("mean",)):
        updates = {n: rows(sent)[n] - origin[n] for n in names}
        lengths = np.sqrt(sum((u**2).reshape(count, -1).sum(1) for u in updates.values()))
        most = np.median(lengths) if bound is None else bound
        share = np.minimum(1, most / lengths)
        expected |= {n: origin[n] + np.tensordot(weights * share, u, 1) for n, u in updates.items()}
        assert count == 1 or bound == 5.0 or (share < 1).any() == (bound != 1e9)
    assert_is(NormBounded(max=bound).aggregate(sent), expected, sent[0].state)


def test_a_bound_by_hand() -> None:
    """Updates of 3 and 40 from 1, with weights of a quarter and three: bounded to 4, the second counts as 4."""
    origin, kinds = {"w": torch.tensor([1.0])}, {"w": "weights", "s": "scalar"}
    sent = [
        AcceptedUpload({"w": torch.tensor([4.0]), "s": torch.tensor(0.0)}, kinds, origin, 3.0, 0.25),
        AcceptedUpload({"w": torch.tensor([41.0]), "s": torch.tensor(8.0)}, kinds, origin, 40.0, 0.75),
    ]
    found = NormBounded(max=4.0).aggregate(sent)
    assert found["w"].item() == 1 + 0.25 * 3 + 0.75 * 4
    assert found["s"].item() == 6.0, "a number beside the update keeps its value"
    assert NormBounded().aggregate(sent)["w"].item() == pytest.approx(1 + 0.25 * 3 + 0.75 * 21.5), "the median of 3, 40"


@pytest.mark.parametrize("aggregator", [TrimmedMean(), Median()])
def test_weights_do_not_count_in_a_vote(aggregator: Aggregator) -> None:
    sent = uploads_of(5)
    other = [replace(each, weight=1.0 if place == 1 else 0.0) for place, each in enumerate(sent)]
    assert same(aggregator.aggregate(sent), aggregator.aggregate(other))
    assert not same(NormBounded().aggregate(sent), NormBounded().aggregate(other))


@pytest.mark.parametrize("aggregator", [cls() for _, cls in AGGREGATORS.items()])
def test_uploads_are_not_changed_and_their_order_hardly_matters(aggregator: Aggregator) -> None:
    sent, untouched = uploads_of(6), uploads_of(6)
    found = aggregator.aggregate(sent)
    assert all(same(one.state, other.state) for one, other in zip(sent, untouched, strict=True))
    assert_is(aggregator.aggregate(sent[::-1]), {n: t.numpy() for n, t in found.items()}, sent[0].state)


@pytest.mark.parametrize("aggregator", [cls() for _, cls in AGGREGATORS.items()])
def test_a_single_upload_is_the_result(aggregator: Aggregator) -> None:
    (sent,) = uploads_of(1)
    assert same(aggregator.aggregate([sent]), sent.state)


# --- in a round ------------------------------------------------------------------------------------------------------


def gathered(
    method: Method, name: Any, federation: Federation, uploads: Mapping[str, State], weighting: str = "method"
) -> tuple[State, Loop]:
    """The server's next state from these uploads, of which all clients were asked for one."""
    settings = config_of(model=MLP, server={"aggregator": name}, clients={"weighting": weighting})
    loop = loop_for(method, settings, federation)
    ctx = loop.context(0)
    asked = {client_id: len(federation.clients[client_id].train) for client_id in federation.names}
    gathering = RoundUploads(method, (), loop.aggregator, loop.server, ctx, asked, None)
    for client_id, upload in uploads.items():
        own = ctx.replace(client_id=client_id, download=loop.download(client_id, ctx))
        answer = Result({}, upload, {}, {})
        sent = gathering.check(client_id, answer, loop.declared(client_id, 0), own)
        assert isinstance(sent, AcceptedUpload)
        gathering.add(client_id, sent)
    return loop.aggregate(gathering), loop


@pytest.mark.parametrize("asked", ["all", "two of three"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn"])
@pytest.mark.parametrize("name", ["trimmed_mean", "median", "norm_bounded"])
def test_where_all_send_the_same_it_is_the_mean(name: str, method: str, asked: str, unequal: Federation) -> None:
    """Also of SCAFFOLD's control variates and FedDyn's h, which are sums over all clients: two thirds, if one fails."""
    made, draw = METHODS[method](), torch.Generator().manual_seed(0)
    server = loop_for(made, config_of(model=MLP), unequal).server
    names = {n for n in server if not n.startswith("h.")}
    upload = {n: server[n] + torch.randn(server[n].shape, generator=draw) for n in names}
    uploads = dict.fromkeys(unequal.names[: 3 if asked == "all" else 2], upload)
    found, mean = (gathered(made, each, unequal, uploads)[0] for each in (name, "mean"))
    for leaf, tensor in mean.items():
        torch.testing.assert_close(found[leaf], tensor, rtol=1e-5, atol=1e-5)
        moved = (tensor - server[leaf]).abs().max()
        assert moved > 0.1
    if method == "scaffold":
        share = 1 if asked == "all" else 2 / 3
        leaf = next(n for n in server if n.startswith("c."))
        torch.testing.assert_close(found[leaf], server[leaf] + share * upload[leaf])


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_a_bound_that_bounds_nothing_is_the_mean(method: str, unequal: Federation) -> None:
    """Of clients of different sizes: weights count in the mean of weights, and not in the sums over all clients."""
    made, draw = METHODS[method](), torch.Generator().manual_seed(0)
    server = loop_for(made, config_of(model=MLP), unequal).server
    names = {n for n in server if not n.startswith("h.")}
    uploads = {c: {n: server[n] + torch.randn(server[n].shape, generator=draw) for n in names} for c in unequal.names}
    bounds = {"name": "norm_bounded", "max": 1e9}
    found, mean = (gathered(made, each, unequal, uploads, "samples")[0] for each in (bounds, "mean"))
    for leaf, tensor in mean.items():
        torch.testing.assert_close(found[leaf], tensor, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Boosts(fp.FedAvg):
    """One client sends its update a hundred times over."""

    who: str = ""

    def upload(self, client: fp.Client, ctx: Context) -> State:
        state, times = super().upload(client, ctx), 100 if ctx.client_id == self.who else 1
        return {n: ctx.download[n] + times * (t - ctx.download[n]) for n, t in state.items()}


@pytest.fixture(scope="module")
def five() -> Federation:
    return fp.make_federation("digits-skew", clients=5, seed=0, samples=30, split={"validation": 0.02, "test": 0.05})


def moved(name: str | dict[str, Any], who: str, federation: Federation) -> float:
    """How far the server moves in one round."""
    settings = config_of(model=MLP, train={"rounds": 1}, server={"aggregator": name})
    loop, seen = loop_for(Boosts(who), settings, federation), Collect()
    assert loop.run([seen]) == "finished"
    assert not seen.records[1].failed, "a hundred times is not far enough to be refused"
    first = seen.snapshots[0].server
    return math.sqrt(sum(float((loop.server[n] - t).double().square().sum()) for n, t in first.items()))


def test_one_of_five_that_boosts_its_update_moves_the_mean_alone(five: Federation) -> None:
    """By 20 times its update and more; the others by no more than twice what they move anyway."""
    plain = {name: moved(name, "", five) for name in AGGREGATORS}
    boosted = {name: moved(name, five.names[2], five) for name in AGGREGATORS}
    assert boosted["mean"] > 10 * plain["mean"]
    for name in ("trimmed_mean", "median", "norm_bounded"):
        assert boosted[name] < 2 * plain[name], name
    assert moved({"name": "trimmed_mean", "trim": 0}, five.names[2], five) > 10 * plain["mean"]
    assert moved({"name": "norm_bounded", "max": 1e-3}, five.names[2], five) <= 1.001e-3


def test_the_mean_gives_the_bits_of_a_run_without_an_aggregator(unequal: Federation) -> None:
    """Added up as they come, or all at once by the same class under another name."""
    for method in ("fedavg", "scaffold", "feddyn"):
        runs = []
        for server in ({}, {"aggregator": "mean"}, {"aggregator": f"{__name__}:AllAtOnce"}):
            loop, seen = loop_for(METHODS[method](), config_of(model=MLP, server=server), unequal), Collect()
            assert loop.run([seen]) == "finished"
            runs.append((loop, [replace(record, seconds={}) for record in seen.records]))
        for loop, records in runs[1:]:
            assert records == runs[0][1]
            assert same(loop.server, runs[0][0].server), method


@dataclass(frozen=True)
class AllAtOnce(Aggregator):
    """the weighted mean, of all uploads at once"""


@pytest.mark.parametrize("method", NEEDS_ALL)
@pytest.mark.parametrize("name", ["trimmed_mean", "median", "norm_bounded"])
def test_a_method_whose_aggregation_is_no_mean_refuses(name: str, method: str, unequal: Federation) -> None:
    """When its loop is made, and already when a comparison is planned; `mean` changes nothing and is fine."""
    settings = config_of(model=MLP, server={"aggregator": name}, method=method)
    words = rf"server\.aggregator is {name}, but {method} has an aggregation of its own.* Leave it at mean\."
    with pytest.raises(ConfigError, match=words):
        loop_for(METHODS[method](), settings, unequal)
    with pytest.raises(ConfigError, match=words):
        resolve(settings)
    loop_for(METHODS[method](), config_of(model=MLP, server={"aggregator": "mean"}), unequal)


@pytest.mark.parametrize(
    ("aggregator", "words"),
    [
        ("meen", "unknown aggregator 'meen'. Did you mean 'mean'?"),
        ({"name": "trimmed_mean", "trim": 0.5}, "server.aggregator.trim is 0.5; expected 0 to below 0.5"),
        ({"name": "norm_bounded", "max": 0}, "server.aggregator.max is 0.0; expected above 0"),
        ({"name": "median", "trim": 0.1}, "unknown key 'trim'"),
        ("json:JSONDecoder", "expected a frozen dataclass that derives from fedprism.Aggregator"),
    ],
)
def test_bad_settings_are_refused(aggregator: Any, words: str, unequal: Federation) -> None:
    with pytest.raises(ConfigError) as error:
        loop_for(fp.FedAvg(), config_of(model=MLP, server={"aggregator": aggregator}), unequal)
    assert words in str(error.value)


@dataclass(frozen=True)
class Wrong(Aggregator):
    """an aggregator that returns something else"""

    what: Literal["none", "few", "double", "nan"] = "none"

    def aggregate(self, uploads: Sequence[AcceptedUpload]) -> State:
        whole = super().aggregate(uploads)
        if self.what == "none":
            return None  # type: ignore[return-value]
        if self.what == "nan":
            return {n: t * math.nan for n, t in whole.items()}
        return dict(list(whole.items())[1:]) if self.what == "few" else {n: t.double() for n, t in whole.items()}


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("none", "returned None"),
        ("few", "weight it returned nothing"),
        ("double", "torch.float64"),
        ("nan", "weight is not finite, though every upload is"),
    ],
)
def test_what_an_aggregator_returns_is_checked(what: str, found: str, unequal: Federation) -> None:
    settings = config_of(model=MLP, server={"aggregator": {"name": f"{__name__}:Wrong", "what": what}})
    with pytest.raises(FedprismError, match=f"aggregator wrong must return names, types and shapes .*{found}"):
        loop_for(fp.FedAvg(), settings, unequal).run([])


def test_an_aggregator_of_ones_own_from_a_file(tmp_path: Path, unequal: Federation) -> None:
    """It keeps the first client's upload. Its absolute path is recorded."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedprism import Aggregator\n"
        "@dataclass(frozen=True)\n"
        "class First(Aggregator):\n"
        "    def aggregate(self, uploads):\n"
        "        return dict(uploads[0].state)\n"
    )
    name = f"{tmp_path}/own.py:First"
    settings = config_of(model=MLP, train={"rounds": 1}, server={"aggregator": name}, run={"engine": "inprocess"})
    loop = loop_for(fp.FedAvg(), settings, unequal)
    assert loop.run([]) == "finished"
    first = replace(unequal, clients={"plain": unequal.clients["plain"]})
    alone = loop_for(fp.FedAvg(), config_of(model=MLP, train={"rounds": 1}), first)
    assert alone.run([]) == "finished"
    assert same(loop.server, alone.server)
    assert resolve(settings).server.aggregator == Named(f"{(tmp_path / 'own.py').resolve()}:First", {})


def test_a_run_records_its_aggregator(tmp_path: Path) -> None:
    raw = {
        "data": {"name": "digits-skew", "partition": {"name": "domain", "clients": 3}, "samples": 30},
        "model": MLP,
        "train": {"rounds": 2, "batch_size": 16},
        "server": {"aggregator": "trimmed_mean"},
        "run": {"device": "cpu", "engine": "inprocess"},
    }
    run = api.run_config(structure(raw, Config), "x", out=tmp_path / "run")
    assert run.status == "finished"
    assert run.record.config.server.aggregator == Named("trimmed_mean", {"trim": 0.2})
