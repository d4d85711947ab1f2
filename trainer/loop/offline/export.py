"""Export of a run's checkpoint to a Hugging Face folder, checked before it gets its name.

Run it as `python -m distrain.trainer.loop.offline.export RUN_DIR DEST OPTIONS`: OPTIONS is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from math import inf, prod
from pathlib import Path

import torch

from ...layers.dtypes import PRECISION_DTYPES
from ...models.families import is_made_by_transformers
from ...models.hf.module import CausalLM, write_causal_lm
from ...models.hf_format.model_type import hf_model_type
from ...models.hf_format.tensor_names import has_module_tensors
from ...models.hf_format.weights import generation_config, published_context, write_hf_folder, write_json
from ...models.ops.lora import without_lora
from ...spec.run import Run
from ...spec.sections.mtp import Mtp
from ...system.memory import free_memory
from ..checkpoint.shard_positions import weight_shapes
from .export_checks import check_export, check_logits
from .export_folder import check_exportable, load_exported_run, new_folder, print_result
from .export_tokenizer import run_tokenizer, write_tokenizer
from .load_run import SavedRun, load_model
from .saved_weights import finite_in, saved_weights
from .show_progress import show_progress
from .verb_process import run_verb

CPU = torch.device("cpu")


def main() -> int:
    """Export RUN_DIR to DEST: the arguments of the command line."""
    source, destination, options = sys.argv[1:]
    return run_verb(lambda: export(Path(source), Path(destination), **json.loads(options)))


def export(
    folder: Path,
    destination: Path,
    dtype: str,
    *,
    step: int | None = None,
    average: int = 1,
    ema: bool = False,
    memory: float | None = None,
) -> None:
    """Write the folder under a temporary name, check it, then rename it; raises Unreadable, LoadFailed, OSError.

    The weights are those of the newest checkpoint, or of a step's, or the mean over the `average` checkpoints of which that is the last;
    with `ema` they are the average that each keeps. One file's weights are in memory at a time, unless transformers makes the model. The
    check takes at most `memory` bytes, by default what is free.
    """
    found = load_exported_run(folder, step=step, average=average, ema=ema)
    run = without_lora(found.run)
    check_exportable(found)
    tokenizer = run_tokenizer(run)
    with new_folder(destination) as written:
        if is_made_by_transformers(run.model):
            check = _write_with_transformers(found, written, dtype, tokenizer.special)
        else:
            weights = show_progress(saved_weights(found, PRECISION_DTYPES[dtype]), "written", len(weight_shapes(run)))
            write_hf_folder(weights, run, written, special=tokenizer.special)
            check = check_export(found, written, dtype, memory or free_memory() or inf)
        remarks = [*_modules_left_out(run), *_context_lost(run), *tokenizer.remarks, *write_tokenizer(run, tokenizer, written)]
        files = sorted(each.name for each in written.iterdir())
    left_out = bool(_modules_left_out(run))
    count = sum(prod(shape) for name, shape in weight_shapes(run).items() if not (left_out and Mtp.owns(name)))
    program = _loading_program(destination, has_tokenizer="tokenizer.json" in files)
    print_result(found, f"{count:,} parameters in {dtype}; {check}", remarks, files, destination, program)


def _write_with_transformers(saved: SavedRun, folder: Path, dtype: str, special: Mapping[str, int | None]) -> str:
    """Have transformers write a model of its own, with the ids of special tokens; return what its check says."""
    module = load_model(saved, CPU)
    assert isinstance(module, CausalLM)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(finite_in(PRECISION_DTYPES[dtype], name, parameter))
    write_causal_lm(module, folder, PRECISION_DTYPES[dtype], special)
    write_json(folder / "generation_config.json", generation_config(saved.run, special))
    return check_logits(module, saved.run, folder, dtype)


def _modules_left_out(run: Run) -> list[str]:
    """Say which weights the folder lacks."""
    if is_made_by_transformers(run.model) or not run.model.mtp.layers or has_module_tensors(run):
        return []
    return [f"left out: model.mtp.layers={run.model.mtp.layers}, for which {hf_model_type(run)} of transformers has no names"]


def _context_lost(run: Run) -> list[str]:
    """Say that the longest sequence of the weights that the run began with is not known."""
    if is_made_by_transformers(run.model) or run.model.positions != "rope" or not run.model.weights or published_context(run):
        return []
    where = f"{run.model.weights}/config.json states no max_position_embeddings, or can't be read"
    return [f"config.json says that texts have at most train.seq={run.train.seq} tokens: {where}"]


def _loading_program(destination: Path, *, has_tokenizer: bool) -> str:
    """Return a program that generates text from the folder, or without a tokenizer loads its model."""
    where = json.dumps(str(destination))
    if has_tokenizer:
        return f'from transformers import pipeline; print(pipeline("text-generation", {where})("The ")[0]["generated_text"])'
    return f"from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.from_pretrained({where}))"


if __name__ == "__main__":
    raise SystemExit(main())
