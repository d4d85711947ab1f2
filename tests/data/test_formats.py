"""A file of text is read in its own format: JSON lines, parquet, Arrow, packed or plain; a row is a document."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

from distrain.tests.fakes.data_files import TEXTS, json_lines, of_bytes, table, write_file, write_stream, zstd_frames  # noqa: E402
from distrain.tests.fakes.small_corpus import documents, small_corpus  # noqa: E402
from distrain.trainer.loop.data.files import columnar  # noqa: E402
from distrain.trainer.loop.data.files.find import DataFile  # noqa: E402
from distrain.trainer.loop.data.files.formats import JSON_AS_TEXT  # noqa: E402
from distrain.trainer.loop.data.tokenize.text_files import SHARE, split_turns  # noqa: E402
from distrain.trainer.loop.data.tokenize.workers import tokenize_turns  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402

BOM = b"\xef\xbb\xbf"

READ: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "lines of JSON": ("a.jsonl", lambda path: path.write_bytes(json_lines())),
    "lines of JSON by their other names": ("a.ndjson", lambda path: path.write_bytes(json_lines())),
    "lines of JSON in a .json": ("a.json", lambda path: path.write_bytes(json_lines())),
    "lines of JSON, packed, as C4's": ("a.json.gz", lambda path: path.write_bytes(gzip.compress(json_lines()))),
    "lines of JSON in capitals": ("A.JSONL", lambda path: path.write_bytes(json_lines())),
    "lines that end as on Windows": ("a.jsonl", lambda path: path.write_bytes(json_lines().replace(b"\n", b"\r\n"))),
    "lines after a byte order mark": ("a.jsonl", lambda path: path.write_bytes(BOM + json_lines())),
    "zstd": ("a.jsonl.zst", lambda path: path.write_bytes(zstandard.compress(json_lines()))),
    "frames of zstd": ("a.jsonl.zst", lambda path: path.write_bytes(zstd_frames(json_lines()))),
    "packed lines after a byte order mark": ("a.jsonl.zst", lambda path: path.write_bytes(zstd_frames(BOM + json_lines()))),
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
    corpus = small_corpus(tmp_path, path=str(tmp_path / file))
    assert documents(corpus) == of_bytes(TEXTS)
    assert corpus.sources[0].documents == len(TEXTS)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.md", "a.md.zst"])
@pytest.mark.parametrize("head", [b"", BOM])
def test_a_file_of_text_is_a_document_without_its_byte_order_mark(name: str, head: bytes, tmp_path: Path) -> None:
    text = "".join(f"line {index}\r\n" for index in range(5000)) + "字"
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd_frames}
    (tmp_path / name).write_bytes(pack.get(Path(name).suffix, bytes)(head + text.encode()))
    assert documents(small_corpus(tmp_path, path=str(tmp_path / name))) == of_bytes([text])


def test_the_text_column_can_be_named(tmp_path: Path) -> None:
    parquet.write_table(table(key="content"), tmp_path / "a.parquet")
    assert documents(small_corpus(tmp_path, path=str(tmp_path / "a.parquet"), text_key="content")) == of_bytes(TEXTS)


def test_every_text_format_can_be_blended(tmp_path: Path) -> None:
    parquet.write_table(table(TEXTS[:20]), tmp_path / "a.parquet")
    write_stream(tmp_path / "b.arrow", table(TEXTS[20:]))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd_frames(json_lines(TEXTS[:7])))
    paths = tuple(str(tmp_path / name) for name in ("a.parquet", "b.arrow", "c.jsonl.zst"))
    corpus = small_corpus(tmp_path, path=paths, weights=(1.0, 2.0, 3.0))
    assert [documents(corpus, source) for source in range(3)] == [of_bytes(TEXTS[:20]), of_bytes(TEXTS[20:]), of_bytes(TEXTS[:7])]


def test_a_folder_saved_by_datasets_is_read_shard_by_shard(tmp_path: Path) -> None:
    """The folder also has dataset_info.json and state.json (datasets/arrow_dataset.py, save_to_disk)."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_stream(folder / "data-00000-of-00002.arrow", table(TEXTS[:25]))
    write_stream(folder / "data-00001-of-00002.arrow", table(TEXTS[25:]))
    (folder / "dataset_info.json").write_text('{"citation": ""}')
    (folder / "state.json").write_text('{\n  "_data_files": []\n}')
    remarks: list[str] = []
    assert documents(small_corpus(tmp_path, remarks=remarks, path=str(folder))) == of_bytes(TEXTS)
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


@pytest.fixture(scope="module")
def many_texts() -> list[str]:
    """Return 20 MB of text in rows of 200 bytes, which is more than one share of a file."""
    rng = np.random.default_rng(0)
    return [row.tobytes().decode() for row in rng.integers(32, 127, (100_000, 200), np.uint8)]


@pytest.mark.parametrize(("name", "processes"), [("a.parquet", 1), ("a.parquet", 2), ("a.arrow", 2), ("a.jsonl.zst", 2)])
def test_large_tables_are_read_by_several_processes(name: str, processes: int, many_texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    match path.suffix:
        case ".parquet":
            parquet.write_table(table(many_texts), path, row_group_size=10_000, compression="none", use_dictionary=False)
        case ".arrow":
            write_stream(path, table(many_texts), 1000)
        case _:
            path.write_bytes(zstandard.compress(json_lines(many_texts)))
    turns = split_turns([DataFile(name, path, path.stat().st_size)])
    assert (len(turns) > 2) == (path.suffix != ".zst"), f"{path.stat().st_size} bytes, {SHARE} a share"
    parts = list(tokenize_turns(turns, tmp_path, ("bytes", None, "text"), processes))
    assert b"".join(Path(f"{part}.tokens").read_bytes() for part in parts) == "".join(f"{text}\0" for text in many_texts).encode()


def test_skipped_files_of_a_folder_are_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.pdf", "c.pdf", "d.md", "e.json", "empty.txt", ".hidden", "LICENSE"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("" if name.startswith("empty") else "[1]" if name.endswith("json") else "to be or not")
    remarks: list[str] = []
    small_corpus(tmp_path, remarks=remarks, path=str(tmp_path / "in"))
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
    small_corpus(tmp_path, remarks=remarks, path=str(folder))
    says = "2 of 3 files are named like held-out data, such as test-00000.parquet"
    assert remarks == [f"{says}: they train like the others; a pattern can leave them out: data.path='FOLDER/**/train*'"]


JSON_OF_TEXT = {
    "lines": (json_lines(), "JSON lines"),
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
    small_corpus(tmp_path, remarks=remarks, path=str(folder / "a.txt"))
    remark = f"{folder}/a.txt: it holds {what}, but its name says text, so it trains as it is, braces included; {JSON_AS_TEXT.get(what)}"
    assert [each for each in remarks if "but its name says text" in each] == ([remark] if what else [])


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
        small_corpus(tmp_path, path=str(tmp_path / name))
    assert str(refused.value) == f"{tmp_path / name} needs {library}, which is not installed: pip install 'distrain[data]'"
