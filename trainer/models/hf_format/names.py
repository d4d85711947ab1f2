"""The tensor of a Hugging Face folder that holds each of our weights, and the model_type whose class computes a model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from ...spec.problem import Problem, Unreadable
from ...spec.run import Model, Run
from ...spec.sections.router import Router
from ..mla.ops import LATENT
from .config_kinds import CONFIG_KINDS


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face file: # in its name is the layer's number, @ the expert's where each expert has a tensor of its own.

    `transposed`: it is [outer, inner]. `beside`: the layers whose weights lie side by side in the tensor, ours among them, as number
    `place`; `by_head`: in the columns of each head, `interleaved`: column by column.
    """

    name: str
    transposed: bool = False
    beside: tuple[str, ...] = ()
    by_head: bool = False
    interleaved: bool = False
    place: int = 0


@dataclass(frozen=True)
class Columns:
    """The columns of one of our weights in a tensor that holds several: `start` to `stop` in each of `runs` runs of `width` columns."""

    start: int
    stop: int
    width: int
    runs: int


QKV = ("attention.query", "attention.key", "attention.value")
LATENT_DOWN = ("attention.key_down", "attention.rope_key")
GATE_UP = ("experts.gate", "experts.up")
LATENT_UP = ("attention.key", "attention.value")
# fmt: off
GPT2_TENSORS = {
    "embedding":       HfTensor("transformer.wte"),
    "positions":       HfTensor("transformer.wpe"),
    "norm1":           HfTensor("transformer.h.#.ln_1"),
    "attention.query": HfTensor("transformer.h.#.attn.c_attn", beside=QKV),
    "attention.key":   HfTensor("transformer.h.#.attn.c_attn", beside=QKV),
    "attention.value": HfTensor("transformer.h.#.attn.c_attn", beside=QKV),
    "attention.out":   HfTensor("transformer.h.#.attn.c_proj"),
    "norm2":           HfTensor("transformer.h.#.ln_2"),
    "mlp.up":          HfTensor("transformer.h.#.mlp.c_fc"),
    "mlp.down":        HfTensor("transformer.h.#.mlp.c_proj"),
    "norm":            HfTensor("transformer.ln_f"),
    "head":            HfTensor("lm_head", transposed=True),
}
LLAMA_TENSORS = {
    "embedding":       HfTensor("model.embed_tokens"),
    "norm1":           HfTensor("model.layers.#.input_layernorm"),
    "attention.query": HfTensor("model.layers.#.self_attn.q_proj", transposed=True),
    "attention.key":   HfTensor("model.layers.#.self_attn.k_proj", transposed=True),
    "attention.value": HfTensor("model.layers.#.self_attn.v_proj", transposed=True),
    "attention.out":   HfTensor("model.layers.#.self_attn.o_proj", transposed=True),
    "norm2":           HfTensor("model.layers.#.post_attention_layernorm"),
    "mlp.gate":        HfTensor("model.layers.#.mlp.gate_proj",    transposed=True),
    "mlp.up":          HfTensor("model.layers.#.mlp.up_proj",      transposed=True),
    "mlp.down":        HfTensor("model.layers.#.mlp.down_proj",    transposed=True),
    "norm":            HfTensor("model.norm"),
    "head":            HfTensor("lm_head",                         transposed=True),
}
QWEN3_TENSORS = LLAMA_TENSORS | {
    "attention.query_norm": HfTensor("model.layers.#.self_attn.q_norm"),
    "attention.key_norm":   HfTensor("model.layers.#.self_attn.k_norm"),
}
OLMO2_TENSORS = {name: tensor for name, tensor in QWEN3_TENSORS.items() if name not in ("norm1", "norm2")} | {
    "post_norm1":           HfTensor("model.layers.#.post_attention_layernorm"),
    "post_norm2":           HfTensor("model.layers.#.post_feedforward_layernorm"),
}
GEMMA3_TENSORS = QWEN3_TENSORS | OLMO2_TENSORS | {
    "norm2":                HfTensor("model.layers.#.pre_feedforward_layernorm"),
}
MIXTRAL_TENSORS = {name: tensor for name, tensor in LLAMA_TENSORS.items() if not name.startswith("mlp.")} | {
    "router":          HfTensor("model.layers.#.block_sparse_moe.gate",         transposed=True),
    "experts.gate":    HfTensor("model.layers.#.block_sparse_moe.experts.@.w1", transposed=True),
    "experts.up":      HfTensor("model.layers.#.block_sparse_moe.experts.@.w3", transposed=True),
    "experts.down":    HfTensor("model.layers.#.block_sparse_moe.experts.@.w2", transposed=True),
}
QWEN3_MOE_TENSORS = QWEN3_TENSORS | {
    "router":          HfTensor("model.layers.#.mlp.gate",                transposed=True),
    "experts.gate":    HfTensor("model.layers.#.mlp.experts.@.gate_proj", transposed=True),
    "experts.up":      HfTensor("model.layers.#.mlp.experts.@.up_proj",   transposed=True),
    "experts.down":    HfTensor("model.layers.#.mlp.experts.@.down_proj", transposed=True),
}
DEEPSEEK_TENSORS = {
    **{name: tensor for name, tensor in (LLAMA_TENSORS | QWEN3_MOE_TENSORS).items() if not name.startswith("attention.")},
    "attention.query":             HfTensor("model.layers.#.self_attn.q_proj",             transposed=True),
    "attention.key_down":          HfTensor("model.layers.#.self_attn.kv_a_proj_with_mqa", transposed=True, beside=LATENT_DOWN),
    "attention.rope_key":          HfTensor("model.layers.#.self_attn.kv_a_proj_with_mqa", transposed=True, beside=LATENT_DOWN),
    "attention.key_latent_norm":   HfTensor("model.layers.#.self_attn.kv_a_layernorm"),
    "attention.key":               HfTensor("model.layers.#.self_attn.kv_b_proj",          transposed=True, beside=LATENT_UP, by_head=True),
    "attention.value":             HfTensor("model.layers.#.self_attn.kv_b_proj",          transposed=True, beside=LATENT_UP, by_head=True),
    "attention.out":               HfTensor("model.layers.#.self_attn.o_proj",             transposed=True),
    "router.bias":                 HfTensor("model.layers.#.mlp.gate.e_score_correction_bias"),
    "shared.gate":                 HfTensor("model.layers.#.mlp.shared_experts.gate_proj", transposed=True),
    "shared.up":                   HfTensor("model.layers.#.mlp.shared_experts.up_proj",   transposed=True),
    "shared.down":                 HfTensor("model.layers.#.mlp.shared_experts.down_proj", transposed=True),
}
GLM4_MOE_TENSORS = QWEN3_TENSORS | {name: tensor for name, tensor in DEEPSEEK_TENSORS.items() if not name.startswith("attention.")}
GPT_OSS_TENSORS = {name: tensor for name, tensor in LLAMA_TENSORS.items() if not name.startswith("mlp.")} | {
    "attention.sinks":     HfTensor("model.layers.#.self_attn.sinks"),
    "router":              HfTensor("model.layers.#.mlp.router", transposed=True),
    "router.logit_bias":   HfTensor("model.layers.#.mlp.router.bias"),
    "experts.gate.weight": HfTensor("model.layers.#.mlp.experts.gate_up_proj", beside=GATE_UP, interleaved=True),
    "experts.up.weight":   HfTensor("model.layers.#.mlp.experts.gate_up_proj", beside=GATE_UP, interleaved=True),
    "experts.gate.bias":   HfTensor("model.layers.#.mlp.experts.gate_up_proj_bias", beside=GATE_UP, interleaved=True),
    "experts.up.bias":     HfTensor("model.layers.#.mlp.experts.gate_up_proj_bias", beside=GATE_UP, interleaved=True),
    "experts.down.weight": HfTensor("model.layers.#.mlp.experts.down_proj"),
    "experts.down.bias":   HfTensor("model.layers.#.mlp.experts.down_proj_bias"),
}
QUERY_LATENT_TENSORS = {
    "attention.query_down":        HfTensor("model.layers.#.self_attn.q_a_proj",           transposed=True),
    "attention.query_latent_norm": HfTensor("model.layers.#.self_attn.q_a_layernorm"),
    "attention.query":             HfTensor("model.layers.#.self_attn.q_b_proj",           transposed=True),
}
MODULE_TENSORS = {
    "embedding_norm":              HfTensor("model.layers.#.enorm"),
    "hidden_norm":                 HfTensor("model.layers.#.hnorm"),
    "join":                        HfTensor("model.layers.#.eh_proj",                      transposed=True),
    "norm":                        HfTensor("model.layers.#.shared_head.norm"),
}
# fmt: on
HAVE_MODULES = ("deepseek_v3", "glm4_moe")  # whose files hold modules that predict further tokens, as layers behind the model's
HF_TENSORS = {
    "gpt2": GPT2_TENSORS,
    "llama": LLAMA_TENSORS,
    "mistral": LLAMA_TENSORS,
    "ministral": LLAMA_TENSORS,
    "mixtral": MIXTRAL_TENSORS,
    "qwen2": LLAMA_TENSORS,
    "qwen3": QWEN3_TENSORS,
    "olmo2": OLMO2_TENSORS,
    "olmo3": OLMO2_TENSORS,
    "gemma3_text": GEMMA3_TENSORS,
    "qwen3_moe": QWEN3_MOE_TENSORS,
    "glm4_moe": GLM4_MOE_TENSORS,
    "gpt_oss": GPT_OSS_TENSORS,
    "deepseek_v2": DEEPSEEK_TENSORS,
    "deepseek_v3": DEEPSEEK_TENSORS,
}  # keyed by the model_type that is written; Mistral without a window is written as Llama


