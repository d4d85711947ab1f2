"""Which window is sample n: keyed permutations that are computed, never stored, and a blend of sources by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4
_ONE = 1 << 24  # shares are counted in this many parts, exact for 2**39 samples


def keyed(*words: int | Indices | Words) -> Words:
    """A key [n] that depends on every word and on their order; a whole number stands for n equal ones."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = _mix(state + _GOLDEN ^ np.atleast_1d(np.asarray(word)).astype(np.uint64))
    return state


def permuted(index: Indices, size: int, key: Words) -> Indices:
    """Where each index [n] < size goes in the permutation of 0 .. size-1 that its key [n] names.

    A Feistel network permutes the next power of two, and is walked until it comes back below size: less than twice on
    average (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    place = index.astype(np.uint64)
    key = np.broadcast_to(key, place.shape)
    outside = np.arange(len(place))
    while len(outside):
        place[outside] = _feistel(place[outside], size, key[outside])
        outside = outside[place[outside] >= np.uint64(size)]
    return place.astype(np.int64)


def blended(samples: Indices, weights: Sequence[float]) -> tuple[Indices, Indices]:
    """(source [n], how many earlier samples came from that source [n]), each source within a few samples of its share.

    Halves of the weights share the samples as evenly as whole numbers can (Bresenham's line), then halves of the halves.
    """
    if len(weights) == 1:
        return np.zeros_like(samples), samples
    half = len(weights) // 2
    share = min(max(round(sum(weights[:half]) / sum(weights) * _ONE), 1), _ONE - 1)
    before = samples * share // _ONE
    first = (samples + 1) * share // _ONE > before
    source, nth = np.empty_like(samples), np.empty_like(samples)
    source[first], nth[first] = blended(before[first], weights[:half])
    source[~first], nth[~first] = blended((samples - before)[~first], weights[half:])
    source[~first] += half
    return source, nth


def _feistel(place: Words, size: int, key: Words) -> Words:
    bits = max((size - 1).bit_length(), 1)
    shift = np.uint64(bits - bits // 2)
    high_mask, low_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    high, low = place >> shift, place & low_mask
    for _ in range(_ROUNDS):
        high = high ^ (_mix(low ^ key) & high_mask)
        key = key + _GOLDEN
        low = low ^ (_mix(high ^ key) & low_mask)
        key = key + _GOLDEN
    return high << shift | low


def _mix(words: Words) -> Words:
    """splitmix64's finalizer: each bit of the answer depends on each bit of the word."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
