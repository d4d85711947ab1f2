"""Checks that a Hugging Face folder holds the weights of a run's model, from its config.json and the headers of its safetensors."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...spec.problem import Problem, Unreadable
from ...spec.read import read, value_text
from ...spec.run import Model, Run
from ..families import op_table
from ..hf.quantization import KEY as QUANTIZATION_KEY
from ..hf.quantization import quantization_problems, read_quantization
from ..ops.lora import without_lora
from ..ops.op_table import model_constants, model_parameters
from .config import config_file, read_hf_config, read_json
from .config_rope import json_text
from .harmless_keys import is_harmless
from .hub_name import download_mend
from .model_type import architecture_keys
from .stored_tensors import StoredTensor, stored_tensors
from .tensor_names import Columns, HfTensor, columns_in_tensor, expert_tensors, find_hf_tensor, tensors_of
from .weight_files import MAX_LISTED, headers_of, weight_files


@dataclass(frozen=True, kw_only=True)
class FolderWeight:
    """One of our weights in a folder: its logical name and shape, and the folder's tensor that holds it, or the columns of it that do.

    `stored`: where the values lie, one for each expert where experts have tensors of their own.
    """

    name: str
    shape: tuple[int, ...]
    tensor: HfTensor
    columns: Columns | None
    stored: tuple[StoredTensor, ...]


def check_folder(folder: Path, run: Run) -> tuple[FolderWeight, ...]:
    """Return the weights and constants of a run's model in a folder; raises Unreadable with every difference between the folder and the
    model.

    Reads config.json and the headers of the weight files, but no tensor.
    """
    problems = list(_config_problems(folder, run))
    if problems:
        raise Unreadable(problems)
    stored = stored_tensors(headers_of(weight_files(folder)), read_quantization(read_json(folder / "config.json")))
    tensors, table = tensors_of(run), op_table(without_lora(run))
    layers = range(run.model.layer_groups)
    ours = {each.name: each.shape(table.sizes) for each in (*model_parameters(table, layers), *model_constants(table, layers))}
    missing = [f"mtp.{index}." for index in range(run.model.mtp.layers) if not _holds_module(index, tensors, stored)]
    ours = {name: shape for name, shape in ours.items() if not name.startswith(tuple(missing))}
    weights, problems = [], []
    for name, shape in ours.items():
        tensor = find_hf_tensor(name, tensors, stored)
        columns = columns_in_tensor(name, tensor, ours, run.model.heads)
        parts = list(expert_tensors(tensor, shape))
        problems += [each for part, size in parts for each in _tensor_problems(name, part, size, columns, stored, folder)]
        held = tuple(stored[part.name] for part, _ in parts if part.name in stored)
        weights.append(FolderWeight(name=name, shape=shape, tensor=tensor, columns=columns, stored=held))
    _raise_listed(problems, folder)
    return tuple(weights)


def _raise_listed(problems: list[Problem], folder: Path) -> None:
    """Raise Unreadable with problems of tensors, if there are any: the first ones, each once, and how many more there are."""
    problems = list(dict.fromkeys(problems))  # two of our weights may lie in one tensor
    if len(problems) > MAX_LISTED:
        more = len(problems) - MAX_LISTED
        problems[MAX_LISTED:] = [Problem(rule="weights", says=f"{folder}: {more} more tensors are missing or of another shape")]
    if problems:
        raise Unreadable(problems)


def _holds_module(index: int, tensors: Mapping[str, HfTensor], names: Container[str]) -> bool:
    """Whether files that hold these names have a module that predicts a further token."""
    join = tensors.get(f"mtp.{index}.join")
    return join is not None and f"{join.name}.weight" in names


def check_same_config(folder: Path, run: Run) -> None:
    """Check a folder of weights for a model of family hf; raises Unreadable where its files are damaged, its config.json has other keys
    than that of `model.hf`, or its weights are quantized in a way that is not read."""
    problems = list(_missing_config(folder))
    if problems:
        raise Unreadable(problems)
    theirs, ours = read_json(folder / "config.json"), read_json(config_file(run.model.hf or ""))
    different = [key for key in sorted(theirs.keys() | ours.keys()) if key != QUANTIZATION_KEY and not is_harmless(key)]
    different = [key for key in different if theirs.get(key) != ours.get(key)]
    pairs = [(key, json_text(theirs.get(key)), json_text(ours.get(key))) for key in different[:MAX_LISTED]]
    problems = [
        Problem(rule="weights", says=f"{folder} has {key}={there}, and model.hf={run.model.hf} {here}") for key, there, here in pairs
    ]
    if problems:
        last = replace(problems[-1], mend=f"set model.hf={folder} to take its sizes")
        raise Unreadable([*problems[:-1], last])
    published_tensors(folder, run)


def published_tensors(folder: Path, run: Run) -> dict[str, StoredTensor]:
    """Return the tensors of a folder of weights for a model of family hf, by name; raises Unreadable where its files are damaged, or where
    its weights are quantized and not read here, or not those that the model's parameters name."""
    config = read_json(folder / "config.json")
    if found := [Problem(rule="weights", says=f"{folder}: {says}", mend=fix) for says, fix in quantization_problems(config)]:
        raise Unreadable(found)
    stored = stored_tensors(headers_of(weight_files(folder)), read_quantization(config))
    if any(each.is_quantized for each in stored.values()):
        named = [(name, HfTensor(name), shape) for name, shape in (run.model.parameters or {}).items()]
        found = [each for name, tensor, size in named for each in _tensor_problems(name, tensor, size, None, stored, folder)]
        fix = "name a folder of plain weights: quantized ones are read by the names of transformers' parameters"
        _raise_listed([replace(each, mend=each.mend or fix) for each in found], folder)
    return stored


