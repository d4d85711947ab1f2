"""Hugging Face weights of the GPT-2, Llama and Mixtral kinds, from a folder of safetensors into our names and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..spec.problem import Problem, Unreadable
from ..spec.read import read
from ..spec.run import Model, Run
from .families import FAMILIES
from .hf import KINDS, read_hf
from .table import named

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST = 4_000_000_000  # bytes of a file
NO_TOKENS: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TEMPERATURE = 0.8  # as `distrain generate` draws where nothing is said
STRETCHED = "its rotary frequencies are stretched (rope_type llama3), and ours are plain: its weights would give other logits here"


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


def from_hf(folder: str | Path, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Each weight of a run's model by its logical name, in its logical shape, read when its turn comes.

    Raises Unreadable, before the first, with all in which the folder is not this model.
    """
    folder = Path(folder)
    _compare(folder, run)
    places = PLACES[kind_of(run)]
    table = FAMILIES[run.model.family](run.model, run.train)
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in _files(folder)]
        there = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        wanted = [
            (parameter.name, parameter.shape(table.sizes), _found(parameter.name, places, there))
            for parameter in named(table, range(run.model.layers))
        ]
        problems = [problem for row in wanted for problem in _wrong(*row, there, folder)]
        if problems:
            raise Unreadable(problems)
        for name, shape, place in wanted:
            parts = [_read(there[each.theirs], each, size) for each, size in _each(place, shape)]
            yield name, torch.stack(parts) if "@" in place.theirs else parts[0]


def place_of(name: str, places: Mapping[str, Place]) -> Place:
    """Where one of our weights stands: layers.3.mlp.up.bias is transformer.h.3.mlp.c_fc.bias."""
    layer, _, kind = name.rpartition(".")
    index = ""
    if layer.startswith("layers."):
        _, index, layer = layer.split(".", 2)
    place = places[layer]
    return Place(f"{place.theirs.replace('#', index)}.{kind}", turned=place.turned and kind == "weight", third=place.third)


def _found(name: str, places: Mapping[str, Place], there: Mapping[str, Any]) -> Place:
    """A weight's place in a file: the hub's GPT-2 leaves out the model's own name."""
    place = place_of(name, places)
    bare = place.theirs.partition(".")[2]
    return replace(place, theirs=bare) if place.theirs not in there and bare in there else place


def _each(place: Place, shape: tuple[int, ...]) -> Iterator[tuple[Place, tuple[int, ...]]]:
    """The tensors of a file that are one weight of ours of this shape, and their own: one, or one an expert."""
    if "@" not in place.theirs:
        yield place, shape
        return
    for expert in range(shape[0]):
        yield replace(place, theirs=place.theirs.replace("@", str(expert))), shape[1:]


