"""The documentation is true: it builds, its links resolve, its code runs, its tables are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
import yaml

import fedprism
from fedprism import cli
from fedprism.config import MOMENTS, Config, ModelConfig, Named, override, plain, read, structure
from fedprism.conformance import PROMISES
from fedprism.data import DATASETS, digits, folder, pictures, synthetic
from fedprism.data.folder import Options
from fedprism.federation import PARTITIONS, make_federation
from fedprism.methods import METHODS, make
from fedprism.methods.base import Method
from fedprism.models import MODELS
from fedprism.records import Protocol
from fedprism.schedules import SCHEDULES
from tests.harness import ORDER, Collect, loop_for

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FAST_PROGRAMS = {"README.md-1", "docs/own-methods.md-1"}  # what `make test-fast` runs
FAST_METHODS = {"fedavg", "fedbn", "fedcp", "fedfomo"}
BYTES = re.compile(r"receives ([\d,]+) bytes and sends (about )?([\d,]+) bytes")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(language: str) -> list[Any]:
    """Every block of a language, with its page and place as the test's id."""
    found = []
    for page in PAGES:
        matches = [code for kind, code in BLOCK.findall(text_of(page)) if kind == language]
        for place, code in enumerate(matches, 1):
            name = f"{name_of(page)}-{place}"
            marks = pytest.mark.full if is_program(code) and name not in FAST_PROGRAMS else ()
            found.append(pytest.param(code, id=name, marks=marks))
    return found


def is_program(code: str) -> bool:
    """A Python block that begins so is a whole program; others are parts of one."""
    return code.startswith("import fedprism")


# --- rows of tables, made from the code ------------------------------------------------------------------------------


def row(name: str, f: dataclasses.Field[Any], kind: Any) -> str:
    """The line of a settings table that a dataclass field asks for."""
    cells = [f"`{name}`", f"`{flow(default_of(f))}`", values(f, kind), f.metadata.get("doc", "")]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def rows(cls: type, prefix: str = "") -> list[str]:
    """The lines that the settings of a dataclass ask for; sections in it are gone into."""
    kinds, found = typing.get_type_hints(cls), []
    for f in dataclasses.fields(cls):
        kind, name = kinds[f.name], prefix + f.name
        if dataclasses.is_dataclass(kind) and kind is not Named:
            found += rows(typing.cast(type, kind), f"{name}.")
        elif not (cls is ModelConfig and f.name == "settings"):  # what it holds is written beside `name`
            found.append(row(name, f, kind))
    return found


