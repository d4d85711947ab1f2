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


def sentence(facts: Facts, tokens: int) -> str:
    """Say how many tokens there are, and how many epochs a run of so many tokens makes of them."""
    documents = f" in {facts.documents:,} document{'s' if facts.documents != 1 else ''}" if facts.documents is not None else ""
    held_out = f", {facts.validation:,} more for validation" if facts.validation else ""
    train = "?" if facts.train is None else f"{facts.train:,}"
    return f"data: {train} tokens{documents}{held_out}; the run reads {tokens:,}, {_epochs(facts, tokens)}"


def _epochs(facts: Facts, tokens: int) -> str:
    whole = sum(part.weight for part in facts.sources)
    epochs = [tokens * part.weight / whole / part.train for part in facts.sources if part.train]
    if len(epochs) == 1:
        return f"{_digits(epochs[0])} epochs"
    return f"{', '.join(map(_digits, epochs[:-1]))} and {_digits(epochs[-1])} epochs of its {len(epochs)} sources"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _total(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
