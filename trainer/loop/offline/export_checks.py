"""What an exported Hugging Face folder is checked for before it gets its name: every weight, and the logits of as many layers as fit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...layers.dtypes import PRECISION_DTYPES
from ...models.build import build_model, load_weights
from ...models.families import op_table
from ...models.hf.module import CausalLM
from ...models.hf_format.config import read_hf_config
from ...models.hf_format.tensor_names import has_module_tensors
from ...models.hf_format.weights import read_hf_weights, write_hf_folder
from ...models.ops.lora import without_lora
from ...models.ops.op_table import parameter_count
from ...spec.read import read
from ...spec.run import Model, Run
from ...spec.sections.mtp import Mtp
from ..checkpoint.shard_positions import weight_shapes
from .export_folder import refusal
from .load_run import SavedRun
from .saved_weights import saved_weights
from .show_progress import show_progress

if TYPE_CHECKING:
    from ...layers.transformer.transformer import Transformer

SEQUENCES, MAX_TOKENS = 3, 128  # of the logit check: sequences, and tokens in each
LOGIT_TOLERANCE = 1e-5  # of float32 logits: absolute, or relative to the largest
# Of logits computed in the exported dtype: rms of the difference from float32, relative to the rms of the logits. In bfloat16
# the models of the tests have under 2 %, and one near its initial values has 6 %; where float16 overflows nothing is finite.
ROUNDED_TOLERANCE = 0.25
CHECK_BYTES = 10  # of memory for each parameter whose logits are compared: our module and transformers' in float32, and what loading takes
CPU = torch.device("cpu")
PLEASE_REPORT = "nothing was written; please report it"


def check_export(saved: SavedRun, folder: Path, dtype: str, memory: float) -> str:
    """Read a written folder back, and compare the logits of the first layers, as many as fit into `memory` bytes, with those of our module.

    Return the result as text; raises Unreadable where anything differs.
    """
    run = without_lora(saved.run)
    _check_weights(saved, folder, PRECISION_DTYPES[dtype])
    layers = layers_in(memory, run)
    group = run.model.layers_in_group
    if layers == run.model.layer_groups:
        return f"read back equal; {check_logits(_module_of(saved, run, dtype), run, folder, dtype)}"
    if layers == 0:
        return (
            f"read back equal; logits are not compared: one layer and the embedding take more than the {memory / 1e9:.1f} GB that are free"
        )
    part = replace(run, model=replace(run.model, layers=layers * group, mtp=Mtp()))
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as part_folder:
        write_hf_folder(_weights_of(saved, part, dtype), part, part_folder)
        says = check_logits(_module_of(saved, part, dtype), part, Path(part_folder), dtype)
    return f"read back equal; of the first {layers * group} of {run.model.layers} layers, which fit into memory twice, {says}"


def _check_weights(saved: SavedRun, folder: Path, dtype: torch.dtype) -> None:
    """Raise Unreadable where a weight that is read from the folder is not bit for bit the one that was saved, rounded to `dtype`."""
    written = _run_of_folder(saved.run, folder)
    if has_module_tensors(saved.run):
        written = replace(written, model=replace(written.model, mtp=saved.run.model.mtp))
    names, ours = weight_shapes(written), weight_shapes(without_lora(saved.run))
    expected = saved_weights(saved, dtype, names.__contains__)
    found = (pair for pair in read_hf_weights(folder, written) if pair[0] in ours)
    pairs = zip(expected, found, strict=True)
    for (name, weight), (also, there) in show_progress(pairs, "read back", len(ours)):
        if name != also or weight.dtype != there.dtype or not torch.equal(weight, there):
            raise refusal(f"{name} is another one in the written folder than in {saved.checkpoint.path}", PLEASE_REPORT)


def layers_in(memory: float, run: Run) -> int:
    """Return how many of a model's first layers, or groups of layers, can be compared in so many bytes, at least one behind a mixture's
    dense ones; 0: none."""
    table, least = op_table(run), run.model.dense_layers + 1
    counts = range(run.model.layer_groups, least - 1, -1)
    return next((layers for layers in counts if CHECK_BYTES * parameter_count(table, layers) <= memory), 0)


def _module_of(saved: SavedRun, run: Run, dtype: str) -> Transformer:
    """Return the module of a saved run, or of its first layers, with the values that are written, in float32."""
    module = build_model(run, device=CPU, dtype=torch.float32)
    load_weights(module, _weights_of(saved, run, dtype))
    return module.eval()


def _weights_of(saved: SavedRun, run: Run, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a run's model, the saved one or its first layers, as they are written."""
    return saved_weights(saved, PRECISION_DTYPES[dtype], weight_shapes(run).__contains__)


