"""Checks that a folder of PEFT's holds the LoRA of a run's model, from adapter_config.json and the header of its safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isclose, sqrt
from pathlib import Path
from typing import Any

from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from .adapter_names import PREFIX, AdapterPlace, adapter_place, changed_weights, target_words, weight_shapes_of
from .config import read_json
from .hub_name import download_mend
from .tensor_names import Columns, hf_tensor, tensors_of
from .weight_files import MAX_LISTED, TensorHeader, headers_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", None)  # values of init_lora_weights that leave the frozen weights as they are
FORMS = {  # keys of adapter_config.json that change what an adapter computes or holds -> what they are
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "modules_to_save": "modules that are trained whole (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "layer_replication": "layers that it repeats (layer_replication)",
    "alora_invocation_tokens": "an activated LoRA (alora_invocation_tokens)",
    "lora_bias": "biases of B (lora_bias)",
    "arrow_config": "several adapters (arrow_config)",
}
FREEZE = "merge it into the weights with peft's merge_and_unload, and name that folder in model.weights"

# I inner, O outer, R rank of the run, E experts


@dataclass(frozen=True, kw_only=True)
class AdapterWeight:
    """One of our weights in an adapter. `keys`: of the tensors before .lora_A.weight, one for each expert where experts are modules.

    `rows`: its rows of A among those of weights side by side, None where all of them have the same A. `columns`: its columns in B.
    `experts`: in one tensor; 0: none.
    """

    weight: str
    keys: tuple[str, ...]
    rank: int
    rows: slice | None
    columns: Columns | None
    experts: int


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What a folder holds for one place: keys of its tensors, and the rank of each."""

    keys: tuple[str, ...]
    rank: int
    in_modules: bool  # of experts: each has a module of its own


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a folder; raises Unreadable where there is none that can be read."""
    if not (folder / CONFIG).is_file():
        why = f"holds no {CONFIG}" if folder.is_dir() else "is not a folder"
        mend = download_mend(folder, "model.lora.weights") or "name a folder that PEFT's save_pretrained or `export --adapter` wrote"
        raise _refusal(f"model.lora.weights={folder} {why}", mend)
    try:
        return read_json(folder / CONFIG)
    except Unreadable as error:
        says = [each.says.replace("model.hf=", "").replace("is not a config.json", "can't be read") for each in error.problems]
        raise Unreadable([Problem(rule="weights", says=each, mend="save the adapter again") for each in says]) from None


def check_adapter(folder: Path, run: Run) -> tuple[AdapterWeight, ...]:
    """Return our weights that an adapter changes; raises Unreadable with every difference between it and the run's model.lora.

    Reads adapter_config.json and the header of the tensors, but no tensor.
    """
    config = read_adapter_config(folder)
    if problems := list(_form_problems(folder, config)):
        raise Unreadable(problems)
    if not (folder / TENSORS).is_file():
        raise _refusal(f"model.lora.weights={folder} holds no {TENSORS}", "save it with PEFT's save_pretrained, which writes safetensors")
    headers = headers_of([folder / TENSORS])
    whole = replace(run, model=replace(run.model, lora=replace(run.model.lora, targets=None)))
    shapes = weight_shapes_of(whole)
    places = dict[str, AdapterPlace]()
    for weight in changed_weights(shapes):
        place = adapter_place(weight, run, shapes)
        places.setdefault(place.name, place)
    held = dict(_held_places(places, run, shapes, headers))
    if problems := list(_unknown_problems(folder, held, headers)):
        raise Unreadable(problems)
    ours = list(changed_weights(weight_shapes_of(run)))
    problems = list(_target_problems(folder, held, places, ours, run)) or list(_scale_problems(folder, config, held, run))
    if problems:
        raise Unreadable(problems)
    return tuple(_adapter_weight(weight, held, ours, run, shapes) for weight in ours)


def _form_problems(folder: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what an adapter has that our LoRA has not."""
    if (kind := config.get("peft_type")) != "LORA":
        yield Problem(rule="weights", says=f"{folder} is an adapter of peft_type {kind}, not LORA", mend=FREEZE)
        return
    forms = [name for key, name in FORMS.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        forms.append(f"trained biases (bias={config['bias']})")
    if forms:
        yield Problem(rule="weights", says=f"{folder} has {', '.join(forms)}, which model.lora has not", mend=FREEZE)
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        says = f"{folder} began with init_lora_weights={start}, which changes the frozen weights too"
        yield Problem(rule="weights", says=says, mend="save it with PEFT's path_initial_model_for_weight_conversion")


def _held_places(
    places: Mapping[str, AdapterPlace], run: Run, shapes: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorHeader]
) -> Iterator[tuple[str, _Held]]:
    """Yield the places that an adapter changes, and what it holds for them. PEFT wraps the parameters of a module one around another, of
    which the outer ones have shorter names."""
    for name, place in places.items():
        *experts, inner, outer = shapes[place.beside[0]]
        outer = place.columns.width * place.columns.runs if place.columns else outer
        key = f"{PREFIX}{place.module}"
        if not experts:
            if (rank := _rank(headers, key, inner, outer, 1)) is not None:
                yield name, _Held(keys=(key,), rank=rank, in_modules=False)
            continue
        for each in (f"{key}.base_layer", key):
            if (rank := _rank(headers, each, inner, outer, experts[0])) is not None:
                yield name, _Held(keys=(each,), rank=rank, in_modules=False)
                break
        else:
            yield from _held_modules(place, run, shapes, headers)


