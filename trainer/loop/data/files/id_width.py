"""The width of token ids in a file without a header, inferred from where its zero bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16  # bytes that are read in one place
_PLACES = 16
_SMALL = 15  # the largest upper half of ids up to a million
_TELLING = 12  # pairs: with fewer, the file does not decide
_MANY, _MOST = 64, 0.75  # with this many pairs, this share of them decides


def raw_id_type(path: Path, size: int, vocab: int) -> np.dtype[Any]:
    """Return the type (uint16, uint32 or int64) of the ids below vocab in a file of `size` bytes without a header; raises OSError.

    The file is read as pairs of numbers. If each pair is the two halves of one id, its second half is small: at most
    (vocab - 1) >> 16, which is 0 for most vocabularies, or at most `_SMALL` for ids of a larger vocabulary. If each number is an
    id, the small number of a pair is the first as often as the second. The pairs are ids if the second number is small in more
    than three quarters of the pairs in which exactly one is. If there are too few such pairs, the vocabulary decides.
    """
    halves, high = _sample_numbers(path, size, np.dtype(np.uint16)), (vocab - 1) >> 16
    wide = [_are_halves(halves, small) for small in (high, max(high, _SMALL))]
    if not (vocab > 1 << 16 if wide == [None, None] else any(wide)):
        return np.dtype(np.uint16)
    return np.dtype(np.int64 if _are_halves(_sample_numbers(path, size, np.dtype(np.uint32)), 0) else np.uint32)


def _are_halves(words: NDArray[Any], small: int) -> bool | None:
    """Return whether the second number is at most `small` in nearly all pairs in which one is; None for too few pairs."""
    first, second = words[::2] <= small, words[1::2] <= small
    telling = ~(first & second)
    count = int(telling.sum())
    if count < _TELLING:
        return None
    share = float(second[telling].mean())
    return share == 1 or (count >= _MANY and share > _MOST)


def _sample_numbers(path: Path, size: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers [even] from places spread over a file, each place a whole number of pairs."""
    pair = 2 * kind.itemsize
    if size < pair:
        return np.empty(0, kind)
    words = np.memmap(path, kind, "r", shape=(size // pair * 2,))
    count = _BLOCK // kind.itemsize
    if len(words) <= _PLACES * count:
        return np.asarray(words)
    starts = np.linspace(0, len(words) - count, _PLACES).astype(np.int64) // 2 * 2
    return np.concatenate([words[start : start + count] for start in starts])
