"""Tokenizes text files onto disk in turns of about 8 MiB: small files together, large ones cut."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from ..files import columnar
from ..files.compressed import DamagedArchive, open_compressed
from ..files.find import DataFile
from ..files.formats import text_form
from .tokenizer import Tokenizer

Row = TypeVar("Row")

SHARE = 8 << 20  # bytes of text in a turn
HALF_CHARACTER = "holds half of a character (a lone surrogate)"
_NEAR = 1 << 20  # bytes in which to look for a line end


class Span(NamedTuple):
    """Bytes begin .. end of a file, moved to line starts; `last`: the file ends here."""

    path: str
    begin: int
    end: int
    last: bool


class BadText(Exception):
    """Text that cannot be read: the place and the reason, as a sentence."""


class BadLine(Exception):
    """A line that cannot be read: the reason, as the end of a sentence that begins with its place."""


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
        elif rows == "lines":
            for text in span_rows(span, text_reader(key)):
                if text:
                    yield text, True
        elif compression:
            with open_compressed(span.path, compression) as file:
                yield from _compressed_texts(file, span.path)
        else:
            yield _plain_text(span), span.last
    except columnar.UnreadableTable as error:
        raise BadText(f"{span.path} {error}") from None
    except OSError as error:
        raise BadText(f"{span.path}: {error.strerror or error}") from None


def _plain_text(span: Span) -> bytes:
    """Return the text of a span of an uncompressed file."""
    with open(span.path, "rb") as file:
        begin, end = line_start(file, span.begin), line_start(file, span.end)
        file.seek(begin)
        text = file.read(end - begin)
    _check_zeros(text, span.path, begin)
    return text if begin else text.removeprefix(BOM_UTF8)


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


def next_line(file: IO[bytes], at: int) -> int:
    """Return the first line start at or after a byte, however far; the end of the file where there is none."""
    if not at:
        return 0
    file.seek(at - 1)
    while (part := file.readline(_NEAR)) and not part.endswith(b"\n"):
        pass
    return file.tell()


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


def open_lines(path: str) -> AbstractContextManager[IO[bytes]]:
    """Open a file of lines, compressed or not; raises OSError."""
    compression = text_form(path)[1]
    return open_compressed(path, compression) if compression else open(path, "rb")


def span_rows(span: Span, read: Callable[[bytes], Row]) -> Iterator[Row]:
    """Yield what `read` returns for each line of a span of JSON lines, compressed or not; raises BadText, OSError."""
    if text_form(span.path)[1]:
        with open_lines(span.path) as file:
            yield from json_rows(file, 0, None, span.path, read)
        return
    with open_lines(span.path) as file:
        begin, end = next_line(file, span.begin), next_line(file, span.end)
        file.seek(begin)
        yield from json_rows(file, begin, end, span.path, read)


def json_rows(file: IO[bytes], begin: int, end: int | None, path: str, read: Callable[[bytes], Row]) -> Iterator[Row]:
    """Yield what `read` returns for each line that starts in bytes begin .. end and is not blank; raises BadText for BadLine."""
    number, at = 0, begin
    try:
        for raw in file:
            number += 1
            if end is not None and at >= end:
                return
            line = raw if at else raw.removeprefix(BOM_UTF8)
            at += len(raw)
            if line.strip():
                yield read(line)
    except BadLine as error:
        raise BadText(f"{path} line {_count_lines(path, begin) + number} {error}") from None
    except DamagedArchive as error:
        raise BadText(f"{path} line {number + 1} cannot be decompressed: {error}") from None


def _count_lines(path: str, before: int) -> int:
    """Return the number of line ends before a byte of an uncompressed file."""
    with open(path, "rb") as file:
        return sum(file.read(min(SHARE, before - at)).count(b"\n") for at in range(0, before, SHARE))


def text_reader(key: str) -> Callable[[bytes], bytes]:
    """Return a function that reads the text of a JSON line; it raises BadLine."""
    line = msgspec.defstruct("Line", [("text", str, msgspec.field(name=key))])
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode

    def read(raw: bytes) -> bytes:
        try:
            text: bytes = decode(raw).text.encode()
        except (msgspec.DecodeError, UnicodeError):
            raise BadLine(_text_fault(raw, key)) from None
        return text

    return read


def _text_fault(raw: bytes, key: str) -> str:
    found = json_object(raw)
    if not isinstance(value := keyed_value(found, key, "data.text_key"), str):
        return f"has no text under {key} but {json.dumps(value)[:40]}"
    return HALF_CHARACTER


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; raises BadLine."""
    try:
        found = json.loads(raw.strip())
    except json.JSONDecodeError as error:
        raise BadLine(f"is not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadLine("is not a JSON object")
    return found


def keyed_value(found: dict[str, Any], key: str, setting: str, others: Collection[str] = ()) -> Any:
    """Return the value of a key that a `data` key names; raises BadLine. `others`: keys of the line that other settings name."""
    if key not in found:
        free = [str(each) for each in found if each not in others]
        others_alone = f", and none but {', '.join(map(str, found))}" if found else ""
        raise BadLine(f"has no key {key}" + (f": set {setting} to one of {', '.join(free)}" if free else others_alone))
    return found[key]