def _config_problems(folder: Path, run: Run) -> Iterator[Problem]:
    """Yield the differences between the folder's config.json and the run's model, key by key."""
    if missing := list(_missing_config(folder)):
        yield from missing
        return
    model = read(read_hf_config(folder), Model)
    if model.family != run.model.family:
        says = f"{folder} is a model of family {model.family}, but model.family={run.model.family}"
        yield Problem(rule="weights", says=says, mend=f"set model.hf={folder} to take its sizes")
        return
    theirs, ours = architecture_keys(model, run), architecture_keys(run.model, run)
    for key in ours:
        if theirs.get(key) != ours[key]:
            has = value_text(theirs.get(key))
            yield Problem(
                rule="weights", says=f"{folder} has model.{key}={has}, this run {value_text(ours[key])}", mend=f"set model.{key}={has}"
            )


def _missing_config(folder: Path) -> Iterator[Problem]:
    """Yield a problem where a folder has no config.json."""
    if not (folder / "config.json").is_file():
        why = "holds no config.json" if folder.is_dir() else "is not a folder"
        exported = f"{folder}_hf"
        if (folder / "run.json").is_file():
            why = "is a run folder"
            mend = f"write `distrain export {shlex.quote(str(folder))} {shlex.quote(exported)}` and set model.weights={exported}"
        else:
            mend = download_mend(folder, "model.weights")
        mend = mend or "name a folder with config.json and .safetensors, as transformers' save_pretrained writes it"
        yield Problem(rule="weights", says=f"model.weights={folder} {why}", mend=mend)


def _tensor_problems(
    weight: str, tensor: HfTensor, size: tuple[int, ...], columns: Columns | None, stored: Mapping[str, StoredTensor], folder: Path
) -> Iterator[Problem]:
    """Yield a problem where a tensor of one of our weights, `size` in our order, is missing, of another shape or of a form that is not
    read."""
    has = stored.get(tensor.name)
    if has is None:
        yield Problem(rule="weights", says=f"{folder} has no {tensor.name}, which is {weight} here")
        return
    want = (*size[:-1], columns.width * columns.runs) if columns else size
    want = want[::-1] if tensor.transposed else want
    want = (want[0], 1, *want[1:]) if tensor.depthwise else want
    if has.problem:
        yield Problem(rule="weights", says=f"{folder}: {has.problem}", mend="download the folder again, or name one of bf16 weights")
    elif has.shape != want:
        name = tensor.name if has.values == tensor.name else f"{has.values}, as plain values,"
        yield Problem(rule="weights", says=f"{folder}: {name} is {list(has.shape)}, not {list(want)}")