def tensors_of(run: Run) -> Mapping[str, HfTensor]:
    """Return the tensor of each layer of a run's model by the layer's name; raises Unreadable where transformers has no such model."""
    model_type = hf_model_type(run)
    tensors = HF_TENSORS[model_type]
    tensors = tensors | QUERY_LATENT_TENSORS if run.model.q_lora_rank and run.model.family == "mla" else tensors
    modules = run.model.mtp.layers if model_type in HAVE_MODULES else 0
    return tensors | {
        name: tensor for index in range(modules) for name, tensor in _module_tensors(tensors, index, run.model.layers + index)
    }


def _module_tensors(tensors: Mapping[str, HfTensor], index: int, layer: int) -> Iterator[tuple[str, HfTensor]]:
    """Yield the tensors of a module that predicts a further token, whose folder has it as layer number `layer`."""
    for name, tensor in MODULE_TENSORS.items():
        yield f"mtp.{index}.{name}", replace(tensor, name=tensor.name.replace("#", str(layer)))
    for name, tensor in tensors.items():
        if "#" in tensor.name:
            beside = tuple(f"mtp.{index}.layer.{each}" for each in tensor.beside)
            yield f"mtp.{index}.layer.{name}", replace(tensor, name=tensor.name.replace("#", str(layer)), beside=beside)


