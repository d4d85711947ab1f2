"""Engine `zero`: DeepSpeed ZeRO 0 to 3 over the data axis, around tensor- and context-parallel layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...layers.transformer import Attention, FeedForward
from ...parallel.process_groups import Grid
from ...parallel.rank_model import Stage
from ...spec.run import Run
from ..engine import Engine, Micro, Stepped, clip
from ..held_bytes import Count
from .settings import config, deepspeed, optimizer


class Unit:
    """What DeepSpeed asks of whoever else splits the model: the tensor axis, and the data axis beside it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._handle("model")

    def get_model_parallel_rank(self) -> int:
        return self.grid.place("model")

    def get_model_parallel_world_size(self) -> int:
        return self.grid.size("model")

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._handle("data")

    def get_data_parallel_rank(self) -> int:
        return self.grid.place("data")

    def get_data_parallel_world_size(self) -> int:
        return self.grid.size("data")

    def _handle(self, axis: str) -> dist.ProcessGroup | None:
        group = self.grid.group(axis)
        return group.handle if group else self.grid.alone


def shared_out(run: Run, grid: Grid) -> Callable[[nn.Parameter], None]:
    """What leaves of a parameter this rank's share alone: at stage 3 the whole model need not fit on any device, not even at the start."""
    ds, unit = started(), unit_of(grid)
    group = unit.get_data_parallel_group() if unit else None
    sharing = ds.zero.Init(module=nn.Module(), data_parallel_group=group, config_dict_or_path=config(run, grid.size("dp")), mpu=unit)

    def share_out(parameter: nn.Parameter) -> None:
        sharing._convert_to_zero_parameters([parameter])

    return share_out


def started() -> Any:
    """DeepSpeed, over the ranks that have met already."""
    ds = deepspeed()
    ds.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
    return ds


def unit_of(grid: Grid) -> Unit | None:
    """Who else splits the model, if anybody does."""
    return Unit(grid) if grid.group("tp") else None


class ZeroEngine(Engine):
    """A whole model, or its slices along the tensor axis, trained by DeepSpeed ZeRO; every replica steps together."""

    def __init__(self, run: Run, stages: Sequence[Stage], grid: Grid) -> None:
        super().__init__(run, stages, grid)
        (self.module,) = (each.module for each in self.stages)
        ds = started()
        if run.parallel.zero == 3 and grid.group("tp"):
            # Their column layers take one input together, past the forward of each, where ZeRO-3 would gather its weights.
            ds.utils.set_z3_leaf_modules(self.module, [Attention, FeedForward])
        if grid.group("ep"):
            from .expert_groups import tell

            tell(self.module, self.holdings, grid)
        self.engine, self.stepper, _, _ = ds.initialize(
            model=self.module,
            optimizer=optimizer(run, self.module.parameters()),
            config=config(run, grid.size("dp")),
            mpu=unit_of(grid),
        )

    def step(self, micro: Micro, lr: float, labels: int, count: Count | None = None) -> Stepped:
        for group in self.stepper.param_groups:
            group["lr"] = lr
        before = self.engine.skipped_steps
        total = torch.zeros((), device=self.grid.world.device)
        self.clock = dict.fromkeys(("data", "forward", "backward", "step"), 0.0)
        for index in range(self.micros):
            with self._timed("data"):
                tokens, wanted, further = micro(index)
            counting = count if index == 0 else None
            with self._timed("forward"), counting.forward([self.module], tokens, wanted, further) if counting else nullcontext():
                loss, _ = self.engine(tokens, wanted, **further)
                total += loss.detach().float()
            # DeepSpeed takes the mean over micro-batches and replicas; the loss is the mean over the global batch's labels.
            with self._timed("backward"):
                self.engine.backward(loss * (self.micros * self.grid.size("data") / labels))
            if counting:
                counting.backward(self.held())
            last = index == self.micros - 1
            if last:
                self._sum_shared()
            sane = self._is_sane(total) if last else True
            plain = self._plain_norm() if last else None
            if plain is not None:
                self.engine.clip_fp32_gradients = partial(clip, self.module.parameters(), plain, self.run.train.clip)
            with self._timed("step"), self._stepping(sane=sane):
                self.engine.step()
        if group := self.grid.group("data"):
            dist.all_reduce(total, group=group.handle)
        norm = self.engine.get_global_grad_norm() if plain is None else plain
        return Stepped(
            loss=total.item() / labels,
            grad_norm=None if norm is None else float(norm),
            skipped=self.engine.skipped_steps > before,
            near_ties=self._near_ties(),
        )

    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        self.engine.eval()
        with torch.no_grad():
            found: tuple[Tensor, Tensor] = self.engine(tokens, labels, **further)
        self.engine.train()
        return found
