"""Saving a checkpoint: all ranks write into one hidden folder, which is renamed once everything is on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...launch.rank.channel import OnProgress, ignore_text
from ...rundir.checkpoints import MANIFEST, MOST_BYTES, checkpoint_steps, step_path
from ...spec.numbers.as_text import size_text
from .find import find_newest, open_checkpoint, verification_fault
from .manifest import Manifest, encode_manifest, tensor_records
from .publish import (
    hidden_name,
    latest_checkpoint,
    make_folder,
    point_latest,
    publish_checkpoint,
    remove_files,
    remove_leftovers,
    sync_folder,
    write_synced,
)
from .retention import free_bytes, frees_enough, needed_bytes, prune_checkpoints, remove_oldest
from .save_timers import SaveTimers, slowest_parts
from .shard_file import ShardFile, write_shards
from .slices import Shard, Slice
from .work_on_all_ranks import Gather, SaveFailed, fault_text, gather_alone, run_on_all_ranks

MAX_FILE_BYTES = 4 << 30  # after which a rank starts another file: files are hashed in parallel


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """A complete checkpoint: its bytes, and the seconds of each part on the rank that took longest for it.

    Parts: check, copy (to the host), write, hash (overlaps write), sync, publish, remove, and total. `fresh` is False where
    a verified checkpoint of this step existed and nothing was written. `notes` (on rank 0) name older checkpoints that could not be
    removed, or were removed to make room.
    """

    path: Path
    step: int
    bytes: int
    seconds: Mapping[str, float]
    fresh: bool = True
    notes: tuple[str, ...] = ()


def save_shards(
    folder: Path,
    step: int,
    shards: Iterable[Shard],
    *,
    extra: Mapping[str, Any],
    keep: int,
    checked: int | None = None,
    rank: int = 0,
    world: int = 1,
    gather: Gather = gather_alone,
    collect: Gather | None = None,
    on_progress: OnProgress = ignore_text,
) -> SaveResult:
    """Save the state after a step; all ranks call this together, each with its own shards. `extra` (JSON, finite) is rank 0's. `collect`
    gathers on rank 0 alone what only it needs (None: as `gather` does): of thousands of ranks, millions of slices.

    The shards of all ranks hold every element of every tensor once: of a replicated tensor one rank passes a shard. Afterwards the
    newest `keep` checkpoints exist, and the newest up to step `checked`, that of the last good check of the devices. Raises SaveFailed
    on all ranks where anything fails on one: nothing of this checkpoint is left, earlier ones are intact, and training may go on. If the
    disk is full, the oldest checkpoints are removed to make room, but never the newest that verifies. `on_progress` is called with the
    current part: "hash", "write", "publish".
    """
    owned, notes = list[Shard](), tuple[str, ...]()
    common: dict[str, Any] = {"folder": folder, "step": step, "rank": rank, "world": world, "gather": gather, "on_progress": on_progress}
    common["collect"] = collect or gather
    first = _Save(**common, timers=SaveTimers(), owned=owned)
    try:
        try:
            return first.run(shards, dict(extra), keep, checked)
        except SaveFailed as error:
            notes = first.make_room() if error.room else ()
            if not notes:
                raise
        return replace(first, owned=[]).run(owned, dict(extra), keep, checked, notes)
    except SaveFailed as error:
        raise SaveFailed("; ".join((f"step {step} was not saved: {error}", *notes))) from error


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that a rank has written, by its name, and the slices in it, each with torch's name of its dtype."""

    name: str
    file: ShardFile
    slices: list[tuple[Slice, str]]


