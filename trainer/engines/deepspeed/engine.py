"""An engine around one of DeepSpeed's: reads and patches DeepSpeed's internals for the loop, checkpoints and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...plan.deepspeed.ds_config import zero_stage
from ..clipping import clip_divisor
from ..engine import Engine
from ..held_bytes import parameters_of, tensors_in
from ..rank_parameter import OptimizerShard, RankParameter
from .zero_shards import averaged_gradients, gradient_range, stage3_range, zero_shards

# Where the optimizers that DeepSpeed wraps around torch's keep tensors: ZeRO 0 and 1 of bf16 with fp32 gradients, ZeRO 1 and 2,
# ZeRO 3. A storage that stands in two rows belongs to the first.
STEPPER_TENSORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("weights", ("bf16_groups_flat", "bit16_groups_flat", "lp_param_buffer")),
    ("optimizer", ("fp32_groups_flat_partition", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")),
    ("gradients", ("fp32_groups_gradients_flat", "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")),
    ("buffers", ("ipg_buckets", "temp_grad_buffer_for_gpu_offload")),
)
HOST_TENSORS = ("accumulated_grads_in_cpu", "param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")


class DeepSpeedAdapter(Engine):
    """The methods of `Engine` over a DeepSpeed engine and the optimizer that it wraps around torch's."""

    engine: Any  # DeepSpeed's
    stepper: Any  # DeepSpeed's optimizer, or torch's where it wraps none
    loss_scale_fields = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """Torch's optimizer."""
        optimizer: torch.optim.Optimizer = getattr(self.stepper, "optimizer", self.stepper)
        return optimizer

    @property
    def skipped_steps(self) -> int:
        """Steps that DeepSpeed or this engine has skipped."""
        return int(self.engine.skipped_steps)

    @skipped_steps.setter
    def skipped_steps(self, steps: int) -> None:
        self.engine.skipped_steps = steps

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage that DeepSpeed runs."""
        return zero_stage(self.run)

    def _change_micros(self) -> None:
        """DeepSpeed ends a step after the micro-batch whose number, counted from `micro_steps` 0, divides by those of a step."""
        self.engine.set_train_batch_size(self.micros * self.run.train.microbatch * self.grid.size("data"))
        self.engine.micro_steps = 0

    def _summed_gradients(self, rows: Sequence[RankParameter]) -> Iterator[Tensor]:
        return averaged_gradients(rows, self.stepper, self.zero_stage)

    def optimizer_shards(self) -> Iterator[OptimizerShard]:
        return zero_shards(self.parameters, self.stepper, self.zero_stage)

    @property
    def backward_scale(self) -> float:
        """DeepSpeed averages gradients over the data axis after backward; fp16 scales the loss."""
        return self.grid.size("data") * float(getattr(self.stepper, "loss_scale", 1.0) or 1.0)

    def averaged_gradients(self) -> Iterator[tuple[RankParameter, int, Tensor]]:
        for row in self.parameters:
            for gradient in averaged_gradients([row], self.stepper, self.zero_stage):
                start, length = gradient_range(row.parameter, gradient, self.zero_stage)
                yield row, start, gradient.reshape(-1)[:length]

    @contextmanager
    def show_gradients(self, show: Callable[[], None]) -> Iterator[None]:
        """DeepSpeed clips inside its step: patch the method that takes it."""
        engine = self.engine
        take_step = engine._take_model_step

        def show_then_step(*given: Any, **further: Any) -> Any:
            show()
            return take_step(*given, **further)

        engine._take_model_step = show_then_step
        try:
            yield
        finally:
            del engine._take_model_step

    def _held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        offload = self.run.parallel.offload
        on_host = offload.optimizer
        yield from _parameter_tensors([each.module for each in self.parts], "host" if offload.parameters else "weights")
        for kind, names in STEPPER_TENSORS:
            for name in names:
                moved = on_host and (kind == "optimizer" or name == "grad_partitions_flat_buffer")
                for tensor in tensors_in(getattr(self.stepper, name, None)):
                    yield "host" if moved else kind, tensor
                    if tensor.grad is not None:
                        yield "host" if moved else "gradients", tensor.grad
        for name in HOST_TENSORS if on_host else ():
            yield from (("host", each) for each in tensors_in(getattr(self.stepper, name, None)))
        for state in self.optimizer.state.values():
            yield from (("host" if on_host else "optimizer", each) for each in tensors_in(state))

    def _forward_weights(self) -> Iterator[tuple[RankParameter, int, Tensor]]:
        """The weights of the run's precision, which DeepSpeed casts from float32: all of each, at ZeRO 3 this rank's range."""
        for row in self.parameters:
            parameter: Any = row.parameter
            if self.zero_stage == 3:
                start, length = stage3_range(parameter)
                target = parameter.ds_tensor.data.view(-1)[:length]
            else:
                start, target = 0, parameter.data.view(-1)
            if target.numel():
                yield row, start, target

    @property
    def _loss_scaler(self) -> Any:
        return getattr(self.stepper, "loss_scaler", None)

    def _stage0_norm(self) -> Tensor | None:
        """Return the global gradient norm at ZeRO 0, where DeepSpeed gives none and every rank holds whole, averaged gradients.

        It is taken in float64: the float32 norm of a large tensor is off by 1e-6, differently in each layout.
        """
        if self.zero_stage:
            return None
        gradients = [each.parameter.grad for each in self.parameters if each.is_counted and each.parameter.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        squares = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=self.grid.world.device)
        if group := self.grid.group("model"):
            dist.all_reduce(squares, group=group.handle)
        return squares.sqrt()

    def _is_finite(self, loss: Tensor) -> bool:
        """Return whether the loss and all gradients are finite on every rank, which the ranks agree on before the optimizer steps.

        Where they are not, this rank's gradients are set to 1, so that the norm stays finite. Gradients of fp16 are left to DeepSpeed,
        whose loss scale they lower; offloaded ones are on the host, out of reach.
        """
        offload = self.run.parallel.offload
        checked = self.run.train.precision != "fp16" and not offload.names
        gradients = list(self._summed_gradients(self.parameters)) if checked else []
        norms = torch.stack([each.float() for each in torch._foreach_norm(gradients)]) if gradients else loss.new_zeros(1)
        not_finite = (~torch.isfinite(torch.cat([loss.flatten(), norms]))).any().to(torch.float32)
        dist.all_reduce(not_finite, op=dist.ReduceOp.MAX)
        if not_finite.item():
            for each in gradients:
                each.fill_(1.0)
        return not not_finite.item()

    @contextmanager
    def _optimizer_step(self, *, skip: bool) -> Iterator[None]:
        """Run DeepSpeed's step in the block; with `skip`, all of it but torch's optimizer step."""
        optimizer = self.optimizer
        if skip:
            self.skipped_steps += 1
            optimizer.step = _do_nothing  # type: ignore[assignment]
        try:
            yield
        finally:
            if skip:
                del optimizer.step


def _parameter_tensors(modules: Sequence[nn.Module], sharded: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, tensor) of parameters and their gradients; `sharded` is the kind of this rank's parts of them at ZeRO 3."""
    for parameter in parameters_of(modules):
        whole: Any = parameter
        own = getattr(whole, "ds_tensor", None)  # stage 3: this rank's range; the parameter itself is gathered while it is computed with
        if own is not None:
            yield sharded, own.data
        yield "weights" if own is None else "buffers", parameter.data
        for name in ("grad", "grad_accum"):
            yield from (("gradients", each) for each in tensors_in(getattr(whole, name, None)))


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, most: float) -> None:
    """Clip gradients whose norm is known to a norm of `most`; DeepSpeed would take the norm again."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    torch._foreach_div_(gradients, clip_divisor(norm, most).to(gradients[0].dtype))


def _do_nothing(*_: Any) -> None:
    """Stand in for the step of torch's optimizer."""
