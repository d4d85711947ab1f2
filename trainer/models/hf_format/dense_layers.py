"""Layers without experts in a config.json that lists them by number, as our `model.dense_layers` and the `model.ffn` of those layers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DenseKeys:
    """The keys of a model_type that lists its dense layers: the list, and the width of their feed-forward with transformers' default."""

    layers: str
    ffn: str
    default_ffn: int

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the file."""
        return self.layers, self.ffn


def dense_problems(config: Mapping[str, Any], keys: DenseKeys, family: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for a list that is of the wrong type or names others than the first layers, and for a width of no layer."""
    listed, ffn = config.get(keys.layers) or [], config.get(keys.ffn, keys.default_ffn)
    if not isinstance(listed, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in listed):
        yield f"{keys.layers}={json.dumps(listed)} is not a list of whole numbers", ""
        return
    if set(listed) != set(range(len(set(listed)))):
        says = f"family {family} does not have {keys.layers}={json.dumps(listed)}"
        yield says, "its layers without experts are the first ones, as [] or [0, 1]"
    if listed and (isinstance(ffn, bool) or not isinstance(ffn, int)):
        yield f"{keys.ffn}={json.dumps(ffn)} is not a whole number", ""


def read_dense_layers(config: Mapping[str, Any], keys: DenseKeys) -> dict[str, object]:
    """Return `model.dense_layers` and `model.ffn` of a config without problems; nothing where all layers have experts."""
    many = len(set(config.get(keys.layers) or ()))
    return {"dense_layers": many, "ffn": config.get(keys.ffn, keys.default_ffn)} if many else {}


def write_dense_layers(dense_layers: int, ffn: object, keys: DenseKeys) -> dict[str, object]:
    """Return the keys of a config.json that state a model's first dense layers and the width of their feed-forward."""
    return {keys.layers: list(range(dense_layers)), keys.ffn: ffn}
