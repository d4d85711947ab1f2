"""From the `data` keys of a recipe to a corpus: read and tokenized once, then opened from the cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ...spec.derived.data_blends import blends, has_sources
from ...spec.run import Data
from ...system.open_files import raise_limit_of_maps
from .check_data import CheckedData, check_data
from .file_hashes import NotCached
from .files.data_error import data_error
from .samples.corpus import Corpus, Source, validation_ranges, windows
from .samples.packing import packing_remark
from .samples.synthetic import DOCUMENT, Synthetic
from .source_reader import Progress, SourceReader, SourceTokens, hash_key, read_pairs, read_text, read_token_ids


def prepare_corpus(data: Data, *, vocab: int, seq: int, cache: Path, progress: Progress, verify: bool = True) -> Corpus:
    """Return the corpus that `data` names; tokenize it into the folder `cache` if that does not hold it yet. Raises Unreadable.

    Several processes may call it at once: one works, the others wait. A call of `progress` with a total of 0 is a remark.
    `verify=False` trusts the sizes of files that another process on this node has just verified.
    """
    raise_limit_of_maps()
    checked = check_data(data, vocab, lambda remark: progress(remark, 0, 0))
    corpus = read_corpus(checked, SourceReader(data, vocab, cache.expanduser(), progress, verify))
    windows(corpus, seq, "train")
    if remark := packing_remark(corpus.examples, seq):
        progress(remark, 0, 0)
    return corpus


def cache_folder(data: Data) -> Path:
    """Return `data.cache`, or distrain/data in the user's cache folder (XDG base directory specification); raises Unreadable."""
    try:
        if data.cache:
            return Path(data.cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distrain" / "data"
    except RuntimeError as error:
        raise data_error(f"data.cache={data.cache or 'null'}: {str(error).rstrip('.')}", "set data.cache=FOLDER") from None


def cached_corpus(checked: CheckedData, data: Data, *, vocab: int, cache: Path) -> Corpus | None:
    """Return the corpus if all of it is in the cache and this can be checked quickly; None otherwise."""
    try:
        return read_corpus(
            checked, SourceReader(data, vocab, cache.expanduser(), lambda what, done, total: None, verify=False, only_cached=True)
        )
    except NotCached:
        return None


def read_corpus(checked: CheckedData, reader: SourceReader) -> Corpus:
    """Return the corpus of checked data, read as `reader` says; raises Unreadable, and NotCached if that is all that it reads."""
    data = reader.data
    read = _read_sources(checked, reader)
    sources = tuple(
        Source(
            tokens=each.tokens,
            validation=each.validation,
            documents=each.documents,
            set_apart=each.set_apart,
            bytes=each.bytes,
        )
        for each in read
    )
    first = blends(data)[0].weights if has_sources(data) else None
    key = hash_key([[each.key for each in read], first, data.validation])
    return Corpus(name=data.name, key=key, vocab=reader.vocab, sources=sources, blends=blends(data), documents=data.documents)


def _read_sources(checked: CheckedData, reader: SourceReader) -> list[SourceTokens]:
    """Return the tokens of each source."""
    if reader.data.name == "synthetic":
        tokens = Synthetic(vocab=reader.vocab)
        held = validation_ranges(0, np.array([0, tokens.size]), reader.data.validation)
        return [SourceTokens(f"synthetic {reader.vocab}", tokens, held, tokens.size // DOCUMENT, False, 0)]
    if reader.data.name == "tokens":
        return [read_token_ids(reader, files) for files in checked.token_files]
    assert checked.tokenizer is not None
    if reader.data.has_prompts:
        return [read_pairs(reader, files, checked.tokenizer) for files in checked.groups]
    return [read_text(reader, files, checked.tokenizer) for files in checked.groups]
