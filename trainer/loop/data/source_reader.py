"""From text files and token files to memory-mapped tokens: tokenized, counted and checked once, then opened from the cache."""

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
from ...system.cpu import cpu_count
from .cache import is_sound, make_cached_folder
from .file_hashes import NotCached, file_hashes
from .files.data_error import data_error
from .files.find import DataFile
from .samples.corpus import TokenRanges, merge_ranges, validation_ranges
from .samples.tokens import MappedExamples, MappedTokens, Tokens
from .token_files import TokenFile, check_vocabulary, companion_files, scan_token_files
from .tokenize.chat_template import load_chat_template
from .tokenize.pairs import Keys, keys_of
from .tokenize.text_files import split_turns
from .tokenize.tokenizer import ByteTokenizer, Tokenizer
from .tokenize.workers import tokenize_turns

Progress = Callable[[str, int, int], None]  # activity, bytes done, bytes in all

_FORMAT = 2  # version of the cache; version 1 kept the truncation and padding of a tokenizer.json
_ONE_PROCESS = (64 << 20, 4 << 20)  # bytes of text up to which one process tokenizes: into bytes, with a vocabulary
HELD_OUT = {"val", "valid", "validation"}  # words in the names of token files that hold validation data


class SourceTokens(NamedTuple):
    """A source: a key for its contents, its tokens, the validation ranges, its documents (None: unknown), whether files are set apart."""

    key: str
    tokens: Tokens
    validation: TokenRanges
    documents: int | None
    set_apart: bool
    bytes: int


class SourceReader(NamedTuple):
    """How to read sources: the `data` keys, the vocabulary, the cache, the progress callback; `only_cached` makes nothing new."""

    data: Data
    vocab: int
    cache: Path
    progress: Progress
    verify: bool
    only_cached: bool = False

    def keep(self, key: str, make: Callable[[Path], None]) -> Path:
        """Return the folder of the key; raises NotCached if it is missing and `only_cached` is set."""
        if self.only_cached and not is_sound(self.cache, key):
            raise NotCached
        return make_cached_folder(self.cache, key, make, lambda remark: self.progress(remark, 0, 0), whole=self.verify)


def hash_key(words: Any) -> str:
    """Return a hash of JSON values."""
    return blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()


def key_number(key: str) -> int:
    """Return a key as an integer below 2**60."""
    return int(key[:15], 16)


def read_text(reader: SourceReader, files: list[DataFile], by: Tokenizer) -> SourceTokens:
    """Return text files, tokenized; raises Unreadable."""
    key = hash_key([_FORMAT, "text", _content_hashes(files, reader), by.identity, by.end, reader.data.text_key])
    folder = reader.keep(key, lambda into: _tokenize(reader, files, by, reader.data.text_key, into))
    tokens = _map_tokens(folder, [np.memmap(folder / "tokens", by.dtype, "r")])
    _check_text_ids(tokens, reader, by)
    held = validation_ranges(key_number(key), tokens.bounds, reader.data.validation)
    return SourceTokens(key, tokens, held, len(tokens.bounds) - 1, False, sum(file.size for file in files))


def read_pairs(reader: SourceReader, files: list[DataFile], by: Tokenizer) -> SourceTokens:
    """Return files of prompts and completions, tokenized: each prompt with its completion is a document, and of preferences two of them
    belong together; raises Unreadable."""
    keys, template = keys_of(reader.data), load_chat_template(reader.data.tokenizer)
    rendering, group = template.identity if template else None, 2 if reader.data.has_preferences else 1
    key = hash_key([_FORMAT, reader.data.name, _content_hashes(files, reader), by.identity, by.end, keys, rendering])
    folder = reader.keep(key, lambda into: _tokenize(reader, files, by, keys, into))
    text = _map_tokens(folder, [np.memmap(folder / "tokens", by.dtype, "r")])
    turns = folder / "turns"
    tokens = MappedExamples(
        files=text.files,
        starts=text.starts,
        bounds=text.bounds,
        counts=text.counts,
        completions=np.memmap(folder / "completions", np.int64, "r"),
        group=group,
        turns=np.memmap(turns, np.int64, "r").reshape(2, -1) if turns.exists() else None,
        empty=int(np.fromfile(folder / "empty", np.int64)[0]) if group == 1 else 0,
    )
    _check_text_ids(tokens, reader, by)
    held = validation_ranges(key_number(key), tokens.bounds[::group], reader.data.validation, whole=True)
    return SourceTokens(key, tokens, held, tokens.examples, False, sum(file.size for file in files))


def _check_text_ids(tokens: MappedTokens, reader: SourceReader, by: Tokenizer) -> None:
    """Raise Unreadable if text has an id that is not below model.vocab."""
    if len(tokens.counts) > reader.vocab:
        raise data_error(f"the text has token {len(tokens.counts) - 1}, and model.vocab={reader.vocab}", f"set model.vocab={by.size}")


def read_token_ids(reader: SourceReader, read: list[TokenFile]) -> SourceTokens:
    """Return files of token ids as they are; raises Unreadable."""
    files, end = [each.file for each in read], reader.data.end
    pairs = [file for each in files for file in (each, *companion_files(each))]
    key = hash_key([_FORMAT, "tokens", _content_hashes(pairs, reader), end, [each.dtype.str for each in read]])
    counter = _progress_counter(reader, "count", files)
    folder = reader.keep(key, lambda into: _write_index(into, *scan_token_files(read, end, reader.vocab, counter)))
    tokens = _map_tokens(folder, [each.memory_map() for each in read])
    if len(tokens.counts) > reader.vocab:
        check_vocabulary(read, reader.vocab)
    unbounded = next((each.file.path for each in read if each.bounds is None), None)
    if unbounded and end is not None and not tokens.counts[end : end + 1].any():
        _report_missing_end(reader, unbounded)
    documents = None if unbounded and end is None else len(tokens.bounds) - 1
    apart = _named_validation_ranges(read, tokens)
    held = validation_ranges(key_number(key), tokens.bounds, reader.data.validation) if apart is None else apart
    return SourceTokens(key, tokens, held, documents, apart is not None, sum(file.size for file in files))


