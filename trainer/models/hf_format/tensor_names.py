"""The tensor of a Hugging Face folder that holds each of our weights."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

from ...spec.run import Run
from .model_type import hf_model_type


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face file: # in its name is the layer's number, @ the expert's where each expert has a tensor of its own.

    `transposed`: it is [outer, inner], of a `depthwise` convolution [outer, 1, inner]. `beside`: the layers whose weights lie side by side
    in the tensor, ours among them, as number `place`; `by_head`: in the columns of each head, of `heads` where these are not the model's,
    `interleaved`: column by column. Where our weights name a group of `every` layers, the layer is number `first` of it.
    """

    name: str
    transposed: bool = False
    beside: tuple[str, ...] = ()
    by_head: bool = False
    heads: int = 0
    interleaved: bool = False
    depthwise: bool = False
    place: int = 0
    every: int = 1
    first: int = 0

    def numbered(self, index: str) -> str:
        """Return the name with the layer's number, for the number of a layer or group as our weights have it; "" for no layer's."""
        return self.name.replace("#", str(int(index) * self.every + self.first)) if index else self.name


@dataclass(frozen=True)
class Columns:
    """The columns of one of our weights in a tensor that holds several: `start` to `stop` in each of `runs` runs of `width` columns."""

    start: int
    stop: int
    width: int
    runs: int


QKV = ("attention.query", "attention.key", "attention.value")
QUERY_GATE = ("attention.query", "attention.gate")
QKVZ = (*QKV, "attention.gate")
BETA_DECAY = ("attention.beta", "attention.decay")
CONVS = tuple(f"{each}_conv" for each in QKV)
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
QWEN3_NEXT_TENSORS = {  # of a layer with full attention
    **{name: tensor for name, tensor in QWEN3_MOE_TENSORS.items() if not name.startswith("mlp.")},
    "attention.query":  HfTensor("model.layers.#.self_attn.q_proj", transposed=True, beside=QUERY_GATE, by_head=True),
    "attention.gate":   HfTensor("model.layers.#.self_attn.q_proj", transposed=True, beside=QUERY_GATE, by_head=True),
    "shared.gate":      HfTensor("model.layers.#.mlp.shared_expert.gate_proj", transposed=True),
    "shared.up":        HfTensor("model.layers.#.mlp.shared_expert.up_proj",   transposed=True),
    "shared.down":      HfTensor("model.layers.#.mlp.shared_expert.down_proj", transposed=True),
    "shared_gate":      HfTensor("model.layers.#.mlp.shared_expert_gate",      transposed=True),
}
LINEAR_TENSORS = {  # of a layer with linear attention, in place of all that is attention's
    **{f"attention.{name}": HfTensor("model.layers.#.linear_attn.in_proj_qkvz", transposed=True, beside=QKVZ, by_head=True)
       for name in ("query", "key", "value", "gate")},
    **{f"attention.{name}": HfTensor("model.layers.#.linear_attn.in_proj_ba", transposed=True, beside=BETA_DECAY, by_head=True)
       for name in ("beta", "decay")},
    **{f"attention.{name}_conv": HfTensor("model.layers.#.linear_attn.conv1d", transposed=True, beside=CONVS, depthwise=True)
       for name in ("query", "key", "value")},
    "attention.a_log":      HfTensor("model.layers.#.linear_attn.A_log"),
    "attention.dt_bias":    HfTensor("model.layers.#.linear_attn.dt_bias"),
    "attention.gated_norm": HfTensor("model.layers.#.linear_attn.norm"),
    "attention.out":        HfTensor("model.layers.#.linear_attn.out_proj", transposed=True),
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
    "qwen3_next": QWEN3_NEXT_TENSORS,
}  # keyed by the model_type that is written; Mistral without a window is written as Llama


def tensors_of(run: Run) -> Mapping[str, HfTensor]:
    """Return the tensor of each layer of a run's model by the layer's name; raises Unreadable where transformers has no such model."""
    model_type = hf_model_type(run)
    tensors = HF_TENSORS[model_type]
    tensors = tensors | QUERY_LATENT_TENSORS if run.model.q_lora_rank and run.model.family == "mla" else tensors
    if model_type == "qwen3_next":
        tensors = dict(_tensors_of_group(tensors, run))
    modules = run.model.mtp.layers if model_type in HAVE_MODULES else 0
    return tensors | {
        name: tensor for index in range(modules) for name, tensor in _module_tensors(tensors, index, run.model.layers + index)
    }


def _tensors_of_group(tensors: Mapping[str, HfTensor], run: Run) -> Iterator[tuple[str, HfTensor]]:
    """Yield the tensors of each layer of a group, and those of no layer."""
    many, key_heads = run.model.layers_in_group, run.model.linear_num_key_heads or 0
    yield from ((name, tensor) for name, tensor in tensors.items() if "#" not in tensor.name)
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("attention.")}
    linear = others | {name: replace(tensor, heads=key_heads) for name, tensor in LINEAR_TENSORS.items()}
    for at in range(many):
        for name, tensor in (tensors if at == many - 1 else linear).items():
            if "#" in tensor.name:
                beside = tuple(f"{at}.{each}" for each in tensor.beside)
                yield f"{at}.{name}", replace(tensor, beside=beside, every=many, first=at)


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
        return replace(whole, name=whole.numbered(index), place=place)
    tensor = tensors[layer]
    name = f"{tensor.numbered(index)}.{kind}"
    place = tensor.beside.index(layer) if tensor.beside else 0
    return replace(tensor, name=name, transposed=tensor.transposed and kind == "weight", place=place)


def columns_in_tensor(weight: str, tensor: HfTensor, shapes: Mapping[str, tuple[int, ...]], heads: int) -> Columns | None:
    """Return the columns of a weight in the tensor that holds it, from the shapes of our weights; None where it is the whole tensor."""
    if not tensor.beside:
        return None
    layer = tensor.beside[tensor.place]
    runs = shapes[weight][-1] if tensor.interleaved else tensor.heads or heads if tensor.by_head else 1
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
