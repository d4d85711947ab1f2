"""Export of a run's newest checkpoint to a Hugging Face folder, checked before it gets its name.

Run it as `python -m distrain.trainer.loop.offline.export RUN_DIR DEST DTYPE`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...layers.dtypes import PRECISION_DTYPES
from ...models.build import build_model, load_weights, merged_weights, named_constants, named_weights
from ...models.families import FAMILIES, family_of, is_made_by_transformers
from ...models.hf.module import CausalLM, write_causal_lm
from ...models.hf_format.config import read_hf_config
from ...models.hf_format.model_type import hf_model_type
from ...models.hf_format.names import has_module_tensors
from ...models.hf_format.weights import generation_config, read_hf_weights, write_hf_folder, write_json
from ...models.ops.lora import without_lora
from ...spec.problem import Problem, Unreadable
from ...spec.read import read
from ...spec.run import Model, Run
from ...spec.sections.mtp import Mtp
from .exit_status import run_verb, write_stdout
from .export_tokenizer import run_tokenizer, write_tokenizer
from .load_run import load_model, load_saved_run

if TYPE_CHECKING:
    from ...layers.transformer.transformer import Transformer

SEQUENCES, MAX_TOKENS = 3, 128  # of the logit check: sequences, and tokens in each
LOGIT_TOLERANCE = 1e-5  # of float32 logits: absolute, or relative to the largest
# Of logits computed in the exported dtype: rms of the difference from float32, relative to the rms of the logits. In bfloat16
# the models of the tests have under 2 %, and one near its initial values has 6 %; where float16 overflows nothing is finite.
ROUNDED_TOLERANCE = 0.25
CPU = torch.device("cpu")


def main() -> int:
    """Export RUN_DIR to DEST in a dtype: the three arguments of the command line."""
    source, destination, dtype = sys.argv[1:]
    return run_verb(lambda: export(Path(source), Path(destination), dtype))


def export(folder: Path, destination: Path, dtype: str) -> None:
    """Write the folder under a temporary name, check it, then rename it; raises Unreadable, LoadFailed, OSError."""
    found = load_saved_run(folder)
    run = found.run
    for remark in found.remarks:
        write_stdout(f"{remark}\n")
    check_exportable(run)
    module = load_model(found, CPU)
    if run.model.lora.rank:
        module, run = _merge_lora(module, run)
    round_weights(module, PRECISION_DTYPES[dtype])
    tokenizer = run_tokenizer(run)
    with new_folder(destination) as written:
        _write_model(module, run, written, PRECISION_DTYPES[dtype], tokenizer.special)
        remarks = [*_modules_left_out(run), *tokenizer.remarks, *write_tokenizer(run, tokenizer, written)]
        check = _check_logits(module, run, written, dtype)
        files = sorted(each.name for each in written.iterdir())
    left_out = bool(_modules_left_out(run))
    count = sum(each.numel() for name, each in named_weights(module, run) if not (left_out and Mtp.owns(name)))
    lines = [
        f"step {found.checkpoint.step}, {count:,} parameters in {dtype}; {check}",
        *remarks,
        f"wrote {', '.join(files)}",
        f"done: {destination}",
        f"next: {_next_command(destination, has_tokenizer='tokenizer.json' in files)}",
    ]
    write_stdout("".join(f"{line}\n" for line in lines))


def _merge_lora(module: nn.Module, run: Run) -> tuple[Transformer, Run]:
    """Return the model with A and B added to the weights that they change, and its run, which has no LoRA."""
    plain = without_lora(run)
    merged = build_model(plain, device=CPU, dtype=torch.float32)
    load_weights(merged, merged_weights(module, run))
    return merged.eval(), plain


def _write_model(module: Transformer | CausalLM, run: Run, folder: Path, dtype: torch.dtype, special: Mapping[str, int | None]) -> None:
    """Write weights, config.json and generation_config.json; `special` are the ids of special tokens."""
    if is_made_by_transformers(run.model):
        assert isinstance(module, CausalLM)
        write_causal_lm(module, folder, dtype, special)
        write_json(folder / "generation_config.json", generation_config(run, special))
    else:
        constants = dict(named_constants(module))  # in float32, as transformers keeps them
        weights = ((name, each if name in constants else each.to(dtype)) for name, each in named_weights(module, run))
        write_hf_folder(weights, run, folder, special=special)


def _modules_left_out(run: Run) -> list[str]:
    """Say which weights the folder lacks."""
    if is_made_by_transformers(run.model) or not run.model.mtp.layers or has_module_tensors(run):
        return []
    return [f"left out: model.mtp.layers={run.model.mtp.layers}, for which {hf_model_type(run)} of transformers has no names"]


def _next_command(destination: Path, *, has_tokenizer: bool) -> str:
    """Return a command that generates text from the folder, or without a tokenizer loads its model."""
    where = json.dumps(str(destination))
    if has_tokenizer:
        program = f'from transformers import pipeline; print(pipeline("text-generation", {where})("The ")[0]["generated_text"])'
    else:
        program = f"from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.from_pretrained({where}))"
    return f"{quote(sys.executable)} -c {quote(program)}"


def check_exportable(run: Run) -> None:
    """Raise Unreadable where no class of transformers computes the run's model."""
    if is_made_by_transformers(run.model):
        return
    if not family_of(run.model).model_types:
        says = f"model.family={run.model.family} can't be exported to Hugging Face"
        known = ", ".join(name for name, family in FAMILIES.items() if family.model_types or family.made_by_transformers)
        raise refusal(says, f"families {known} can")
    hf_model_type(run)