def _held_modules(
    place: AdapterPlace, run: Run, shapes: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorHeader]
) -> Iterator[tuple[str, _Held]]:
    """Yield the weights of experts that are modules of their own in an adapter, as in transformers 4, each under its own name."""
    for weight in place.beside:
        named = hf_tensor(weight, tensors_of(run)).name.removesuffix(".weight")
        experts, inner, outer = shapes[weight]
        keys = tuple(f"{PREFIX}{named.replace('@', str(expert))}" for expert in range(experts)) if "@" in named else ()
        ranks = {_rank(headers, key, inner, outer, 1) for key in keys}
        if len(ranks) == 1 and (rank := ranks.pop()) is not None:
            yield weight, _Held(keys=keys, rank=rank, in_modules=True)


def _rank(headers: Mapping[str, TensorHeader], key: str, inner: int, outer: int, experts: int) -> int | None:
    """Return the rank of an A [experts R, I] and a B [O, R experts] under a key; None where they are not there, or of another shape."""
    a, b = (headers.get(f"{key}.lora_{each}.weight") for each in "AB")
    if a is None or b is None or len(a.shape) != 2 or not a.shape[0] or a.shape[0] % experts:
        return None
    return a.shape[0] // experts if a.shape[1] == inner and b.shape == (outer, a.shape[0]) else None


def _unknown_problems(folder: Path, held: Mapping[str, _Held], headers: Mapping[str, TensorHeader]) -> Iterator[Problem]:
    """Yield the tensors that are of no layer of the model, or of another shape."""
    known = {f"{key}.lora_{each}.weight" for found in held.values() for key in found.keys for each in "AB"}
    others = [name for name in headers if name not in known]
    for name in others[:MAX_LISTED]:
        says = f"{folder}: {name.removeprefix(PREFIX)}, {list(headers[name].shape)}, is of no layer that LoRA changes in this model"
        yield Problem(rule="weights", says=says)
    if len(others) > MAX_LISTED:
        yield Problem(rule="weights", says=f"{folder}: {len(others) - MAX_LISTED} more tensors are of no layer either")


