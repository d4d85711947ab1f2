"""Published weights of a model of family hf, read by the names that its parameters have in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ..hf.ops import PREFIX
from .check_folder import FolderWeight, published_tensors
from .sliced_weight import SlicedWeight
from .tensor_names import HfTensor
from .tensor_reader import TensorReader
from .weight_files import weight_files


@contextmanager
def open_published_weights(folder: Path, run: Run) -> Iterator[dict[str, SlicedWeight] | dict[str, Tensor]]:
    """Open each parameter by our name, until the end of the context; raises Unreadable where the folder holds another model.

    Where the files have the parameters' names, their tensors are memory-mapped: what is not used is not read. Files with other names
    (experts one by one, older layouts) are loaded by transformers, whole; quantized ones are not.
    """
    stored, shapes = published_tensors(folder, run), run.model.parameters or {}
    if any(name not in stored or stored[name].shape != shape for name, shape in shapes.items()):
        yield dict(_loaded_by_transformers(folder, run))
        return
    with TensorReader(weight_files(folder)) as reader:
        weights = (
            FolderWeight(name=PREFIX + name, shape=shape, tensor=HfTensor(name), columns=None, stored=(stored[name],))
            for name, shape in shapes.items()
        )
        yield {weight.name: SlicedWeight(weight=weight, reader=reader) for weight in weights}


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
