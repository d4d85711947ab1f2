"""Engine `native` where a pipeline does not flush: weights are updated late, and each micro-batch meets one version of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.process_groups import FIGURES_GROUP, Grid
from ...parallel.rank_model import RankPart
from ...parallel.world import COLLECTIVE_TIMEOUT
from ...plan.layout.actions_without_flush import flush_actions, step_actions
from ...plan.layout.schedule_of_run import delay_of
from ...plan.layout.schedules import Action
from ...spec.run import Run
from ..engine import STEP_PARTS, ReadMicrobatch, StepResult
from ..held_bytes import ByteCounter
from .data_parallel.gradient_squares import counted_squares
from .data_parallel.weight_buckets import WeightBucket
from .engine import NativeEngine
from .pipeline import PassHooks, ScheduledStep
from .weight_versions import WeightVersions


@dataclass(kw_only=True)
class OpenStep:
    """A step whose result has not come: its rate, how many labels count, the squares of its updates' gradients on this rank, what its
    forwards found (StepFigures.take_all) once the next step's begin, its sums."""

    lr: float
    label_count: int
    squares: Tensor
    figures: Tensor | None = None
    sums: Tensor | None = None
    work: Any = None


class DelayedEngine(NativeEngine, PassHooks):
    """Trains a pipeline whose steps go on where the step before stopped: PipeDream (arXiv:1806.03377), PipeDream-2BW (arXiv:2006.09503).

    A stage clips by its own norm and skips an update whose gradients are not finite; no stage waits for the others' numbers. Steps,
    micro-batches and versions are numbered from the last flush.
    """

    def __init__(self, run: Run, parts: Sequence[RankPart], grid: Grid) -> None:
        delay = delay_of(run.parallel)
        assert delay is not None
        self._delay, self._stage, self._stages = delay, grid.coordinate("pp"), grid.size("pp")
        super().__init__(run, parts, grid)
        self.late_steps = delay.steps_late(self._stages, self.micros)
        self._updates = delay.updates(self.micros)
        self.versions = WeightVersions([each for each in self.buckets if isinstance(each, WeightBucket)])
        self._open: dict[int, OpenStep] = {}  # by number
        self._met: dict[int, int] = {}  # micro-batch whose backward is to come -> the version that its forward met
        self._begun = self._forwards = 0  # steps, micro-batches
        # results travel apart from what ranks agree on between steps
        self._all = dist.new_group(timeout=COLLECTIVE_TIMEOUT, group_desc=FIGURES_GROUP)
        self._stage_group = _stage_group(grid)
        self.reducer.begin(self.micros // self._updates)

    def step(
        self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None
    ) -> StepResult | None:
        """Run the forwards of a step, and the backwards and updates that they make room for. Return the result of the step that was begun
        `late_steps` before; None where there is none since the last flush."""
        self.clock = dict.fromkeys(STEP_PARTS, 0.0)
        scale, first = self._updates / label_count, self._begun * self.micros
        for each in self.modules:
            each.loss_gradient = scale  # type: ignore[assignment]
        if (before := self._open.get(self._begun - 1)) and before.sums is None:
            before.figures = self.figures.take_all()
        squares = torch.zeros((), dtype=torch.float64, device=self.grid.world.device)
        self._open[self._begun] = OpenStep(lr=lr, label_count=label_count, squares=squares)
        self._begun += 1
        actions = [step_actions(stage, self._stages, first, first + self.micros) for stage in range(self._stages)]
        self.pipeline.train(
            ScheduledStep(
                actions=actions, read_microbatch=read_microbatch, scale=scale, byte_counter=byte_counter, first=first, flushes=False
            )
        )
        if byte_counter:
            byte_counter.count_backward(self.held_bytes())
        return self._finish_oldest() if len(self._open) > self.late_steps else None

    def flush(self) -> list[StepResult]:
        """Run the backwards and updates that are left. Return the results that have not come. The newest weights are shown."""
        actions = [flush_actions(stage, self._stages, self._begun * self.micros) for stage in range(self._stages)]
        self.pipeline.train(ScheduledStep(actions=actions, read_microbatch=_no_micro_batch, scale=0.0))
        results = [self._finish_oldest() for _ in list(self._open)]
        self.versions.restart()
        self._begun = self._forwards = 0
        return results

    def before_pass(self, action: Action) -> None:
        """Show the version that a micro-batch meets, in backward that of its forward."""
        if action.kind == "F":
            self._met[action.micro] = self._delay.version(self._stage, self._stages, action.micro, self.micros)
            self._forwards = action.micro + 1
        self.versions.use(self._met[action.micro])

    def after_backward(self, micro: int, total: Tensor) -> None:
        """Update the weights after the last micro-batch of an update; after a step's last update, send this rank's part of its result."""
        del self._met[micro]
        if self._delay.update_of(micro, self.micros) == self._delay.update_of(micro + 1, self.micros):
            return
        step = self._open[micro // self.micros]
        with self.pipeline.keep_time("U", micro, self._stage):
            self._begin_version()
            step.squares += self._update(step.lr)
        if (micro + 1) % self.micros == 0:
            self._send_result(step, total)

    def _begin_version(self) -> None:
        """Begin a new version; the newest one stays if a micro-batch under way, or the next one, meets it."""
        following = self._delay.version(self._stage, self._stages, self._forwards, self.micros)
        needed = min([following, *self._met.values()])
        self.versions.drop_before(min(needed, self.versions.newest))
        self.versions.add(keep=needed <= self.versions.newest)

    def _update(self, lr: float) -> Tensor:
        """Step with the gradients that have arrived. Return the squares of those that this rank counts."""
        with self._measure_time("sums"):
            self.reducer.finish_backward()
            self._sum_over_tensor_axis()
            self.reducer.send_late()
            self.reducer.finish()
            own = counted_squares(self.buckets, self.grid.world.device)
            squares = own.clone()
            if self._stage_group is not None:
                dist.all_reduce(squares, group=self._stage_group)
        with self._measure_time("step"):
            self.bucket_optimizer.set_rate(lr)
            self._step_optimizer(squares.sqrt(), squares.isfinite())
        self.reducer.begin(self.micros // self._updates)
        return own

    def _send_result(self, step: OpenStep, total: Tensor) -> None:
        """Begin to sum a step's figures over all ranks: its loss, the mean square of its updates' gradients, its other figures."""
        figures = self.figures.take_all() if step.figures is None else step.figures
        step.sums = self.figures.join(total, step.squares / self._updates, figures)
        step.work = dist.all_reduce(step.sums, group=self._all, async_op=True)

    def _finish_oldest(self) -> StepResult:
        """Return the result of the oldest open step, once all ranks have sent their part."""
        step = self._open.pop(min(self._open))
        assert step.sums is not None
        step.work.wait()
        (loss, square, *others), counts = self.figures.split(step.sums)
        skipped = not (square < torch.inf and abs(loss) < torch.inf)  # nan is neither
        self.skipped_steps += skipped
        norm = square**0.5 if square == square else square
        figures = self.figures.result_fields([each / step.label_count for each in others], counts)
        return StepResult(loss=loss / step.label_count, grad_norm=norm, skipped=skipped, **figures)

    def _pass_hooks(self) -> PassHooks:
        return self

    def _held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("weights", each) for each in self.versions.held_tensors())
        yield from super()._held_tensors()


def _no_micro_batch(index: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    raise AssertionError(f"a flush reads no micro-batch, and not {index}")


def _stage_group(grid: Grid) -> dist.ProcessGroup | None:
    """Return the group of the ranks of this rank's stage, which clip together; None where it has one. Every rank calls it."""
    mesh, own = grid.position.mesh, None
    stages = [[rank for rank in range(mesh.world) if mesh.coordinates(rank)["pp"] == stage] for stage in range(mesh.pp)]
    for ranks in stages if len(stages[0]) > 1 else []:
        group = dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)
        own = group if grid.world.rank in ranks else own
    return own