def has_module_tensors(run: Run) -> bool:
    """Whether Hugging Face's files of a run's model hold the modules that predict further tokens."""
    return run.model.mtp.layers > 0 and hf_model_type(run) in HAVE_MODULES


def copies_in_modules(weight: str, run: Run) -> list[str]:
    """Return the names of the copies of one of our weights that each module has in a folder: of the embedding, and of the head."""
    layers = [f"model.layers.{run.model.layers + index}" for index in range(run.model.mtp.layers)] if has_module_tensors(run) else []
    of_embedding = [f"{each}.embed_tokens.weight" for each in layers] if weight == "embedding.weight" else []
    is_head = weight == ("embedding.weight" if run.model.tied else "head.weight")
    return of_embedding + [f"{each}.shared_head.head.weight" for each in layers if is_head]


def hf_tensor(weight: str, tensors: Mapping[str, HfTensor]) -> HfTensor:
    """Return the tensor of one of our weights: layers.3.mlp.up.bias is transformer.h.3.mlp.c_fc.bias. A row of a weight's whole name, with
    its kind, names the tensor whole."""
    layer, _, kind = weight.rpartition(".")
    index = ""
    if layer.startswith("layers."):
        _, index, layer = layer.split(".", 2)
    if (whole := tensors.get(f"{layer}.{kind}")) is not None:
        place = whole.beside.index(layer) if whole.beside else 0
        return replace(whole, name=whole.name.replace("#", index), place=place)
    tensor = tensors[layer]
    name = f"{tensor.name.replace('#', index)}.{kind}"
    place = tensor.beside.index(layer) if tensor.beside else 0
    return replace(tensor, name=name, transposed=tensor.transposed and kind == "weight", place=place)


