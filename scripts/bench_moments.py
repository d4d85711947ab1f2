"""Benchmark of an optimizer's step on a CPU by how its moments are kept: in float32, in bf16 rounded to nearest or at random, or in 8 bits.

Run `python -m distrain.scripts.bench_moments [ROUNDS] [THREADS]`. One process steps the weights of a GPT in float32, engine native; the
ways take turns, and seconds are those of its processors.
The ratio is that to AdamW in float32; `planned` is the one of plans (trainer/plan/native/optimizer_step.py).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch

from ..cli.config.load import load_recipe
from ..trainer.loop.build import build_engine
from ..trainer.parallel.process_groups import Grid, make_grid
from ..trainer.parallel.world import join_ranks
from ..trainer.plan.mesh_position import mesh_position
from ..trainer.plan.native.optimizer_step import ROUNDED_STEPS, rounding_of
from ..trainer.plan.plan import make_plan
from ..trainer.spec.run import Run
from .show_help import show_help

WORDS = (
    *("cluster=1x1", "device=cpu", "engine=native", "train.precision=fp32", "model=quickstart", "model.hidden=512", "model.heads=8"),
    *("model.layers=6", "train.seq=16", "train.batch=1", "train.microbatch=1"),
)
WAYS = {
    "AdamW": ("optim.name=adamw",),
    "AdamW, bf16 at random": ("optim.name=adamw", "optim.moments=bf16"),
    "AdamW, bf16 to nearest": ("optim.name=adamw", "optim.moments=bf16", "optim.rounding=nearest"),
    "AdamW, 8 bits": ("optim.name=adamw", "optim.moments=int8"),
    "SGD": (
        "optim.name=sgd",
        "optim.momentum=0.9",
    ),
    "SGD, bf16 at random": ("optim.name=sgd", "optim.momentum=0.9", "optim.moments=bf16"),
    "SGD, bf16 to nearest": ("optim.name=sgd", "optim.momentum=0.9", "optim.moments=bf16", "optim.rounding=nearest"),
    "SGD, 8 bits": ("optim.name=sgd", "optim.momentum=0.9", "optim.moments=int8"),
}


def main() -> None:
    """Time each way so many times in turn and print a table."""
    given = list(map(int, sys.argv[1:]))
    rounds, threads = [*given, *(7, 1)[len(given) :]]
    torch.set_num_threads(threads)
    runs = {name: load_recipe("quickstart", [*WORDS, *words]) for name, words in WAYS.items()}
    grid = lone_grid(next(iter(runs.values())))
    steps, elements = {}, 0
    for name, run in runs.items():
        steps[name], elements = optimizer_step(run, grid)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = process_time()
            step()
            if number:  # the first warms up
                found[name].append(process_time() - began)
    print(f"{elements:,} elements, {torch.get_num_threads()} threads, medians of {rounds}")
    print(f"{'':<28}{'step':>10}{'ns/element':>12}{'ratio':>8}{'planned':>9}")
    for name, seconds in found.items():
        own, optim = median(seconds), runs[name].optim
        planned = f"{ROUNDED_STEPS[optim.name, rounding_of(optim)]:>9.1f}" if optim.moments != "fp32" else ""
        print(f"{name:<28}{1e3 * own:>7.1f} ms{1e9 * own / elements:>12.2f}{own / median(found['AdamW']):>8.2f}{planned}")


def lone_grid(run: Run) -> Grid:
    """Return the groups of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return make_grid(join_ranks("cpu"), mesh_position(run, 0))


def optimizer_step(run: Run, grid: Grid) -> tuple[Callable[[], None], int]:
    """Return the optimizer's step of an engine that has taken one, without the norm, and the elements that it steps."""
    engine: Any = build_engine(run, grid, make_plan(run).engine)
    tokens = torch.ones((1, run.train.seq), dtype=torch.long)
    engine.step(lambda _: (tokens, tokens, {}), 1e-4, run.train.seq)
    optimizer, divisor, is_finite = engine.bucket_optimizer, torch.tensor(1.0), torch.tensor(True)
    return lambda: optimizer.step(divisor, is_finite, scales=False), sum(each.master.numel() for each in engine.buckets)


if __name__ == "__main__":
    show_help(__doc__)
    main()
