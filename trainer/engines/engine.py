"""The interface of an engine: what the loop, checkpoints and traces call, with defaults for a torch optimizer over whole parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.group_messages import all_reduce
from ..models.build import named_constants
from ..models.moe.routing_counts import RoutingCounts, step_biases
from ..parallel.process_groups import Grid, GroupName
from ..parallel.rank_model import RankPart
from ..plan.axes.weight_slices import WeightShard
from ..plan.timeline.timed_spans import NONE
from ..spec.run import Run
from .held_bytes import ByteCounter, bytes_by_kind, parameters_of, tensors_in
from .rank_parameter import ERROR, OptimizerShard, RankParameter, whole_parameter
from .span_recorder import SpanRecorder
from .step_figures import PreferenceFigures, StepFigures


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Figures of one optimizer step: the mean loss of the global batch (nats a token), the global gradient norm before clipping (None: the
    engine gives none), whether the step was skipped because a number was not finite or beyond the engine's limits, which of both; for a
    mixture of experts the counts of its routing, and what its routers' losses add to the mean loss, where they have any; where modules
    predict further tokens the mean of their losses, each divided by the labels of the loss (arXiv:2412.19437 equation 24); of preferences
    the figures of the batch's pairs."""

    loss: float
    grad_norm: float | None
    skipped: bool
    beyond_limits: bool = False
    routing: RoutingCounts | None = None
    router_loss: float | None = None
    mtp_loss: float | None = None
    preferences: PreferenceFigures | None = None


class StepLimits(NamedTuple):
    """The largest mean loss and gradient norm of a step that is taken; one with more is skipped."""

    loss: float = inf
    grad_norm: float = inf


NO_LIMITS = StepLimits()


# What `clock` times of a step where the model is a pipeline of parts; sums: of gradients, over every axis.
STEP_PARTS = ("data", "forward", "backward", "messages", "sums", "step")

ReadShard = Callable[[WeightShard, str, int, int], Tensor]  # (shard, kind, start, length) -> flat elements of what this rank holds
ParameterPartitioner = Callable[[nn.Parameter, WeightShard], nn.Parameter]
ReadMicrobatch = Callable[[int], tuple[Tensor, Tensor, dict[str, Any]]]  # index -> tokens, labels, further arguments of the module


