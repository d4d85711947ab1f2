"""Room for checkpoints on the disk: what one needs, what is free, and the removal of old ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ...rundir.checkpoints import checkpoint_steps, name_aside, step_path
from .find import verification_fault
from .publish import remove_checkpoint
from .slices import Shard
from .work_on_all_ranks import fault_text


def needed_bytes(shards: Iterable[Shard]) -> int:
    """Return the bytes that shards take on the disk, with a generous allowance for headers and the manifest."""
    return sum(shard.tensor.nbytes + 1024 + 4 * len(shard.slice.key) for shard in shards) + (64 << 10)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this process may still write there."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def frees_enough(folder: Path, older: list[int], needed: int) -> bool:
    """Return whether removing the checkpoints of these steps frees so many bytes; False where there are none."""
    held = sum(file.stat().st_size for step in older for file in step_path(folder, step).rglob("*") if file.is_file())
    return bool(older) and free_bytes(folder) + held >= needed


def remove_oldest(folder: Path, older: list[int], needed: int) -> list[int]:
    """Remove checkpoints, oldest first, until so many bytes are free; none if even all of them would not free enough.

    Return the steps removed.
    """
    removed: list[int] = []
    if not frees_enough(folder, older, needed):
        return removed
    for step in older:  # at least one is removed: free_bytes does not include quotas
        remove_checkpoint(step_path(folder, step))
        removed.append(step)
        if free_bytes(folder) >= needed:
            break
    return removed


def prune_checkpoints(folder: Path, newest: int, keep: int, checked: int | None = None) -> list[str]:
    """Remove all but the newest `keep` checkpoints (at least one) up to step `newest`, which was just saved, and the newest up to step
    `checked`. Return what failed.

    A checkpoint whose files do not have the recorded sizes does not count as kept. Those newer than `newest` did not verify when the run
    resumed from an older one. No run may go on from one that verifies again: where the sizes are right it is set aside, else removed.
    """
    notes = []
    kept, has_checked = 1, checked is None or newest <= checked
    for step in checkpoint_steps(folder):
        path = step_path(folder, step)
        if step == newest:
            continue
        if step > newest and not verification_fault(path, quick=True):
            notes.append(_set_aside(path))
            continue
        is_checked = checked is not None and step <= checked
        if step < newest and (kept < keep or (is_checked and not has_checked)) and not verification_fault(path, quick=True):
            kept, has_checked = kept + 1, has_checked or is_checked
            continue
        try:
            remove_checkpoint(path)
        except OSError as error:
            notes.append(f"{path.name} could not be removed: {fault_text(error)}")
    return notes


def _set_aside(path: Path) -> str:
    """Rename a checkpoint so that no run resumes from it; return a note."""
    try:
        aside = name_aside(path)
        path.rename(aside)
    except OSError as error:
        return f"{path.name}, which did not verify, could not be renamed: {fault_text(error)}"
    return f"{path.name} did not verify when the run began from an older one, and is set aside as {aside.name}"
