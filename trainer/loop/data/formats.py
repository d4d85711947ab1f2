"""What a file is, by the end of its name and its first bytes, and what to do about one that can't be read."""

from __future__ import annotations

import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from ...spec.problem import Problem
from .compressed import PACKED, Packing, unpack_start
from .data_error import wrong
from .find import File

Rows = Literal["text", "lines", "parquet", "arrow"]  # one document, JSON objects a line, tables
Wanted = Literal["text", "tokens"]

LOOKED_AT = 1 << 16  # bytes at the start of a file
PLAIN = 512  # bytes at the start of a file of tokens that are not text by chance

ROWS: dict[str, Rows] = {
    ".txt": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
CSV = (".csv", ".tsv")
IDS_SUFFIXES = (".bin", ".ds")  # of files that are hardly ever text
JSON_AS_TEXT = {  # what a file named as text may hold, and how its texts are read
    "JSON lines": "end its name in .jsonl to read the text of each line",
    "a JSON array": "jq -c '.[]' FILE > FILE.jsonl makes lines of it, of which the texts are read",
}
OFFICE = (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub")

JSONL = 'write its text as .jsonl, {"text": "..."} a line'
IDS = "write the ids with numpy.save, as .npy"
READ_AS_TEXT = "data=text reads it"
NO_DATA = "leave it out of data.path"
UNPACK = "unpack it, and name what was in it"

# fmt: off
MAGIC: tuple[tuple[int, bytes, str, str, str], ...] = (  # at byte, bytes, what it is, what to do where text is wanted, and where tokens are
    (0,   b"PAR1",                           "a parquet file",             "end its name in .parquet",   READ_AS_TEXT),
    (0,   b"ARROW1\0\0",                     "an Arrow file",              "end its name in .arrow",     READ_AS_TEXT),
    (0,   b"FEA1",                           "a Feather file",             JSONL,                        IDS),
    (0,   b"ORC",                            "an ORC file",                JSONL,                        IDS),
    (0,   b"Obj\x01",                        "an Avro file",               JSONL,                        IDS),
    (0,   b"\x93NUMPY",                      "a NumPy array",              "data=tokens reads it",       ""),
    (0,   b"MMIDIDX\0\0",                    "an index of Megatron's",     "data=tokens reads it",       "name its .bin"),
    (0,   b"\x28\xb5\x2f\xfd",               "a zstd file",                "end its name in .zst",       UNPACK),
    (0,   b"\xfd7zXZ\0",                     "an xz file",                 "unpack it: xz -d FILE",      "unpack it: xz -d FILE"),
    (0,   b"\x04\x22\x4d\x18",               "an lz4 file",                "unpack it: lz4 -d FILE",     "unpack it: lz4 -d FILE"),
    (4,   b"1AY&SY",                         "a bzip2 file",               "unpack it: bunzip2 FILE",    "unpack it: bunzip2 FILE"),
    (0,   b"PK\x03\x04",                     "a zip file",                 UNPACK,                       UNPACK),
    (0,   b"PK\x05\x06",                     "a zip file",                 UNPACK,                       UNPACK),
    (0,   b"7z\xbc\xaf\x27\x1c",             "a 7z file",                  UNPACK,                       UNPACK),
    (0,   b"Rar!\x1a\x07",                   "a rar file",                 UNPACK,                       UNPACK),
    (257, b"ustar",                          "a tar file",                 UNPACK,                       UNPACK),
    (0,   b"\x80\x02\x8a\nl\xfc\x9cF\xf9",   "a file of torch.save",       JSONL,                        IDS),
    (0,   b"\x89HDF\r\n\x1a\n",              "an HDF5 file",               JSONL,                        IDS),
    (0,   b"SQLite format 3\0",              "an SQLite database",         JSONL,                        IDS),
    (0,   b"%PDF-",                          "a PDF file",                 JSONL,                        IDS),
    (0,   b"{\\rtf",                         "an RTF file",                JSONL,                        IDS),
    (0,   b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office file",           JSONL,                        IDS),
    (0,   b"\x89PNG\r\n\x1a\n",              "an image",                   NO_DATA,                      NO_DATA),
    (0,   b"\xff\xd8\xff",                   "an image",                   NO_DATA,                      NO_DATA),
    (0,   b"GIF8",                           "an image",                   NO_DATA,                      NO_DATA),
    (0,   b"II*\0",                          "an image",                   NO_DATA,                      NO_DATA),
    (0,   b"MM\0*",                          "an image",                   NO_DATA,                      NO_DATA),
    (8,   b"WEBPVP8",                        "an image",                   NO_DATA,                      NO_DATA),
    (8,   b"WAVEfmt",                        "a sound",                    NO_DATA,                      NO_DATA),
    (4,   b"ftyp",                           "a film",                     NO_DATA,                      NO_DATA),
    (0,   b"\x7fELF",                        "a program",                  NO_DATA,                      NO_DATA),
    (0,   b"GGUF",                           "a GGUF model",               NO_DATA,                      NO_DATA),
    (0,   b"version https://git-lfs.github", "a pointer of Git LFS",       "git lfs pull fetches it",    "git lfs pull fetches it"),
)
# fmt: on
_LATER = [row for row in MAGIC if row[0]]
_BY_FIRST_BYTE = {row[1][:1]: [*(each for each in MAGIC if not each[0] and each[1][:1] == row[1][:1]), *_LATER] for row in MAGIC}
TEXTUAL = (b"%PDF-", b"{\\rtf", b"version https://git-lfs.github")  # those of files that may be text otherwise


class Fault(NamedTuple):
    """What a file is, and what to do about it."""

    what: str
    mend: str


class Head(NamedTuple):
    """A file, its first bytes and its last ones."""

    file: File
    start: bytes
    end: bytes


def form(name: str) -> tuple[Rows, Packing]:
    """How a file of text is read, which the end of its name says; any other is one document."""
    name = name.lower()
    packing: Packing = next((each for each in PACKED if name.endswith(each)), "")
    return ROWS.get(PurePath(name.removesuffix(packing)).suffix, "text"), packing


def text_suffixes() -> tuple[str, ...]:
    """Ends of the names that a folder of text is searched for."""
    alone = tuple(ROWS)
    return alone + tuple(f"{each}{packing}" for each in alone if ROWS[each] in ("text", "lines") for packing in PACKED)


def faults(files: Iterable[File], wanted: Wanted) -> list[Problem]:
    """What is wrong with files, by their heads: a problem for each kind of fault."""
    found: dict[Fault, list[File]] = {}
    for file in files:
        if fault := fault_of(file, wanted):
            found.setdefault(fault, []).append(file)
    return [problem_of(fault, files) for fault, files in found.items()]


def fault_of(file: File, wanted: Wanted) -> Fault | None:
    """What is wrong with one file; None where it is read."""
    try:
        head = read_head(file)
    except OSError as error:
        return Fault(f"unreadable: {error.strerror}", "")
    return _text_fault(head) if wanted == "text" else tokens_fault(head)


def read_head(file: File) -> Head:
    """A file's first and last bytes; raises OSError."""
    with open(file.path, "rb") as opened:
        start = opened.read(LOOKED_AT)
        opened.seek(max(0, file.size - 16))
        return Head(file, start, opened.read(16))


def tokens_fault(head: Head) -> Fault | None:
    """What a file without a known header is, where it surely is no raw token ids."""
    if head.file.path.suffix.lower() == ".npz":
        return Fault("NumPy's .npz", "save each array alone: numpy.save, as .npy")
    if kind := _kind(head):
        return Fault(kind[0], kind[2])
    start = head.start[:PLAIN]
    if len(start) >= 16 and _is_text(start):
        return Fault("text", READ_AS_TEXT)
    return None


def _text_fault(head: Head) -> Fault | None:
    rows, packing = form(head.file.path.name)
    stem = head.file.path.name.lower().removesuffix(packing)
    kind = _kind(head)
    if stem.endswith(CSV):
        return Fault("a table", 'write its text as .jsonl, {"text": "..."} a line, or rename it .txt to train on it as it is')
    if rows in ("parquet", "arrow"):
        if packing:
            return Fault("packed", UNPACK)
        return _table_fault(head, kind, ("a parquet file",) if rows == "parquet" else ("an Arrow file", "an Arrow stream"))
    if packing:
        right_kind = {".gz": "a gzip file", ".zst": "a zstd file"}[packing]
        if not kind or kind[0] != right_kind:
            return Fault(
                kind[0] if kind else f"no {packing} file", kind[1] if kind else f"end its name in {PurePath(stem).suffix or '.txt'}"
            )
        inner = head._replace(start=unpack_start(head.start, packing, LOOKED_AT), end=b"")
        return _inner_fault(inner, _kind(inner), rows) if inner.start else None
    return _inner_fault(head, kind, rows)


def _table_fault(head: Head, kind: tuple[str, str, str] | None, right: tuple[str, ...]) -> Fault | None:
    """What a file is that is named as a table and is none."""
    if not kind or kind[0] not in right:
        return Fault(kind[0], kind[1]) if kind else Fault(f"no {form(head.file.path.name)[0]} file", "")
    closing = {"a parquet file": b"PAR1", "an Arrow file": b"ARROW1", "an Arrow stream": b"\xff\xff\xff\xff\0\0\0\0"}[kind[0]]
    return None if head.end.endswith(closing) else Fault(f"{kind[0]} that was cut short", "write it, or fetch it, again")


def _inner_fault(head: Head, kind: tuple[str, str, str] | None, rows: Rows) -> Fault | None:
    """What text is, packed or not, that can't be read as its rows."""
    start = head.start
    if kind:
        return Fault(kind[0], kind[1])
    zeros = b"\0" in start
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or (zeros and _is_two_bytes_a_letter(start)):
        if head.file.path.suffix.lower() in IDS_SUFFIXES:
            return Fault("no text but binary", "data=tokens reads files of token ids")
        return Fault("UTF-16 text", "iconv -f UTF-16 -t UTF-8 FILE > NEW writes what is read")
    if zeros:
        return Fault("no text but binary", "data=tokens reads files of token ids")
    return _json_fault(head, start.removeprefix(BOM_UTF8).lstrip()) if rows == "lines" else None


def _json_fault(head: Head, start: bytes) -> Fault | None:
    """JSON that is no object a line."""
    if start.startswith(b"["):
        return Fault("a JSON array", "write an object a line: jq -c '.[]' FILE > FILE.jsonl")
    line, newline, _ = start.partition(b"\n")
    if start.startswith(b"{") and newline and ".json" in head.file.path.suffixes:
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return Fault("one JSON document over many lines", "write an object a line: jq -c . FILE > FILE.jsonl")
    return None


def _kind(head: Head) -> tuple[str, str, str] | None:
    """(what a file is, what to do where text is wanted, and where tokens are), of those that have a mark of their own."""
    start, suffix = head.start, head.file.path.suffix.lower()
    for at, magic, what, text, tokens in _BY_FIRST_BYTE.get(start[:1], _LATER):
        if start.startswith(magic, at) and (magic in TEXTUAL or not _is_text(start[:PLAIN])):
            if what == "a zip file" and suffix in OFFICE:
                return "an Office file", JSONL, IDS
            return what, text, tokens
    if _is_gzip(start):
        return "a gzip file", "end its name in .gz", "unpack it: gunzip FILE"
    if _is_arrow_stream(head):
        return "an Arrow stream", "end its name in .arrow", READ_AS_TEXT
    if _is_pickle(head):
        return "a pickle", JSONL, IDS
    if _is_safetensors(head):
        return "a safetensors file", NO_DATA, IDS
    if _is_mds(head):
        return "a shard of MosaicML's", JSONL, IDS
    return None


def _is_gzip(start: bytes) -> bool:
    if not start.startswith(b"\x1f\x8b\x08"):
        return False
    with suppress(zlib.error):
        zlib.decompressobj(31).decompress(start, LOOKED_AT)
        return True
    return False


def _is_arrow_stream(head: Head) -> bool:
    """The continuation mark, then the length of the schema, padded to 8 bytes (Arrow columnar format, IPC messages)."""
    if len(head.start) < 8 or not head.start.startswith(b"\xff\xff\xff\xff"):
        return False
    length = int.from_bytes(head.start[4:8], "little", signed=True)
    return 0 < length < head.file.size and length % 8 == 0


def _is_pickle(head: Head) -> bool:
    """Protocols 2 to 5 begin with 0x80 and their number, 4 and 5 go on with a frame; all end with a full stop."""
    start = head.start[:3]
    if len(start) < 3 or start[0] != 0x80 or not head.end.endswith(b"."):
        return False
    return start[2] == 0x95 if start[1] in (4, 5) else start[1] in (2, 3) and start[2] in b"}](c"


def _is_safetensors(head: Head) -> bool:
    """uint64 length of a JSON object, and that object."""
    if len(head.start) < 16:
        return False
    length = int.from_bytes(head.start[:8], "little")
    return 2 <= length <= head.file.size - 8 and head.start[8:10] in (b'{"', b"{}")


def _is_mds(head: Head) -> bool:
    """uint32 samples n, uint32 offsets [n + 1] of which the last is the file's size, then a JSON object."""
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
    """Whether bytes, of which the last character may be cut, are UTF-8 without control characters."""
    try:
        text = start.decode()
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:
            return False
        text = start[: error.start].decode()
    return all(letter.isprintable() or letter in "\t\n\r\f\ufeff" for letter in text)


def _is_two_bytes_a_letter(start: bytes) -> bool:
    """Whether half of the bytes, those at even or those at odd places, are mostly zero and the others hardly ever."""
    pairs = len(start) // 2
    few, many = sorted((start[::2].count(0), start[1::2].count(0)))
    return pairs >= 8 and many > 0.4 * pairs and few < 0.04 * pairs


def json_in_text(file: File) -> str:
    """Which of JSON_AS_TEXT a file is that is read as text, and not packed; "" where it is neither, or can't be read."""
    if form(file.path.name) != ("text", ""):
        return ""
    try:
        start = read_head(file).start.removeprefix(BOM_UTF8).lstrip()
    except OSError:
        return ""
    if re.match(rb'\[\s*\{\s*"', start):
        return "a JSON array"
    whole = [line for line in start.split(b"\n")[:3] if line.strip()]
    return "JSON lines" if len(whole) > 1 and all(map(_is_object, whole[:2])) else ""


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def is_lines(path: Path, key: str) -> bool:
    """Whether the first line of a file is a JSON object with the key; raises OSError."""
    with open(path, "rb") as file:
        line = file.read(LOOKED_AT).removeprefix(BOM_UTF8).lstrip().partition(b"\n")[0]
    try:
        return key in json.loads(line) and line.startswith(b"{")
    except (ValueError, TypeError, RecursionError):
        return line.startswith(b"{") and len(line) > LOOKED_AT // 2  # an object that is longer than what was read


def problem_of(fault: Fault, files: Sequence[File], *, verb: str = "is ") -> Problem:
    """The problem of files with one fault."""
    more = f" (and {len(files) - 1:,} more)" if files[1:] else ""
    return wrong(f"{files[0].path} {verb}{fault.what}{more}", fault.mend)
