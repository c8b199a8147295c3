"""Fields of a class as one table in the Python reference (docs/api.md), described by the comments beside them."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, Docstring, Extension


class FieldComments(Extension):
    """Give a class an `Attributes` section: `name: kind = value  # what it means`, or the comment lines above."""

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        fields = {name: field for name, field in cls.attributes.items() if not name.startswith("_")}
        meanings = {name: words for name, field in fields.items() if (words := _comment(field))}
        if meanings:
            meanings = {name: meanings.get(name, "") for name, field in fields.items() if field.annotation is not None}
            lines = [f"    {name}: {words}" for name, words in meanings.items()]
            before = "" if cls.docstring is None else cls.docstring.value
            cls.docstring = Docstring("\n".join([before, "", "Attributes:", *lines]), parent=cls)


def _comment(field: Attribute) -> str:
    if field.docstring is not None or field.lineno is None or field.endlineno is None:
        return ""
    source = field.lines_collection[field.filepath]
    _, mark, words = source[field.endlineno - 1].partition("  # ")
    if not mark:
        above: list[str] = []
        for line in reversed(source[: field.lineno - 1]):
            if not line.strip().startswith("# ") or line.strip().startswith("# ---"):
                break
            above.insert(0, line.strip()[2:])
        words = " ".join(above)
    return "" if words.startswith(("type: ignore", "noqa")) else words
