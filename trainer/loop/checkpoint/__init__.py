"""Checkpoints: safetensors shards keyed by logical name and offset, and a manifest; an incomplete one is passed over."""

from __future__ import annotations

from ...rundir.checkpoints import BrokenCheckpoint
from .background_writer import BackgroundWriter
from .choose_checkpoint import choose_checkpoint
from .find import CheckpointSearch, SavedCheckpoint, find_newest, open_checkpoint
from .load import CheckpointReader, LoadFailed, read_slices
from .publish import latest_checkpoint, remove_leftovers
from .save import SaveResult, save_shards
from .slices import Shard, Slice, block_slice, whole_slice
from .work_on_all_ranks import Gather, SaveFailed, collect_over, gather_alone, gather_over

__all__ = [
    "BackgroundWriter",
    "BrokenCheckpoint",
    "CheckpointReader",
    "CheckpointSearch",
    "Gather",
    "LoadFailed",
    "SaveFailed",
    "SaveResult",
    "SavedCheckpoint",
    "Shard",
    "Slice",
    "block_slice",
    "choose_checkpoint",
    "collect_over",
    "find_newest",
    "gather_alone",
    "gather_over",
    "latest_checkpoint",
    "open_checkpoint",
    "read_slices",
    "remove_leftovers",
    "save_shards",
    "whole_slice",
]
