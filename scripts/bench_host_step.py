"""Benchmark of an optimizer's step on the host: engine native's, in parts of several sizes, beside DeepSpeed's compiled Adam.

Run `python -m distrain.scripts.bench_host_step [ROUNDS]` on a quiet machine with a C++ compiler. One process steps the weights of a GPT in
bf16 with all cores; the ways take turns. DeepSpeed's way is that of its ZeRO 1 and 2: clip the float32 gradients, step, cast the weights.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..cli.config.load import load_recipe
from ..trainer.engines.native import host_optimizer
from ..trainer.loop.build import build_engine
from ..trainer.parallel.process_groups import make_grid
from ..trainer.parallel.world import join_ranks
from ..trainer.plan.mesh_position import mesh_position
from ..trainer.plan.plan import make_plan
from .show_help import show_help

PARTS = (2**14, 2**16, 2**18, 2**20, 2**22, 2**30)  # elements
WORDS = (
    *("cluster=1x1", "device=cpu", "engine=native", "parallel.zero=1", "parallel.offload.optimizer=true", "train.precision=bf16"),
    *("model=quickstart", "model.layers=12", "model.hidden=512", "model.heads=8", "train.seq=16", "train.batch=1", "train.microbatch=1"),
)


def main() -> None:
    """Time each way so many times in turn and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    engine = made_engine()
    elements = sum(bucket.master.numel() for bucket in engine.buckets)
    ways: dict[str, Callable[[], None]] = {f"native, parts of {part:,}": stepping_in_parts(engine, part) for part in PARTS}
    ways["DeepSpeed"] = deepspeed_step(elements)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, step in ways.items():
            began = perf_counter()
            step()
            if number:  # the first warms up
                found[name].append(perf_counter() - began)
    chosen = median(found[f"native, parts of {host_optimizer.PART:,}"])
    print(f"{elements:,} elements, {torch.get_num_threads()} threads, medians of {rounds}")
    print(f"{'':<32}{'step':>10}{'ns/element':>12}{'over ours':>11}")
    for name, seconds in found.items():
        figures = f"{1e3 * median(seconds):>7.1f} ms{1e9 * median(seconds) / elements:>12.2f}{median(seconds) / chosen:>11.2f}"
        print(f"{name + (' (used)' if name.endswith(f' {host_optimizer.PART:,}') else ''):<32}{figures}")


def made_engine() -> Any:
    """An engine on this process alone, after a step that made gradients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    run = load_recipe("quickstart", [*WORDS])
    engine = build_engine(run, make_grid(join_ranks("cpu"), mesh_position(run, 0)), make_plan(run).engine)
    torch.set_num_threads(os.cpu_count() or 1)
    tokens = torch.ones((1, run.train.seq), dtype=torch.long)
    engine.step(lambda _: (tokens, tokens, {}), 1e-4, run.train.seq)
    return engine


def stepping_in_parts(engine: Any, part: int) -> Callable[[], None]:
    """Return a step of the engine on the host, in parts of so many elements."""
    divisor = torch.tensor(1.0)

    def step() -> None:
        chosen, host_optimizer.PART = host_optimizer.PART, part
        engine.bucket_optimizer.host.step(divisor)
        host_optimizer.PART = chosen

    return step


def deepspeed_step(elements: int) -> Callable[[], None]:
    """Return a step of DeepSpeed's Adam over as many elements, with its clipping and its cast."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = nn.Parameter(torch.randn(elements))
    weights.grad = torch.randn(elements)
    optimizer = DeepSpeedCPUAdam([weights], lr=1e-4)
    gradients, copy, own = torch.randn(elements).bfloat16(), torch.empty(elements, dtype=torch.bfloat16), torch.empty(elements).bfloat16()

    def step() -> None:
        assert weights.grad is not None
        weights.grad.copy_(gradients)  # as a device copies them, in float32
        weights.grad.mul_(1.0)
        optimizer.step()
        copy.copy_(weights.data)
        own.copy_(copy)

    return step


if __name__ == "__main__":
    show_help(__doc__)
    main()