def default_of(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def flow(value: Any) -> str:
    """A value as it is written in YAML, on one line; a name without settings is just the name."""
    if isinstance(value, Named) and not value.settings:
        value = value.name
    return (
        yaml.safe_dump(plain(value), default_flow_style=True, sort_keys=False, width=10_000)
        .removesuffix("...\n")
        .strip()
    )


def values(f: dataclasses.Field[Any], kind: Any) -> str:
    """What may stand there: the range if there is one, else the choices or the type."""
    expected = f.metadata.get("expected")
    if not expected:
        return words(kind)
    return f"{expected}, or `null`" if type(None) in typing.get_args(kind) else str(expected)


def words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{flow(choice)}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(words(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {words(typing.get_args(kind)[0])}".replace("number", "numbers")
    plain_words = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", type(None): "`null`"}
    return plain_words.get(kind, "a name, or a mapping with `name`" if kind is Named else "see below")


def assert_rows(page: Path, wanted: list[str]) -> None:
    lines = set(text_of(page).splitlines())
    missing = [line for line in wanted if line not in lines]
    assert not missing, f"{name_of(page)} should hold these lines:\n" + "\n".join(missing)


def short_run(method: Method, rounds: int) -> Collect:
    """What a short run of two clients with the documentation's model records."""
    seen = Collect()
    config = structure({"train": {"rounds": rounds}, "evaluate": {"moments": ["trained"]}}, Config)
    loop_for(method, config, make_federation("digits-skew", clients=2, seed=0, samples=20)).run([seen])
    return seen


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_site_builds_strictly_and_works_from_disk(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "methods" / "fedbn.html").is_file()
    # A page that was opened from disk may neither start a worker nor fetch the index: both come as scripts.
    assert (site / "search" / "search_index.js").is_file()
    page = text_of(site / "methods" / "fedbn.html")
    assert re.search(r'<script[^>]*src="\.\./assets/iframe-worker\.js"', page)
    assert not re.findall(r'<(?:script|img|iframe)[^>]*src="https?:[^"]*"|<link[^>]*stylesheet[^>]*href="https?:', page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text_of(page)))
    targets = [target for target in LINK.findall(prose) if not target.startswith(("http://", "https://", "#"))]
    gone = [target for target in targets if not (page.parent / target.partition("#")[0]).exists()]
    assert not gone, f"{name_of(page)} links to what is not there: {gone}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_formula_is_taken_for_a_tag(page: Path) -> None:
    """`<a, b>` outside of code would vanish from the built page; mkdocs does not notice."""
    prose = re.sub(r"<!--.*?-->|`[^`\n]*`", "", BLOCK.sub("", text_of(page)), flags=re.DOTALL)
    tags = re.findall(r"<[a-zA-Z/][^>\n]*>", prose)
    assert not [
        tag for tag in tags if not re.fullmatch(r"</?(br|b|i|sub|sup|details|summary|img)\b[^>]*>|<https?://.*>", tag)
    ]


def test_no_path_of_a_machine() -> None:
    pages = [page for page in PAGES if page.name != "cli.md"]  # its examples are those of the help texts
    files = [*pages, ROOT / "mkdocs.yml", ROOT / "CITATION.cff", *DOCS.glob("*.py"), *EXAMPLES]
    pattern = re.compile(r"(?<![\w.:/>-])(?:/(?:home|root|tmp|usr|opt|work|mnt|Users)/|[A-Z]:\\)\S*")
    found = {name_of(f): m.group() for f in files if (m := pattern.search(text_of(f)))}
    assert not found


def test_pictures_are_small() -> None:
    sizes = {picture.name: picture.stat().st_size for picture in (DOCS / "assets").iterdir()}
    assert "digits-skew.png" in sizes
    assert max(sizes.values()) < 200_000, sizes


# --- settings --------------------------------------------------------------------------------------------------------


def test_every_configuration_key_is_explained() -> None:
    assert_rows(DOCS / "configuration.md", rows(Config))


@pytest.mark.parametrize("registry", [MODELS, PARTITIONS, SCHEDULES], ids=lambda r: r.kind)
def test_settings_beside_a_name_are_explained(registry: Any) -> None:
    lines = text_of(DOCS / "configuration.md").splitlines()
    for name, cls in registry.items():
        about = [line for line in lines if f"`{name}`" in line]
        assert about, f"configuration.md says nothing of {registry.kind} {name}"
        for f in dataclasses.fields(cls):
            shown = f"`{flow(default_of(f))}`"
            named = [line for line in lines if line.startswith("| all |")] if f.name == "of" else about
            assert any(f"`{f.name}`" in line and shown in line for line in named), f"{name}: {f.name}, {shown}"


def test_data_page() -> None:
    page = DOCS / "data.md"
    assert_rows(page, rows(Options))
    text = text_of(page)
    both = text + text_of(DOCS / "datasets.md")
    assert all(f"`{name}`" in both or f"`{name}:" in both for name in DATASETS)
    assert_rows(DOCS / "datasets.md", rows(synthetic.Options))
    assert all(f"`{suffix}`" in text for suffix in pictures.SUFFIXES)
    assert all(f"| `{style}` |" in text for style in digits.STYLES)
    assert f"more than {pictures.MAX_PIXELS:,} pixels" in text
    assert f"{digits.TEST_SHARE:.0%} of a client's images are for the test".replace("%", " %") in text
    assert f"fewer than {digits.MIN_TRAIN} training images" in text
    assert f"{folder.TEST_SHARE:.0%} of each client's images".replace("%", " %") in text


def test_protocols_page() -> None:
    text = text_of(DOCS / "protocols.md")
    for moment in MOMENTS:
        assert f"\n| `{moment}` |" in text
    _, _, sources = text.partition("## Who uses which")
    offered = [cell for line in sources.splitlines() for cell in re.findall(r"`([^`]+)`", line.rpartition(" | ")[2])]
    assert len(offered) > 5
    for protocol in offered:
        Protocol.parse(protocol)


def test_dependencies_have_reasons() -> None:
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    wanted = [re.split(r"[<>=\[]", name)[0] for names in (project["dependencies"], *extras.values()) for name in names]
    text = text_of(DOCS / "dependencies.md")
    missing = [name for name in {*wanted, *extras} - {"fedprism"} if f"`{name}" not in text]
    assert not missing
    _, _, table = text.partition("## Extras")
    named = set(re.findall(r"^\| `([\w-]+)` \|", table.partition("## PyTorch")[0], flags=re.MULTILINE))
    assert named == set(extras), "docs/dependencies.md names extras that pyproject.toml does not have"


# --- the map and the references --------------------------------------------------------------------------------------


def test_every_file_is_on_the_map() -> None:
    """Each file of the package is in the table of docs/architecture.md, or its folder is, where that is a list."""
    _, _, table = text_of(DOCS / "architecture.md").partition("\n## Files\n")
    named = set(re.findall(r"`(fedprism/[\w/.*]+)`", table.partition("\n## ")[0]))
    package = ROOT / "fedprism"
    files = {name_of(path) for path in package.rglob("*.py") if path.name != "__init__.py" or path.parent == package}
    listed = {name.removesuffix("*") for name in named if name.endswith("/*")}
    missing = sorted(name for name in files - named if not any(f"{Path(name).parent}/" == folder for folder in listed))
    assert not missing, f"docs/architecture.md does not say what these are for: {', '.join(missing)}"
    gone = sorted(name for name in named if not (ROOT / name.removesuffix("*")).exists())
    assert not gone, f"docs/architecture.md names what is not there: {', '.join(gone)}"


def test_the_direction_of_imports_is_the_tested_one() -> None:
    _, _, section = text_of(DOCS / "architecture.md").partition("\n## Direction of imports\n")
    block = section.partition("```text\n")[2].partition("```")[0]
    shown = [name.strip() for line in block.splitlines() for name in re.split(r"  +", line.strip())[0].split(",")]
    assert shown == ORDER


def test_glossary() -> None:
    words = "client client_id slot pass leaf moment branch context upload download cohort capture chunk snapshot tally"
    _, _, glossary = text_of(DOCS / "architecture.md").partition("\n## Glossary\n")
    assert [word for word in words.split() if f"\n| {word} | " not in glossary] == []


def test_command_line_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", DOCS / "make_cli.py")
    assert spec is not None
    assert spec.loader is not None
    make_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_cli)
    assert text_of(DOCS / "cli.md") == make_cli.page(), "run `python docs/make_cli.py`"


def test_python_reference() -> None:
    text = text_of(DOCS / "api.md")
    names = "train compare resume load Run ClientModel Federation make_federation Config Callback"
    for name in (*names.split(), "Method", "Client", "Context", "Pass", "Output", "Upload", "Transform", "Aggregator"):
        assert f"\n::: fedprism.{name}\n" in text
        assert hasattr(fedprism, name)


def test_every_promise_is_named() -> None:
    text = text_of(DOCS / "own-methods.md")
    assert [key for key in PROMISES if f"`{key}`" not in text] == []


# --- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_METHODS else pytest.mark.slow) for name in METHODS]
)
def test_method_page_counts_bytes_and_names_logs_as_a_run_does(name: str) -> None:
    text = " ".join(text_of(DOCS / "methods" / f"{name}.md").split())
    record = short_run(METHODS[name](), 1).records[-1]
    sent = BYTES.search(text)
    assert sent, "the page should say: receives N bytes and sends N bytes"
    assert {int(sent[1].replace(",", ""))} == set(record.down.values())
    up = int(sent[3].replace(",", ""))
    room = 0.05 * up if sent[2] else 0  # the size of compressed traffic depends on values
    assert all(abs(size - up) <= room for size in record.up.values())
    logged = re.search(r"Logged each round: ([^.]*)\.", text)
    assert logged
    assert set(re.findall(r"`([^`]+)`", logged[1])) == {log for logs in record.logs.values() for log in logs}
    (score, *_) = record.scores["trained"]["test"].values()
    shown = re.search(r"Recorded at every evaluation: ([^.]*)\.", text)
    assert set(re.findall(r"`([^`]+)`", shown[1]) if shown else ()) == {*score.branches, *score.diagnostics}


