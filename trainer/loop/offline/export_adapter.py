"""Export of LoRA's additions in a run's newest checkpoint as PEFT's files, checked before the folder gets its name.

Run it as `python -m distrain.trainer.loop.offline.export_adapter RUN_DIR DEST DTYPE`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...layers.dtypes import PRECISION_DTYPES
from ...models.build import named_weights
from ...models.families import is_made_by_transformers
from ...models.hf_format.adapter import write_adapter
from ...spec.run import Run
from ...spec.sections.lora import Lora
from .exit_status import run_verb, write_stdout
from .export import CPU, LOGIT_TOLERANCE, SEQUENCES, check_exportable, new_folder, random_sequences, refusal, round_weights
from .load_run import load_model, load_saved_run

if TYPE_CHECKING:
    from ...layers.transformer.transformer import Transformer


def main() -> int:
    """Export RUN_DIR to DEST in a dtype: the three arguments of the command line."""
    source, destination, dtype = sys.argv[1:]
    return run_verb(lambda: export_adapter(Path(source), Path(destination), dtype))


def export_adapter(folder: Path, destination: Path, dtype: str) -> None:
    """Write the folder under a temporary name, check it, then rename it; raises Unreadable, LoadFailed, OSError."""
    found = load_saved_run(folder)
    run = found.run
    for remark in found.remarks:
        write_stdout(f"{remark}\n")
    _check_has_adapter(run)
    check_exportable(run)
    module: Any = load_model(found, CPU)
    round_weights(module, PRECISION_DTYPES[dtype], rounds=Lora.owns)
    with new_folder(destination) as written:
        weights = dict(named_weights(module, run))
        write_adapter(weights, run, written, PRECISION_DTYPES[dtype])
        check = _check_logits(module, run, written)
        files = sorted(each.name for each in written.iterdir())
    count = sum(each.numel() for name, each in weights.items() if Lora.owns(name))
    lines = [
        f"step {found.checkpoint.step}, {count:,} trained parameters in {dtype}; {check}",
        f"wrote {', '.join(files)}",
        f"done: {destination}",
        f"next: {_next_command(run, destination)}",
    ]
    write_stdout("".join(f"{line}\n" for line in lines))


def _check_has_adapter(run: Run) -> None:
    """Raise Unreadable where the run trains no additions, or no folder holds the weights that they are added to."""
    if not run.model.lora.rank or is_made_by_transformers(run.model):
        raise refusal("--adapter writes LoRA's additions, and this run has none (model.lora.rank=0)", "leave out --adapter")
    if not run.model.weights:
        says = "the run's frozen weights were drawn from train.seed, so that no folder has them for PEFT to load"
        raise refusal(says, "leave out --adapter: then the additions are merged into the weights")


def _check_logits(module: Transformer, run: Run, folder: Path) -> str:
    """Compare the logits of PEFT's model with those of our module, in float32; return the result as text; raises Unreadable where they
    differ."""
    if find_spec("peft") is None or find_spec("transformers") is None:
        return "not checked: peft is not installed"
    tokens = random_sequences(run)
    with torch.no_grad():
        ours = module.logits(tokens)
    theirs, reader = _peft_logits(run, folder, tokens), f"peft {import_module('peft').__version__}"
    difference, largest = float((theirs - ours).abs().max()), float(ours.abs().max())
    if not difference <= LOGIT_TOLERANCE * max(1.0, largest):
        says = f"the logits of {reader} with the exported adapter are {difference:.1e} from ours"
        raise refusal(says, "leave out --adapter: then the additions are merged into the weights")
    return f"logits on {SEQUENCES} sequences of {tokens.shape[1]} tokens are {difference:.1e} from those of {reader}"


def _peft_logits(run: Run, folder: Path, tokens: Tensor) -> Tensor:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        base = transformers.AutoModelForCausalLM.from_pretrained(run.model.weights, dtype=torch.float32)
        model = import_module("peft").PeftModel.from_pretrained(base, folder).eval()
        with torch.no_grad():
            theirs: Tensor = model(tokens).logits
    except Exception as error:  # any exception of any version: it can't read the adapter
        raise refusal(
            f"peft can't load the exported adapter: {error}", "leave out --adapter: then the additions are merged into the weights"
        ) from error
    return theirs


def _next_command(run: Run, destination: Path) -> str:
    """Return a command that loads the model with the adapter."""
    base, adapter = json.dumps(run.model.weights), json.dumps(str(destination))
    imports = "from peft import PeftModel; from transformers import AutoModelForCausalLM"
    program = f"{imports}; print(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), {adapter}))"
    return f"{quote(sys.executable)} -c {quote(program)}"


if __name__ == "__main__":
    raise SystemExit(main())
