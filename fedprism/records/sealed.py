"""JSON that ends with a checksum of itself: a changed byte shows when it is read.

The checksum is the last key of an object and covers every byte before it, so it is verified without writing the object
again:

    {"round":3, ... , "checksum": "<sha256>"}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

_END = re.compile(rb', "checksum": "([0-9a-f]{64})"\}\n')
_LENGTH = len(', "checksum": ""}\n') + 64


def seal(entry: Mapping[str, Any], **layout: Any) -> bytes:
    """An object as JSON with its checksum and a line feed; `layout` is what `json.dumps` takes.

    >>> seal({"round": 3})[:32], unseal(seal({"round": 3}))
    (b'{"round": 3, "checksum": "0e5b5a', {'round': 3})
    """
    text = json.dumps(entry, allow_nan=False, **layout).removesuffix("}").rstrip().encode()
    return b'%b, "checksum": "%b"}\n' % (text, hashlib.sha256(text).hexdigest().encode())


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse of `seal`; a `ValueError` where the data is not what was written."""
    end = _END.fullmatch(data[-_LENGTH:])
    if end is None or hashlib.sha256(data[:-_LENGTH]).hexdigest().encode() != end[1]:
        raise ValueError("it does not match its checksum")
    try:
        entry = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return {key: value for key, value in entry.items() if key != "checksum"}
