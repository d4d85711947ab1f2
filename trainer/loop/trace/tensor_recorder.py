"""Records the tensors of traced steps: module outputs, their gradients, weights and the weights' gradients.

RUN_DIR/trace.json requests a trace: {"steps": [0, 1], "recording": FOLDER}. One process writes all its tensors to FOLDER; each rank
of a layout compares its own with them in RUN_DIR/departure/N.json, in which trainer/prove/first_departure.py finds where the
layout first departs. The run ends after the last traced step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...engines.engine import Engine
from ...layers.dropout import Dropout
from ...parallel.process_groups import Grid
from ...plan.axes.weight_slices import WeightShard
from ...prove.checks.excluded_weights import zero_gradient_pattern
from ...prove.first_departure import LAYER_PARTS, MODEL_PARTS, TensorKind
from ...spec.run import Run
from .recorded_tensors import RecordedTensorWriter
from .tensor_comparison import RecordingComparison, is_comparable

PARTS = "|".join(map(re.escape, filter(None, LAYER_PARTS)))
TRACED_MODULES = re.compile(rf"{'|'.join(MODEL_PARTS)}|norm|head|layers\.\d+(\.\d+)?(\.({PARTS}))?")
POSITIONS = "positions"  # whose output has one row for all sequences, and so no gradient of one sequence

OnTensor = Callable[[int, str, TensorKind, Tensor], None]  # micro-batch, module, kind, tensor


class Recorder:
    """Hooks on a rank's modules that pass on each output and each output's gradient once a micro-batch, even if it is recomputed."""

    def __init__(self, modules: Sequence[nn.Module], on_tensor: OnTensor) -> None:
        self._modules, self._on_tensor = tuple(modules), on_tensor

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record while the block runs, which is one step."""
        hooks: list[Any] = []
        for module in self._modules:
            current = _CurrentMicrobatch()
            hooks += [module.register_forward_pre_hook(current.begin), module.register_forward_hook(current.end)]
            for name, part in module.named_modules():
                if is_traced(name, part) and (name != "embedding" or module.first):  # another part has a copy for further tokens
                    hooks.append(part.register_forward_hook(partial(self._on_output, current, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _on_output(self, current: _CurrentMicrobatch, name: str, module: nn.Module, given: Any, output: Any) -> None:
        if not current.in_forward or name in current.recorded:  # a recomputation in backward; a use for further tokens
            return
        current.recorded.add(name)
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.dim() == 1:  # losses of tokens, of a head that returns no logits
            return
        self._on_tensor(current.micro, name, "output", tensor.detach())
        if tensor.requires_grad and name != POSITIONS:
            tensor.register_hook(partial(self._on_gradient, current.micro, name))

    def _on_gradient(self, micro: int, name: str, gradient: Tensor) -> None:
        self._on_tensor(micro, name, "output_gradient", gradient.detach())


def is_traced(name: str, module: nn.Module) -> bool:
    """Whether a module is traced: those that write to the residual stream and those in which an error has a name of its own; a dropout
    only where it drops anything."""
    return bool(TRACED_MODULES.fullmatch(name)) and not (isinstance(module, Dropout) and not module.p)


class _CurrentMicrobatch:
    """Counts the micro-batches that a module computes, which come in order."""

    def __init__(self) -> None:
        self.micro, self.in_forward = -1, False
        self.recorded: set[str] = set()  # modules in this micro-batch

    def begin(self, *_: Any) -> None:
        self.micro, self.in_forward = self.micro + 1, True
        self.recorded.clear()

    def end(self, *_: Any) -> None:
        self.in_forward = False


class Trace:
    """The trace that RUN_DIR/trace.json requests of this rank."""

    def __init__(self, run: Run, engine: Engine, grid: Grid, folder: Path, steps: Sequence[int], recording: Path) -> None:
        self.run, self.engine, self.grid = run, engine, grid
        self.steps = frozenset(steps)
        self.last = max(self.steps)
        one_process = grid.world.size == 1
        self._sink: RecordedTensorWriter | RecordingComparison
        self._sink = RecordedTensorWriter(run, recording) if one_process else RecordingComparison(run, grid, folder, recording)
        self._left_out = zero_gradient_pattern(run)
        self._recorder = Recorder([each.module for each in engine.parts], self._add_module)

    @contextmanager
    def trace_step(self, step: int) -> Iterator[None]:
        """Trace the block, which is step `step` (from 0), if that step is requested."""
        if step not in self.steps:
            yield
            return
        self._sink.begin(step)
        self._add_weights()
        with self._recorder.open(), self.engine.show_gradients(self._add_gradients):
            yield
        self._sink.end()
        if step == self.last:
            self._sink.begin(step + 1)
            self._add_weights()
            self._sink.end()

    def _add_module(self, micro: int, name: str, kind: TensorKind, tensor: Tensor) -> None:
        if not is_comparable(name, self.grid, self.run):
            return
        if kind == "output_gradient":
            tensor = tensor.float() / self.engine.backward_scale
        elif name == POSITIONS:
            tensor = tensor.expand(self.run.train.microbatch, -1, -1)
        self._sink.add_module(micro, name, kind, tensor)

    def _add_weights(self) -> None:
        for part in self.engine.optimizer_shards():
            self._add_parameter(part.shard, "weight", part.start, part.weight.detach().view(-1)[: part.length])

    def _add_gradients(self) -> None:
        for row, start, gradient in self.engine.averaged_gradients():
            self._add_parameter(row.shard, "gradient", start, gradient.detach())

    def _add_parameter(self, shard: WeightShard, kind: TensorKind, start: int, values: Tensor) -> None:
        if values.numel() and not (self._left_out and re.search(self._left_out, shard.name)):
            self._sink.add_parameter(shard, kind, start, values.float().cpu())


def requested_trace(run: Run, engine: Engine, grid: Grid, folder: Path) -> Trace | None:
    """The trace that RUN_DIR/trace.json requests; None without that file."""
    file = folder / "trace.json"
    if not file.is_file():
        return None
    request = json.loads(file.read_text(encoding="utf-8"))
    return Trace(run, engine, grid, folder, request["steps"], Path(request["recording"]))
