"""Tokenizes text files onto disk in turns of about 8 MiB: small files together, large ones cut."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from ..files import columnar
from ..files.compressed import DamagedArchive, open_compressed
from ..files.find import DataFile
from ..files.formats import text_form
from .tokenizer import Tokenizer

SHARE = 8 << 20  # bytes of text in a turn
_NEAR = 1 << 20  # bytes in which to look for a line end


class Span(NamedTuple):
    """Bytes begin .. end of a file, moved to line starts; `last`: the file ends here."""

    path: str
    begin: int
    end: int
    last: bool


class BadText(Exception):
    """Text that cannot be read: the place and the reason, as a sentence."""


def split_turns(files: Sequence[DataFile]) -> list[list[Span]]:
    """Return a list of spans for each turn: the files in order, small ones together, large ones cut."""
    turns: list[list[Span]] = [[]]
    room = SHARE
    for file in files:
        step = file.size if text_form(file.path.name)[1] else SHARE
        for begin in range(0, file.size, step):
            end = min(begin + step, file.size)
            if turns[-1] and end - begin > room:
                turns.append([])
                room = SHARE
            turns[-1].append(Span(str(file.path), begin, end, end == file.size))
            room -= end - begin
    return turns


def tokenize(spans: Sequence[Span], into: Path, tokenizer: Tokenizer, key: str) -> None:
    """Write `into`.tokens, ids in the tokenizer's type, and `into`.ends, the number of ids before each document end (int64).

    Raises BadText.
    """
    ends: list[int] = []
    written = 0
    closing = np.array([] if tokenizer.end is None else [tokenizer.end], tokenizer.dtype)
    with open(f"{into}.tokens", "wb") as out:
        for span in spans:
            for text, whole in _texts(span, key):
                ids = encode_text(text, span.path, tokenizer)
                written += len(ids)
                out.write(ids.tobytes())
                if whole:
                    out.write(closing.tobytes())
                    written += len(closing)
                    ends.append(written)
    Path(f"{into}.ends").write_bytes(np.array(ends, np.int64).tobytes())


def encode_text(text: bytes, path: str, tokenizer: Tokenizer) -> np.ndarray[Any, Any]:
    """Return the ids [n] of a text; raises BadText."""
    try:
        return tokenizer.encode(text)
    except UnicodeDecodeError as error:
        raise BadText(f"{path} is not UTF-8 text: {error.reason} in {text[error.start : error.start + 8]!r}") from None


def _texts(span: Span, key: str) -> Iterator[tuple[bytes, bool]]:
    """Yield (text, whether a document ends with it) for a span."""
    rows, compression = text_form(span.path)
    try:
        if rows == "parquet" or rows == "arrow":
            for text in columnar.read_texts(span.path, rows, key, span.begin, span.end):
                yield text, True
        elif compression:
            with open_compressed(span.path, compression) as file:
                yield from json_texts(file, 0, None, span.path, key) if rows == "lines" else _compressed_texts(file, span.path)
        else:
            yield from _plain_texts(span, key, lined=rows == "lines")
    except columnar.UnreadableTable as error:
        raise BadText(f"{span.path} {error}") from None
    except OSError as error:
        raise BadText(f"{span.path}: {error.strerror or error}") from None


def _plain_texts(span: Span, key: str, *, lined: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield (text, whether a document ends with it) for a span of an uncompressed file."""
    with open(span.path, "rb") as file:
        begin, end = line_start(file, span.begin), line_start(file, span.end)
        file.seek(begin)
        if lined:
            yield from json_texts(file, begin, end, span.path, key)
        else:
            text = file.read(end - begin)
            _check_zeros(text, span.path, begin)
            yield text if begin else text.removeprefix(BOM_UTF8), span.last


def line_start(file: IO[bytes], at: int) -> int:
    """Return the first line start at or after a byte; if none is near, the first byte of a character."""
    if not at:
        return 0
    file.seek(at - 1)
    near = file.read(_NEAR)
    line = near.find(b"\n") + 1
    if line or len(near) < _NEAR:
        return at - 1 + (line or len(near))
    return at + next((step for step in range(4) if near[1 + step] & 0xC0 != 0x80), 0)


def _compressed_texts(file: IO[bytes], path: str) -> Iterator[tuple[bytes, bool]]:
    """Yield a compressed document in blocks that end with a line."""
    rest, read = b"", 0
    try:
        while block := file.read(SHARE):
            _check_zeros(block, path, read)
            block = block if read else block.removeprefix(BOM_UTF8)
            read += len(block)
            whole, newline, tail = (rest + block).rpartition(b"\n")
            yield whole + newline, False
            rest = tail
    except DamagedArchive as error:
        raise BadText(f"{path} cannot be decompressed: {error}") from None
    yield rest, True


def _check_zeros(text: bytes, path: str, begin: int) -> None:
    """Raise BadText at a zero byte: text contains none, and the byte tokenizer ends documents with it."""
    at = text.find(b"\0")
    if at >= 0:
        raise BadText(f"{path} is not text: byte {begin + at} is zero: tr -d '\\0' < FILE > NEW removes such bytes")


def json_texts(file: IO[bytes], begin: int, end: int | None, path: str, key: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of each JSON line that starts in bytes begin .. end, each a document; skip blank lines and empty texts."""
    line = msgspec.defstruct("Line", [("text", str, msgspec.field(name=key))])
    read: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode
    number, at = 0, begin
    try:
        for raw in file:
            number += 1
            if end is not None and at >= end:
                return
            line_bytes = raw if at else raw.removeprefix(BOM_UTF8)
            at += len(raw)
            if line_bytes.strip() and (text := read(line_bytes).text):
                yield text.encode(), True
    except (msgspec.DecodeError, UnicodeError):
        raise BadText(f"{path} line {_count_lines(path, begin) + number} {_json_reason(line_bytes, key)}") from None
    except DamagedArchive as error:
        raise BadText(f"{path} line {number + 1} cannot be decompressed: {error}") from None


def _count_lines(path: str, before: int) -> int:
    """Return the number of line ends before a byte of an uncompressed file."""
    with open(path, "rb") as file:
        return sum(file.read(min(SHARE, before - at)).count(b"\n") for at in range(0, before, SHARE))


def _json_reason(raw: bytes, key: str) -> str:
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
