"""Texts as token ids: a tokeniser, a vocabulary and an encoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN = 0, 1  # the words of a vocabulary follow from 2 on
SPECIAL = 2

# The rules of torchtext's `basic_english`.
_MARKS = {mark: f" {mark} " for mark in ".,'()!?"}  # separate tokens
_TABLE = str.maketrans({**_MARKS, '"': None, ";": " ", ":": " "})


def tokens(text: str) -> list[str]:
    """The words of a text in lower case, with . , ' ( ) ! ? as separate tokens.

    Double quotes are dropped; semicolons, colons and `<br />` separate words like spaces. All else stays in its word.

    >>> tokens('He said: "It\\'s over (almost)."')
    ['he', 'said', 'it', "'", 's', 'over', '(', 'almost', ')', '.']
    """
    return text.lower().translate(_TABLE).replace("<br />", " ").split()


def vocabulary(texts: Iterable[str], max_tokens: int | None = None) -> list[str]:
    """The words of these texts, sorted by frequency, then alphabetically.

    `max_tokens` limits the size of the vocabulary, padding and the unknown word included; None: no limit.

    >>> vocabulary(["b a c", "b"])
    ['b', 'a', 'c']
    >>> vocabulary(["b a c", "b"], max_tokens=4)
    ['b', 'a']
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokens(text))
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return ordered if max_tokens is None else ordered[: max(max_tokens - SPECIAL, 0)]


def encode(
    texts: Sequence[str], words: Sequence[str], length: int, out: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Encode texts as int32 [n, length]: 0 is padding, 1 an unknown word, 2 the first of `words`.

    Longer texts are cut. `out`, if given, is an array of zeros to write to.

    >>> encode(["a new b", "b"], ["b", "a"], length=4)
    array([[3, 1, 2, 0],
           [2, 0, 0, 0]], dtype=int32)
    """
    index = {word: i for i, word in enumerate(words, start=SPECIAL)}
    rows = np.zeros((len(texts), length), dtype=np.int32) if out is None else out
    for row, text in zip(rows, texts, strict=True):
        ids = [index.get(word, UNKNOWN) for word in tokens(text)[:length]]
        row[: len(ids)] = ids
    return rows
