"""A Hugging Face config.json becomes our model's keys.

What names no size and no part of a layer is left out: token ids, initial scales, data types. So is Llama 3.1's stretching
of the rotary frequencies: a model that is made here has plain ones. Whatever else our families don't have is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..spec.plain_file import read_plain
from ..spec.problem import Problem, Unreadable

NEEDED: Final = "needed"  # a size that the file itself has to state


@dataclass(frozen=True)
class Row:
    """One key of ours and the file's: several of theirs have to agree. `default` is transformers' where a file is silent.

    Where that is None, or `null` says so, a file's null is our own default.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: type
    default: object = NEEDED
    null: bool = False


@dataclass(frozen=True)
class Only:
    """A key that may have these values alone; a file that is silent, or says null, means the first."""

    theirs: str
    values: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model_type: our family, what all its models have, its keys and activations, and what else it may say."""

    family: str
    architecture: str
    says: Mapping[str, object]
    rows: tuple[Row, ...]
    acts: Mapping[str, str]
    act: str  # the file's key of the activation
    only: tuple[Only, ...] = ()
    window: int | None = None  # transformers' sliding_window where a file is silent
    switch: bool = True  # transformers' use_sliding_window where a file is silent


ROPE = {"norm": "rmsnorm", "positions": "rope", "dropout": 0.0}
GATED = {"silu": "swiglu"}

SIZES = (
    Row("layers",   ("num_hidden_layers",),   int),
    Row("hidden",   ("hidden_size",),         int),
    Row("heads",    ("num_attention_heads",), int),
    Row("head_dim", ("head_dim",),            int, None),
    Row("ffn",      ("intermediate_size",),   int),
    Row("vocab",    ("vocab_size",),          int),
    Row("tied",     ("tie_word_embeddings",), bool, False),
)  # fmt: skip
LLAMA = (
    Row("kv_heads",  ("num_key_value_heads",),       int,   None),
    Row("bias",      ("attention_bias", "mlp_bias"), bool,  False),
    Row("norm_eps",  ("rms_norm_eps",),              float, 1e-6),
    Row("rope_base", ("rope_theta",),                float, 10000.0),
)  # fmt: skip
MISTRAL = (
    Row("kv_heads",  ("num_key_value_heads",), int,   8, null=True),
    Row("norm_eps",  ("rms_norm_eps",),        float, 1e-6),
    Row("rope_base", ("rope_theta",),          float, 10000.0),
)  # fmt: skip
QWEN2 = (
    Row("kv_heads",  ("num_key_value_heads",), int,   32, null=True),
    Row("norm_eps",  ("rms_norm_eps",),        float, 1e-6),
    Row("rope_base", ("rope_theta",),          float, 10000.0),
)  # fmt: skip
MIXTRAL = (
    Row("kv_heads",   ("num_key_value_heads",), int,   8, null=True),
    Row("norm_eps",   ("rms_norm_eps",),        float, 1e-5),
    Row("rope_base",  ("rope_theta",),          float, 1000000.0),
    Row("experts",    ("num_local_experts",),   int,   8),
    Row("top_k",      ("num_experts_per_tok",), int,   2),
    Row("expert_ffn", ("intermediate_size",),   int),
)  # fmt: skip
GPT2 = (
    Row("layers",   ("n_layer",),                                int),
    Row("hidden",   ("n_embd",),                                 int),
    Row("heads",    ("n_head",),                                 int),
    Row("ffn",      ("n_inner",),                                int,   None),
    Row("vocab",    ("vocab_size",),                             int),
    Row("context",  ("n_positions",),                            int),
    Row("tied",     ("tie_word_embeddings",),                    bool,  True),
    Row("norm_eps", ("layer_norm_epsilon",),                     float, 1e-5),
    Row("dropout",  ("resid_pdrop", "embd_pdrop", "attn_pdrop"), float, 0.1),
)  # fmt: skip

PLAIN_ROPE = (
    Only("rope_type", ("default", "llama3")),
    Only("partial_rotary_factor", (1,)),
    Only("attention_dropout", (0,)),  # ours drops the residual stream too
)

KINDS: dict[str, Kind] = {
    "gpt2": Kind(
        family="gpt",
        architecture="GPT2LMHeadModel",
        says={"norm": "layernorm", "positions": "learned", "bias": True},
        rows=GPT2,
        act="activation_function",
        acts={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"},
        only=(
            Only("scale_attn_weights", (True,)),
            Only("scale_attn_by_inverse_layer_idx", (False,)),
            Only("add_cross_attention", (False,)),
        ),
    ),
    "llama": Kind(
        family="llama",
        architecture="LlamaForCausalLM",
        says=ROPE,
        rows=SIZES + LLAMA,
        act="hidden_act",
        acts=GATED,
        only=PLAIN_ROPE,
    ),
    "mistral": Kind(
        family="llama",
        architecture="MistralForCausalLM",
        says=ROPE | {"bias": False},
        rows=SIZES + MISTRAL,
        act="hidden_act",
        acts=GATED,
        only=PLAIN_ROPE,
        window=4096,
    ),
    "mixtral": Kind(
        family="moe",
        architecture="MixtralForCausalLM",
        says=ROPE | {"bias": False},
        rows=SIZES + MIXTRAL,
        act="hidden_act",
        acts=GATED,
        only=(*PLAIN_ROPE, Only("router_jitter_noise", (0,))),
    ),
    "qwen2": Kind(
        family="llama",
        architecture="Qwen2ForCausalLM",
        says=ROPE | {"bias": False, "qkv_bias": True},
        rows=SIZES + QWEN2,
        act="hidden_act",
        acts=GATED,
        only=PLAIN_ROPE,
        window=4096,
        switch=False,
    ),
}  # keyed by model_type


def read_hf(path: str | Path) -> dict[str, object]:
    """The keys of `Model` that a config.json, or the folder that holds it, states; raises Unreadable with all that is wrong."""
    file = _file(path)
    config = _config(file)
    kind = _kind(config, file)
    flat = _flat(config)
    problems = [
        Problem(rule="hf", says=f"{file}: {says}", mend=mend)
        for says, mend in (*_wrong(flat, kind), *_disagreeing(flat, kind), *_refused(flat, kind), *_windowed(flat, kind))
    ]
    if problems:
        raise Unreadable(problems)
    read = {row.ours: flat.get(row.theirs[0], row.default) for row in kind.rows}
    act = kind.acts[str(flat.get(kind.act) or next(iter(kind.acts)))]
    keys: dict[str, object] = {"family": kind.family, **read, **kind.says, "act": act, "hf": str(path)}
    return {key: value for key, value in keys.items() if value is not None}


def foreign(path: str | Path) -> bool:
    """Whether a config.json's model_type is none of ours: family hf; raises Unreadable where it can't be read."""
    name = _config(_file(path)).get("model_type")
    return isinstance(name, str) and name not in KINDS


def _file(path: str | Path) -> Path:
    """The config.json that a path names, or that is in the folder that it names."""
    return Path(path) / "config.json" if os.path.isdir(path) else Path(path)


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_plain(file).decode("utf-8-sig"))
    except OSError as error:
        raise Unreadable([Problem(rule="hf", says=f"model.hf={file}: {error.strerror}", mend="name a config.json or its folder")]) from None
    except json.JSONDecodeError as error:
        at = f"{file}, line {error.lineno}, column {error.colno}"
        raise Unreadable([Problem(rule="hf", says=f"{at}: {error.msg}", mend="it has to be JSON")]) from None
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise Unreadable([Problem(rule="hf", says=f"{file} is not a config.json", mend="it has to be JSON")]) from None
    if not isinstance(config, dict):
        raise Unreadable([Problem(rule="hf", says=f"{file} holds no mapping of keys", mend="it has to be a model's config.json")])
    return config


def _kind(config: Mapping[str, Any], file: Path) -> Kind:
    """The row of a file's model_type, or, where it has none, of its architecture."""
    name = config.get("model_type")
    listed = config.get("architectures")
    built = listed if isinstance(listed, list) else []
    for known, kind in KINDS.items():
        if name == known or (name is None and kind.architecture in built):
            return kind
    says = f"{file}: model_type={_shown(name)} is none that is read" if name is not None else f"{file}: model_type is missing"
    mend = f"known: {', '.join(KINDS)}; every other that transformers has is family hf, which begins from no weights here"
    raise Unreadable([Problem(rule="hf", says=says, mend=mend)])


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys with those of its rotary embedding beside them: rope_parameters (transformers 5) or rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {**config, "rope_type": rope}  # one a kind of layer: none of ours
    stretched = "unnamed" if "factor" in rope else None
    return {**config, **rope, "rope_type": rope.get("rope_type") or rope.get("type") or stretched}


