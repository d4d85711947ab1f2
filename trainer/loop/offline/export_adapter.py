"""Export of LoRA's additions in a run's checkpoint as PEFT's files, checked before the folder gets its name.

Run it as `python -m distrain.trainer.loop.offline.export_adapter RUN_DIR DEST OPTIONS`: OPTIONS is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...layers.dtypes import PRECISION_DTYPES
from ...models.build import load_weights
from ...models.families import is_made_by_transformers, op_table
from ...models.hf_format.adapter import write_adapter
from ...models.hf_format.config import config_file, read_json
from ...models.ops.op_table import parameter_count
from ...spec.run import Run
from ...spec.sections.lora import Lora
from ...system.memory import free_memory
from ..checkpoint.shard_positions import weight_shapes
from .export_checks import CHECK_BYTES, CPU, compare_logits, logits_of, random_sequences, silent_transformers
from .export_folder import check_exportable, load_exported_run, new_folder, print_result, refusal
from .load_run import SavedRun, load_model
from .saved_weights import finite_in
from .verb_process import run_verb

MERGE = "leave out --adapter: then the additions are merged into the weights"


def main() -> int:
    """Export RUN_DIR to DEST: the arguments of the command line."""
    source, destination, options = sys.argv[1:]
    return run_verb(lambda: export_adapter(Path(source), Path(destination), **json.loads(options)))


def export_adapter(
    folder: Path,
    destination: Path,
    dtype: str,
    *,
    step: int | None = None,
    average: int = 1,
    ema: bool = False,
    memory: float | None = None,
) -> None:
    """Write the folder under a temporary name, check it, then rename it; raises Unreadable, LoadFailed, OSError. The check takes at most
    `memory` bytes, by default what is free."""
    if average > 1:
        raise refusal("--adapter writes one checkpoint: a mean of products A B is no product", MERGE)
    found = load_exported_run(folder, step=step, ema=ema)
    run = found.run
    _check_has_adapter(run)
    check_exportable(found)
    shapes = {name: shape for name, shape in weight_shapes(run).items() if Lora.owns(name)}
    additions = {name: finite_in(PRECISION_DTYPES[dtype], name, found.read(name, shape)) for name, shape in shapes.items()}
    with new_folder(destination) as written:
        write_adapter(additions, run, written)
        check = _check_logits(found, additions, written, memory or free_memory() or inf)
        files = sorted(each.name for each in written.iterdir())
    count = sum(each.numel() for each in additions.values())
    print_result(found, f"{count:,} trained parameters in {dtype}; {check}", (), files, destination, _loading_program(run, destination))


def _check_has_adapter(run: Run) -> None:
    """Raise Unreadable where the run trains no additions, or no folder holds the weights that they are added to."""
    if not run.model.lora.rank or is_made_by_transformers(run.model):
        raise refusal("--adapter writes LoRA's additions, and this run has none (model.lora.rank=0)", "leave out --adapter")
    if not run.model.weights:
        raise refusal("the run's frozen weights were drawn from train.seed, so that no folder has them for PEFT to load", MERGE)


def _check_logits(saved: SavedRun, additions: Mapping[str, Tensor], folder: Path, memory: float) -> str:
    """Compare the logits of PEFT's model with those of our module with the same additions, in float32, where both fit into `memory` bytes;
    return the result as text; raises Unreadable where they differ."""
    run = saved.run
    if find_spec("peft") is None or find_spec("transformers") is None:
        return "logits are not compared: peft is not installed"
    if "quantization_config" in read_json(config_file(run.model.weights or "")):
        return "logits are not compared: model.weights is quantized; export the run without --adapter to check it"
    if CHECK_BYTES * parameter_count(op_table(run), run.model.layer_groups) > memory:
        return f"logits are not compared: the model takes more than the {memory / 1e9:.1f} GB that are free"
    module: Any = load_model(saved, CPU)
    load_weights(module, additions.items(), partial=True)
    tokens = random_sequences(run)
    ours, theirs, reader = logits_of(module, tokens), _peft_logits(run, folder, tokens), f"peft {import_module('peft').__version__}"
    return compare_logits(ours, theirs, lambda: logits_of(module.double(), tokens), reader, "with the exported adapter", MERGE)


def _peft_logits(run: Run, folder: Path, tokens: Tensor) -> Tensor:
    transformers = silent_transformers()
    try:
        base = transformers.AutoModelForCausalLM.from_pretrained(run.model.weights, dtype=torch.float32)
        model = import_module("peft").PeftModel.from_pretrained(base, folder).eval()
        with torch.no_grad():
            theirs: Tensor = model(tokens).logits
    except Exception as error:  # any exception of any version: it can't read the adapter
        raise refusal(f"peft can't load the exported adapter: {error}", MERGE) from error
    return theirs


def _loading_program(run: Run, destination: Path) -> str:
    """Return a program that loads the model with the adapter."""
    base, adapter = json.dumps(run.model.weights), json.dumps(str(destination))
    imports = "from peft import PeftModel; from transformers import AutoModelForCausalLM"
    return f"{imports}; print(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), {adapter}))"


if __name__ == "__main__":
    raise SystemExit(main())
