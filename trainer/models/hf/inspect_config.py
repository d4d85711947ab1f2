"""What transformers makes of a config.json, as JSON on stdout: python -m distrain.trainer.models.hf.inspect_config CONFIG.

The model is made on the meta device: its parameters have names and shapes, but no memory. No code that a config names is run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from .ops import is_of_experts
from .quantization import KEY as QUANTIZATION_KEY
from .quantization import quantization_problems

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "moe_topk", "moe_top_k", "top_k_experts")


def main() -> int:
    """Print {"sizes": ..., "parameters": {name: shape}}, or {"problem": why there is no model}; everything else goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    answer = inspect_config(Path(sys.argv[1]))
    os.write(out, f"{json.dumps(answer)}\n".encode())
    return 0


def inspect_config(file: Path) -> dict[str, Any]:
    """Return the sizes and parameter shapes of a config.json's model, without its memory."""
    try:
        config = load_config(file)
        import torch

        with torch.device("meta"):
            model = make_model(config)
        if config.get_text_config() is not config:
            return {"problem": "it is made of several models, and one of text alone is trained here"}
        return {"sizes": _sizes(config, model), "parameters": {name: list(each.shape) for name, each in model.named_parameters()}}
    except Exception as error:  # versions of transformers raise different errors for a file that they can't make a model of
        return {"problem": " ".join((str(error) or type(error).__name__).split())[:200]}


def _sizes(config: Any, model: Any) -> dict[str, Any]:
    """Return the keys of our `model` that the config states, or that the model shows."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    sizes = {
        "layers": getattr(config, "num_hidden_layers", None) or 1,
        "hidden": getattr(config, "hidden_size", None) or embedding.shape[1],
        "heads": getattr(config, "num_attention_heads", None) or 1,
        "vocab": min(embedding.shape[0], head.shape[0]),
        "context": getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None),
        "dropout": max(_dropout_probabilities(config.to_dict()), default=0.0),
    }
    return {key: value for key, value in sizes.items() if value is not None} | _experts(config, model)


def _experts(config: Any, model: Any) -> dict[str, int]:
    """Return the experts of a layer and those that each token is sent to, where the weights of a layer's experts lie in one tensor."""
    counts = {each.shape[0] for name, each in model.named_parameters() if is_of_experts(name, tuple(each.shape))}
    chosen = next((value for key in TOP_K if isinstance(value := getattr(config, key, None), int)), 0)
    return {"experts": counts.pop(), "top_k": chosen} if len(counts) == 1 and 1 <= chosen <= min(counts) else {}


def load_config(file: Path) -> Any:
    """Return a config.json as transformers' object of its model_type, without what it says of quantized weights; raises what transformers
    raises, and ValueError, also where such weights are not read here."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    keys = json.loads(file.read_text(encoding="utf-8"))
    for says, fix in quantization_problems(keys):
        raise ValueError(f"{says}: {fix}")
    keys.pop(QUANTIZATION_KEY, None)
    model_type = keys["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers {transformers.__version__} has no model_type={model_type}")
    config = transformers.CONFIG_MAPPING[model_type].from_dict(keys)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers {transformers.__version__} has no causal language model of model_type={model_type}")
    return config


def make_model(config: Any, **options: Any) -> Any:
    """Make the causal language model of a config, float32, with transformers' own initial values."""
    import torch

    return import_module("transformers").AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False, **options)


def _dropout_probabilities(config: Mapping[str, Any]) -> Iterator[float]:
    """Yield every dropout probability that a config states, except those of classifier heads, which no language model has."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _dropout_probabilities(value)
        elif "drop" in str(key) and "classifier" not in str(key) and isinstance(value, int | float):
            yield float(value)


if __name__ == "__main__":
    sys.exit(main())
