"""Measures this machine, its CPU on all cores at once and for about four seconds, and prints the result as JSON.

Run it as `python -m distrain.trainer.machine.probe`. Where there are GPUs, the CPU is measured only by `... probe cpu`.

`cpu.flops` and `cpu.bandwidth` are of one core while all are busy, as with the ranks of a local run: FLOP/s of a large matrix
product by precision, and bytes/s of a copy, read and written. `cpu.link` is gloo's all-reduce between two processes.
Rates are those of the fastest of many calls, because other work on the machine slows some of them; the link's, which depends on both
processes and on gloo's threads, is that of the median. `cpu.layer` is what a layer's training reaches, and `cpu.dispatch` the seconds
in which Python and autograd dispatch an operator (`layer_rates.py`), the mean of all cores: ranks wait for each other.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from statistics import mean
from typing import Any

from ..system.cpu import cpu_count
from .all_reduce import link_rates, measure_all_reduce
from .device_rates import copy_rate, product_rate
from .device_seconds import fastest_call, median_call
from .layer_rates import dispatch_seconds, layer_rates
from .process_pool import PoolProcess, run_processes, start_method

MOST_PROCESSES = 16  # that measure at once
MATRIX_SIDE = 512  # of a square matrix; its product takes milliseconds, so that some calls run undisturbed
COPY_BYTES = 64 << 20  # larger than a core's share of the caches
ALL_REDUCE_BYTES = 8 << 20  # of the long all-reduce
RATE_SECONDS = 0.35  # for which one rate is measured
LAYER_SECONDS = 1.0  # for which a layer's rates are


def measure_machine(*, always_cpu: bool) -> dict[str, Any]:
    """Return the CUDA devices, and the CPU's measured rates where there are none, or where they are asked for."""
    gpus = list_gpus()
    return {"cuda": gpus, "cpu": _measure_cpu(start_method(has_gpus=bool(gpus))) if always_cpu or not gpus else None}


def list_gpus() -> list[dict[str, Any]]:
    """Return the name, memory, multiprocessors of each CUDA device, and whether it computes in bf16."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        bf16 = each.major >= 8
        found.append({"name": each.name, "memory": each.total_memory, "units": each.multi_processor_count, "bf16": bf16})
    return found


def _measure_cpu(start: str) -> dict[str, Any]:
    cores = cpu_count()
    ranks = min(cores, MOST_PROCESSES)
    rows = run_processes(partial(_measure_process, busy=ranks), max(2, ranks), start)
    rates = [row for row in rows if row["flops"]]
    return {
        "cores": cores,
        "flops": {kind: max(row["flops"][kind] for row in rates) for kind in rates[0]["flops"]},
        "bandwidth": max(row["bandwidth"] for row in rates),
        "dispatch": mean(row["dispatch"] for row in rates),
        "layer": {
            precision: {kind: mean(row["layer"][precision][kind] for row in rates) for kind in found}
            for precision, found in rates[0]["layer"].items()
        },
        "link": rows[0]["link"],
    }


def _measure_process(process: PoolProcess, busy: int) -> dict[str, Any]:
    """Measure one process's rates, while all processes measure the same; the first `busy` measure, the others wait with them."""
    import torch

    torch.set_num_threads(1)
    cpu, measures = torch.device("cpu"), process.rank < busy
    fastest = partial(fastest_call, enough=RATE_SECONDS)
    found: dict[str, Any] = {"flops": {}, "layer": {}, "link": _measure_link(process) if process.rank < 2 else None}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        process.barrier.wait()
        if measures:
            found["flops"][name] = product_rate(cpu, dtype, MATRIX_SIDE, fastest)
    process.barrier.wait()
    found["bandwidth"] = copy_rate(cpu, COPY_BYTES, fastest) if measures else None
    process.barrier.wait()
    found["dispatch"] = dispatch_seconds(RATE_SECONDS) if measures else None
    for name, dtype in dtypes.items():
        process.barrier.wait()
        if measures:
            found["layer"][name] = layer_rates(dtype, LAYER_SECONDS)
    return found


def _measure_link(process: PoolProcess) -> dict[str, float]:
    """Measure the link of a ring of the first two processes."""
    import torch

    seconds = measure_all_reduce("gloo", process.rank, 2, process.port, torch.device("cpu"), ALL_REDUCE_BYTES, median_call)
    return {**link_rates(seconds, ALL_REDUCE_BYTES, 2)}  # type: ignore[dict-item]


def main() -> int:
    """Print the result; all other output goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    found = json.dumps(measure_machine(always_cpu=sys.argv[1:] == ["cpu"]))
    os.write(out, f"{found}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
