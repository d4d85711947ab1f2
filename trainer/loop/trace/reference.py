"""What one process computed in traced steps, written whole, and read again in the slices that a rank of a layout should hold.

FOLDER/reference.json says how it is cut; FOLDER/step_N/micro_M.safetensors holds a micro-batch's outputs and their gradients by
module, FOLDER/step_N/weights.safetensors the weights before the step and their gradients in it by name: all in the units of the
mean loss of the global batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...prove.finding import Kind
from ...spec.run import Run

# B batch, S sequence


class Writer:
    """Takes what one process computes; a micro-batch is written when the next begins."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        cut = {"batch": run.train.batch, "microbatch": run.train.microbatch}
        (folder / "reference.json").write_text(json.dumps(cut) + "\n", encoding="utf-8")
        self._held: dict[str, Tensor] = {}

    def take(self, kind: Kind, name: str, tensor: Tensor) -> None:
        """A tensor, whole."""
        self._held[f"{kind} {name}"] = tensor.detach().cpu().contiguous().clone()

    def put(self, step: int, file: str) -> None:
        """Write what was taken since."""
        where = self.folder / f"step_{step}" / f"{file}.safetensors"
        where.parent.mkdir(exist_ok=True)
        save_file(self._held, where)
        self._held = {}


class Reader:
    """Reads what one process computed; raises KeyError for what it did not, FileNotFoundError for a step that it did not trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cut: dict[str, int] = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
        self.batch, self.microbatch = cut["batch"], cut["microbatch"]

    def samples(self, step: int, kind: Kind, name: str, samples: Sequence[int]) -> Tensor:
        """A module's output, or its gradient, of so many samples: [B, S, ...]."""
        rows = []
        for sample in samples:
            micro, row = divmod(sample - step * self.batch, self.microbatch)
            rows.append(self._slice(step, f"micro_{micro}", kind, name)[row : row + 1])
        return torch.cat(rows)

    def weight(self, step: int, kind: Kind, name: str) -> Tensor:
        """A weight before a step, or its gradient in it, float32."""
        whole: Tensor = self._open(step, "weights").get_tensor(f"{kind} {name}")
        return whole

    def _slice(self, step: int, file: str, kind: Kind, name: str) -> Any:
        try:
            return self._open(step, file).get_slice(f"{kind} {name}")
        except Exception as error:
            raise KeyError(f"{kind} {name}") from error

    @lru_cache(maxsize=16)  # noqa: B019  # it lives as long as the trace
    def _open(self, step: int, file: str) -> Any:
        return safe_open(self.folder / f"step_{step}" / f"{file}.safetensors", framework="pt")
