"""Edits of a checkpoint's manifest: of what it records about the run that saved it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distrain.trainer.loop.checkpoint.manifest import encode_manifest, read_manifest


def edit_extra(checkpoint: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change what a checkpoint's manifest records besides tensors, and write it with a new hash."""
    manifest = read_manifest(checkpoint)
    edit(manifest.extra)
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))


def drop_record(checkpoint: Path) -> None:
    """Make a checkpoint look like one of an earlier version, whose manifest does not record the run."""
    edit_extra(checkpoint, lambda extra: extra.pop("run"))
