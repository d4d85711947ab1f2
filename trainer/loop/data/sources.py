"""Text files and token files become tokens in memory maps: tokenized, counted and checked once, then found in the cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...spec.run import Data
from .cache import REMEMBERED, NotCached, content, is_sound, kept, remembered_hash
from .corpus import Mapped, Runs, Tokens, held_out, stretches
from .data_error import refused
from .find import File
from .text_files import shares
from .token_files import TokenFile, beside, check_vocabulary, scanned
from .tokenizer import Bytes, Tokenizer
from .workers import tokenized

Progress = Callable[[str, int, int], None]  # what is done, how many bytes of how many

_FORMAT = 2  # of the cache: 1 took over the truncation and padding of a tokenizer.json
_HASHED = 64 << 20  # bytes of small files that are hashed to see whether they are in the cache
_ALONE = (64 << 20, 4 << 20)  # bytes of text that one process tokenizes alone: by bytes, by a vocabulary
HELD_OUT = {"val", "valid", "validation"}  # a word of the name of a token file that its writer held out


class Read(NamedTuple):
    """A source: a name for its contents, its tokens, what validates, its documents (None: not known), whether files are set apart."""

    key: str
    tokens: Tokens
    validation: Runs
    documents: int | None
    set_apart: bool
    bytes: int


class Way(NamedTuple):
    """How to read: the words, ids below vocab, the cache, whom to tell, whether to hash what is opened, and whether to make nothing."""

    data: Data
    vocab: int
    cache: Path
    progress: Progress
    verify: bool
    only_cached: bool = False

    def keep(self, key: str, make: Callable[[Path], None]) -> Path:
        """The folder of the key; raises NotCached where it would have to be made and nothing is to be."""
        if self.only_cached and not is_sound(self.cache, key):
            raise NotCached
        return kept(self.cache, key, make, lambda remark: self.progress(remark, 0, 0), whole=self.verify)


def key_of(words: Any) -> str:
    """A name for what the words say."""
    return blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()


def number_of(key: str) -> int:
    """A key as a whole number below 2**60."""
    return int(key[:15], 16)


def text(way: Way, files: list[File], by: Tokenizer) -> Read:
    """Text files, tokenized; raises Unreadable."""
    key = key_of([_FORMAT, "text", _contents(files, way), by.identity, by.end, way.data.text_key])
    folder = way.keep(key, lambda into: _tokenize(way, files, by, into))
    tokens = _opened(folder, [np.memmap(folder / "tokens", by.dtype, "r")])
    if len(tokens.counts) > way.vocab:
        raise refused(f"the text holds token {len(tokens.counts) - 1}, and model.vocab={way.vocab}", f"set model.vocab={by.size}")
    held = held_out(number_of(key), tokens.bounds, way.data.validation)
    return Read(key, tokens, held, len(tokens.bounds) - 1, False, sum(file.size for file in files))


def token_ids(way: Way, read: list[TokenFile]) -> Read:
    """Files of token ids, as they are; raises Unreadable."""
    files, end = [each.file for each in read], way.data.end
    pairs = [file for each in files for file in (each, *beside(each))]
    key = key_of([_FORMAT, "tokens", _contents(pairs, way), end, [each.dtype.str for each in read]])
    folder = way.keep(key, lambda into: _write(into, *scanned(read, end, way.vocab, _meter(way, "count", files))))
    tokens = _opened(folder, [each.mapped() for each in read])
    if len(tokens.counts) > way.vocab:
        check_vocabulary(read, way.vocab)
    unbounded = next((each.file.path for each in read if each.bounds is None), None)
    if unbounded and end is not None and not tokens.counts[end : end + 1].any():
        _never_ends(way, unbounded)
    documents = None if unbounded and end is None else len(tokens.bounds) - 1
    apart = _set_apart(read, tokens)
    held = held_out(number_of(key), tokens.bounds, way.data.validation) if apart is None else apart
    return Read(key, tokens, held, documents, apart is not None, sum(file.size for file in files))


def _never_ends(way: Way, path: Path) -> None:
    """Say that no document ends; raises Unreadable where they are to be kept apart."""
    says = f"data.end={way.data.end} occurs nowhere in {path}" + ("" if isinstance(way.data.path, str) else " and the files beside it")
    if way.data.documents:
        raise refused(f"data.documents=true, and {says}", "set data.end to the token id that ends a document (GPT-2: 50256)")
    way.progress(f"{says}: it ends no document", 0, 0)


def _tokenize(way: Way, files: list[File], by: Tokenizer, into: Path) -> None:
    """Write tokens, counts and bounds; raises Unreadable."""
    turns, seen = shares(files), _meter(way, "tokenize", files)
    alone = sum(file.size for file in files) <= _ALONE[not isinstance(by, Bytes)]
    settings = (way.data.tokenizer, way.data.end, way.data.text_key)
    counts, bounds, written = np.zeros(by.size, np.int64), [np.zeros(1, np.int64)], 0
    processes = 1 if alone else min(len(turns), _cores())
    with open(into / "tokens", "wb") as out, closing(tokenized(turns, into, settings, processes)) as parts:
        for spans, part in zip(turns, parts, strict=True):
            words = _taken(f"{part}.tokens")
            out.write(words)
            ids = np.frombuffer(words, by.dtype)
            counts += np.bincount(ids, minlength=by.size)
            bounds.append(written + np.frombuffer(_taken(f"{part}.ends"), np.int64))
            written += len(ids)
            seen(sum(span.end - span.begin for span in spans))
    if not written:
        raise refused(f"{files[0].path} holds no text" + (f", and neither do the {len(files) - 1} files after it" if files[1:] else ""))
    _write(into, counts, np.concatenate(bounds))


def _taken(path: str) -> bytes:
    """What a file holds; it is removed."""
    words = Path(path).read_bytes()
    os.unlink(path)
    return words


def validation_flags(files: Sequence[TokenFile]) -> list[bool] | None:
    """Whether each file is named for validation, as nanoGPT's val.bin; None where all are or none is."""
    named = [bool(HELD_OUT & set(re.split(r"[^a-z]+", Path(each.file.name).stem.lower()))) for each in files]
    return None if all(named) or not any(named) else named


