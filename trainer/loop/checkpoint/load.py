"""Reads any slices of a checkpoint's tensors from the stored slices; the two layouts may differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .find import SavedCheckpoint
from .manifest import TensorRecord
from .shard_file import MappedShards
from .slices import Slice, copy_overlap, may_overlap


class LoadFailed(Exception):
    """A checkpoint can't be loaded as requested, for the reason given in one sentence."""


class CheckpointReader:
    """A checkpoint open for reading; each file is opened, and each tensor checked, when it is first read."""

    def __init__(self, checkpoint: SavedCheckpoint) -> None:
        self._path, self.step = checkpoint.path, checkpoint.step
        self._stored = checkpoint.manifest.rows()
        self._complete: set[tuple[str, str]] = set()
        self._files: dict[str, MappedShards] = {}

    def read(self, part: Slice) -> Tensor:
        """Return a new CPU tensor of the slice's shape (`Slice.local`) and stored dtype; only the bytes that it needs are read.

        Raises LoadFailed where the tensor is absent, has another shape, or is not stored completely.
        """
        row = self._row(part)
        flat = torch.empty(part.count, dtype=getattr(torch, row.dtype))
        for file, stored in self._sources(part, row):
            try:
                copy_overlap(flat, part, self._file(file).tensor(stored), stored)
            except ValueError as error:
                raise LoadFailed(f"{self._path.name}/{file}: {error}") from error
        return flat.view(part.local)

    def holds(self, part: Slice) -> bool:
        """Return whether anything of a slice's tensor is stored."""
        return (part.name, part.kind) in self._stored

    def open(self, part: Slice) -> None:
        """Check a slice and open its files, so that `read` works even if the checkpoint is removed; raises LoadFailed."""
        for file, _ in self._sources(part, self._row(part)):
            self._file(file)

    def _row(self, part: Slice) -> TensorRecord:
        row, where = self._stored.get((part.name, part.kind)), self._path.name
        if row is None:
            raise LoadFailed(f"{where} holds no {part.kind} of {part.name}")
        if row.shape != part.shape:
            raise LoadFailed(f"{part.name} ({part.kind}) is {shape_text(row.shape)} in {where}, not {shape_text(part.shape)}")
        if (row.name, row.kind) not in self._complete:
            if fault := row.fault():
                raise LoadFailed(f"{part.name} ({part.kind}) in {where}: {fault}")
            self._complete.add((row.name, row.kind))
        return row

    def _sources(self, part: Slice, row: TensorRecord) -> Iterator[tuple[str, Slice]]:
        """Yield (file, stored slice) that may overlap a slice."""
        slices = ((each.file, row.slice(each)) for each in row.slices)
        return ((file, stored) for file, stored in slices if may_overlap(part, stored))

    def _file(self, name: str) -> MappedShards:
        if name not in self._files:
            try:
                self._files[name] = MappedShards(self._path / name)
            except (OSError, ValueError) as error:
                raise LoadFailed(f"{self._path.name}/{name} can't be read: {error}") from error
        return self._files[name]


def read_slices(checkpoint: SavedCheckpoint, wanted: Iterable[Slice]) -> Iterator[tuple[Slice, Tensor]]:
    """Yield each wanted slice with its tensor (`CheckpointReader.read`), in order; each is read when the iterator reaches it.

    Raises LoadFailed before the first if any of them can't be read.
    """
    slices, reader = list(wanted), CheckpointReader(checkpoint)
    for part in slices:
        reader.open(part)
    return ((part, reader.read(part)) for part in slices)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text: `64 x 256`."""
    return " x ".join(map(str, shape)) if shape else "a single number"
