"""The command line: parse, call `fedprism.api`, print. One file per group of commands.

A new file registers its commands with `@command(...)` of `app.py` and is named in `_FILES`. PyTorch is imported inside
the commands that need it, so that the others answer at once.
"""

from importlib import import_module

from fedprism.cli.app import app, main

_FILES = ("train", "show", "fsck", "learn", "check", "bench", "data")  # in the order of `fedprism --help`

for _file in _FILES:
    import_module(f"fedprism.cli.{_file}")

__all__ = ["app", "main"]
