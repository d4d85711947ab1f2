"""Checkpoints whose manifests say something else of the run that saved them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distrain.trainer.loop.checkpoint import manifest as manifests


def edit_extra(checkpoint: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change what a checkpoint's manifest keeps beside its tensors, and seal it again."""
    manifest = manifests.read(checkpoint)
    edit(manifest.extra)
    (checkpoint / "manifest.json").write_bytes(manifests.encode(manifest))


def drop_record(checkpoint: Path) -> None:
    """Make a checkpoint one of an earlier version, whose manifest names no run."""
    edit_extra(checkpoint, lambda extra: extra.pop("run"))
