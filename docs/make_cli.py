"""Write docs/cli.md, the reference of the command line, from the commands themselves: `python docs/make_cli.py`.

A test compares the page with what this script would write.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from fedprism import cli

PAGE = Path(__file__).parent / "cli.md"
EXPLAINED = {
    "--protocol": "Which figure is printed: see [protocols](protocols.md#choosing-one)."
}  # on a page of its own
WORDS = {Path: "PATH", int: "INTEGER", float: "NUMBER", str: "TEXT"}
HEAD = """# Command line

<!-- Written by docs/make_cli.py from the help texts of fedprism/cli; change those and run it again. -->

`fedprism COMMAND --help` prints the same in the terminal. Commands are thin layers over the [Python interface](api.md).
"""


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(cli.app)
    commands = list(walk(group, "fedprism"))
    lines = [HEAD, "| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{anchor(name)}) | {paragraphs(command)[0]} |" for name, command in commands]
    return "\n".join([*lines, "", *(section(name, command) for name, command in commands)]).rstrip() + "\n"


def walk(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every command with its full name; the commands of a group come in its place."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, f"{prefix} {name}")
        elif not command.hidden:
            yield f"{prefix} {name}", command


def section(name: str, command: Any) -> str:
    """One command: usage, what it does, examples, arguments and options."""
    kinds = typing.get_type_hints(inspect.unwrap(command.callback))
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-") and p.name != "help"]
    usage = [name, *([] if not options else ["[OPTIONS]"]), *(shown(p) for p in arguments)]
    lines = [f"## {name}", "", "```text", " ".join(usage), "```", ""]
    for text in paragraphs(command):
        lines += [text, ""]
    if example := examples(command):
        lines += ["```console", example, "```", ""]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{cell(shown(p))}` | {meaning(p, kinds[p.name])} |" for p in arguments]
        lines += [""]
    if options:
        lines += ["| option | value | meaning |", "|---|---|---|"]
        lines += [f"| `{p.opts[0]}` | {value(p, kinds[p.name])} | {meaning(p, kinds[p.name])} |" for p in options]
        lines += [""]
    return "\n".join(lines)


def shown(argument: Any) -> str:
    """An argument as it stands in the usage line."""
    word = argument.metavar or argument.name.upper()
    word += "..." if argument.nargs == -1 and not word.endswith("...") else ""
    return word if argument.required else f"[{word}]"


def value(option: Any, kind: Any) -> str:
    """What follows an option."""
    if option.is_flag:
        return ""
    plain = plain_kind(kind)
    if inspect.isclass(plain) and issubclass(plain, Enum):
        return ", ".join(f"`{each.value}`" for each in plain)
    return f"`{option.metavar or WORDS[plain]}`"


def plain_kind(kind: Any) -> Any:
    """`X` of `X | None` and of `list[X]`."""
    options = [each for each in typing.get_args(kind) if each is not type(None)]
    return plain_kind(options[0]) if options else kind


def meaning(param: Any, kind: Any) -> str:
    """The help text, with choices and default."""
    if param.opts[0] in EXPLAINED:
        return EXPLAINED[param.opts[0]]
    text, plain = markdown(param.help or ""), plain_kind(kind)
    if not param.opts[0].startswith("-") and inspect.isclass(plain) and issubclass(plain, Enum):
        text += " One of " + ", ".join(f"`{each.value}`" for each in plain) + "."
    if param.required and param.opts[0].startswith("-"):
        text += " Required."
    default = param.default.value if isinstance(param.default, Enum) else param.default
    if default not in (None, False, "", ()) and not callable(default):
        text += f" Default: `{default}`."
    return cell(text)


def cell(text: str) -> str:
    """Text that does not end the cell of a table."""
    return text.replace("|", r"\|")


def paragraphs(command: Any) -> list[str]:
    """The help of a command without its examples."""
    parts = (command.help or "").split("\n\n")
    return [markdown(" ".join(part.split())) for part in parts if not part.startswith("\b")]


def examples(command: Any) -> str:
    """The lines of its examples, as one types them."""
    parts = [part for part in (command.help or "").split("\n\n") if part.startswith("\b")]
    lines = [line.strip() for part in parts for line in part.splitlines()[2:]]
    return re.sub(r"\\\n", r"\\\n  ", "\n".join(lines)).replace(r"\[", "[")


def markdown(text: str) -> str:
    """Rich's markup as Markdown."""
    return re.sub(r"\[b\](.*?)\[/b\]", r"`\1`", text).replace(r"\[", "[")


def anchor(name: str) -> str:
    return name.replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
