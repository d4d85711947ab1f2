"""A file of another kind or a damaged one is refused, with what it is and the fix; ids are not mistaken for such files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

from distrain.tests.fakes.data_files import TEXTS, json_lines, table, write_file, write_stream, zstd_frames  # noqa: E402
from distrain.tests.fakes.small_corpus import small_corpus  # noqa: E402
from distrain.trainer.loop.data.files.find import DataFile  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402


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

# How the file is written, its name, what it is, and the fixes with data=text and with data=tokens (None: the file is read).
# fmt: off
KINDS: dict[str, tuple[Write, str, str, str | None, str | None]] = {
    "parquet": (lambda at: parquet.write_table(table(), at), "a.txt", "a parquet file", "end its name in .parquet", AS_TEXT),
    "parquet as tokens": (lambda at: parquet.write_table(table(), at), "a.bin", "a parquet file", "end its name in .parquet", AS_TEXT),
    "an Arrow file": (lambda at: write_file(at, table()), "a.feather", "an Arrow file", "end its name in .arrow", AS_TEXT),
    "an Arrow stream": (lambda at: write_stream(at, table()), "a.bin", "an Arrow stream", "end its name in .arrow", AS_TEXT),
    "gzip": (lambda at: at.write_bytes(gzip.compress(json_lines())), "a.jsonl", "a gzip file",
        "end its name in .gz", "unpack it: gunzip FILE"),
    "zstd": (lambda at: at.write_bytes(zstandard.compress(json_lines())), "a.txt", "a zstd file", "end its name in .zst", UNPACK),
    "xz": (lambda at: at.write_bytes(lzma.compress(json_lines())), "a.jsonl.xz", "an xz file",
        "unpack it: xz -d FILE", "unpack it: xz -d FILE"),
    "bzip2": (lambda at: at.write_bytes(bz2.compress(json_lines())), "a.bz2", "a bzip2 file",
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
    "lines of JSON": (lambda at: at.write_bytes(json_lines()), "a.bin", "text", None, AS_TEXT),
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
    "gzip that is none": (lambda at: at.write_bytes(json_lines()), "a.jsonl.gz", "no .gz file", "end its name in .jsonl", None),
    "zstd that is none": (lambda at: at.write_bytes(json_lines()), "a.jsonl.zst", "no .zst file", "end its name in .jsonl", None),
    "parquet that is none": (lambda at: at.write_text("<!DOCTYPE html><html>not found</html>"), "a.parquet", "no parquet file", "", None),
    "packed parquet": (lambda at: at.write_bytes(gzip.compress(b"PAR1")), "a.parquet.gz", "packed", UNPACK, None),
}
# fmt: on


@pytest.mark.parametrize("name", [name for name, row in KINDS.items() if row[3] is not None])
def test_data_text_refuses_files_of_other_kinds(name: str, tmp_path: Path) -> None:
    write, file, what, mend, _ = KINDS[name]
    write(tmp_path / file)
    with pytest.raises(Unreadable) as refused:
        small_corpus(tmp_path, path=str(tmp_path / file))
    assert str(refused.value) == f"{tmp_path / file} is {what}" + (f": {mend}" if mend else "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", [name for name, row in KINDS.items() if row[4] is not None])
def test_data_tokens_refuses_files_of_other_kinds(name: str, tmp_path: Path) -> None:
    write, file, what, _, mend = KINDS[name]
    write(tmp_path / file)
    what = "a gzip file" if "packed archive" in name else what
    with pytest.raises(Unreadable) as refused:
        small_corpus(tmp_path, name="tokens", path=str(tmp_path / file), vocab=1 << 16)
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
    "zstd": (lambda at: at.write_bytes(zstandard.compress(json_lines())[:-20]), "a.jsonl.zst",
        "AT line 1 cannot be decompressed: it ends inside a frame"),
    "a later frame of zstd": (lambda at: at.write_bytes(zstd_frames(json_lines())[:-20]), "a.txt.zst",
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
        small_corpus(tmp_path, path=str(tmp_path / file))
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
        small_corpus(tmp_path, path=f"{tmp_path}/other")
    assert str(refused.value) == f"{tmp_path}/other/0.parquet has no column text (and 2 more): set data.text_key to one of content"
    with pytest.raises(Unreadable) as refused:
        small_corpus(tmp_path, path=f"{tmp_path}/in/*")
    at = tmp_path / "in"
    assert str(refused.value) == f"{at}/00.json is a JSON array (and 30 more): {JQ}\n{at}/b.parquet is no parquet file"


@given(
    st.lists(
        st.sampled_from([0x4150, 0x3152, 0x8B1F, 0x0008, 0x0480, 0x2E95, 0x4B50, 0x0403, 0xB528, 0, 7, 50256]), min_size=40, max_size=80
    )
)
def test_ids_are_not_mistaken_for_other_formats(ids: list[int]) -> None:
    """Only what more than the first four bytes tell is refused: the first id is an ordinary one."""
    from distrain.trainer.loop.data.files.formats import FirstBytes, check_token_bytes

    words = np.array([1000, *ids], np.uint16).tobytes()
    file = DataFile("a.bin", Path("a.bin"), len(words))
    assert check_token_bytes(FirstBytes(file, words, words[-16:])) is None
