"""Checks that the samples that a layout's ranks read make up each batch exactly once, and that they are those of one process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from ...plan.mesh_position import mesh_position
from ...spec.derived.batch_levels import samples_before
from ...spec.run import Train
from ..trials.trial import Trial

SHOWN = 3  # samples that are named

SampleRow = Sequence[int]  # a sample's number, its source, its window in the source, the CRC-32 of its tokens and labels


def sample_problem(trial: Trial, reference: Trial) -> str:
    """The first way in which the ranks of a trial don't read each sample of a batch exactly once, or read others than one process; "" if
    there is none. For the one process itself: the window that comes twice in an epoch."""
    log, expected = _read_log(trial.folder), _read_log(reference.folder)
    if log is None or expected is None or not (all(log["ranks"]) and all(expected["ranks"])):
        return "its ranks recorded no samples"
    replicas = [mesh_position(trial.run, rank).coordinates["dp"] for rank in range(trial.plan.world)]
    batches = _batch_problems(log, replicas, trial.run.train)
    return next(chain(batches, _content_problems(log, expected), _epoch_problems(expected)), "")


def _read_log(folder: Path) -> Mapping[str, Any] | None:
    with suppress(OSError, ValueError):
        log: dict[str, Any] = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
        return log
    return None


def _batch_problems(log: Mapping[str, Any], replicas: Sequence[int], train: Train) -> Iterator[str]:
    """Yield, for each step, a sample that the replicas read twice or never; or ranks of one replica that read different ones."""
    for index, ranks in enumerate(zip(*log["ranks"], strict=True)):
        step, of_replica = log["first"] + index, dict[int, list[int]]()
        for rank, (replica, rows) in enumerate(zip(replicas, ranks, strict=True)):
            numbers = [row[0] for row in rows]
            if of_replica.setdefault(replica, numbers) != numbers:
                yield f"step {step + 1}: rank {rank} reads others than the ranks with which it shares replica {replica}"
        counts = Counter(number for numbers in of_replica.values() for number in numbers)
        wanted = range(samples_before(train, step), samples_before(train, step + 1))
        if counts != Counter(wanted):
            yield f"step {step + 1}: {_miscounts(counts, wanted)}"


def _miscounts(counts: Counter[int], wanted: range) -> str:
    """The samples that are read too often, never, or from another batch, in words."""
    rows = (
        ("more than once", [each for each in counts if counts[each] > 1]),
        ("never", [each for each in wanted if each not in counts]),
        ("from another batch", [each for each in counts if each not in wanted]),
    )
    return "; ".join(f"samples {_numbers(each)} are read {how}" for how, each in rows if each)


def _numbers(samples: Sequence[int]) -> str:
    more = len(samples) - SHOWN
    return f"{', '.join(map(str, sorted(samples)[:SHOWN]))}{f' and {more} more' if more > 0 else ''}"


def _content_problems(log: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield each sample whose tokens or labels are others than in one process."""
    known = {row[0]: row[-1] for step in expected["ranks"][0] for row in step}
    for rank, steps in enumerate(log["ranks"]):
        for row in (row for rows in steps for row in rows):
            if known.get(row[0], row[-1]) != row[-1]:
                yield f"sample {row[0]} on rank {rank} holds other tokens than in one process"


def _epoch_problems(log: Mapping[str, Any]) -> Iterator[str]:
    """Yield each window that one process reads twice in an epoch of its source."""
    drawn: dict[int, list[int]] = {}
    for _, source, window, _ in (row for rows in log["ranks"][0] for row in rows):
        drawn.setdefault(source, []).append(window)
    for source, windows in drawn.items():
        first_epoch = windows[: log["windows"][source]]
        if repeated := [each for each, count in Counter(first_epoch).items() if count > 1]:
            yield f"windows {_numbers(repeated)} of source {source} come more than once in its first epoch"
