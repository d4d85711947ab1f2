"""The tokens of a source: one sequence, divided into documents, or into examples of a prompt and a completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .order import Indices


class Tokens(Protocol):
    """A sequence of `size` tokens, divided into documents."""

    @property
    def size(self) -> int: ...
    def copy(self, start: int, out: Indices) -> None:
        """Fill out [n] with the tokens from position start on."""

    def documents(self, start: int, length: int) -> Indices:
        """Return the document of each position [length] from start on."""


@dataclass(frozen=True, kw_only=True)
class MappedTokens:
    """Files as one sequence: memory maps, the positions at which files start [files + 1] and documents start [documents + 1]."""

    files: tuple[NDArray[np.integer[Any]], ...]
    starts: Indices
    bounds: Indices
    counts: Indices  # how often each id occurs

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self.starts[-1])

    def copy(self, start: int, out: Indices) -> None:
        """Fill out [n] with the tokens from position start on."""
        file = int(np.searchsorted(self.starts, start, "right")) - 1
        filled = 0
        while filled < len(out):
            inside = start + filled - int(self.starts[file])
            piece = self.files[file][inside : inside + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            file += 1

    def documents(self, start: int, length: int) -> Indices:
        """Return the document of each position [length] from start on."""
        first, last = (int(index) for index in np.searchsorted(self.bounds, [start, start + length - 1], "right"))
        return first - 1 + np.searchsorted(self.bounds[first:last], np.arange(start, start + length), "right")


@dataclass(frozen=True, kw_only=True)
class MappedExamples(MappedTokens):
    """Files as one sequence of examples, each of `group` documents; `completions` [documents]: the position at which each completion
    begins. An example of two documents is a prompt with the chosen answer, and with the rejected one.

    `turns` [2, n]: of conversations the positions at which each assistant turn begins and ends, in order; `completions` are the first of
    each conversation. None: a completion ends with its document. `empty`: the examples with an empty completion.
    """

    completions: Indices
    group: int = 1
    turns: Indices | None = None
    empty: int = 0

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.completions) // self.group

    def in_completion(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether each position [length] from start on is in a completion, not in a prompt."""
        if self.turns is None:
            return np.arange(start, start + length) >= self.completions[self.documents(start, length)]
        begins, ends = self.turns
        inside = np.zeros(length, bool)
        for turn in range(int(np.searchsorted(ends, start, "right")), int(np.searchsorted(begins, start + length))):
            inside[max(int(begins[turn]) - start, 0) : int(ends[turn]) - start] = True
        return inside

    def has_turn(self, begins: Indices, ends: Indices) -> NDArray[np.bool_]:
        """Return whether a token in positions begins .. ends, not the first, is in a turn of a conversation, for ranges [...]."""
        assert self.turns is not None
        starts, stops = self.turns
        if not len(stops):
            return np.zeros(begins.shape, bool)
        turn = np.searchsorted(stops, begins + 1, "right")
        first = np.maximum(starts[np.minimum(turn, len(stops) - 1)], begins + 1)
        has: NDArray[np.bool_] = (turn < len(stops)) & (first < ends)
        return has
