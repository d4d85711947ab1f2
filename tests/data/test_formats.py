"""A file is read in its own format, or refused with its format and the fix."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.trainer.loop.data import columnar
from distrain.trainer.loop.data.corpus import Corpus, MappedTokens
from distrain.trainer.loop.data.find import DataFile
from distrain.trainer.loop.data.formats import JSON_AS_TEXT
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.text_files import SHARE, split_turns
from distrain.trainer.loop.data.workers import tokenize_turns
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TEXTS = ["to be,\nor not to be", "Ünïcödé 字 \U0001f600", "a", 'quotes " and \\ and \t'] * 10
BOM = b"\xef\xbb\xbf"


def open_corpus(folder: Path, remarks: list[str] | None = None, vocab: int = 256, **words: Any) -> Corpus:
    def progress(what: str, done: int, total: int) -> None:
        if not total and remarks is not None:
            remarks.append(what)

    return prepare_corpus(Data(**{"name": "text", **words}), vocab=vocab, seq=4, cache=folder / "cache", progress=progress)


def documents(corpus: Corpus, source: int = 0) -> list[list[int]]:
    tokens = corpus.sources[source].tokens
    assert isinstance(tokens, MappedTokens)
    whole = np.empty(tokens.size, np.int64)
    tokens.copy(0, whole)
    return [whole[begin:end].tolist() for begin, end in zip(tokens.bounds[:-1], tokens.bounds[1:], strict=True)]


def of_bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), 0] for text in texts]


def lines(texts: list[str] = TEXTS, key: str = "text") -> bytes:
    return "".join(json.dumps({"id": index, key: text}) + "\n" for index, text in enumerate(texts)).encode()


def table(texts: list[Any] = TEXTS, key: str = "text", kind: Any = None) -> Any:
    column = pyarrow.array(texts, pyarrow.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind) if kind else column
    return pyarrow.table({"id": list(range(len(texts))), key: column})


def write_stream(path: Path, rows: Any, batch: int = 7, **options: Any) -> Any:
    """As datasets' save_to_disk writes its shards (datasets/arrow_writer.py)."""
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, rows.schema, **options) as writer:
        writer.write_table(rows, max_chunksize=batch)


def write_file(path: Path, rows: Any, batch: int = 7) -> Any:
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=batch)


