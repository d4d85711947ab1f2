"""Measures this machine, its CPU on all cores at once and for about two seconds, and prints the result as JSON.

Run it as `python -m distrain.trainer.machine.probe`. Where there are GPUs, the CPU is measured only by `... probe cpu`.

`cpu.flops` and `cpu.bandwidth` are of one core while all are busy, as with the ranks of a local run: FLOP/s of a large matrix
product by precision, and bytes/s of a copy, read and written. `cpu.link` is gloo's all-reduce between two processes.
Each is the fastest of many calls, because other work on the machine slows some of them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from time import perf_counter
from typing import Any

from ..system.cpu import cpu_count
from ..system.parent_watch import die_with_parent

MOST_PROCESSES = 16  # that measure at once
MATRIX_SIDE = 512  # of a square matrix; its product takes milliseconds, so that some calls run undisturbed
COPY_BYTES = 64 << 20  # larger than a core's share of the caches
ALL_REDUCE_BYTES = 8 << 20  # of the long all-reduce
RATE_SECONDS = 0.35  # for which one rate is measured


def measure_machine(*, always_cpu: bool) -> dict[str, Any]:
    """Return the CUDA devices, and the CPU's measured rates where there are none, or where they are asked for."""
    gpus = _gpus()
    start = "fork" if sys.platform == "linux" and not gpus else "spawn"  # a CUDA context does not survive a fork
    return {"cuda": gpus, "cpu": _measure_cpu(start) if always_cpu or not gpus else None}


def _gpus() -> list[dict[str, Any]]:
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
    """Measure in processes that are forked, with torch imported, or spawned, which takes twice the time."""
    cores = cpu_count()
    ranks = min(cores, MOST_PROCESSES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context(start)
    manager, last = SyncManager(ctx=context), (die_with_parent, (os.getpid(),))  # so that none outlives this process
    manager.start(*last)
    with manager:
        barrier = manager.Barrier(max(2, ranks))
        with context.Pool(max(2, ranks), *last) as pool:
            rows = pool.starmap(_measure_process, [(rank, port, barrier, rank < ranks) for rank in range(max(2, ranks))], chunksize=1)
    rates = [row for row in rows if row["flops"]]
    return {
        "cores": cores,
        "flops": {kind: max(row["flops"][kind] for row in rates) for kind in rates[0]["flops"]},
        "bandwidth": max(row["bandwidth"] for row in rates),
        "link": rows[0]["link"],
    }


def _measure_process(rank: int, port: int, barrier: Any, busy: bool) -> dict[str, Any]:
    """Measure one process's rates, while all processes measure the same."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {"flops": {}, "link": _measure_link(rank, port) if rank < 2 else None}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        one, other = (torch.ones(MATRIX_SIDE, MATRIX_SIDE, dtype=dtype) for _ in range(2))
        barrier.wait()
        if busy:
            found["flops"][name] = 2.0 * MATRIX_SIDE**3 / _fastest_call(lambda one=one, other=other: torch.mm(one, other))  # type: ignore[misc]
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.empty(COPY_BYTES, dtype=torch.uint8)
    barrier.wait()
    found["bandwidth"] = 2.0 * COPY_BYTES / _fastest_call(lambda: target.copy_(source)) if busy else None
    return found


def _measure_link(rank: int, port: int) -> dict[str, float] | None:
    """Measure seconds per hop and bytes/s of a ring of two, whose all-reduce takes two hops and sends as many bytes as it reduces."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    short, long = torch.zeros(1), torch.zeros(ALL_REDUCE_BYTES // 4)
    # A fixed number of calls, since both processes must make the same number.
    quick = _fastest_call(lambda: dist.all_reduce(short), times=200)
    slow = _fastest_call(lambda: dist.all_reduce(long), times=12)
    dist.destroy_process_group()
    return {"latency": quick / 2, "bandwidth": ALL_REDUCE_BYTES / max(slow - quick, 1e-9)}


def _fastest_call(act: Callable[[], object], *, times: int | None = None) -> float:
    """Return the seconds of the fastest call, of `times` calls or of all that fit into RATE_SECONDS."""
    act()
    best, start, count = float("inf"), perf_counter(), 0
    while count < times if times else perf_counter() - start < RATE_SECONDS:
        began = perf_counter()
        act()
        best, count = min(best, perf_counter() - began), count + 1
    return best


def main() -> int:
    """Print the result; all other output goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    found = json.dumps(measure_machine(always_cpu=sys.argv[1:] == ["cpu"]))
    os.write(out, f"{found}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
