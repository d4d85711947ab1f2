"""Measures all devices of this machine at once: reads {"kind", "devices"} as JSON on stdin, prints lines of JSON, the last one the result.

Rates of a CPU are the fastest of many calls, because other work on the machine slows some of them, and its link's the median; those of a
GPU are means, because calls of a GPU wait for each other.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any, NamedTuple

from ..system.cpu import cpu_count
from ..system.memory import program_memory
from .all_reduce import SHORT_BYTES, AllReduceSeconds, link_rates, measure_all_reduce
from .device_rates import context_bytes, copy_rate, launch_seconds, product_rate
from .device_seconds import fastest_call, mean_of_calls, mean_seconds, median_call
from .layer_rates import dispatch_seconds, layer_rates
from .measure_machine import cpu_model, load_per_core
from .probe import ALL_REDUCE_BYTES, COPY_BYTES, MATRIX_SIDE, list_gpus
from .process_pool import PoolProcess, run_processes, start_method

CPU_PROCESSES = 2  # as cluster=local has
COPY_PARTS = 8  # of a device's memory, of which a copy takes one at most


class ProbeSizes(NamedTuple):
    """How a kind of device is measured."""

    device: str  # torch's name of the kind
    library: str  # of the messages
    sides: tuple[int, ...]  # of square matrices
    copied: int  # bytes
    reduced: int  # bytes of the long all-reduce
    seconds: float  # for which one rate is measured, in all rounds together
    rounds: int  # of which the best counts: other work on a CPU may last longer than the measurement of one rate
    means: bool  # a call's seconds are the mean of many, else the fastest


CPU = ProbeSizes("cpu", "gloo", (256, MATRIX_SIDE, 1024), COPY_BYTES, ALL_REDUCE_BYTES, 0.6, 4, means=False)
CUDA = ProbeSizes("cuda", "nccl", (2048, 4096, 8192), 2 << 30, 256 << 20, 0.5, 1, means=True)

DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class NoSuchDevices(Exception):
    """The machine lacks the devices that were asked for: what is wrong, and its fix."""


def measure(kind: str | None, devices: int | None, show: Callable[[str], object], cpu: ProbeSizes = CPU) -> dict[str, Any]:
    """Return a `DeviceMeasurement` as JSON's types, of a CPU with the sizes `cpu`; raises NoSuchDevices."""
    began, load, gpus = perf_counter(), load_per_core(), [] if kind == "cpu" else list_gpus()
    if kind == "cuda" and not gpus:
        raise NoSuchDevices("torch finds no GPU on this machine", "device=cpu measures its CPU")
    if not gpus:
        return {**_measure_cpu(devices or CPU_PROCESSES, cpu, show, began), "load": load}
    names = Counter(each["name"] for each in gpus)
    if len(names) > 1:
        says = "this machine's GPUs differ: " + ", ".join(f"{count} x {name}" for name, count in names.items())
        raise NoSuchDevices(says, "choose those of one kind with CUDA_VISIBLE_DEVICES")
    if (devices or 1) > len(gpus):
        raise NoSuchDevices(f"--devices={devices}: this machine has {len(gpus)} GPUs", f"--devices={len(gpus)} or fewer")
    return {**_measure_gpus(gpus[: devices or len(gpus)], show, began), "load": load}


