"""Where each of our weights stands in a Hugging Face folder of the GPT-2, Llama and Mixtral kinds, and what of a model that decides."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

from ..spec.problem import Problem, Unreadable
from ..spec.run import Model, Run
from .hf import KINDS


@dataclass(frozen=True)
class Place:
    """Where a layer of ours stands in a file: its name there, with @ for an expert's number where each is a tensor of its own;
    `turned`: [outer, inner]; `third` of three side by side."""

    theirs: str
    turned: bool = False
    third: int | None = None


# fmt: off
GPT2 = {
    "embedding":       Place("transformer.wte"),
    "positions":       Place("transformer.wpe"),
    "norm1":           Place("transformer.h.#.ln_1"),
    "attention.query": Place("transformer.h.#.attn.c_attn", third=0),
    "attention.key":   Place("transformer.h.#.attn.c_attn", third=1),
    "attention.value": Place("transformer.h.#.attn.c_attn", third=2),
    "attention.out":   Place("transformer.h.#.attn.c_proj"),
    "norm2":           Place("transformer.h.#.ln_2"),
    "mlp.up":          Place("transformer.h.#.mlp.c_fc"),
    "mlp.down":        Place("transformer.h.#.mlp.c_proj"),
    "norm":            Place("transformer.ln_f"),
    "head":            Place("lm_head", turned=True),
}
LLAMA = {
    "embedding":       Place("model.embed_tokens"),
    "norm1":           Place("model.layers.#.input_layernorm"),
    "attention.query": Place("model.layers.#.self_attn.q_proj", turned=True),
    "attention.key":   Place("model.layers.#.self_attn.k_proj", turned=True),
    "attention.value": Place("model.layers.#.self_attn.v_proj", turned=True),
    "attention.out":   Place("model.layers.#.self_attn.o_proj", turned=True),
    "norm2":           Place("model.layers.#.post_attention_layernorm"),
    "mlp.gate":        Place("model.layers.#.mlp.gate_proj",    turned=True),
    "mlp.up":          Place("model.layers.#.mlp.up_proj",      turned=True),
    "mlp.down":        Place("model.layers.#.mlp.down_proj",    turned=True),
    "norm":            Place("model.norm"),
    "head":            Place("lm_head",                         turned=True),
}
MIXTRAL = {name: place for name, place in LLAMA.items() if not name.startswith("mlp.")} | {
    "router":          Place("model.layers.#.block_sparse_moe.gate",         turned=True),
    "experts.gate":    Place("model.layers.#.block_sparse_moe.experts.@.w1", turned=True),
    "experts.up":      Place("model.layers.#.block_sparse_moe.experts.@.w3", turned=True),
    "experts.down":    Place("model.layers.#.block_sparse_moe.experts.@.w2", turned=True),
}
# fmt: on
PLACES = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "qwen2": LLAMA}  # keyed by the model_type that is written; Mistral's is Llama's


def place_of(name: str, places: Mapping[str, Place]) -> Place:
    """Return where one of our weights stands: layers.3.mlp.up.bias is transformer.h.3.mlp.c_fc.bias."""
    layer, _, kind = name.rpartition(".")
    index = ""
    if layer.startswith("layers."):
        _, index, layer = layer.split(".", 2)
    place = places[layer]
    return Place(f"{place.theirs.replace('#', index)}.{kind}", turned=place.turned and kind == "weight", third=place.third)


def find_place(name: str, places: Mapping[str, Place], there: Container[str]) -> Place:
    """Return a weight's place in files that hold these names: the hub's GPT-2 leaves out the model's own name."""
    place = place_of(name, places)
    bare = place.theirs.partition(".")[2]
    return replace(place, theirs=bare) if place.theirs not in there and bare in there else place


def expert_places(place: Place, shape: tuple[int, ...]) -> Iterator[tuple[Place, tuple[int, ...]]]:
    """List the tensors of a file that are one weight of ours of this shape, and their own shapes: one, or one an expert."""
    if "@" not in place.theirs:
        yield place, shape
        return
    for expert in range(shape[0]):
        yield replace(place, theirs=place.theirs.replace("@", str(expert))), shape[1:]


def sizes(model: Model, run: Run) -> dict[str, object]:
    """What decides a model's logits, with every default filled in."""
    rope = {"rope_base": model.rope_base} if model.positions == "rope" else {"context": model.context or run.train.seq}
    ffn = model.ffn or 4 * model.hidden
    mixture = {
        "experts": model.experts,
        "top_k": model.top_k,
        "expert_ffn": model.expert_ffn or ffn,
        "shared_experts": model.shared_experts,
        "capacity": model.capacity,
    }
    return (rope | mixture if model.experts else rope) | {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_dim or model.hidden // model.heads,
        "ffn": mixture["expert_ffn"] if model.experts else ffn,
        "vocab": model.vocab,
        "tied": model.tied,
        "bias": model.bias,
        "qkv_bias": model.bias if model.qkv_bias is None else model.qkv_bias,
        "norm": model.norm,
        "norm_eps": model.norm_eps,
        "act": model.act,
        "positions": model.positions,
    }


def kind_of(run: Run) -> str:
    """The model_type whose class computes what this model does; raises Unreadable where there is none."""
    has = sizes(run.model, run)
    even = has["kv_heads"] == has["heads"] and run.model.heads * int(str(has["head_dim"])) == run.model.hidden
    alike = has["bias"] == has["qkv_bias"]
    form = (has["norm"], has["positions"])
    if form == ("layernorm", "learned") and even and alike and has["act"] in KINDS["gpt2"].acts.values():
        return "gpt2"
    if form == ("rmsnorm", "rope") and has["act"] == "swiglu" and (alike or has["qkv_bias"]):
        if not run.model.experts:
            return "llama" if alike else "qwen2"
        if not (has["bias"] or has["qkv_bias"] or run.model.shared_experts or run.model.capacity):
            return "mixtral"
    says = "none of Hugging Face's GPT-2, Llama, Qwen2 and Mixtral computes what this model does"
    mend = "GPT-2 has layernorm, learned positions and plain heads; the others rmsnorm, rope and swiglu, Mixtral no shared experts"
    raise Unreadable([Problem(rule="weights", says=says, mend=mend)])
