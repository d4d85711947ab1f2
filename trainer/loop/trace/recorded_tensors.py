"""The recording of a trace: all that one process computes in the traced steps, written whole and read back in slices.

FOLDER/recording.json holds the micro-batch; FOLDER/step_N/micro_M.safetensors holds the outputs of a micro-batch and
their gradients by module; FOLDER/step_N/weights.safetensors holds the weights before the step and their gradients in it by name.
Gradients are those of the mean loss of the global batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...plan.axes.weight_slices import WeightShard
from ...prove.first_departure import TensorKind
from ...spec.run import Run

# B batch, S sequence


class RecordedTensorWriter:
    """Writes all tensors that one process computes; a micro-batch is written when the next one begins."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"microbatch": run.train.microbatch}
        (folder / "recording.json").write_text(json.dumps(sizes) + "\n", encoding="utf-8")
        self._tensors: dict[str, Tensor] = {}

    def begin(self, step: int) -> None:
        """Begin a traced step (from 0)."""
        self._step, self._micro = step, 0
        self._parameters: list[tuple[WeightShard, TensorKind, Tensor]] = []

    def add_module(self, micro: int, name: str, kind: TensorKind, tensor: Tensor) -> None:
        """Add a module's output, or its gradient, in a micro-batch."""
        if micro != self._micro:
            self._write(f"micro_{self._micro}")
            self._micro = micro
        self._add(kind, name, tensor)

    def add_parameter(self, shard: WeightShard, kind: TensorKind, start: int, values: Tensor) -> None:
        """Add all elements of a weight, or of its gradient; `start` is 0."""
        self._parameters.append((shard, kind, values.clone()))

    def end(self) -> None:
        """Write what is left of the step."""
        self._write(f"micro_{self._micro}")
        for shard, kind, values in self._parameters:
            self._add(kind, shard.name, values.view(shard.size)[tuple(map(slice, shard.length))])
        self._write("weights")

    def _add(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        self._tensors[f"{kind} {name}"] = tensor.detach().cpu().contiguous().clone()

    def _write(self, file: str) -> None:
        path = self._folder / f"step_{self._step}" / f"{file}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(self._tensors, path)
        self._tensors = {}


class RecordedTensorReader:
    """Reads a recording; raises KeyError for a tensor that it lacks, FileNotFoundError for a step that was not traced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sizes: dict[str, int] = json.loads((folder / "recording.json").read_text(encoding="utf-8"))
        self.microbatch = sizes["microbatch"]

    def samples(self, step: int, kind: TensorKind, name: str, samples: Sequence[int]) -> Tensor:
        """A module's output, or its gradient, of these samples of the step's batch, numbered from 0: [B, S, ...]."""
        rows = []
        for sample in samples:
            micro, row = divmod(sample, self.microbatch)
            rows.append(self._slice(step, f"micro_{micro}", kind, name)[row : row + 1])
        return torch.cat(rows)

    def weight(self, step: int, kind: TensorKind, name: str) -> Tensor:
        """A whole weight before a step, or its gradient in it, in float32."""
        whole: Tensor = self._slice(step, "weights", kind, name)[:]
        return whole

    def _slice(self, step: int, file: str, kind: TensorKind, name: str) -> Any:
        tensors = self._open(step, file)
        try:
            return tensors.get_slice(f"{kind} {name}")
        except SafetensorError as error:
            raise KeyError(f"{kind} {name}") from error

    @lru_cache(maxsize=16)  # noqa: B019  # it lives as long as the trace
    def _open(self, step: int, file: str) -> Any:
        return safe_open(self.folder / f"step_{step}" / f"{file}.safetensors", framework="pt")
