"""What this machine has, where a recipe leaves it to the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..trainer.spec.problem import Problem


def own_memory(words: Mapping[str, Any]) -> int | Problem | None:
    """Bytes for `cluster.device.memory: auto`, this machine's shared among its ranks; None where the recipe states them."""
    cluster = words.get("cluster")
    device = cluster.get("device") if isinstance(cluster, Mapping) else None
    if not isinstance(device, Mapping) or device.get("memory") != "auto":
        return None
    gpus = cluster.get("gpus") if isinstance(cluster, Mapping) else None
    if device.get("kind", "cuda") != "cpu":
        name = device.get("name", "the device")
        return Problem(
            rule="memory",
            says=f"cluster.device.memory=auto is read from this machine for kind cpu only, not for {name}",
            mend="set its bytes, as cluster.device.memory=80e9",
        )
    return _physical() // gpus if isinstance(gpus, int) and gpus > 0 else None


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