def columns_in_tensor(weight: str, tensor: HfTensor, shapes: Mapping[str, tuple[int, ...]], heads: int) -> Columns | None:
    """Return the columns of a weight in the tensor that holds it, from the shapes of our weights; None where it is the whole tensor."""
    if not tensor.beside:
        return None
    layer = tensor.beside[tensor.place]
    runs = shapes[weight][-1] if tensor.interleaved else heads if tensor.by_head else 1
    before, after = weight.split(layer)
    widths = [shapes[f"{before}{each}{after}"][-1] // runs for each in tensor.beside]
    start = sum(widths[: tensor.place])
    return Columns(start, start + widths[tensor.place], sum(widths), runs)


def find_hf_tensor(weight: str, tensors: Mapping[str, HfTensor], names: Container[str]) -> HfTensor:
    """Return the tensor of a weight in files that hold these names: GPT-2 on the hub leaves out the "transformer." prefix."""
    tensor = hf_tensor(weight, tensors)
    bare = tensor.name.partition(".")[2]
    return replace(tensor, name=bare) if tensor.name not in names and bare in names else tensor


def expert_tensors(tensor: HfTensor, shape: tuple[int, ...]) -> Iterator[tuple[HfTensor, tuple[int, ...]]]:
    """Yield the tensors, with their shapes, that make up one of our weights of this shape: one, or one per expert."""
    if "@" not in tensor.name:
        yield tensor, shape
        return
    for expert in range(shape[0]):
        yield replace(tensor, name=tensor.name.replace("@", str(expert))), shape[1:]


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
        **{f"router.{row.name}": getattr(model.router, row.name) for row in fields(model.router) if row.name != "bias_rate"},
    }
    window = model.effective_window(run.train.seq)
    positions |= {"window": window, "layer_types": model.types_of_layers if window or local else None}
    latent = {key: getattr(model, key) for key in LATENT} if model.family == "mla" else {}
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
    keys = architecture_keys(run.model, run)
    plain_heads = keys["kv_heads"] == keys["heads"] and run.model.heads * int(str(keys["head_dim"])) == run.model.hidden
    same_bias = keys["bias"] == keys["qkv_bias"]
    form = (keys["norm"], keys["positions"])
    if keys["act"] == "swiglu_clamped" or keys["sinks"] or keys["expert_bias"]:
        model_type = _sink_model_type(run.model) if form == ("rmsnorm", "rope") and same_bias else ""
    elif keys["scale_embedding"] or keys["query_pre_attn_scalar"] != keys["head_dim"]:
        model_type = _gemma_model_type(run.model) if form == ("rmsnorm1p", "rope") and same_bias else ""
    elif run.model.family == "mla":
        model_type = _latent_model_type(run.model) if form == ("rmsnorm", "rope") and keys["act"] == "swiglu" else ""
    elif form == ("layernorm", "learned") and plain_heads and same_bias and keys["act"] in CONFIG_KINDS["gpt2"].acts.values():
        model_type = "" if run.model.windowed_layers or run.model.qk_norm or run.model.norm_place != "before" else "gpt2"
    elif form == ("rmsnorm", "rope") and keys["act"] == "swiglu":
        model_type = _rotary_model_type(run.model, bias=bool(keys["bias"]), qkv_bias=bool(keys["qkv_bias"]))
    else:
        model_type = ""
    if model_type:
        return model_type
    says = "none of Hugging Face's GPT-2, Llama, Mistral, Qwen, OLMo, Gemma 3, Mixtral, GLM-4.5, DeepSeek and gpt-oss computes this model"
    fix = (
        "GPT-2 has layernorm, learned positions, plain heads and no window; the others rmsnorm, rope and swiglu; "
        "Mixtral and Qwen3-MoE have no shared experts and plain softmax scores, and none has both biases and a window; GLM-4.5 and "
        "DeepSeek have shared experts and sigmoid scores with a bias, DeepSeek-V2 softmax scores that are not normalized; GLM-4.5 "
        "alone rotates a part of each head; OLMo alone norms all heads together; Gemma 3 and OLMo 3 alone have a base of rope in "
        "layers with a window; gpt-oss alone has sinks and biases of experts"
    )
    raise Unreadable([Problem(rule="weights", says=says, mend=fix)])


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
    return "gpt_oss" if own and plain and not others and replace(model.router, bias_rate=0.0) == Router() else ""


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
    if qkv_bias or model.shared_experts or model.rope_share != 1 or replace(router, bias_rate=0.0) != form:
        return ""
    return "qwen3_moe" if model.qk_norm else "" if model.dense_layers else "mixtral"
