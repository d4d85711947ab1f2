"""Counts what a step of engine native launches on a CPU, and times it, where layers are compiled: with weights joined and each layer's
gradients taken together, and with a product and a sum for each weight.

Run `python -m distrain.scripts.trace_cuda.step_launches [ROUNDS]` on a quiet machine with a C++ compiler. The models have as many layers as
GPT-2 124M and as 16 layers of Llama 3 8B, and are so narrow that the host's time is what counts. A launch is an operator that computes, on
a list of tensors too, or one of the compiler's kernels. The runs take turns in each round; the processor's seconds of a step are counted.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any
from unittest.mock import patch

import torch

from ...cli.config.load import load_recipe
from ...trainer.engines.native import engine as native
from ...trainer.loop.build import build_engine
from ...trainer.parallel.process_groups import make_grid
from ...trainer.parallel.world import World, join_ranks
from ...trainer.plan.mesh_position import mesh_position
from ...trainer.plan.plan import make_plan
from ...trainer.spec.run import Run
from ..show_help import show_help
from .live_bytes import NO_KERNEL

FIXED = (
    "cluster=1x1",
    "device=cpu",
    "engine=native",
    "parallel.zero=1",
    "train.precision=bf16",
    "train.seq=32",
    "train.microbatch=1",
    "train.compile=true",
)
NARROW = ("model.hidden=64", "model.heads=4", "model.ffn=256", "model.vocab=512", "model.vocab_multiple=1", "model.dropout=0")
MODELS = {
    "gpt2_124m": ("model=gpt2_124m", *NARROW),
    "llama, 16 layers": ("model=llama3_8b", *NARROW, "model.layers=16", "model.kv_heads=2", "model.head_dim=16"),
}
MICROS = (1, 4)
STEPS = 5  # timed in a round


@dataclass(frozen=True, kw_only=True)
class CountedRun:
    """A run's engine, and what a step of it launches by name; `times` are the seconds of a processor that a step took in each round."""

    engine: Any
    launches: Counter[str]
    times: list[float]


def main() -> None:
    """Count and time the runs and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch._inductor.config.cpp.enable_kernel_profile = True  # its kernels are events of the profiler
    world, pairs = _one_rank(), dict[str, tuple[CountedRun, CountedRun]]()
    for name, words in MODELS.items():
        for micros in MICROS:
            run = load_recipe("quickstart", [*FIXED, *words, f"train.batch={micros}"])
            with patch.object(native, "layers_taken_together", lambda *_: []):
                apart = _counted_run(run, world)
            torch._dynamo.reset()  # each way has graphs of its own
            pairs[f"{name}, micro-batches: {micros}"] = apart, _counted_run(run, world)
            torch._dynamo.reset()
    for _ in range(rounds):
        for each in (each for pair in pairs.values() for each in pair):
            began = process_time()
            for _ in range(STEPS):
                _step(each.engine)
            each.times.append((process_time() - began) / STEPS)
    print(f"{'':<36}{'launches':>9}{'were':>7}{'products':>10}{'were':>7}{'sums':>7}{'were':>7}{'CPU':>10}{'was':>10}{'was / is':>10}")
    for name, (apart, together) in pairs.items():
        counts = f"{together.launches.total():>9}{apart.launches.total():>7}{_count(together, PRODUCTS):>10}{_count(apart, PRODUCTS):>7}"
        sums = f"{_count(together, SUMS):>7}{_count(apart, SUMS):>7}"
        ratio = median(before / now for before, now in zip(apart.times, together.times, strict=True))
        print(f"{name:<36}{counts}{sums}{1e3 * median(together.times):>7.1f} ms{1e3 * median(apart.times):>7.1f} ms{ratio:>10.3f}")


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
SUMS = ("aten::add_", "aten::_foreach_add_", "aten::_foreach_copy_", "aten::zero_")


def _count(run: CountedRun, names: tuple[str, ...]) -> int:
    return sum(run.launches[each] for each in names)


def _counted_run(run: Run, world: World) -> CountedRun:
    engine = build_engine(run, make_grid(world, mesh_position(run, 0)), make_plan(run).engine)
    for _ in range(2):
        _step(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _step(engine)
    return CountedRun(engine=engine, launches=Counter(_launches(profile.events())), times=[])


def _launches(events: Any) -> Iterator[str]:
    """Yield the names of events that compute and hold no other that does; on a CPU operators on lists hold those of their tensors."""
    for event in events:
        if not event.cpu_parent:
            yield from _launches_in(event)


def _launches_in(event: Any) -> list[str]:
    is_whole = "_foreach_" in event.name or event.name in PRODUCTS
    inner = [] if is_whole else [name for each in event.cpu_children for name in _launches_in(each)]
    return inner or [event.name] * _computes(event.name)


def _computes(name: str) -> bool:
    space, _, operator = name.partition("::")
    return "_fused_" in name or (space in ("aten", "distrain") and operator not in (*NO_KERNEL, *IDLE))


# Operators of the profiler's events that compute nothing.
# fmt: off
IDLE = (
    "contiguous", "flatten", "is_nonzero", "item", "linear", "_local_scalar_dense", "matmul", "mT", "promote_types", "real", "reshape",
    "resize_", "resolve_conj", "resolve_neg", "result_type", "to", "unflatten",
)
# fmt: on


def _step(engine: Any) -> None:
    tokens = torch.ones((1, engine.run.train.seq), dtype=torch.long)
    engine.step(lambda _: (tokens, tokens, {}), 1e-4, engine.micros * engine.run.train.seq)


def _one_rank() -> World:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    return join_ranks("cpu")


if __name__ == "__main__":
    show_help(__doc__)
    main()
