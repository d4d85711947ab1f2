"""A share of some text files becomes token ids on disk: what one process does at a time."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from . import columnar
from .compressed import DamagedFile, open_packed
from .find import File
from .formats import form
from .tokenizer import Tokenizer

SHARE = 8 << 20  # bytes of text that one process takes at a time
_NEAR = 1 << 20  # bytes in which a line end is looked for


class Span(NamedTuple):
    """Bytes begin .. end of a file, shifted to line starts; `last`: its documents end with it."""

    path: str
    begin: int
    end: int
    last: bool


class Unfit(Exception):
    """A place in a file that cannot be read, and why, as a sentence."""


def shares(files: Sequence[File]) -> list[list[Span]]:
    """The files in order, small ones together and large ones cut: a list of spans for each turn of a process."""
    turns: list[list[Span]] = [[]]
    room = SHARE
    for file in files:
        step = file.size if form(file.path.name)[1] else SHARE
        for begin in range(0, file.size, step):
            end = min(begin + step, file.size)
            if turns[-1] and end - begin > room:
                turns.append([])
                room = SHARE
            turns[-1].append(Span(str(file.path), begin, end, end == file.size))
            room -= end - begin
    return turns


def tokenize(spans: Sequence[Span], into: Path, tokenizer: Tokenizer, key: str) -> None:
    """Write `into`.tokens, ids in the tokenizer's type, and `into`.ends, int64: how many of them stand before each end of a
    document; raises Unfit."""
    ends: list[int] = []
    written = 0
    closing = np.array([] if tokenizer.end is None else [tokenizer.end], tokenizer.dtype)
    with open(f"{into}.tokens", "wb") as out:
        for span in spans:
            for text, whole in _texts(span, key):
                ids = encode(text, span.path, tokenizer)
                written += len(ids)
                out.write(ids.tobytes())
                if whole:
                    out.write(closing.tobytes())
                    written += len(closing)
                    ends.append(written)
    Path(f"{into}.ends").write_bytes(np.array(ends, np.int64).tobytes())


def encode(text: bytes, path: str, tokenizer: Tokenizer) -> np.ndarray[Any, Any]:
    """Ids [n] of a text of a file; raises Unfit."""
    try:
        return tokenizer.encode(text)
    except UnicodeDecodeError as error:
        raise Unfit(f"{path} is not UTF-8 text: {error.reason} in {text[error.start : error.start + 8]!r}") from None


def _texts(span: Span, key: str) -> Iterator[tuple[bytes, bool]]:
    """(text, whether a document ends with it) for all of a span."""
    rows, packing = form(span.path)
    try:
        if rows == "parquet" or rows == "arrow":
            for text in columnar.texts(span.path, rows, key, span.begin, span.end):
                yield text, True
        elif packing:
            with open_packed(span.path, packing) as file:
                yield from objects(file, 0, None, span.path, key) if rows == "lines" else _blocks(file, span.path)
        else:
            yield from _plain(span, key, lined=rows == "lines")
    except columnar.UnreadableTable as error:
        raise Unfit(f"{span.path} {error}") from None
    except OSError as error:
        raise Unfit(f"{span.path}: {error.strerror or error}") from None


def _plain(span: Span, key: str, *, lined: bool) -> Iterator[tuple[bytes, bool]]:
    """What a span of a file that is not packed holds."""
    with open(span.path, "rb") as file:
        begin, end = line_start(file, span.begin), line_start(file, span.end)
        file.seek(begin)
        if lined:
            yield from objects(file, begin, end, span.path, key)
        else:
            text = file.read(end - begin)
            _check_zeros(text, span.path, begin)
            yield text if begin else text.removeprefix(BOM_UTF8), span.last


def line_start(file: IO[bytes], at: int) -> int:
    """The first line start at or after a byte; where none is near, the first byte of a character."""
    if not at:
        return 0
    file.seek(at - 1)
    near = file.read(_NEAR)
    line = near.find(b"\n") + 1
    if line or len(near) < _NEAR:
        return at - 1 + (line or len(near))
    return at + next((step for step in range(4) if near[1 + step] & 0xC0 != 0x80), 0)


def _blocks(file: IO[bytes], path: str) -> Iterator[tuple[bytes, bool]]:
    """One packed document, in blocks that end with a line."""
    rest, read = b"", 0
    try:
        while block := file.read(SHARE):
            _check_zeros(block, path, read)
            block = block if read else block.removeprefix(BOM_UTF8)
            read += len(block)
            whole, newline, tail = (rest + block).rpartition(b"\n")
            yield whole + newline, False
            rest = tail
    except DamagedFile as error:
        raise Unfit(f"{path} cannot be unpacked: {error}") from None
    yield rest, True


def _check_zeros(text: bytes, path: str, begin: int) -> None:
    """Raises Unfit at a byte that no text holds, and that ends documents of bytes."""
    at = text.find(b"\0")
    if at >= 0:
        raise Unfit(f"{path} is no text: byte {begin + at} is zero: tr -d '\\0' < FILE > NEW takes such bytes out")


def objects(file: IO[bytes], begin: int, end: int | None, path: str, key: str) -> Iterator[tuple[bytes, bool]]:
    """The texts of the lines of JSON that start in bytes begin .. end, each a document; blank lines and empty texts are none."""
    line = msgspec.defstruct("Line", [("text", str, msgspec.field(name=key))])
    read: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode
    number, at = 0, begin
    try:
        for raw in file:
            number += 1
            if end is not None and at >= end:
                return
            words = raw if at else raw.removeprefix(BOM_UTF8)
            at += len(raw)
            if words.strip() and (text := read(words).text):
                yield text.encode(), True
    except (msgspec.DecodeError, UnicodeError):
        raise Unfit(f"{path} line {_lines(path, begin) + number} {_reason(words, key)}") from None
    except DamagedFile as error:
        raise Unfit(f"{path} line {number + 1} cannot be unpacked: {error}") from None


def _lines(path: str, before: int) -> int:
    """How many lines end before a byte of a plain file."""
    with open(path, "rb") as file:
        return sum(file.read(min(SHARE, before - at)).count(b"\n") for at in range(0, before, SHARE))


def _reason(raw: bytes, key: str) -> str:
    try:
        found = json.loads(raw.strip())
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    if not isinstance(found, dict):
        return "is not a JSON object"
    if key not in found:
        return f"has no key {key}: set data.text_key to one of {', '.join(map(str, found))}"
    if not isinstance(found[key], str):
        return f"has no text under {key} but {json.dumps(found[key])[:40]}"
    return "holds half of a character (a lone surrogate)"
