"""Synthetic text that a model can learn: phrases that count up from a random start by a random stride."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .order import Indices, random_key

SIZE = 1 << 34  # tokens
PHRASE = 16  # tokens
STRIDES = 8  # 1 .. 8
DOCUMENT = 32 * PHRASE  # tokens
_SEED = 20190417


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Token p is (start + stride (p mod 16)) mod vocab; start and stride are drawn uniformly for each phrase p div 16.

    Unigrams are uniform, ln(vocab) nats a token. A model that knows the rule reaches (ln(vocab) + ln(8)) / 16: a
    phrase's first token gives its start, the second its stride, and the rest follow.
    """

    vocab: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return SIZE

    def copy(self, start: int, out: Indices) -> None:
        """Fill out [n] with the tokens from position start on."""
        phrase, inside = np.divmod(np.arange(start, start + len(out)), PHRASE)
        first = random_key(_SEED, 0, phrase) % np.uint64(self.vocab)
        stride = 1 + random_key(_SEED, 1, phrase) % np.uint64(STRIDES)
        out[:] = (first + stride * inside.astype(np.uint64)) % np.uint64(self.vocab)

    def documents(self, start: int, length: int) -> Indices:
        """Return the document of each position [length] from start on."""
        return np.arange(start, start + length) // DOCUMENT
