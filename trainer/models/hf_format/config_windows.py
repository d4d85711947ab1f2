"""Sliding windows in a config.json: `sliding_window` and `layer_types`, as our `model.window` and `model.layer_types`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from ...spec.run import LayerType, Model

FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"
FIRST_WINDOWED = 28  # Qwen2's max_window_layers where a file lacks it


@dataclass(frozen=True)
class WindowKeys:
    """What a model_type reads of its windows: `default` is sliding_window where a file lacks it; `by_layer`: it reads layer_types.

    `switched`: it has a window only with use_sliding_window and, where it reads layer_types and a file has none, only from layer
    max_window_layers on. `every`: the number of layers of which the last has no window, where a file has no layer_types; `every_key`: the
    key of that number, whose default it then is.
    """

    default: int | None
    by_layer: bool = False
    switched: bool = False
    every: int | None = None
    every_key: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the file."""
        of_switch = ("use_sliding_window", "max_window_layers") if self.switched else ()
        of_every = (self.every_key, f"_{self.every_key}") if self.every_key else ()  # transformers writes the second, and reads it nowhere
        return ("sliding_window", "layer_types", *of_switch, *of_every)


def window_problems(config: Mapping[str, Any], keys: WindowKeys) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for keys of windows that are of the wrong type, or that transformers would not follow."""
    window, types, layers = _window(config, keys), config.get("layer_types"), config.get("num_hidden_layers")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        yield f"sliding_window={json.dumps(window)} is not a whole number, at least 1", "null is full attention"
    if keys.every is not None:
        every = _every(config, keys)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            yield f"{keys.every_key}={json.dumps(every)} is not a whole number, at least 1", ""
        if window is None:
            yield "sliding_window=null, but layers of this model_type have one", ""
    if types is None:
        return
    if not isinstance(types, list) or any(each not in get_args(LayerType) for each in types):
        yield f"layer_types={json.dumps(types)} is not a list of {' and '.join(get_args(LayerType))}", ""
    elif isinstance(layers, int) and len(types) != layers:
        yield f"layer_types names {len(types)} layers, but num_hidden_layers={layers}", ""
    elif window is not None and not keys.by_layer and FULL_ATTENTION in types:
        yield (
            f"transformers gives every layer of this model_type sliding_window={window}, whatever layer_types says",
            "use model_type ministral",
        )


def read_window(config: Mapping[str, Any], keys: WindowKeys) -> dict[str, object]:
    """Return `model.window` and `model.layer_types` of a config without problems; None where all layers are alike."""
    window, types = _window(config, keys), config.get("layer_types") if keys.by_layer else None
    layers = config["num_hidden_layers"]
    if keys.every is not None and types is None:
        every = _every(config, keys)
        types = [SLIDING_ATTENTION if (layer + 1) % every else FULL_ATTENTION for layer in range(layers)]
    if window is not None and types is None and keys.switched and keys.by_layer:
        first = min(config.get("max_window_layers", FIRST_WINDOWED), layers)
        types = [FULL_ATTENTION] * first + [SLIDING_ATTENTION] * (layers - first)
    if window is None or not types or SLIDING_ATTENTION not in types:
        return {"window": None if types else window, "layer_types": None}
    return {"window": window, "layer_types": types if FULL_ATTENTION in types else None}


def write_window(model: Model, keys: WindowKeys) -> dict[str, object]:
    """Return the keys of a config.json that state a model's windows."""
    has_window = model.windowed_layers > 0
    written: dict[str, object] = {"sliding_window": model.window if has_window else None}
    if keys.by_layer:
        written["layer_types"] = [SLIDING_ATTENTION if model.is_windowed(layer) else FULL_ATTENTION for layer in range(model.layers)]
    if keys.switched:
        written |= {"use_sliding_window": has_window, "max_window_layers": 0 if has_window else model.layers}
    return written


def _every(config: Mapping[str, Any], keys: WindowKeys) -> Any:
    return config.get(keys.every_key, keys.every) if keys.every_key else keys.every


def _window(config: Mapping[str, Any], keys: WindowKeys) -> Any:
    if keys.switched and not config.get("use_sliding_window", False):
        return None
    return config.get("sliding_window", keys.default)
