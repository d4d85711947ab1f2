"""Hugging Face weights of the GPT-2, Llama and Mixtral kinds, from a folder of safetensors into our names and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from .hf import KINDS
from .hf_folder import INDEX, WHOLE, check_folder, weight_files
from .hf_names import PLACES, Place, expert_places, kind_of, place_of, sizes

MOST = 4_000_000_000  # bytes of a file
NO_TOKENS: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TEMPERATURE = 0.8  # as `distrain generate` draws where nothing is said


def from_hf(folder: str | Path, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Each weight of a run's model by its logical name, in its logical shape, read when its turn comes.

    Raises Unreadable, before the first, with all in which the folder is not this model.
    """
    folder = Path(folder)
    wanted = check_folder(folder, run)
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in weight_files(folder)]
        there = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for each in wanted:
            parts = [_read(there[place.theirs], place, size) for place, size in expert_places(each.place, each.shape)]
            yield each.name, torch.stack(parts) if "@" in each.place.theirs else parts[0]


def _read(file: Any, place: Place, shape: tuple[int, ...]) -> Tensor:
    if place.third is None:
        whole: Tensor = file.get_tensor(place.theirs)
        return whole.t() if place.turned else whole
    third = slice(place.third * shape[-1], (place.third + 1) * shape[-1])
    part: Tensor = file.get_slice(place.theirs)[(..., third) if len(shape) > 1 else third]
    return part


def to_hf(
    tensors: Iterable[tuple[str, Tensor]], run: Run, folder: str | Path, *, most: int = MOST, special: Mapping[str, int | None] = NO_TOKENS
) -> None:
    """Write weights, by logical name and in logical shape, as a folder that transformers loads: safetensors, config.json and
    generation_config.json.

    One file (of `most` bytes) is in memory at a time; `special` are the ids that both configs name. Raises Unreadable where no class
    of transformers is this model, or the folder holds weights.
    """
    folder, kind = Path(folder), kind_of(run)
    if any(folder.glob("*.safetensors*")):
        raise Unreadable([Problem(rule="weights", says=f"{folder} holds weights", mend="name a folder that is not there yet")])
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, int]] = []  # bytes of each tensor in each file
    dtype = ""
    for part in _parts(_theirs(tensors, kind, run), most):
        dtype = str(next(iter(part.values())).dtype).removeprefix("torch.")
        save_file(part, folder / f"{len(parts)}.part", metadata={"format": "pt"})
        parts.append({name: tensor.nbytes for name, tensor in part.items()})
    names = [WHOLE] if len(parts) == 1 else [f"model-{at + 1:05d}-of-{len(parts):05d}.safetensors" for at in range(len(parts))]
    for at, name in enumerate(names):
        (folder / f"{at}.part").rename(folder / name)
    if len(parts) > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        _write(folder / INDEX, {"metadata": {"total_size": sum(sum(part.values()) for part in parts)}, "weight_map": where})
    _write(folder / "config.json", {**config(run, kind, dtype), **special})
    _write(folder / "generation_config.json", generation(run, special))


def _write(path: Path, words: Mapping[str, object]) -> None:
    path.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def _theirs(tensors: Iterable[tuple[str, Tensor]], kind: str, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors; of GPT-2 three of ours are one of theirs, and a bias that ours lack is 0."""
    thirds: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        place = place_of(name, PLACES[kind])
        whole = tensor.detach().cpu()
        if place.third is not None:
            parts = thirds.setdefault(place.theirs, {})
            parts[place.third] = whole
            if len(parts) < 3:
                continue
            whole = torch.cat([thirds[place.theirs].pop(third) for third in range(3)], dim=-1)
        for expert, (each, _) in enumerate(expert_places(place, tuple(whole.shape))):
            part = whole[expert] if "@" in place.theirs else whole
            yield each.theirs, (part.t() if each.turned else part).contiguous()
        if kind == "gpt2" and not run.model.bias and (".attention." in name or ".mlp." in name):
            yield place.theirs.removesuffix("weight") + "bias", torch.zeros(whole.shape[-1], dtype=whole.dtype)


def _parts(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most so many bytes, or of one tensor."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > most:
            yield part
            part = {}
        part[name] = tensor
    yield part


def config(run: Run, kind: str, dtype: str) -> dict[str, object]:
    """The config.json of a run's model: the keys that `read_hf` reads, and those without which transformers would guess."""
    row = KINDS[kind]
    has = sizes(run.model, run) | {"dropout": run.model.dropout}
    said = {theirs: has[each.ours] for each in row.rows for theirs in each.theirs}
    act = next(theirs for theirs, ours in row.acts.items() if ours == run.model.act)
    told: dict[str, object] = {"architectures": [row.architecture], "model_type": kind, "torch_dtype": dtype, **NO_TOKENS}
    if run.model.positions == "rope":
        rope = {"rope_type": "default", "rope_theta": run.model.rope_base}
        told |= {"max_position_embeddings": run.train.seq, "rope_parameters": rope}
    return told | {row.act: act} | said


def generation(run: Run, special: Mapping[str, int | None]) -> dict[str, object]:
    """The generation_config.json of a model that was trained on plain text: it samples, up to the end of its context, or to `eos`."""
    context = run.train.seq if run.model.positions == "rope" else run.model.context or run.train.seq
    known = {key: value for key, value in special.items() if value is not None}
    return {**known, "do_sample": True, "temperature": TEMPERATURE, "max_length": context}
