"""An exception as the author of a method reads it: the frames of their own files, without those of fedprism."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path

from fedprism.methods.base import Method

_PACKAGE = Path(__file__).resolve().parent.parent
_OTHERS = (_PACKAGE, *(Path(sysconfig.get_paths()[kind]).resolve() for kind in ("stdlib", "purelib", "platlib")))


def in_own_words(error: BaseException, method: type[Method]) -> str:
    """The message, then the frames of the method's files and of files that it calls.

    An error of which no frame is the author's has only a message: fedprism's say what is wrong and what to do.
    """
    lines = [line.rstrip() for line in traceback.format_exception_only(error)]
    for frame in own_frames(error, method):
        lines.append(f"  {shown(frame.filename)}:{frame.lineno}, in {frame.name}")
        lines += [f"    {frame.line}"] if frame.line else []
    return "\n".join(lines)


def own_frames(error: BaseException, method: type[Method]) -> list[traceback.FrameSummary]:
    """The frames of an exception in the method's own files, and those in neither fedprism nor an installed package."""
    own = {_file_of(cls) for cls in method.__mro__ if cls not in (Method, object)}
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in own or not _installed(frame.filename)
    ]


def shown(file: str) -> str:
    """A path as short as it can be from here."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _file_of(cls: type) -> str:
    try:
        return inspect.getfile(cls)
    except (TypeError, OSError):  # written in a session
        return ""


def _installed(file: str) -> bool:
    return file.startswith("<") or any(Path(file).resolve().is_relative_to(place) for place in _OTHERS)
