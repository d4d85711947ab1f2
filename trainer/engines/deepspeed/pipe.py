"""Engine `pipe`: DeepSpeed's PipelineEngine, ZeRO 0 and 1, around parts of the model that are ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...layers.split_linear import summed
from ...parallel.process_groups import Grid
from ...parallel.rank_model import Stage
from ...spec.run import Run
from ..engine import Engine, Micro, Stepped
from ..held_bytes import Count
from .partitions import Holding
from .settings import config, deepspeed, optimizer

TIMED = ("data", "forward", "backward", "messages", "sums", "step")  # sums: of gradients, over every axis


class PipeEngine(Engine):
    """A part of the model on each stage of a pipeline (dualpipev: two), in tensor-parallel slices; all ranks step together."""

    def __init__(self, run: Run, stages: Sequence[Stage], grid: Grid) -> None:
        if len(stages) > 1 and run.model.tied:
            share_ends(stages[0].module, stages[-1].module)
        super().__init__(run, stages, grid)
        self.clock = dict.fromkeys(TIMED, 0.0)
        self._sane = True  # the step that is computed now
        self.held_at_once = 0.0  # the most micro-batches whose activations this rank held at once in the last step
        ds = deepspeed()
        ds.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
        from .pipeline_module import module_around, pipeline

        module = module_around([each.module for each in self.stages], grid.seat.mesh, grid.seat.place["pp"])
        if grid.group("ep"):
            from .expert_groups import tell

            tell(module, self.holdings, grid)
        self.engine = pipeline(
            module,
            optimizer(run, module.parameters()),
            self._config(sum(each.numel() for each in module.parameters())),
            schedule=run.parallel.schedule,
            timed=self._timed,
            before=self._gathered,
            norm=self._plain_norm,
            stepping=lambda: self._stepping(sane=self._sane),
        )
        self.stepper = self.engine.optimizer

    def step(self, micro: Micro, lr: float, labels: int, count: Count | None = None) -> Stepped:
        from .pipeline_module import Turn

        for group in self.stepper.param_groups:
            group["lr"] = lr
        before = self.engine.skipped_steps
        self.clock = dict.fromkeys(TIMED, 0.0)
        # DeepSpeed takes the mean over micro-batches and replicas; the loss is the mean over the global batch's labels.
        scale = self.micros * self.grid.size("data") / labels
        modules: list[Any] = [each.module for each in self.stages]
        for each in modules:  # a mixture's parts add to the gradient what has no way to the loss
            each.loss_gradient = scale / self.micros * getattr(self.stepper, "loss_scale", 1.0)
        total = self.engine.train_turn(Turn(micro=micro, scale=scale, count=count))
        self.held_at_once = self.engine.held_at_once
        if self.grid.place("tp"):  # ranks of one tensor-parallel group have computed the same
            total.zero_()
        dist.all_reduce(total)
        norm = self.engine.get_global_grad_norm() if self.engine.norm is None else self.engine.norm
        return Stepped(
            loss=total.item() / labels,
            grad_norm=float(norm),
            skipped=self.engine.skipped_steps > before,
            near_ties=self._near_ties(),
        )

    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        """(sum of losses, labels counted) of a micro-batch of this replica, without gradients, where its head is; 0 and 0 on all
        other ranks, so that the sums over all ranks are right, and one micro-batch follows another through the stages."""
        from .pipeline_module import Turn

        found: tuple[Tensor, Tensor] = self.engine.look(Turn(micro=lambda index: (tokens, labels, further)))
        return found

    def _config(self, elements: int) -> dict[str, Any]:
        said = config(self.run, self.grid.size("dp"))
        said["zero_optimization"]["reduce_bucket_size"] = min(self.run.parallel.bucket, elements)
        return said

    def _gathered(self) -> None:
        """Once a step, when all backwards are done and before the data axis: the sums of gradients over the other axes."""
        if count := self.engine.turn.count:
            count.backward(self.held())
        self._sum_shared()
        self._sum_tied()
        self._sane = self._is_sane(self.engine.total)

    def _sum_tied(self) -> None:
        """A tied weight's gradient on the first stage is the embedding's, on the last the head's: both step with the sum."""
        group = self.grid.group("ends")
        if group is None or not self.run.model.tied or len(self.stages) > 1:
            return
        for each in self._gradients([row for row in self.holdings if row.name == "embedding.weight"]):
            summed(each, group)

    def _gradients(self, rows: Sequence[Holding]) -> Iterator[Tensor]:
        """Whole gradients, as they are before the data axis has averaged them."""
        found = (self.engine.gradient(each.parameter) for each in rows)
        return (each for each in found if each is not None)


def share_ends(first: nn.Module, last: nn.Module) -> None:
    """Where one rank holds both ends of a tied model, the head is the embedding's own parameter."""
    if getattr(first, "first", False) and getattr(last, "last", False):
        last.head.weight = last.embedding.weight = first.embedding.weight  # type: ignore[union-attr]
