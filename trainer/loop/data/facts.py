"""What is known of a run's data in figures: tokens that train and validate, documents, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source: its share by weight, and its tokens; None where not known."""

    weight: float
    train: int | None
    validation: int | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Figures of a corpus, or, where not `exact`, an estimate of them from a sample. None: not known.

    `key` names the contents, `bytes` are those of the files, `entropy` is nats a token of the training text's unigrams. Of token
    files the sum of train and validation is always exact; where whole documents are held out of files that were never read,
    the two are apart from the truth by a document at most.
    """

    key: str | None
    sources: tuple[Part, ...]
    documents: int | None
    exact: bool
    bytes: int
    entropy: float | None = None

    @property
    def train(self) -> int | None:
        """Tokens that train."""
        return _total([part.train for part in self.sources])

    @property
    def validation(self) -> int | None:
        """Tokens that validate."""
        return _total([part.validation for part in self.sources])

    def words(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "key": self.key,
            "tokens": {"train": self.train, "validation": self.validation},
            "documents": self.documents,
            "exact": self.exact,
            "bytes": self.bytes,
            "entropy": self.entropy,
            "sources": [{"weight": part.weight, "train": part.train, "validation": part.validation} for part in self.sources],
        }


def facts(corpus: Corpus) -> Facts:
    """The figures of a corpus that was prepared, but for its entropy, which takes time: `corpus.entropy`."""
    parts = [Part(weight=each.weight, train=each.train.size, validation=each.validation.size) for each in corpus.sources]
    return Facts(
        key=corpus.key,
        sources=tuple(parts),
        documents=_total([each.documents for each in corpus.sources]),
        exact=True,
        bytes=sum(each.bytes for each in corpus.sources),
    )


def _total(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
