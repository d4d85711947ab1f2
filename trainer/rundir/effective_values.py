"""Every key of a run with its value, with the defaults that follow from other keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, assert_never

from ..spec.run import Model, Run
from ..spec.sections.optimizer import Optim


def effective_values(run: Run) -> dict[str, Any]:
    """Return every key of a run with its value; None for a key that this model does not read."""
    flat = dict(flatten(run, ""))
    return flat | {f"model.{key}": value for key, value in effective_model_values(run.model, run.train.seq).items()}


def effective_model_values(model: Model, seq: int) -> dict[str, Any]:
    """Return the keys of a model whose default follows from other keys; None for one that this model does not read."""
    ffn, mixture = model.ffn or 4 * model.hidden, bool(model.experts)
    window = model.effective_window(seq)
    rope = model.rope.values if model.positions == "rope" else {}
    return {
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_dim or model.hidden // model.heads,
        "ffn": (model.expert_ffn or ffn) if mixture and not model.dense_layers else ffn,
        "expert_ffn": (model.expert_ffn or ffn) if mixture else None,
        "qkv_bias": model.bias if model.qkv_bias is None else model.qkv_bias,
        "context": (model.context or seq) if model.positions == "learned" else None,
        "qk_norm_over": model.qk_norm_over if model.qk_norm else None,
        "rope_base": model.rope_base if model.positions == "rope" else None,
        "rope_share": model.rope_share if model.positions == "rope" and model.family != "mla" else None,
        "window": window,
        "rope_local_base": model.rope_local_base if model.has_local_rope else None,
        "query_pre_attn_scalar": model.score_scalar if model.family != "mla" else None,
        "layer_types": model.types_of_layers if window or model.has_local_rope else None,
        "lora.alpha": model.lora.alpha if model.lora.rank else None,
        "lora.dropout": model.lora.dropout if model.lora.rank else None,
        "lora.targets": sorted(model.lora_layers) if model.lora.rank else None,
        "mtp.weight": model.mtp.weight if model.mtp.layers else None,
        **{f"rope.{row.name}": rope.get(row.name) for row in fields(model.rope)},
        **({} if mixture else dict.fromkeys(("expert_bias", "experts", "top_k", "shared_experts", "aux_loss", "capacity"))),
        **{f"router.{row.name}": getattr(model.router, row.name) if mixture else None for row in fields(model.router)},
    }


def moment_kinds(optim: Optim) -> tuple[str, ...]:
    """Return the kinds of an optimizer's moments, as checkpoints name them."""
    match optim.name:
        case "adamw":
            return ("exp_avg", "exp_avg_sq")
        case "sgd":
            return ("momentum_buffer",) if optim.momentum else ()
        case "muon":
            return ("momentum_buffer", "exp_avg", "exp_avg_sq")
        case _:
            assert_never(optim.name)


def flatten(part: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section and of those in it with their values; `at` stands before their names."""
    for row in fields(part):
        value = getattr(part, row.name)
        if is_dataclass(value):
            yield from flatten(value, f"{at}{row.name}.")
        else:
            yield f"{at}{row.name}", value
