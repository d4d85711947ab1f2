"""Weights between our names and a Hugging Face folder of safetensors, in both directions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ...spec.sections.mtp import Mtp
from .check_folder import check_folder
from .config_kinds import CONFIG_KINDS
from .config_rope import write_rope
from .config_windows import write_window
from .dense_layers import write_dense_layers
from .layer_groups import write_groups
from .model_type import architecture_keys, hf_model_type
from .sliced_weight import SlicedWeight
from .tensor_names import (
    copies_in_modules,
    expert_tensors,
    has_module_tensors,
    hf_tensor,
    tensors_of,
)
from .tensor_reader import TensorReader
from .weight_files import INDEX, WHOLE, weight_files

MAX_FILE_BYTES = 4_000_000_000
NO_TOKENS: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TEMPERATURE = 0.8  # the default of `distrain generate`


@contextmanager
def open_hf_weights(folder: str | Path, run: Run) -> Iterator[dict[str, SlicedWeight]]:
    """Open each weight and constant of a run's model by logical name, until the end of the context; of modules that predict further tokens,
    those that the folder holds. Raises Unreadable with every difference between the folder and the model.
    """
    folder = Path(folder)
    weights = check_folder(folder, run)
    with TensorReader(weight_files(folder)) as reader:
        yield {weight.name: SlicedWeight(weight=weight, reader=reader) for weight in weights}


def read_hf_weights(folder: str | Path, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield what `open_hf_weights` opens, whole and in logical shape, reading one at a time; raises Unreadable before the first."""
    with open_hf_weights(folder, run) as weights:
        for name, weight in weights.items():
            yield name, weight.whole()


def write_hf_folder(
    weights: Iterable[tuple[str, Tensor]],
    run: Run,
    folder: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    special: Mapping[str, int | None] = NO_TOKENS,
) -> None:
    """Write weights, by logical name and in logical shape, as a folder that transformers loads: safetensors, config.json and
    generation_config.json.

    One file of at most `max_file_bytes` is in memory at a time; `special` are the token ids that both configs name. Raises Unreadable
    where no class of transformers computes this model, or where the folder already holds weights.
    """
    folder, model_type = Path(folder), hf_model_type(run)
    if any(folder.glob("*.safetensors*")):
        raise Unreadable([Problem(rule="weights", says=f"{folder} holds weights", mend="name a folder that does not exist yet")])
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, int]] = []  # bytes of each tensor in each file
    dtype = ""
    for tensors in _split_by_bytes(_hf_tensors(weights, model_type, run), max_file_bytes):
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        save_file(tensors, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in tensors.items()})
    names = [WHOLE] if len(files) == 1 else [f"model-{at + 1:05d}-of-{len(files):05d}.safetensors" for at in range(len(files))]
    for at, name in enumerate(names):
        (folder / f"{at}.part").rename(folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, sizes in zip(names, files, strict=True) for tensor in sizes}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": weight_map})
    write_json(folder / "config.json", {**hf_config(run, model_type, dtype), **special})
    write_json(folder / "generation_config.json", generation_config(run, special))


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file as Hugging Face writes its own."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _hf_tensors(weights: Iterable[tuple[str, Tensor]], model_type: str, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's names and tensors; those of modules that predict further tokens where its model_type has them. In some of them
    several of our weights lie side by side, and in GPT-2 a bias that our model lacks is 0."""
    parts: dict[str, dict[int, Tensor]] = {}
    tensors = tensors_of(run)
    for name, weight in weights:
        if Mtp.owns(name) and not has_module_tensors(run):
            continue
        tensor = hf_tensor(name, tensors)
        whole = weight.detach().cpu()
        for copied in copies_in_modules(name, run):
            yield copied, (whole.t() if name == "head.weight" else whole).clone(memory_format=torch.contiguous_format)
        if tensor.beside:
            held = parts.setdefault(tensor.name, {})
            held[tensor.place] = whole
            if len(held) < len(tensor.beside):
                continue
            runs = whole.shape[-1] if tensor.interleaved else tensor.heads or run.model.heads if tensor.by_head else 1
            whole = _side_by_side([held.pop(place) for place in range(len(tensor.beside))], runs)
        for expert, (each, _) in enumerate(expert_tensors(tensor, tuple(whole.shape))):
            part = whole[expert] if "@" in tensor.name else whole
            part = part.t() if each.transposed else part
            yield each.name, (part.unsqueeze(1) if each.depthwise else part).contiguous()
        if model_type == "gpt2" and not run.model.bias and (".attention." in name or ".mlp." in name):
            yield tensor.name.removesuffix("weight") + "bias", torch.zeros(whole.shape[-1], dtype=whole.dtype)


def _side_by_side(parts: list[Tensor], runs: int) -> Tensor:
    """Return the columns of several weights as one tensor, in which each of `runs` equal runs has its columns of every weight."""
    return torch.cat([torch.unflatten(part, -1, (runs, -1)) for part in parts], dim=-1).flatten(-2)


def _split_by_bytes(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in groups of at most `max_bytes`; a larger tensor is a group of its own."""
    group: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if group and sum(each.nbytes for each in group.values()) + tensor.nbytes > max_bytes:
            yield group
            group = {}
        group[name] = tensor
    yield group


def hf_config(run: Run, model_type: str, dtype: str) -> dict[str, object]:
    """Return the config.json of a run's model: the keys that `read_hf_config` reads, and those that transformers would guess wrongly."""
    kind = CONFIG_KINDS[model_type]
    ours = architecture_keys(run.model, run) | {"dropout": run.model.dropout}
    sizes = {theirs: None if ours[row.ours] == row.null else ours[row.ours] for row in kind.rows for theirs in row.theirs}
    act = next(theirs for theirs, act in kind.acts.items() if act == run.model.act)
    config: dict[str, object] = {"architectures": [kind.architecture], "model_type": model_type, "torch_dtype": dtype, **NO_TOKENS}
    if run.model.positions == "rope":
        config |= write_rope(run.model, _rotary_context(run), by_type=kind.local_rope)
    if kind.window:
        config |= write_window(run.model, kind.window)
    if kind.dense:
        config |= write_dense_layers(run.model.dense_layers, ours["ffn"], kind.dense)
    if kind.grouped:
        config |= write_groups(run.model)
    modules = {"num_nextn_predict_layers": run.model.mtp.layers} if has_module_tensors(run) else {}
    return {**config, kind.act: act, **sizes, **kind.written, **modules}


def published_context(run: Run) -> int:
    """Return the longest sequence, in tokens, that the config.json beside the weights of a run's start states; 0 where it can't be read.

    Training on shorter ones takes nothing from a rotary embedding, and programs that read the folder cut or refuse longer texts.
    """
    folder = run.model.weights and Path(run.model.weights).expanduser()
    try:
        stated = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings") if folder else 0
    except (OSError, ValueError, AttributeError):
        return 0
    return stated if isinstance(stated, int) else 0


def _rotary_context(run: Run) -> int:
    return max(run.train.seq, published_context(run))


def generation_config(run: Run, special: Mapping[str, int | None]) -> dict[str, object]:
    """Return the generation_config.json of a model trained on plain text: it samples up to the end of its context, or to `eos`."""
    context = _rotary_context(run) if run.model.positions == "rope" else run.model.context or run.train.seq
    known = {key: value for key, value in special.items() if value is not None}
    return {**known, "do_sample": True, "temperature": TEMPERATURE, "max_length": context}
