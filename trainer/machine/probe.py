"""Measures what this machine has, for about two seconds on every core at once, and prints it as JSON.

Run it as `python -m distrain.trainer.machine.probe`.

`cpu.flops` and `cpu.bandwidth` are those of one core with all of them busy, as the ranks of a local run are: FLOP/s of a large
matrix product by precision, bytes/s of a copy, reading and writing. `cpu.link` is gloo's all-reduce between two processes.
Each is the fastest of many calls: what else runs on the machine slows some of them, and the next run is not to suffer for it.
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

MOST = 16  # processes that measure at once
SIDE = 512  # of a square matrix product: a few milliseconds, so that some calls run undisturbed
COPIED = 64 << 20  # bytes: larger than a core's share of the caches
REDUCED = 8 << 20  # bytes of a long all-reduce
LONG = 0.35  # seconds that one rate is measured for


def machine() -> dict[str, Any]:
    """CUDA devices and the CPU's measured rates."""
    return {"cuda": _cuda(), "cpu": _cpu()}


def _cuda() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        bf16 = each.major >= 8
        found.append({"name": each.name, "memory": each.total_memory, "units": each.multi_processor_count, "bf16": bf16})
    return found


def _cpu() -> dict[str, Any]:
    cores = cpu_count()
    ranks = min(cores, MOST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    manager, last = SyncManager(ctx=context), (die_with_parent, (os.getpid(),))  # none outlives this process, however it ends
    manager.start(*last)
    with manager:
        barrier = manager.Barrier(max(2, ranks))
        with context.Pool(max(2, ranks), *last) as pool:
            rows = pool.starmap(_measured, [(rank, port, barrier, rank < ranks) for rank in range(max(2, ranks))], chunksize=1)
    rates = [row for row in rows if row["flops"]]
    return {
        "cores": cores,
        "flops": {kind: max(row["flops"][kind] for row in rates) for kind in rates[0]["flops"]},
        "bandwidth": max(row["bandwidth"] for row in rates),
        "link": rows[0]["link"],
    }


def _measured(rank: int, port: int, barrier: Any, busy: bool) -> dict[str, Any]:
    """One process's rates, all measuring the same at the same time."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {"flops": {}, "link": _link(rank, port) if rank < 2 else None}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        one, other = (torch.ones(SIDE, SIDE, dtype=dtype) for _ in range(2))
        barrier.wait()
        if busy:
            found["flops"][name] = 2.0 * SIDE**3 / _fastest(lambda one=one, other=other: torch.mm(one, other))  # type: ignore[misc]
    source, target = torch.ones(COPIED, dtype=torch.uint8), torch.empty(COPIED, dtype=torch.uint8)
    barrier.wait()
    found["bandwidth"] = 2.0 * COPIED / _fastest(lambda: target.copy_(source)) if busy else None
    return found


def _link(rank: int, port: int) -> dict[str, float] | None:
    """Seconds of a hop and bytes/s of a ring of two, whose all-reduce is two hops and sends as much as it reduces."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    short, long = torch.zeros(1), torch.zeros(REDUCED // 4)
    # A number of times that both know, not a time that each of them reads.
    quick = _fastest(lambda: dist.all_reduce(short), times=200)
    slow = _fastest(lambda: dist.all_reduce(long), times=12)
    dist.destroy_process_group()
    return {"latency": quick / 2, "bandwidth": REDUCED / max(slow - quick, 1e-9)}


def _fastest(act: Callable[[], object], *, times: int | None = None) -> float:
    """Seconds of the fastest call, of so many or of as many as fit into a moment."""
    act()
    best, start, count = float("inf"), perf_counter(), 0
    while count < times if times else perf_counter() - start < LONG:
        began = perf_counter()
        act()
        best, count = min(best, perf_counter() - began), count + 1
    return best


def main() -> int:
    """Print what was found; everything else that is written goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    found = json.dumps(machine())
    os.write(out, f"{found}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
