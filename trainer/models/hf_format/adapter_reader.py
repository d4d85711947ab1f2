"""LoRA's A and B from PEFT's files, by our names and dims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from .adapter_folder import FREEZE, TENSORS, AdapterWeight, check_adapter
from .adapter_names import PREFIX

# I inner, O outer, R rank, E experts; n weights side by side in one of Hugging Face's


@dataclass(frozen=True)
class Addition:
    """The A [I, R] or B [R, O] of one of our weights, of experts [E, I, R] or [E, R, O], in float32; read when it is first indexed."""

    weight: AdapterWeight
    matrix: str  # A, B
    opened: Any
    dtype: torch.dtype = torch.float32

    def __getitem__(self, edges: tuple[slice, ...]) -> Tensor:
        return self.values[edges]

    @cached_property
    def values(self) -> Tensor:
        """All of it; raises Unreadable where weights side by side have mixed their Bs."""
        found, experts = self.weight, self.weight.experts
        held = [self.opened.get_tensor(f"{key}.lora_{self.matrix}.weight").float() for key in found.keys]
        if self.matrix == "A":
            every = [torch.unflatten(each, 0, (experts, -1)) if experts else each for each in held]  # [(E,) n R, I]
            whole = every[0] if len(every) == 1 else torch.stack(every)
            a: Tensor = (whole if found.rows is None else whole[..., found.rows, :]).mT
            return a
        every = [torch.unflatten(each, 1, (-1, experts)).permute(2, 1, 0) if experts else each.mT for each in held]  # [(E,) n R, O]
        whole = every[0] if len(every) == 1 else torch.stack(every)
        return self._own_columns(whole if found.rows is None else whole[..., found.rows, :])

    def _own_columns(self, b: Tensor) -> Tensor:
        """Return the columns of this weight in B [..., R, O]. Those of the others are 0 where each weight has rows of its own."""
        columns = self.weight.columns
        if columns is None:
            return b
        runs = torch.unflatten(b, -1, (columns.runs, columns.width))
        own: Tensor = runs[..., columns.start : columns.stop]
        if self.weight.rows is not None and runs.count_nonzero() != own.count_nonzero():
            says = f"{self.weight.keys[0].removeprefix(PREFIX)} of the adapter changes {self.weight.weight} and others with the same A"
            raise Unreadable([Problem(rule="weights", says=says, mend=f"set model.lora.targets to have them too, or {FREEZE}")])
        return own.flatten(-2)


@contextmanager
def open_adapter(folder: str | Path, run: Run) -> Iterator[dict[str, Addition]]:
    """Open the A and B of each target of a run's LoRA by logical name, until the end of the context. Raises Unreadable with every
    difference between the folder and model.lora."""
    weights = check_adapter(Path(folder), run)
    with safe_open(Path(folder) / TENSORS, framework="pt") as opened:
        yield {
            f"{each.weight.removesuffix('.weight')}.lora_{matrix.lower()}.weight": Addition(each, matrix, opened)
            for each in weights
            for matrix in "AB"
        }
