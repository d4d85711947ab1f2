"""Executes the actions of a schedule on this rank's parts of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...layers.weight_gradients import WeightGradients, defer_weight_gradients
from ...plan.layout.schedules import Action
from ..engine import ReadMicrobatch
from ..held_bytes import ByteCounter
from .stage_chain import MessageKey
from .stage_messages import StageMessages

TimePart = Callable[..., AbstractContextManager[None]]  # times a part of the step: its name, then kind, micro-batch and part of a span


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """One step: every stage's actions, the micro-batches, the factor of each sum of losses before backward, the counter of held bytes.

    `first` is the number of its first micro-batch. It `flushes` unless some of its micro-batches get their backward in the next step.
    """

    actions: Sequence[Sequence[Action]]
    read_microbatch: ReadMicrobatch
    scale: float
    byte_counter: ByteCounter | None = None
    first: int = 0
    flushes: bool = True


class GradientTaker(Protocol):
    """What takes the gradients of weights."""

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take the gradient of a weight whose product was deferred."""

    def before_backward(self, chunk: int) -> None:
        """Called with the chunk whose backward comes."""

    def after_backward(self) -> None:
        """Called when autograd has computed a backward."""


class PassHooks:
    """What is done before and after a micro-batch's passes: here nothing."""

    def before_pass(self, action: Action) -> None:
        """Called before a forward or a backward, when what it waits for is there."""

    def after_backward(self, micro: int, total: Tensor) -> None:
        """Called when a backward's result is on its way; `total` is the sum of the losses that this rank computed in the step so far."""


class PendingBackward(NamedTuple):
    """What backward needs of a part's forward: its input, what its output's gradient is given to, and the weights' deferred gradients."""

    given: Tensor | None
    output: GradientEdge
    weights: WeightGradients | None


@dataclass(frozen=True, kw_only=True)
class ActionTime:
    """When an action began and ended, by a clock that all ranks of a host share, and the seconds of a processor that it took."""

    kind: str  # of an action, or U: an update of the weights
    micro: int
    part: int
    start: float
    end: float
    cpu: float


