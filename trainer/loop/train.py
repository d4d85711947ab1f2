"""The loop: steps, evaluation, logging, saving, stopping."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ..engines.held import Count
from ..engines.zero import Stepped, ZeroEngine
from ..launch.talk import Talk
from ..parallel.keyed import keys
from ..parallel.world import World, agreed
from ..plan.result import Plan
from ..spec.run import Run
from .checkpoint import Found
from .data.batches import IGNORED, Batch, Batches, ahead, shard
from .meter import Meter
from .rate import rate
from .saving import keep
from .sinks import Sinks
from .watch import Pace, Profile, measured


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the loop needs beside the run: the plan, the batches, the engine, where words and rows go."""

    plan: Plan
    train: Batches
    validation: Batches | None
    engine: ZeroEngine
    world: World
    talk: Talk
    sinks: Sinks | None  # rank 0's
    folder: Path
    host: dist.ProcessGroup  # over which ranks exchange words, on the host


class Stop:
    """Whether this process was asked to stop: SIGTERM or SIGINT; the step that runs is finished first."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.asked = True


def train(run: Run, course: Course, found: Found, stop: Stop) -> bool:
    """Train to the end; True. False where the run was asked to stop and has saved."""
    steps, first = _steps(course), found.checkpoint.step if found.checkpoint else 0
    meter = Meter(run, course.plan, course.world)
    micros = _micros(run, course, first, steps)
    profile, pace = Profile(run, course.world, course.folder), Pace(run, steps, first)
    saved = first
    for step in range(first, steps):
        course.talk.beat(step)
        # The second step of a start is counted: the first has made all that stays.
        count = Count() if step == first + 1 else None
        profile.before(step + 1)
        began = perf_counter()
        stepped = _step(run, course, micros, step, steps, count)
        meter.stepped(perf_counter() - began, course.engine.clock)
        done = step + 1
        _look(course, count, profile, pace, stepped, done, steps)
        last, stopping = done == steps, agreed(stop.asked, course.world.device)
        row = _row(run, course, meter, stepped, done, steps) if last or stopping or done % run.log.every == 0 else None
        if course.validation and (last or _every(run.train.evaluate.every, done)) and not stopping:
            row = (row or {"step": done}) | {"validation_loss": _evaluate(run, course)}
        if row and course.sinks:
            course.sinks.write(row)
            course.talk.say(_line(row, steps))
        if last or stopping or _every(run.checkpoint.every, done):
            saved = keep(run, course.engine, course.world, course.host, course.folder, done, course.talk.say) or saved
        if stopping and not last:
            return False if saved == done else _unsaved(course)
    return True


def _look(course: Course, count: Count | None, profile: Profile, pace: Pace, stepped: Stepped, done: int, steps: int) -> None:
    """What is looked at beside the loss, and the live line."""
    if count is not None:
        facts = {"step": done, "unigram_entropy": course.train.corpus.entropy}
        measured(count, course.world, course.host, course.folder, facts)
    if trace := profile.after(done, last=done == steps):
        course.talk.say(f"trace of the profiler, for ui.perfetto.dev: {trace}")
    if line := pace.line(done, stepped.loss):
        course.talk.status(line)


def _unsaved(course: Course) -> bool:
    raise SystemExit(143)


def _steps(course: Course) -> int:
    assert course.plan.run is not None
    return course.plan.run.steps


def _every(number: int, done: int) -> bool:
    return number > 0 and done % number == 0


def _micros(run: Run, course: Course, first: int, steps: int) -> Iterator[Batch]:
    """This rank's micro-batches from a step on, the next one read while one is used."""
    world, train = course.world, run.train
    rows = (
        shard(step * train.batch, micro=micro, dp_rank=world.rank, dp=world.size, microbatch=train.microbatch, batch=train.batch)
        for step in range(first, steps)
        for micro in range(course.engine.micros)
    )
    return ahead(course.train, rows)


def _step(run: Run, course: Course, micros: Iterator[Batch], step: int, steps: int, count: Count | None) -> Stepped:
    batches = [next(micros) for _ in range(course.engine.micros)] if course.train.corpus.documents else None
    labels = run.train.batch * run.train.seq
    if batches is not None:  # labels across documents don't count: how many do is known to all ranks together only
        counted = torch.tensor(sum(int((each.labels != IGNORED).sum()) for each in batches))
        dist.all_reduce(counted, group=course.host)
        labels = int(counted)

    def micro(index: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        batch = batches[index] if batches is not None else next(micros)
        return _given(run, course, batch, step)

    return course.engine.step(micro, rate(run.optim, step, steps), labels, count)


def _given(run: Run, course: Course, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    device = course.world.device
    further: dict[str, Any] = {}
    if batch.documents is not None:
        further["documents"] = batch.documents.to(device, non_blocking=True)
    if run.model.dropout and step >= 0:
        further["keys"] = keys(run.train.seed, step, batch.samples.to(device), torch.arange(batch.tokens.shape[1], device=device))
    return batch.tokens.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True), further


def _evaluate(run: Run, course: Course) -> float:
    """Mean loss (nats a token) over the first validation batches, each rank its share."""
    assert course.validation is not None
    world, train = course.world, run.train
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    each = train.microbatch
    for first in range(world.rank * each, train.evaluate.batches * train.batch, world.size * each):
        tokens, labels, further = _given(run, course, course.validation.batch(first, each), -1)
        loss, counted = course.engine.evaluate(tokens, labels, **further)
        sums += torch.stack([loss.double(), counted.double()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def _row(run: Run, course: Course, meter: Meter, stepped: Stepped, done: int, steps: int) -> dict[str, Any]:
    row = {
        "step": done,
        "loss": stepped.loss,
        "grad_norm": stepped.grad_norm,
        "lr": rate(run.optim, done - 1, steps),
        "tokens": done * run.train.batch * run.train.seq,
    }
    return row | ({"skipped": True} if stepped.skipped else {}) | meter.row()


def _line(row: dict[str, Any], steps: int) -> str:
    """A logged step as a line."""
    words = [f"step {row['step']:>{len(str(steps))}}/{steps}"]
    words += [f"loss {row['loss']:.4f}"] if "loss" in row else []
    words += [f"validation {row['validation_loss']:.4f}"] if "validation_loss" in row else []
    words += [f"norm {row['grad_norm']:.3f}"] if row.get("grad_norm") is not None else []
    words += [f"lr {row['lr']:.2e}", f"{row['tokens_per_second']:,.0f} tokens/s"] if "lr" in row else []
    return "  ".join(words)