def _report_missing_end(reader: SourceReader, path: Path) -> None:
    """Remark that no document ends; raises Unreadable if documents are to be kept apart."""
    says = f"data.end={reader.data.end} occurs nowhere in {path}" + ("" if isinstance(reader.data.path, str) else " or its other files")
    if reader.data.documents:
        raise data_error(f"data.documents=true, but {says}", "set data.end to the token id that ends a document (GPT-2: 50256)")
    reader.progress(f"{says}: all text counts as one document", 0, 0)


def _tokenize(reader: SourceReader, files: list[DataFile], by: Tokenizer, keys: str | Keys, into: Path) -> None:
    """Write tokens, counts, bounds, and of examples completions, turns and how many completions are empty into a folder; raises
    Unreadable."""
    turns, report = split_turns(files), _progress_counter(reader, "tokenize", files)
    alone = sum(file.size for file in files) <= _ONE_PROCESS[not isinstance(by, ByteTokenizer)]
    settings = (reader.data.tokenizer, reader.data.end, keys)
    counts, bounds, written = np.zeros(by.size, np.int64), [np.zeros(1, np.int64)], 0
    completions, marked, empty = list[Any](), list[Any](), 0
    processes = 1 if alone else min(len(turns), cpu_count())
    with open(into / "tokens", "wb") as out, closing(tokenize_turns(turns, into, settings, processes)) as parts:
        for spans, part in zip(turns, parts, strict=True):
            raw = _read_and_remove(f"{part}.tokens")
            out.write(raw)
            ids = np.frombuffer(raw, by.dtype)
            counts += np.bincount(ids, minlength=by.size)
            bounds.append(written + np.frombuffer(_read_and_remove(f"{part}.ends"), np.int64))
            if not isinstance(keys, str):
                completions.append(written + np.frombuffer(_read_and_remove(f"{part}.completions"), np.int64))
                marked.append(written + np.frombuffer(_read_and_remove(f"{part}.turns"), np.int64).reshape(-1, 2))
                empty += int(np.frombuffer(_read_and_remove(f"{part}.empty"), np.int64)[0])
            written += len(ids)
            report(sum(span.end - span.begin for span in spans))
    if not written:
        raise data_error(f"{files[0].path} has no text" + (f", nor do the {len(files) - 1} files after it" if files[1:] else ""))
    _write_index(into, counts, np.concatenate(bounds))
    if completions:
        np.concatenate(completions).tofile(into / "completions")
        np.array([empty]).tofile(into / "empty")
        _write_turns(into, np.concatenate(marked), np.concatenate(completions), np.concatenate(bounds)[1:])


def _write_turns(into: Path, turns: Any, completions: Any, ends: Any) -> None:
    """Write turns [2, n] into a folder, unless each is a completion that ends with its document."""
    if not (np.array_equal(turns[:, 0], completions) and np.array_equal(turns[:, 1], ends)):
        np.ascontiguousarray(turns.T).tofile(into / "turns")


def _read_and_remove(path: str) -> bytes:
    """Return the contents of a file and remove it."""
    contents = Path(path).read_bytes()
    os.unlink(path)
    return contents


def validation_flags(files: Sequence[TokenFile]) -> list[bool] | None:
    """Return whether each file is named for validation, like nanoGPT's val.bin; None if all are or none is."""
    named = [bool(HELD_OUT & set(re.split(r"[^a-z]+", Path(each.file.name).stem.lower()))) for each in files]
    return None if all(named) or not any(named) else named


def _named_validation_ranges(files: Sequence[TokenFile], tokens: MappedTokens) -> TokenRanges | None:
    """Return the files that are named for validation; None if all are or none is."""
    named = validation_flags(files)
    return None if named is None else merge_ranges(tokens.starts[:-1][named], tokens.starts[1:][named])


def _map_tokens(folder: Path, files: list[Any]) -> MappedTokens:
    return MappedTokens(
        files=tuple(files),
        starts=np.cumsum([0, *map(len, files)]),
        bounds=np.memmap(folder / "bounds", np.int64, "r"),
        counts=np.fromfile(folder / "counts", np.int64),
    )


def _write_index(into: Path, counts: Any, bounds: Any) -> None:
    np.trim_zeros(counts, "b").tofile(into / "counts")
    bounds.tofile(into / "bounds")


def _content_hashes(files: list[DataFile], reader: SourceReader) -> list[tuple[str, int, str]]:
    """Return (name, bytes, hash) of each file; raises NotCached if `only_cached` is set and it would take long."""
    report = _progress_counter(reader, "hash", files)
    hashes = file_hashes([file.path for file in files], reader.cache, report, only_quick=reader.only_cached)
    return [(file.name, file.size, found) for file, found in zip(files, hashes, strict=True)]


def _progress_counter(reader: SourceReader, what: str, files: list[DataFile]) -> Callable[[int], None]:
    """Return a function that adds a number of bytes to the reported progress."""
    done, size = 0, sum(file.size for file in files)

    def report(more: int) -> None:
        nonlocal done
        done = min(done + more, size)
        reader.progress(what, done, size)

    return report
