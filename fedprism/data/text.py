"""Texts as rows of token numbers: a tokeniser, a vocabulary, and the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN = 0, 1  # the words of a vocabulary follow from 2 on
SPECIAL = 2

# The rules are those of torchtext's `basic_english`.
_MARKS = {mark: f" {mark} " for mark in ".,'()!?"}  # tokens of their own
_TABLE = str.maketrans({**_MARKS, '"': None, ";": " ", ":": " "})


def tokens(text: str) -> list[str]:
    """The words of a text in lower case, and . , ' ( ) ! ? as tokens of their own.

    Double quotes are dropped; semicolons, colons and `<br />` part words as spaces do. All else stays in its word.

    >>> tokens('He said: "It\\'s over (almost)."')
    ['he', 'said', 'it', "'", 's', 'over', '(', 'almost', ')', '.']
    """
    return text.lower().translate(_TABLE).replace("<br />", " ").split()


def vocabulary(texts: Iterable[str], most: int | None = None) -> list[str]:
    """Every word of these texts, the most frequent first, and of equally frequent ones the first in the alphabet.

    `most` is the largest number of tokens, padding and the unknown word among them; null: no limit.

    >>> vocabulary(["b a c", "b"])
    ['b', 'a', 'c']
    >>> vocabulary(["b a c", "b"], most=4)
    ['b', 'a']
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokens(text))
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return ordered if most is None else ordered[: max(most - SPECIAL, 0)]


def encode(
    texts: Sequence[str], words: Sequence[str], length: int, out: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """int32 [n, length]: 0 is padding, 1 a word that is not among `words`, 2 the first that is.

    Longer texts are cut. `out`, if given, is zeros to write to.

    >>> encode(["a new b", "b"], ["b", "a"], length=4)
    array([[3, 1, 2, 0],
           [2, 0, 0, 0]], dtype=int32)
    """
    number = {word: place for place, word in enumerate(words, start=SPECIAL)}
    rows = np.zeros((len(texts), length), dtype=np.int32) if out is None else out
    for row, text in zip(rows, texts, strict=True):
        held = [number.get(word, UNKNOWN) for word in tokens(text)[:length]]
        row[: len(held)] = held
    return rows
