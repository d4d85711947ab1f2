"""Loading a run outside training: the newest checkpoint of its folder, the run that saved it, the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...engines.lazy_dynamo import disable_compile
from ...models.build import build_model, load_weights, module_of_family
from ...models.families import FAMILIES, family_of, is_made_by_transformers, op_table
from ...models.hf_format.weights import read_hf_weights
from ...models.ops.op_table import parameter_count, round_up
from ...plan.layout.checkpoint_kinds import AVERAGE, WEIGHT
from ...rundir.checkpoints import checkpoint_steps, checkpoints_folder, step_path
from ...rundir.run_in_manifest import CONFIG_KEY, read_run_file, run_from_record
from ...spec.keys.units import gib_text
from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ...system.memory import program_memory
from ..checkpoint import CheckpointReader, CheckpointSearch, LoadFailed, SavedCheckpoint, find_newest, open_checkpoint, whole_slice
from ..checkpoint.find import verification_fault
from ..checkpoint.shard_positions import weight_shapes

if TYPE_CHECKING:
    from ...layers.transformer.transformer import Transformer
    from ...models.hf.module import CausalLM

RESTORE_RUN_JSON = "restore the run.json that was there when it was saved"


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint that verifies, its weights opened for reading, the run that saved it, and remarks for the user, a line each; `earlier`
    checkpoints are those that its weights are averaged with. `kind` of what is read of each: its weights, or their average (optim.ema)."""

    run: Run
    checkpoint: SavedCheckpoint
    weights: CheckpointReader
    remarks: tuple[str, ...]
    earlier: tuple[CheckpointReader, ...] = ()
    kind: str = WEIGHT

    @property
    def readers(self) -> tuple[CheckpointReader, ...]:
        """The weights of each checkpoint that is averaged."""
        return (self.weights, *self.earlier)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight, the mean over the checkpoints that are averaged, in float32; raises LoadFailed."""
        return mean(self.read_of(reader, name, shape) for reader in self.readers)

    def read_of(self, reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight of one checkpoint in float32; a constant, which has no average, as it is. Raises LoadFailed."""
        wanted = whole_slice(name, self.kind, shape)
        return reader.read(wanted if reader.holds(wanted) else replace(wanted, kind=WEIGHT)).float()

    @property
    def title(self) -> str:
        """What was loaded, for people: `step 300`."""
        return f"step {self.checkpoint.step}{', averaged weights' if self.kind == AVERAGE else ''}"


def mean(tensors: Iterable[Tensor]) -> Tensor:
    """Return the mean of new tensors, which it overwrites; two are held at a time."""
    count, rest = 1, iter(tensors)
    total = next(rest)
    for each in rest:
        total, count = total.add_(each), count + 1
    return total.div_(count)


def load_saved_run(folder: Path, *, step: int | None = None, average: int = 1, ema: bool = False) -> SavedRun:
    """Find RUN_DIR's newest checkpoint that verifies, or that of a step, and the run that saved it; with `average`, as many checkpoints, of
    which that is the last; with `ema` the average of the weights that each keeps. Raises Unreadable where there are fewer, or one keeps
    none.

    A run that goes on removes old checkpoints: the weights are opened at once, and then stay readable. RUN_DIR/run.json may be of a later
    attempt: it is used only for checkpoints of earlier versions, which do not record the run.
    """
    checkpoints, kind = checkpoints_folder(folder), AVERAGE if ema else WEIGHT
    found, weights = _open_newest(checkpoints, kind) if step is None else _open_step(checkpoints, step, kind)
    if found.checkpoint is not None and weights is not None:
        earlier = _open_earlier(checkpoints, found.checkpoint, average - 1, kind)
        remarks = [f"passed over {reason}" for reason in found.passed]
        run = run_from_record(found.checkpoint.extra)
        if run is None:
            run = read_run_file(folder / "run.json")
            remarks.append(f"{found.checkpoint.path.name} was saved by an earlier version and does not name its model: taking run.json's")
        if run is None:
            says = f"{found.checkpoint.path} does not name its model, and {folder / 'run.json'} can't be read"
            raise _refusal(says, RESTORE_RUN_JSON)
        run = replace(run, train=replace(run.train, linear_attention="torch"))  # offline it computes in float32, and on CPUs
        return SavedRun(run=run, checkpoint=found.checkpoint, weights=weights, remarks=tuple(remarks), earlier=earlier, kind=kind)
    if found.passed:
        raise _refusal(f"no checkpoint in {folder} verifies ({'; '.join(found.passed)})", "restore one of them")
    raise _refusal(
        f"{folder} has no checkpoint yet",
        "`distrain fit` saves one every checkpoint.every steps, and at its end unless checkpoint.final=false",
    )


def _open_newest(folder: Path, kind: str) -> tuple[CheckpointSearch, CheckpointReader | None]:
    """Find the newest checkpoint that verifies and open its weights, and look again where it was removed in between; raises LoadFailed."""
    while True:
        found = find_newest(folder)
        if found.checkpoint is None:
            return found, None
        try:
            return found, _open_weights(found.checkpoint, kind)
        except LoadFailed:
            if found.checkpoint.path.exists():
                raise


def _open_step(folder: Path, step: int, kind: str) -> tuple[CheckpointSearch, CheckpointReader]:
    """Open the weights of a step's checkpoint; raises Unreadable where there is none that verifies, LoadFailed."""
    steps = checkpoint_steps(folder)
    if step not in steps:
        there = f"steps {', '.join(map(str, sorted(steps)))} are there" if steps else "there is none yet"
        raise _refusal(f"{folder} has no checkpoint of step {step}", there)
    path = step_path(folder, step)
    if fault := verification_fault(path):
        raise _refusal(f"{path} does not verify: {fault}", "restore it, or take another step")
    checkpoint = open_checkpoint(path)
    return CheckpointSearch(checkpoint=checkpoint, passed=()), _open_weights(checkpoint, kind)


