"""Packs examples of a prompt and a completion whole into windows; of an example longer than a window, the end is cut off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .order import Indices
from .tokens import MappedExamples

PADDING = 0  # id of the tokens after a window's last example: nothing but padding attends to them, and they are never labels
PADDING_DOCUMENT = -1  # examples are numbered from 0


@dataclass(frozen=True, kw_only=True)
class PackedWindows:
    """Windows of `length` tokens; window i holds the examples chosen[firsts[i]] to chosen[firsts[i + 1] - 1]."""

    tokens: MappedExamples
    length: int
    chosen: Indices
    firsts: Indices

    @property
    def size(self) -> int:
        """Number of windows."""
        return len(self.firsts) - 1

    def fill(self, window: int, tokens: Indices, documents: Indices, is_label: NDArray[np.bool_]) -> None:
        """Fill in a window's tokens, the example of each, and whether it is a label: whether it is in a completion; each [length]."""
        tokens[:], documents[:], is_label[:] = PADDING, PADDING_DOCUMENT, False
        filled = 0
        for example in self.chosen[self.firsts[window] : self.firsts[window + 1]]:
            begin, end = (int(bound) for bound in self.tokens.bounds[example : example + 2])
            filling = slice(filled, filled + min(end - begin, self.length))
            self.tokens.copy(begin, tokens[filling])
            documents[filling] = example
            is_label[filling.start + int(self.tokens.completions[example]) - begin : filling.stop] = True
            filled = filling.stop


def pack_examples(tokens: MappedExamples, examples: Indices, length: int) -> PackedWindows:
    """Pack examples [n] in order into windows of `length` tokens, each with the next ones that fit; leave out those without a label."""
    chosen = examples[has_label(tokens, examples, length)]
    sizes = np.minimum(tokens.bounds[chosen + 1] - tokens.bounds[chosen], length)
    return PackedWindows(tokens=tokens, length=length, chosen=chosen, firsts=_next_fit(sizes, length))


def has_label(tokens: MappedExamples, examples: Indices, length: int) -> NDArray[np.bool_]:
    """Return whether any of an example's first `length` tokens is in its completion and follows another token, for examples [n]."""
    begins = tokens.bounds[examples]
    return np.maximum(tokens.completions[examples], begins + 1) < np.minimum(tokens.bounds[examples + 1], begins + length)


def packing_remark(sources: list[MappedExamples], seq: int) -> str:
    """Return how many of all examples are cut or left out in windows of seq + 1 tokens; "" if none is."""
    every = [(each, np.arange(len(each.completions))) for each in sources]
    count = sum(len(examples) for _, examples in every)
    cut = sum(int((np.diff(each.bounds) > seq + 1).sum()) for each, _ in every)
    out = sum(int((~has_label(each, examples, seq + 1)).sum()) for each, examples in every)
    says = [f"{cut:,} of {count:,} examples are longer than train.seq={seq} and the token after it: their ends are cut off"] if cut else []
    says += [f"{out:,} of {count:,} examples are left out: none of a completion's tokens follows another inside train.seq"] if out else []
    return "; ".join(says)


def _next_fit(sizes: Indices, length: int) -> Indices:
    """Return the first item of each window [windows + 1]: a window takes the next of the sizes [n], each 1 .. length, while they fit."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    following = np.searchsorted(ends, ends[:-1] + length, "right") - 1  # of a window that begins with each item
    firsts = [0]
    while firsts[-1] < len(sizes):
        firsts.append(int(following[firsts[-1]]))
    return np.array(firsts, np.int64)
