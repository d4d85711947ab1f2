"""The weights of a saved run's whole model, one at a time: what an export writes without holding the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...models.build import add_lora, initial_values
from ...models.families import op_table
from ...models.hf_format.weights import open_hf_weights
from ...models.ops.lora import without_lora
from ...models.ops.op_table import model_constants
from ...spec.run import Run
from ..checkpoint.shard_positions import weight_shapes
from .export_folder import refusal
from .load_run import SavedRun, mean

Wanted = Callable[[str], bool]  # whether a weight of this logical name is read


def saved_weights(saved: SavedRun, dtype: torch.dtype, wanted: Wanted = lambda name: True) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted weights and constants of a saved run by logical name, in logical shape and the op table's order, one at a time.

    LoRA's scale x A B is added (arXiv:2106.09685); checkpoints are averaged; weights are rounded to `dtype`, constants are in float32.
    The model must be that of the checkpoint (`check_weights`). Raises Unreadable at a weight that is not finite.
    """
    run = without_lora(saved.run)
    constants = {each.name for each in model_constants(op_table(run), range(run.model.layer_groups))}
    for name, weight in _merged_weights(saved, wanted):
        yield name, finite_in(torch.float32 if name in constants else dtype, name, weight)


def finite_in(dtype: torch.dtype, name: str, weight: Tensor) -> Tensor:
    """Return a weight rounded to `dtype`; raises Unreadable where it is not finite, before or after."""
    if not weight.isfinite().all():
        raise refusal(
            f"{name} is not finite: the run has diverged", "export an earlier checkpoint with --step, or train with a smaller optim.lr"
        )
    rounded = weight.to(dtype)
    if not rounded.isfinite().all():
        raise refusal(f"{name} is not finite as {str(dtype).removeprefix('torch.')}", "use --dtype fp32")
    return rounded


def _merged_weights(saved: SavedRun, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted weights as they were saved, with LoRA's products added to the frozen ones that they change."""
    run, trained = saved.run, weight_shapes(saved.run)
    if not run.model.lora.rank:
        yield from ((name, saved.read(name, shape)) for name, shape in trained.items() if wanted(name))
        return
    for name, weight in _frozen_weights(run, wanted):
        base = name.removesuffix(".weight")
        pair = [f"{base}.lora_a.weight", f"{base}.lora_b.weight"]
        if name in trained:
            yield name, saved.read(name, trained[name])
        elif pair[0] in trained:
            pairs = ([saved.read_of(reader, each, trained[each]) for each in pair] for reader in saved.readers)
            yield name, mean(add_lora(weight.float(), a, b, run.model.lora) for a, b in pairs)
        else:
            yield name, weight


def _frozen_weights(run: Run, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted weights that LoRA leaves as they are: those of `model.weights`, or those drawn from the run's seed."""
    plain = without_lora(run)
    if run.model.weights:
        with open_hf_weights(Path(run.model.weights), plain) as weights:
            yield from ((name, weight.whole()) for name, weight in weights.items() if wanted(name))
        return
    for name, shape in weight_shapes(plain).items():
        if wanted(name):
            yield name, initial_values(name, shape, (0,) * len(shape), shape, run=run, seed=run.train.seed, device=torch.device("cpu"))
