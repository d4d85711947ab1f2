"""Engine `zero`: DeepSpeed ZeRO stages 0 to 3 over the data axis, around tensor- and context-parallel layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...layers.transformer.attention import Attention
from ...layers.transformer.feed_forward import FeedForward
from ...parallel.process_groups import Grid, GroupName
from ...parallel.rank_model import RankPart
from ...plan.axes.weight_slices import WeightShard
from ...plan.deepspeed.ds_config import deepspeed_config
from ...spec.run import Run
from ..engine import ParameterPartitioner, ReadMicrobatch, ReadShard, StepResult
from ..held_bytes import ByteCounter
from ..torch_optimizer import torch_optimizer
from .engine import DeepSpeedAdapter, clip
from .import_deepspeed import connect_deepspeed


class ModelParallelUnit:
    """The `mpu` that DeepSpeed asks for process groups: the model axis (tensor parallel) and the data axis."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._handle("model")

    def get_model_parallel_rank(self) -> int:
        return self.grid.coordinate("model")

    def get_model_parallel_world_size(self) -> int:
        return self.grid.size("model")

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._handle("data")

    def get_data_parallel_rank(self) -> int:
        return self.grid.coordinate("data")

    def get_data_parallel_world_size(self) -> int:
        return self.grid.size("data")

    def _handle(self, name: GroupName) -> dist.ProcessGroup | None:
        group = self.grid.group(name)
        return group.handle if group else self.grid.alone


def model_parallel_unit(grid: Grid) -> ModelParallelUnit | None:
    """Return the `mpu` of a run with tensor parallelism; None without."""
    return ModelParallelUnit(grid) if grid.group("tp") else None


class ZeroEngine(DeepSpeedAdapter):
    """DeepSpeed ZeRO around a whole model or its tensor-parallel shards."""

    def __init__(self, run: Run, parts: Sequence[RankPart], grid: Grid) -> None:
        super().__init__(run, parts, grid)
        (self.module,) = (each.module for each in self.parts)
        ds = connect_deepspeed()
        if run.parallel.zero == 3 and grid.group("tp"):
            # The column layers of these share one gathered input and bypass the forward where ZeRO-3 would gather their weights.
            ds.utils.set_z3_leaf_modules(self.module, [Attention, FeedForward])
        if grid.group("ep"):
            from .expert_groups import mark_experts

            mark_experts(self.module, self.parameters, grid)
        self.engine, self.stepper, _, _ = ds.initialize(
            model=self.module,
            optimizer=torch_optimizer(run, self.module),
            config=deepspeed_config(run, grid.size("dp")),
            mpu=model_parallel_unit(grid),
        )

    @classmethod
    def parameter_partitioner(cls, run: Run, grid: Grid) -> ParameterPartitioner | None:
        """At ZeRO 3, return what leaves this rank its range of a parameter only: the whole model need not fit on any device."""
        if run.parallel.zero != 3:
            return None
        ds, unit = connect_deepspeed(), model_parallel_unit(grid)
        group = unit.get_data_parallel_group() if unit else None
        config = deepspeed_config(run, grid.size("dp"))
        context = ds.zero.Init(module=nn.Module(), data_parallel_group=group, config_dict_or_path=config, mpu=unit)

        def partition(parameter: nn.Parameter, _: WeightShard) -> nn.Parameter:
            context._convert_to_zero_parameters([parameter])
            return parameter

        return partition

    def restore(self, read: ReadShard, counters: Mapping[str, Any], has: Callable[[str], bool]) -> None:
        """Load as every engine does. At ZeRO 3 an evaluation before has left small weights gathered: the next forward gathers them anew."""
        if self.zero_stage == 3 and (gathered := self.stepper.persistent_parameters):
            gathered[0].partition(gathered)
        super().restore(read, counters, has)

    def begin_training(self) -> None:
        """At ZeRO 3, have DeepSpeed forget the order of modules that it has recorded, which is of forwards alone."""
        if self.zero_stage == 3:
            coordinator = self.stepper.parameter_offload.get_param_coordinator()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()

    def step(self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None) -> StepResult:
        for group in self.stepper.param_groups:
            group["lr"] = lr
        skipped = self.skipped_steps
        total = torch.zeros((), device=self.grid.world.device)
        self.clock = dict.fromkeys(("data", "forward", "backward", "step"), 0.0)
        for index in range(self.micros):
            with self._measure_time("data", "data", index):
                tokens, labels, further = read_microbatch(index)
            counter = byte_counter if index == 0 else None
            with (
                self._measure_time("forward", "F", index, 0),
                counter.count_forward([self.module], tokens, labels, further) if counter else nullcontext(),
            ):
                loss, _ = self.engine(tokens, labels, **further)
                total += loss.detach().float()
            # DeepSpeed averages over micro-batches and replicas; the loss is the mean over the global batch's labels.
            with self._measure_time("backward", "B", index, 0):
                self.engine.backward(loss * (self.micros * self.grid.size("data") / label_count))
            if counter:
                counter.count_backward(self.held_bytes())
            last = index == self.micros - 1
            if last:
                with self._record_span("sum"):
                    self._sum_over_tensor_axis()
            with self._record_span("sync") if last else nullcontext():
                finite = self._is_finite(total) if last else True
            norm = self._stage0_norm() if last else None
            if norm is not None:
                self.engine.clip_fp32_gradients = partial(clip, self.module.parameters(), norm, self.run.train.clip)
            with self._measure_time("step", "step"), self._optimizer_step(skip=not finite):
                self.engine.step()
        losses = self.figures.take_losses(total)
        if group := self.grid.group("data"):
            with self._record_span("sync"):
                dist.all_reduce(losses, group=group.handle)
        means: list[float] = (losses / label_count).tolist()
        grad_norm = self.engine.get_global_grad_norm() if norm is None else norm
        return StepResult(
            loss=means[0],
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=self.skipped_steps > skipped,
            **self.figures.result_fields(means[1:], self.figures.sum_counts()),
        )

    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        self.engine.eval()
        with torch.no_grad():
            sums: tuple[Tensor, Tensor] = self.engine(tokens, labels, **further)
        self.engine.train()
        return sums
