"""Measures what recipes leave to this machine, its GPUs and its CPU's rates: once, by `probe.py`; then it is read from the cache.

`python -m distrain.trainer.machine.measure_machine` measures this machine if that was not done yet.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..spec.problem import Problem
from ..system.cpu import cpu_count
from ..system.run_child import capture_child
from .cache import CacheEntry, CpuRates, LayerRates, LinkRates, MachineFacts, cache_file, read_entry, write_entry

# CUDA's names of the devices that conf/device describes, and their options there.
DEVICE_OPTIONS = {
    "Tesla V100-SXM2-16GB": "v100_16g",
    "Tesla V100-SXM2-32GB": "v100_32g",
    "NVIDIA A100-SXM4-40GB": "a100_40g",
    "NVIDIA A100-SXM4-80GB": "a100_80g",
    "NVIDIA H100 80GB HBM3": "h100_80g",
    "NVIDIA H100": "h100_96g",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA B300": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
}
CPU_RANKS_PER_CORE = 8  # ranks on a CPU that one core can still serve, slowly
PROBE = 4  # version of the probe; raise it when what is measured, or how, changes
PATIENCE = 120.0  # seconds that a probe may take on an idle machine
BUSY = 0.5  # processes per core that wait or run before the probe, from which on its result is measured again later
MEASURING = "measuring this machine once, for a few seconds"


def cached_facts() -> MachineFacts | None:
    """Return what the cache holds for this machine and its software; None where it holds nothing."""
    entry = read_entry(measurement_key())
    return entry["found"] if entry else None


def is_measured(kind: str) -> bool:
    """Whether this machine's devices of a kind, `cpu` or `cuda`, are known; a CPU measured beside other work is, until that work ends."""
    entry = read_entry(measurement_key())
    if entry is None or kind != "cpu":
        return entry is not None
    return entry["found"]["cpu"] is not None and (entry["load"] < BUSY or load_per_core() > entry["load"] / 2)


def measure_once(kind_of_run: Callable[[], str], show: Callable[[str], object]) -> Problem | None:
    """Measure what a run needs to know of this machine, unless it is known (`is_measured`); return the problem where that fails.

    `kind_of_run` reads the run's kind of device, which may be another once the GPUs are known. A CPU's rates are not measured beside GPUs
    unless a run is on the CPU.
    """
    for _ in range(2):  # which GPUs there are; then the CPU beside them
        if is_measured(kind_of_run()):
            return None
        facts = cached_facts()
        again = facts is not None and facts["cpu"] is not None
        show("measuring this machine again for a few seconds: it was busy the last time" if again else MEASURING)
        if problem := measure_now(always_cpu=facts is not None):
            return problem
    return None


def measure_now(*, always_cpu: bool = False) -> Problem | None:
    """Measure this machine in a child process and cache the result; return the problem where that fails.

    With an earlier result under the same key, the better of both rates is kept: other work only ever slows a measurement.
    """
    load, limit, file = load_per_core(), time_limit(PATIENCE), cache_file(measurement_key())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _unwritable(file, error)
    try:
        probe = capture_child("distrain.trainer.machine.probe", ["cpu"] if always_cpu else [], seconds=limit)
        found = json.loads(probe.stdout) if probe.returncode == 0 else None
    except subprocess.TimeoutExpired:
        late = f"this machine could not be measured in {limit:.0f} s"
        return Problem(rule="probe", says=late, mend="try again when it is less busy, or python -m distrain.trainer.machine.probe says why")
    except (OSError, ValueError):
        found = None
    if found is None:
        return Problem(rule="probe", says="this machine could not be measured", mend="python -m distrain.trainer.machine.probe says why")
    before = cached_facts()
    try:
        write_entry(CacheEntry(key=measurement_key(), load=load, found=better_of(before, found) if before else found))
    except OSError as error:
        return _unwritable(file, error)
    return None


def _unwritable(file: Path, error: OSError) -> Problem:
    mend = "set XDG_CACHE_HOME to a folder that can be written to"
    return Problem(rule="probe", says=f"{file} can't be written: {error.strerror}", mend=mend)


def better_of(before: MachineFacts, now: MachineFacts) -> MachineFacts:
    """Return the newer facts, with the better of both rates of the CPU."""
    old, new = before["cpu"], now["cpu"]
    if old is None or new is None:
        return {"cuda": now["cuda"], "cpu": new or old}
    link: LinkRates = {
        "latency": min(old["link"]["latency"], new["link"]["latency"]),
        "bandwidth": max(old["link"]["bandwidth"], new["link"]["bandwidth"]),
    }
    flops = {kind: max(rate, old["flops"].get(kind, rate)) for kind, rate in new["flops"].items()}
    layer = {kind: _better_layer(rates, old["layer"].get(kind, rates)) for kind, rates in new["layer"].items()}
    bandwidth = max(old["bandwidth"], new["bandwidth"])
    dispatch = min(old["dispatch"], new["dispatch"])
    rates: CpuRates = {
        "cores": new["cores"], "flops": flops, "bandwidth": bandwidth, "dispatch": dispatch, "layer": layer, "link": link
    }  # fmt: skip
    return {"cuda": now["cuda"], "cpu": rates}


def _better_layer(one: LayerRates, other: LayerRates) -> LayerRates:
    return {"products": max(one["products"], other["products"]), "attention": max(one["attention"], other["attention"])}


def load_per_core() -> float:
    """Processes per core that ran or waited for one during the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):
        return 0.0


def time_limit(seconds: float) -> float:
    """Return how long a child process may take that takes `seconds` at most on an idle machine: a busy one gives it a part of a core."""
    return seconds * max(1.0, load_per_core())


def measurement_key() -> dict[str, Any]:
    """What a measurement holds for: torch's version, the CPU, the cores this process may run on, the GPUs it may see."""
    visible, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return {"probe": PROBE, "torch": package_version("torch"), "cpu": cpu_model(), "cores": cpu_count(), "gpus": gpus, "visible": visible}


@cache
def package_version(name: str) -> str:
    """Return the version of an installed package without importing it; "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@cache
def cpu_model() -> str:
    """Return the CPU's name; "" where the system does not say it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return ""


if __name__ == "__main__":
    problem = measure_once(lambda: "cuda" if (cached_facts() or {"cuda": []})["cuda"] else "cpu", print)
    raise SystemExit(f"distrain: {problem}" if problem else 0)