@dataclass(frozen=True, kw_only=True)
class _Save:
    """One try of one rank to save a step."""

    folder: Path
    step: int
    rank: int
    world: int
    gather: Gather
    collect: Gather
    on_progress: OnProgress
    timers: SaveTimers
    owned: list[Shard]  # the shards that this rank writes, filled as they are checked

    def run(self, shards: Iterable[Shard], extra: dict[str, Any], keep: int, checked: int | None, notes: Sequence[str] = ()) -> SaveResult:
        """Check, write and publish, then remove old checkpoints."""
        path = step_path(self.folder, self.step)
        temporary = hidden_name(path, "tmp")
        with _remove_on_failure(temporary if self.rank == 0 else None):
            with self.timers.time_part("check"):
                checks = self._run_on_all_ranks(lambda: self._prepare(path, temporary, shards, extra))
            if len(checks) != self.world:
                raise ValueError(f"{len(checks)} ranks of {self.world} are saving: gather must reach all of them")
            if checks[0]["exists"]:
                return self._result(path, fresh=False)
            self._check_room(checks)
            temporary = self.folder / checks[0]["temporary"]
            own = list[WrittenFile]()
            sizes = self._run_on_all_ranks(lambda: self._write(temporary, own))
            with self.timers.time_part("publish"):
                lines = self.collect(msgspec.json.encode(own).decode())
                self._run_on_all_ranks(lambda: self._publish(temporary, path, lines, extra))
        with self.timers.time_part("remove"):
            notes = [*notes, *(self._prune(keep, checked) if self.rank == 0 else [])]
        return self._result(path, size=sum(sizes), notes=notes)

    def make_room(self) -> tuple[str, ...]:
        """Remove as many of the oldest checkpoints as this one needs room, if that is enough. Return a note for each."""
        needed = sum(self._run_on_all_ranks(lambda: needed_bytes(self.owned)))
        if not self._run_on_all_ranks(lambda: frees_enough(self.folder, checkpoint_steps(self.folder)[1:], needed))[0]:
            return ()
        kept = find_newest(self.folder, rank=self.rank, world=self.world, gather=self.gather, on_progress=self.on_progress).checkpoint
        steps = self._run_on_all_ranks(lambda: checkpoint_steps(self.folder))[0]
        older = [step for step in reversed(steps) if kept and step < kept.step]
        removed = self._run_on_all_ranks(lambda: remove_oldest(self.folder, older, needed) if self.rank == 0 else [])[0]
        return tuple(f"step_{step} was removed to make room" for step in removed)

    def _run_on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        return run_on_all_ranks(self.gather, work)

    def _prepare(self, path: Path, temporary: Path, shards: Iterable[Shard], extra: dict[str, Any]) -> dict[str, Any]:
        """Check this rank's shards; on rank 0 clean the folder up, create the temporary one and measure the room."""
        self.owned.extend(map(_check_dtype, shards))
        check: dict[str, Any] = {"bytes": needed_bytes(self.owned)}
        if self.rank == 0:
            json.dumps(extra, allow_nan=False)
            make_folder(self.folder)
            remove_leftovers(self.folder)
            check["exists"] = self._is_saved(path, extra)
            check["free"] = free_bytes(self.folder)
            check["temporary"] = temporary.name
            if not check["exists"]:
                temporary.mkdir()
            elif latest_checkpoint(self.folder) != path:
                point_latest(path)
        return check

    def _is_saved(self, path: Path, extra: dict[str, Any]) -> bool:
        """Whether a checkpoint of this step verifies and is of the same run: one that was passed over may be of an attempt that trained
        otherwise."""
        if not path.exists() or verification_fault(path, on_progress=self.on_progress):
            return False
        return bool(open_checkpoint(path).extra == json.loads(json.dumps(extra)))

    def _check_room(self, checks: list[dict[str, Any]]) -> None:
        needed, free = sum(each["bytes"] for each in checks), checks[0]["free"]
        if needed > free:
            raise SaveFailed(f"{size_text(needed)} are needed in {self.folder} and {size_text(free)} are free", room=True)

    def _write(self, folder: Path, own: list[WrittenFile]) -> int:
        """Write this rank's files, and add what each holds to `own`. Return their bytes."""
        for name, shards in shards_by_file(self.rank, self.owned):
            file = write_shards(folder / name, shards, self.timers, self.on_progress)
            rows = [(each.slice, str(each.tensor.dtype).removeprefix("torch.")) for each in shards]
            own.append(WrittenFile(name=name, file=file, slices=rows))
        return sum(each.file.bytes for each in own)

    def _publish(self, temporary: Path, path: Path, lines: Sequence[str], extra: dict[str, Any]) -> None:
        """On rank 0, write the manifest of what all ranks have written, a line each, and give the folder its name."""
        if self.rank:
            return
        written = list[WrittenFile]()
        for line in lines:
            self.on_progress("publish")
            written += msgspec.json.decode(line, type=list[WrittenFile])
        stored = ((part, dtype, each.name) for each in written for part, dtype in each.slices)
        manifest = Manifest(step=self.step, extra=extra, files={each.name: each.file for each in written}, tensors=tensor_records(stored))
        self.on_progress("publish")
        text = encode_manifest(manifest)
        if len(text) > MOST_BYTES:
            raise SaveFailed(f"its {MANIFEST} would take {size_text(len(text))}, of which at most {size_text(MOST_BYTES)} are read")
        write_synced(temporary / MANIFEST, text)
        sync_folder(temporary)
        publish_checkpoint(temporary, path)

    def _prune(self, keep: int, checked: int | None) -> list[str]:
        """Remove old checkpoints. Return notes of what failed: the new checkpoint is complete already."""
        try:
            return prune_checkpoints(self.folder, self.step, keep, checked)
        except OSError as error:
            return [f"older checkpoints could not be listed: {fault_text(error)}"]

    def _result(self, path: Path, *, size: int = 0, fresh: bool = True, notes: Iterable[str] = ()) -> SaveResult:
        durations = [json.loads(line) for line in self.gather(json.dumps(self.timers.seconds()))]
        return SaveResult(path=path, step=self.step, bytes=size, seconds=slowest_parts(durations), fresh=fresh, notes=tuple(notes))


@contextmanager
def _remove_on_failure(temporary: Path | None) -> Iterator[None]:
    """Remove the temporary folder if the block raises."""
    try:
        yield
    except BaseException:
        if temporary:
            remove_files(temporary)
        raise


def _check_dtype(shard: Shard) -> Shard:
    if shard.slice.kind == "weight" and shard.tensor.dtype not in (torch.float32, torch.float64):
        raise SaveFailed(f"{shard.slice.name} is {shard.tensor.dtype}, and weights are stored as float32")
    return shard


def shards_by_file(rank: int, owned: Iterable[Shard], most: int = MAX_FILE_BYTES) -> Iterator[tuple[str, list[Shard]]]:
    """Yield a rank's shards by file, `weight.RANK.0.safetensors`: one kind a file, and at most `most` bytes unless one shard has more."""
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
