"""Values that depend on this machine: device kind and precision `auto`, memory `auto`, and the measured rates of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...trainer.machine import measure_machine
from ...trainer.machine.layer_rates import HEAD_DIM
from ...trainer.machine.measure_machine import DEVICE_OPTIONS
from ...trainer.plan.costs.measured_rates import cpu_shares
from ...trainer.spec.problem import Problem
from ...trainer.system.memory import program_memory

ReadDevice = Callable[[str], dict[str, Any]]  # returns the keys of an option in conf/device


def fill_auto_device(config: dict[str, Any], read_device: ReadDevice, *, is_sized: bool = False) -> None:
    """Replace `kind: auto` by this machine's device, a GPU if it has one, and `precision: auto` by one that the device computes in.

    `is_sized`: the user set the number of ranks. Otherwise it is at most the number of GPUs.
    """
    cluster = config.get("cluster")
    device = cluster.get("device") if isinstance(cluster, dict) else None
    gpus: Sequence[Mapping[str, Any]] = []
    if isinstance(cluster, dict) and isinstance(device, dict) and device.get("kind") == "auto":
        machine = measure_machine.cached_facts()
        gpus = machine["cuda"] if machine else []
        device = cluster["device"] = _gpu_device(gpus[0], read_device) if gpus else {**device, "kind": "cpu"}
        if gpus and isinstance(host := cluster.setdefault("host", {}), dict):
            host.setdefault("memory", program_memory())
        if gpus and not is_sized and isinstance(cluster.get("gpus"), int):
            cluster["gpus"] = min(cluster["gpus"], len(gpus))
    train = config.get("train")
    if isinstance(train, dict) and train.get("precision") == "auto":
        train["precision"] = "fp16" if gpus and not gpus[0]["bf16"] else _auto_precision(device if isinstance(device, dict) else {})


def _gpu_device(gpu: Mapping[str, Any], read_device: ReadDevice) -> dict[str, Any]:
    """Return `cluster.device` of a GPU: its option in conf/device, or only what the driver reports of an unknown one."""
    option = DEVICE_OPTIONS.get(gpu["name"])
    device = read_device(option) if option else {"name": gpu["name"]}
    return {**device, "kind": "cuda", "memory": gpu["memory"], "units": gpu["units"]}


def fill_cpu_rates(config: Mapping[str, Any]) -> None:
    """Fill in the measured rates of this machine's CPU, divided among its processes, and the shares of its peak that training reaches in
    the run's precision. With more processes than cores, Python and messages slow down in proportion too.

    Values in the recipe stay, and where it states a peak, that is what training reaches.
    """
    cluster = config.get("cluster")
    device = cluster.get("device") if isinstance(cluster, dict) else None
    processes = cluster.get("gpus") if isinstance(cluster, dict) else None
    if not isinstance(device, dict) or device.get("kind") != "cpu" or not isinstance(processes, int) or processes < 1:
        return
    machine = measure_machine.cached_facts()
    cpu = machine["cpu"] if machine else None
    if cpu is None or not isinstance(cluster, dict):
        return
    cores = cpu["cores"] / processes
    if not device.get("peak"):
        device["peak"] = {precision: rate * cores for precision, rate in cpu["flops"].items()}
        train = config.get("train")
        precision = train.get("precision") if isinstance(train, dict) else None
        if precision in cpu["flops"] and precision in cpu["layer"]:
            shares = cpu_shares(cpu["flops"][precision], **cpu["layer"][precision], head_dim=HEAD_DIM)
            device |= {key: share for key, share in shares.items() if device.get(key) is None}
    if device.get("bandwidth") is None:
        device["bandwidth"] = cpu["bandwidth"] * cores
    turn = min(1.0, cores)  # the share of a core's time that one thread gets
    if device.get("dispatch") is None:
        device["dispatch"] = cpu["dispatch"] / turn
    if cluster.get("inside") is None:
        link = cpu["link"]
        cluster["inside"] = {"latency": link["latency"] / turn, "bandwidth": link["bandwidth"] * turn, "efficiency": 1.0}


def _auto_precision(device: Mapping[str, Any]) -> str:
    """Return fp32 for a CPU, bf16 for a GPU that computes in it, fp16 for an older GPU."""
    if device.get("kind", "cuda") == "cpu":
        return "fp32"
    peak = device.get("peak") or {"bf16": None}
    return "bf16" if "bf16" in peak else "fp16"


def auto_memory(config: Mapping[str, Any]) -> int | Problem | None:
    """Return the bytes of one process for `cluster.device.memory: auto`: this machine's, divided; None if memory is not auto."""
    cluster = config.get("cluster")
    device = cluster.get("device") if isinstance(cluster, Mapping) else None
    if not isinstance(device, Mapping) or device.get("memory") != "auto":
        return None
    processes = cluster.get("gpus") if isinstance(cluster, Mapping) else None
    if device.get("kind", "cuda") != "cpu":
        return Problem(
            rule="memory",
            says=f"cluster.device.memory=auto works for a CPU only, not for {device.get('name', 'the device')}",
            mend="set it in bytes, as cluster.device.memory=80e9",
        )
    return program_memory() // processes if isinstance(processes, int) and processes > 0 else None
