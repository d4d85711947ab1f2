"""The safetensors files of a Hugging Face folder, and what their headers say."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ...spec.problem import Problem, Unreadable

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes of a safetensors header: the format's own limit
MAX_LISTED = 6  # files or tensors that are listed one by one


class TensorHeader(NamedTuple):
    """A tensor as a file's header describes it; `dtype` as safetensors names it: BF16, F8_E4M3."""

    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder's model; raises Unreadable where there are none, or one that its index names is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise Unreadable([Problem(rule="weights", says=f"{index} can't be read", mend="download the folder again")]) from None
        if missing := [file.name for file in files if not file.is_file()]:
            says = f"{folder} lacks {', '.join(missing[:MAX_LISTED])}, which {INDEX} names"
            raise Unreadable([Problem(rule="weights", says=says, mend="download the folder again")])
        return files
    files = [folder / WHOLE] if (folder / WHOLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        mend = "save it with transformers' save_pretrained, which writes safetensors"
        raise Unreadable([Problem(rule="weights", says=f"model.weights={folder} holds no .safetensors", mend=mend)])
    return files


def headers_of(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Return each tensor's header by its name; raises Unreadable where a file is invalid or cut short."""
    return {name: header for file in files for name, header in _file_headers(file).items()}


def _file_headers(file: Path) -> dict[str, TensorHeader]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(opened.read(length))
        rows = {name: row for name, row in header.items() if name != "__metadata__"}
        end = 8 + length + max((row["data_offsets"][1] for row in rows.values()), default=0)
        headers = {name: TensorHeader(str(row["dtype"]), tuple(map(int, row["shape"]))) for name, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise Unreadable([Problem(rule="weights", says=f"{file} is not a safetensors file", mend="download it again")]) from None
    if file.stat().st_size != end:
        says = f"{file} is {file.stat().st_size:,} bytes where its header says {end:,}"
        raise Unreadable([Problem(rule="weights", says=says, mend="download it again")])
    return headers
