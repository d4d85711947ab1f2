"""The order of samples: keyed permutations that are computed instead of stored, and a blend of sources by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4
_ONE = 1 << 24  # a share of 1, in integer parts: exact for 2**39 samples


def random_key(*words: int | Indices | Words) -> Words:
    """Return a key [n] that depends on every word and their order; a single number counts as n equal ones."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = _mix(state + _GOLDEN ^ np.atleast_1d(np.asarray(word)).astype(np.uint64))
    return state


def permuted_index(index: Indices, size: int, key: Words) -> Indices:
    """Return the image of each index [n] < size under the permutation of 0 .. size-1 that its key [n] selects.

    A Feistel network permutes the next power of two; it is applied until the result is below size, fewer than two times on
    average (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    place = index.astype(np.uint64)
    key = np.broadcast_to(key, place.shape)
    outside = np.arange(len(place))
    while len(outside):
        place[outside] = _feistel(place[outside], size, key[outside])
        outside = outside[place[outside] >= np.uint64(size)]
    return place.astype(np.int64)


def blend(samples: Indices, weights: Sequence[float]) -> tuple[Indices, Indices]:
    """Return (source [n], number of earlier samples of that source [n]); each source stays within a few samples of its share.

    The samples are divided between two halves of the weights as evenly as integers allow (Bresenham's line), then recursively.
    """
    if len(weights) == 1:
        return np.zeros_like(samples), samples
    half, share = _first_half(weights)
    before = samples * share // _ONE
    first = (samples + 1) * share // _ONE > before
    source, nth = np.empty_like(samples), np.empty_like(samples)
    source[first], nth[first] = blend(before[first], weights[:half])
    source[~first], nth[~first] = blend((samples - before)[~first], weights[half:])
    source[~first] += half
    return source, nth


def blend_counts(count: int, weights: Sequence[float]) -> list[int]:
    """Return how many of the first samples of a `blend` are of each source."""
    if len(weights) == 1:
        return [count]
    half, share = _first_half(weights)
    first = count * share // _ONE
    return [*blend_counts(first, weights[:half]), *blend_counts(count - first, weights[half:])]


def _first_half(weights: Sequence[float]) -> tuple[int, int]:
    """Return how many of two or more weights are the first half, and their share in parts of _ONE."""
    half = len(weights) // 2
    return half, min(max(round(sum(weights[:half]) / sum(weights) * _ONE), 1), _ONE - 1)


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
    """Apply splitmix64's finalizer: each output bit depends on each input bit."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
