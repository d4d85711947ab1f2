"""`data` in a recipe becomes a corpus: read and tokenized once, then opened from the cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ...spec.run import Data
from .cache import NotCached
from .check import CheckedData, check
from .corpus import Corpus, Source, held_out, windows
from .data_error import refused
from .sources import Progress, Read, Way, key_of, text, token_ids
from .synthetic import DOCUMENT, Synthetic


def prepare(data: Data, *, vocab: int, seq: int, cache: Path, progress: Progress, verify: bool = True) -> Corpus:
    """The corpus that `data` names, tokenized below the folder `cache` unless it is there already; raises Unreadable.

    Any number of processes may call it at once: one works, the others wait. A call of progress with a total of 0 is a remark.
    `verify=False` trusts the sizes of files that another process of this node has just verified.
    """
    checked = check(data, vocab, lambda remark: progress(remark, 0, 0))
    corpus = _corpus(checked, Way(data, vocab, cache.expanduser(), progress, verify))
    windows(corpus, seq, "train")
    return corpus


def cache_folder(data: Data) -> Path:
    """`data.cache`, or distrain/data below the user's cache folder (XDG base directory specification); raises Unreadable."""
    try:
        if data.cache:
            return Path(data.cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distrain" / "data"
    except RuntimeError as error:
        raise refused(f"data.cache={data.cache or 'null'}: {str(error).rstrip('.')}", "set data.cache=FOLDER") from None


def cached_corpus(checked: CheckedData, data: Data, *, vocab: int, cache: Path) -> Corpus | None:
    """The corpus of what was checked where all of it is in the cache and that is seen fast; None otherwise."""
    try:
        return _corpus(checked, Way(data, vocab, cache.expanduser(), lambda what, done, total: None, verify=False, only_cached=True))
    except NotCached:
        return None


def _corpus(checked: CheckedData, way: Way) -> Corpus:
    data = way.data
    read = _read(checked, way)
    sources = tuple(
        Source(
            tokens=each.tokens,
            validation=each.validation,
            weight=weight,
            documents=each.documents,
            set_apart=each.set_apart,
            bytes=each.bytes,
        )
        for each, weight in zip(read, data.weights or [1.0], strict=True)
    )
    key = key_of([[each.key for each in read], data.weights, data.validation])
    return Corpus(name=data.name, key=key, vocab=way.vocab, sources=sources, documents=data.documents)


def _read(checked: CheckedData, way: Way) -> list[Read]:
    """Each source."""
    if way.data.name == "synthetic":
        made = Synthetic(vocab=way.vocab)
        held = held_out(0, np.array([0, made.size]), way.data.validation)
        return [Read(f"synthetic {way.vocab}", made, held, made.size // DOCUMENT, False, 0)]
    if way.data.name == "tokens":
        return [token_ids(way, files) for files in checked.opened]
    assert checked.tokenizer is not None
    return [text(way, files, checked.tokenizer) for files in checked.groups]
