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
    begins. An example of two documents is a prompt with the chosen answer, and with the rejected one."""

    completions: Indices
    group: int = 1

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.completions) // self.group

    def in_completion(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether each position [length] from start on is in a completion, not in a prompt."""
        return np.arange(start, start + length) >= self.completions[self.documents(start, length)]
