"""Text columns of parquet and Arrow files, one document a row, read in batches with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["parquet", "arrow"]

BATCH = 256  # rows of a parquet file in memory at once
_BUFFER = 1 << 20  # bytes of a column per read


class UnreadableTable(Exception):
    """A table can't be read; `says` ends a sentence that begins with the file's name, `mend` is the fix."""

    def __init__(self, says: str, mend: str = "") -> None:
        super().__init__(f"{says}: {mend}" if mend else says)
        self.says, self.mend = says, mend


class RowSample(NamedTuple):
    """Some documents of a file, and the approximate share of the file that they are."""

    texts: list[bytes]
    share: float


def read_texts(path: str, kind: Kind, key: str, begin: int, end: int) -> Iterator[bytes]:
    """Yield the non-empty documents of bytes begin .. end of a file; raises UnreadableTable.

    Row groups of a parquet file and record batches of an Arrow file count as equal parts of its bytes; a record batch of an
    Arrow stream belongs to the byte at which it ends. So consecutive spans of a file yield each document once.
    """
    with _report_unreadable():
        columns = _parquet_columns(path, key, begin, end) if kind == "parquet" else _arrow_columns(path, key, begin, end)
        for column in columns:
            yield from (text for text in column.cast(_pyarrow().large_binary()).to_pylist() if text)


def check_column(path: str, kind: Kind, key: str) -> None:
    """Raises UnreadableTable if a file can't be read or has no text column of that name."""
    with _report_unreadable():
        _check_column(_open(path, kind)[1], key)


def sample_rows(path: str, kind: Kind, key: str, at: int, most: int) -> RowSample:
    """Return documents from a byte of a file on, at least `most` bytes or all; raises UnreadableTable."""
    size, found, rows, used, all_rows = Path(path).stat().st_size, list[bytes](), 0, 0, 0
    with _report_unreadable():
        if kind == "parquet":
            about = _open(path, kind)[0].metadata
            at, all_rows = at * about.num_row_groups // size * size // max(about.num_row_groups, 1), about.num_rows
        for column in _parquet_columns(path, key, at, size) if kind == "parquet" else _arrow_columns(path, key, at, size):
            rows += len(column)
            used += column.nbytes
            found += [text for text in column.cast(_pyarrow().large_binary()).to_pylist() if text]
            if used >= most:
                break
    return RowSample(found, rows / all_rows if all_rows else min(1.0, used / size))


@contextmanager
def _report_unreadable() -> Iterator[None]:
    try:
        yield
    except _pyarrow().ArrowException as error:
        raise UnreadableTable(f"can't be read: {_one_line(error)}") from None
    except OSError as error:  # pyarrow also raises it for damaged files
        raise UnreadableTable(f"can't be read: {error.strerror or _one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _pyarrow() -> Any:
    return import_module("pyarrow")


def _open(path: str, kind: Kind) -> tuple[Any, Any]:
    """Return (reader, schema) of a file."""
    if kind == "parquet":
        file = import_module("pyarrow.parquet").ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
        return file, file.schema_arrow
    ipc, source = import_module("pyarrow.ipc"), _pyarrow().memory_map(path)
    with open(path, "rb") as head:
        is_file = head.read(6) == b"ARROW1"
    reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
    return reader, reader.schema


def _parquet_columns(path: str, key: str, begin: int, end: int) -> Iterator[Any]:
    file, schema = _open(path, "parquet")
    _check_column(schema, key)
    groups, size = file.metadata.num_row_groups, Path(path).stat().st_size
    mine = [group for group in range(groups) if begin <= group * size // groups < end]
    if mine:
        for batch in file.iter_batches(BATCH, mine, [key], use_threads=False):
            yield batch.column(0)


def _arrow_columns(path: str, key: str, begin: int, end: int) -> Iterator[Any]:
    reader, schema = _open(path, "arrow")
    at, size = _check_column(schema, key), Path(path).stat().st_size
    if hasattr(reader, "num_record_batches"):
        batches = reader.num_record_batches
        for batch in range(batches):
            if begin <= batch * size // batches < end:
                yield reader.get_batch(batch).column(at)
        return
    source = _pyarrow().memory_map(path)
    reader = import_module("pyarrow.ipc").open_stream(source)
    while source.tell() <= end:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        if begin < source.tell() <= end:
            yield batch.column(at)


def _check_column(schema: Any, key: str) -> int:
    """Return the index of the text column of that name; raises UnreadableTable."""
    types = _pyarrow().types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view))

    of_text = [field.name for field in schema if is_text(field.type)]
    if key in of_text:
        return list(schema.names).index(key)
    here = next((f"a column {key} of {field.type}" for field in schema if field.name == key), f"no column {key}")
    mend = f"set data.text_key to one of {', '.join(of_text)}" if of_text else f"none of its columns is text: {', '.join(schema.names)}"
    raise UnreadableTable(f"has {here}", mend)
