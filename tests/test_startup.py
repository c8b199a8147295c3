"""Commands and functions that only read start without PyTorch, so they answer at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy_records import toy_config, toy_run

CLI = "import sys; from fedprism.cli import app; sys.exit(app({}, standalone_mode=False) or 0)"
CODE = {
    "records": "import fedprism.records",
    "reading a run": "from fedprism.records.read import read_run, run_status; read_run('RUN'); run_status('RUN')",
    "a table": "from fedprism.records import read_run; from fedprism.report.table import table; "
    "print(table([read_run('RUN')]))",
    "reports": "import fedprism.report.diagnostics, fedprism.report.html, fedprism.cli.progress",
    "callbacks": "import fedprism as fp; fp.Callback",
    "names": "import fedprism as fp; dir(fp)",
    "--help": CLI.format(["--help"]),
    "run --help": CLI.format(["run", "--help"]),
    "--version": CLI.format(["--version"]),
    "show": CLI.format(["show", "RUN"]),
    "show two": CLI.format(["show", "RUN", "OTHER"]),
    **{
        f"list {what}": CLI.format(["list", what])
        for what in ("methods", "models", "datasets", "partitions", "engines", "experiments")
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    toy_run(folder / "other", toy_config(seed=1))
    return toy_run(folder / "run")


@pytest.mark.parametrize("what", CODE)
def test_it_starts_without_pytorch(what: str, run: Path) -> None:
    code = CODE[what].replace("RUN", str(run)).replace("OTHER", str(run.parent / "other"))
    modules = "import sys; print('loaded:', sorted({'torch', 'numpy', 'sklearn', 'matplotlib'} & sys.modules.keys()))"
    program = f"import atexit\natexit.register(lambda: exec({modules!r}))\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"
