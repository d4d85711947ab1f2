"""Published weights of a model of family hf, read by the names that its parameters have in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ..hf.ops import PREFIX
from .check_folder import tensor_shapes, weight_files


def read_published_weights(folder: Path, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter by our name; raises Unreadable where the folder holds another model.

    Where the files have the parameters' names, their tensors are memory-mapped: what is not used is not read. Files with other names
    (experts one by one, older layouts) are loaded by transformers, whole.
    """
    files = weight_files(folder)
    shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
    if all(shapes.get(name) == shape for name, shape in (run.model.parameters or {}).items()):
        yield from _mapped_tensors(files, run)
    else:
        yield from _loaded_by_transformers(folder, run)


def _mapped_tensors(files: list[Path], run: Run) -> Iterator[tuple[str, Tensor]]:
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
        file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        for name in run.model.parameters or {}:
            yield PREFIX + name, file_of[name].get_tensor(name)


def _loaded_by_transformers(folder: Path, run: Run) -> Iterator[tuple[str, Tensor]]:
    transformers: Any = import_module("transformers")
    try:
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # versions of transformers raise different errors
        raise _refusal(f"transformers can't load {folder}: {' '.join(str(error).split())[:200]}") from error
    if missing := sorted(said["missing_keys"]):
        raise _refusal(f"{folder} lacks {len(missing)} of the model's weights, as {missing[0]}")
    there = {name: each.detach() for name, each in model.named_parameters()}
    for name, shape in (run.model.parameters or {}).items():
        if name not in there or tuple(there[name].shape) != shape:
            has = list(there[name].shape) if name in there else "missing"
            raise _refusal(f"{folder}: {name} is {has}, not {list(shape)}")
        yield PREFIX + name, there[name]


def _refusal(says: str) -> Unreadable:
    return Unreadable([Problem(rule="weights", says=says, mend="name a folder with the weights of model.hf")])
