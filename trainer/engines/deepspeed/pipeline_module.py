"""DeepSpeed's pipeline engine around this rank's parts of the model: the parts compute; DeepSpeed schedules and sends activations.

This module imports DeepSpeed: import it after `import_deepspeed()` of import_deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from ...plan.layout.mesh import Mesh
from ..engine import ReadMicrobatch
from ..held_bytes import ByteCounter
from .engine import clip
from .instructions import TIMED, ForwardOnly, training_instructions

TimePart = Callable[..., AbstractContextManager[None]]  # times a part of the step: its name, then kind, micro-batch and part of a span


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """One training step or evaluation: the micro-batches, the factor of each sum of losses before backward, the counter of held bytes."""

    read_microbatch: ReadMicrobatch
    scale: float = 1.0
    byte_counter: ByteCounter | None = None


class OwnForward:
    """Replaces what DeepSpeed's pipeline modules do: the forward of their layers, and their handling of tied layers."""

    forward_funcs: list[nn.Module]
    counted: Tensor  # labels of the last micro-batch

    def forward(self, tokens: Tensor, labels: Tensor, *, stream: Tensor | None, further: Mapping[str, Any]) -> Tensor:
        """Return the hidden state that the part sends on; from the model's last part the sum of losses."""
        (part,) = self.forward_funcs
        result, self.counted = part(tokens, labels, stream=stream, **further)
        out: Tensor = result
        return out

    def _index_tied_modules(self) -> dict[str, Any]:
        return {}  # a tied weight is in two parts, and PipeEngine sums its gradients


class OnePart(OwnForward, PipelineModule):  # type: ignore[misc]
    """One part a rank."""


class OnePartPipeline(PipelineEngine):  # type: ignore[misc]
    """One part a rank. Every rank reads all micro-batches; only the hidden state and its gradient travel."""

    chunks = 1

    def __init__(
        self,
        schedule: str,
        timed: TimePart,
        before_data_axis: Callable[[], None],
        stage0_norm: Callable[[], Tensor | None],
        optimizer_step: Callable[[], AbstractContextManager[None]],
        **given: Any,
    ) -> None:
        """`before_data_axis` is called when this rank has all its gradients, `stage0_norm` when they are averaged; `optimizer_step` runs
        around the optimizer's step. The rest is passed to DeepSpeed."""
        super().__init__(args=None, dist_init_required=False, **given)
        self.schedule, self.timed = schedule, timed
        self._before_data_axis, self._stage0_norm, self._around_step = before_data_axis, stage0_norm, optimizer_step

    def train_step(self, step: PipelineStep) -> Tensor:
        """Take one optimizer step. Return the sum of the losses that this rank computed (0 where it has no head)."""
        self._begin(step)
        self._exec_schedule(training_instructions(self.schedule, self.micro_batches, self.num_stages, self.stage_id))
        return self.total

    def evaluate_microbatch(self, step: PipelineStep) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, labels counted) of one micro-batch, without gradients; 0 and 0 where this rank has no head."""
        self._begin(step)
        self.module.eval()
        with torch.no_grad():
            self._exec_schedule(self._forward_only())
        self.module.train()
        self.pipe_buffers["inputs"][0] = self.pipe_buffers["outputs"][0] = None
        return self.total, self.labels

    @property
    def chunk(self) -> int:
        """Which of this rank's parts computes now, from 0."""
        return 0

    @property
    def part(self) -> int:
        """The part of the model that computes now, from 0."""
        return int(2 * self.num_stages - 1 - self.stage_id if self.chunk else self.stage_id)

    @property
    def peak_in_flight(self) -> float:
        """The most micro-batches whose activations this rank held at once in the last step; one in one of two parts counts as half."""
        return self._peak / self.chunks

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum of a parameter's gradients over the micro-batches of a step on this rank."""
        held: Any = parameter
        if self.using_bf16_optimizer:
            gradient: Tensor | None = held._hp_grad
        elif self.zero_optimization():
            gradient = self.optimizer.get_gradient_for_reduction(parameter)
        else:
            gradient = parameter.grad
        return gradient

    def clip_fp32_gradients(self) -> None:
        """Clip at ZeRO 0 by the norm of `stage0_norm`: DeepSpeed's own method takes the norm again."""
        assert self.norm is not None
        clip(self.module.parameters(), self.norm, self.gradient_clipping())

    def _begin(self, step: PipelineStep) -> None:
        self.current = step
        self.norm: Tensor | None = None
        self.total, self.labels = torch.zeros((), device=self.device), torch.zeros((), device=self.device, dtype=torch.int64)
        self._forwards = [0] * self.chunks
        self._micro_of: dict[int, int] = {}  # buffer -> the micro-batch whose forward used it last
        self._microbatches: dict[int, Any] = {}
        self._in_flight = self._peak = 0

    def _forward_only(self) -> Any:
        return ForwardOnly(self.num_stages, self.stage_id)

    def _exec_schedule(self, schedule: Any) -> None:
        """Run a schedule. DeepSpeed maps instructions to its own functions: call them by name, so that overrides take effect."""
        self._reserve_pipe_buffers(schedule.num_pipe_buffers())
        for instruction in (each for step in schedule for each in step):
            kind = type(instruction)
            with self.timed(*TIMED[kind]) if kind in TIMED else nullcontext():
                getattr(self, self._INSTRUCTION_MAP[kind].__name__)(**instruction.kwargs)

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        """Do nothing: the forward pass reads its micro-batch."""

    def _exec_forward_pass(self, buffer_id: int) -> None:
        micro = self._micro_of[buffer_id] = self._forwards[self.chunk]
        with self.timed("data", "data", micro):
            tokens, labels, further = self._read(micro)
        self._forwards[self.chunk] += 1
        stream, counter = self.pipe_buffers["inputs"][buffer_id], self.current.byte_counter
        counting = counter.count_forward([self.module], tokens, labels, further) if counter else nullcontext()
        with self.timed("forward", "F", micro, self.part), counting:
            out = DeepSpeedEngine.forward(self, tokens, labels, stream=stream, further=further)
        self.pipe_buffers["outputs"][buffer_id] = out
        self._in_flight += 1
        self._peak = max(self._peak, self._in_flight)
        if self.is_last_stage():
            self.loss = out
            self.total += out.detach().float()
            self.labels += self.module.counted

    def _read(self, index: int) -> Any:
        """Return a micro-batch; it is kept until the last of this rank's parts has read it."""
        if index not in self._microbatches:
            self._microbatches[index] = self.current.read_microbatch(index)
        return self._microbatches.pop(index) if self.chunk == self.chunks - 1 else self._microbatches[index]

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage():
            self.loss = self.pipe_buffers["outputs"][buffer_id] * self.current.scale
        with self.timed("backward", "B", self._micro_of[buffer_id], self.part):
            super()._exec_backward_pass(buffer_id)
        self.pipe_buffers["outputs"][buffer_id] = self.loss = None
        self._in_flight -= 1

    def _exec_reduce_tied_grads(self) -> None:
        self._before_data_axis()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        self.norm = self._stage0_norm()
        with self.timed("step", "step"), self._around_step():
            super()._exec_optimizer_step(lr_kwargs)


