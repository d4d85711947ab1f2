"""Statistics of a run's data: training and validation tokens, documents, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....spec.derived.data_blends import tokens_of_sources
from ....spec.numbers.as_text import plural
from ....spec.run import Data
from .corpus import Corpus, Source
from .document_lengths import few_lengths
from .tokens import MappedTokens

SAMPLED = 10_000  # documents at most whose lengths are looked at


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """One source: its tokens, and those that an epoch reads where its windows are padded (None: unknown)."""

    train: int | None
    validation: int | None
    padded: int | None = None

    @property
    def epoch(self) -> int | None:
        """The tokens that an epoch reads, padding included."""
        return self.padded or self.train


@dataclass(frozen=True, kw_only=True)
class CorpusStats:
    """Statistics of a corpus; if not `exact`, estimates from a sample. None: unknown.

    `key` identifies the contents, `bytes` is the size of the files, `entropy` the unigram entropy of the training text in nats a
    token. `lengths` stand for the tokens of a document (few_lengths); () if they are unknown, or of several sources. For token files
    the sum of train and validation is always exact; if whole documents validate and the files have not been read yet, each of the two is
    off by at most one document.
    """

    key: str | None
    sources: tuple[SourceShare, ...]
    documents: int | None
    exact: bool
    bytes: int
    entropy: float | None = None
    lengths: tuple[int, ...] = ()

    @property
    def train(self) -> int | None:
        """Training tokens."""
        return _total([part.train for part in self.sources])

    @property
    def validation(self) -> int | None:
        """Validation tokens."""
        return _total([part.validation for part in self.sources])

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "key": self.key,
            "tokens": {"train": self.train, "validation": self.validation},
            "documents": self.documents,
            "exact": self.exact,
            "bytes": self.bytes,
            "entropy": self.entropy,
            "lengths": list(self.lengths),
            "sources": [{"train": part.train, "validation": part.validation, "epoch": part.epoch} for part in self.sources],
        }


def corpus_stats(corpus: Corpus, seq: int) -> CorpusStats:
    """Return the statistics of a prepared corpus, without `entropy`, which takes time (`corpus.entropy`)."""
    parts = [
        SourceShare(
            train=each.train.size,
            validation=each.validation.size,
            padded=packed.size * seq if (packed := each.pack("train", seq)) else None,
        )
        for each in corpus.sources
    ]
    return CorpusStats(
        key=corpus.key,
        sources=tuple(parts),
        documents=_total([each.documents for each in corpus.sources]),
        exact=True,
        bytes=sum(each.bytes for each in corpus.sources),
        lengths=_lengths_of(corpus.sources[0]) if len(corpus.sources) == 1 else (),
    )


def _lengths_of(source: Source) -> tuple[int, ...]:
    """Return lengths that stand for a source's documents, of which many are a sample; () where it is not known where they end."""
    if source.documents is None or not isinstance(source.tokens, MappedTokens):
        return ()
    bounds = source.tokens.bounds
    many = len(bounds) - 1
    sample = np.sort(np.random.default_rng(0).integers(many, size=SAMPLED)) if many > SAMPLED else np.arange(many)
    return few_lengths(bounds[sample + 1] - bounds[sample])


def document_noun(data: Data) -> str:
    """Return what the documents of data are: pairs of answers, examples, or documents of text."""
    return "pair" if data.has_preferences else "example" if data.has_prompts else "document"


def stats_line(stats: CorpusStats, data: Data, tokens: int, *, is_done: bool = False) -> str:
    """Return a line for people: the tokens there are, and the epochs of a run that reads `tokens` by the blends of `data`, or has read them
    and is done."""
    documents = f"{plural(stats.documents, document_noun(data))}" if stats.documents is not None else ""
    held_out = f", {stats.validation:,} more for validation" if stats.validation else ""
    where = f"{', all' if held_out else ''} in {documents}" if documents else ""
    train = "?" if stats.train is None else f"{stats.train:,}"
    reads = "has read" if is_done else "reads"
    return f"data: {train} tokens{held_out}{where}; the run {reads} {tokens:,}, {_epochs(stats, data, tokens)}"


def _epochs(stats: CorpusStats, data: Data, tokens: int) -> str:
    epochs = [read / part.epoch for part, read in zip(stats.sources, tokens_of_sources(data, tokens), strict=True) if part.epoch]
    if len(epochs) == 1:
        return f"{_round_text(epochs[0])} epochs"
    return f"{', '.join(map(_round_text, epochs[:-1]))} and {_round_text(epochs[-1])} epochs of its {len(epochs)} sources"


def _round_text(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _total(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
