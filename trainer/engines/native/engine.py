"""Engine `native`: PyTorch's own parts. On the data axis flat buckets of weights (ZeRO 0 to 2) or fully_shard (3), and a pipeline that
executes the actions of any schedule (delayed_engine.py: of those that don't flush)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...layers.group_messages import all_reduce
from ...parallel.process_groups import Grid, GroupName
from ...parallel.rank_model import RankPart
from ...plan.layout.schedule_of_run import schedule_of
from ...plan.layout.schedules import SCHEDULES, Schedule
from ...plan.native.buckets import gradient_buckets, is_tied_over_stages
from ...plan.native.dim0_shards import gathers_once
from ...spec.run import Run
from ..clipping import clip_divisor
from ..engine import STEP_PARTS, Engine, ParameterPartitioner, ReadMicrobatch, ReadShard, StepResult
from ..held_bytes import ByteCounter
from ..rank_parameter import OptimizerShard, RankParameter, optimizer_state
from ..shared_embedding import further_uses, share_embedding
from .bucket_optimizer import BucketOptimizer
from .compute_types import compute_types, row_type
from .data_parallel.bucket_reducer import BucketReducer
from .data_parallel.gradient_squares import counted_squares
from .data_parallel.hierarchical_sum import HierarchicalSum
from .data_parallel.host_gradients import HostGradients, sum_on_device
from .data_parallel.shard_groups import RowGroups, row_groups, shard_groups
from .data_parallel.sharded_weights import (
    ShardedReducer,
    ShardedWeight,
    collect_gathered,
    drop_gathered,
    first_element,
    keep_own_rows,
    kind_and_rows,
    local_rows,
    sharded_weights,
)
from .data_parallel.weight_buckets import WeightBucket, take_stepped_weights
from .data_parallel.worker_average import WorkerAverage
from .loss_scale import LossScale
from .pipeline import PassHooks, Pipeline, ScheduledStep
from .prepare_layers import layers_taken_together, prepare_layers
from .stage_chain import StageChain
from .stage_messages import StageMessages


class NativeEngine(Engine):
    """Trains this rank's parts of the model with torch's own optimizer, on flat float32 shards of its weights."""

    loss_scale_fields = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, run: Run, parts: Sequence[RankPart], grid: Grid) -> None:
        if len(parts) > 1 and run.model.shares_embedding:
            share_embedding(parts[0].module, parts[-1].module)
        self.scale = LossScale() if run.train.precision == "fp16" else None
        self.modules = tuple(each.module for each in parts)
        self._types = compute_types(run)
        self._sharding = sharding = row_groups(run, grid)
        if sharding:
            from .data_parallel.fully_sharded import shard_modules

            shard_modules(self.modules, sharding, self._types, grid.world.device, on_host=run.parallel.offload.parameters)
        super().__init__(run, parts, grid)
        self.clock = dict.fromkeys(STEP_PARTS, 0.0)
        self._owned = self._distinct_parameters()
        self.reducer: BucketReducer | ShardedReducer
        self.buckets: Sequence[WeightBucket | ShardedWeight]
        self.buckets, self.reducer = self._shard_fully(sharding) if sharding else self._fill_buckets()
        self._bucket_of = {row.parameter: bucket for bucket in self.buckets for row in bucket.rows}
        self.bucket_optimizer = BucketOptimizer(run, grid, self.buckets, grid.world.device, self._types, self._warn, self.modules)
        self.optimizer, self.averaged_weights = self.bucket_optimizer.optimizer, self.bucket_optimizer.averaged_weights
        self.together = WorkerAverage(run, grid, self.buckets, self.optimizer) if grid.group("workers") else None
        self._workers = self.together.workers if self.together else 1
        self._alone = False  # a step was taken since the last one together
        self.pipeline = self._make_pipeline()

    @classmethod
    def parameter_partitioner(cls, run: Run, grid: Grid) -> ParameterPartitioner | None:
        groups = row_groups(run, grid)
        return partial(keep_own_rows, groups=groups, dtype=row_type(run), on_host=run.parallel.offload.parameters) if groups else None

    @property
    def peak_in_flight(self) -> float:
        """The most micro-batches whose activations this rank held at once in the last step."""
        return self.pipeline.peak_in_flight

    def step(
        self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None
    ) -> StepResult | None:
        self.clock = dict.fromkeys(STEP_PARTS, 0.0)
        total = self._run_passes(read_microbatch, label_count, byte_counter)
        return self._take_step(total, self.figures.take_all(), lr, label_count)

    def _run_passes(self, read_microbatch: ReadMicrobatch, label_count: int, byte_counter: ByteCounter | None) -> Tensor:
        """Run a step's forwards and backwards, and the sums of gradients up to the data axis's. Return the sum of this rank's losses."""
        scale = self.backward_scale * self._workers / label_count  # labels are shared out evenly
        for each in self.modules:  # parts of a mixture add the gradient of its auxiliary loss, which does not reach the loss
            each.loss_gradient = scale  # type: ignore[assignment]
        self.reducer.begin(self.micros)
        with collect_gathered(self.modules if byte_counter and self._sharding else ()) as gathered:
            if byte_counter:
                byte_counter.gathered = gathered
            total = self.pipeline.train(
                ScheduledStep(actions=self._actions, read_microbatch=read_microbatch, scale=scale, byte_counter=byte_counter)
            )
        with self._measure_time("sums", "sum"):
            self.reducer.finish_backward()
        if byte_counter:
            byte_counter.count_backward(self.held_bytes())
        with self._measure_time("sums", "tied"):
            self._sum_tied_gradients()
        with self._measure_time("sums", "sum"):
            self._sum_over_tensor_axis()
            self.reducer.send_late()
        return total

    def _take_step(self, total: Tensor, figures: Tensor, lr: float, label_count: int) -> StepResult:
        """Finish the data axis's sums of a step's gradients, and step the weights with them. `total` and `figures` are this rank's."""
        self.bucket_optimizer.set_rate(lr)
        with self._measure_time("sums", "sum"):
            self.reducer.finish()
            squares = counted_squares(self.buckets, total.device)
        with self._measure_time("sums", "sync"):
            sums = self._sum_over_ranks(total, squares, figures)
        self._call_show_gradients()
        with self._measure_time("step", "step"):
            most_loss, most_norm = self.limits.loss * label_count, self.limits.grad_norm
            is_finite = sums[:2].isfinite().all()
            sums[1].sqrt_().div_(self.backward_scale)
            is_taken = is_finite & (sums[0] <= most_loss) & (sums[1] <= most_norm)
            self._step_optimizer(squares.sqrt() / self.backward_scale if self.together else sums[1], is_taken)
            self._alone = self.together is not None
            (loss, norm, *others), counts = self.figures.split(sums)
            overflow = not (norm < torch.inf and abs(loss) < torch.inf)  # nan is neither
            beyond = not overflow and (loss > most_loss or norm > most_norm)
            self.skipped_steps += overflow or beyond
            if self.scale:
                self.scale.update(overflow=overflow)
        named, skipped = self.figures.result_fields([each / label_count for each in others], counts), overflow or beyond
        return StepResult(loss=loss / label_count, grad_norm=norm, skipped=skipped, beyond_limits=beyond, **named)

    def step_together(self) -> None:
        if self.together is not None:
            with self._measure_time("sums", "sum"):
                self.together.step()
            self._alone = False

    def flush(self) -> list[StepResult]:
        if self._alone:
            self.step_together()
        return []

    def prepare_save(self) -> None:
        if self.together is not None:
            self.together.average_states()

    def restore(self, read: ReadShard, counters: Mapping[str, Any], has: Callable[[str], bool]) -> None:
        drop_gathered(self.modules)  # the pass of a reference before it has left the ends of the model gathered
        super().restore(read, counters, has)
        if self.together is not None:
            self.together.restart()

    def gather_restored(self) -> None:
        take_stepped_weights(self.buckets)

    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, labels counted) of a micro-batch of this replica, without gradients, on the rank with the head; 0 and 0 on
        the others."""
        for each in self.modules:
            each.eval()
        sums = self.pipeline.evaluate(lambda _: (tokens, labels, further))
        for each in self.modules:
            each.train()
        return sums

    def optimizer_shards(self) -> Iterator[OptimizerShard]:
        for bucket in self.buckets:
            state = optimizer_state(self.optimizer, bucket.master)
            for row, start, offset, length in bucket.pieces:
                yield OptimizerShard(
                    shard=row.shard,
                    tied=row.tied,
                    start=start,
                    length=length,
                    weight=bucket.master.data[offset : offset + length],
                    state=state,
                    offset=offset,
                    copies=self._copies_of(bucket),
                )

    def _copies_of(self, bucket: WeightBucket | ShardedWeight) -> GroupName | None:
        """Return the group of the data-parallel ranks that step the same elements; None: no other does."""
        if self.together is None:
            return bucket.copies.name if bucket.copies else None
        if isinstance(bucket, WeightBucket) and bucket.sharing is None:
            return "expert_copies" if bucket.kind.expert else "data"
        return "expert_workers" if bucket.kind.expert else "workers"

    @property
    def backward_scale(self) -> float:
        """Gradients are of the global batch's mean loss, times fp16's scale."""
        return self.scale.cur_scale if self.scale else 1.0

    def averaged_gradients(self) -> Iterator[tuple[RankParameter, int, Tensor]]:
        for bucket in self.buckets:
            for row, start, offset, length in bucket.pieces:
                yield row, start, bucket.shard_gradient[offset : offset + length].float() / self.backward_scale

    @contextmanager
    def time_actions(self, rows: list[dict[str, Any]]) -> Iterator[None]:
        self.pipeline.times = []
        try:
            yield
            rows += [asdict(each) for each in self.pipeline.times]
        finally:
            self.pipeline.times = None

    def _warn(self, says: str) -> None:
        if self.grid.world.is_rank0:
            print(f"warning: {says}", file=sys.stderr, flush=True)

    def _step_optimizer(self, norm: Tensor, is_finite: Tensor) -> None:
        """Clip the gradients to a norm of train.clip, step this rank's weights unless a number is not finite, and gather the others'."""
        clip = self.run.train.clip
        divisor = (clip_divisor(norm, clip) if clip else torch.ones_like(norm)) * self.backward_scale
        self.bucket_optimizer.step(divisor, is_finite, scales=bool(clip or self.scale))

    def _sum_over_ranks(self, total: Tensor, squares: Tensor, others: Tensor) -> Tensor:
        """Return the sums over all ranks of the loss, of the squares of the gradients, and of the other figures of a step, in one message.
        Each figure is added by the first of the ranks that have it. Where workers step alone, the mean of their squares is
        returned, and `squares` becomes the sum over this rank's worker, by which it clips."""
        sums = self.figures.join(total, squares / self._workers, others)
        if worker := self.grid.group("worker"):
            all_reduce(squares, worker)
        if self.grid.world.size > 1:
            dist.all_reduce(sums)
        return sums

    def _summed_gradients(self, rows: Sequence[RankParameter]) -> Iterator[Tensor]:
        """Return whole gradients, before the data axis sums them; those of late buckets alone are asked for."""
        return (self._bucket_of[row.parameter].own_gradient(row.parameter) for row in rows)

    def _sum_tied_gradients(self) -> None:
        """Sum the embedding's gradients of the first stage and of the last, which has a copy: both step with the sum."""
        group = self.grid.group("ends")
        if group is None or not self.run.model.shares_embedding or len(self._owned) < len(self.parameters):
            return
        for row in self._owned:
            if row.parameter.requires_grad and is_tied_over_stages(self.run, self.grid.position.mesh, row.name):
                sum_on_device(self._bucket_of[row.parameter].own_gradient(row.parameter), group, self.grid.world.device)

    def _held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            yield from bucket.held_tensors()
        yield from (kind_and_rows(row.parameter) for row in self._owned if not row.parameter.requires_grad)
        yield from (("host", each) for each in self.reducer.host.held_tensors()) if self.reducer.host else ()
        yield from self.bucket_optimizer.held_tensors()
        yield from (("optimizer", each) for each in self.together.held_tensors()) if self.together else ()

    def _forward_weights(self) -> Iterator[tuple[RankParameter, int, Tensor]]:
        for row in self._owned:
            if self._sharding is not None and (not row.parameter.requires_grad or self.run.parallel.offload.optimizer):
                yield row, first_element(row, self._sharding), local_rows(row.parameter).view(-1)
            elif self._sharding is None and not row.parameter.requires_grad:  # the others are those that are stepped
                yield row, 0, row.parameter.data.view(-1)

    @property
    def _loss_scaler(self) -> Any:
        return self.scale

    def _distinct_parameters(self) -> list[RankParameter]:
        """This rank's parameters, each once: where one rank has both ends of a tied model, the weight that they share is in two parts."""
        seen: dict[nn.Parameter, RankParameter] = {}
        for row in self.parameters:
            seen.setdefault(row.parameter, row)
        return list(seen.values())

    def _fill_buckets(self) -> tuple[list[WeightBucket], BucketReducer]:
        """Move the weights into flat buckets, and take each gradient as soon as autograd has it."""
        run, grid, layers = self.run, self.grid, layers_taken_together(self.run, self.modules)
        rows = {row.name: row for row in self._owned}
        made = [
            WeightBucket(
                each,
                rows,
                shard_groups(run, grid, expert=each.kind.expert),
                run.parallel.zero,
                self._types[1],
                by_autograd=not (self._defers_weight_gradients or layers),
                on_host=run.parallel.offload.optimizer,
            )
            for each in gradient_buckets(run, grid.position.mesh, [row.shard for row in self._owned])
        ]
        for each in made:
            if each.levels and each.gradients is not None:
                each.rounds = HierarchicalSum(each.gradients, *each.levels)
        uses = Counter(parameter for module in self.modules for parameter in module.parameters())
        if self._defers_weight_gradients:
            uses += further_uses(run, self.modules[-1])
        reducer = BucketReducer(made, uses, layers, overlap=run.parallel.overlap.data)
        for parameter in reducer.hooked_parameters():
            parameter.register_post_accumulate_grad_hook(reducer.take_gradient)  # type: ignore[no-untyped-call]
        if layers:
            prepare_layers(run, self.modules, made, reducer)
        return made, reducer

    def _shard_fully(self, groups: RowGroups) -> tuple[list[ShardedWeight], ShardedReducer]:
        buckets = gradient_buckets(self.run, self.grid.position.mesh, [row.shard for row in self._owned])
        weights = sharded_weights(self._owned, buckets, groups, on_host=self.run.parallel.offload.optimizer)
        from .data_parallel.fully_sharded import sum_gradients

        apart = sum_gradients if self._defers_weight_gradients else None
        host = HostGradients(weights, self.grid.world.device, self._types[1]) if self.run.parallel.offload.parameters else None
        return weights, ShardedReducer(self.modules, weights, self._types[1], apart, host, once=gathers_once(self.run.parallel))

    @property
    def _schedule(self) -> Schedule:
        """The schedule that runs: one stage waits for no other, whatever the recipe names."""
        return schedule_of(self.run.parallel) if self.grid.position.mesh.pp > 1 else SCHEDULES["1f1b"]

    @property
    def _defers_weight_gradients(self) -> bool:
        """Whether the schedule computes some weights' gradients apart."""
        return self._schedule.splits_backward

    def _make_pipeline(self) -> Pipeline:
        run, grid, reducer, hooks = self.run, self.grid, self.reducer, self._pass_hooks()
        self._change_micros()
        messages = StageMessages(grid, StageChain(stages=grid.position.mesh.pp, chunks=len(self.modules), folded=self._schedule.folded))
        tokens = run.train.seq // grid.size("cp") // (grid.size("tp") if run.parallel.sequence else 1)
        stream = torch.empty(run.train.microbatch, tokens, run.model.hidden, dtype=self._types[0], device="meta")
        return Pipeline(self.modules, messages, stream, reducer, self._measure_time, hooks)

    def _change_micros(self) -> None:
        stages = range(self.grid.position.mesh.pp)
        self._actions = [self._schedule.actions(stage, len(stages), self.micros, len(self.modules)) for stage in stages]

    def _pass_hooks(self) -> PassHooks:
        return PassHooks()
