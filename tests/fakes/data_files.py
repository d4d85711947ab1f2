"""Files of data in every format that tests write: JSON lines, tables as parquet and Arrow, text packed by zstd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

TEXTS = ["to be,\nor not to be", "Ünïcödé 字 \U0001f600", "a", 'quotes " and \\ and \t'] * 10


def of_bytes(texts: list[str]) -> list[list[int]]:
    """Return the token ids of texts by data.tokenizer=bytes, one list a document."""
    return [[*text.encode(), 0] for text in texts]


def json_lines(texts: list[str] = TEXTS, key: str = "text") -> bytes:
    """Return an object a line."""
    return "".join(json.dumps({"id": index, key: text}) + "\n" for index, text in enumerate(texts)).encode()


def table(texts: list[Any] = TEXTS, key: str = "text", kind: Any = None) -> Any:
    """Return a table of an id and a text, of a pyarrow type or of categories ("dictionary")."""
    column = pyarrow.array(texts, pyarrow.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind) if kind else column
    return pyarrow.table({"id": list(range(len(texts))), key: column})


def write_stream(path: Path, rows: Any, batch: int = 7, **options: Any) -> Any:
    """Write an Arrow stream, as datasets' save_to_disk writes its shards (datasets/arrow_writer.py)."""
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, rows.schema, **options) as writer:
        writer.write_table(rows, max_chunksize=batch)


def write_file(path: Path, rows: Any, batch: int = 7) -> Any:
    """Write an Arrow file."""
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=batch)


def zstd_frames(text: bytes) -> bytes:
    """Pack text as pzstd and cat do: several frames, one of them empty."""
    packer = zstandard.ZstdCompressor()
    return b"".join(packer.compress(part) for part in (text[: len(text) // 3], b"", text[len(text) // 3 :]))