def _set_apart(files: Sequence[TokenFile], tokens: Mapped) -> Runs | None:
    """The files that are named for validation, where the others are not."""
    named = validation_flags(files)
    return None if named is None else stretches(tokens.starts[:-1][named], tokens.starts[1:][named])


def _opened(folder: Path, files: list[Any]) -> Mapped:
    return Mapped(
        files=tuple(files),
        starts=np.cumsum([0, *map(len, files)]),
        bounds=np.memmap(folder / "bounds", np.int64, "r"),
        counts=np.fromfile(folder / "counts", np.int64),
    )


def _write(into: Path, counts: Any, bounds: Any) -> None:
    np.trim_zeros(counts, "b").tofile(into / "counts")
    bounds.tofile(into / "bounds")


def _contents(files: list[File], way: Way) -> list[tuple[str, int, str]]:
    """(name, bytes, hash) of each file; raises NotCached where hashes are only looked up and one is not known."""
    if way.only_cached:
        if sum(file.size for file in files if file.size < REMEMBERED) > _HASHED:
            raise NotCached
        return [(file.name, file.size, remembered_hash(file.path, way.cache)) for file in files]
    seen, rows = _meter(way, "hash", files), []
    for file in files:
        rows.append((file.name, file.size, content(file.path, way.cache)))
        seen(file.size)
    return rows


def _meter(way: Way, what: str, files: list[File]) -> Callable[[int], None]:
    """Tells of so many bytes more."""
    done, size = 0, sum(file.size for file in files)

    def seen(more: int) -> None:
        nonlocal done
        done = min(done + more, size)
        way.progress(what, done, size)

    return seen


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
