"""Layers with linear attention and shared experts in a config.json of Qwen3-Next, as our `model.full_attention_interval` and
`model.shared_experts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...spec.run import Model
from .config_windows import FULL_ATTENTION

LINEAR_ATTENTION: Final = "linear_attention"
INTERVAL: Final = "full_attention_interval"
SHARED_FFN: Final = "shared_expert_intermediate_size"
GROUP_KEYS = ("layer_types", INTERVAL, SHARED_FFN, "moe_intermediate_size")
DEFAULT_INTERVAL, DEFAULT_FFN = 4, 512  # transformers'


def group_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for types of layers that are no whole groups of linear layers and one with full attention behind them, and for
    shared experts that are not as wide as some experts."""
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    interval = _interval(config)
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        says = f"layer_types={json.dumps(types)}" if types is not None else f"{INTERVAL}={json.dumps(interval)}"
        yield f"{says} is not {'a list with ' + FULL_ATTENTION if types is not None else 'a whole number, at least 1'}", ""
    elif isinstance(layers, int) and (layers % interval or types not in (None, _types(layers, interval))):
        says = f"layer_types={json.dumps(types)}" if types is not None else f"{INTERVAL}={interval}"
        yield f"{says} of {layers} layers are no whole groups", f"each group is {LINEAR_ATTENTION} layers, and one {FULL_ATTENTION} last"
    shared, width = (config.get(key, DEFAULT_FFN) for key in (SHARED_FFN, "moe_intermediate_size"))
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in (shared, width)):
        yield f"{SHARED_FFN}={json.dumps(shared)} and moe_intermediate_size={json.dumps(width)} are not whole numbers, at least 1", ""
    elif shared % width:
        yield f"{SHARED_FFN}={shared} is no multiple of moe_intermediate_size={width}", "shared experts are as wide as the others here"


def read_groups(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the keys of our model that a config without problems states by its groups and its shared experts."""
    shared, width = (config.get(key, DEFAULT_FFN) for key in (SHARED_FFN, "moe_intermediate_size"))
    return {INTERVAL: _interval(config), "shared_experts": shared // width}


def write_groups(model: Model) -> dict[str, object]:
    """Return the keys of a config.json that state a model's groups and its shared experts."""
    width = model.expert_ffn or model.ffn or 4 * model.hidden
    return {"layer_types": _types(model.layers, model.layers_in_group), SHARED_FFN: model.shared_experts * width, "mlp_only_layers": []}


def _interval(config: Mapping[str, Any]) -> Any:
    """The layers of a group; of a list of types up to its first full one, None where there is none."""
    types = config.get("layer_types")
    if types is None:
        return config.get(INTERVAL, DEFAULT_INTERVAL)
    return types.index(FULL_ATTENTION) + 1 if isinstance(types, list) and FULL_ATTENTION in types else None


def _types(layers: int, interval: int) -> list[str]:
    return [LINEAR_ATTENTION if (layer + 1) % interval else FULL_ATTENTION for layer in range(layers)]