class Engine(ABC):
    """Trains this rank's parts of the model; all ranks step together.

    A subclass sets `optimizer` and `skipped_steps`, and implements `step` and `evaluate`. One that shards weights, gradients or optimizer
    states overrides what it holds otherwise.
    """

    optimizer: torch.optim.Optimizer  # torch's own; checkpoints save its states
    skipped_steps: int = 0
    limits: StepLimits = NO_LIMITS  # of the next step; an engine with `skips_spikes` (trainer/plan/engines) heeds them
    # While its block runs, forward uses the average of the weights (optim.ema), where there is one; all ranks enter it.
    averaged_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    late_steps: int = 0  # steps by which the result of a step comes late, where a pipeline doesn't flush or sums of gradients are used late
    loss_scale_fields: tuple[str, ...] = ()  # numbers of a loss scaler that checkpoints keep

    def __init__(self, run: Run, parts: Sequence[RankPart], grid: Grid) -> None:
        self.run, self.grid, self.parts = run, grid, tuple(parts)
        self.micros = run.train.batch // (grid.size("dp") * run.train.microbatch)
        self.figures = StepFigures(run, grid, [each.module for each in self.parts])
        self.clock: dict[str, float] = {}  # seconds of the last step by part
        self.recorder: SpanRecorder | None = None  # of the step's spans, while someone asks for them
        self.parameters = tuple(
            RankParameter(name, parameter, each.weight_shards[name], name in each.tied)
            for each in self.parts
            for name, parameter in each.module.named_parameters()
        )
        self._show_gradients: Callable[[], None] | None = None

    def set_batch(self, batch: int) -> None:
        """Have the steps that follow train a global batch of so many sequences, in more or fewer micro-batches of the same size."""
        micros = batch // (self.grid.size("dp") * self.run.train.microbatch)
        if micros != self.micros:
            self.micros = micros
            self._change_micros()

    def _change_micros(self) -> None:
        """Called when a step has another number of micro-batches than the one before."""
        return

    @classmethod
    def parameter_partitioner(cls, run: Run, grid: Grid) -> ParameterPartitioner | None:
        """Return what replaces each parameter, as soon as it is allocated, by one of which this rank has its part alone; None where
        parameters stay whole."""
        return None

    @abstractmethod
    def step(
        self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None
    ) -> StepResult | None:
        """Take one optimizer step over this replica's micro-batches, at a learning rate of `lr`. Return its result, or that of the step
        `late_steps` before; None where there is none.

        `label_count` is how many labels of the global batch count. `byte_counter` counts the bytes that the first micro-batch makes this
        rank hold.
        """

    @abstractmethod
    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, labels counted) of a batch of this replica, without gradients: alike on its ranks, or 0 on those
        that do not count, in a pipeline, or of preferences under context parallelism."""

    def begin_training(self) -> None:
        """Prepare for the first step after evaluations."""
        return

    def step_together(self) -> None:
        """Average the weights of workers that have stepped alone, as parallel.sync says; where replicas sum gradients at each step, do
        nothing."""
        return

    def flush(self) -> list[StepResult]:
        """Finish the steps whose results have not come, and return them in order; have all workers agree. To be called before weights are
        evaluated or saved."""
        return []

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds now, by kind."""
        return bytes_by_kind([*self._held_tensors(), *(("weights", tensor) for _, tensor in self.constants())])

    def prepare_save(self) -> None:
        """Make what the ranks hold fit for a checkpoint. To be called on every rank before one is saved, once all results have come."""
        return

    def optimizer_shards(self) -> Iterator[OptimizerShard]:
        """Yield this rank's part of the float32 weights and of the optimizer's states."""
        yield from (whole_parameter(row, self.optimizer) for row in self.parameters if row.parameter.requires_grad)

    def constants(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the constants of this rank's parts by logical name, whole: no optimizer steps them."""
        for each in self.parts:
            yield from named_constants(each.module)

    def step_biases(self, result: StepResult) -> None:
        """Step the biases of routers by the tokens that all replicas sent to each expert in the step just done, as model.router.bias_rate
        says; not after a skipped step."""
        if self.run.model.router.steps_bias and result.routing and not result.skipped:
            step_biases(self.expert_layers, result.routing, self.run.model.router.bias_rate)

    @cached_property
    def expert_layers(self) -> dict[str, Any]:
        """This rank's layers with experts (MoELayer), by logical name."""
        from ..models.moe.module import mixture_layers  # not before lazy_dynamo.py: layers of attention import torch._dynamo

        return {name: layer for each in self.parts for name, layer in mixture_layers(each.module).items()}

    def counters(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside shards: optimizer steps taken, skipped steps, the state of fp16's loss scale."""
        scaler = self._loss_scaler if self.run.train.precision == "fp16" else None
        scale = {name: getattr(scaler, name) for name in self.loss_scale_fields if isinstance(getattr(scaler, name, None), int | float)}
        taken = next((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), 0)  # the same of all weights
        return {"optimizer_steps": taken, "skipped": self.skipped_steps, "scale": scale}

    def restore(self, read: ReadShard, counters: Mapping[str, Any], has: Callable[[str], bool]) -> None:
        """Load weights and optimizer states from `read`, which any layout may have saved, and the counters; `has`: whether `read` has a
        weight, by its logical name."""
        for each in self.optimizer_shards():
            if not has(each.shard.name):
                continue
            each.weight.copy_(read(each.shard, "weight", each.start, each.length))
            each.load_states(lambda kind, each=each: read(each.shard, kind, each.start, each.length))  # type: ignore[misc]
            if each.error is not None:
                each.error.copy_(read(each.shard, ERROR, each.start, each.length))
            if "step" in each.state:
                each.state["step"] = torch.full_like(torch.as_tensor(each.state["step"], dtype=torch.float32), counters["optimizer_steps"])
        for row, start, target in self._forward_weights():
            if not has(row.shard.name):
                continue
            target.copy_(read(row.shard, "weight", start, target.numel()))
        self.skipped_steps = int(counters["skipped"])
        # In other precisions DeepSpeed has a constant scale of 1, which checkpoints of earlier versions recorded alone.
        scale = counters["scale"] if self.run.train.precision == "fp16" and len(counters["scale"]) > 1 else {}
        for name, value in scale.items():
            if hasattr(self._loss_scaler, name):
                setattr(self._loss_scaler, name, value)

    def gather_restored(self) -> None:
        """Give forward the weights that all ranks have restored; all ranks call this together, once none has failed."""
        return

    @property
    def backward_scale(self) -> float:
        """The factor by which the gradients of activations in backward exceed those of the global batch's mean loss."""
        return 1.0

    def averaged_gradients(self) -> Iterator[tuple[RankParameter, int, Tensor]]:
        """Yield (parameter, first flat element, flat gradient) of what this rank holds of the global batch's gradients before its step."""
        for row in self.parameters:
            if row.parameter.grad is not None:
                yield row, 0, row.parameter.grad.view(-1)

    @contextmanager
    def show_gradients(self, show: Callable[[], None]) -> Iterator[None]:
        """While the block runs, call `show` in each step once gradients are averaged, before they are clipped."""
        self._show_gradients = show
        try:
            yield
        finally:
            self._show_gradients = None

    @contextmanager
    def time_actions(self, rows: list[dict[str, Any]]) -> Iterator[None]:
        """Add to `rows` the times of the actions of steps in the block; an engine without actions adds none."""
        yield

    def _call_show_gradients(self) -> None:
        """To be called by `step` once gradients are averaged, before they are clipped."""
        if self._show_gradients:
            self._show_gradients()

    def _held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) of all that this rank holds; a storage may come several times: its first row names its kind."""
        for parameter in parameters_of([each.module for each in self.parts]):
            yield "weights", parameter.data
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for state in self.optimizer.state.values():
            yield from (("optimizer", each) for each in tensors_in(state))

    def _forward_weights(self) -> Iterator[tuple[RankParameter, int, Tensor]]:
        """Yield (parameter, first flat element, flat tensor) of the weights that forward uses, where the optimizer steps others."""
        return iter(())

    @property
    def _loss_scaler(self) -> Any:
        """The object with `loss_scale_fields`; None without a loss scale."""
        return None

    def _summed_gradients(self, rows: Sequence[RankParameter]) -> Iterator[Tensor]:
        """Yield this rank's gradients of parameters when the tensor axis sums them; they may be written."""
        return (row.parameter.grad for row in rows if row.parameter.grad is not None)

    def _sum_over_tensor_axis(self) -> None:
        """Sum, once a step, gradients of which each tensor-parallel rank has only a part, in one message each: those of weights that all
        ranks hold whole, where the sequence is split; those of key and value heads that some ranks share."""
        sequence = self.run.parallel.sequence
        names: tuple[GroupName, ...] = ("tp", "copies")
        for name in names:
            group = self.grid.group(name)
            trained = [each for each in self.parameters if each.parameter.requires_grad]
            rows = [each for each in trained if (each.shard.shared if name == "copies" else sequence and not each.shard.is_split)]
            if group is None or not rows:
                continue
            gradients = list(self._summed_gradients(rows))
            if gradients:
                flat = torch.cat([each.reshape(-1) for each in gradients]).to(self.grid.world.device)  # they may be on the host
                if flat.numel():  # at ZeRO 3 some ranks have no rows
                    all_reduce(flat, group)
                for gradient, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
                    gradient.copy_(part.view_as(gradient))

    @contextmanager
    def _record_span(self, kind: str, micro: int = NONE, of: int = NONE) -> Iterator[None]:
        """Record the block, where spans are recorded, as one of a kind of TimedSpan, a micro-batch and a part of the model."""
        recorder = self.recorder
        began = recorder.mark() if recorder else None
        yield
        if recorder:
            recorder.add(kind, began, micro, of)

    @contextmanager
    def _measure_time(self, part: str, kind: str = "", micro: int = NONE, of: int = NONE) -> Iterator[None]:
        """Add the block's seconds to a part of the step, on a CPU only: a GPU's kernels run later. With a kind it is recorded as a span."""
        start = perf_counter()
        with self._record_span(kind, micro, of) if kind else nullcontext():
            yield
        if self.grid.world.device.type == "cpu":
            self.clock[part] += perf_counter() - start
