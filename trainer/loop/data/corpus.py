"""The tokens of a run: where they lie, where documents end, which of them train and which are held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ...spec.problem import Problem, Unreadable
from .data_error import wrong
from .order import Indices, keyed

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")


class Tokens(Protocol):
    """A row of `size` tokens in documents."""

    @property
    def size(self) -> int: ...
    def copy(self, start: int, out: Indices) -> None:
        """Fill out [n] with the tokens from position start on."""

    def documents(self, start: int, length: int) -> Indices:
        """The document of each of the positions [length] from start on."""


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Files in a row: memory maps, the positions at which they start [files + 1], and those of documents [documents + 1]."""

    files: tuple[NDArray[np.integer[Any]], ...]
    starts: Indices
    bounds: Indices
    counts: Indices  # how often each id comes

    @property
    def size(self) -> int:
        """Tokens."""
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
        """The document of each of the positions [length] from start on."""
        first, last = (int(index) for index in np.searchsorted(self.bounds, [start, start + length - 1], "right"))
        return first - 1 + np.searchsorted(self.bounds[first:last], np.arange(start, start + length), "right")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Stretches of tokens begins[i] .. ends[i], read as one text of `size` tokens."""

    begins: Indices
    ends: Indices

    @cached_property
    def _totals(self) -> Indices:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.ends - self.begins)])

    @property
    def size(self) -> int:
        """Tokens."""
        return int(self._totals[-1])

    def pieces(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """(position, length) of the stretches that hold the text from start on."""
        run = int(np.searchsorted(self._totals, start, "right")) - 1
        while length:
            inside = start - int(self._totals[run])
            taken = min(length, int(self.ends[run] - self.begins[run]) - inside)
            yield int(self.begins[run]) + inside, taken
            start, length, run = start + taken, length - taken, run + 1

    def rest(self, size: int) -> Runs:
        """All else of a row of tokens."""
        begins, ends = np.concatenate([[0], self.ends]), np.concatenate([self.begins, [size]])
        return Runs(begins=begins[ends > begins], ends=ends[ends > begins])


def held_out(key: int, bounds: Indices, share: float) -> Runs:
    """The documents [bounds] that validate: drawn by the key until they hold at least that share of the tokens.

    A document larger than all of the share is passed over. Where the others are too few, as where there is one document, the
    end of the text validates, whatever document it cuts.
    """
    size, lengths = int(bounds[-1]), np.diff(bounds)
    wanted = round(size * share)
    drawn = keyed(key, np.arange(len(lengths)))
    few = np.flatnonzero(drawn < np.uint64(min(4 * share, 1) * (2**64 - 2**11)))  # most often enough, and fewer to sort
    for documents in (few, np.arange(len(lengths))):
        fitting = documents[lengths[documents] <= wanted]
        fitting = fitting[np.argsort(drawn[fitting], kind="stable")]
        totals = np.cumsum(lengths[fitting])
        if len(totals) and totals[-1] >= wanted > 0:
            chosen = np.sort(fitting[: int(np.searchsorted(totals, wanted)) + 1])
            return stretches(bounds[chosen], bounds[chosen + 1])
    return stretches(np.array([size - wanted]), np.array([size]))


def stretches(begins: Indices, ends: Indices) -> Runs:
    """Runs of which none is empty, and none begins where another ends."""
    begins, ends = begins[ends > begins], ends[ends > begins]
    if not len(begins):
        return Runs(begins=begins, ends=ends)
    apart = begins[1:] != ends[:-1]
    return Runs(begins=begins[np.append(True, apart)], ends=ends[np.append(apart, True)])


@dataclass(frozen=True, kw_only=True)
class Source:
    """Tokens that are drawn from as one text, in proportion to the weight."""

    tokens: Tokens
    validation: Runs
    weight: float = 1.0
    documents: int | None = None  # None: not known
    bytes: int = 0  # of its files
    set_apart: bool = False  # whether what validates are the files that are named for it

    @cached_property
    def train(self) -> Runs:
        """All that does not validate."""
        return self.validation.rest(self.tokens.size)

    def runs(self, split: Split) -> Runs:
        """What a split reads."""
        return self.train if split == "train" else self.validation


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What batches are made from; `key` is the same wherever the same words name the same contents."""

    name: str
    key: str
    vocab: int
    sources: tuple[Source, ...]
    documents: bool  # attention and loss stay inside documents

    def size(self, split: Split) -> int:
        """Tokens."""
        return sum(source.runs(split).size for source in self.sources)

    @cached_property
    def entropy(self) -> float:
        """Nats a token of the training text's unigrams, sources by weight: the loss of a model that knows only how common each is."""
        weights = np.array([source.weight for source in self.sources]) / sum(source.weight for source in self.sources)
        shares = sum(weight * _shares(source, self.vocab) for weight, source in zip(weights, self.sources, strict=True))
        return float(-sum(share * log(share) for share in shares if share))


def windows(corpus: Corpus, seq: int, split: Split) -> tuple[int, ...]:
    """How many windows of seq tokens, and a token after, each source has; raises Unreadable where one has none."""
    sizes = [source.runs(split).size for source in corpus.sources]
    short = [
        shortage(source_name(corpus.name, index, len(sizes)), size, source.tokens.size, seq, split, set_apart=source.set_apart)
        for index, (source, size) in enumerate(zip(corpus.sources, sizes, strict=True))
        if size <= seq
    ]
    if short:
        raise Unreadable(short)
    return tuple((size - 1) // seq for size in sizes)


def source_name(data: str, source: int, sources: int) -> str:
    """What messages call a source, the only one or one of several."""
    return f"data={data}" if sources == 1 else f"path {source + 1} of {sources} of data={data}"


def shortage(name: str, size: int, whole: int, seq: int, split: Split, *, set_apart: bool) -> Problem:
    """What to do about a split of `size` tokens, too few for a window, of a source of `whole` tokens."""
    says = f"{split} has {size} tokens of {name}, less than one sequence and a token after it: train.seq={seq}"
    if set_apart:
        return wrong(
            says, "give more text" if split == "train" else "leave out the files named for validation, or set train.evaluate.every=0"
        )
    if whole < (seq + 1 if split == "train" else 2 * (seq + 1)):
        return wrong(says, f"set train.seq to at most {size - 1}" if size > 1 else "give more text")
    if split == "train":  # whole documents are held out, less than twice the share
        return wrong(says, f"set data.validation to at most {floor((whole - seq - 1) / whole * 5_000) / 10_000:g}")
    share = ceil((seq + 1) / whole * 10_000) / 10_000
    return wrong(says, f"set data.validation={share:g} or train.evaluate.every=0")


def _shares(source: Source, vocab: int) -> NDArray[np.float64]:
    """How common each id [vocab] is in what trains."""
    if not isinstance(source.tokens, Mapped):
        return np.full(vocab, 1 / vocab)
    counts = np.zeros(vocab, np.int64)
    counts[: len(source.tokens.counts)] = source.tokens.counts
    for begin, end in zip(source.validation.begins, source.validation.ends, strict=True):
        for at in range(int(begin), int(end), 1 << 22):
            held = np.empty(min(1 << 22, int(end) - at), np.int64)
            source.tokens.copy(at, held)
            counts -= np.bincount(held, minlength=vocab)
    return np.asarray(counts / max(counts.sum(), 1), np.float64)
