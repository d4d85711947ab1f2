"""A trace of some steps, module by module: written whole by one process, held against that by the ranks of a layout.

RUN_DIR/trace.json asks for it: {"steps": [0, 1], "reference": FOLDER}. One process writes the folder; the ranks of a layout write
RUN_DIR/departure/N.json, in which trainer/prove/finding.py finds where the layout departs first. The run ends after the last of
the steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...engines.deepspeed.partitions import gradients, share
from ...engines.deepspeed.settings import stage
from ...engines.engine import Engine
from ...layers.context import Context
from ...parallel.process_groups import Grid
from ...plan.weight_slices import Placed
from ...prove.finding import PARTS, Finding, Kind
from ...spec.run import Run
from ..data.batches import shard
from ..forkserver.weight_diff import without_gradient
from ..lr_schedule import rate
from ..placement import run_of, taken
from .reference import Reader, Writer

# B batch, S sequence, H hidden, V vocabulary

TRACED = re.compile(rf"embedding|norm|head|layers\.\d+(\.({'|'.join(filter(None, PARTS))}))?")  # modules

Take = Callable[[int, str, Kind, Tensor], None]  # micro-batch, module, kind, what it made


class Recorder:
    """Hooks on this rank's modules: each output, and each output's gradient, once a micro-batch, however often it is computed."""

    def __init__(self, modules: Sequence[nn.Module], take: Take) -> None:
        self._modules, self._take = tuple(modules), take

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the block runs, which is one step."""
        hooks: list[Any] = []
        for module in self._modules:
            turn = _Turn()
            hooks += [module.register_forward_pre_hook(turn.begin), module.register_forward_hook(turn.end)]
            for name, part in module.named_modules():
                if TRACED.fullmatch(name):
                    hooks.append(part.register_forward_hook(partial(self._made, turn, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _made(self, turn: _Turn, name: str, module: nn.Module, given: Any, made: Any) -> None:
        if not turn.on:  # recomputed, on the way back
            return
        tensor = made[0] if isinstance(made, tuple) else made
        self._take(turn.micro, name, "output", tensor.detach())
        if tensor.requires_grad:
            tensor.register_hook(partial(self._returned, turn.micro, name))

    def _returned(self, micro: int, name: str, gradient: Tensor) -> None:
        self._take(micro, name, "output_gradient", gradient.detach())


class _Turn:
    """Which micro-batch a module computes: they come in order."""

    def __init__(self) -> None:
        self.micro, self.on = -1, False

    def begin(self, *_: Any) -> None:
        self.micro, self.on = self.micro + 1, True

    def end(self, *_: Any) -> None:
        self.on = False


class Trace:
    """The trace that RUN_DIR/trace.json asks of this rank."""

    def __init__(self, run: Run, engine: Engine, grid: Grid, folder: Path, steps: Sequence[int], reference: Path) -> None:
        self.run, self.engine, self.grid = run, engine, grid
        self.steps = frozenset(steps)
        self.last = max(self.steps)
        alone = grid.world.size == 1
        self._side: _Written | _Compared = _Written(run, reference) if alone else _Compared(run, grid, folder, reference)
        self._left_out = without_gradient(run)
        self._recorder = Recorder([each.module for each in engine.stages], self._noted)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around step `step` (from 0)."""
        if step not in self.steps:
            yield
            return
        self._side.begin(step)
        self._weights()
        with self._recorder.open(), self._before_the_optimizer():
            yield
        self._side.end()
        if step == self.last:
            self._side.begin(step + 1)
            self._weights()
            self._side.end()

    def _noted(self, micro: int, name: str, kind: Kind, tensor: Tensor) -> None:
        if kind == "output_gradient":  # as engines scale the loss, and DeepSpeed then takes the mean over the data axis
            tensor = tensor.float() / (self.grid.size("data") * float(getattr(self.engine.stepper, "loss_scale", 1.0) or 1.0))
        self._side.module(micro, name, kind, tensor)

    @contextmanager
    def _before_the_optimizer(self) -> Iterator[None]:
        """Has DeepSpeed show the averaged gradients before they are clipped and stepped with."""
        engine = self.engine.engine
        right = engine._take_model_step

        def shown(*given: Any, **further: Any) -> Any:
            self._gradients()
            return right(*given, **further)

        engine._take_model_step = shown
        try:
            yield
        finally:
            del engine._take_model_step

    def _weights(self) -> None:
        for part in self.engine.partitions():
            self._parameter(part.placed, "weight", part.start, part.weight.detach().view(-1)[: part.length])

    def _gradients(self) -> None:
        at = stage(self.run)
        for each in self.engine.holdings:
            for gradient in gradients([each], self.engine.stepper, at):
                start, length = _run(each.parameter, gradient, at)
                self._parameter(each.placed, "gradient", start, gradient.detach().reshape(-1)[:length])

    def _parameter(self, placed: Placed, kind: Kind, start: int, run: Tensor) -> None:
        if run.numel() and not (self._left_out and re.search(self._left_out, placed.name)):
            self._side.parameter(placed, kind, start, run.float().cpu())


def asked(run: Run, engine: Engine, grid: Grid, folder: Path) -> Trace | None:
    """The trace that is asked for; None where none is."""
    file = folder / "trace.json"
    if not file.is_file():
        return None
    said = json.loads(file.read_text(encoding="utf-8"))
    return Trace(run, engine, grid, folder, said["steps"], Path(said["reference"]))


def _run(parameter: nn.Parameter, gradient: Tensor, at: int) -> tuple[int, int]:
    """(first flat element, elements) of a parameter whose gradient this is, or a part of it."""
    held: Any = parameter
    if at == 3:
        return share(parameter)
    if gradient.numel() == parameter.numel():
        return 0, parameter.numel()
    here = held._hp_mapping.lp_fragment_address
    return here.start, here.numel


class _Written:
    """One process: everything is written, a micro-batch when the next begins."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._writer = Writer(folder, run)

    def begin(self, step: int) -> None:
        self._step, self._micro = step, 0
        self._parameters: list[tuple[Placed, Kind, Tensor]] = []

    def end(self) -> None:
        self._writer.put(self._step, f"micro_{self._micro}")
        for placed, kind, run in self._parameters:
            logical = run.view(placed.size)[tuple(map(slice, placed.length))]
            self._writer.take(kind, placed.name, logical)
        self._writer.put(self._step, "weights")

    def module(self, micro: int, name: str, kind: Kind, tensor: Tensor) -> None:
        if micro != self._micro:
            self._writer.put(self._step, f"micro_{self._micro}")
            self._micro = micro
        self._writer.take(kind, name, tensor)

    def parameter(self, placed: Placed, kind: Kind, start: int, run: Tensor) -> None:
        self._parameters.append((placed, kind, run.clone()))


class _Compared:
    """A rank of a layout: everything is held against the slice of the reference that it should be."""

    def __init__(self, run: Run, grid: Grid, folder: Path, reference: Path) -> None:
        self.run, self.grid = run, grid
        self._reader = Reader(reference)
        self._file = folder / "departure" / f"{grid.world.rank}.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._found: list[Finding] = []
        mesh, place = grid.seat.mesh, grid.seat.place
        self._place = " ".join(f"{axis} {place[axis]}" for axis in ("pp", "dp", "cp", "tp") if getattr(mesh, axis) > 1)

    def begin(self, step: int) -> None:
        self._step = step
        steps = self.run.train.steps or 0
        self._moved = sum(rate(self.run.optim, each, steps) for each in range(step))

    def end(self) -> None:
        self._file.write_text(json.dumps([asdict(each) for each in self._found]) + "\n", encoding="utf-8")

    def module(self, micro: int, name: str, kind: Kind, tensor: Tensor) -> None:
        train = self.run.train
        place = {"dp_rank": self.grid.place("dp"), "dp": self.grid.size("dp")}
        samples = shard(self._step * train.batch, micro=micro, microbatch=train.microbatch, batch=train.batch, **place)
        whole = self._reader.samples(self._step, kind, name, samples)
        ours, theirs = sliced(tensor.cpu(), whole, name, self.grid, self.run)
        self._note(micro, name, kind, _apart(ours, theirs), _largest(whole))

    def parameter(self, placed: Placed, kind: Kind, start: int, run: Tensor) -> None:
        whole = self._reader.weight(self._step, kind, placed.name)
        theirs = run_of(placed, "weight", start, len(run), read=lambda part: taken(whole, part))
        if kind == "weight":  # on average: an element whose gradient is all but 0 goes anywhere
            apart = float((run - theirs).abs().mean())
            self._note(-1, placed.name, kind, apart, max(self._moved, 1e-6 * _largest(whole)))
        else:
            self._note(-1, placed.name, kind, _apart(run, theirs), _largest(whole))

    def _note(self, micro: int, name: str, kind: Kind, apart: float, scale: float) -> None:
        rank = self.grid.world.rank
        self._found.append(
            Finding(step=self._step, micro=micro, name=name, kind=kind, apart=apart, scale=scale, rank=rank, place=self._place)
        )


def sliced(ours: Tensor, whole: Tensor, name: str, grid: Grid, run: Run) -> tuple[Tensor, Tensor]:
    """What this rank has of a module's output or gradient, and what it should have of the whole [B, S, H or V].

    Of the sequence its pieces along the context axis, of those its run where the tensor axis splits it; of logits its words, all of
    the sequence, without padding.
    """
    if group := grid.group("cp"):
        whole = whole.index_select(1, Context(group=group).positions(whole.shape[1], whole.device))
    if name == "head":
        each = ours.shape[-1]
        begin = grid.place("tp") * each
        words = max(0, min(run.model.vocab, begin + each) - begin)
        return ours[..., :words], whole[..., begin : begin + words]
    if run.parallel.sequence and grid.group("tp"):
        whole = whole.chunk(grid.size("tp"), dim=1)[grid.place("tp")]
    return ours, whole


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; nan where they are not even alike in shape."""
    return _largest(ours.float() - theirs.float()) if ours.shape == theirs.shape else nan


def _largest(x: Tensor) -> float:
    """The largest absolute value; of nothing 0, and nan where there is one."""
    return float(x.abs().max()) if x.numel() else 0.0
