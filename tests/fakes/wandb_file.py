"""Reads a .wandb file: wandb's protocol buffers in LevelDB's log format (blocks of 32 KiB, records in parts)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

START = 7  # bytes of the file's header: ":W&B", a magic number, a version
BLOCK, HEADER = 1 << 15, 7  # bytes; the header of a part: 4 of checksum, 2 of length, 1 of kind
WHOLE, LAST = 1, 4  # kinds of a part that ends a record


def records(file: Path) -> Iterator[Any]:
    """The records of a file in order, without an incomplete one at its end."""
    form: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    raw, at, record = file.read_bytes(), START, b""
    assert raw[:4] == b":W&B"
    while at + HEADER <= len(raw):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        record += raw[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (WHOLE, LAST):
            yield form.FromString(record)
            record = b""


def history(file: Path) -> list[dict[str, Any]]:
    """The logged rows."""
    found = (record.history for record in records(file) if record.HasField("history"))
    return [{(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in each.item} for each in found]
