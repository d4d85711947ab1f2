"""What the engines share: what the loop asks of them, and how they hold a rank's part of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..layers.split_linear import summed
from ..parallel.process_groups import Grid
from ..parallel.rank_model import Stage
from ..plan.weight_slices import Placed
from ..spec.run import Run
from .deepspeed.partitions import Holding, Partition, gradients, partitions, share
from .deepspeed.settings import stage
from .held_bytes import Count
from .held_bytes import held as held_by

SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of DeepSpeed's dynamic loss scaler


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What one optimizer step saw: the mean loss of the global batch (nats a token), the global gradient norm before
    clipping (None where the engine gives none), whether the step was skipped (something was not finite), and of a mixture of experts how
    many tokens went where they did by so little that rounding decides (each layer's)."""

    loss: float
    grad_norm: float | None
    skipped: bool
    near_ties: int | None = None


Read = Callable[[Placed, str, int, int], Tensor]  # of a weight and a kind: so many flat elements of what this rank holds, from a start
Micro = Callable[[int], tuple[Tensor, Tensor, dict[str, Any]]]  # the i-th micro-batch's tokens, labels, further arguments


class Engine(ABC):
    """A DeepSpeed engine around this rank's stages; all ranks step together."""

    engine: Any  # DeepSpeed's
    stepper: Any  # what it wraps around torch's optimizer

    def __init__(self, run: Run, stages: Sequence[Stage], grid: Grid) -> None:
        self.run, self.grid, self.stages = run, grid, tuple(stages)
        self.micros = run.train.batch // (grid.size("dp") * run.train.microbatch)
        self.clock: dict[str, float] = {}
        self.holdings = tuple(
            Holding(name, parameter, each.held[name], name in each.tied)
            for each in self.stages
            for name, parameter in each.module.named_parameters()
        )

    @abstractmethod
    def step(self, micro: Micro, lr: float, labels: int, count: Count | None = None) -> Stepped:
        """One optimizer step over all micro-batches; `labels` is how many labels of the global batch count.

        `count` is told what the first micro-batch makes this rank hold.
        """

    @abstractmethod
    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        """(sum of losses, labels counted) of a batch of this replica, without gradients; alike on all of its ranks."""

    def held(self) -> dict[str, int]:
        """Bytes by kind that this rank holds now."""
        return held_by([each.module for each in self.stages], self.stepper)

    def partitions(self) -> Iterator[Partition]:
        """What this rank steps of the float32 weights and the optimizer's states; at stage 0 everything, as its replicas do."""
        return partitions(self.holdings, self.stepper, stage(self.run))

    def position(self) -> dict[str, Any]:
        """What the engine must remember beside its shards: steps that were taken, the loss scale of fp16."""
        taken = [int(state["step"]) for state in self._torch_optimizer().state.values() if "step" in state]
        scaler = getattr(self.stepper, "loss_scaler", None)
        scale = {name: getattr(scaler, name) for name in SCALE if isinstance(getattr(scaler, name, None), int | float)}
        return {"optimizer_steps": max(taken, default=0), "skipped": self.engine.skipped_steps, "scale": scale}

    def restore(self, read: Read, position: Mapping[str, Any]) -> None:
        """Take weights and optimizer states as `read` gives them, whatever layout they were saved in."""
        for part in self.partitions():
            part.weight.copy_(read(part.placed, "weight", part.start, part.length))
            for kind, held in part.states():
                held.copy_(read(part.placed, kind, part.start, part.length))
            if "step" in part.state:
                part.state["step"] = torch.full_like(torch.as_tensor(part.state["step"], dtype=torch.float32), position["optimizer_steps"])
        self._spread(read)
        self.engine.skipped_steps = int(position["skipped"])
        scaler = getattr(self.stepper, "loss_scaler", None)
        for name, value in position["scale"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)

    def _spread(self, read: Read) -> None:
        """The weights that forward computes with, cast from float32: all of each, or at stage 3 this rank's."""
        for _, parameter, placed, _ in self.holdings:
            if stage(self.run) == 3:
                start, length = share(parameter)
                target = parameter.ds_tensor.data.view(-1)[:length]  # type: ignore[attr-defined]
            else:
                start, length, target = 0, parameter.numel(), parameter.data.view(-1)
            if length:
                target.copy_(read(placed, "weight", start, length))

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = getattr(self.stepper, "optimizer", self.stepper)
        return found

    def _sum_shared(self) -> None:
        """Add up, once a step, the gradients of which each tensor-parallel rank has but a part: of weights that all hold whole,
        where the sequence is split; of key and value heads that some share. One message each."""
        sequence = self.run.parallel.sequence
        for axis in ("tp", "copies"):
            group = self.grid.group(axis)
            rows = [each for each in self.holdings if (each.placed.shared if axis == "copies" else sequence and not each.placed.sharded)]
            if group is None or not rows:
                continue
            held = list(self._gradients(rows))
            if held:
                flat = summed(torch.cat([each.reshape(-1) for each in held]), group)
                for each, part in zip(held, torch.split(flat, [each.numel() for each in held]), strict=True):
                    each.copy_(part.view_as(each))

    def _gradients(self, rows: Sequence[Holding]) -> Iterator[Tensor]:
        """What this rank holds of these gradients when they are added up; it may be written."""
        return gradients(rows, self.stepper, stage(self.run))

    def _plain_norm(self) -> Tensor | None:
        """The global gradient norm at stage 0, of which DeepSpeed gives none: every rank holds whole, averaged gradients.

        In float64: a float32 norm of a large tensor is off by 1e-6, differently in each layout.
        """
        if stage(self.run):
            return None
        counted = [each.parameter.grad for each in self.holdings if each.counted and each.parameter.grad is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in counted]
        squares = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=self.grid.world.device)
        if group := self.grid.group("model"):
            dist.all_reduce(squares, group=group.handle)
        return squares.sqrt()

    def _near_ties(self) -> int | None:
        """Those of the step just done, of all ranks; None where no module counts them."""
        modules: list[Any] = [each.module for each in self.stages]
        held: list[list[Tensor]] = [each.near_ties for each in modules if hasattr(each, "near_ties")]
        if not held:
            return None
        found = sum((each for counts in held for each in counts), torch.zeros((), dtype=torch.int64, device=self.grid.world.device))
        for counts in held:
            counts.clear()
        if self.grid.place("tp"):
            found.zero_()  # all of a tensor group have seen the same
        dist.all_reduce(found)
        return int(found)

    def _is_sane(self, loss: Tensor) -> bool:
        """Whether the loss and all gradients are finite on every rank: one number, agreed on before the optimizer steps.

        Where they are not, what this rank holds of the gradients is set to one, so that no norm is spoiled. In fp16 gradients are
        left to DeepSpeed, whose loss scale falls by them; on the host they are where none of ours looks.
        """
        offload = self.run.parallel.offload
        ours = self.run.train.precision != "fp16" and not (offload.optimizer or offload.parameters)
        held = list(self._gradients(self.holdings)) if ours else []
        sizes = torch.stack([each.float() for each in torch._foreach_norm(held)]) if held else loss.new_zeros(1)
        bad = ~(torch.isfinite(loss).all() & torch.isfinite(sizes).all())
        word = bad.to(torch.float32)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        if word.item():
            for each in held:
                each.fill_(1.0)
        return not word.item()

    @contextmanager
    def _stepping(self, *, sane: bool) -> Iterator[None]:
        """DeepSpeed's step, with torch's optimizer inside it; of a step that isn't sane all but that is done."""
        optimizer = self._torch_optimizer()
        if not sane:
            self.engine.skipped_steps += 1
            optimizer.step = _nothing  # type: ignore[assignment]
        try:
            yield
        finally:
            if not sane:
                del optimizer.step

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Seconds of a part of the step, where kernels are not merely asked for: on a CPU."""
        start = perf_counter()
        yield
        if self.grid.world.device.type == "cpu":
            self.clock[part] += perf_counter() - start


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, most: float) -> None:
    """Clip gradients to a norm of `most` by the norm that was taken already, in the place of DeepSpeed, which takes its own."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    torch._foreach_mul_(gradients, torch.clamp(most / (norm + 1e-6), max=1.0).to(gradients[0].dtype))


def _nothing(*_: Any) -> None:
    """A step of torch's optimizer that is not taken."""
