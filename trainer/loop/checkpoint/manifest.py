"""A checkpoint's `manifest.json`: every file with its size and hash, every tensor with the slices that make it up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...rundir.checkpoints import MANIFEST, Broken, read_sealed, seal
from .shard_file import File
from .slices import Sizes, Slice, fault

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A slice and the file that holds it, under the slice's key."""

    file: str
    offset: Sizes
    size: Sizes
    flat: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tensor as it is stored."""

    name: str
    kind: str
    dtype: str  # float32
    shape: Sizes
    slices: tuple[Stored, ...]

    def slice(self, stored: Stored) -> Slice:
        """One of its slices by all of its names."""
        return Slice(name=self.name, kind=self.kind, shape=self.shape, offset=stored.offset, size=stored.size, flat=stored.flat)

    def fault(self) -> str:
        """Why the slices are not all of it, each element once; "" where they are."""
        return fault(map(self.slice, self.slices))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds; `extra` is what the run wants to know again (JSON)."""

    version: Literal[1] = 1
    step: int
    extra: dict[str, Any]
    files: dict[str, File]
    tensors: tuple[Row, ...]

    def rows(self) -> Mapping[tuple[str, str], Row]:
        """Tensors by name and kind."""
        return {(row.name, row.kind): row for row in self.tensors}


def rows(stored: Iterable[tuple[Slice, str, str]]) -> tuple[Row, ...]:
    """Tensors from (slice, dtype, file) of all ranks; raises ValueError where they disagree or are not all of a tensor."""
    found: dict[tuple[str, str], tuple[Sizes, str, list[Stored]]] = {}
    for part, dtype, file in stored:
        shape, known, slices = found.setdefault((part.name, part.kind), (part.shape, dtype, []))
        if (shape, known) != (part.shape, dtype):
            raise ValueError(f"{part.name} ({part.kind}) is {known} {shape} in {slices[0].file} and {dtype} {part.shape} in {file}")
        slices.append(Stored(file=file, offset=part.offset, size=part.size, flat=part.flat))
    made = tuple(
        Row(name=name, kind=kind, dtype=dtype, shape=shape, slices=tuple(slices)) for (name, kind), (shape, dtype, slices) in found.items()
    )
    for row in made:
        if wrong := row.fault():
            raise ValueError(f"{row.name} ({row.kind}): {wrong}")
    return made


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, one tensor a line, its own hash first; raises ValueError where `extra` is not JSON."""
    extra = json.dumps(manifest.extra, allow_nan=False).encode()
    tensors = b",\n".join(map(msgspec.json.encode, manifest.tensors))
    rest = b'"version":%d,"step":%d,\n"extra":%b,\n"files":%b,\n"tensors":[\n%b\n]}\n' % (
        VERSION,
        manifest.step,
        extra,
        msgspec.json.encode(manifest.files),
        tensors,
    )
    return seal(rest)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder; raises Broken where it is not there or not as it was written."""
    try:
        manifest = msgspec.json.decode(read_sealed(folder), type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken(f"{MANIFEST} is of another version of this format: {error}") from error
    if odd := [name for name in manifest.files if Path(name).name != name]:
        raise Broken(f"{MANIFEST} names a file outside of its folder: {odd[0]}")
    return manifest
