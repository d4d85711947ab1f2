"""Engine `pipe`: DeepSpeed's PipelineEngine at ZeRO stages 0 and 1, around this rank's parts of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...layers.group_messages import all_reduce
from ...parallel.process_groups import Grid
from ...parallel.rank_model import RankPart
from ...parallel.world import any_rank
from ...plan.deepspeed.ds_config import deepspeed_config
from ...spec.run import Run
from ..engine import STEP_PARTS, ReadMicrobatch, StepResult
from ..held_bytes import ByteCounter
from ..rank_parameter import RankParameter
from ..shared_embedding import share_embedding
from ..torch_optimizer import torch_optimizer
from .engine import DeepSpeedAdapter
from .import_deepspeed import connect_deepspeed


class PipeEngine(DeepSpeedAdapter):
    """A pipeline: each rank trains one part of the model (dualpipev: two), in tensor-parallel shards."""

    def __init__(self, run: Run, parts: Sequence[RankPart], grid: Grid) -> None:
        if len(parts) > 1 and run.model.shares_embedding:
            share_embedding(parts[0].module, parts[-1].module)
        super().__init__(run, parts, grid)
        self.clock = dict.fromkeys(STEP_PARTS, 0.0)
        self._finite = True  # whether the loss and gradients of the current step are finite
        connect_deepspeed()
        from .pipeline_module import OnePart, OnePartPipeline, initialize_pipeline, pipeline_module

        module_class: Any = OnePart
        engine_class: type[OnePartPipeline] = OnePartPipeline
        if len(self.parts) > 1:
            from .two_part_pipeline import TwoPartPipeline, TwoParts

            module_class, engine_class = TwoParts, TwoPartPipeline
        module = pipeline_module(module_class, [each.module for each in self.parts], grid.position.mesh, grid.position.coordinates["pp"])
        if grid.group("ep"):
            from .expert_groups import mark_experts

            mark_experts(module, self.parameters, grid)
        self.engine = initialize_pipeline(
            engine_class,
            module,
            torch_optimizer(run, module),
            deepspeed_config(run, grid.size("dp"), sum(each.numel() for each in module.parameters())),
            schedule=run.parallel.schedule,
            timed=self._measure_time,
            before_data_axis=self._sum_gradients,
            stage0_norm=self._stage0_norm,
            optimizer_step=lambda: self._optimizer_step(skip=not self._finite),
        )
        self.stepper = self.engine.optimizer
        # NCCL connects the ranks of a group at its first messages, and a first batch of sends waits for all of them. DualPipeV sends its
        # batches between neighbours in the group of all ranks, which is connected here.
        any_rank(False, grid.world.device)

    @property
    def peak_in_flight(self) -> float:
        """The most micro-batches whose activations this rank held at once in the last step."""
        peak: float = self.engine.peak_in_flight
        return peak

    def step(self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None) -> StepResult:
        from .pipeline_module import PipelineStep

        for group in self.stepper.param_groups:
            group["lr"] = lr
        skipped = self.skipped_steps
        self.clock = dict.fromkeys(STEP_PARTS, 0.0)
        # DeepSpeed averages over micro-batches and replicas; the loss is the mean over the global batch's labels.
        scale = self.micros * self.grid.size("data") / label_count
        modules: list[Any] = [each.module for each in self.parts]
        for each in modules:  # parts of a mixture add the gradient of its auxiliary loss, which does not reach the loss
            each.loss_gradient = scale / self.micros * getattr(self.stepper, "loss_scale", 1.0)
        step = PipelineStep(read_microbatch=read_microbatch, scale=scale, byte_counter=byte_counter)
        losses = self.figures.take_losses(self.engine.train_step(step))
        if self.grid.coordinate("tp"):  # all ranks of a tensor-parallel group compute the same loss
            losses.zero_()
        with self._record_span("sync"):
            dist.all_reduce(losses)
        means: list[float] = (losses / label_count).tolist()
        norm = self.engine.get_global_grad_norm() if self.engine.norm is None else self.engine.norm
        return StepResult(
            loss=means[0],
            grad_norm=float(norm),
            skipped=self.skipped_steps > skipped,
            **self.figures.result_fields(means[1:], self.figures.sum_counts()),
        )

    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, labels counted) of a micro-batch of this replica, without gradients, on the rank with the head; 0 and 0 on
        the others, so that sums over all ranks are right and one micro-batch can follow another through the stages."""
        from .pipeline_module import PipelineStep

        sums: tuple[Tensor, Tensor] = self.engine.evaluate_microbatch(PipelineStep(read_microbatch=lambda index: (tokens, labels, further)))
        return sums

    def _sum_gradients(self) -> None:
        """Sum gradients over all axes but the data axis, once a step, after the last backward pass."""
        if counter := self.engine.current.byte_counter:
            counter.count_backward(self.held_bytes())
        with self._measure_time("sums", "sum"):
            self._sum_over_tensor_axis()
        with self._measure_time("sums", "tied"):
            self._sum_tied_gradients()
        with self._measure_time("sums", "sync"):
            self._finite = self._is_finite(self.engine.total)

    def _sum_tied_gradients(self) -> None:
        """Sum the embedding's gradients of the first stage and of the last, which has a copy: both step with the sum."""
        group = self.grid.group("ends")
        if group is None or not self.run.model.shares_embedding or len(self.parts) > 1:
            return
        for each in self._summed_gradients([row for row in self.parameters if row.name == "embedding.weight"]):
            all_reduce(each, group)

    def _summed_gradients(self, rows: Sequence[RankParameter]) -> Iterator[Tensor]:
        """Yield whole gradients, before DeepSpeed averages them over the data axis."""
        gradients = (self.engine.gradient(each.parameter) for each in rows)
        return (each for each in gradients if each is not None)
