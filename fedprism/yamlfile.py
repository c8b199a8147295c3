"""YAML, read safely: whatever is wrong with a text is one short error that says where.

Refused, beside what is no YAML: a key that is given twice, and what is too long, nested too deeply, or written with
aliases that contain themselves or stand for too much. Aliases are counted before anything is made of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fedprism import limits
from fedprism.errors import ConfigError, short, shown
from fedprism.files import open_regular

# `<<` and `=` have no value of their own: what they do is decided when the mapping is made.
_MERGE, _VALUE = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_yaml(path: str | Path, missing: str = "") -> Any:
    """The content of a YAML file. `missing` is the error where there is no such file."""
    name = short(str(path))
    try:
        with open_regular(path) as file:
            raw = file.read(limits.YAML_BYTES + 1)
        if len(raw) > limits.YAML_BYTES:
            raise ConfigError(f"{name} cannot be read as YAML: it is longer than {limits.YAML_BYTES:,} bytes.")
        return parse_yaml(raw.decode(), name)
    except FileNotFoundError:
        raise ConfigError(missing or f"there is no file {name}.") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name} cannot be read as YAML: it is not UTF-8 (line {line}).") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read as YAML: {error.strerror or error}.") from None
    except ValueError as error:  # a path with a null character
        raise ConfigError(f"{shown(str(path))} cannot be read as YAML: {error}.") from None


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; `source` begins an error.

    >>> parse_yaml("{name: fedprox, mu: 0.1}", "--set method")
    {'name': 'fedprox', 'mu': 0.1}
    >>> parse_yaml("{mu: 1, mu: 2}", "--set method")
    Traceback (most recent call last):
    fedprism.errors.ConfigError: --set method cannot be read as YAML: the key 'mu' is given twice.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        problem, mark = error.problem or error.context, error.problem_mark or error.context_mark
        line = f" (line {mark.line + 1})" if mark is not None and "\n" in text.rstrip() else ""
        problem = f"{short(str(problem))}{line}"
    except yaml.reader.ReaderError as error:
        line = f" (line {text[: error.position].count(chr(10)) + 1})" if "\n" in text.rstrip() else ""
        problem = f"the character {chr(error.character)!r} is not allowed{line}"
    except RecursionError:  # called from deep inside another program
        problem = "it is nested too deeply"
    raise ConfigError(f"{source} cannot be read as YAML: {problem}.")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the checks of this file. Nodes are measured from the leaves upwards."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._measures: dict[yaml.Node, tuple[int, int]] = {}  # nodes in it, and levels; aliases written out
        self._level = 0

    def fetch_more_tokens(self) -> None:
        """A character `"\\UFFFFFFFF"`, or a version of YAML of thousands of digits, is Python's own error here."""
        try:
            super().fetch_more_tokens()
        except (OverflowError, ValueError):
            raise _refused("the number of a character or of a version is too large", self.get_mark()) from None

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if self._level == limits.DEPTH:
            raise _too_deep(event.start_mark)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None and node not in self._measures:
            if isinstance(event, yaml.AliasEvent):
                raise _refused(f"the alias *{event.anchor} is inside what it stands for", event.start_mark)
            self._measures[node] = self._measure(node)
        return node

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        if isinstance(node, yaml.MappingNode):
            self._refuse_twice(node)
            inner = [self._measures[each] for pair in node.value for each in pair]
        else:
            inner = [self._measures[each] for each in node.value] if isinstance(node, yaml.SequenceNode) else []
        nodes, levels = 1 + sum(nodes for nodes, _ in inner), 1 + max((levels for _, levels in inner), default=0)
        if levels > limits.DEPTH:
            raise _too_deep(node.start_mark)
        if nodes > limits.YAML_NODES:
            raise _refused(f"it has more than {limits.YAML_NODES:,} values, aliases written out", node.start_mark)
        return nodes, levels

    def _refuse_twice(self, node: yaml.MappingNode) -> None:
        """PyYAML takes the last of several values with the same key. Several `<<` are all merged, so they may stay."""
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = key.value if key.tag == _VALUE else self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                where = f", in lines {lines[name]} and {line}; keep one of them" if line > lines[name] else ""
                raise _refused(f"the key {shown(name)} is given twice{where}", None if where else key.start_mark)
            lines[name] = line

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Python's own errors, such as that of 31 February, get a line, too."""
        if len(node.value) > limits.DIGITS and node.tag in _NUMBERS:
            problem = f"{shown(node.value)} has {len(node.value):,} characters; a number has at most {limits.DIGITS}"
            raise _refused(problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = shown(node.value) if isinstance(node, yaml.ScalarNode) else "this"
            why = f" ({error})" if isinstance(error, ArithmeticError | ValueError) else ""
            raise _refused(f"{what} is no {node.tag.rpartition(':')[2]}{why}", node.start_mark) from None


def _refused(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _too_deep(mark: Any) -> yaml.MarkedYAMLError:
    return _refused(f"lists and mappings are nested more than {limits.DEPTH} deep", mark)
