"""Packs examples of prompts and completions whole into windows; of an example longer than a window, ends are cut off.

An example is a prompt with its completion, or with two answers, side by side: of these, the longer is cut first, then both to one length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .order import Indices
from .tokens import MappedExamples

PADDING = 0  # id of the tokens after a window's last example: nothing but padding attends to them, and they are never labels
PADDING_DOCUMENT = -1  # documents are numbered from 0


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
        """Fill in a window's tokens, the document of each, and whether it is a label: whether it is in a completion; each [length]."""
        tokens[:], documents[:], is_label[:] = PADDING, PADDING_DOCUMENT, False
        for document, begin, filling in self.documents(window):
            self.tokens.copy(begin, tokens[filling])
            documents[filling] = document
            if self.tokens.turns is not None:
                is_label[filling] = self.tokens.in_completion(begin, filling.stop - filling.start)
            else:
                is_label[filling.start + int(self.tokens.completions[document]) - begin : filling.stop] = True

    def examples(self, window: int) -> Indices:
        """Return the examples of a window [n]."""
        return self.chosen[self.firsts[window] : self.firsts[window + 1]]

    def documents(self, window: int) -> Iterator[tuple[int, int, slice]]:
        """Yield of each document of a window its number, its first token, and its place in the window."""
        examples, group, filled = self.examples(window), self.tokens.group, 0
        sizes = cut_sizes(self.tokens, examples, self.length)
        for document, size in zip((examples[:, None] * group + np.arange(group)).flat, sizes.flat, strict=True):
            yield int(document), int(self.tokens.bounds[document]), slice(filled, filled := filled + int(size))


def pack_examples(tokens: MappedExamples, examples: Indices, length: int) -> PackedWindows:
    """Pack examples [n] in order into windows of `length` tokens, each with the next ones that fit; leave out those without a label."""
    chosen = examples[has_label(tokens, examples, length)]
    sizes = cut_sizes(tokens, chosen, length).sum(1)
    return PackedWindows(tokens=tokens, length=length, chosen=chosen, firsts=_next_fit(sizes, length))


def cut_sizes(tokens: MappedExamples, examples: Indices, length: int) -> Indices:
    """Return the tokens that a window of `length` has of each document of examples [n], [n, group]. Of two documents that are longer
    together, the longer one is cut first, then both to half a window."""
    documents = examples[:, None] * tokens.group + np.arange(tokens.group)
    sizes = tokens.bounds[documents + 1] - tokens.bounds[documents]
    most = length if tokens.group == 1 else np.maximum(length - sizes.min(1, keepdims=True, initial=length), length // 2)
    cut: Indices = np.minimum(sizes, most)
    return cut


def has_label(tokens: MappedExamples, examples: Indices, length: int) -> NDArray[np.bool_]:
    """Return whether any of the tokens that a window of `length` has of an example is in its completion and follows another token, and of
    an example with two completions of each, for examples [n]."""
    documents = examples[:, None] * tokens.group + np.arange(tokens.group)
    begins = tokens.bounds[documents]
    ends = begins + cut_sizes(tokens, examples, length)
    if tokens.turns is not None:
        return np.asarray(tokens.has_turn(begins, ends).all(1))
    has: NDArray[np.bool_] = (np.maximum(tokens.completions[documents], begins + 1) < ends).all(1)
    return has


def packing_remark(sources: list[MappedExamples], seq: int) -> str:
    """Return how many of all examples are cut or left out in windows of seq + 1 tokens; "" if none is."""
    every = [(each, np.arange(each.examples)) for each in sources]
    count = sum(len(examples) for _, examples in every)
    cut = sum(int((np.diff(each.bounds[:: each.group]) > seq + 1).sum()) for each, _ in every)
    out = sum(int((~has_label(each, examples, seq + 1)).sum()) for each, examples in every)
    says = [f"{cut:,} of {count:,} examples are longer than train.seq={seq} and the token after it: their ends are cut off"] if cut else []
    says += [f"{out:,} of {count:,} examples are left out: none of a completion's tokens follows another inside train.seq"] if out else []
    empty = sum(each.empty for each in sources)
    says += [f"{empty:,} of {count:,} examples have an empty completion: of them the end alone is trained"] if empty else []
    return "; ".join(says)


def _next_fit(sizes: Indices, length: int) -> Indices:
    """Return the first item of each window [windows + 1]: a window takes the next of the sizes [n], each 1 .. length, while they fit."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    following = np.searchsorted(ends, ends[:-1] + length, "right") - 1  # of a window that begins with each item
    firsts = [0]
    while firsts[-1] < len(sizes):
        firsts.append(int(following[firsts[-1]]))
    return np.array(firsts, np.int64)