def _measure_cpu(count: int, sizes: ProbeSizes, show: Callable[[str], object], began: float) -> dict[str, Any]:
    cores = cpu_count()
    threads = max(1, cores // count)
    rows = run_processes(
        partial(measure_device, sizes=sizes, precisions=("fp32", "bf16"), threads=threads), count, start_method(has_gpus=False), show
    )
    facts = {"name": cpu_model() or platform.machine(), "threads": threads, "memory": program_memory() // count, "units": None}
    return _measurement(sizes, rows, facts, {}, began)


def _measure_gpus(gpus: list[dict[str, Any]], show: Callable[[str], object], began: float) -> dict[str, Any]:
    import torch

    precisions = ("bf16", "fp16", "tf32", "fp32") if gpus[0]["bf16"] else ("fp16", "fp32")
    copied = min(CUDA.copied, gpus[0]["memory"] // COPY_PARTS)
    rows = run_processes(
        partial(measure_device, sizes=CUDA._replace(copied=copied), precisions=precisions), len(gpus), start_method(has_gpus=True), show
    )
    facts = {"name": gpus[0]["name"], "threads": 1, "memory": min(each["memory"] for each in gpus), "units": gpus[0]["units"]}
    versions = {"CUDA": str(torch.version.cuda)}
    with suppress(AttributeError, RuntimeError, TypeError):
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return _measurement(CUDA._replace(copied=copied), rows, facts, versions, began)


def measure_device(process: PoolProcess, sizes: ProbeSizes, precisions: tuple[str, ...], threads: int = 1) -> dict[str, Any]:
    """Measure one device while the other processes measure theirs."""
    import torch

    torch.set_num_threads(threads)
    device = torch.device(sizes.device, process.rank) if sizes.device == "cuda" else torch.device(sizes.device)
    if sizes.device == "cuda":
        torch.cuda.set_device(device)
    seconds_of = partial(mean_seconds if sizes.means else fastest_call, enough=sizes.seconds / sizes.rounds)
    products, copies, launches = dict[tuple[str, int], list[float]](), list[float](), list[float]()
    for _ in range(sizes.rounds):
        for precision in precisions:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            for side in sizes.sides:
                process.wait_and_show(f"a product of {side} x {side} in {precision}")
                rate = product_rate(device, getattr(torch, DTYPES[precision]), side, seconds_of)
                products.setdefault((precision, side), []).append(rate)
        process.wait_and_show("a copy")
        copies.append(copy_rate(device, sizes.copied, seconds_of))
        process.wait_and_show("launches")
        launches.append(launch_seconds(device, seconds_of))
    layer, dispatch = None, None
    if sizes.device == "cpu":
        process.wait_and_show("a layer's kernels in turn")
        layer, dispatch = layer_rates(torch.float32, sizes.seconds), dispatch_seconds(sizes.seconds)
    all_reduce = None
    if process.ranks > 1:
        process.wait_and_show(f"{sizes.library}'s all-reduce")
        all_reduce = measure_all_reduce(
            sizes.library, process.rank, process.ranks, process.port, device, sizes.reduced, partial(_call_seconds, sizes=sizes)
        )
    context = context_bytes() if sizes.device == "cuda" else None
    process.barrier.wait()  # for the device's memory is shared until the last has read it
    return {
        "products": [{"precision": precision, "side": side, "rate": max(each)} for (precision, side), each in products.items()],
        "copy": max(copies),
        "launch": min(launches),
        "layer": layer,
        "dispatch": dispatch,
        "all_reduce": all_reduce,
        "context": context,
    }


def _call_seconds(act: Callable[[], object], times: int, *, sizes: ProbeSizes) -> float:
    return mean_of_calls(act, times) if sizes.means else median_call(act, sizes.rounds * times)


def _measurement(
    sizes: ProbeSizes, rows: list[dict[str, Any]], facts: Mapping[str, Any], versions: Mapping[str, str], began: float
) -> dict[str, Any]:
    contexts = [row["context"] for row in rows if row["context"] is not None]
    return {
        "kind": sizes.device,
        "devices": len(rows),
        "cores": cpu_count(),
        **facts,
        "context": max(contexts, default=None),
        "products": [
            {"precision": each["precision"], "side": each["side"], "rates": [row["products"][at]["rate"] for row in rows]}
            for at, each in enumerate(rows[0]["products"])
        ],
        "copy_bytes": sizes.copied,
        "copies": [row["copy"] for row in rows],
        "launches": [row["launch"] for row in rows],
        "layer_rates": [row["layer"] for row in rows if row["layer"]],
        "dispatches": [row["dispatch"] for row in rows if row["dispatch"]],
        "all_reduce": _all_reduce_times(sizes, rows[0]["all_reduce"], len(rows)),
        "versions": {"torch": version("torch"), "Python": platform.python_version(), **versions},
        "seconds": perf_counter() - began,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _all_reduce_times(sizes: ProbeSizes, seconds: AllReduceSeconds | None, ranks: int) -> dict[str, Any] | None:
    if seconds is None:
        return None
    return {
        "library": sizes.library,
        "ranks": ranks,
        "short_bytes": SHORT_BYTES,
        "short_seconds": seconds.short,
        "long_bytes": sizes.reduced,
        "long_seconds": seconds.long,
        **link_rates(seconds, sizes.reduced, ranks),
    }


def main() -> int:
    """Read the request, print what is measured next and then the result; all other output goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started this process ends its children
    request = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)

    def emit(message: Mapping[str, Any]) -> None:
        os.write(out, f"{json.dumps(message)}\n".encode())

    try:
        emit({"found": measure(request["kind"], request["devices"], lambda text: emit({"progress": text}))})
    except NoSuchDevices as error:
        says, mend = error.args
        emit({"problem": says, "mend": mend})
    return 0


if __name__ == "__main__":
    sys.exit(main())