def topology(mesh: Mesh) -> PipeModelDataParallelTopology:
    """Return the mesh as DeepSpeed's topology, ranks in the same order; ranks of the context axis are data-parallel ranks to DeepSpeed."""
    return PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.size("data"))


def pipeline_module(module_class: Callable[..., Any], parts: Sequence[nn.Module], mesh: Mesh, stage: int) -> PipelineModule:
    """Return DeepSpeed's module, of this class, around this rank's parts, with placeholders for those of other ranks."""
    places = (stage, 2 * mesh.pp - 1 - stage)[: len(parts)]
    layers: list[Any] = [LayerSpec(nn.Identity)] * (mesh.pp * len(parts))
    for place, part in zip(places, parts, strict=True):
        layers[place] = part
    tied: list[Any] = [each for part in parts for each in part.parameters() if getattr(each, "ds_pipe_replicated", False)]
    module = module_class(layers, topology=topology(mesh), partition_method="uniform")
    for each in tied:  # DeepSpeed's constructor resets this mark
        each.ds_pipe_replicated = True
    return module


def initialize_pipeline(
    engine_class: type[OnePartPipeline], module: PipelineModule, optimizer: torch.optim.Optimizer, config: dict[str, Any], **hooks: Any
) -> OnePartPipeline:
    """Do what `deepspeed.initialize` does for a pipeline, with an engine of this class, which runs our parts."""
    unit = module.mpu()
    engine = engine_class(model=module, optimizer=optimizer, mpu=unit, config=config, config_class=DeepSpeedConfig(config, unit), **hooks)
    if hasattr(engine, "_configure_python_gc"):  # not in releases before 0.19.8
        engine._configure_python_gc()
    return engine