class Pipeline:
    """This rank's parts of the model, in the order of chunks, and its messages.

    Without stages it has one part, the whole model.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        messages: StageMessages,
        stream: Tensor,
        gradients: GradientTaker,
        timed: TimePart,
        hooks: PassHooks,
    ) -> None:
        """`stream` has the shape and type of a micro-batch's hidden states on this rank, and no memory; `gradients` takes
        weights' gradients; `hooks` are called at each pass."""
        self.parts, self.messages, self.chain, self.stage = tuple(parts), messages, messages.chain, messages.stage
        self._stream, self._gradients, self._timed = stream, gradients, timed
        self._hooks = hooks
        self._forwarded: dict[tuple[int, int], PendingBackward] = {}  # (micro-batch, chunk) whose backward is to come
        self._waiting: dict[tuple[int, int], WeightGradients] = {}  # whose weights' gradients are to come
        self.times: list[ActionTime] | None = None  # of the actions, while someone asks for them
        self.device = next(self.parts[0].parameters()).device
        self.peak_in_flight = 0.0  # micro-batches whose activations this rank held at once in the last step; of some chunks, a part of one

    def train(self, step: ScheduledStep) -> Tensor:
        """Execute this rank's actions. Return the sum of the losses that it computed (0 where it has no head)."""
        self._begin(step.actions, step.read_microbatch, step.first)
        self._step = step
        actions = step.actions[self.stage]
        self._apart = {(action.micro, action.chunk) for action in actions if action.kind == "I"}
        held = peak = len(self._forwarded)
        for ran, action in enumerate(actions):
            self.messages.begin_action(ran)
            match action.kind:
                case "F":
                    self._forward(action)
                case "B" | "I":
                    self._backward(action)
                    self._count_deferred()
                case "W":
                    self._weight_gradients(action)
            held += (action.kind == "F") - (action.kind in "BW")
            peak = max(peak, held)
        if step.flushes:
            with self._timed("messages", "send"):
                self.messages.finish()
        self.peak_in_flight = peak / self.chain.chunks
        return self.total

    @torch.no_grad()
    def evaluate(self, read_microbatch: ReadMicrobatch) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, labels counted) of one micro-batch; 0 and 0 where this rank has no head."""
        forward = [[Action("F", 0, chunk) for chunk in range(self.chain.chunks)] for _ in range(self.chain.stages)]
        self._begin(forward, read_microbatch)
        for chunk in range(self.chain.chunks):
            self.messages.begin_action(chunk)
            part = self.chain.part(self.stage, chunk)
            tokens, labels, further = self._read(0)
            result, counted = self.parts[chunk](tokens, labels, **self._part_input(part, 0), **further)
            self._pass_on(part, 0, result, counted)
        self.messages.finish()
        return self.total, self.labels

    def _begin(self, actions: Sequence[Sequence[Action]], read_microbatch: ReadMicrobatch, first: int = 0) -> None:
        device = self.device
        self.total, self.labels = torch.zeros((), device=device), torch.zeros((), device=device, dtype=torch.int64)
        self._read_microbatch, self._read_so_far = read_microbatch, first
        self._batches: dict[int, tuple[Any, int]] = {}  # micro-batch -> its tensors, chunks that have not read it
        self._here: dict[MessageKey, Tensor] = {}  # what one of this rank's parts gives to another
        self.messages.begin(actions, self._stream, device)

    def _forward(self, action: Action) -> None:
        micro, chunk = action.micro, action.chunk
        part = self.chain.part(self.stage, chunk)
        with self._timed("data", "data", micro):
            tokens, labels, further = self._read(micro)
        with self._timed("messages", "receive", micro, part):
            given = self._part_input(part, micro)
        stream = given.get("stream")
        if stream is not None:
            stream.requires_grad_()
        weights = WeightGradients(self._gradients.add_gradient) if (micro, chunk) in self._apart else None
        self._hooks.before_pass(action)
        counter = self._step.byte_counter
        counting = counter.count_forward(self.parts, tokens, labels, further) if counter else nullcontext()
        with self._compute(action, part, "forward"), counting, defer_weight_gradients(weights):
            result, counted = self.parts[chunk](tokens, labels, **given, **further)
        self._count_deferred()
        with self._timed("messages", "send", micro, part):
            self._pass_on(part, micro, result, counted)
        root = result * self._step.scale if part == self.chain.parts - 1 else result
        self._forwarded[micro, chunk] = PendingBackward(stream, get_gradient_edge(root), weights)

    def _backward(self, action: Action) -> None:
        micro, chunk = action.micro, action.chunk
        part, last = self.chain.part(self.stage, chunk), self.chain.parts - 1
        given, output, weights = self._forwarded.pop((micro, chunk))
        with self._timed("messages", "receive", micro, part):
            gradient = None if part == last else self._take(MessageKey("B", part + 1, micro))
        self._gradients.before_backward(chunk)
        self._hooks.before_pass(action)
        with self._compute(action, part, "backward"), defer_weight_gradients(weights):
            torch.autograd.backward([output], None if gradient is None else [gradient])
            self._gradients.after_backward()
        if given is not None:
            assert given.grad is not None
            with self._timed("messages", "send", micro, part):
                self._give(MessageKey("B", part, micro), given.grad, part - 1)
        if weights is not None:
            self._waiting[micro, chunk] = weights
        self._hooks.after_backward(micro, self.total)

    def _count_deferred(self) -> None:
        """Count what products hold whose weights' gradients are to come, where someone counts bytes."""
        if (counter := self._step.byte_counter) and self._waiting:
            counter.count_activations(self.parts, (each for waiting in self._waiting.values() for each in waiting.held_tensors()))

    def _weight_gradients(self, action: Action) -> None:
        with self._compute(action, self.chain.part(self.stage, action.chunk), "backward"):
            self._waiting.pop((action.micro, action.chunk)).compute()

    @contextmanager
    def keep_time(self, kind: str, micro: int, part: int) -> Iterator[None]:
        """Keep the times of what the block computes, where they are asked for."""
        start, cpu = perf_counter(), thread_time()
        yield
        if self.times is not None:
            took = thread_time() - cpu
            self.times.append(ActionTime(kind=kind, micro=micro, part=part, start=start, end=perf_counter(), cpu=took))

    @contextmanager
    def _compute(self, action: Action, part: int, timed: str) -> Iterator[None]:
        """Compute an action in the block; what it waits for is there."""
        with self.keep_time(action.kind, action.micro, part), self._timed(timed, action.kind, action.micro, part):
            yield

    def _read(self, micro: int) -> Any:
        """Return a micro-batch. They come in order; each is kept until all of this rank's parts have read it."""
        while micro not in self._batches:
            self._batches[self._read_so_far] = self._read_microbatch(self._read_so_far), self.chain.chunks
            self._read_so_far += 1
        batch, left = self._batches.pop(micro)
        if left > 1:
            self._batches[micro] = batch, left - 1
        return batch

    def _part_input(self, part: int, micro: int) -> dict[str, Tensor]:
        """Return a part's input: the hidden states of the part before it, which the first has not."""
        return {"stream": self._take(MessageKey("F", part - 1, micro))} if part else {}

    def _pass_on(self, part: int, micro: int, result: Tensor, counted: Tensor) -> None:
        if part < self.chain.parts - 1:
            self._give(MessageKey("F", part, micro), result, part + 1)
        else:
            self.total += result.detach().float()
            self.labels += counted

    def _give(self, key: MessageKey, tensor: Tensor, to: int) -> None:
        if self.chain.stage(to) == self.stage:
            self._here[key] = tensor.detach()
        else:
            self.messages.send(key, tensor, to)

    def _take(self, key: MessageKey) -> Tensor:
        return self._here.pop(key) if self.chain.stage(key.part) == self.stage else self.messages.receive(key)