def _target_problems(
    folder: Path, held: Mapping[str, _Held], places: Mapping[str, AdapterPlace], ours: list[str], run: Run
) -> Iterator[Problem]:
    """Yield that an adapter changes other layers than model.lora.targets, or has another rank."""
    wanted, words, lacking, others = run.model.lora.rank, list[str](), list[str](), list[str]()
    for name, place in places.items():
        mine, modules = [each for each in place.beside if each in ours], [each for each in place.beside if each in held]
        if (found := held.get(name)) is None:
            words += modules
            lacking += [each for each in mine if each not in modules]
            others += [each for each in modules if held[each].rank != wanted]
            continue
        has_own = bool(mine) and found.rank == len(mine) * wanted  # rows of A for each
        words += mine if has_own else place.beside
        others += [] if has_own or found.rank == wanted else [name]
    theirs, targets = target_words(words, run.model), target_words(ours, run.model)
    if set(theirs) != set(targets):
        says = f"{folder} changes {', '.join(theirs) or 'no layer'}, and model.lora.targets {', '.join(targets)}"
        yield Problem(rule="weights", says=says, mend=f"set model.lora.targets=[{','.join(theirs)}]" if theirs else "name another folder")
    elif lacking:
        says = f"{folder} has no A and B for {len(lacking):,} of {len(ours):,} weights, such as {lacking[0]}"
        yield Problem(rule="weights", says=says, mend=FREEZE)
    ranks = {found.rank: name for name, found in held.items()}
    if others and len(ranks) == 1:
        (rank,) = ranks
        yield Problem(rule="weights", says=f"{folder} has rank {rank}, and model.lora.rank={wanted}", mend=f"set model.lora.rank={rank}")
    elif others:
        several = ", ".join(f"{rank} for {name}" for rank, name in sorted(ranks.items())[:MAX_LISTED])
        yield Problem(rule="weights", says=f"{folder} has ranks {several}, and model.lora has one for all", mend=FREEZE)


def _scale_problems(folder: Path, config: Mapping[str, Any], held: Mapping[str, _Held], run: Run) -> Iterator[Problem]:
    """Yield that an adapter scales A B by another factor than alpha / rank of model.lora."""
    try:
        scales = {_scale(config, key.removeprefix(PREFIX), name, found.rank) for name, found in held.items() for key in found.keys[:1]}
    except (TypeError, ValueError, AttributeError, re.error):
        yield Problem(rule="weights", says=f"{folder / CONFIG} has no lora_alpha that can be read", mend="save the adapter again")
        return
    lora, first = run.model.lora, min(scales)
    how = "alpha / sqrt(rank), as use_rslora says" if config.get("use_rslora") else "alpha / rank"
    if any(not isclose(each, first, rel_tol=1e-9) for each in scales):
        says = f"{folder} scales A B by {min(scales):g} in some layers and {max(scales):g} in others, and model.lora all alike"
        yield Problem(rule="weights", says=says, mend=FREEZE)
    elif not isclose(first, lora.scale, rel_tol=1e-9):
        says = f"{folder} scales A B by {first:g}, which is {how}, and model.lora.alpha={lora.alpha:g} by {lora.scale:g}"
        yield Problem(rule="weights", says=says, mend=f"set model.lora.alpha={first * lora.rank:.15g}")


def _scale(config: Mapping[str, Any], module: str, name: str, rank: int) -> float:
    """Return the factor of x A B at a place, as PEFT finds it: by the first pattern of alphas that its name ends with."""
    names = (module, name)
    patterns = (config.get("alpha_pattern") or {}).items()
    alpha = next((value for key, value in patterns if any(re.fullmatch(rf"(.*\.)?({key})", each) for each in names)), config["lora_alpha"])
    return float(alpha) / (sqrt(rank) if config.get("use_rslora") else rank)


def _adapter_weight(
    weight: str,
    held: Mapping[str, _Held],
    ours: list[str],
    run: Run,
    shapes: Mapping[str, tuple[int, ...]],
) -> AdapterWeight:
    """Return where an adapter that fits the run holds one of our weights."""
    place, rank, sizes = adapter_place(weight, run, shapes), run.model.lora.rank, shapes[weight]
    found = held.get(weight) or held[place.name]
    if found.in_modules:
        return AdapterWeight(weight=weight, keys=found.keys, rank=rank, rows=None, columns=None, experts=0)
    mine = [each for each in place.beside if each in ours]
    at = mine.index(weight) * rank
    rows = slice(at, at + rank) if found.rank == len(mine) * rank and len(place.beside) > 1 else None
    experts = sizes[0] if len(sizes) == 3 else 0
    return AdapterWeight(weight=weight, keys=found.keys, rank=rank, rows=rows, columns=place.columns, experts=experts)


def _refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="weights", says=says, mend=mend)])
