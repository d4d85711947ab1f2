"""What transformers makes of a config.json, as JSON on stdout: python -m distrain.trainer.models.auto.meta CONFIG.

The model is made on the meta device: its parameters have names and shapes, and no memory. No code that a config names is run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> int:
    """Print {"sizes": ..., "parameters": {name: shape}}, or {"problem": why there is none}; all else goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    said = found(Path(sys.argv[1]))
    os.write(out, f"{json.dumps(said)}\n".encode())
    return 0


def found(file: Path) -> dict[str, Any]:
    """What there is to know of a config.json's model without making it."""
    try:
        config = config_of(file)
        import torch

        with torch.device("meta"):
            model = made(config)
        if config.get_text_config() is not config:
            return {"problem": "it is made of several models, and one of text alone is trained here"}
        return {"sizes": _sizes(config, model), "parameters": {name: list(each.shape) for name, each in model.named_parameters()}}
    except Exception as error:  # whatever a version of transformers may raise of a file that it can't make a model of
        return {"problem": " ".join((str(error) or type(error).__name__).split())[:200]}


def _sizes(config: Any, model: Any) -> dict[str, Any]:
    """The keys of our `model` that a config states, or its model shows."""
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    stated = {
        "layers": getattr(config, "num_hidden_layers", None) or 1,
        "hidden": getattr(config, "hidden_size", None) or first.shape[1],
        "heads": getattr(config, "num_attention_heads", None) or 1,
        "vocab": min(first.shape[0], last.shape[0]),
        "context": getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None),
        "dropout": max(_dropouts(config.to_dict()), default=0.0),
    }
    return {key: value for key, value in stated.items() if value is not None}


def config_of(file: Path) -> Any:
    """A config.json as transformers' object of its model_type; raises what transformers does, and ValueError."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    words = json.loads(file.read_text(encoding="utf-8"))
    kind = words["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"model_type={kind} is none that transformers {transformers.__version__} has")
    config = transformers.CONFIG_MAPPING[kind].from_dict(words)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers {transformers.__version__} has no causal language model of model_type={kind}")
    return config


def made(config: Any, **words: Any) -> Any:
    """The causal language model of a config, float32, with transformers' own initial values."""
    import torch

    return import_module("transformers").AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False, **words)


def _dropouts(config: Mapping[str, Any]) -> Iterator[float]:
    """Every probability of a dropout that a config states, but for that of heads which no language model has."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _dropouts(value)
        elif "drop" in str(key) and "classifier" not in str(key) and isinstance(value, int | float):
            yield float(value)


if __name__ == "__main__":
    sys.exit(main())
