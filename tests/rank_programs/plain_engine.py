"""An engine of plain torch, added by its row and its class alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distrain.trainer.engines.engine import Engine, ReadMicrobatch, StepResult
from distrain.trainer.engines.held_bytes import ByteCounter
from distrain.trainer.parallel.process_groups import Grid
from distrain.trainer.parallel.rank_model import RankPart
from distrain.trainer.plan.costs.block_costs import BlockCosts
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.costs.cost_model import CostModel, StageElements, StateBytes
from distrain.trainer.plan.engines.engine_row import EngineRow
from distrain.trainer.plan.layout.layout import Layout, StageKind
from distrain.trainer.spec.run import Run

BUFFERS = 123_456_789  # bytes


class PlainCosts(CostModel):
    """The papers' costs, with buffers of a size of its own."""

    def state_bytes(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, held: StageElements) -> StateBytes:
        return super().state_bytes(context, layout, blocks, kind, held)._replace(buffers=BUFFERS)


ROW = EngineRow(
    name="plain",
    engine_class="distrain.tests.rank_programs.plain_engine:PlainEngine",
    costs=PlainCosts(),
    axes=("dp",),
    zero=(0,),
    native_schedules=(),
    executes="none",
    precisions=("fp32",),
    offload=(),
    source="torch",
)


class PlainEngine(Engine):
    """All-reduces whole gradients and steps torch's AdamW."""

    def __init__(self, run: Run, parts: Sequence[RankPart], grid: Grid) -> None:
        super().__init__(run, parts, grid)
        (self.module,) = (each.module for each in self.parts)
        optim, parameters = run.optim, list(self.module.parameters())
        groups = [
            {"params": [each for each in parameters if each.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)

    def step(self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None) -> StepResult:
        total = torch.zeros(())
        for index in range(self.micros):
            tokens, labels, further = read_microbatch(index)
            loss, _ = self.module(tokens, labels, **further)
            (loss / label_count).backward()
            total += loss.detach()
        if byte_counter:
            byte_counter.bytes["activations"] = 0
            byte_counter.count_backward(self.held_bytes())
        gradients = [each.grad for each in self.module.parameters() if each.grad is not None]
        for tensor in (total, *gradients):
            dist.all_reduce(tensor)
        self._call_show_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.run.train.clip or torch.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss=total.item() / label_count, grad_norm=float(norm), skipped=False)

    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            sums: tuple[Tensor, Tensor] = self.module(tokens, labels, **further)
        return sums
