"""One file of shards in the safetensors format: written in one pass that hashes what it writes, read through a memory map."""

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

from ...launch.rank.channel import Pulse, hush
from .save_times import Clock
from .slices import Shard, Slice

# fmt: off
DTYPES = {
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
CHUNK = 16 << 20  # bytes that are hashed and written at a time
HASHED = 1 << 20  # bytes that are read and hashed at a time
SYNCED = 256 << 20  # bytes after which what was written is put on the disk: so it is known to get on


@dataclass(frozen=True, kw_only=True)
class File:
    """A file as it was written: its size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def write(path: Path, shards: Iterable[Shard], clock: Clock, pulse: Pulse = hush) -> File:
    """Write shards to a new file, synced to the disk; raises OSError, and ValueError for a dtype or a doubled slice."""
    ordered = sorted(shards, key=lambda shard: -shard.tensor.element_size())  # keeps every tensor aligned
    digest, size, waiting = hashlib.sha256(), 0, 0
    with path.open("xb") as file, ThreadPoolExecutor(1) as hasher:
        for piece in _bytes(ordered, clock):
            hashed = hasher.submit(_hash, digest, piece, clock)
            with clock.part("write"):
                file.write(piece)
            hashed.result()
            size, waiting = size + len(piece), waiting + len(piece)
            if waiting >= SYNCED:
                with clock.part("sync"):
                    _sync(file)
                waiting = 0
            pulse("write")
        with clock.part("sync"):
            _sync(file)
    return File(bytes=size, sha256=digest.hexdigest())


def _hash(digest: hashlib._Hash, piece: bytes | memoryview, clock: Clock) -> None:
    with clock.part("hash"):
        digest.update(piece)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes(shards: list[Shard], clock: Clock) -> Iterator[bytes | memoryview]:
    yield _header(shards)
    for shard in shards:
        flat = shard.tensor.detach().reshape(-1)
        for start in range(0, len(flat), CHUNK // flat.element_size()):
            with clock.part("copy"):
                piece = flat[start : start + CHUNK // flat.element_size()].to("cpu").contiguous()
            # one element may be called contiguous under any stride, and its bytes then can't be viewed
            yield piece.as_strided(piece.shape, (1,)).view(torch.uint8).numpy().data


def _header(shards: list[Shard]) -> bytes:
    """Eight bytes of length, then JSON padded to a multiple of eight (https://github.com/huggingface/safetensors#format)."""
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for shard in shards:
        if shard.slice.key in rows or shard.tensor.dtype not in DTYPES:
            raise ValueError(
                f"{shard.slice.key} ({shard.slice.kind}) is {'there twice' if shard.slice.key in rows else shard.tensor.dtype}"
            )
        end = at + shard.tensor.nbytes
        rows[shard.slice.key] = {"dtype": DTYPES[shard.tensor.dtype], "shape": shard.slice.local, "data_offsets": (at, end)}
        at = end
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Mapped:
    """A file of shards open for reading; bytes are read from the disk when a tensor's are used. Raises OSError, ValueError."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path.name} is no safetensors file: {error}") from error

    def tensor(self, part: Slice) -> Tensor:
        """A slice's elements in order (one dim), not to be written to; raises ValueError where the file has no such slice."""
        try:
            flat: Tensor = self._file.get_tensor(part.key).reshape(-1)  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise ValueError(f"no slice {part.key} is in its file") from error
        if len(flat) != part.count:
            raise ValueError(f"{part.key} has {len(flat)} elements in its file, not {part.count}")
        return flat


def sha256(path: Path, pulse: Pulse = hush) -> str:
    """A file's SHA-256, read as a stream."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASHED))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            pulse("hash")
    return digest.hexdigest()
