"""What a run's folder holds, for those who train no further: its run, its newest checkpoint, the whole model of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...models.build import build, load
from ...models.families import FAMILIES as FAMILIES_OF
from ...models.table import padded, parameters
from ...rundir.record import read_run_file, recorded_run
from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ...spec.units import gib
from ..checkpoint import Checkpoint, Reader, newest, whole
from ..placement import whole_model

if TYPE_CHECKING:
    from ...models.gpt.module import Transformer

MEND = "bring the run.json back that was there when it was saved"
FAMILIES = ("gpt", "llama", "moe")  # that have a module of their own


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run's newest checkpoint that verifies, the run that saved it, and what a user should know of the two, a line each."""

    run: Run
    checkpoint: Checkpoint
    remarks: tuple[str, ...]


def load_saved(folder: Path) -> SavedRun:
    """Find RUN_DIR's newest checkpoint that verifies and the run that saved it; raises Unreadable where there is none.

    RUN_DIR/run.json may be of a later start: it says what the run was for checkpoints of earlier versions alone.
    """
    found = newest(folder / "checkpoints")
    if found.checkpoint is not None:
        remarks = [f"passed over {reason}" for reason in found.passed]
        run = recorded_run(found.checkpoint.extra)
        if run is None:
            run = read_run_file(folder / "run.json")
            remarks.append(f"{found.checkpoint.path.name} does not name its model, as earlier versions wrote it: run.json is taken for it")
        if run is None:
            says = f"{found.checkpoint.path} does not name its model, and {folder / 'run.json'} can't be read"
            raise _refused(says, MEND)
        return SavedRun(run=run, checkpoint=found.checkpoint, remarks=tuple(remarks))
    if found.passed:
        raise _refused(f"no checkpoint in {folder} verifies ({'; '.join(found.passed)})", "restore one of them")
    raise _refused(f"{folder} has no checkpoint yet", "`distrain fit` saves one at its end, and every checkpoint.every steps")


def model_of(run: Run, checkpoint: Checkpoint, device: torch.device) -> Transformer:
    """The whole model as it was saved, float32; raises Unreadable, and LoadFailed where the run is another model's."""
    if run.model.family not in FAMILIES:
        raise _refused(f"model.family={run.model.family} has no module here", f"families {', '.join(FAMILIES)} have")
    stored = {row.name: row.shape for row in checkpoint.manifest.tensors if row.kind == "weight"}
    if run.model.layers > len(stored):
        raise _refused(f"the run has {run.model.layers} layers, and {checkpoint.path} has {len(stored)} weights", MEND)
    mine = whole_model(run)
    for name, shape in mine.items():
        if stored.get(name, shape) != shape:
            says = f"{name} has shape {list(stored[name])} in {checkpoint.path}, and {list(shape)} in the model of its run"
            raise _refused(says, MEND)
    _held(run, device)
    module = build(run, device=device, dtype=torch.float32)
    reader = Reader(checkpoint)
    if more := [name for name in stored if name not in mine]:
        raise _refused(
            f"{checkpoint.path} holds a weight {more[0]}, which the model of its run has not",
            MEND,
        )
    load(module, ((name, reader.read(whole(name, "weight", shape))) for name, shape in mine.items()))
    return module.eval()


def _held(run: Run, device: torch.device) -> None:
    """Raises Unreadable where a model, with its padding, is more than this machine's memory."""
    table = FAMILIES_OF[run.model.family](run.model, run.train)
    sizes = {**table.sizes, "vocab": padded(table.sizes["vocab"], run.model.vocab_multiple)}
    needs = 4 * parameters(replace(table, sizes=sizes), run.model.layers)
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cpu" and needs > has:
        raise _refused(f"the model takes {gib(needs)} GiB in float32, and this machine has {gib(has)}", "")


def _refused(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="saved", says=says, mend=mend)])
