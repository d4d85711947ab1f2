"""A checkpoint's `manifest.json`: every file with its size and hash, every tensor with its slices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...rundir.checkpoints import MANIFEST, BrokenCheckpoint, read_sealed, seal
from .shard_file import ShardFile
from .slices import Sizes, Slice, coverage_fault

MANIFEST_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StoredSlice:
    """A slice of a tensor, and the file that holds it under the slice's key."""

    file: str
    offset: Sizes
    size: Sizes
    flat: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """A tensor as it is stored, in slices."""

    name: str
    kind: str
    dtype: str  # torch's name: float32
    shape: Sizes
    slices: tuple[StoredSlice, ...]

    def slice(self, stored: StoredSlice) -> Slice:
        """Return one of its slices with the tensor's name, kind and shape."""
        return Slice(name=self.name, kind=self.kind, shape=self.shape, offset=stored.offset, size=stored.size, flat=stored.flat)

    def fault(self) -> str:
        """Return why the slices do not cover each element once; "" where they do."""
        return coverage_fault(map(self.slice, self.slices))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint; `extra` (JSON) is what the run records besides tensors."""

    version: Literal[1] = 1
    step: int
    extra: dict[str, Any]
    files: dict[str, ShardFile]
    tensors: tuple[TensorRecord, ...]

    def rows(self) -> Mapping[tuple[str, str], TensorRecord]:
        """Return the tensors by name and kind."""
        return {(row.name, row.kind): row for row in self.tensors}


def tensor_records(stored: Iterable[tuple[Slice, str, str]]) -> tuple[TensorRecord, ...]:
    """Return the tensors in (slice, dtype, file) of all ranks; raises ValueError where they contradict each other or are incomplete."""
    found: dict[tuple[str, str], tuple[Sizes, str, list[StoredSlice]]] = {}
    for part, dtype, file in stored:
        shape, known, slices = found.setdefault((part.name, part.kind), (part.shape, dtype, []))
        if (shape, known) != (part.shape, dtype):
            raise ValueError(f"{part.name} ({part.kind}) is {known} {shape} in {slices[0].file} and {dtype} {part.shape} in {file}")
        slices.append(StoredSlice(file=file, offset=part.offset, size=part.size, flat=part.flat))
    records = tuple(
        TensorRecord(name=name, kind=kind, dtype=dtype, shape=shape, slices=tuple(slices))
        for (name, kind), (shape, dtype, slices) in found.items()
    )
    for row in records:
        if fault := row.fault():
            raise ValueError(f"{row.name} ({row.kind}): {fault}")
    return records


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, its own hash first, one tensor a line; raises ValueError where `extra` is not JSON."""
    extra = json.dumps(manifest.extra, allow_nan=False).encode()
    tensors = b",\n".join(map(msgspec.json.encode, manifest.tensors))
    rest = b'"version":%d,"step":%d,\n"extra":%b,\n"files":%b,\n"tensors":[\n%b\n]}\n' % (
        MANIFEST_VERSION,
        manifest.step,
        extra,
        msgspec.json.encode(manifest.files),
        tensors,
    )
    return seal(rest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a checkpoint's folder; raises BrokenCheckpoint where it is absent or damaged."""
    try:
        manifest = msgspec.json.decode(read_sealed(folder), type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{MANIFEST} is of another version of this format: {error}") from error
    if outside := [name for name in manifest.files if Path(name).name != name]:
        raise BrokenCheckpoint(f"{MANIFEST} names a file outside of its folder: {outside[0]}")
    return manifest
