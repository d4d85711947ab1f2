"""A corpus prepared from a test's files, and what it holds: its documents, and the tokens of its train and validation splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.corpus import Corpus, Split
from distrain.trainer.loop.data.samples.tokens import MappedTokens
from distrain.trainer.spec.run import Data


def small_corpus(folder: Path, vocab: int = 256, remarks: list[str] | None = None, **keys: Any) -> Corpus:
    """Prepare the corpus of `data` with these keys, data.name=text by default, with its cache in `folder`; add its remarks to `remarks`."""

    def progress(what: str, done: int, total: int) -> None:
        if not total and remarks is not None:
            remarks.append(what)

    return prepare_corpus(Data(**{"name": "text", **keys}), vocab=vocab, seq=4, cache=folder / "cache", progress=progress)


def mapped_tokens(corpus: Corpus, source: int = 0) -> MappedTokens:
    """Return a source's tokens, which must be memory-mapped."""
    tokens = corpus.sources[source].tokens
    assert isinstance(tokens, MappedTokens)
    return tokens


def documents(corpus: Corpus, source: int = 0) -> list[list[int]]:
    """Return a source's token ids, one list a document."""
    tokens = mapped_tokens(corpus, source)
    ids = np.empty(tokens.size, np.int64)
    tokens.copy(0, ids)
    return [ids[begin:end].tolist() for begin, end in zip(tokens.bounds[:-1], tokens.bounds[1:], strict=True)]


def split_tokens(corpus: Corpus, split: Split) -> list[int]:
    """Return the token ids of the first source's train or validation split."""
    ranges = corpus.sources[0].ranges(split)
    ids = np.empty(ranges.size, np.int64)
    filled = 0
    for start, length in ranges.pieces(0, ranges.size):
        corpus.sources[0].tokens.copy(start, ids[filled : filled + length])
        filled += length
    return ids.tolist()
