"""Saving a checkpoint: every rank writes what it owns into one hidden folder, which gets its name when all of it is on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...launch.rank.channel import Pulse, hush
from ...rundir.checkpoints import MANIFEST, step_path, steps
from . import manifest as manifests
from .agreement import Gather, SaveFailed, alone, together, words
from .find import fault, newest
from .folder import beside, clear, latest, make, point, publish, remove, sweep, sync, write_synced
from .manifest import Manifest
from .save_times import Clock, slowest
from .shard_file import File, write
from .slices import Shard, Slice

PART = 4 << 30  # bytes after which a rank begins another file, so that files can be hashed beside one another


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is in place: its bytes, and the seconds of each part on the rank that was slowest in it.

    Parts: check, copy (to the host), write, hash (beside write), sync, publish, remove, and total. `fresh` is False where
    a verified checkpoint of this step was there and nothing was written. `notes` (on rank 0) say which
    older checkpoint would not go, or had to make room.
    """

    path: Path
    step: int
    bytes: int
    seconds: Mapping[str, float]
    fresh: bool = True
    notes: tuple[str, ...] = ()


def save(
    folder: Path,
    step: int,
    shards: Iterable[Shard],
    *,
    extra: Mapping[str, Any],
    keep: int,
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
    pulse: Pulse = hush,
) -> Saved:
    """Save a step; every rank calls this, each with the shards that it alone owns. `extra` (JSON, finite) is taken from rank 0.

    The shards of all ranks make up every tensor, each element once: of a replicated tensor one rank hands in a shard.
    Afterwards the newest `keep` checkpoints are there. Raises SaveFailed on all ranks where anything goes wrong on one:
    nothing is left of it then, what was saved before still stands, and training may go on. Only where the disk is full, the
    oldest checkpoints make room, never the newest that verifies. `pulse` is told what goes on: "hash", "write", "publish".
    """
    owned, notes = list[Shard](), tuple[str, ...]()
    attempt = _Attempt(folder=folder, step=step, rank=rank, world=world, gather=gather, pulse=pulse, clock=Clock(), owned=owned)
    try:
        try:
            return attempt.run(shards, dict(extra), keep)
        except SaveFailed as error:
            notes = attempt.make_room() if error.room else ()
            if not notes:
                raise
        return replace(attempt, owned=[]).run(owned, dict(extra), keep, notes)
    except SaveFailed as error:
        raise SaveFailed("; ".join((f"step {step} was not saved: {error}", *notes))) from error


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """One attempt of one rank to save a step."""

    folder: Path
    step: int
    rank: int
    world: int
    gather: Gather
    pulse: Pulse
    clock: Clock
    owned: list[Shard]  # what this rank writes, once it has been looked at

    def run(self, shards: Iterable[Shard], extra: dict[str, Any], keep: int, notes: Sequence[str] = ()) -> Saved:
        path = step_path(self.folder, self.step)
        temporary = beside(path, "tmp")
        with _undone(temporary if self.rank == 0 else None):
            opening = self._all("check", lambda: self._begin(path, temporary, shards, extra))
            if len(opening) != self.world:
                raise ValueError(f"{len(opening)} ranks of {self.world} are saving: gather must reach all of them")
            if opening[0]["there"]:
                return self._saved(path, fresh=False)
            self._room(opening)
            temporary = self.folder / opening[0]["temporary"]
            written = self._all(None, lambda: self._write(temporary))
            self._all("publish", lambda: self._publish(temporary, path, written, extra))
        with self.clock.part("remove"):
            notes = [*notes, *(self._prune(keep) if self.rank == 0 else [])]
        return self._saved(path, size=sum(file["bytes"] for each in written for file in each["files"].values()), notes=notes)

    def make_room(self) -> tuple[str, ...]:
        """Remove as many of the oldest checkpoints as this step wants the room of, if it then has that, and say which."""
        wanted = sum(together(self.gather, lambda: _room_for(self.owned)))
        if not together(self.gather, lambda: _would_do(self.folder, steps(self.folder)[1:], wanted))[0]:
            return ()
        kept = newest(self.folder, rank=self.rank, world=self.world, gather=self.gather, pulse=self.pulse).checkpoint
        older = [step for step in reversed(steps(self.folder)) if kept and step < kept.step]
        gone = together(self.gather, lambda: _freed(self.folder, older, wanted) if self.rank == 0 else [])[0]
        return tuple(f"step_{step} was removed to make room" for step in gone)

    def _all(self, part: str | None, work: Callable[[], Any]) -> list[Any]:
        """What the work gave on each rank; its time counts for a part where it is none of its own."""
        if part is None:
            return together(self.gather, work)
        with self.clock.part(part):
            return together(self.gather, work)

    def _begin(self, path: Path, temporary: Path, shards: Iterable[Shard], extra: dict[str, Any]) -> dict[str, Any]:
        """Look at what is to be written; rank 0 tidies up, makes the folder and sees how much room there is."""
        self.owned.extend(map(_checked, shards))
        said: dict[str, Any] = {"bytes": _room_for(self.owned)}
        if self.rank == 0:
            json.dumps(extra, allow_nan=False)
            make(self.folder)
            sweep(self.folder)
            said["there"] = path.exists() and not fault(path, pulse=self.pulse)
            said["free"] = _free(self.folder)
            said["temporary"] = temporary.name
            if not said["there"]:
                temporary.mkdir()
            elif latest(self.folder) != path:
                point(path)
        return said

    def _room(self, opening: list[dict[str, Any]]) -> None:
        wanted, free = sum(each["bytes"] for each in opening), opening[0]["free"]
        if wanted > free:
            raise SaveFailed(f"{_amount(wanted)} are needed in {self.folder} and {_amount(free)} are free", room=True)

    def _write(self, folder: Path) -> dict[str, Any]:
        """Write this rank's files; what they are and which holds which slice, as JSON."""
        files: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        for name, shards in parts(self.rank, self.owned):
            file = write(folder / name, shards, self.clock, self.pulse)
            files[name] = vars(file)
            rows += [{"slice": vars(each.slice), "dtype": str(each.tensor.dtype).removeprefix("torch."), "file": name} for each in shards]
        return {"files": files, "rows": rows}

    def _publish(self, temporary: Path, path: Path, written: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        if self.rank:
            return
        self.pulse("publish")
        stored = [(msgspec.convert(row["slice"], Slice), row["dtype"], row["file"]) for each in written for row in each["rows"]]
        files = {name: File(**file) for each in written for name, file in each["files"].items()}
        manifest = Manifest(step=self.step, extra=extra, files=files, tensors=manifests.rows(stored))
        write_synced(temporary / MANIFEST, manifests.encode(manifest))
        sync(temporary)
        publish(temporary, path)

    def _prune(self, keep: int) -> list[str]:
        """The new checkpoint stands by now, so what goes wrong here is a note."""
        try:
            return prune(self.folder, self.step, keep)
        except OSError as error:
            return [f"older checkpoints could not be looked at: {words(error)}"]

    def _saved(self, path: Path, *, size: int = 0, fresh: bool = True, notes: Iterable[str] = ()) -> Saved:
        clocks = [json.loads(line) for line in self.gather(json.dumps(self.clock.seconds()))]
        return Saved(path=path, step=self.step, bytes=size, seconds=slowest(clocks), fresh=fresh, notes=tuple(notes))


@contextmanager
def _undone(temporary: Path | None) -> Iterator[None]:
    """Where what is inside fails, nothing is left of the temporary folder."""
    try:
        yield
    except BaseException:
        if temporary:
            clear(temporary)
        raise


def _checked(shard: Shard) -> Shard:
    if shard.slice.kind == "weight" and shard.tensor.dtype not in (torch.float32, torch.float64):
        raise SaveFailed(f"{shard.slice.name} is {shard.tensor.dtype}, and weights are stored as float32")
    return shard


def _room_for(shards: list[Shard]) -> int:
    """Bytes that shards take on the disk, with what headers and the manifest say of them (generously)."""
    return sum(shard.tensor.nbytes + 1024 + 4 * len(shard.slice.key) for shard in shards) + (64 << 10)


def _free(folder: Path) -> int:
    """Bytes that this process may still write there."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _would_do(folder: Path, older: list[int], wanted: int) -> bool:
    """Whether so many bytes are free once the checkpoints of these steps, of which there are some, are gone."""
    held = sum(file.stat().st_size for step in older for file in step_path(folder, step).rglob("*") if file.is_file())
    return bool(older) and _free(folder) + held >= wanted


def _freed(folder: Path, older: list[int], wanted: int) -> list[int]:
    """Remove checkpoints, oldest first, until so many bytes are free; none where all of them would not do. The steps removed."""
    gone: list[int] = []
    if not _would_do(folder, older, wanted):
        return gone
    for step in older:  # one at least: a quota is not seen in what is free
        remove(step_path(folder, step))
        gone.append(step)
        if _free(folder) >= wanted:
            break
    return gone


def _amount(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def parts(rank: int, owned: Iterable[Shard], most: int = PART) -> Iterator[tuple[str, list[Shard]]]:
    """A rank's shards by file, `weight.RANK.0.safetensors`: one kind in each, and no more than `most` bytes unless one shard has."""
    for kind, shards in groupby(sorted(owned, key=lambda shard: shard.slice.kind), key=lambda shard: shard.slice.kind):
        part: list[Shard] = []
        index = size = 0
        for shard in shards:
            if part and size + shard.tensor.nbytes > most:
                yield f"{kind}.{rank}.{index}.safetensors", part
                part, index, size = [], index + 1, 0
            part.append(shard)
            size += shard.tensor.nbytes
        yield f"{kind}.{rank}.{index}.safetensors", part


def prune(folder: Path, newest: int, keep: int) -> list[str]:
    """Remove all but `keep` checkpoints (at least one) up to step `newest`, which was just saved; says what would not go.

    A checkpoint whose files are not there in their sizes does not count as one that is kept. Newer ones than `newest` are
    broken, or the run would have gone on from them: each gives way when its step is saved again.
    """
    notes = []
    kept = 1
    for step in steps(folder):
        path = step_path(folder, step)
        if step >= newest:
            continue
        if kept < keep and not fault(path, quick=True):
            kept += 1
            continue
        try:
            remove(path)
        except OSError as error:
            notes.append(f"{path.name} could not be removed: {words(error)}")
    return notes