def _open_earlier(folder: Path, last: SavedCheckpoint, count: int, kind: str) -> tuple[CheckpointReader, ...]:
    """Open the weights of the `count` checkpoints before one; raises Unreadable where fewer verify, or their weights have other shapes."""
    opened: list[CheckpointReader] = []
    shapes = _stored_shapes(last)
    for step in checkpoint_steps(folder):
        if len(opened) == count:
            break
        path = step_path(folder, step)
        if step >= last.step or verification_fault(path):
            continue
        checkpoint = open_checkpoint(path)
        if _stored_shapes(checkpoint) != shapes:
            raise _refusal(f"{path} and {last.path} hold different weights", "average fewer checkpoints")
        opened.append(_open_weights(checkpoint, kind))
    if len(opened) < count:
        says = f"of the checkpoints in {folder} up to step {last.step}, {len(opened) + 1} can be averaged, not {count + 1}"
        raise _refusal(says, f"train with checkpoint.keep={count + 1} and checkpoint.every, or average fewer")
    return tuple(opened)


def _open_weights(checkpoint: SavedCheckpoint, kind: str) -> CheckpointReader:
    """Open every weight of a checkpoint for reading, and what it has of a `kind`; raises LoadFailed, and Unreadable where it has none."""
    weights = CheckpointReader(checkpoint)
    if not _stored_shapes(checkpoint, kind):
        says = f"{checkpoint.path} keeps no average of the weights: the run was trained with optim.ema=0.0"
        raise _refusal(says, "leave out --ema, or train with optim.ema=0.999")
    for each in dict.fromkeys((WEIGHT, kind)):
        for name, shape in _stored_shapes(checkpoint, each).items():
            weights.open(whole_slice(name, each, shape))
    return weights


def _stored_shapes(checkpoint: SavedCheckpoint, kind: str = WEIGHT) -> dict[str, tuple[int, ...]]:
    return {row.name: row.shape for row in checkpoint.manifest.tensors if row.kind == kind}


def load_model(saved: SavedRun, device: torch.device) -> Transformer | CausalLM:
    """Return the whole model of a checkpoint in float32; raises Unreadable, LoadFailed."""
    run, checkpoint = saved.run, saved.checkpoint
    if family_of(run.model).module is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.module)
        raise _refusal(f"model.family={run.model.family} can't be loaded here", f"families {known} can")
    check_weights(saved)
    _check_memory(run, device)
    if device.type != "cuda":  # nothing here is compiled but a GPU's loss; each program of this folder is a process of its own
        disable_compile()
    module: Transformer | CausalLM
    if is_made_by_transformers(run.model):
        module = _build_with_transformers(run, checkpoint, device)
    else:
        module = build_model(run, device=device, dtype=torch.float32, seed=run.train.seed if run.model.lora.rank else None)
    if run.model.lora.rank and run.model.weights:
        load_weights(module, read_hf_weights(Path(run.model.weights), run), partial=True)
    read = ((name, saved.read(name, shape)) for name, shape in weight_shapes(run).items())
    load_weights(module, read, partial=run.model.lora.rank > 0)
    return module.eval()


def check_weights(saved: SavedRun) -> None:
    """Raise Unreadable where a checkpoint's weights have other names or shapes than those of its run's model."""
    run, checkpoint = saved.run, saved.checkpoint
    stored = _stored_shapes(checkpoint)
    if run.model.layers > len(stored):
        raise _refusal(f"the run has {run.model.layers} layers, and {checkpoint.path} has {len(stored)} weights", RESTORE_RUN_JSON)
    shapes = weight_shapes(run)
    for name, shape in shapes.items():
        if stored.get(name, shape) != shape:
            says = f"{name} has shape {list(stored[name])} in {checkpoint.path}, and {list(shape)} in the model of its run"
            raise _refusal(says, RESTORE_RUN_JSON)
    if extra := [name for name in stored if name not in shapes]:
        raise _refusal(f"{checkpoint.path} holds a weight {extra[0]}, which the model of its run does not have", RESTORE_RUN_JSON)


def _build_with_transformers(run: Run, checkpoint: SavedCheckpoint, device: torch.device) -> CausalLM:
    """Have transformers make the model of the config.json that the checkpoint holds, or where it holds none, of the run's; raises
    Unreadable."""
    make, config = module_of_family(run.model), checkpoint.extra.get(CONFIG_KEY)
    if not config and not run.model.hf:
        raise _refusal(f"neither {checkpoint.path} nor its run names the config.json of its model", RESTORE_RUN_JSON)
    with TemporaryDirectory() as folder:
        if config:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            run = replace(run, model=replace(run.model, hf=folder))
        module: CausalLM = make(run, device=device, dtype=torch.float32, seed=None)
    return module


def _check_memory(run: Run, device: torch.device) -> None:
    """Raise Unreadable where a model, with its padding, does not fit into this machine's memory."""
    table = op_table(run)
    sizes = {**table.sizes, "vocab": round_up(table.sizes["vocab"], run.model.vocab_multiple)}
    needs = 4 * parameter_count(replace(table, sizes=sizes), run.model.layer_groups)
    has = program_memory()
    if device.type == "cpu" and needs > has:
        raise _refusal(f"the model takes {gib_text(needs)} GiB in float32, and this machine has {gib_text(has)}", "")


def _refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="saved", says=says, mend=mend)])