_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _wrong(config: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, str]]:
    """Keys that are missing or not of their kind."""
    for key, row in ((name, each) for each in kind.rows for name in each.theirs):
        value = config.get(key)
        if key not in config:
            if row.default == NEEDED:
                yield f"{key} is missing", f"set it to {_WORDS[row.kind]}"
        elif not _is(value, row.kind) and not (value is None and (row.null or row.default is None)):
            yield f"{key}={json.dumps(value)} is not {_WORDS[row.kind]}", ""


def _is(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int) or (kind is float and isinstance(value, float))


def _disagreeing(config: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, str]]:
    """Keys of theirs that are one of ours and differ."""
    for row in kind.rows:
        values = [config.get(key, row.default) for key in row.theirs]
        if any(value != values[0] for value in values):
            said = ", ".join(f"{key}={_shown(value)}" for key, value in zip(row.theirs, values, strict=True))
            yield f"{said} differ, and model.{row.ours} is one for all", "set them alike"


def _refused(config: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, str]]:
    """Values of keys that our family has no counterpart of."""
    for row in (*kind.only, Only(kind.act, tuple(kind.acts))):
        value = config.get(row.theirs)
        if value is not None and value not in row.values:
            yield f"{row.theirs}={_shown(value)} is nothing that family {kind.family} has", f"it has {' or '.join(map(_shown, row.values))}"


def _windowed(config: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, str]]:
    """A sliding window that is shorter than the context, in layers that there are."""
    window = config.get("sliding_window", kind.window)
    layers, context = config.get("num_hidden_layers"), config.get("max_position_embeddings")
    first, types = config.get("max_window_layers"), config.get("layer_types")  # Qwen2's layers before `first` have none
    off = config.get("use_sliding_window", kind.switch) is False
    full = isinstance(types, list) and all(each == "full_attention" for each in types)
    late = types is None and isinstance(first, int) and isinstance(layers, int) and first >= layers
    wide = isinstance(window, int) and isinstance(context, int) and window >= context
    if window is not None and not (off or full or late or wide):
        says = f"sliding_window={_shown(window)} with max_position_embeddings={_shown(context)} is nothing that family {kind.family} has"
        yield says, "null is full attention"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
