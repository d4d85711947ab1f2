"""Text files and token files become tokens in memory maps: tokenized, counted and checked once, then found in the cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...spec.run import Data
from .cache import content, kept
from .corpus import Mapped, Runs, held_out, stretches
from .find import File
from .refusal import refused
from .text import shares
from .tokenfiles import TokenFile, check_vocabulary, opened, scanned
from .tokenizer import Bytes, Tokenizer
from .workers import tokenized

Progress = Callable[[str, int, int], None]  # what is done, how many bytes of how many
Read = tuple[str, Mapped, Runs]  # key, tokens, what validates

_FORMAT = 1  # of the cache
_ALONE = (64 << 20, 4 << 20)  # bytes of text that one process tokenizes alone: by bytes, by a vocabulary
_HELD_OUT = {"val", "valid", "validation"}  # a word of the name of a token file that its writer held out


class Way(NamedTuple):
    """How to read: the words, ids below vocab, the cache, whom to tell, and whether to hash what is opened."""

    data: Data
    vocab: int
    cache: Path
    progress: Progress
    verify: bool

    def keep(self, key: str, make: Callable[[Path], None]) -> Path:
        """The folder of the key."""
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
    return key, tokens, held_out(number_of(key), tokens.bounds, way.data.validation)


def token_ids(way: Way, files: list[File]) -> Read:
    """Files of token ids, as they are; raises Unreadable."""
    read = [opened(file) for file in files]
    unbounded = next((each.file.path for each in read if each.bounds is None), None)
    if way.data.documents and way.data.end is None and unbounded:
        says = f"data.documents=true, and {unbounded} does not say where documents end"
        raise refused(says, "set data.end to the token id that ends one (GPT-2: 50256)")
    pairs = [file for each in files for file in (each, *_index(each))]
    key = key_of([_FORMAT, "tokens", _contents(pairs, way), way.data.end])
    folder = way.keep(key, lambda into: _write(into, *scanned(read, way.data.end, way.vocab, _meter(way, "count", files))))
    tokens = _opened(folder, [each.mapped() for each in read])
    if len(tokens.counts) > way.vocab:
        check_vocabulary(read, way.vocab)
    return key, tokens, _set_apart(read, tokens) or held_out(number_of(key), tokens.bounds, way.data.validation)


def _tokenize(way: Way, files: list[File], by: Tokenizer, into: Path) -> None:
    """Write tokens, counts and bounds; raises Unreadable."""
    turns, seen = shares(files), _meter(way, "tokenize", files)
    alone = sum(file.size for file in files) <= _ALONE[not isinstance(by, Bytes)]
    settings = (way.data.tokenizer, way.data.end, way.data.text_key)
    counts, bounds, written = np.zeros(by.size, np.int64), [np.zeros(1, np.int64)], 0
    with open(into / "tokens", "wb") as out:
        for spans, part in zip(turns, tokenized(turns, into, settings, 1 if alone else min(len(turns), _cores())), strict=True):
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


def _index(file: File) -> list[File]:
    path = file.path.with_suffix(".idx")
    return [File(f"{file.name}.idx", path, path.stat().st_size)] if path.exists() else []


def _set_apart(files: list[TokenFile], tokens: Mapped) -> Runs | None:
    """The files that are named for validation, as nanoGPT's val.bin, where the others are not."""
    named = np.array([bool(_HELD_OUT & set(re.split(r"[^a-z]+", Path(each.file.name).stem.lower()))) for each in files])
    return None if named.all() or not named.any() else stretches(tokens.starts[:-1][named], tokens.starts[1:][named])


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
    """(name, bytes, hash) of each file."""
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
