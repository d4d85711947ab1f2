"""A model of one weight in checkpoints: what a step saves, and what is read of it."""

import os
from pathlib import Path
from typing import Any

import torch

from distrain.trainer.loop.checkpoint import (
    CheckpointSearch,
    SavedCheckpoint,
    SaveResult,
    Shard,
    read_slices,
    save_shards,
    whole_slice,
)

PART = whole_slice("layers.0.weight", "weight", (50, 20))
WEIGHTS = {"layers.0.weight": (50, 20)}
WEIGHT, MANIFEST = "weight.0.0.safetensors", "manifest.json"  # files


def shards(step: int, elements: int = 1000) -> list[Shard]:
    """A model of one weight, whose elements all equal the step."""
    shape = (elements // 20, 20)
    return [
        Shard(slice=whole_slice("layers.0.weight", kind, shape), tensor=torch.full(shape, float(step))) for kind in ("weight", "exp_avg")
    ]


def save(folder: Path, step: int, *, keep: int = 9, elements: int = 1000, **extra: Any) -> SaveResult:
    return save_shards(folder, step, shards(step, elements), extra=extra, keep=keep)


def checkpoint(found: CheckpointSearch) -> SavedCheckpoint:
    assert found.checkpoint, found.passed
    return found.checkpoint


def value(found: SavedCheckpoint) -> float:
    """The value of every element of its weight."""
    (number,) = next(read_slices(found, [PART]))[1].unique()
    return float(number)


def hidden_files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def cut_short(path: Path) -> None:
    """Cut the last byte off a file."""
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
