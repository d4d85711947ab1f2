"""Small models that only transformers has, and the arguments of runs that train them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STEPS = 6
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
NEOX = {"model_type": "gpt_neox", "intermediate_size": 64, "dtype": "float16", **SIZES}
OPT = {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1, **SIZES}  # its head is its embedding
WORDS = (
    "data=text",
    f"data.path={__file__}",
    "train.batch=8",
    "train.seq=16",
    "log.every=1",
    "train.evaluate.every=0",
    "optim.warmup=1",
    "optim.lr=1e-2",
    f"train.steps={STEPS}",
)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write config.json to a folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(folder: Path, dp: int, zero: int) -> tuple[str, ...]:
    """Return the overrides of a run with a model, data-parallel ranks and a ZeRO stage."""
    return (*WORDS, f"model.hf={folder}", "model.dropout=0", f"cluster.gpus={dp}", f"parallel.zero={zero}", "train.microbatch=2")
