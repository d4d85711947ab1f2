"""Compares each tensor that a rank of a layout computes in a traced step with its slice of what one process recorded."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import nan
from pathlib import Path

from torch import Tensor

from ...layers.transformer.context_parallel import ContextParallel
from ...parallel.process_groups import Grid
from ...parallel.rank_model import head_shards
from ...plan.axes.weight_slices import WeightShard
from ...plan.layout.mesh import mesh_order
from ...prove.first_departure import TensorDifference, TensorKind
from ...spec.run import Run
from ...spec.sections.lr_schedule import learning_rate
from ..checkpoint.shard_positions import read_range, slice_values
from .recorded_tensors import RecordedTensorReader

# B batch, S sequence, H hidden, V vocabulary, A heads

ATTENTION_DIMS = 4  # of attention weights
MOST_ATTENTION_WEIGHTS = 1 << 22  # of a sequence and layer, that are traced


class RecordingComparison:
    """Records a rank's differences from the recording of one process in RUN_DIR/departure/N.json."""

    def __init__(self, run: Run, grid: Grid, folder: Path, recording: Path) -> None:
        self._run, self._grid = run, grid
        self._reader = RecordedTensorReader(recording)
        self._file = folder / "departure" / f"{grid.world.rank}.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._differences: list[TensorDifference] = []
        mesh, coordinates = grid.position.mesh, grid.position.coordinates
        self._place = " ".join(f"{axis} {coordinates[axis]}" for axis in mesh_order() if getattr(mesh, axis) > 1)

    def begin(self, step: int) -> None:
        """Begin a traced step (from 0)."""
        self._step = step
        steps = self._run.train.steps or 0
        self._learning_rates = sum(learning_rate(self._run.optim, each, steps) for each in range(step))

    def add_module(self, micro: int, name: str, kind: TensorKind, tensor: Tensor) -> None:
        """Compare a module's output, or its gradient, in a micro-batch."""
        whole = self._reader.samples(self._step, kind, name, self._expected_samples(micro))
        ours, expected = matching_slices(tensor.cpu(), whole, name, self._grid, self._run)
        self._record(micro, name, kind, _largest_difference(ours, expected), _largest(whole))

    def add_parameter(self, shard: WeightShard, kind: TensorKind, start: int, values: Tensor) -> None:
        """Compare the flat elements of a weight, or of its gradient, that this rank holds from `start` on."""
        whole = self._reader.weight(self._step, kind, shard.name)
        expected = read_range(shard, "weight", start, len(values), read=lambda part: slice_values(whole, part))
        if kind == "weight":  # on average: Adam may step a single element whose gradient is almost 0 in either direction
            apart = float((values - expected).abs().mean())
            self._record(-1, shard.name, kind, apart, max(self._learning_rates, 1e-6 * _largest(whole)))
        else:
            self._record(-1, shard.name, kind, _largest_difference(values, expected), _largest(whole))

    def end(self) -> None:
        """Write all differences so far."""
        self._file.write_text(json.dumps([asdict(each) for each in self._differences]) + "\n", encoding="utf-8")

    def _expected_samples(self, micro: int) -> range:
        """The samples of the batch that are due in a micro-batch, written out: `shard`, by which ranks choose theirs, is judged too."""
        train, dp = self._run.train, self._grid.size("dp")
        first = (micro * dp + self._grid.coordinate("dp")) * train.microbatch
        return range(first, first + train.microbatch)

    def _record(self, micro: int, name: str, kind: TensorKind, apart: float, scale: float) -> None:
        rank = self._grid.world.rank
        self._differences.append(
            TensorDifference(step=self._step, micro=micro, name=name, kind=kind, apart=apart, scale=scale, rank=rank, place=self._place)
        )


def is_comparable(name: str, grid: Grid, run: Run) -> bool:
    """Whether a rank computes a slice of what one process computes, which fits in memory: experts on several tensor-parallel ranks compute
    terms of a sum, and the attention weights of a long sequence are many."""
    if name.endswith(".attention.dropout"):
        return run.model.heads * run.train.seq**2 <= MOST_ATTENTION_WEIGHTS
    return not (name.endswith(".experts") and grid.group("tp"))


def matching_slices(ours: Tensor, whole: Tensor, name: str, grid: Grid, run: Run) -> tuple[Tensor, Tensor]:
    """A rank's tensor without padding, and its slice of the whole module output or gradient [B, S, H or V], or of attention weights
    [B, A, S, keys].

    The slice is the rank's part of the sequence along the context axis, and of that its part along the tensor axis where
    parallel.sequence splits it; of logits it is the rank's words of the vocabulary, and of attention weights its heads, over all of
    that sequence.
    """
    if whole.ndim == ATTENTION_DIMS:  # ranks that gather keys compute no attention weights as a module
        heads = head_shards(run, grid.size("tp")).query_shard(grid.coordinate("tp"))
        shared = heads.size // grid.size("cp")  # of those, the heads of a rank that has all of their tokens
        first = shared * grid.coordinate("cp")
        many = max(0, min(shared, heads.length - first))
        return ours[:, :many], whole[:, heads.offset + first : heads.offset + first + many]
    if group := grid.group("cp"):
        whole = whole.index_select(1, ContextParallel(group=group).positions(whole.shape[1], whole.device))
    if name == "head":
        width = ours.shape[-1]
        begin = grid.coordinate("tp") * width
        words = max(0, min(run.model.vocab, begin + width) - begin)
        return ours[..., :words], whole[..., begin : begin + words]
    if run.parallel.sequence and grid.group("tp"):
        whole = whole.chunk(grid.size("tp"), dim=1)[grid.coordinate("tp")]
    return ours, whole


def _largest_difference(ours: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; nan if the shapes differ."""
    return _largest(ours.float() - expected.float()) if ours.shape == expected.shape else nan


def _largest(x: Tensor) -> float:
    """The largest absolute value; 0 of an empty tensor, nan if the tensor holds one."""
    return float(x.abs().max()) if x.numel() else 0.0
