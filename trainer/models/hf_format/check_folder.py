"""Checks that a Hugging Face folder holds the weights of a run's model, from its config.json and the headers of its safetensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...spec.problem import Problem, Unreadable
from ...spec.read import read, value_text
from ...spec.run import Model, Run
from ..families import op_table
from ..ops.lora import without_lora
from ..ops.op_table import model_constants, model_parameters
from .config import config_file, read_hf_config, read_json
from .harmless_keys import is_harmless
from .model_type import architecture_keys
from .names import Columns, HfTensor, columns_in_tensor, expert_tensors, find_hf_tensor, tensors_of
from .rope import json_text

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes of a safetensors header: the format's own limit
MAX_LISTED = 6  # wrong tensors that are listed one by one


@dataclass(frozen=True, kw_only=True)
class FolderWeight:
    """One of our weights in a folder: its logical name and shape, and the folder's tensor that holds it, or the columns of it that do."""

    name: str
    shape: tuple[int, ...]
    tensor: HfTensor
    columns: Columns | None


def check_folder(folder: Path, run: Run) -> tuple[FolderWeight, ...]:
    """Return the weights and constants of a run's model in a folder; raises Unreadable with every difference between the folder and the
    model.

    Reads config.json and the headers of the weight files, but no tensor.
    """
    problems = list(_config_problems(folder, run))
    if problems:
        raise Unreadable(problems)
    shapes = {name: shape for file in weight_files(folder) for name, shape in tensor_shapes(file).items()}
    tensors, table = tensors_of(run), op_table(without_lora(run))
    layers = range(run.model.layers)
    ours = {each.name: each.shape(table.sizes) for each in (*model_parameters(table, layers), *model_constants(table, layers))}
    missing = [f"mtp.{index}." for index in range(run.model.mtp.layers) if not _holds_module(index, tensors, shapes)]
    ours = {name: shape for name, shape in ours.items() if not name.startswith(tuple(missing))}
    weights = tuple(
        FolderWeight(name=name, shape=shape, tensor=tensor, columns=columns_in_tensor(name, tensor, ours, run.model.heads))
        for name, shape in ours.items()
        for tensor in [find_hf_tensor(name, tensors, shapes)]
    )
    problems = [problem for weight in weights for problem in _shape_problems(weight, shapes, folder)]
    if len(problems) > MAX_LISTED:
        more = len(problems) - MAX_LISTED
        problems[MAX_LISTED:] = [Problem(rule="weights", says=f"{folder}: {more} more tensors are missing or of another shape")]
    if problems:
        raise Unreadable(problems)
    return weights


def _holds_module(index: int, tensors: Mapping[str, HfTensor], shapes: Container[str]) -> bool:
    """Whether files that hold these names have a module that predicts a further token."""
    join = tensors.get(f"mtp.{index}.join")
    return join is not None and f"{join.name}.weight" in shapes


def check_same_config(folder: Path, run: Run) -> None:
    """Check a folder of weights for a model of family hf; raises Unreadable where its files are damaged, or its config.json has other
    keys than that of `model.hf`."""
    problems = list(_missing_config(folder))
    if problems:
        raise Unreadable(problems)
    for file in weight_files(folder):
        tensor_shapes(file)
    theirs, ours = read_json(folder / "config.json"), read_json(config_file(run.model.hf or ""))
    different = [key for key in sorted(theirs.keys() | ours.keys()) if not is_harmless(key) and theirs.get(key) != ours.get(key)]
    pairs = [(key, json_text(theirs.get(key)), json_text(ours.get(key))) for key in different[:MAX_LISTED]]
    problems = [
        Problem(rule="weights", says=f"{folder} has {key}={there}, and model.hf={run.model.hf} {here}") for key, there, here in pairs
    ]
    if problems:
        last = replace(problems[-1], mend=f"set model.hf={folder} to take its sizes")
        raise Unreadable([*problems[:-1], last])


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder's model; raises Unreadable where there are none, or one that its index names is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise Unreadable([Problem(rule="weights", says=f"{index} can't be read", mend="download the folder again")]) from None
        if missing := [file.name for file in files if not file.is_file()]:
            says = f"{folder} lacks {', '.join(missing[:MAX_LISTED])}, which {INDEX} names"
            raise Unreadable([Problem(rule="weights", says=says, mend="download the folder again")])
        return files
    files = [folder / WHOLE] if (folder / WHOLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        mend = "save it with transformers' save_pretrained, which writes safetensors"
        raise Unreadable([Problem(rule="weights", says=f"model.weights={folder} holds no .safetensors", mend=mend)])
    return files


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor from a safetensors file's header; raises Unreadable where the file is invalid or cut short."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(opened.read(length))
        rows = {name: row for name, row in header.items() if name != "__metadata__"}
        end = 8 + length + max((row["data_offsets"][1] for row in rows.values()), default=0)
        shapes = {name: tuple(map(int, row["shape"])) for name, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise Unreadable([Problem(rule="weights", says=f"{file} is not a safetensors file", mend="download it again")]) from None
    if file.stat().st_size != end:
        says = f"{file} is {file.stat().st_size:,} bytes where its header says {end:,}"
        raise Unreadable([Problem(rule="weights", says=says, mend="download it again")])
    return shapes


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
        mend = "name a folder with config.json and .safetensors, as transformers' save_pretrained writes it"
        yield Problem(rule="weights", says=f"model.weights={folder} {why}", mend=mend)


def _shape_problems(weight: FolderWeight, shapes: dict[str, tuple[int, ...]], folder: Path) -> Iterator[Problem]:
    """Yield a problem for each of a weight's tensors that is missing or of another shape."""
    for tensor, size in expert_tensors(weight.tensor, weight.shape):
        has = shapes.get(tensor.name)
        if has is None:
            yield Problem(rule="weights", says=f"{folder} has no {tensor.name}, which is {weight.name} here")
            continue
        want = (*size[:-1], weight.columns.width * weight.columns.runs) if weight.columns else size
        want = want[::-1] if tensor.transposed else want
        if has != want:
            yield Problem(rule="weights", says=f"{folder}: {tensor.name} is {list(has)}, not {list(want)}")
