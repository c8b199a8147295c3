"""Real benchmark images, where there are some: `FEDPRISM_DATA=FOLDER make test-slow`. A user's machine has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedprism import api
from fedprism.config import Config, read
from fedprism.records import Protocol, outcome

ROOT = Path(__file__).parent.parent
METHODS = {
    "local": [],
    "fedcp": [],
    "fed-co2": [],
    "fedpick": ["method.tau=10", "method.lam_lce=10", "method.lam_dis=10"],
    "fedios": ["method.lam=0"],
    "fedsce": ["method.p=1"],
}
ABLATIONS = {
    "fedcp": ["method.without=[cpn,gh]"],
    "fed-co2": ["method.intra=none", "method.inter=none"],
    "fedpick": ["method.pfsm=false"],
    "fedios": ["method.lam=0", "method.without=[projections]"],
    "fedsce": ["method.without=[lsl,ce]"],
}
CASES = [*((name, given) for name, given in METHODS.items()), *((name, given) for name, given in ABLATIONS.items())]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def packed() -> Path:
    folder = os.environ.get("FEDPRISM_DATA")
    if not folder:
        pytest.skip("FEDPRISM_DATA is not set; it names the folder with the packed benchmark files")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def unpacked(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 training and 200 test images of each of the four digit domains, and all of Office-Caltech-10."""
    out = tmp_path_factory.mktemp("unpacked")
    for what, given in {"digits": ["--train", "150", "--test", "200"], "office": []}.items():
        command = [sys.executable, str(ROOT / "experiments" / "unpack.py"), what, "--source", str(packed)]
        subprocess.run([*command, "--out", str(out / what), *given], check=True, timeout=120)
    return out


def config_of(unpacked: Path, what: str, *settings: str) -> Config:
    """The experiment at a size for two CPU cores."""
    small = ["model.name=lenet-bn", "train.rounds=15", "train.optimizer.lr=0.05", f"data.name=folder:{unpacked / what}"]
    return read(ROOT / "experiments" / f"{what}.yaml", [*small, *settings])


def test_digits_are_unpacked_whole(unpacked: Path) -> None:
    for domain in ("mnist", "mnistm", "svhn", "usps"):
        for part, count in (("train", 150), ("test", 200)):
            classes = {
                folder.name: len(list(folder.iterdir())) for folder in (unpacked / "digits" / domain / part).iterdir()
            }
            assert set(classes) == set("0123456789")
            assert sum(classes.values()) == count


def test_office_is_unpacked_whole(unpacked: Path) -> None:
    counts = {site.name: len(list(site.glob("*/*.jpg"))) for site in (unpacked / "office").iterdir()}
    assert counts == {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295}


@pytest.mark.parametrize(
    ("method", "settings"), CASES, ids=lambda v: v if isinstance(v, str) else ",".join(v) or "plain"
)
def test_learns_real_digits(method: str, settings: list[str], unpacked: Path, tmp_path: Path) -> None:
    """Four domains, 150 images each: chance is 10 %."""
    config = config_of(unpacked, "digits", f"method={{name: {method}}}", *settings)
    run = api.run_config(config, "digits", out=tmp_path / "run")
    assert run.status == "finished"
    assert outcome(run.record).mean > 0.6


@pytest.mark.parametrize("method", list(METHODS))
def test_learns_office(method: str, unpacked: Path, tmp_path: Path) -> None:
    """Photographs of ten things, 32 x 32 pixels: chance is 10 %."""
    small = ["data.image_size=32", "train.rounds=8", "train.optimizer.lr=0.02"]
    run = api.run_config(
        config_of(unpacked, "office", f"method={{name: {method}}}", *small), "office", out=tmp_path / "run"
    )
    assert outcome(run.record, Protocol.parse("trained,last")).mean > 0.35


@pytest.mark.parametrize("method", ["local", "fedproto", "fedsce"])
def test_different_architectures_learn_real_digits(method: str, unpacked: Path, tmp_path: Path) -> None:
    """One model per domain; features of 64, 64, 128 and 64 numbers meet at 64."""
    models = "[lenet-bn, mlp, {name: resnet18, width: 16, stem: small}, lenet-bn]"
    given = [f"method={{name: {method}}}", f"model={{per_client: {models}}}", "train.clip=1"]
    config = read(
        ROOT / "experiments" / "digits.yaml",
        [*given, "train.rounds=15", "train.optimizer.lr=0.05", f"data.name=folder:{unpacked / 'digits'}"],
    )
    run = api.run_config(config, "digits", out=tmp_path / "run")
    assert len({frozenset(model.module.state_dict()) for model in run.models.values()}) == 3
    assert outcome(run.record).mean > 0.45


def test_the_papers_five_architectures_take_part_in_one_run(unpacked: Path, tmp_path: Path) -> None:
    """Full-sized ResNets and ViT-Bs on photographs of 64 x 64 pixels, one round; the rest is a matter of time."""
    small = ["data.partition.clients=8", "data.samples=8", "train.rounds=1", "train.epochs=1", "train.batch_size=8"]
    given = [*small, f"data.name=folder:{unpacked / 'office'}", "method={name: fedsce}"]
    run = api.run_config(read(ROOT / "experiments" / "office-mixed.yaml", given), "office", out=tmp_path / "run")
    last = run.record.rounds[-1]
    assert not last.failed
    assert set(last.up.values()) == {44_765_136}  # a ResNet-18 for ten classes with its statistics, and two distances
    assert sum(logs["weight"] for logs in last.logs.values()) == pytest.approx(1)
    assert len(set(run.record.info["parameters"].values())) >= 5
