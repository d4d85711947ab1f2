"""Recognises file formats by name suffix and first bytes, and says how to fix files that can't be read."""

from __future__ import annotations

import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from ....spec.problem import Problem
from .compressed import COMPRESSIONS, Compression, decompress_start
from .data_error import data_problem
from .find import DataFile

TextForm = Literal["text", "lines", "parquet", "arrow"]  # one document, one JSON object a line, tables
FileUse = Literal["text", "tokens"]

FIRST_BYTES = 1 << 16  # bytes read from the start of a file
TEXT_BYTES = 512  # bytes: if a file starts with this much text, it is not token ids

TEXT_FORMS: dict[str, TextForm] = {
    ".txt": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
CSV = (".csv", ".tsv")
IDS_SUFFIXES = (".bin", ".ds")  # of files that are rarely text
JSON_AS_TEXT = {  # what a file named as text may hold, and how to read its texts
    "JSON lines": "rename it to .jsonl to read the text of each line",
    "a JSON array": "jq -c '.[]' FILE > FILE.jsonl makes lines whose texts can be read",
}
OFFICE = (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub")

WRITE_JSONL = 'write its text as .jsonl, {"text": "..."} a line'
WRITE_PAIRS = 'write an object a line, {"prompt": "...", "completion": "..."} or {"messages": [...]}, as .jsonl'
WRITE_PREFERENCES = 'write an object a line, {"prompt": "...", "chosen": "...", "rejected": "..."}, as .jsonl'
WRITE_NUMPY = "write the ids with numpy.save, as .npy"
READ_AS_TEXT = "data=text reads it"
LEAVE_OUT = "leave it out of data.path"
UNPACK = "unpack it and name its contents"

# fmt: off
MAGIC: tuple[tuple[int, bytes, str, str, str], ...] = (  # offset, bytes, what it is, fix for data=text, fix for data=tokens
    (0,   b"PAR1",                           "a parquet file",             "end its name in .parquet",   READ_AS_TEXT),
    (0,   b"ARROW1\0\0",                     "an Arrow file",              "end its name in .arrow",     READ_AS_TEXT),
    (0,   b"FEA1",                           "a Feather file",             WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"ORC",                            "an ORC file",                WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"Obj\x01",                        "an Avro file",               WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"\x93NUMPY",                      "a NumPy array",              "data=tokens reads it",       ""),
    (0,   b"MMIDIDX\0\0",                    "a Megatron index",     "data=tokens reads it",       "name its .bin"),
    (0,   b"\x28\xb5\x2f\xfd",               "a zstd file",                "end its name in .zst",       UNPACK),
    (0,   b"\xfd7zXZ\0",                     "an xz file",                 "unpack it: xz -d FILE",      "unpack it: xz -d FILE"),
    (0,   b"\x04\x22\x4d\x18",               "an lz4 file",                "unpack it: lz4 -d FILE",     "unpack it: lz4 -d FILE"),
    (4,   b"1AY&SY",                         "a bzip2 file",               "unpack it: bunzip2 FILE",    "unpack it: bunzip2 FILE"),
    (0,   b"PK\x03\x04",                     "a zip file",                 UNPACK,                       UNPACK),
    (0,   b"PK\x05\x06",                     "a zip file",                 UNPACK,                       UNPACK),
    (0,   b"7z\xbc\xaf\x27\x1c",             "a 7z file",                  UNPACK,                       UNPACK),
    (0,   b"Rar!\x1a\x07",                   "a rar file",                 UNPACK,                       UNPACK),
    (257, b"ustar",                          "a tar file",                 UNPACK,                       UNPACK),
    (0,   b"\x80\x02\x8a\nl\xfc\x9cF\xf9",   "a file of torch.save",       WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"\x89HDF\r\n\x1a\n",              "an HDF5 file",               WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"SQLite format 3\0",              "an SQLite database",         WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"%PDF-",                          "a PDF file",                 WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"{\\rtf",                         "an RTF file",                WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office file",           WRITE_JSONL,                        WRITE_NUMPY),
    (0,   b"\x89PNG\r\n\x1a\n",              "an image",                   LEAVE_OUT,                      LEAVE_OUT),
    (0,   b"\xff\xd8\xff",                   "an image",                   LEAVE_OUT,                      LEAVE_OUT),
    (0,   b"GIF8",                           "an image",                   LEAVE_OUT,                      LEAVE_OUT),
    (0,   b"II*\0",                          "an image",                   LEAVE_OUT,                      LEAVE_OUT),
    (0,   b"MM\0*",                          "an image",                   LEAVE_OUT,                      LEAVE_OUT),
    (8,   b"WEBPVP8",                        "an image",                   LEAVE_OUT,                      LEAVE_OUT),
    (8,   b"WAVEfmt",                        "a sound file",                    LEAVE_OUT,                      LEAVE_OUT),
    (4,   b"ftyp",                           "a video",                     LEAVE_OUT,                      LEAVE_OUT),
    (0,   b"\x7fELF",                        "a program",                  LEAVE_OUT,                      LEAVE_OUT),
    (0,   b"GGUF",                           "a GGUF model",               LEAVE_OUT,                      LEAVE_OUT),
    (0,   b"version https://git-lfs.github", "a pointer of Git LFS",       "git lfs pull fetches it",    "git lfs pull fetches it"),
)
# fmt: on
_NOT_AT_START = [row for row in MAGIC if row[0]]
_BY_FIRST_BYTE = {row[1][:1]: [*(each for each in MAGIC if not each[0] and each[1][:1] == row[1][:1]), *_NOT_AT_START] for row in MAGIC}
TEXT_MAGIC = (b"%PDF-", b"{\\rtf", b"version https://git-lfs.github")  # magic bytes of files that are otherwise text


class UnreadableFile(NamedTuple):
    """What a file is that can't be read, and the fix."""

    what: str
    mend: str


class FirstBytes(NamedTuple):
    """A file with its first and last bytes."""

    file: DataFile
    start: bytes
    end: bytes


def text_form(name: str) -> tuple[TextForm, Compression]:
    """Return how a text file is read, by its name's suffix; one without a known suffix is one document."""
    name = name.lower()
    compression: Compression = next((each for each in COMPRESSIONS if name.endswith(each)), "")
    return TEXT_FORMS.get(PurePath(name.removesuffix(compression)).suffix, "text"), compression


def text_suffixes() -> tuple[str, ...]:
    """Return the name suffixes of the text files of a folder."""
    alone = tuple(TEXT_FORMS)
    return alone + tuple(f"{each}{compression}" for each in alone if TEXT_FORMS[each] in ("text", "lines") for compression in COMPRESSIONS)


def line_suffixes() -> tuple[str, ...]:
    """Return the name suffixes of files that hold a JSON object a line."""
    return tuple(suffix for suffix in text_suffixes() if text_form(f"a{suffix}")[0] == "lines")


def unreadable_files(files: Iterable[DataFile], wanted: FileUse) -> list[Problem]:
    """Return one problem for each kind of unreadable file."""
    found: dict[UnreadableFile, list[DataFile]] = {}
    for file in files:
        if fault := check_file(file, wanted):
            found.setdefault(fault, []).append(file)
    return [file_problem(fault, files) for fault, files in found.items()]


def check_file(file: DataFile, wanted: FileUse) -> UnreadableFile | None:
    """Return why one file can't be read; None if it can."""
    try:
        head = read_first_bytes(file)
    except OSError as error:
        return UnreadableFile(f"unreadable: {error.strerror}", "")
    return _check_text(head) if wanted == "text" else check_token_bytes(head)


def read_first_bytes(file: DataFile) -> FirstBytes:
    """Read a file's first and last bytes; raises OSError."""
    with open(file.path, "rb") as opened:
        start = opened.read(FIRST_BYTES)
        opened.seek(max(0, file.size - 16))
        return FirstBytes(file, start, opened.read(16))


def check_token_bytes(head: FirstBytes) -> UnreadableFile | None:
    """Return what a file without a known header is if it can't be raw token ids; None otherwise."""
    if head.file.path.suffix.lower() == ".npz":
        return UnreadableFile("NumPy's .npz", "save each array alone: numpy.save, as .npy")
    if kind := _known_kind(head):
        return UnreadableFile(kind[0], kind[2])
    start = head.start[:TEXT_BYTES]
    if len(start) >= 16 and _is_text(start):
        return UnreadableFile("text", READ_AS_TEXT)
    return None


def _check_text(head: FirstBytes) -> UnreadableFile | None:
    rows, compression = text_form(head.file.path.name)
    stem = head.file.path.name.lower().removesuffix(compression)
    kind = _known_kind(head)
    if stem.endswith(CSV):
        return UnreadableFile("a table", 'write its text as .jsonl, {"text": "..."} a line, or rename it .txt to train on it as it is')
    if rows in ("parquet", "arrow"):
        if compression:
            return UnreadableFile("packed", UNPACK)
        return _check_table(head, kind, ("a parquet file",) if rows == "parquet" else ("an Arrow file", "an Arrow stream"))
    if compression:
        right_kind = {".gz": "a gzip file", ".zst": "a zstd file"}[compression]
        if not kind or kind[0] != right_kind:
            return UnreadableFile(
                kind[0] if kind else f"no {compression} file", kind[1] if kind else f"end its name in {PurePath(stem).suffix or '.txt'}"
            )
        inner = head._replace(start=decompress_start(head.start, compression, FIRST_BYTES), end=b"")
        return _check_rows(inner, _known_kind(inner), rows) if inner.start else None
    return _check_rows(head, kind, rows)


def _check_table(head: FirstBytes, kind: tuple[str, str, str] | None, right: tuple[str, ...]) -> UnreadableFile | None:
    """Return what a file is that is named as a table and is not one."""
    if not kind or kind[0] not in right:
        return UnreadableFile(kind[0], kind[1]) if kind else UnreadableFile(f"no {text_form(head.file.path.name)[0]} file", "")
    closing = {"a parquet file": b"PAR1", "an Arrow file": b"ARROW1", "an Arrow stream": b"\xff\xff\xff\xff\0\0\0\0"}[kind[0]]
    return None if head.end.endswith(closing) else UnreadableFile(f"{kind[0]} that is truncated", "write or download it again")


def _check_rows(head: FirstBytes, kind: tuple[str, str, str] | None, rows: TextForm) -> UnreadableFile | None:
    """Return why text, compressed or not, can't be read in its form."""
    start = head.start
    if kind:
        return UnreadableFile(kind[0], kind[1])
    zeros = b"\0" in start
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or (zeros and _is_two_bytes_a_letter(start)):
        if head.file.path.suffix.lower() in IDS_SUFFIXES:
            return UnreadableFile("binary, not text", "data=tokens reads files of token ids")
        return UnreadableFile("UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW")
    if zeros:
        return UnreadableFile("binary, not text", "data=tokens reads files of token ids")
    return _check_json(head, start.removeprefix(BOM_UTF8).lstrip()) if rows == "lines" else None


def _check_json(head: FirstBytes, start: bytes) -> UnreadableFile | None:
    """Return why JSON is not one object a line."""
    if start.startswith(b"["):
        return UnreadableFile("a JSON array", "write an object a line: jq -c '.[]' FILE > FILE.jsonl")
    line, newline, _ = start.partition(b"\n")
    if start.startswith(b"{") and newline and ".json" in head.file.path.suffixes:
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return UnreadableFile("one JSON document on many lines", "write an object a line: jq -c . FILE > FILE.jsonl")
    return None


def _known_kind(head: FirstBytes) -> tuple[str, str, str] | None:
    """Return (what a file is, fix for data=text, fix for data=tokens) if its format is recognised."""
    start, suffix = head.start, head.file.path.suffix.lower()
    for at, magic, what, text, tokens in _BY_FIRST_BYTE.get(start[:1], _NOT_AT_START):
        if start.startswith(magic, at) and (magic in TEXT_MAGIC or not _is_text(start[:TEXT_BYTES])):
            if what == "a zip file" and suffix in OFFICE:
                return "an Office file", WRITE_JSONL, WRITE_NUMPY
            return what, text, tokens
    if _is_gzip(start):
        return "a gzip file", "end its name in .gz", "unpack it: gunzip FILE"
    if _is_arrow_stream(head):
        return "an Arrow stream", "end its name in .arrow", READ_AS_TEXT
    if _is_pickle(head):
        return "a pickle", WRITE_JSONL, WRITE_NUMPY
    if _is_safetensors(head):
        return "a safetensors file", LEAVE_OUT, WRITE_NUMPY
    if _is_mds(head):
        return "a MosaicML shard", WRITE_JSONL, WRITE_NUMPY
    return None


def _is_gzip(start: bytes) -> bool:
    if not start.startswith(b"\x1f\x8b\x08"):
        return False
    with suppress(zlib.error):
        zlib.decompressobj(31).decompress(start, FIRST_BYTES)
        return True
    return False


def _is_arrow_stream(head: FirstBytes) -> bool:
    """Look for the continuation mark and a schema length, a multiple of 8 (Arrow columnar format, IPC messages)."""
    if len(head.start) < 8 or not head.start.startswith(b"\xff\xff\xff\xff"):
        return False
    length = int.from_bytes(head.start[4:8], "little", signed=True)
    return 0 < length < head.file.size and length % 8 == 0


def _is_pickle(head: FirstBytes) -> bool:
    """Look for protocols 2 to 5: they begin with 0x80 and their number, 4 and 5 continue with a frame, and all end with a full stop."""
    start = head.start[:3]
    if len(start) < 3 or start[0] != 0x80 or not head.end.endswith(b"."):
        return False
    return start[2] == 0x95 if start[1] in (4, 5) else start[1] in (2, 3) and start[2] in b"}](c"


def _is_safetensors(head: FirstBytes) -> bool:
    """Look for the uint64 length of a JSON object and that object."""
    if len(head.start) < 16:
        return False
    length = int.from_bytes(head.start[:8], "little")
    return 2 <= length <= head.file.size - 8 and head.start[8:10] in (b'{"', b"{}")


def _is_mds(head: FirstBytes) -> bool:
    """Look for uint32 samples n, uint32 offsets [n + 1], the last of them the file's size, and a JSON object."""
    if len(head.start) < 12:
        return False
    samples = int.from_bytes(head.start[:4], "little")
    after = 4 * (samples + 2)
    if samples == 0 or after >= head.file.size:
        return False
    try:
        with open(head.file.path, "rb") as file:
            file.seek(after - 4)
            last = file.read(5)
    except OSError:
        return False
    return len(last) == 5 and int.from_bytes(last[:4], "little") == head.file.size and last[4:] == b"{"


def _is_text(start: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters; the last character may be cut."""
    try:
        text = start.decode()
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:
            return False
        text = start[: error.start].decode()
    return all(letter.isprintable() or letter in "\t\n\r\f\ufeff" for letter in text)


def _is_two_bytes_a_letter(start: bytes) -> bool:
    """Return whether the bytes at even or at odd places are mostly zero and the others rarely."""
    pairs = len(start) // 2
    few, many = sorted((start[::2].count(0), start[1::2].count(0)))
    return pairs >= 8 and many > 0.4 * pairs and few < 0.04 * pairs


def json_in_text(file: DataFile) -> str:
    """Return which key of JSON_AS_TEXT an uncompressed text file holds; "" if none."""
    if text_form(file.path.name) != ("text", ""):
        return ""
    try:
        start = read_first_bytes(file).start.removeprefix(BOM_UTF8).lstrip()
    except OSError:
        return ""
    if re.match(rb'\[\s*\{\s*"', start):
        return "a JSON array"
    whole = [line for line in start.split(b"\n")[:3] if line.strip()]
    return "JSON lines" if len(whole) > 1 and all(map(_is_json_object, whole[:2])) else ""


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def holds_json_lines(path: Path, key: str) -> bool:
    """Return whether the first line of a file is a JSON object with the key; raises OSError."""
    with open(path, "rb") as file:
        line = file.read(FIRST_BYTES).removeprefix(BOM_UTF8).lstrip().partition(b"\n")[0]
    try:
        return key in json.loads(line) and line.startswith(b"{")
    except (ValueError, TypeError, RecursionError):
        return line.startswith(b"{") and len(line) > FIRST_BYTES // 2  # an object that is longer than the bytes read


def file_problem(fault: UnreadableFile, files: Sequence[DataFile], *, verb: str = "is ") -> Problem:
    """Return the problem of files that are unreadable for the same reason."""
    more = f" (and {len(files) - 1:,} more)" if files[1:] else ""
    return data_problem(f"{files[0].path} {verb}{fault.what}{more}", fault.mend)
