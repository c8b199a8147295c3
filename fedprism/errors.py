"""The errors that a user can cause and repair. The command line prints them without a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from reprlib import Repr

NAMED = 5  # names that `some` writes out
SHORT, SHOWN = 200, 80  # characters of a text and of a value in a message


class FedprismError(Exception):
    """An input cannot be used; the message says what was given, what was expected and what to do."""


class ConfigError(FedprismError):
    """A configuration has an unknown key or an invalid value."""


class DataError(FedprismError):
    """A dataset, a folder of images or a split cannot be used."""


class RecordError(FedprismError):
    """A run directory is locked, damaged, of another version, or already exists."""


class _Shown(Repr):
    """`repr` in bounds, whatever the value holds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 20
        self.maxstring = self.maxlong = self.maxother = SHOWN

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python writes no longer ones
            return "a number of thousands of digits"

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """In the order that was given."""
        if not x or level <= 0:
            return "{...}" if x else "{}"
        pairs = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(x.items(), self.maxdict)]
        return "{" + ", ".join([*pairs, *["..."] * (len(x) > self.maxdict)]) + "}"


_repr = _Shown().repr


def shown(value: object) -> str:
    """A value as Python writes it, however large it is: what is too long or nested too deeply is left out.

    >>> shown("mean"), shown([0.5, None])
    ("'mean'", '[0.5, None]')
    """
    return short(_repr(value), SHOWN)


def short(text: str, most: int = SHORT) -> str:
    """A text for a message: one line, whose middle is left out where it is too long.

    >>> short("abcdefghij" * 2, 9)
    'abcd…ghij'
    """
    line = " ".join(text.splitlines())
    kept = (most - 1) // 2
    return line if len(line) <= most else f"{line[:kept]}…{line[-kept:]}"


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """The message for an unknown name: the name, the closest known one, and all that are known."""
    names = sorted(known)
    lower = {name.lower(): name for name in names}
    near = [lower[name] for name in get_close_matches(given[:SHOWN].lower(), lower, n=1, cutoff=0.5)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {shown(given)}.{hint} Known: {', '.join(names) or 'none'}."


def some(names: Iterable[str], between: str = ", ") -> str:
    """Join the first few names of a list and say how many more there are.

    >>> some("abcdefg")
    'a, b, c, d, e, and 2 more'
    """
    names = list(names)
    rest = f"{between}and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + rest


def escaped(text: str) -> str:
    r"""A text on one line, its control and invisible characters written out.

    >>> escaped("north\x1b]0;title\r\u202e")
    'north\\x1b]0;title\\r\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped_lines(text: str) -> str:
    """The same of each line of a text; its newlines stay."""
    return "\n".join(map(escaped, text.split("\n")))


def printable(text: str, most: int = 300) -> str:
    r"""A text without control characters, cut where it is too long.

    >>> printable("fc1\x1b[31m is not finite"), printable("w" * 999, most=5)
    ('fc1\\x1b[31m is not finite', 'wwwww...')
    """
    return escaped(text if len(text) <= most else text[:most] + "...")
