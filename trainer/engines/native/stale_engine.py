"""Engine `native` where sums of gradients are used some steps late, so that a whole step hides their messages (parallel.staleness)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ...parallel.process_groups import Grid
from ...parallel.rank_model import RankPart
from ...spec.run import Run
from ..engine import STEP_PARTS, ReadMicrobatch, StepResult
from ..held_bytes import ByteCounter
from .data_parallel.bucket_reducer import BucketReducer
from .data_parallel.gradient_sums import SumUnderWay
from .data_parallel.weight_buckets import WeightBucket
from .engine import NativeEngine


class UnusedStep(NamedTuple):
    """A step whose gradients have not been used: its rate, its labels, its loss and other figures on this rank, the sum of each bucket."""

    lr: float
    label_count: int
    total: Tensor
    figures: Tensor
    sums: list[SumUnderWay]


class StaleEngine(NativeEngine):
    """Trains with gradients that are used `staleness` steps after the one that computed them, or at the flush before an evaluation or a
    checkpoint: while they were summed, as many updates changed the weights."""

    reducer: BucketReducer
    buckets: Sequence[WeightBucket]

    def __init__(self, run: Run, parts: Sequence[RankPart], grid: Grid) -> None:
        super().__init__(run, parts, grid)
        self.late_steps = run.parallel.staleness if grid.group("data") else 0
        self._unused: deque[UnusedStep] = deque()  # oldest first

    def step(
        self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None
    ) -> StepResult | None:
        """Compute a step's gradients and begin to sum them; use those of the step `late_steps` before. Return that step's result; None
        where there is none since the last flush."""
        self.clock = dict.fromkeys(STEP_PARTS, 0.0)
        total = self._run_passes(read_microbatch, label_count, byte_counter)
        sums = [each.set_sum_aside() for each in self.buckets]
        self._unused.append(UnusedStep(lr, label_count, total, self.figures.take_all(), sums))
        return self._use_oldest() if len(self._unused) > self.late_steps else None

    def flush(self) -> list[StepResult]:
        return [self._use_oldest() for _ in list(self._unused)]

    def _use_oldest(self) -> StepResult:
        step = self._unused.popleft()
        for bucket, each in zip(self.buckets, step.sums, strict=True):
            bucket.take_sum_back(each)
        return self._take_step(step.total, step.figures, step.lr, step.label_count)

    def _held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super()._held_tensors()
        for step in self._unused:
            for each in step.sums:
                yield from each.held_tensors()
