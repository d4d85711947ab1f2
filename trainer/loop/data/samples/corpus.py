"""The tokens of a run: where they are stored, where documents end, which train and which validate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ....spec.derived.data_blends import Blend
from ....spec.problem import Problem, Unreadable
from ..files.data_error import data_problem
from .order import Indices, random_key
from .packing import PackedWindows, pack_examples
from .tokens import MappedExamples, MappedTokens, Tokens

Split = Literal["train", "validation"]
BLOCK = 1 << 22  # tokens that are counted at a time
MOST_COUNTED = 1 << 28  # of held-out tokens; of more, which are as frequent as in all text, the frequencies of all text are taken


@dataclass(frozen=True, kw_only=True)
class TokenRanges:
    """Ranges of tokens begins[i] .. ends[i], read as one text of `size` tokens."""

    begins: Indices
    ends: Indices

    @cached_property
    def _totals(self) -> Indices:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.ends - self.begins)])

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self._totals[-1])

    def pieces(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield (position, length) of the ranges that hold the text from start on."""
        run = int(np.searchsorted(self._totals, start, "right")) - 1
        while length:
            inside = start - int(self._totals[run])
            taken = min(length, int(self.ends[run] - self.begins[run]) - inside)
            yield int(self.begins[run]) + inside, taken
            start, length, run = start + taken, length - taken, run + 1

    def rest(self, size: int) -> TokenRanges:
        """Return the complement, in a sequence of `size` tokens."""
        begins, ends = np.concatenate([[0], self.ends]), np.concatenate([self.begins, [size]])
        return TokenRanges(begins=begins[ends > begins], ends=ends[ends > begins])


def validation_ranges(key: int, bounds: Indices, share: float, *, whole: bool = False) -> TokenRanges:
    """Return the documents that validate: drawn by the key until they hold at least `share` of the tokens.

    A document larger than the whole share is skipped. If the others are too few, as when there is only one document, the end of
    the text validates, even if that cuts a document; with `whole` it begins at a document, and at least one document trains.
    """
    size = int(bounds[-1])
    wanted = round(size * share)
    if not wanted and not whole:
        return merge_ranges(np.array([size]), np.array([size]))
    lengths = np.diff(bounds)
    drawn = random_key(key, np.arange(len(lengths)))
    few = np.flatnonzero(drawn < np.uint64(min(4 * share, 1) * (2**64 - 2**11)))  # usually enough, and fewer to sort
    for documents in (few, np.arange(len(lengths))):
        fitting = documents[lengths[documents] <= wanted]
        fitting = fitting[np.argsort(drawn[fitting], kind="stable")]
        totals = np.cumsum(lengths[fitting])
        if len(totals) and totals[-1] >= wanted > 0:
            count = int(np.searchsorted(totals, wanted)) + 1
            chosen = np.sort(fitting[: min(count, len(lengths) - 1) if whole else count])
            return merge_ranges(bounds[chosen], bounds[chosen + 1])
    begin = size - wanted
    if whole:
        begin = max(int(bounds[np.searchsorted(bounds, begin, "right") - 1]), int(bounds[1]))
    return merge_ranges(np.array([begin]), np.array([size]))


