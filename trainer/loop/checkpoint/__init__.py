"""Checkpoints: safetensors shards keyed by logical name and offset, and a manifest; there or not there, whole or passed over."""

from __future__ import annotations

from ...rundir.checkpoints import Broken
from .agreement import Gather, SaveFailed, alone, over
from .find import Checkpoint, Found, newest, opened
from .folder import latest, sweep
from .load import LoadFailed, Reader, load
from .resume import resume
from .save import Saved, save
from .slices import Shard, Slice, block, whole

__all__ = [
    "Broken",
    "Checkpoint",
    "Found",
    "Gather",
    "LoadFailed",
    "Reader",
    "SaveFailed",
    "Saved",
    "Shard",
    "Slice",
    "alone",
    "block",
    "latest",
    "load",
    "newest",
    "opened",
    "over",
    "resume",
    "save",
    "sweep",
    "whole",
]
