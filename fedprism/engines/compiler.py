"""PyTorch's compiler where it has no folder to write to: training that is not compiled goes on without one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from fedprism.errors import ConfigError

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def compiler_cache(compiled: bool) -> Iterator[None]:
    """Within: PyTorch's compiler can be imported, as its optimisers do. It then makes a folder for what it compiles;
    where it cannot, and nothing is to be compiled, it is told of a folder that is there."""
    given = os.environ.get(CACHE)
    wrong = None if "torch._dynamo" in sys.modules and not compiled else _wrong(given)
    if wrong is None:
        yield
        return
    if compiled:
        raise ConfigError(
            f"run.compile is true, and PyTorch's compiler has no folder to write to: {wrong}. Set {CACHE} or TMPDIR to "
            "a folder that can be written, or run.compile: false."
        ) from wrong
    os.environ[CACHE] = os.path.abspath(os.sep)  # which is there, so that nothing is made
    try:
        yield
    finally:
        os.environ.pop(CACHE)
        if given is not None:
            os.environ[CACHE] = given


def _wrong(given: str | None) -> OSError | None:
    """Why the compiler could not make its folder: the one that is named, or a temporary one."""
    try:
        if given is None:
            tempfile.gettempdir()  # it has tried to write there
        else:
            os.makedirs(given or os.curdir, exist_ok=True)
    except OSError as error:
        return error
    return None
