"""What this machine has, where a recipe leaves it to the machine: read off a cache that `trainer/machine/probe.py` fills.

`python -m distrain.trainer.machine.facts` fills it where that was not done yet.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..spec.problem import Problem
from ..system.torch_child import ask_child
from .cache import Cpu, Entry, Facts, Ring, file_of, read_entry, write_entry

# CUDA's names of devices that conf/device describes.
DEVICES = {
    "Tesla V100-SXM2-32GB": "v100_32g",
    "NVIDIA A100-SXM4-40GB": "a100_40g",
    "NVIDIA A100-SXM4-80GB": "a100_80g",
    "NVIDIA H100 80GB HBM3": "h100_80g",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA B300": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
}
PROBE = 2  # what is measured and how; raised when that changes
PATIENCE = 120.0  # seconds that a probe may take
BUSY = 0.5  # processes of others for each core, from which on a measurement is not to last
MEASURING = "measuring this machine, once: a few seconds"

Device = Callable[[str], dict[str, Any]]  # what conf/device says of an option


def settle(words: dict[str, Any], device: Device, *, sized: bool = False) -> None:
    """Put this machine's devices for `kind: auto`, GPUs where it has some, and a precision for `auto` that they compute in.

    There are no more ranks than GPUs, unless the user said how many (`sized`).
    """
    cluster = words.get("cluster")
    mine = cluster.get("device") if isinstance(cluster, dict) else None
    cards: Sequence[Mapping[str, Any]] = []
    if isinstance(cluster, dict) and isinstance(mine, dict) and mine.get("kind") == "auto":
        facts = found()
        cards = facts["cuda"] if facts else []
        mine = cluster["device"] = _card(cards[0], device) if cards else {**mine, "kind": "cpu"}
        if cards and not sized and isinstance(cluster.get("gpus"), int):
            cluster["gpus"] = min(cluster["gpus"], len(cards))
    train = words.get("train")
    if isinstance(train, dict) and train.get("precision") == "auto":
        train["precision"] = "fp16" if cards and not cards[0]["bf16"] else _precision(mine if isinstance(mine, dict) else {})


def _card(card: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """A GPU as conf/device describes it, else what it says of itself."""
    known = DEVICES.get(card["name"])
    said = device(known) if known else {"name": card["name"]}
    return {**said, "kind": "cuda", "memory": card["memory"], "units": card["units"]}


def put_rates(words: Mapping[str, Any]) -> None:
    """Put what one process of this CPU was measured to reach, its share of the cores; what the recipe states stays."""
    cluster = words.get("cluster")
    mine = cluster.get("device") if isinstance(cluster, dict) else None
    gpus = cluster.get("gpus") if isinstance(cluster, dict) else None
    if not isinstance(mine, dict) or mine.get("kind") != "cpu" or not isinstance(gpus, int) or gpus < 1:
        return
    facts = found()
    if facts is None or not isinstance(cluster, dict):
        return
    cpu = facts["cpu"]
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


def found() -> Facts | None:
    """What the cache says of this machine; None where there is none, or one of other software or another machine."""
    entry = read_entry(key())
    return entry["found"] if entry else None


def known() -> bool:
    """Whether this machine was measured, and not while other work kept it busy that has ended since."""
    entry = read_entry(key())
    return entry is not None and (entry["load"] < BUSY or load() > entry["load"] / 2)


def probe() -> Problem | None:
    """Measure this machine in a child process and keep what it says; the problem where that can't be done.

    A machine that was measured before under the same key has the best of both: other work only ever makes it slower.
    """
    busy = load()
    try:
        done = ask_child("distrain.trainer.machine.probe", seconds=PATIENCE)
        said = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        said = None
    if said is None:
        return Problem(rule="probe", says="this machine could not be measured", mend="python -m distrain.trainer.machine.probe says why")
    before = found()
    try:
        write_entry(Entry(key=key(), load=busy, found=best(before, said) if before else said))
    except OSError as error:
        mend = "set XDG_CACHE_HOME to a folder that can be"
        return Problem(rule="probe", says=f"{file_of(key())} can't be written: {error.strerror}", mend=mend)
    return None


def best(one: Facts, other: Facts) -> Facts:
    """The newer facts, with the better of both rates of the CPU."""
    cpu, now = one["cpu"], other["cpu"]
    link: Ring = {
        "latency": min(cpu["link"]["latency"], now["link"]["latency"]),
        "bandwidth": max(cpu["link"]["bandwidth"], now["link"]["bandwidth"]),
    }
    flops = {kind: max(rate, cpu["flops"].get(kind, rate)) for kind, rate in now["flops"].items()}
    rates: Cpu = {"cores": now["cores"], "flops": flops, "bandwidth": max(cpu["bandwidth"], now["bandwidth"]), "link": link}
    return {"cuda": other["cuda"], "cpu": rates}


def measure(show: Callable[[str], object]) -> Problem | None:
    """Measure this machine where that was not done yet, or while it was busy; the problem where it can't be."""
    if known():
        return None
    again = found() is not None
    show("measuring this machine again, which was busy the last time: a few seconds" if again else MEASURING)
    return probe()


def load() -> float:
    """How busy each core of this machine is, by the last minute: processes that run or wait for a core; 0 where nobody says."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):
        return 0.0


def key() -> dict[str, Any]:
    """What a measurement holds for: torch, the CPU, its cores that this process may run on, the GPUs that it may see."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    visible, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return {"probe": PROBE, "torch": torch, "cpu": _processor(), "cores": cores(), "gpus": gpus, "visible": visible}


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return ""


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


if __name__ == "__main__":
    problem = measure(print)
    raise SystemExit(f"distrain: {problem}" if problem else 0)
