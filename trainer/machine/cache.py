"""What was measured of machines: a file for each key below the user's cache folder, so that hosts that share a home keep their own."""

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

KEPT = 64  # files; the oldest go first
OLD_FILE = "machine.json"  # the one file of all machines that earlier versions had

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class GpuFacts(TypedDict):
    """A CUDA device: memory in bytes."""

    name: str
    memory: Count
    units: Count
    bf16: bool


class LinkRates(TypedDict):
    """gloo between two processes: seconds of a hop, bytes/s."""

    latency: Positive
    bandwidth: Positive


class CpuRates(TypedDict):
    """One core with all of them busy: FLOP/s by precision, bytes/s of a copy."""

    cores: Count
    flops: dict[str, Positive]
    bandwidth: Positive
    link: LinkRates


class MachineFacts(TypedDict):
    """What a probe says of a machine."""

    cuda: list[GpuFacts]
    cpu: CpuRates


class CacheEntry(TypedDict):
    """Facts, what they hold for, and how busy each core was with other work before they were measured."""

    key: dict[str, Any]
    load: float
    found: MachineFacts


def folder() -> Path:
    """distrain below the user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distrain"


def cache_file(key: Mapping[str, Any]) -> Path:
    """The file of a key: its name begins with the version of the probe."""
    name = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / "machines" / f"{key['probe']}-{name}.json"


def read_entry(key: Mapping[str, Any]) -> CacheEntry | None:
    """What is kept for a key; None where nothing is, or nothing that can be read."""
    from msgspec import json as decoder

    try:
        entry = decoder.decode(cache_file(key).read_bytes(), type=CacheEntry)
    except (OSError, DecodeError):
        return None
    return entry if entry["key"] == key else None


def write_entry(entry: CacheEntry) -> None:
    """Keep an entry in the place of the key's last one, and remove what is too old or too many; raises OSError."""
    file = cache_file(entry["key"])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"{json.dumps(entry, indent=1)}\n".encode())
    _tidy(file, entry["key"]["probe"])


def _tidy(own: Path, probe: int) -> None:
    """Remove what earlier probes measured, and the oldest files beyond KEPT; another process may do the same."""
    with suppress(OSError):
        (folder() / OLD_FILE).unlink(missing_ok=True)
    others = [path for path in own.parent.iterdir() if path != own]
    old = [path for path in others if (version := path.name.partition("-")[0]).isdigit() and int(version) < probe]
    left = sorted((path for path in others if path not in old), key=_written, reverse=True)
    for path in (*old, *left[KEPT - 1 :]):
        with suppress(OSError):
            path.unlink()


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
