"""DeepSpeed's pipeline around this rank's parts of the model: they compute, it says when and carries what travels between stages.

DeepSpeed is imported with this module: import it after `deepspeed()` of settings.py.
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
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine, DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from ...plan.mesh import Mesh
from ..engine import Micro, clip
from ..held_bytes import Count
from .instructions import SENDS, SUMS, FoldedLook, Look, training

Timed = Callable[[str], AbstractContextManager[None]]  # of a part of the step


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One step, or one look: where micro-batches come from, what each sum of losses is multiplied by before backward, who counts
    the bytes that are held."""

    micro: Micro
    scale: float = 1.0
    count: Count | None = None


class Parts:
    """What DeepSpeed's modules are given beside their layers: a forward of ours, and no tied layers of theirs."""

    forward_funcs: list[nn.Module]
    counted: Tensor  # labels of the micro-batch that was computed last

    def forward(self, tokens: Tensor, labels: Tensor, *, stream: Tensor | None, further: Mapping[str, Any]) -> Tensor:
        """The residual stream that the part hands on; of the model's last part the sum of losses."""
        (part,) = self.forward_funcs
        out, self.counted = part(tokens, labels, stream=stream, **further)
        made: Tensor = out
        return made

    def _index_tied_modules(self) -> dict[str, Any]:
        return {}  # a tied weight is in two of our parts, and its gradients are summed by the engine


class Straight(Parts, PipelineModule):  # type: ignore[misc]
    """A part a rank."""


class Folded(Parts, DualPipeVModule):  # type: ignore[misc]
    """Two parts a rank, r and 2 pp - 1 - r."""


class Pipeline(PipelineEngine):  # type: ignore[misc]
    """A part a rank. Every rank reads all micro-batches; only the residual stream and its gradient travel."""

    chunks = 1

    def __init__(
        self,
        schedule: str,
        timed: Timed,
        before: Callable[[], None],
        norm: Callable[[], Tensor | None],
        stepping: Callable[[], AbstractContextManager[None]],
        **given: Any,
    ) -> None:
        super().__init__(args=None, dist_init_required=False, **given)
        self.schedule, self.timed = schedule, timed
        # called when all gradients of this rank are there; when all are averaged; around the optimizer's step
        self._before, self._norm, self._stepping = before, norm, stepping

    def train_turn(self, turn: Turn) -> Tensor:
        """One optimizer step; the sum of the losses that this rank has computed (0 where it has no head)."""
        self._begin(turn)
        self._exec_schedule(training(self.schedule, self.micro_batches, self.num_stages, self.stage_id))
        return self.total

    def look(self, turn: Turn) -> tuple[Tensor, Tensor]:
        """(sum of losses, labels counted) of one micro-batch, without gradients; 0 and 0 where this rank has no head."""
        self._begin(turn)
        self.module.eval()
        with torch.no_grad():
            self._exec_schedule(self._look())
        self.module.train()
        self.pipe_buffers["inputs"][0] = self.pipe_buffers["outputs"][0] = None
        return self.total, self.labels

    @property
    def chunk(self) -> int:
        """Which of this rank's parts computes now."""
        return 0

    @property
    def held_at_once(self) -> float:
        """The most micro-batches whose activations this rank held at once in the last step; a part counts as its share of one."""
        return self._most / self.chunks

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """What a parameter's gradients of a step have added up to on this rank."""
        held: Any = parameter
        if self.using_bf16_optimizer:
            found: Tensor | None = held._hp_grad
        elif self.zero_optimization():
            found = self.optimizer.get_gradient_for_reduction(parameter)
        else:
            found = parameter.grad
        return found

    def clip_fp32_gradients(self) -> None:
        """At stage 0, by the norm that was taken already: DeepSpeed's own takes it once more."""
        assert self.norm is not None
        clip(self.module.parameters(), self.norm, self.gradient_clipping())

    def _begin(self, turn: Turn) -> None:
        self.turn = turn
        self.norm: Tensor | None = None
        self.total, self.labels = torch.zeros((), device=self.device), torch.zeros((), device=self.device, dtype=torch.int64)
        self._forwards = [0] * self.chunks
        self._kept: dict[int, Any] = {}
        self._held = self._most = 0

    def _look(self) -> Any:
        return Look(self.num_stages, self.stage_id)

    def _exec_schedule(self, schedule: Any) -> None:
        """DeepSpeed's table of instructions holds its own functions: they are called by name, so that what is overridden holds."""
        self._reserve_pipe_buffers(schedule.num_pipe_buffers())
        for instruction in (each for step in schedule for each in step):
            kind = type(instruction)
            with self.timed("messages") if kind in SENDS else self.timed("sums") if kind in SUMS else nullcontext():
                getattr(self, self._INSTRUCTION_MAP[kind].__name__)(**instruction.kwargs)

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        """Nothing: forward reads its own."""

    def _exec_forward_pass(self, buffer_id: int) -> None:
        with self.timed("data"):
            tokens, labels, further = self._read(self._forwards[self.chunk])
        self._forwards[self.chunk] += 1
        stream, count = self.pipe_buffers["inputs"][buffer_id], self.turn.count
        counting = count.forward([self.module], tokens, labels, further) if count else nullcontext()
        with self.timed("forward"), counting:
            out = DeepSpeedEngine.forward(self, tokens, labels, stream=stream, further=further)
        self.pipe_buffers["outputs"][buffer_id] = out
        self._held += 1
        self._most = max(self._most, self._held)
        if self.is_last_stage():
            self.loss = out
            self.total += out.detach().float()
            self.labels += self.module.counted

    def _read(self, index: int) -> Any:
        """A micro-batch, which each of this rank's parts takes once: kept until the last has."""
        if index not in self._kept:
            self._kept[index] = self.turn.micro(index)
        return self._kept.pop(index) if self.chunk == self.chunks - 1 else self._kept[index]

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage():
            self.loss = self.pipe_buffers["outputs"][buffer_id] * self.turn.scale
        with self.timed("backward"):
            super()._exec_backward_pass(buffer_id)
        self.pipe_buffers["outputs"][buffer_id] = self.loss = None
        self._held -= 1

    def _exec_reduce_tied_grads(self) -> None:
        self._before()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        self.norm = self._norm()
        with self.timed("step"), self._stepping():
            super()._exec_optimizer_step(lr_kwargs)


