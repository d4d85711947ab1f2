"""A run's newest checkpoint as a Hugging Face folder, checked before it has its name: python -m distrain.trainer.loop.offline.export."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...models.build import build, load, weights
from ...models.hf import read_hf
from ...models.hf_names import kind_of
from ...models.weights import from_hf, to_hf
from ...spec.problem import Problem, Unreadable
from ...spec.read import read
from ...spec.run import Model, Run
from .exit_status import answered, say
from .export_tokenizer import known, put_tokenizer
from .load_run import FAMILIES, load_saved, model_of

if TYPE_CHECKING:
    from ...models.gpt.module import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEQUENCES, LONGEST = 3, 128  # of the check: sequences, tokens in each
CLOSE = 1e-5  # float32 logits may differ by so much, or by this share of the largest
CPU = torch.device("cpu")


def main() -> int:
    """Export RUN_DIR to DEST as a dtype: the three words of the command line."""
    source, destination, dtype = sys.argv[1:]
    return answered(lambda: export(Path(source), Path(destination), dtype))


def export(folder: Path, destination: Path, dtype: str) -> None:
    """Write, check, and only then give the folder its name; raises Unreadable, LoadFailed, OSError."""
    found = load_saved(folder)
    run = found.run
    for remark in found.remarks:
        say(f"{remark}\n")
    _exportable(run)
    module = model_of(run, found.checkpoint, CPU)
    _narrow(module, DTYPES[dtype])
    by = known(run)
    with _unnamed(destination) as folder_there:
        to_hf(((name, each.to(DTYPES[dtype])) for name, each in weights(module, run)), run, folder_there, special=by.special)
        remarks = [*by.remarks, *put_tokenizer(run, by, folder_there)]
        said = _checked(module, run, folder_there)
        files = sorted(each.name for each in folder_there.iterdir())
    count = sum(each.numel() for _, each in weights(module, run))
    lines = [
        f"step {found.checkpoint.step}, {count:,} parameters in {dtype}; {said}",
        *remarks,
        f"wrote {', '.join(files)}",
        f"done: {destination}",
        f"next: {_next(destination, spells='tokenizer.json' in files)}",
    ]
    say("".join(f"{line}\n" for line in lines))


def _next(destination: Path, *, spells: bool) -> str:
    """A command that loads the folder: text from it, or, where it has no tokenizer, its model alone."""
    where = json.dumps(str(destination))
    if spells:
        words = f'from transformers import pipeline; print(pipeline("text-generation", {where})("The ")[0]["generated_text"])'
    else:
        words = f"from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.from_pretrained({where}))"
    return f"{quote(sys.executable)} -c {quote(words)}"


def _exportable(run: Run) -> None:
    """Raises Unreadable where no class of transformers computes what the run's model does."""
    if run.model.family not in FAMILIES:
        says = f"model.family={run.model.family} has no Hugging Face form here"
        raise _refused(says, f"families {', '.join(FAMILIES)} have")
    kind_of(run)


def _narrow(module: Transformer, dtype: torch.dtype) -> None:
    """Round the weights to what is written of them, so that the check compares like with like."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.isfinite().all():
                raise _refused(f"{name} is not finite: the run has diverged", "take an earlier checkpoint, or a smaller optim.lr")
            parameter.copy_(parameter.to(dtype))
            if not parameter.isfinite().all():
                raise _refused(f"{name} is not finite as {str(dtype).removeprefix('torch.')}", "take --dtype fp32")


@contextmanager
def _unnamed(destination: Path) -> Iterator[Path]:
    """A folder beside the destination that becomes it when the block ends well, and else is gone."""
    destination = destination.absolute()
    folder = destination.with_name(f".{destination.name}.tmp-{secrets.token_hex(4)}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise _refused(f"{destination} can't be made: {error.strerror}", "name another folder") from None
    try:
        yield folder
        for file in folder.iterdir():
            file.chmod(folder.stat().st_mode & 0o666)  # safetensors writes for its owner alone
        folder.rename(destination)
    except SafetensorError as error:
        raise _refused(f"{destination} can't be written: {error}", "") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _checked(module: Transformer, run: Run, folder: Path) -> str:
    """How the folder's logits were compared with ours, in words; raises Unreadable where they differ."""
    tokens = _sequences(run)
    with torch.no_grad():
        ours = module.logits(tokens)
    if find_spec("transformers") is not None:
        theirs, who = _by_transformers(folder, tokens), f"transformers {import_module('transformers').__version__}"
    else:
        theirs, who = _by_ours(run, folder, tokens), "our own reader (transformers is not installed)"
    apart, largest = float((theirs - ours).abs().max()), float(ours.abs().max())
    if not apart <= CLOSE * max(1.0, largest):
        raise _refused(f"the logits of {who} on the exported folder are {apart:.1e} from ours", "nothing was kept; please report it")
    return f"logits on {SEQUENCES} sequences of {tokens.shape[1]} tokens are {apart:.1e} from those of {who}"


def _sequences(run: Run) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(run.model.vocab, (SEQUENCES, min(run.train.seq, LONGEST)), generator=drawn)


def _by_transformers(folder: Path, tokens: Tensor) -> Tensor:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            theirs: Tensor = model(tokens).logits
    except Exception as error:  # whatever a version of it may raise: the export isn't what it reads
        raise _refused(f"transformers does not load what was written: {error}", "nothing was kept; please report it") from error
    return theirs.float()


def _by_ours(run: Run, folder: Path, tokens: Tensor) -> Tensor:
    there = replace(run, model=read(read_hf(folder), Model))  # as its config.json has it: GPT-2's kind always has biases
    module = build(there, device=CPU, dtype=torch.float32)
    load(module, from_hf(folder, there))
    with torch.no_grad():
        return module.logits(tokens)


def _refused(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="export", says=says, mend=mend)])


if __name__ == "__main__":
    raise SystemExit(main())