def round_weights(module: Transformer | CausalLM, dtype: torch.dtype, *, rounds: Callable[[str], bool] = lambda name: True) -> None:
    """Round the weights whose names `rounds` takes to the exported dtype, so that the check compares the same values."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not rounds(name):
                continue
            if not parameter.isfinite().all():
                raise refusal(f"{name} is not finite: the run has diverged", "use an earlier checkpoint, or train with a smaller optim.lr")
            parameter.copy_(parameter.to(dtype))
            if not parameter.isfinite().all():
                raise refusal(f"{name} is not finite as {str(dtype).removeprefix('torch.')}", "use --dtype fp32")


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder next to the destination; it becomes the destination when the block ends, and is removed if it raises."""
    destination = destination.absolute()
    folder = destination.with_name(f".{destination.name}.tmp-{secrets.token_hex(4)}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise refusal(f"{destination} can't be created: {error.strerror}", "name another folder") from None
    try:
        yield folder
        for file in folder.iterdir():
            file.chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only their owner may read
        folder.rename(destination)
    except SafetensorError as error:
        raise refusal(f"{destination} can't be written: {error}", "") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_logits(module: Transformer | CausalLM, run: Run, folder: Path, dtype: str) -> str:
    """Compare the folder's logits with those of our module: in float32, and as transformers computes them in the exported dtype.

    Return the result as text; raises Unreadable where they differ.
    """
    tokens = random_sequences(run)
    with torch.no_grad():
        ours = module.logits(tokens)
    has_transformers = find_spec("transformers") is not None
    if has_transformers:
        theirs, reader = _transformers_logits(folder, tokens, torch.float32), f"transformers {import_module('transformers').__version__}"
    else:
        theirs, reader = _own_logits(run, folder, tokens), "our own reader (transformers is not installed)"
    difference, largest = float((theirs - ours).abs().max()), float(ours.abs().max())
    if not difference <= LOGIT_TOLERANCE * max(1.0, largest):
        raise refusal(
            f"the logits of {reader} on the exported folder are {difference:.1e} from ours", "nothing was written; please report it"
        )
    says = f"logits on {SEQUENCES} sequences of {tokens.shape[1]} tokens are {difference:.1e} from those of {reader}"
    if dtype == "fp32" or not has_transformers:
        return says
    rounded = _transformers_logits(folder, tokens, PRECISION_DTYPES[dtype])
    error = float((rounded - ours).square().mean().sqrt() / ours.square().mean().sqrt())
    if not error <= ROUNDED_TOLERANCE:
        problem = f"{reader} computes other logits in {dtype} than in float32: the rms of the difference is {error:.1%} of theirs"
        raise refusal(problem, "use --dtype fp32" if dtype == "bf16" else "use --dtype bf16 or fp32")
    return f"{says}; computed in {dtype} they are {error:.1%} from these (rms)"


def random_sequences(run: Run) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(run.model.vocab, (SEQUENCES, min(run.train.seq, MAX_TOKENS)), generator=drawn)


def _transformers_logits(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            theirs: Tensor = model(tokens).logits
    except Exception as error:  # any exception of any version: it can't read the export
        raise refusal(f"transformers can't load the exported folder: {error}", "nothing was written; please report it") from error
    return theirs.float()


def _own_logits(run: Run, folder: Path, tokens: Tensor) -> Tensor:
    # The model as config.json describes it: GPT-2's architecture always has biases.
    exported = replace(run, model=read(read_hf_config(folder), Model))
    module = build_model(exported, device=CPU, dtype=torch.float32)
    load_weights(module, read_hf_weights(folder, exported))
    with torch.no_grad():
        return module.logits(tokens)


def refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="export", says=says, mend=mend)])


if __name__ == "__main__":
    raise SystemExit(main())
