"""The loop: steps, evaluation, logging, saving, stopping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ..engines.engine import Engine, Stepped
from ..engines.held_bytes import Count
from ..launch.rank.channel import Talk
from ..parallel.ledger import Ledger
from ..parallel.process_groups import Grid
from ..parallel.world import World, agreed
from ..plan.result import Plan
from ..spec.run import Run
from ..system.stop_requests import Stop
from .anomalies import Poison, finite
from .checkpoint import Found
from .data.batches import IGNORED, Batch, Batches, ahead, shard
from .engine_state import keep
from .evaluate import evaluated, given
from .failure import AllFailed
from .instrumentation import Pace, Profile, measured, messages
from .lr_schedule import rate
from .position import Position
from .sinks import Sinks
from .throughput import Meter
from .trace.recorder import asked


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the loop needs beside the run: the plan, the batches, the engine, where words and rows go."""

    plan: Plan
    train: Batches
    validation: Batches | None
    engine: Engine
    grid: Grid
    talk: Talk
    start: Position  # where this start of the run begins
    sinks: Sinks | None  # rank 0's
    folder: Path
    host: dist.ProcessGroup  # over which ranks exchange words, on the host

    @property
    def world(self) -> World:
        return self.grid.world


class Unsaved(AllFailed):
    """A run has come to its end and its last checkpoint is not there."""


def train(run: Run, course: Course, found: Found, stop: Stop) -> bool:
    """Train to the end; True. False where the run was asked to stop and a checkpoint stands: one that is asked before its first step
    and goes on from one takes none. Raises Poisoned or Unsaved on all ranks."""
    steps, first = course.start.last_step(run), course.start.step
    if first >= steps:
        course.talk.say(_nothing(run, first, steps))
    meter = Meter(run, course.plan, course.world)
    micros = _micros(run, course, first, steps)
    profile, pace, poison = Profile(run, course.world, course.folder), Pace(run, steps, first), Poison(run, course.start)
    trace = asked(run, course.engine, course.grid, course.folder)
    saved = first
    if found.checkpoint and first < steps and agreed(stop.asked, course.world.device):
        return False
    for step in range(first, steps):
        course.talk.beat(step)
        # The second step of a start is counted: the first has made all that stays.
        count = Count() if step == first + 1 else None
        profile.before(step + 1)
        # The third has found out all that engines find out on the way.
        ledger = Ledger(course.grid) if run.log.ledger and step == min(first + 2, steps - 1) else None
        began = perf_counter()
        with ledger or nullcontext(), trace.step(step) if trace else nullcontext():
            stepped = _step(run, course, micros, step, steps, count)
        meter.stepped(perf_counter() - began, course.engine.clock)
        done = step + 1
        if ledger:
            _warn(course, messages(ledger, course.world, course.host, course.folder, done))
        if trace and step == trace.last:
            return True
        _look(course, count, profile, pace, stepped, done, steps)
        last, stopping = done == steps, agreed(stop.asked, course.world.device)
        marks = poison.marks(stepped, done)
        row = (_row(run, course, meter, stepped, done, steps) | marks) if marks or last or stopping or done % run.log.every == 0 else None
        if course.validation and (last or _every(run.train.evaluate.every, done)) and not stopping:
            course.talk.phase("evaluate")
            samples = range(run.train.evaluate.batches * run.train.batch)
            loss = evaluated(run, course.engine, course.grid, course.validation, samples, course.talk.pulse)
            row = (row or {"step": done}) | {"validation_loss": finite(loss)}
        if row and course.sinks:
            course.sinks.write(row)
            if "console" in run.log.sinks:
                course.talk.say(_line(row, steps))
        poison.stop(stepped, done)
        if last or stopping or _every(run.checkpoint.every, done):
            course.talk.phase("save")
            here = course.start.after(run, done)
            saved = keep(run, course.engine, course.grid, course.train, course.host, course.folder, here, course.talk) or saved
        if stopping and not last:
            return False if saved == done else _unsaved(course)
    course.talk.phase("end")
    if saved < steps:  # more of them are there where train.steps has become smaller
        raise Unsaved(f"trained to step {steps}, which could not be saved: {_newest(saved)}")
    return True


def _nothing(run: Run, first: int, steps: int) -> str:
    """That a run has no step left, and what would go on."""
    more = f"train.steps={2 * first}" if run.train.steps else f"train.tokens={2 * first * run.train.batch * run.train.seq:g}"
    if first == steps:
        return f"step {first} of {steps} is done: nothing to train; {more} goes on"
    return f"the newest checkpoint is of step {first}, and the run ends at step {steps}: nothing to train; {more} goes on"


def _look(course: Course, count: Count | None, profile: Profile, pace: Pace, stepped: Stepped, done: int, steps: int) -> None:
    """What is looked at beside the loss, and the live line."""
    if count is not None:
        facts = {"step": done, "unigram_entropy": course.train.corpus.entropy}
        _warn(course, measured(count, course.world, course.host, course.folder, facts))
    if said := profile.after(done, last=done == steps):
        course.talk.say(said)
    if line := pace.line(done, stepped.loss):
        course.talk.status(line)


def _warn(course: Course, wrong: str) -> None:
    if wrong:
        course.talk.say(f"warning: {wrong}; training goes on")


def _newest(saved: int) -> str:
    return f"make room and start it again, and it goes on from step {saved}" if saved else "no checkpoint of it is there"


def _unsaved(course: Course) -> bool:
    raise SystemExit(143)


def _every(number: int, done: int) -> bool:
    return number > 0 and done % number == 0


def _micros(run: Run, course: Course, first: int, steps: int) -> Iterator[Batch]:
    """This rank's micro-batches from a step on, the next one read while one is used."""
    train, rank, ranks = run.train, course.grid.place("dp"), course.grid.size("dp")
    rows = (
        shard(course.start.after(run, step).sample, micro=micro, dp_rank=rank, dp=ranks, microbatch=train.microbatch, batch=train.batch)
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
        labels = int(counted) * course.grid.size("dp") // course.world.size  # the ranks of a replica count the same

    def micro(index: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        batch = batches[index] if batches is not None else next(micros)
        return given(run, batch, course.grid, step)

    return course.engine.step(micro, rate(run.optim, step, steps), labels, count)


def _row(run: Run, course: Course, meter: Meter, stepped: Stepped, done: int, steps: int) -> dict[str, Any]:
    row = {
        "step": done,
        "loss": finite(stepped.loss),
        "grad_norm": finite(stepped.grad_norm),
        "lr": rate(run.optim, done - 1, steps),
        "tokens": course.start.after(run, done).tokens,
    }
    row |= {"near_ties": stepped.near_ties} if stepped.near_ties is not None else {}
    return row | meter.row()


def _line(row: dict[str, Any], steps: int) -> str:
    """A logged step as a line."""
    words = [f"step {row['step']:>{len(str(steps))}}/{steps}"]
    words += [f"loss {row['loss']:.4f}"] if row.get("loss") is not None else []
    words += [f"validation {row['validation_loss']:.4f}"] if row.get("validation_loss") is not None else []
    words += [f"norm {row['grad_norm']:.3f}"] if row.get("grad_norm") is not None else []
    words += [f"lr {row['lr']:.2e}", f"{row['tokens_per_second']:,.0f} tokens/s"] if "lr" in row else []
    if "skipped" in row:
        words.append("skipped, weights stay: a loss or gradient is not finite on samples {} to {}".format(*row["samples"]))
    words += [f"a spike, {row['spike']} spreads above the losses before"] if "spike" in row else []
    return "  ".join(words)
