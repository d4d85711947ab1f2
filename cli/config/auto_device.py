"""TODO."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...trainer.machine import facts
from ...trainer.machine.facts import DEVICE_OPTIONS
from ...trainer.spec.problem import Problem

DeviceOption = Callable[[str], dict[str, Any]]  # what conf/device says of an option


def fill_device(words: dict[str, Any], device: DeviceOption, *, sized: bool = False) -> None:
    """Put this machine's devices for `kind: auto`, GPUs where it has some, and a precision for `auto` that they compute in.

    There are no more ranks than GPUs, unless the user said how many (`sized`).
    """
    cluster = words.get("cluster")
    mine = cluster.get("device") if isinstance(cluster, dict) else None
    cards: Sequence[Mapping[str, Any]] = []
    if isinstance(cluster, dict) and isinstance(mine, dict) and mine.get("kind") == "auto":
        known = facts.cached_facts()
        cards = known["cuda"] if known else []
        mine = cluster["device"] = _card(cards[0], device) if cards else {**mine, "kind": "cpu"}
        if cards and not sized and isinstance(cluster.get("gpus"), int):
            cluster["gpus"] = min(cluster["gpus"], len(cards))
    train = words.get("train")
    if isinstance(train, dict) and train.get("precision") == "auto":
        train["precision"] = "fp16" if cards and not cards[0]["bf16"] else _precision(mine if isinstance(mine, dict) else {})


def _card(card: Mapping[str, Any], device: DeviceOption) -> dict[str, Any]:
    """A GPU as conf/device describes it, else what it says of itself."""
    known = DEVICE_OPTIONS.get(card["name"])
    said = device(known) if known else {"name": card["name"]}
    return {**said, "kind": "cuda", "memory": card["memory"], "units": card["units"]}


def fill_cpu_rates(words: Mapping[str, Any]) -> None:
    """Put what one process of this CPU was measured to reach, its share of the cores; what the recipe states stays."""
    cluster = words.get("cluster")
    mine = cluster.get("device") if isinstance(cluster, dict) else None
    gpus = cluster.get("gpus") if isinstance(cluster, dict) else None
    if not isinstance(mine, dict) or mine.get("kind") != "cpu" or not isinstance(gpus, int) or gpus < 1:
        return
    known = facts.cached_facts()
    if known is None or not isinstance(cluster, dict):
        return
    cpu = known["cpu"]
    share = cpu["cores"] / gpus
    if not mine.get("peak"):
        mine["peak"] = {kind: rate * share for kind, rate in cpu["flops"].items()}
    if mine.get("bandwidth") is None:
        mine["bandwidth"] = cpu["bandwidth"] * share
    if cluster.get("inside") is None:
        cluster["inside"] = {**cpu["link"], "efficiency": 1.0}


def _precision(device: Mapping[str, Any]) -> str:
    """bf16 on a GPU that computes it, fp16 on an older one, fp32 on a CPU."""
    if device.get("kind", "cuda") == "cpu":
        return "fp32"
    peak = device.get("peak") or {"bf16": None}
    return "bf16" if "bf16" in peak else "fp16"


def own_memory_share(words: Mapping[str, Any]) -> int | Problem | None:
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