@pytest.mark.parametrize("name", METHODS)
class TestMethodPage:
    def test_says_what_the_code_says(self, name: str) -> None:
        cls, page = METHODS[name], DOCS / "methods" / f"{name}.md"
        text = text_of(page)
        prose = " ".join(text.split())
        assert_rows(page, rows(cls))
        assert cls.paper[1:] in text
        assert f"What others learn: {cls.reveals}." in prose
        assert f"| tested at the moment | `{cls.moment}` |" in text
        assert f"--method {name}\n" in text
        if name != "local":
            assert f"| batch norm | `{cls.bn}`" in text
            assert f"| weights in the average | `{cls.weighting}`" in text
        assert ("It has no global model." in prose) is not cls.has_global

    def test_says_what_a_newcomer_gets(self, name: str) -> None:
        prose = " ".join(text_of(DOCS / "methods" / f"{name}.md").split())
        _, found, words = prose.partition("**A client that was not in training** ")
        assert found, "the page should say: **A client that was not in training** is sent ..."
        if METHODS[name].adapt is Method.adapt:
            assert "the moment `adapted` it has trained for one round" in words

    def test_is_listed(self, name: str) -> None:
        cls = METHODS[name]
        assert f"| [`{name}`]({name}.md) | {cls.idea.rstrip('.')} | {cls.stays} |" in text_of(
            DOCS / "methods" / "index.md"
        )
        assert f"| [`{name}`](docs/methods/{name}.md) |" in text_of(ROOT / "README.md")
        assert f": methods/{name}.md\n" in text_of(ROOT / "mkdocs.yml")


