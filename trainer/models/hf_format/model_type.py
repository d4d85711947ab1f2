"""The model_type of transformers whose class computes a model, and the keys of config.json that name it."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations

from ...spec.problem import Problem, Unreadable
from ...spec.read import value_text
from ...spec.run import Model, Run
from ...spec.sections.router import Router
from ..families import family_of
from ..hybrid.ops import LINEAR
from ..mla.ops import LATENT
from .config_kinds import CONFIG_KINDS

NO_CLASS = (
    "none of Hugging Face's GPT-2, Llama, Mistral, Qwen, OLMo, Gemma 3, Mixtral, GLM-4.5, DeepSeek, gpt-oss and Qwen3-Next "
    "computes this model"
)
WHAT_CLASSES_HAVE = (
    "GPT-2 has layernorm, learned positions, plain heads and no window; the others rmsnorm, rope and swiglu; "
    "Mixtral and Qwen3-MoE have no shared experts and plain softmax scores, and none has both biases and a window; GLM-4.5 and "
    "DeepSeek have shared experts and sigmoid scores with a bias, DeepSeek-V2 softmax scores that are not normalized; GLM-4.5 "
    "alone rotates a part of each head; OLMo alone norms all heads together; Gemma 3 and OLMo 3 alone have a base of rope in "
    "layers with a window; gpt-oss alone has sinks and biases of experts; Qwen3-Next has norms of 1 + weight before "
    "each half, norms of queries and keys, plain softmax scores and no capacity"
)
NEAR_VALUES: tuple[tuple[str, object], ...] = (
    ("act", "swiglu"), ("act", "gelu_tanh"), ("norm", "rmsnorm"), ("norm", "layernorm"), ("positions", "rope"), ("positions", "learned"),
    ("norm_place", "before"), ("qk_norm", False), ("qk_norm", True), ("bias", False), ("qkv_bias", None), ("window", None),
    ("kv_heads", None), ("rope_share", 1.0), ("rope_local_base", None), ("scale_embedding", False), ("query_pre_attn_scalar", None),
    ("sinks", False), ("expert_bias", False), ("shared_experts", 0), ("dense_layers", 0), ("capacity", None),
)  # fmt: skip


def architecture_keys(model: Model, run: Run) -> dict[str, object]:
    """Return the keys that decide a model's logits, with every default filled in."""
    share = {} if model.family == "mla" else {"rope_share": model.rope_share}
    local = model.rope_local_base if model.has_local_rope else None
    rotary: dict[str, object] = {"rope_base": model.rope_base, "rope_local_base": local, **share, "rope": model.rope.values}
    positions: dict[str, object] = rotary if model.positions == "rope" else {"context": model.context or run.train.seq}
    ffn, head_dim = model.ffn or 4 * model.hidden, model.head_dim or model.hidden // model.heads
    mixture = {
        "experts": model.experts,
        "top_k": model.top_k,
        "expert_ffn": model.expert_ffn or ffn,
        "shared_experts": model.shared_experts,
        "capacity": model.capacity,
        "dense_layers": model.dense_layers,
        **{
            f"router.{row.name}": getattr(model.router, row.name) for row in fields(model.router) if row.name not in ("bias_rate", "z_loss")
        },
    }
    window = model.effective_window(run.train.seq)
    positions |= {"window": window, "layer_types": model.types_of_layers if window or local else None}
    latent = {key: getattr(model, key) for key in LATENT} if model.family == "mla" else {}
    latent |= {key: getattr(model, key) for key in LINEAR} if model.family == "hybrid" else {}
    return (
        latent
        | (positions | mixture if model.experts else positions)
        | {
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv_heads": model.kv_heads or model.heads,
            "head_dim": head_dim,
            "ffn": mixture["expert_ffn"] if model.experts and not model.dense_layers else ffn,
            "vocab": model.vocab,
            "tied": model.tied,
            "bias": model.bias,
            "qkv_bias": model.bias if model.qkv_bias is None else model.qkv_bias,
            "expert_bias": model.expert_bias,
            "sinks": model.sinks,
            "qk_norm": model.qk_norm,
            "qk_norm_over": model.qk_norm_over if model.qk_norm else None,
            "norm": model.norm,
            "norm_place": model.norm_place,
            "norm_eps": model.norm_eps,
            "act": model.act,
            "scale_embedding": model.scale_embedding,
            "query_pre_attn_scalar": model.score_scalar,
            "positions": model.positions,
        }
    )