def check_logits(module: Transformer | CausalLM, run: Run, folder: Path, dtype: str) -> str:
    """Compare the folder's logits with those of our module: in float32, and as transformers computes them in the exported dtype.

    Return the result as text; raises Unreadable where they differ.
    """
    tokens = random_sequences(run)
    ours = logits_of(module, tokens)
    has_transformers = find_spec("transformers") is not None
    if has_transformers:
        theirs, reader = _transformers_logits(folder, tokens, torch.float32), f"transformers {import_module('transformers').__version__}"
    else:
        theirs, reader = _own_logits(run, folder, tokens), "our own reader (transformers is not installed)"
    says = compare_logits(ours, theirs, lambda: logits_of(module.double(), tokens), reader, "on the exported folder", PLEASE_REPORT)
    if dtype == "fp32" or not has_transformers:
        return says
    rounded = _transformers_logits(folder, tokens, PRECISION_DTYPES[dtype])
    error = float((rounded - ours).square().mean().sqrt() / ours.square().mean().sqrt())
    if not error <= ROUNDED_TOLERANCE:
        problem = f"{reader} computes other logits in {dtype} than in float32: the rms of the difference is {error:.1%} of theirs"
        raise refusal(problem, "use --dtype fp32" if dtype == "bf16" else "use --dtype bf16 or fp32")
    return f"{says}; computed in {dtype} they are {error:.1%} from these (rms)"


def logits_of(module: Any, tokens: Tensor) -> Tensor:
    """Return the logits of our module, without gradients."""
    with torch.no_grad():
        logits: Tensor = module.logits(tokens)
    return logits


def random_sequences(run: Run) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(run.model.vocab, (SEQUENCES, min(run.train.seq, MAX_TOKENS)), generator=drawn)


def silent_transformers() -> Any:
    """Import transformers, which then prints no warnings and no progress, and asks no hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    return transformers


def compare_logits(ours: Tensor, theirs: Tensor, exact: Callable[[], Tensor], reader: str, of: str, mend: str) -> str:
    """Return how far a reader's logits `of` what was exported [sequences, tokens, V] are from ours, both in float32, as text; raises
    Unreadable where they differ by more than LOGIT_TOLERANCE, unless ours are as far from the `exact` ones of our module in float64: some
    models, such as trained hybrids, have tokens whose logits rounding changes in the fourth digit."""
    difference, largest = float((theirs - ours).abs().max()), float(ours.abs().max())
    if not (difference <= LOGIT_TOLERANCE * max(1.0, largest) or difference <= float((exact() - ours).abs().max())):
        raise refusal(f"the logits of {reader} {of} are {difference:.1e} from ours", mend)
    return f"logits on {len(ours)} sequences of {ours.shape[1]} tokens are {difference:.1e} from those of {reader}"


def _transformers_logits(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    transformers = silent_transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            theirs: Tensor = model(tokens).logits
    except Exception as error:  # any exception of any version: it can't read the export
        raise refusal(f"transformers can't load the exported folder: {error}", PLEASE_REPORT) from error
    return theirs.float()


def _own_logits(run: Run, folder: Path, tokens: Tensor) -> Tensor:
    exported = _run_of_folder(run, folder)
    module = build_model(exported, device=CPU, dtype=torch.float32)
    load_weights(module, read_hf_weights(folder, exported))
    with torch.no_grad():
        return module.logits(tokens)


def _run_of_folder(run: Run, folder: Path) -> Run:
    """Return the run with the model as config.json describes it: GPT-2's architecture always has biases."""
    return replace(run, model=read(read_hf_config(folder), Model))