def merge_ranges(begins: Indices, ends: Indices) -> TokenRanges:
    """Return TokenRanges without empty ones and with adjacent ones merged."""
    begins, ends = begins[ends > begins], ends[ends > begins]
    if not len(begins):
        return TokenRanges(begins=begins, ends=ends)
    apart = begins[1:] != ends[:-1]
    return TokenRanges(begins=begins[np.append(True, apart)], ends=ends[np.append(apart, True)])


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data source; samples are drawn from sources in proportion to the weights of a blend."""

    tokens: Tokens
    validation: TokenRanges
    documents: int | None  # None: unknown
    bytes: int  # size of its files
    set_apart: bool  # whether files named for validation validate

    @cached_property
    def train(self) -> TokenRanges:
        """The tokens that do not validate."""
        return self.validation.rest(self.tokens.size)

    def ranges(self, split: Split) -> TokenRanges:
        """Return the tokens of a split."""
        return self.train if split == "train" else self.validation

    def pack(self, split: Split, seq: int) -> PackedWindows | None:
        """Return a split's examples in windows of seq + 1 tokens; None if the source has no examples but text."""
        if not isinstance(self.tokens, MappedExamples):
            return None
        ranges, bounds = self.ranges(split), self.tokens.bounds[:: self.tokens.group]
        firsts, ends = np.searchsorted(bounds, ranges.begins), np.searchsorted(bounds, ranges.ends)
        examples = [np.arange(first, end) for first, end in zip(firsts, ends, strict=True)]
        return pack_examples(self.tokens, np.concatenate([np.zeros(0, np.int64), *examples]), seq + 1)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The sources of a run's batches, and the blends of them that it reads one after another; `key` depends only on the contents of the
    sources, the `data` keys and the first blend."""

    name: str
    key: str
    vocab: int
    sources: tuple[Source, ...]
    blends: tuple[Blend, ...]
    documents: bool  # attention and loss stay inside documents
    pads: bool = False  # the last window of a text may be shorter and is padded, so that no token is left out

    @property
    def examples(self) -> list[MappedExamples]:
        """The sources that are examples of a prompt and a completion."""
        return [source.tokens for source in self.sources if isinstance(source.tokens, MappedExamples)]

    @property
    def has_pairs(self) -> bool:
        """Whether each example has two answers to a prompt."""
        return any(each.group > 1 for each in self.examples)

    @property
    def ignores_labels(self) -> bool:
        """Whether some labels of a batch do not count: those that cross documents, those in prompts, padding."""
        return self.documents or bool(self.examples)

    def size(self, split: Split) -> int:
        """Number of tokens."""
        return sum(source.ranges(split).size for source in self.sources)

    @cached_property
    def entropy(self) -> float:
        """Unigram entropy of the training text in nats a token, sources by the weights of the first blend: the loss of a model that knows
        only frequencies. It reads what is held out."""
        weights = np.array(self.blends[0].weights) / sum(self.blends[0].weights)
        shares = sum(weight * _id_frequencies(source, self.vocab) for weight, source in zip(weights, self.sources, strict=True))
        return float(-sum(share * log(share) for share in shares if share))


def windows(corpus: Corpus, seq: int, split: Split) -> tuple[int, ...]:
    """Return how many windows of seq + 1 tokens each source has; raises Unreadable if one has none."""
    counts, short = list[int](), list[Problem]()
    for index, source in enumerate(corpus.sources):
        name, size, packed = source_name(corpus.name, index, len(corpus.sources)), source.ranges(split).size, source.pack(split, seq)
        counts.append((size - 1 + (seq - 1) * corpus.pads) // seq if packed is None else packed.size)
        if counts[-1] < 1:
            whole, apart = source.tokens.size, source.set_apart
            short.append(_no_example(name, seq, split) if packed else shortage(name, size, whole, seq, split, set_apart=apart))
    if short:
        raise Unreadable(short)
    return tuple(counts)


def source_name(data: str, source: int, sources: int) -> str:
    """Return the name of a source in messages."""
    return f"data={data}" if sources == 1 else f"path {source + 1} of {sources} of data={data}"


def shortage(name: str, size: int, whole: int, seq: int, split: Split, *, set_apart: bool) -> Problem:
    """Return the problem of a split of `size` tokens, too few for a window, of a source of `whole` tokens."""
    says = f"{split} has {size} tokens of {name}, fewer than one sequence and the token after it: train.seq={seq}"
    if set_apart:
        return data_problem(
            says, "give more text" if split == "train" else "leave out the files named for validation, or set train.evaluate.every=0"
        )
    if whole < (seq + 1 if split == "train" else 2 * (seq + 1)):
        return data_problem(says, f"set train.seq to at most {size - 1}" if size > 1 else "give more text")
    if split == "train":  # whole documents validate, less than twice the share
        return data_problem(says, f"set data.validation to at most {floor((whole - seq - 1) / whole * 5_000) / 10_000:g}")
    share = ceil((seq + 1) / whole * 10_000) / 10_000
    return data_problem(says, f"set data.validation={share:g} or train.evaluate.every=0")


def _no_example(name: str, seq: int, split: Split) -> Problem:
    """Return the problem of a split of examples that has no window."""
    says = f"{split} has no example of {name} with a token of its completion inside train.seq={seq}"
    mend = (
        "set a larger data.validation or train.evaluate.every=0" if split == "validation" else "give more examples, or a longer train.seq"
    )
    return data_problem(says, mend)


def _id_frequencies(source: Source, vocab: int) -> NDArray[np.float64]:
    """Return the frequency of each id [vocab] in the training text, or in its completions."""
    if isinstance(source.tokens, MappedExamples):
        return _completion_frequencies(source.tokens, source.train, vocab)
    if not isinstance(source.tokens, MappedTokens):
        return np.full(vocab, 1 / vocab)
    counts = np.zeros(vocab, np.int64)
    counts[: len(source.tokens.counts)] = source.tokens.counts
    if source.validation.size <= MOST_COUNTED or source.set_apart:
        for held in _blocks(source.tokens, source.validation):
            counts -= np.bincount(held, minlength=vocab)
    return np.asarray(counts / max(counts.sum(), 1), np.float64)


def _blocks(tokens: MappedTokens, ranges: TokenRanges) -> Iterator[NDArray[np.int64]]:
    """Yield the ids in ranges of tokens, many at a time: ranges are short where documents are."""
    for start in range(0, ranges.size, BLOCK):
        held, at = np.empty(min(BLOCK, ranges.size - start), np.int64), 0
        for position, length in ranges.pieces(start, len(held)):
            tokens.copy(position, held[at : at + length])
            at += length
        yield held


def _completion_frequencies(tokens: MappedExamples, ranges: TokenRanges, vocab: int) -> NDArray[np.float64]:
    """Return the frequency of each id [vocab] in the completions of ranges of examples."""
    counts = np.zeros(vocab, np.int64)
    for begin, end in zip(ranges.begins, ranges.ends, strict=True):
        for at in range(int(begin), int(end), 1 << 22):
            read = np.empty(min(1 << 22, int(end) - at), np.int64)
            tokens.copy(at, read)
            counts += np.bincount(read[tokens.in_completion(at, len(read))], minlength=vocab)
    return np.asarray(counts / max(counts.sum(), 1), np.float64)