def hf_model_type(run: Run) -> str:
    """Return the model_type, of those with known tensors, whose class computes the run's model; raises Unreadable where there is none."""
    model_type = _model_type(run)
    if not model_type:
        raise Unreadable([Problem(rule="weights", says=NO_CLASS, mend=nearest_classes(run) or WHAT_CLASSES_HAVE)])
    return model_type


def has_no_class(run: Run) -> bool:
    """Whether no model_type computes the model of a run, of a family of which there are some, so that `export` would refuse it."""
    return bool(family_of(run.model).model_types) and not _model_type(run)


def nearest_classes(run: Run) -> str:
    """Return the single keys that, with the value shown, would make the model that of a model_type, which is named too; where none would,
    the first two keys that do together; "" where no two do."""
    changes = [(key, value) for key, value in NEAR_VALUES if getattr(run.model, key) != value]
    single: dict[str, str] = {}
    for change in changes:
        if change[0] not in single and (found := _with_keys(run, change)):
            single[change[0]] = found
    if single:
        return f"one would with {' or '.join(single.values())}"
    pairs = (pair for pair in combinations(changes, 2) if pair[0][0] != pair[1][0])
    return next((f"one would with {found}" for pair in pairs if (found := _with_keys(run, *pair))), "")


def _with_keys(run: Run, *changes: tuple[str, object]) -> str:
    """Return the overrides that change keys of the model, and the model_type of which it is then; "" where it is of none."""
    keys = dict(changes)
    if "window" in keys and run.model.layer_types:  # which name layers that have it
        keys["layer_types"] = None
    model_type = _model_type(replace(run, model=replace(run.model, **keys)))  # type: ignore[arg-type]
    words = " ".join(f"model.{key}={value_text(value)}" for key, value in keys.items())
    return f"{words} ({model_type})" if model_type else ""


def _model_type(run: Run) -> str:
    """Return the model_type, of those with known tensors, whose class computes the run's model; "" where there is none."""
    keys = architecture_keys(run.model, run)
    plain_heads = keys["kv_heads"] == keys["heads"] and run.model.heads * int(str(keys["head_dim"])) == run.model.hidden
    same_bias = keys["bias"] == keys["qkv_bias"]
    form = (keys["norm"], keys["positions"])
    if run.model.family == "hybrid":
        return _hybrid_model_type(run.model) if form == ("rmsnorm1p", "rope") and keys["act"] == "swiglu" else ""
    if keys["act"] == "swiglu_clamped" or keys["sinks"] or keys["expert_bias"]:
        return _sink_model_type(run.model) if form == ("rmsnorm", "rope") and same_bias else ""
    if keys["scale_embedding"] or keys["query_pre_attn_scalar"] != keys["head_dim"]:
        return _gemma_model_type(run.model) if form == ("rmsnorm1p", "rope") and same_bias else ""
    if run.model.family == "mla":
        return _latent_model_type(run.model) if form == ("rmsnorm", "rope") and keys["act"] == "swiglu" else ""
    if form == ("layernorm", "learned") and plain_heads and same_bias and keys["act"] in CONFIG_KINDS["gpt2"].acts.values():
        has_more = run.model.windowed_layers or run.model.qk_norm or run.model.norm_place != "before" or run.model.experts
        return "" if has_more else "gpt2"
    if form == ("rmsnorm", "rope") and keys["act"] == "swiglu":
        return _rotary_model_type(run.model, bias=bool(keys["bias"]), qkv_bias=bool(keys["qkv_bias"]))
    return ""


