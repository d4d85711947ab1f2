"""Rotary embeddings in a config.json: `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta`, as our `model.rope`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ...spec.run import Model
from ...spec.sections.rope import ROPE_KEYS, Rope
from .config_windows import FULL_ATTENTION, SLIDING_ATTENTION

ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # at the top
KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", *(row.name for row in fields(Rope))}
REQUIRED_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config's rotary embedding: those of its mapping, and rope_theta and partial_rotary_factor beside it."""
    rope = _mapping(config)
    outside = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return {**outside, **rope}


def with_one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose kinds of layers have rotary embeddings of their own, with that of whole attention as the only mapping and the
    base of the layers with a window beside it."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or FULL_ATTENTION not in rope:
        return dict(config)
    base = (rope.get(SLIDING_ATTENTION) or {}).get("rope_theta")
    return {**config, "rope_parameters": rope[FULL_ATTENTION], **({} if base is None else {"rope_local_base_freq": base})}


def local_rope_problems(config: Mapping[str, Any], only_base: float | None) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for rotary embeddings of kinds of layers that transformers would read otherwise, or that ours do not have.

    `only_base`: the rope_theta that a file with one for all layers may have, because versions of transformers read another one as that of
    all layers, or not of those with a window.
    """
    base = config.get("rope_theta")
    if only_base is not None and not config.get("rope_parameters") and base not in (None, only_base):
        says = f"transformers 5 rotates layers with a window by {only_base:g}, and not by rope_theta={json.dumps(base)}"
        yield says, f"state rope_parameters with a mapping for each of {FULL_ATTENTION} and {SLIDING_ATTENTION}"
    rope = config.get("rope_parameters") or {}
    kinds = {FULL_ATTENTION, SLIDING_ATTENTION}
    if not isinstance(rope, Mapping) or (
        rope and not (rope.keys() <= kinds and all(isinstance(rope.get(each), Mapping) for each in kinds))
    ):
        yield f"rope_parameters={json.dumps(rope)} has not a mapping for each of {' and '.join(sorted(kinds))}", ""
        return
    local = rope.get(SLIDING_ATTENTION, {})
    if local.keys() - {"rope_type", "rope_theta"} or local.get("rope_type") not in (None, "default"):
        yield f"rope_parameters of {SLIDING_ATTENTION} are {json.dumps(local)}", "layers with a window are not scaled here"


def rope_type(config: Mapping[str, Any]) -> object:
    """Return the kind of scaling that a config states; the mapping itself where each kind of layer has its own."""
    rope = _mapping(config)
    if any(isinstance(value, Mapping) for value in rope.values()):
        return rope
    return rope.get("rope_type") or rope.get("type") or ("unnamed" if "factor" in rope else "default")


def rope_problems(config: Mapping[str, Any], family: str, *, partial: bool) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for a rotary embedding that our models do not have, or whose figures are missing or wrong.

    `partial`: models of this type may rotate a part of each head.
    """
    kind, rope = rope_type(config), _mapping(config)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        yield f"family {family} does not have rope_type={json_text(kind)}", f"it has {', '.join(ROPE_KEYS)}"
        return
    for key in sorted(rope.keys() - KNOWN):
        yield (
            f"family {family} does not have {key}={json_text(rope[key])} of its rotary embedding",
            "take the key out if it changes nothing",
        )
    if (share := rope_keys(config).get("partial_rotary_factor", 1)) != 1 and not partial:
        yield f"family {family} does not have partial_rotary_factor={json_text(share)}", "it has 1"
    for key in (each for each in ROPE_KEYS[kind] if each != "original_max_position_embeddings"):
        value, number = rope.get(key), key != "truncate"
        if value is None and key in REQUIRED_ROPE_KEYS[kind]:
            yield f"{key} of rope_type={kind} is missing", "set it to a number"
        elif value is not None and (isinstance(value, bool) if number else not isinstance(value, bool)):
            yield f"{key}={json.dumps(value)} is not {'a number' if number else 'true or false'}", ""
        elif value is not None and number and not isinstance(value, int | float):
            yield f"{key}={json.dumps(value)} is not a number", ""
    if kind != "default" and kind != "linear" and not isinstance(_original_length(config, kind), int):
        yield f"rope_type={kind} needs original_max_position_embeddings", "or max_position_embeddings, a whole number"


def read_rope(config: Mapping[str, Any]) -> dict[str, object]:
    """Return `model.rope` of a config without problems, with the defaults that transformers fills in."""
    kind, rope = str(rope_type(config)), _mapping(config)
    values: dict[str, object] = {key: rope[key] for key in ROPE_KEYS[kind] if rope.get(key) is not None}
    if "original_max_position_embeddings" in ROPE_KEYS[kind]:
        values["original_max_position_embeddings"] = length = _original_length(config, kind)
        if "factor" not in values and isinstance(length, int):
            values["factor"] = config.get("max_position_embeddings", length) / length
    return {"type": kind, **values}


def write_rope(model: Model, seq: int, *, by_type: bool) -> dict[str, object]:
    """Return the keys of a config.json that state a model's rotary embedding; `seq` are the tokens of its sequences. `by_type`: they are
    stated for each type of layers."""
    rope = model.rope
    values: dict[str, object] = {"rope_type": rope.type, "rope_theta": model.rope_base}
    values |= {key: value for key, value in rope.values.items() if key != "type" and value is not None}
    original = rope.original_max_position_embeddings or seq
    longest = seq
    if rope.type == "dynamic":  # transformers takes the original length from max_position_embeddings
        longest = original
        del values["original_max_position_embeddings"]
    elif rope.type in ("llama3", "yarn"):
        longest = max(round(rope.factor * original), original + 1)
    if not by_type:
        return {"max_position_embeddings": longest, "rope_parameters": values}
    local = {"rope_type": "default", "rope_theta": model.rope_local_base if model.has_local_rope else model.rope_base}
    return {"max_position_embeddings": longest, "rope_parameters": {FULL_ATTENTION: values, SLIDING_ATTENTION: local}}


def _mapping(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {"rope_type": rope}


def _original_length(config: Mapping[str, Any], kind: str) -> object:
    """Return the length of the sequences before scaling, where transformers looks for it."""
    if kind == "dynamic":
        return config.get("max_position_embeddings")
    outside, inside = (each.get("original_max_position_embeddings") for each in (config, _mapping(config)))
    return outside or inside or config.get("max_position_embeddings")


def json_text(value: object) -> str:
    """Return a value as the file states it, a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)