def _wrong(name: str, shape: tuple[int, ...], whole: Place, there: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    for place, size in _each(whole, shape):
        file = there.get(place.theirs)
        if file is None:
            yield Problem(rule="weights", says=f"{folder} has no {place.theirs}, which is {name} here")
            continue
        has = tuple(file.get_slice(place.theirs).get_shape())
        want = size[::-1] if place.turned else size
        want = want if place.third is None else (*want[:-1], 3 * want[-1])
        if has != want:
            yield Problem(rule="weights", says=f"{folder}: {place.theirs} is {list(has)}, not {list(want)}")


def _read(file: Any, place: Place, shape: tuple[int, ...]) -> Tensor:
    if place.third is None:
        whole: Tensor = file.get_tensor(place.theirs)
        return whole.t() if place.turned else whole
    third = slice(place.third * shape[-1], (place.third + 1) * shape[-1])
    part: Tensor = file.get_slice(place.theirs)[(..., third) if len(shape) > 1 else third]
    return part


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    files = [folder / WHOLE] if (folder / WHOLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        mend = "save it with transformers' save_pretrained, which writes safetensors"
        raise Unreadable([Problem(rule="weights", says=f"{folder} holds no .safetensors", mend=mend)])
    return files


def _compare(folder: Path, run: Run) -> None:
    """Whether the folder's config.json is the run's model; raises Unreadable with every key that differs."""
    theirs, ours = sizes(read(read_hf(folder), Model), run), sizes(run.model, run)
    problems = [
        Problem(rule="weights", says=f"{folder} has model.{key}={theirs[key]}, this run {ours[key]}", mend=f"set model.{key}={theirs[key]}")
        for key in ours
        if theirs[key] != ours[key]
    ]
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "llama3" in (rope.get("rope_type"), rope.get("type")):
        problems.append(Problem(rule="weights", says=f"{folder}: {STRETCHED}"))
    if problems:
        raise Unreadable(problems)


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


def to_hf(
    tensors: Iterable[tuple[str, Tensor]], run: Run, folder: str | Path, *, most: int = MOST, special: Mapping[str, int | None] = NO_TOKENS
) -> None:
    """Write weights, by logical name and in logical shape, as a folder that transformers loads: safetensors, config.json and
    generation_config.json.

    One file (of `most` bytes) is in memory at a time; `special` are the ids that both configs name. Raises Unreadable where no class
    of transformers is this model, or the folder holds weights.
    """
    folder, kind = Path(folder), kind_of(run)
    if any(folder.glob("*.safetensors*")):
        raise Unreadable([Problem(rule="weights", says=f"{folder} holds weights", mend="name a folder that is not there yet")])
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, int]] = []  # bytes of each tensor in each file
    dtype = ""
    for part in _parts(_theirs(tensors, kind, run), most):
        dtype = str(next(iter(part.values())).dtype).removeprefix("torch.")
        save_file(part, folder / f"{len(parts)}.part", metadata={"format": "pt"})
        parts.append({name: tensor.nbytes for name, tensor in part.items()})
    names = [WHOLE] if len(parts) == 1 else [f"model-{at + 1:05d}-of-{len(parts):05d}.safetensors" for at in range(len(parts))]
    for at, name in enumerate(names):
        (folder / f"{at}.part").rename(folder / name)
    if len(parts) > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        _write(folder / INDEX, {"metadata": {"total_size": sum(sum(part.values()) for part in parts)}, "weight_map": where})
    _write(folder / "config.json", {**config(run, kind, dtype), **special})
    _write(folder / "generation_config.json", generation(run, special))


def _write(path: Path, words: Mapping[str, object]) -> None:
    path.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def _theirs(tensors: Iterable[tuple[str, Tensor]], kind: str, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors; of GPT-2 three of ours are one of theirs, and a bias that ours lack is 0."""
    thirds: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        place = place_of(name, PLACES[kind])
        whole = tensor.detach().cpu()
        if place.third is not None:
            parts = thirds.setdefault(place.theirs, {})
            parts[place.third] = whole
            if len(parts) < 3:
                continue
            whole = torch.cat([thirds[place.theirs].pop(third) for third in range(3)], dim=-1)
        for expert, (each, _) in enumerate(_each(place, tuple(whole.shape))):
            part = whole[expert] if "@" in place.theirs else whole
            yield each.theirs, (part.t() if each.turned else part).contiguous()
        if kind == "gpt2" and not run.model.bias and (".attention." in name or ".mlp." in name):
            yield place.theirs.removesuffix("weight") + "bias", torch.zeros(whole.shape[-1], dtype=whole.dtype)


def _parts(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most so many bytes, or of one tensor."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > most:
            yield part
            part = {}
        part[name] = tensor
    yield part


def config(run: Run, kind: str, dtype: str) -> dict[str, object]:
    """The config.json of a run's model: the keys that `read_hf` reads, and those without which transformers would guess."""
    row = KINDS[kind]
    has = sizes(run.model, run) | {"dropout": run.model.dropout}
    said = {theirs: has[each.ours] for each in row.rows for theirs in each.theirs}
    act = next(theirs for theirs, ours in row.acts.items() if ours == run.model.act)
    told: dict[str, object] = {"architectures": [row.architecture], "model_type": kind, "torch_dtype": dtype, **NO_TOKENS}
    if run.model.positions == "rope":
        rope = {"rope_type": "default", "rope_theta": run.model.rope_base}
        told |= {"max_position_embeddings": run.train.seq, "rope_parameters": rope}
    return told | {row.act: act} | said


def generation(run: Run, special: Mapping[str, int | None]) -> dict[str, object]:
    """The generation_config.json of a model that was trained on plain text: it samples, up to the end of its context, or to `eos`."""
    context = run.train.seq if run.model.positions == "rope" else run.model.context or run.train.seq
    known = {key: value for key, value in special.items() if value is not None}
    return {**known, "do_sample": True, "temperature": TEMPERATURE, "max_length": context}
