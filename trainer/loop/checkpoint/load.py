"""Any slices of a checkpoint's tensors, put together from those that are stored, whatever the layouts of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .find import Checkpoint
from .manifest import Row
from .shard_file import Mapped
from .slices import Slice, fill, near


class LoadFailed(Exception):
    """A checkpoint does not give what was asked of it, for the reason that its one sentence says."""


class Reader:
    """A checkpoint open for reading slice by slice; each file is opened, and each tensor checked, when it is first asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = checkpoint.path
        self._stored = checkpoint.manifest.rows()
        self._whole: set[tuple[str, str]] = set()
        self._files: dict[str, Mapped] = {}

    def read(self, part: Slice) -> Tensor:
        """A new CPU tensor of the slice's shape (`Slice.local`) and stored dtype; only the bytes that it needs are read.

        Raises LoadFailed where the tensor is not there, has another shape, or is not stored whole.
        """
        row = self._row(part)
        flat = torch.empty(part.count, dtype=getattr(torch, row.dtype))
        for file, stored in self._sources(part, row):
            try:
                fill(flat, part, self._file(file).tensor(stored), stored)
            except ValueError as error:
                raise LoadFailed(f"{self._path.name}/{file}: {error}") from error
        return flat.view(part.local)

    def open(self, part: Slice) -> None:
        """Check a slice and open its files, so that `read` finds them even if the checkpoint is removed; raises LoadFailed."""
        for file, _ in self._sources(part, self._row(part)):
            self._file(file)

    def _row(self, part: Slice) -> Row:
        row, where = self._stored.get((part.name, part.kind)), self._path.name
        if row is None:
            raise LoadFailed(f"{where} holds no {part.kind} of {part.name}")
        if row.shape != part.shape:
            raise LoadFailed(f"{part.name} ({part.kind}) is {times(row.shape)} in {where}, not {times(part.shape)}")
        if (row.name, row.kind) not in self._whole:
            if wrong := row.fault():
                raise LoadFailed(f"{part.name} ({part.kind}) in {where}: {wrong}")
            self._whole.add((row.name, row.kind))
        return row

    def _sources(self, part: Slice, row: Row) -> Iterator[tuple[str, Slice]]:
        """Files and the slices in them that may hold some of a slice."""
        slices = ((each.file, row.slice(each)) for each in row.slices)
        return ((file, stored) for file, stored in slices if near(part, stored))

    def _file(self, name: str) -> Mapped:
        if name not in self._files:
            try:
                self._files[name] = Mapped(self._path / name)
            except (OSError, ValueError) as error:
                raise LoadFailed(f"{self._path.name}/{name} can't be read: {error}") from error
        return self._files[name]


def load(checkpoint: Checkpoint, wanted: Iterable[Slice]) -> Iterator[tuple[Slice, Tensor]]:
    """Each wanted slice with its tensor (`Reader.read`), in the order asked, read when the iterator gets there.

    What is wrong with any of them raises LoadFailed before the first.
    """
    asked, reader = list(wanted), Reader(checkpoint)
    for part in asked:
        reader.open(part)
    return ((part, reader.read(part)) for part in asked)


def times(shape: tuple[int, ...]) -> str:
    """A shape as words: `64 x 256`."""
    return " x ".join(map(str, shape)) if shape else "a single number"
