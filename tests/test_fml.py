"""FML: what each model learns from the other, by hand; without that it is Local beside FedAvg; mixed clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.config import Config, Named, structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Client, Method, State, Upload
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fml import FML
from fedprism.methods.local import Local
from fedprism.round.client import Job, client_evaluate, make_info, open_slot
from fedprism.round.loop import Loop
from fedprism.round.training import model_inputs
from tests.harness import Collect, cut, loop_for, models_of, same

pytestmark = pytest.mark.slow

SMALL = {"name": "mlp", "hidden": [8]}
THREE = [{"name": "mlp", "hidden": [16]}, "lenet-bn", {"name": "resnet18", "width": 4}]


def config_of(**sections: Any) -> Config:
    evaluate = {"splits": ["test"], "moments": ["received", "global"]}
    return structure({"train": {"rounds": 2, "batch_size": 16}, "evaluate": evaluate, **sections}, Config)


def trained(method: Method, federation: Federation, **sections: Any) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def under(state: Mapping[str, Tensor] | None, part: str) -> State:
    """What a part holds, by its own names."""
    assert state is not None
    return {name.removeprefix(f"{part}."): t for name, t in state.items() if name.startswith(f"{part}.")}


def slot(method: FML, federation: Federation) -> tuple[Client, Tensor, Tensor]:
    """A client whose meme is of another architecture than its private model, and its first images."""
    config = config_of()
    info = make_info(config, federation.names, federation.classes, federation.shape)
    data = federation.clients["tinted"]
    return open_slot(Job(method, config, info, data, 0)), model_inputs(data.train.x[:8], config), data.train.y[:8]


def gradients(method: FML, federation: Federation) -> tuple[State, State]:
    """Of the loss, by the private model's parameters and by the meme's."""
    client, x, y = slot(method, federation)
    client.model.eval()  # the same scores in every forward pass
    method.loss(client, x, y).backward()  # type: ignore[no-untyped-call]
    return tuple(  # type: ignore[return-value]
        {name: p.grad for name, p in part.named_parameters()} for part in (client.model.private, client.model.meme)
    )


# --- the loss --------------------------------------------------------------------------------------------------------


def test_loss_by_hand(tiny: Federation) -> None:
    """Predictions (1/4, 3/4) and (1/2, 1/2) of an image of class 1."""
    client, _, _ = slot(FML(), tiny)
    private, meme = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)
    y = torch.tensor([1])
    to_private = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # KL(meme || private)
    to_meme = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)  # KL(private || meme)
    own = FML().taught(client, "private", private, meme, y, 0.3)
    assert float(own) == pytest.approx(0.3 * math.log(4 / 3) + 0.7 * to_private, rel=1e-6)
    other = FML().taught(client, "meme", meme, private, y, 0.6)
    assert float(other) == pytest.approx(0.6 * math.log(2) + 0.4 * to_meme, rel=1e-6)
    assert to_private != pytest.approx(to_meme, rel=0.05)  # so a KL the wrong way round is seen
    assert {name: float(value) for name, value in client.log_sums.items()} == pytest.approx(
        {"kl/private": to_private, "kl/meme": to_meme}, rel=1e-6
    )


def test_each_learns_from_the_other_and_neither_teaches_against_its_labels(tiny: Federation) -> None:
    """The KL alone moves both models; a model that learns from labels alone is not moved by being the target."""
    meme = Named("mlp", {"hidden": [8]})
    for part in gradients(FML(alpha=0.0, beta=0.0, meme=meme), tiny):
        assert all(float(grad.norm()) > 1e-5 for name, grad in part.items() if name.endswith("fc2.weight"))
    client, x, y = slot(FML(meme=meme), tiny)
    client.model.eval()
    cross_entropy(client.model.private(x), y).backward()  # type: ignore[no-untyped-call]
    labels = {name: p.grad for name, p in client.model.private.named_parameters()}
    pupil, _ = gradients(FML(alpha=1.0, beta=0.0, meme=meme), tiny)
    assert all(torch.equal(pupil[name], grad) for name, grad in labels.items() if grad is not None)
    mixed, _ = gradients(FML(alpha=0.5, beta=0.0, meme=meme), tiny)
    assert not torch.allclose(mixed["head.fc2.weight"], 0.5 * pupil["head.fc2.weight"])


def test_models_that_start_alike_have_nothing_to_teach_each_other_yet(tiny: Federation) -> None:
    """One architecture has one set of first weights; the two differ from the first average on."""
    loop, seen = trained(FML(), tiny)
    first, last = seen.records[1].logs, seen.records[2].logs
    for client_id, logs in first.items():
        assert abs(logs["kl/private"]) < 1e-6 < 1e-3 < last[client_id]["kl/private"]
    state = models_of(loop, 1)["tinted"]
    assert same(under(state, "private"), under(state, "meme"))
    other, unlike = trained(FML(meme=Named("cnn4")), tiny)
    assert all(logs["kl/private"] > 1e-3 for logs in unlike.records[1].logs.values())
    assert len(other.server) != len(loop.server)


# --- limit cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_by_labels_alone_it_is_local_beside_fedavg(participation: float, tiny: Federation) -> None:
    clients = {"participation": participation}
    both, seen = trained(FML(alpha=1.0, beta=1.0), tiny, clients=clients)
    (alone, own), (average, common) = trained(Local(), tiny, clients=clients), trained(FedAvg(), tiny, clients=clients)
    assert same(under(both.server, "meme"), average.server)
    assert models_of(alone).keys() == models_of(both).keys()
    for client_id, state in models_of(alone).items():
        assert same(under(models_of(both)[client_id], "private"), state)
    for record, other, shared in zip(seen.records, own.records, common.records, strict=True):
        assert record.scores["received"] == other.scores["received"]
        assert record.scores["global"] == shared.scores["global"]
    taught, _ = trained(FML(alpha=0.9, beta=1.0), tiny, clients=clients)
    assert same(taught.server, both.server)  # the meme does not notice that somebody learns from it
    assert not any(same(under(models_of(taught)[c], "private"), s) for c, s in models_of(alone).items())


def test_memes_count_the_same_however_many_images_they_saw(tiny: Federation) -> None:
    loop, _ = trained(FML(), cut(tiny, (40, 25, 10)), train={"rounds": 1})
    ctx = loop.context(0)
    uploads = [Upload(c, n, {"meme.w": torch.tensor([v])}) for c, n, v in (("plain", 40, 1.0), ("tinted", 10, 3.0))]
    assert float(loop.method.aggregate({}, uploads, ctx)["meme.w"]) == 2.0


# --- clients of different architectures, and those who come later ----------------------------------------------------


def test_three_architectures_at_once(tiny: Federation) -> None:
    method = FML()
    loop, seen = trained(method, tiny, model={"per_client": THREE}, train={"rounds": 2, "batch_size": 10, "epochs": 2})
    smallest = min(loop.info.archs.values(), key=lambda arch: arch.parameters)
    memes = [under(state, "meme") for state in models_of(loop).values()]
    assert {frozenset(meme) for meme in memes} == {frozenset(smallest.model(0).state_dict())}
    assert set(under(loop.server, "meme")) == set(memes[0])
    assert len({frozenset(under(state, "private")) for state in models_of(loop).values()}) == 3
    assert method.facts(loop.info) == {"meme model": smallest.words}
    first, last = seen.records[1].logs, seen.records[-1].logs
    assert all(last[client_id]["loss/train"] < first[client_id]["loss/train"] for client_id in tiny.names)
    assert all(min(logs["kl/private"], logs["kl/meme"]) > 1e-3 for logs in last.values())
    assert len(set(seen.records[-1].up.values())) == 1


def test_another_meme_by_name(tiny: Federation) -> None:
    loop, _ = trained(structure({"meme": SMALL}, FML), tiny, model={"per_client": THREE}, train={"rounds": 1})
    assert loop.server["meme.body.fc1.weight"].shape[0] == 8
    with pytest.raises(ConfigError, match="unknown model 'mpl'"):
        loop_for(FML(meme=Named("mpl")), config_of(), tiny)


def test_a_stranger_learns_from_the_meme(tiny: Federation) -> None:
    """Its private model is new; the adaptation is a round of FML, in which a good meme is worth more than a new one."""
    loop, _ = trained(FML(), tiny, train={"rounds": 12, "batch_size": 10})
    config = config_of(evaluate={"splits": ["test"], "moments": ["adapted"]}, train={"rounds": 12, "epochs": 5})
    job = Job(FML(alpha=0.1), config, loop.info, tiny.clients["tinted"], 12)
    good = loop.method.send(loop.server, None, loop.context(12))
    new = {name: t for name, t in open_slot(job).model.state_dict().items() if name in good}
    losses = [client_evaluate(job, None, download)["adapted"]["test"].loss for download in (good, new)]
    assert losses[0] < losses[1]
