"""The time, throughput and memory of steps, next to the planned values."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from ...parallel.world import World
from ...plan.plan_data import Plan
from ...spec.run import Run

PLANNED_IN_ROWS = ("planned_seconds", "planned_memory_peak")  # the planned figures that every row holds


class ThroughputMeter:
    """Averages over the steps since the last row, under the keys of metrics.jsonl. Where train.rampup makes the batch larger, they are over
    the steps since then, and a row names the batch."""

    def __init__(self, run: Run, plan: Plan, world: World) -> None:
        self.run, self.plan, self.world = run, plan, world
        self._seconds: list[float] = []
        self._parts: dict[str, float] = {}
        self._figures: dict[str, Any] = {}  # of the last row
        self._batch = run.train.batch  # of the steps that are averaged
        self._planned = {each.batch: each.step for each in plan.run.levels} if plan.run else {}  # seconds of a step of each batch
        self._is_warm = False

    def add_step(self, seconds: float, parts: dict[str, float], batch: int) -> None:
        """Add a step of a batch of so many sequences, with the seconds of its parts where the engine measures them. The first compiles:
        memory is counted after it."""
        if batch != self._batch:
            self._batch, self._seconds, self._parts = batch, [], {}
        if not self._is_warm and self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)
        self._is_warm = True
        self._seconds.append(seconds)
        for part, each in parts.items():
            self._parts[part] = self._parts.get(part, 0.0) + each

    def take_row(self) -> dict[str, Any]:
        """Return the averages since the last row, and start new ones. Where no step was measured since, they are those of the last row."""
        if not self._seconds:
            return self._figures
        count = len(self._seconds)
        seconds = sum(self._seconds) / count
        tokens = self._batch * self.run.train.seq / seconds
        assert self.plan.model is not None
        flops = tokens * self.plan.model.flops_per_token / self.plan.world
        peak = self.run.cluster.device.peak.get(self.run.train.precision)
        parts = {f"seconds_{part}": each / count for part, each in self._parts.items() if self.world.device.type == "cpu"}
        self._seconds, self._parts = [], {}
        ramps = bool(self.run.train.rampup.batches)
        self._figures = {
            **({"batch": self._batch} if ramps else {}),
            "seconds": seconds,
            "tokens_per_second": tokens,
            "model_flops_per_second_per_gpu": flops,
            "mfu": flops / peak if peak else None,
            "memory_peak": memory_peak(self.world.device),
            **parts,
            **{key: value for key, value in planned_figures(self.plan).items() if key in PLANNED_IN_ROWS},
            **({"planned_seconds": self._planned.get(self._batch)} if ramps else {}),
        }
        return self._figures


def planned_figures(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures under the names of the measured ones, with the prefix `planned_`: memory without the driver's own."""
    time, memory, speed = plan.time, plan.memory, plan.throughput
    return {
        "planned_seconds": time.step if time else None,
        "planned_memory_peak": memory.peak - memory.stages[memory.stage].bytes.overhead if memory else None,
        "planned_tokens_per_second": speed.tokens_per_second if speed else None,
        "planned_mfu": speed.mfu if speed else None,
    }


def memory_peak(device: torch.device) -> int:
    """Return the peak so far, in bytes: of what torch's allocator has given out on a GPU, of the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
