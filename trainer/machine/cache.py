"""The cache of machine measurements: a file per key in the user's cache folder, so that hosts with a shared home keep their own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import DecodeError, Meta

from ..system.atomic_file import write_atomically

MOST_FILES = 64  # the oldest are removed first
OLD_FILE = "machine.json"  # of earlier versions, for all machines

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class GpuFacts(TypedDict):
    """A CUDA device; memory in bytes, units are multiprocessors."""

    name: str
    memory: Count
    units: Count
    bf16: bool


class LinkRates(TypedDict):
    """gloo between two processes: seconds per hop, bytes/s."""

    latency: Positive
    bandwidth: Positive


class LayerRates(TypedDict):
    """A CPU's FLOP/s in a layer's training (`layer_rates.py`): of linear layers, and of causal attention, forward and backward."""

    products: Positive
    attention: Positive


class CpuRates(TypedDict):
    """One core while all are busy: FLOP/s by precision, of one product and in a layer's training; bytes/s of a copy; seconds in which the
    host dispatches an operator."""

    cores: Count
    flops: dict[str, Positive]
    bandwidth: Positive
    dispatch: Positive
    layer: dict[str, LayerRates]
    link: LinkRates


class MachineFacts(TypedDict):
    """The result of a probe."""

    cuda: list[GpuFacts]
    cpu: CpuRates | None  # None: not measured, as on a machine with GPUs that has run nothing on its CPU


class CacheEntry(TypedDict):
    """Facts, the key they hold for, and the load per core from other work before they were measured."""

    key: dict[str, Any]
    load: float
    found: MachineFacts


def cache_folder() -> Path:
    """Return distrain's folder in the user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distrain"


def cache_file(key: Mapping[str, Any]) -> Path:
    """Return the file of a key; its name begins with the version of the probe."""
    name = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "machines" / f"{key['probe']}-{name}.json"


def read_entry(key: Mapping[str, Any]) -> CacheEntry | None:
    """Return the entry of a key; None where there is none that can be read."""
    from msgspec import json as decoder

    try:
        entry = decoder.decode(cache_file(key).read_bytes(), type=CacheEntry)
    except (OSError, DecodeError):
        return None
    return entry if entry["key"] == key else None


def write_entry(entry: CacheEntry) -> None:
    """Write an entry over the key's last one, and remove old files; raises OSError."""
    file = cache_file(entry["key"])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"{json.dumps(entry, indent=1)}\n".encode())
    _remove_old_files(file, entry["key"]["probe"])


def _remove_old_files(own: Path, probe: int) -> None:
    """Remove what earlier probes measured, and the oldest files beyond MOST_FILES; another process may do the same."""
    with suppress(OSError):
        (cache_folder() / OLD_FILE).unlink(missing_ok=True)
    others = [path for path in own.parent.iterdir() if path != own]
    old = [path for path in others if (version := path.name.partition("-")[0]).isdigit() and int(version) < probe]
    left = sorted((path for path in others if path not in old), key=_write_time, reverse=True)
    for path in (*old, *left[MOST_FILES - 1 :]):
        with suppress(OSError):
            path.unlink()


def _write_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