def _hybrid_model_type(model: Model) -> str:
    """Return the model_type of a hybrid with RMSNorm of a scale of 1 + weight, rope and swiglu; "" where there is none."""
    norms = model.norm_place == "before" and model.qk_norm and model.qk_norm_over == "head"
    router = replace(model.router.form, normalize=True)
    return "qwen3_next" if norms and router == Router() and not model.capacity else ""


def _gemma_model_type(model: Model) -> str:
    """Return the model_type of a model with RMSNorm of a scale of 1 + weight and rope; "" where there is none."""
    norms = model.norm_place == "both" and model.qk_norm and model.qk_norm_over == "head"
    others = model.bias or model.experts or model.rope_share != 1 or not _has_ropes_by_type(model) or not model.scale_embedding
    return "gemma3_text" if norms and not others and model.act == "geglu_tanh" else ""


def _sink_model_type(model: Model) -> str:
    """Return the model_type of a model with sinks, biases of experts or their clamped gate; "" where there is none."""
    own = model.sinks and model.expert_bias and model.act == "swiglu_clamped" and model.windowed_layers > 0 and not model.has_local_rope
    others = model.shared_experts or model.dense_layers or model.capacity or model.rope_share != 1 or model.scale_embedding
    plain = model.norm_place == "before" and not model.qk_norm and model.score_scalar == (model.head_dim or model.hidden // model.heads)
    return "gpt_oss" if own and plain and not others and model.router.form == Router() else ""


def _has_ropes_by_type(model: Model) -> bool:
    """Whether a file that states a rotary embedding for each type of layers, that of a window unscaled, states the model's."""
    return model.windowed_layers > 0 and (model.has_local_rope or model.rope.type == "default")


def _latent_model_type(model: Model) -> str:
    """Return the model_type of a model with latent attention, RMSNorm, rope and swiglu; "" where there is none."""
    if model.windowed_layers or model.capacity or not model.shared_experts or model.norm_place != "before":
        return ""
    router = model.router
    if router.score == "sigmoid":
        return "deepseek_v3" if router.bias else ""
    return "" if router.normalize or router.bias else "deepseek_v2"


def _rotary_model_type(model: Model, *, bias: bool, qkv_bias: bool) -> str:
    """Return the model_type of a model with RMSNorm, rope and swiglu; "" where there is none."""
    some_windowed, all_windowed = model.windowed_layers > 0, model.windowed_layers == model.layers
    norms = (model.norm_place, model.qk_norm_over if model.qk_norm else "")
    if norms == ("after", "all"):
        if model.experts or bias or qkv_bias or model.rope_share != 1:
            return ""
        return "olmo2" if not some_windowed else "olmo3" if _has_ropes_by_type(model) else ""
    if norms not in (("before", ""), ("before", "head")) or model.has_local_rope:
        return ""
    if model.experts:
        return "" if bias or model.capacity or some_windowed != all_windowed else _mixture_model_type(model, qkv_bias=qkv_bias)
    if model.rope_share != 1:
        return ""
    if model.qk_norm:
        return "" if bias or qkv_bias else "qwen3"
    if bias:
        return "llama" if qkv_bias and not some_windowed else ""
    if qkv_bias:
        return "qwen2"
    return "mistral" if all_windowed else "ministral" if some_windowed else "llama"


def _mixture_model_type(model: Model, *, qkv_bias: bool) -> str:
    """Return the model_type of a mixture with RMSNorm, rope, swiglu, no other biases and no capacity; "" where there is none."""
    router = model.router
    if router.score == "sigmoid":
        return "glm4_moe" if router.bias and model.shared_experts and not model.windowed_layers else ""
    form = Router(normalize=router.normalize or not model.qk_norm)  # Mixtral always normalizes
    if qkv_bias or model.shared_experts or model.rope_share != 1 or router.form != form:
        return ""
    return "qwen3_moe" if model.qk_norm else "" if model.dense_layers else "mixtral"
