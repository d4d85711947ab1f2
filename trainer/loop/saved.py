"""What a run's folder holds, for those who train no further: its run, its newest checkpoint, the whole model of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from ..models.build import build, load
from ..models.families import FAMILIES as FAMILIES_OF
from ..models.table import padded, parameters
from ..spec.plain_file import read_plain
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from ..spec.units import gib
from .checkpoint import Checkpoint, Found, Reader, newest, whole
from .placing import whole_model

if TYPE_CHECKING:
    from ..models.gpt.module import Transformer

FAMILIES = ("gpt", "llama", "moe")  # that have a module of their own


def run_of(folder: Path) -> Run:
    """RUN_DIR/run.json; raises Unreadable."""
    path = folder / "run.json"
    try:
        return msgspec.json.decode(read_plain(path), type=Run)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        why = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        raise _refused(f"{path} is no run: {why}", "name the folder of a run, as `distrain fit` wrote it") from None


def checkpoint_of(folder: Path) -> Found:
    """The newest checkpoint of RUN_DIR that verifies, and why newer ones do not; raises Unreadable where there is none."""
    found = newest(folder / "checkpoints")
    if found.checkpoint is not None:
        return found
    if found.passed:
        raise _refused(f"no checkpoint in {folder} verifies ({'; '.join(found.passed)})", "restore one of them")
    raise _refused(f"{folder} has no checkpoint yet", "`distrain fit` saves one at its end, and every checkpoint.every steps")


def model_of(run: Run, checkpoint: Checkpoint, device: torch.device) -> Transformer:
    """The whole model as it was saved, float32; raises Unreadable, and LoadFailed where run.json is another model's."""
    if run.model.family not in FAMILIES:
        raise _refused(f"model.family={run.model.family} has no module here", f"families {', '.join(FAMILIES)} have")
    stored = {row.name: row.shape for row in checkpoint.manifest.tensors if row.kind == "weight"}
    if run.model.layers > len(stored):
        raise _refused(f"run.json says {run.model.layers} layers, and {checkpoint.path} has {len(stored)} weights", "restore its run.json")
    mine = whole_model(run)
    for name, shape in mine.items():
        if stored.get(name, shape) != shape:
            says = f"{name} has shape {list(stored[name])} in {checkpoint.path}, and {list(shape)} in the model of run.json"
            raise _refused(says, "restore its run.json")
    _held(run, device)
    module = build(run, device=device, dtype=torch.float32)
    reader = Reader(checkpoint)
    if more := [name for name in stored if name not in mine]:
        raise _refused(f"{checkpoint.path} holds a weight {more[0]}, which the model of run.json has not", "restore its run.json")
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