class FoldedPipeline(DualPipeVEngine, Pipeline):  # type: ignore[misc]
    """Two parts a rank, each micro-batch out through the first ones and back through the second."""

    chunks = 2

    @property
    def chunk(self) -> int:
        return int(self._active_phase)

    def _look(self) -> Any:
        return FoldedLook(self.num_stages, self.stage_id, self._phase1_buffer(0))


def topology(mesh: Mesh) -> PipeModelDataParallelTopology:
    """The mesh as DeepSpeed's: ranks in the same order, those of the context axis being data ranks to it."""
    return PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.size("data"))


def module_around(parts: Sequence[nn.Module], mesh: Mesh, stage: int) -> PipelineModule:
    """DeepSpeed's module around this rank's parts; what the other ranks hold are names."""
    places = (stage, 2 * mesh.pp - 1 - stage)[: len(parts)]
    layers: list[Any] = [LayerSpec(nn.Identity)] * (mesh.pp * len(parts))
    for place, part in zip(places, parts, strict=True):
        layers[place] = part
    tied: list[Any] = [each for part in parts for each in part.parameters() if getattr(each, "ds_pipe_replicated", False)]
    made = (Straight if len(parts) == 1 else Folded)(layers, topology=topology(mesh), partition_method="uniform")
    for each in tied:  # DeepSpeed has unmarked it
        each.ds_pipe_replicated = True
    return made


def pipeline(module: PipelineModule, optimizer: torch.optim.Optimizer, config: dict[str, Any], **ours: Any) -> Pipeline:
    """What `deepspeed.initialize` does for a pipeline, with the engine that runs our parts."""
    unit = module.mpu()
    made = (FoldedPipeline if isinstance(module, Folded) else Pipeline)(
        model=module, optimizer=optimizer, mpu=unit, config=config, config_class=DeepSpeedConfig(config, unit), **ours
    )
    made._configure_python_gc()
    return made
