"""A file of shards in the safetensors format: written and hashed in one pass, read through a memory map."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...launch.rank.channel import OnProgress, ignore_text
from .save_timers import SaveTimers
from .slices import Shard, Slice

# fmt: off
SAFETENSORS_DTYPES = {
    torch.float64:  "F64",
    torch.float32:  "F32",
    torch.float16:  "F16",
    torch.bfloat16: "BF16",
    torch.int64:    "I64",
    torch.int32:    "I32",
    torch.int16:    "I16",
    torch.int8:     "I8",
    torch.uint8:    "U8",
    torch.bool:     "BOOL",
}
# fmt: on
WRITE_BYTES = 16 << 20  # hashed and written at a time
HASH_BYTES = 1 << 20  # read and hashed at a time
SYNC_BYTES = 256 << 20  # written between two fsyncs, so that progress can be reported


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A file as it was written: size in bytes, SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def write_shards(path: Path, shards: Iterable[Shard], timers: SaveTimers, on_progress: OnProgress = ignore_text) -> ShardFile:
    """Write shards to a new file and fsync it. Raises OSError, and ValueError for an unknown dtype or a slice given twice."""
    ordered = sorted(shards, key=lambda shard: -shard.tensor.element_size())  # keeps every tensor aligned
    digest, size, waiting = hashlib.sha256(), 0, 0
    with path.open("xb") as file, ThreadPoolExecutor(1) as hasher:
        for piece in _chunks(ordered, timers):
            hashed = hasher.submit(_hash, digest, piece, timers)
            with timers.time_part("write"):
                file.write(piece)
            hashed.result()
            size, waiting = size + len(piece), waiting + len(piece)
            if waiting >= SYNC_BYTES:
                with timers.time_part("sync"):
                    _sync(file)
                waiting = 0
            on_progress("write")
        with timers.time_part("sync"):
            _sync(file)
    return ShardFile(bytes=size, sha256=digest.hexdigest())


def _hash(digest: hashlib._Hash, piece: bytes | memoryview, timers: SaveTimers) -> None:
    with timers.time_part("hash"):
        digest.update(piece)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _chunks(shards: list[Shard], timers: SaveTimers) -> Iterator[bytes | memoryview]:
    yield _header(shards)
    for shard in shards:
        flat = shard.tensor.detach().reshape(-1)
        for start in range(0, len(flat), WRITE_BYTES // flat.element_size()):
            with timers.time_part("copy"):
                piece = flat[start : start + WRITE_BYTES // flat.element_size()].to("cpu").contiguous()
            # torch calls a tensor of one element contiguous at any stride, and then can't view its bytes
            yield piece.as_strided(piece.shape, (1,)).view(torch.uint8).numpy().data


def _header(shards: list[Shard]) -> bytes:
    """Return 8 bytes of length, then JSON padded to a multiple of 8 (https://github.com/huggingface/safetensors#format)."""
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for shard in shards:
        if shard.slice.key in rows or shard.tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(
                f"{shard.slice.key} ({shard.slice.kind}) is {'there twice' if shard.slice.key in rows else shard.tensor.dtype}"
            )
        end = at + shard.tensor.nbytes
        rows[shard.slice.key] = {"dtype": SAFETENSORS_DTYPES[shard.tensor.dtype], "shape": shard.slice.local, "data_offsets": (at, end)}
        at = end
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class MappedShards:
    """A file of shards mapped into memory; bytes are read from the disk when they are used. Raises OSError, ValueError."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a safetensors file: {error}") from error
        except RuntimeError as error:  # safetensors opens a file twice; torch, the second, says so where it was removed in between
            raise OSError(f"{path.name} can't be opened: {error}") from error

    def tensor(self, part: Slice) -> Tensor:
        """Return a slice's elements in order (one dim), read-only; raises ValueError where the file does not hold the slice."""
        try:
            flat: Tensor = self._file.get_tensor(part.key).reshape(-1)  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise ValueError(f"its file has no slice {part.key}") from error
        if len(flat) != part.count:
            raise ValueError(f"{part.key} has {len(flat)} elements in its file, not {part.count}")
        return flat


def file_sha256(path: Path, on_progress: OnProgress = ignore_text) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_BYTES))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            on_progress("hash")
    return digest.hexdigest()