def test_lg_fedavg_sends_the_body_once_after_the_warm_up() -> None:
    traffic = [(r.down["plain"], r.up["plain"]) for r in short_run(fedprism.LGFedAvg(warmup=1), 3).records[1:]]
    assert traffic == [(191_936, 191_936), (191_936, 2_600), (2_600, 2_600)]


def test_no_page_without_a_method() -> None:
    assert {page.stem for page in (DOCS / "methods").glob("*.md")} == {*METHODS, "index"}


# --- code in pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ast.parse(code)
    if is_program(code):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(fedprism, "train", few_rounds(fedprism.train))
        file = tmp_path / "block.py"
        file.write_text(code, encoding="utf-8")
        runpy.run_path(str(file), run_name="__main__")


def few_rounds(train: Callable[..., Any]) -> Callable[..., Any]:
    """Train as asked, but for two rounds: what is tested is the page's program, not its result."""
    signature = inspect.signature(train)

    def short(*args: Any, **settings: Any) -> Any:
        given = signature.bind(*args, **settings)
        given.arguments["rounds"] = min(given.arguments.get("rounds") or 2, 2)
        return train(*given.args, **given.kwargs)

    return short


def test_programs_are_run_at_all() -> None:
    whole = [block for block in blocks("python") if is_program(block.values[0])]
    assert {"README.md-1", "docs/getting-started.md-1", "docs/own-methods.md-1"} <= {block.id for block in whole}


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_is_a_configuration(code: str) -> None:
    structure(yaml.safe_load(code), Config)


@pytest.mark.parametrize("code", blocks("toml"))
def test_toml_parses(code: str) -> None:
    tomllib.loads(code)


@pytest.mark.parametrize("code", blocks("console"))
def test_commands_exist(code: str) -> None:
    """Every command, option, `make` target, method, setting and protocol that a page tells a user to type."""
    targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), flags=re.MULTILINE)
    for line in code.replace("\\\n", "").splitlines():  # as a shell joins them
        words = shlex.split(line, comments=True)
        if words and words[0] == "make":
            assert words[1] in targets, line
        elif words and words[0] == "fedprism":
            check_command(words[1:])


def check_command(words: list[str]) -> None:
    name, *arguments = words[: words.index(">")] if ">" in words else words
    commands: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    given = commands[name].make_context(name, arguments).params  # an unknown option is an error here
    Protocol.parse(given.get("protocol") or "own")
    assert name not in ("run", "compare") or given["config"] or given.get("print_config"), "there is nothing to run"
    for name in (given.get("methods") or given.get("method") or "fedavg").split(","):
        if ".py:" not in name or (ROOT / name.partition(":")[0]).exists():  # a page's own program is run elsewhere
            settings = [s for s in given.get("settings") or [] if not s.startswith("method.") or given.get("method")]
            config = structure(override({}, [f"method={{name: {name}}}", *settings]), Config)
            make(config.method)


# --- examples and the house ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_parse(path: Path) -> None:
    if path.suffix == ".py":
        ast.parse(text_of(path))
        assert len(text_of(path).splitlines()) <= 40 or path.name != "add_a_method.py"
    else:
        read(path)
        assert text_of(path).startswith("# fedprism "), "the first line is the command that runs it"


def test_one_file_example_trains() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "one_file_fedavg.py"))
    example["run"].__globals__["ROUNDS"] = 2
    assert all(10 < example["run"](method) <= 100 for method in ("local", "fedavg", "fedbn"))


@pytest.mark.slow
def test_one_file_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "one_file_fedavg.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == ["local", "fedavg", "fedbn"]


def test_method_of_the_example_trains(tmp_path: Path) -> None:
    method = make(Named(f"{ROOT / 'examples' / 'add_a_method.py'}:HeadMix", {"keep": 0.8}))
    data = make_federation("digits-skew", clients=2, seed=0, samples=20)
    run = fedprism.train(data, method=method, rounds=1, out=tmp_path / "run")
    assert run.status == "finished"
    assert run.record.config.method.settings == {"keep": 0.8}


@pytest.mark.slow
def test_method_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "add_a_method.py"), run_name="__main__")
    assert "headmix" in capsys.readouterr().out


def test_licence_is_the_apache_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    assert citation["version"] == project["version"] == fedprism.__version__
    assert citation["license"] == project["license"]
    assert citation["authors"] == [{"name": author["name"]} for author in project["authors"]]


def test_changelog_has_room_for_the_next_change() -> None:
    headings = re.findall(r"^## \[(.+?)\](.*)$", text_of(ROOT / "CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert all(re.fullmatch(r" - \d{4}-\d{2}-\d{2}", rest) for _, rest in headings[1:])
