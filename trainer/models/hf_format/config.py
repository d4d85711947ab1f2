"""Reading a Hugging Face config.json into the keys of our `model`.

Keys that change no logit are ignored (harmless_keys.py lists them). Everything else that our families do not have is refused, by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...spec.problem import Problem, Unreadable, shorten
from ...spec.regular_file import read_plain
from ..families import FAMILIES
from .harmless_keys import is_harmless
from .rope import ROPE_NAMES, json_text, read_rope, rope_keys, rope_problems
from .window import WindowKeys, read_window, window_problems

ROUTER: Final = "router."  # the section of `model` whose keys rows name whole
REQUIRED: Final = "required"  # a size that the file itself has to state


@dataclass(frozen=True)
class ConfigRow:
    """A key of our `model` and the file's keys for it, which have to agree.

    `default` is transformers' where a file lacks the key. A null is allowed where the default is None or with `nullable`, and means our
    own default. `synonyms`: a file states one of them, or all.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: type
    default: object = REQUIRED
    nullable: bool = False
    synonyms: bool = False


@dataclass(frozen=True)
class AllowedValues:
    """A key of the file that must have one of these values; a missing or null key means the first."""

    theirs: str
    values: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class ConfigKind:
    """A model_type: its class in transformers, the keys that all its models have here, its rows and activations, its restrictions, and the
    keys of the file that its models here do not read."""

    architecture: str
    fixed: Mapping[str, object]
    rows: tuple[ConfigRow, ...]
    acts: Mapping[str, str]
    act: str  # the file's key of the activation
    allowed: tuple[AllowedValues, ...] = ()
    window: WindowKeys | None = None
    unread: tuple[str, ...] = ()

    @property
    def known_keys(self) -> frozenset[str]:
        """The keys of the file that are read or restricted."""
        rows = (name for row in self.rows for name in row.theirs)
        positions = (*(ROPE_NAMES if is_rotary(self) else ()), *(self.window.names if self.window else ()))
        return frozenset((self.act, *rows, *positions, *(row.theirs for row in self.allowed), *self.unread))


ROPE = {"norm": "rmsnorm", "positions": "rope", "dropout": 0.0}
GATED = {"silu": "swiglu"}

SIZE_KEYS = (
    ConfigRow("layers",   ("num_hidden_layers",),   int),
    ConfigRow("hidden",   ("hidden_size",),         int),
    ConfigRow("heads",    ("num_attention_heads",), int),
    ConfigRow("head_dim", ("head_dim",),            int, None),
    ConfigRow("ffn",      ("intermediate_size",),   int),
    ConfigRow("vocab",    ("vocab_size",),          int),
    ConfigRow("tied",     ("tie_word_embeddings",), bool, False),
)  # fmt: skip
LLAMA_KEYS = (
    ConfigRow("kv_heads",  ("num_key_value_heads",),       int,   None),
    ConfigRow("bias",      ("attention_bias", "mlp_bias"), bool,  False),
    ConfigRow("norm_eps",  ("rms_norm_eps",),              float, 1e-6),
    ConfigRow("rope_base", ("rope_theta",),                float, 10000.0),
)  # fmt: skip
MISTRAL = (
    ConfigRow("kv_heads",  ("num_key_value_heads",), int,   8, nullable=True),
    ConfigRow("norm_eps",  ("rms_norm_eps",),        float, 1e-6),
    ConfigRow("rope_base", ("rope_theta",),          float, 10000.0),
)  # fmt: skip
QWEN2 = (
    ConfigRow("kv_heads",  ("num_key_value_heads",), int,   32, nullable=True),
    ConfigRow("norm_eps",  ("rms_norm_eps",),        float, 1e-6),
    ConfigRow("rope_base", ("rope_theta",),          float, 10000.0),
)  # fmt: skip
MIXTRAL_KEYS = (
    ConfigRow("kv_heads",   ("num_key_value_heads",), int,   8, nullable=True),
    ConfigRow("norm_eps",   ("rms_norm_eps",),        float, 1e-5),
    ConfigRow("rope_base",  ("rope_theta",),          float, 1000000.0),
    ConfigRow("experts",    ("num_local_experts",),   int,   8),
    ConfigRow("top_k",      ("num_experts_per_tok",), int,   2),
    ConfigRow("expert_ffn", ("intermediate_size",),   int),
)  # fmt: skip
QWEN3_KEYS = (
    *(replace(row, default=128) if row.ours == "head_dim" else row for row in SIZE_KEYS),
    ConfigRow("kv_heads",  ("num_key_value_heads",), int,   32, nullable=True),
    ConfigRow("norm_eps",  ("rms_norm_eps",),        float, 1e-6),
    ConfigRow("rope_base", ("rope_theta",),          float, 10000.0),
)  # fmt: skip
QWEN3_MOE_KEYS = (
    ConfigRow("kv_heads",         ("num_key_value_heads",),              int,   4, nullable=True),
    ConfigRow("norm_eps",         ("rms_norm_eps",),                     float, 1e-6),
    ConfigRow("rope_base",        ("rope_theta",),                       float, 10000.0),
    ConfigRow("experts",          ("num_experts", "num_local_experts"),  int,   128, synonyms=True),  # transformers 5 writes the second
    ConfigRow("top_k",            ("num_experts_per_tok",),              int,   8),
    ConfigRow("expert_ffn",       ("moe_intermediate_size",),            int,   768),
    ConfigRow("router.normalize", ("norm_topk_prob",),                   bool,  False),
)  # fmt: skip
GPT2_KEYS = (
    ConfigRow("layers",   ("n_layer",),                                int),
    ConfigRow("hidden",   ("n_embd",),                                 int),
    ConfigRow("heads",    ("n_head",),                                 int),
    ConfigRow("ffn",      ("n_inner",),                                int,   None),
    ConfigRow("vocab",    ("vocab_size",),                             int),
    ConfigRow("context",  ("n_positions",),                            int),
    ConfigRow("tied",     ("tie_word_embeddings",),                    bool,  True),
    ConfigRow("norm_eps", ("layer_norm_epsilon",),                     float, 1e-5),
    ConfigRow("dropout",  ("resid_pdrop", "embd_pdrop", "attn_pdrop"), float, 0.1),
)  # fmt: skip