def frames(text: bytes) -> bytes:
    """As pzstd and cat write: several frames, one of them empty."""
    packer = zstandard.ZstdCompressor()
    return b"".join(packer.compress(part) for part in (text[: len(text) // 3], b"", text[len(text) // 3 :]))


# What is read

READ: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "lines of JSON": ("a.jsonl", lambda path: path.write_bytes(lines())),
    "lines of JSON by their other names": ("a.ndjson", lambda path: path.write_bytes(lines())),
    "lines of JSON in a .json": ("a.json", lambda path: path.write_bytes(lines())),
    "lines of JSON, packed, as C4's": ("a.json.gz", lambda path: path.write_bytes(gzip.compress(lines()))),
    "lines of JSON in capitals": ("A.JSONL", lambda path: path.write_bytes(lines())),
    "lines that end as on Windows": ("a.jsonl", lambda path: path.write_bytes(lines().replace(b"\n", b"\r\n"))),
    "lines after a byte order mark": ("a.jsonl", lambda path: path.write_bytes(BOM + lines())),
    "zstd": ("a.jsonl.zst", lambda path: path.write_bytes(zstandard.compress(lines()))),
    "frames of zstd": ("a.jsonl.zst", lambda path: path.write_bytes(frames(lines()))),
    "packed lines after a byte order mark": ("a.jsonl.zst", lambda path: path.write_bytes(frames(BOM + lines()))),
    "parquet": ("a.parquet", lambda path: parquet.write_table(table(), path)),
    "parquet in row groups": ("a.parquet", lambda path: parquet.write_table(table(), path, row_group_size=7)),
    "parquet by zstd": ("a.parquet", lambda path: parquet.write_table(table(), path, compression="zstd")),
    "parquet of large strings": ("a.parquet", lambda path: parquet.write_table(table(kind=pyarrow.large_string()), path)),
    "parquet of categories": ("a.parquet", lambda path: parquet.write_table(table(kind="dictionary"), path)),
    "parquet with nulls": ("a.parquet", lambda path: parquet.write_table(table([None, *TEXTS[:5], None, "", *TEXTS[5:]]), path)),
    "an Arrow stream": ("a.arrow", lambda path: write_stream(path, table())),
    "an Arrow stream, packed inside": (
        "a.arrow",
        lambda path: write_stream(path, table(), options=pyarrow.ipc.IpcWriteOptions(compression="zstd")),
    ),
    "an Arrow stream of string views": ("a.arrow", lambda path: write_stream(path, table(kind=pyarrow.string_view()))),
    "an Arrow stream of categories": ("a.arrow", lambda path: write_stream(path, table(kind="dictionary"))),
    "an Arrow file": ("a.arrow", lambda path: write_file(path, table())),
}


@pytest.mark.parametrize("name", READ)
def test_a_row_is_a_document(name: str, tmp_path: Path) -> None:
    file, write = READ[name]
    write(tmp_path / file)
    corpus = open_corpus(tmp_path, path=str(tmp_path / file))
    assert documents(corpus) == of_bytes(TEXTS)
    assert corpus.sources[0].documents == len(TEXTS)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.md", "a.md.zst"])
@pytest.mark.parametrize("head", [b"", BOM])
def test_a_file_of_text_is_a_document_without_its_byte_order_mark(name: str, head: bytes, tmp_path: Path) -> None:
    text = "".join(f"line {index}\r\n" for index in range(5000)) + "字"
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": frames}
    (tmp_path / name).write_bytes(pack.get(Path(name).suffix, bytes)(head + text.encode()))
    assert documents(open_corpus(tmp_path, path=str(tmp_path / name))) == of_bytes([text])


def test_the_text_column_can_be_named(tmp_path: Path) -> None:
    parquet.write_table(table(key="content"), tmp_path / "a.parquet")
    assert documents(open_corpus(tmp_path, path=str(tmp_path / "a.parquet"), text_key="content")) == of_bytes(TEXTS)


def test_every_text_format_can_be_blended(tmp_path: Path) -> None:
    parquet.write_table(table(TEXTS[:20]), tmp_path / "a.parquet")
    write_stream(tmp_path / "b.arrow", table(TEXTS[20:]))
    (tmp_path / "c.jsonl.zst").write_bytes(frames(lines(TEXTS[:7])))
    paths = tuple(str(tmp_path / name) for name in ("a.parquet", "b.arrow", "c.jsonl.zst"))
    corpus = open_corpus(tmp_path, path=paths, weights=(1.0, 2.0, 3.0))
    assert [documents(corpus, source) for source in range(3)] == [of_bytes(TEXTS[:20]), of_bytes(TEXTS[20:]), of_bytes(TEXTS[:7])]


def test_a_folder_saved_by_datasets_is_read_shard_by_shard(tmp_path: Path) -> None:
    """dataset_info.json and state.json lie beside them (datasets/arrow_dataset.py, save_to_disk)."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_stream(folder / "data-00000-of-00002.arrow", table(TEXTS[:25]))
    write_stream(folder / "data-00001-of-00002.arrow", table(TEXTS[25:]))
    (folder / "dataset_info.json").write_text('{"citation": ""}')
    (folder / "state.json").write_text('{\n  "_data_files": []\n}')
    remarks: list[str] = []
    assert documents(open_corpus(tmp_path, remarks, path=str(folder))) == of_bytes(TEXTS)
    assert remarks == []


@pytest.fixture(scope="module")
def split_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of table in 23 groups of rows."""
    folder = tmp_path_factory.mktemp("tables")
    rows = table([f"{index} {'x' * (index % 97)}" for index in range(500)])
    parquet.write_table(rows, folder / "groups.parquet", row_group_size=22)
    write_stream(folder / "stream.arrow", rows, 22)
    write_file(folder / "file.arrow", rows, 22)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["groups.parquet", "stream.arrow", "file.arrow"])
@given(cuts=st.lists(st.floats(0, 1), max_size=12))
def test_spans_of_a_table_yield_each_row_once_for_any_cut(name: str, cuts: list[float], split_files: dict[str, Path]) -> None:
    path, size = split_files[name], split_files[name].stat().st_size
    kind: Any = "parquet" if name.endswith("parquet") else "arrow"
    bounds = sorted({0, size, *(int(cut * size) for cut in cuts)})
    read = [text for begin, end in pairwise(bounds) for text in columnar.read_texts(str(path), kind, "text", begin, end)]
    assert read == [f"{index} {'x' * (index % 97)}".encode() for index in range(500)]


@pytest.mark.parametrize("name", ["groups.parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_spans_that_end_at_row_groups_yield_each_row_once(name: str, beside: int, split_files: dict[str, Path]) -> None:
    path, size = split_files[name], split_files[name].stat().st_size
    kind: Any = "parquet" if name.endswith("parquet") else "arrow"
    places = [group * size // 23 for group in range(1, 23)]
    if name.startswith("stream"):
        source = pyarrow.memory_map(str(path))
        places = [source.tell() for _ in pyarrow.ipc.open_stream(source)]
    bounds = sorted({0, size, *(place + beside for place in places)})
    read = [text for begin, end in pairwise(bounds) for text in columnar.read_texts(str(path), kind, "text", begin, end)]
    assert read == [f"{index} {'x' * (index % 97)}".encode() for index in range(500)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst"])
def test_large_tables_are_read_by_several_processes(name: str, processes: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(32, 127, 200, np.uint8).tobytes().decode() for _ in range(100_000)]
    path = tmp_path / name
    match path.suffix:
        case ".parquet":
            parquet.write_table(table(texts), path, row_group_size=10_000, compression="none", use_dictionary=False)
        case ".arrow":
            write_stream(path, table(texts), 1000)
        case _:
            path.write_bytes(zstandard.compress(lines(texts)))
    turns = split_turns([DataFile(name, path, path.stat().st_size)])
    assert (len(turns) > 2) == (path.suffix != ".zst"), f"{path.stat().st_size} bytes, {SHARE} a share"
    parts = list(tokenize_turns(turns, tmp_path, ("bytes", None, "text"), processes))
    assert b"".join(Path(f"{part}.tokens").read_bytes() for part in parts) == "".join(f"{text}\0" for text in texts).encode()


def test_skipped_files_of_a_folder_are_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.pdf", "c.pdf", "d.md", "e.json", "empty.txt", ".hidden", "LICENSE"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("" if name.startswith("empty") else "[1]" if name.endswith("json") else "to be or not")
    remarks: list[str] = []
    open_corpus(tmp_path, remarks, path=str(tmp_path / "in"))
    says, _, left = remarks[0].partition("; skipped: ")
    assert says == f"data.path={tmp_path}/in: 1 file is read"
    assert left.split(", ")[0] == "2 .pdf"
    assert sorted(left.split(", ")[1:]) == ["1 .json", "1 .md", "1 empty", "1 without a suffix"]


def test_text_files_named_like_held_out_data_are_remarked_on(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("train-00000", "validation-00000", "test-00000"):
        parquet.write_table(table(), folder / f"{name}.parquet")
    remarks: list[str] = []
    open_corpus(tmp_path, remarks, path=str(folder))
    says = "2 of 3 files are named like held-out data, such as test-00000.parquet"
    assert remarks == [f"{says}: they train like the others; a pattern can leave them out: data.path='FOLDER/**/train*'"]


JSON_OF_TEXT = {
    "lines": (lines(), "JSON lines"),
    "an array": (json.dumps([{"text": "to be"}]).encode(), "a JSON array"),
    "one line": (json.dumps({"text": "to be " * 2000}).encode(), ""),
    "a list in words": (b"[{or not}]\n", ""),
    "dialogue": (b'{"aside"}\n{"exit"}\n', ""),
}


@pytest.mark.parametrize("name", JSON_OF_TEXT)
def test_json_named_as_text_trains_as_it_is_with_a_remark(name: str, tmp_path: Path) -> None:
    text, what = JSON_OF_TEXT[name]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(text * (1 if len(text) > 9999 else 400))
    remarks: list[str] = []
    open_corpus(tmp_path, remarks, path=str(folder / "a.txt"))
    remark = f"{folder}/a.txt: it holds {what}, but its name says text, so it trains as it is, braces included; {JSON_AS_TEXT.get(what)}"
    assert [each for each in remarks if "but its name says text" in each] == ([remark] if what else [])


# What is refused


def zip_bytes(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, "to be")
    return out.getvalue()


def tar_bytes() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return out.getvalue()


def database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("create table a (b)")
    connection.close()


def safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(100)}, path)


def mds(path: Path) -> None:
    """As streaming's MDSWriter writes a shard (streaming/base/format/mds/writer.py)."""
    config, samples = b'{"column_names": ["text"]}', [b"\x05\0\0\0to be", b"\x03\0\0\0or "]
    offsets = np.cumsum([4 * (len(samples) + 2) + len(config), *map(len, samples)]).astype(np.uint32)
    path.write_bytes(struct.pack("<I", len(samples)) + offsets.tobytes() + config + b"".join(samples))


def numpy_file(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(100, dtype=np.uint16))


def torch_file(path: Path, *, old: bool = False) -> None:
    import torch

    torch.save({"a": torch.zeros(100)}, path, _use_new_zipfile_serialization=not old)


NOISE = bytes(range(256)) * 4
JSONL = 'write its text as .jsonl, {"text": "..."} a line'
IDS = "write the ids with numpy.save, as .npy"
UNPACK = "unpack it and name its contents"
OUT = "leave it out of data.path"
CSV = f"{JSONL}, or rename it .txt to train on it as it is"
AS_TEXT = "data=text reads it"
JQ = "write an object a line: jq -c '.[]' FILE > FILE.jsonl"
Write = Callable[[Path], Any]

# How it is written, its name, what it is, what to do where text is wanted (None: it is read), and where tokens are.
# fmt: off
KINDS: dict[str, tuple[Write, str, str, str | None, str | None]] = {
    "parquet": (lambda at: parquet.write_table(table(), at), "a.txt", "a parquet file", "end its name in .parquet", AS_TEXT),
    "parquet as tokens": (lambda at: parquet.write_table(table(), at), "a.bin", "a parquet file", "end its name in .parquet", AS_TEXT),
    "an Arrow file": (lambda at: write_file(at, table()), "a.feather", "an Arrow file", "end its name in .arrow", AS_TEXT),
    "an Arrow stream": (lambda at: write_stream(at, table()), "a.bin", "an Arrow stream", "end its name in .arrow", AS_TEXT),
    "gzip": (lambda at: at.write_bytes(gzip.compress(lines())), "a.jsonl", "a gzip file", "end its name in .gz", "unpack it: gunzip FILE"),
    "zstd": (lambda at: at.write_bytes(zstandard.compress(lines())), "a.txt", "a zstd file", "end its name in .zst", UNPACK),
    "xz": (lambda at: at.write_bytes(lzma.compress(lines())), "a.jsonl.xz", "an xz file", "unpack it: xz -d FILE", "unpack it: xz -d FILE"),
    "bzip2": (lambda at: at.write_bytes(bz2.compress(lines())), "a.bz2", "a bzip2 file",
         "unpack it: bunzip2 FILE", "unpack it: bunzip2 FILE"),
    "zip": (lambda at: at.write_bytes(zip_bytes("a.txt")), "a.txt", "a zip file", UNPACK, UNPACK),
    "Word": (lambda at: at.write_bytes(zip_bytes("word/document.xml")), "a.docx", "an Office file", JSONL, IDS),
    "tar": (lambda at: at.write_bytes(tar_bytes()), "a.txt", "a tar file", UNPACK, UNPACK),
    "pickle": (lambda at: at.write_bytes(pickle.dumps(TEXTS)), "a.pkl", "a pickle", JSONL, IDS),
    "an old pickle": (lambda at: at.write_bytes(pickle.dumps(TEXTS, 2)), "a.bin", "a pickle", JSONL, IDS),
    "torch's": (torch_file, "pytorch_model.bin", "a zip file", UNPACK, UNPACK),
    "torch's of old": (lambda at: torch_file(at, old=True), "pytorch_model.bin", "a file of torch.save", JSONL, IDS),
    "HDF5": (lambda at: at.write_bytes(b"\x89HDF\r\n\x1a\n" + NOISE), "a.h5", "an HDF5 file", JSONL, IDS),
    "PDF": (lambda at: at.write_bytes(b"%PDF-1.7\n%" + NOISE), "a.pdf", "a PDF file", JSONL, IDS),
    "RTF": (lambda at: at.write_bytes(b"{\\rtf1 to be or not to be}"), "a.rtf", "an RTF file", JSONL, IDS),
    "SQLite": (database, "a.db", "an SQLite database", JSONL, IDS),
    "safetensors": (safetensors, "model.safetensors", "a safetensors file", OUT, IDS),
    "MosaicML's": (mds, "shard.00000.mds", "a MosaicML shard", JSONL, IDS),
    "NumPy's": (numpy_file, "a.txt", "a NumPy array", "data=tokens reads it", None),
    "an image": (lambda at: at.write_bytes(b"\x89PNG\r\n\x1a\n" + NOISE), "a.png", "an image", OUT, OUT),
    "Git LFS": (lambda at: at.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"), "a.parquet",
        "a pointer of Git LFS", "git lfs pull fetches it", "git lfs pull fetches it"),
    "text": (lambda at: at.write_text("to be or not to be"), "a.bin", "text", None, AS_TEXT),
    "lines of JSON": (lambda at: at.write_bytes(lines()), "a.bin", "text", None, AS_TEXT),
    "text of another alphabet": (lambda at: at.write_text("字" * 400), "a.bin", "text", None, AS_TEXT),
    "binary": (lambda at: at.write_bytes(NOISE), "a.txt", "binary, not text", "data=tokens reads files of token ids", None),
    "UTF-16": (lambda at: at.write_text("to be or not to be", "utf-16"), "a.txt", "UTF-16 text",
        "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW", None),
    "ids of two bytes": (lambda at: at.write_bytes(np.arange(200, dtype=np.uint16).tobytes()), "a.bin", "binary, not text",
        "data=tokens reads files of token ids", None),
    "UTF-16 without a mark": (lambda at: at.write_text("to be or not to be", "utf-16-le"), "a.txt", "UTF-16 text",
        "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW", None),
    "csv": (lambda at: at.write_text("id,text\n1,to be or not to be"), "a.csv", "a table", CSV, None),
    "packed csv": (lambda at: at.write_bytes(gzip.compress(b"id,text\n1,to be or not to be")), "a.csv.gz", "a table",
        CSV, None),
    "a JSON array": (lambda at: at.write_text(json.dumps([{"text": text} for text in TEXTS])), "a.json", "a JSON array", JQ, None),
    "a JSON array named as lines": (lambda at: at.write_text(json.dumps([{"text": "a"}], indent=1)), "a.jsonl", "a JSON array", JQ, None),
    "a packed JSON array": (lambda at: at.write_bytes(gzip.compress(b"[1]")), "a.json.gz", "a JSON array", JQ, None),
    "a JSON array packed by zstd": (lambda at: at.write_bytes(zstandard.compress(b"[1]")), "a.json.zst", "a JSON array", JQ, None),
    "one JSON document": (lambda at: at.write_text(json.dumps({"text": "a"}, indent=1)), "a.json", "one JSON document on many lines",
        "write an object a line: jq -c . FILE > FILE.jsonl", None),
    "a packed archive": (lambda at: at.write_bytes(gzip.compress(tar_bytes())), "a.tar.gz", "a tar file", UNPACK, "unpack it: gunzip FILE"),
    "gzip that is none": (lambda at: at.write_bytes(lines()), "a.jsonl.gz", "no .gz file", "end its name in .jsonl", None),
    "zstd that is none": (lambda at: at.write_bytes(lines()), "a.jsonl.zst", "no .zst file", "end its name in .jsonl", None),
    "parquet that is none": (lambda at: at.write_text("<!DOCTYPE html><html>not found</html>"), "a.parquet", "no parquet file", "", None),
    "packed parquet": (lambda at: at.write_bytes(gzip.compress(b"PAR1")), "a.parquet.gz", "packed", UNPACK, None),
}
# fmt: on


@pytest.mark.parametrize("name", [name for name, row in KINDS.items() if row[3] is not None])
def test_data_text_refuses_files_of_other_kinds(name: str, tmp_path: Path) -> None:
    write, file, what, mend, _ = KINDS[name]
    write(tmp_path / file)
    with pytest.raises(Unreadable) as refused:
        open_corpus(tmp_path, path=str(tmp_path / file))
    assert str(refused.value) == f"{tmp_path / file} is {what}" + (f": {mend}" if mend else "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", [name for name, row in KINDS.items() if row[4] is not None])
def test_data_tokens_refuses_files_of_other_kinds(name: str, tmp_path: Path) -> None:
    write, file, what, _, mend = KINDS[name]
    write(tmp_path / file)
    what = "a gzip file" if "packed archive" in name else what
    with pytest.raises(Unreadable) as refused:
        open_corpus(tmp_path, name="tokens", path=str(tmp_path / file), vocab=1 << 16)
    assert str(refused.value) == f"{tmp_path / file} is {what}: {mend}"


def cut(path: Path, by: int) -> Any:
    path.write_bytes(path.read_bytes()[:-by])


# fmt: off
DAMAGED: dict[str, tuple[Write, str, str]] = {
    "parquet": (lambda at: (parquet.write_table(table(), at), cut(at, 5)), "a.parquet",
        "AT is a parquet file that is truncated: write or download it again"),
    "an Arrow file": (lambda at: (write_file(at, table()), cut(at, 5)), "a.arrow",
        "AT is an Arrow file that is truncated: write or download it again"),
    "an Arrow stream": (lambda at: (write_stream(at, table()), cut(at, 300)), "a.arrow",
        "AT is an Arrow stream that is truncated: write or download it again"),
    "an Arrow stream between two batches": (lambda at: (write_stream(at, table()), cut(at, 8)), "a.arrow",
        "AT is an Arrow stream that is truncated: write or download it again"),
    "zstd": (lambda at: at.write_bytes(zstandard.compress(lines())[:-20]), "a.jsonl.zst",
        "AT line 1 cannot be decompressed: it ends inside a frame"),
    "a later frame of zstd": (lambda at: at.write_bytes(frames(lines())[:-20]), "a.txt.zst",
        "AT cannot be decompressed: it ends inside a frame"),
    "zeros far inside of a text": (lambda at: at.write_bytes(b"to be\n" * 20_000 + b"\0"), "a.txt",
        r"AT is not text: byte 120000 is zero: tr -d '\0' < FILE > NEW removes such bytes"),
    "zeros far inside of packed text": (lambda at: at.write_bytes(gzip.compress(b"to be\n" * 20_000 + b"\0")), "a.txt.gz",
        r"AT is not text: byte 120000 is zero: tr -d '\0' < FILE > NEW removes such bytes"),
    "another column": (lambda at: parquet.write_table(table(key="content"), at), "a.parquet",
        "AT has no column text: set data.text_key to one of content"),
    "a column of numbers": (lambda at: write_stream(at, pyarrow.table({"text": [1], "body": ["a"]})), "a.arrow",
        "AT has a column text of int64: set data.text_key to one of body"),
    "no text at all": (lambda at: parquet.write_table(pyarrow.table({"input_ids": [[1, 2]]}), at), "a.parquet",
        "AT has no column text: none of its columns is text: input_ids"),
    "a footer of something else": (lambda at: at.write_bytes(b"PAR1" + NOISE + b"\x04\0\0\0PAR1"), "a.parquet",
        "AT can't be read: Couldn't deserialize thrift"),
}
# fmt: on


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    write, file, line = DAMAGED[name]
    write(tmp_path / file)
    with pytest.raises(Unreadable) as refused:
        open_corpus(tmp_path, path=str(tmp_path / file))
    said = str(refused.value).replace(str(tmp_path / file), "AT")
    assert said.startswith(line) if "footer" in name else said == line


def test_many_files_of_one_kind_are_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for index in range(30):
        (tmp_path / "in" / f"{index:02}.json").write_text("[1]")
    (tmp_path / "in" / "a.jsonl").write_bytes(b"[2]")
    (tmp_path / "in" / "b.parquet").write_text("none")
    (tmp_path / "other").mkdir()
    for index in range(3):
        parquet.write_table(table(key="content"), tmp_path / "other" / f"{index}.parquet")
    with pytest.raises(Unreadable) as refused:
        open_corpus(tmp_path, path=f"{tmp_path}/other")
    assert str(refused.value) == f"{tmp_path}/other/0.parquet has no column text (and 2 more): set data.text_key to one of content"
    with pytest.raises(Unreadable) as refused:
        open_corpus(tmp_path, path=f"{tmp_path}/in/*")
    at = tmp_path / "in"
    assert str(refused.value) == f"{at}/00.json is a JSON array (and 30 more): {JQ}\n{at}/b.parquet is no parquet file"


@pytest.mark.parametrize(("name", "library"), [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_missing_library_is_named_with_its_install_command(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = {"a.parquet": READ["parquet"], "a.arrow": READ["an Arrow file"], "a.jsonl.zst": READ["zstd"]}
    writes[name][1](tmp_path / name)
    for module in [each for each in sys.modules if each.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unreadable) as refused:
        open_corpus(tmp_path, path=str(tmp_path / name))
    assert str(refused.value) == f"{tmp_path / name} needs {library}, which is not installed: pip install 'distrain[data]'"


@given(
    st.lists(
        st.sampled_from([0x4150, 0x3152, 0x8B1F, 0x0008, 0x0480, 0x2E95, 0x4B50, 0x0403, 0xB528, 0, 7, 50256]), min_size=40, max_size=80
    )
)
def test_ids_are_not_mistaken_for_other_formats(ids: list[int]) -> None:
    """Only what more than the first four bytes tell is refused: the first id is an ordinary one."""
    from distrain.trainer.loop.data.formats import FirstBytes, check_token_bytes

    words = np.array([1000, *ids], np.uint16).tobytes()
    file = DataFile("a.bin", Path("a.bin"), len(words))
    assert check_token_bytes(FirstBytes(file, words, words[-16:])) is None