FIXES = {
    "quantization_config": "save the model with its weights dequantized",
    "auto_map": "it names code of the model's own, which is not run here: take it out if the model is transformers' own",
}
NO_DROPOUT = (AllowedValues("attention_dropout", (0,)),)  # our dropout is of the residual stream too

CONFIG_KINDS: dict[str, ConfigKind] = {
    "gpt2": ConfigKind(
        architecture="GPT2LMHeadModel",
        fixed={"norm": "layernorm", "positions": "learned", "bias": True},
        rows=GPT2_KEYS,
        act="activation_function",
        acts={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"},
        allowed=(
            AllowedValues("scale_attn_weights", (True,)),
            AllowedValues("scale_attn_by_inverse_layer_idx", (False,)),
            AllowedValues("add_cross_attention", (False,)),
        ),
    ),
    "llama": ConfigKind(
        architecture="LlamaForCausalLM",
        fixed=ROPE,
        rows=SIZE_KEYS + LLAMA_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
    ),
    "mistral": ConfigKind(
        architecture="MistralForCausalLM",
        fixed=ROPE | {"bias": False},
        rows=SIZE_KEYS + MISTRAL,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        window=WindowKeys(4096),
    ),
    "ministral": ConfigKind(
        architecture="MinistralForCausalLM",
        fixed=ROPE | {"bias": False},
        rows=SIZE_KEYS + MISTRAL,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        window=WindowKeys(4096, by_layer=True),
    ),
    "mixtral": ConfigKind(
        architecture="MixtralForCausalLM",
        fixed=ROPE | {"bias": False},
        rows=SIZE_KEYS + MIXTRAL_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(*NO_DROPOUT, AllowedValues("router_jitter_noise", (0,))),
        window=WindowKeys(None),
    ),
    "qwen2": ConfigKind(
        architecture="Qwen2ForCausalLM",
        fixed=ROPE | {"bias": False, "qkv_bias": True},
        rows=SIZE_KEYS + QWEN2,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        window=WindowKeys(4096, by_layer=True, switched=True),
    ),
    "qwen3": ConfigKind(
        architecture="Qwen3ForCausalLM",
        fixed=ROPE | {"bias": False, "qk_norm": True},
        rows=QWEN3_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(*NO_DROPOUT, AllowedValues("attention_bias", (False,))),
        window=WindowKeys(4096, by_layer=True, switched=True),
    ),
    "qwen3_moe": ConfigKind(
        architecture="Qwen3MoeForCausalLM",
        fixed=ROPE | {"bias": False, "qk_norm": True},
        rows=tuple(row for row in SIZE_KEYS if row.ours != "ffn") + QWEN3_MOE_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(
            *NO_DROPOUT,
            AllowedValues("attention_bias", (False,)),
            AllowedValues("decoder_sparse_step", (1,)),
            AllowedValues("mlp_only_layers", ([],)),
        ),
        window=WindowKeys(4096, switched=True),
        unread=("intermediate_size",),  # of layers without experts
    ),
}  # keyed by model_type


def read_hf_config(path: str | Path) -> dict[str, object]:
    """Return the keys of `model` that a config.json, or the folder that holds it, states; raises Unreadable with every problem."""
    file = config_file(path)
    config = read_json(file)
    model_type = _known_model_type(config, file)
    kind, family = CONFIG_KINDS[model_type], family_of_type(model_type)
    flat = _with_synonyms({**config, **rope_keys(config)}, kind)
    found = (
        *_type_problems(flat, kind),
        *_disagreements(flat, kind),
        *_unsupported_keys(flat, kind, family),
        *_unknown_keys(config, kind, family),
        *(rope_problems(config, family) if is_rotary(kind) else ()),
        *(window_problems(config, kind.window) if kind.window else ()),
    )
    if found:
        raise Unreadable([Problem(rule="hf", says=f"{file}: {says}", mend=fix) for says, fix in found])
    values = {row.ours: flat.get(row.theirs[0], row.default) for row in kind.rows}
    act = kind.acts[str(flat.get(kind.act) or next(iter(kind.acts)))]
    positions: dict[str, object] = {"rope": read_rope(config)} if is_rotary(kind) else {}
    positions |= read_window(config, kind.window) if kind.window else {}
    keys: dict[str, object] = {"family": family, **values, **kind.fixed, **positions, "act": act, "hf": str(path)}
    router = {key.removeprefix(ROUTER): value for key, value in keys.items() if key.startswith(ROUTER)}
    plain = {key: value for key, value in keys.items() if value is not None and not key.startswith(ROUTER)}
    return plain | ({"router": router} if router else {})


def _with_synonyms(config: dict[str, Any], kind: ConfigKind) -> dict[str, Any]:
    """Return a config in which all synonyms of a key that it states have its value."""
    stated = ((row.theirs, config[name]) for row in kind.rows if row.synonyms for name in row.theirs if name in config)
    return {name: value for names, value in stated for name in names} | config


def needs_family_hf(path: str | Path) -> bool:
    """Whether only transformers has the model_type of a config.json, so that it is of family hf; raises Unreadable for a bad file."""
    return isinstance(model_type := read_json(config_file(path)).get("model_type"), str) and model_type not in CONFIG_KINDS


def family_of_type(model_type: str) -> str:
    """Return the name of the family that a model_type of CONFIG_KINDS is read as."""
    return next(name for name, family in FAMILIES.items() if model_type in family.model_types)


def config_file(path: str | Path) -> Path:
    """Return the config.json that a path names, or that lies in the folder that it names."""
    return Path(path) / "config.json" if os.path.isdir(path) else Path(path)


def read_json(file: Path) -> dict[str, Any]:
    """Read a config.json; raises Unreadable where it is missing or holds no mapping."""
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
        raise Unreadable([Problem(rule="hf", says=f"{file} does not hold a mapping of keys", mend="it has to be a model's config.json")])
    return config


def _known_model_type(config: Mapping[str, Any], file: Path) -> str:
    """Return a file's model_type or, where it has none, that of its architecture; raises Unreadable for one that is not known."""
    stated = config.get("model_type")
    listed = config.get("architectures")
    architectures = listed if isinstance(listed, list) else []
    for model_type, kind in CONFIG_KINDS.items():
        if stated == model_type or (stated is None and kind.architecture in architectures):
            return model_type
    says = f"{file}: model_type={json_text(stated)} has no family here" if stated is not None else f"{file}: model_type is missing"
    fix = f"known: {', '.join(CONFIG_KINDS)}; any other model type of transformers is family hf"
    raise Unreadable([Problem(rule="hf", says=says, mend=fix)])


def _unknown_keys(config: Mapping[str, Any], kind: ConfigKind, family: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for keys that may change what the model computes; one that is null, false or empty switches nothing on."""
    known = kind.known_keys
    for key, value in config.items():
        if value and key not in known and not is_harmless(key):
            says = f"{key}={shorten(json_text(value))} is not known to family {family}, and may change what the model computes"
            yield says, FIXES.get(key, "take it out if it changes nothing")


def is_rotary(kind: ConfigKind) -> bool:
    """Whether all models of a model_type have rotary embeddings."""
    return kind.fixed["positions"] == "rope"


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def _type_problems(config: Mapping[str, Any], kind: ConfigKind) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for keys that are missing or of the wrong type."""
    for key, row in ((name, each) for each in kind.rows for name in each.theirs):
        value = config.get(key)
        if key not in config:
            if row.default == REQUIRED:
                yield f"{key} is missing", f"set it to {_TYPE_NAMES[row.kind]}"
        elif not _has_type(value, row.kind) and not (value is None and (row.nullable or row.default is None)):
            yield f"{key}={json.dumps(value)} is not {_TYPE_NAMES[row.kind]}", ""


def _has_type(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int) or (kind is float and isinstance(value, float))


def _disagreements(config: Mapping[str, Any], kind: ConfigKind) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for keys of the file that are one key here and differ."""
    for row in kind.rows:
        values = [config.get(key, row.default) for key in row.theirs]
        if any(value != values[0] for value in values):
            pairs = ", ".join(f"{key}={json_text(value)}" for key, value in zip(row.theirs, values, strict=True))
            yield f"{pairs} differ, but model.{row.ours} is a single value", "set them to the same value"


def _unsupported_keys(config: Mapping[str, Any], kind: ConfigKind, family: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for values that our family does not have."""
    for row in (*kind.allowed, AllowedValues(kind.act, tuple(kind.acts))):
        value = config.get(row.theirs)
        if value is not None and value not in row.values:
            yield f"family {family} does not have {row.theirs}={json_text(value)}", f"it has {' or '.join(map(json_text, row.values))}"
