"""What each model_type of Hugging Face states in its config.json, as rows: our keys and the file's, its restrictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from .dense_layers import DenseKeys
from .rope import ROPE_NAMES
from .window import WindowKeys

REQUIRED: Final = "required"  # a size that the file itself has to state


@dataclass(frozen=True)
class ConfigRow:
    """A key of our `model` and the file's keys for it, which have to agree.

    `default` is transformers' where a file lacks the key. A null is allowed where the default is None or with `nullable`, and means our
    own default, or `null`. `synonyms`: a file states one of them, or all.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: type
    default: object = REQUIRED
    nullable: bool = False
    synonyms: bool = False
    null: object = None


@dataclass(frozen=True)
class AllowedValues:
    """A key of the file that must have one of these values; a missing or null key means the first."""

    theirs: str
    values: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class ConfigKind:
    """A model_type: its class in transformers, the keys that all its models have here, its rows and activations, its restrictions, how it
    states windows and dense layers, the keys of the file that its models here do not read, and those that are written beside its rows."""

    architecture: str
    fixed: Mapping[str, object]
    rows: tuple[ConfigRow, ...]
    acts: Mapping[str, str]
    act: str  # the file's key of the activation
    allowed: tuple[AllowedValues, ...] = ()
    window: WindowKeys | None = None
    dense: DenseKeys | None = None
    unread: tuple[str, ...] = ()
    written: Mapping[str, object] = field(default_factory=dict)

    @property
    def known_keys(self) -> frozenset[str]:
        """The keys of the file that are read or restricted."""
        rows = (name for row in self.rows for name in row.theirs)
        positions = (*(ROPE_NAMES if is_rotary(self) else ()), *(self.window.names if self.window else ()))
        dense = self.dense.names if self.dense else ()
        return frozenset((self.act, *rows, *positions, *dense, *(row.theirs for row in self.allowed), *self.unread))

    def has_key(self, ours: str) -> bool:
        """Whether a row states a key of our `model`."""
        return any(row.ours == ours for row in self.rows)


ROPE = {"norm": "rmsnorm", "positions": "rope", "dropout": 0.0}
OLMO2 = {"bias": False, "qk_norm": True, "qk_norm_over": "all", "norm_place": "after"}
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
OLMO2_KEYS = (
    ConfigRow("kv_heads",  ("num_key_value_heads",), int,   None),
    ConfigRow("norm_eps",  ("rms_norm_eps",),        float, 1e-5),
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
GLM4_MOE_KEYS = (
    ConfigRow("kv_heads",          ("num_key_value_heads",),   int,   8, nullable=True),
    ConfigRow("qkv_bias",          ("attention_bias",),        bool,  False),
    ConfigRow("qk_norm",           ("use_qk_norm",),           bool,  False),
    ConfigRow("norm_eps",          ("rms_norm_eps",),          float, 1e-5),
    ConfigRow("rope_base",         ("rope_theta",),            float, 10000.0),
    ConfigRow("rope_share",        ("partial_rotary_factor",), float, 0.5),
    ConfigRow("dense_layers",      ("first_k_dense_replace",), int,   1),
    ConfigRow("experts",           ("n_routed_experts",),      int,   128),
    ConfigRow("top_k",             ("num_experts_per_tok",),   int,   8),
    ConfigRow("expert_ffn",        ("moe_intermediate_size",), int,   1408),
    ConfigRow("shared_experts",    ("n_shared_experts",),      int,   1),
    ConfigRow("router.normalize",  ("norm_topk_prob",),        bool,  True),
    ConfigRow("router.scale",      ("routed_scaling_factor",), float, 1.0),
    ConfigRow("router.groups",     ("n_group",),               int,   1),
    ConfigRow("router.top_groups", ("topk_group",),            int,   1),
)  # fmt: skip
DEEPSEEK_KEYS = (
    *(row for row in SIZE_KEYS if row.ours != "head_dim"),
    ConfigRow("kv_heads",          ("num_key_value_heads",),   int,   None),
    ConfigRow("norm_eps",          ("rms_norm_eps",),          float, 1e-6),
    ConfigRow("rope_base",         ("rope_theta",),            float, 10000.0),
    ConfigRow("q_lora_rank",       ("q_lora_rank",),           int,   1536, nullable=True, null=0),
    ConfigRow("kv_lora_rank",      ("kv_lora_rank",),          int,   512),
    ConfigRow("qk_nope_head_dim",  ("qk_nope_head_dim",),      int,   128),
    ConfigRow("qk_rope_head_dim",  ("qk_rope_head_dim",),      int,   64),
    ConfigRow("v_head_dim",        ("v_head_dim",),            int,   128),
    ConfigRow("top_k",             ("num_experts_per_tok",),   int,   0, nullable=True),
    ConfigRow("experts",           ("n_routed_experts",),      int),
    ConfigRow("expert_ffn",        ("moe_intermediate_size",), int),
    ConfigRow("shared_experts",    ("n_shared_experts",),      int),
    ConfigRow("router.scale",      ("routed_scaling_factor",), float),
    ConfigRow("router.groups",     ("n_group",),               int,   1, nullable=True),
    ConfigRow("router.top_groups", ("topk_group",),            int,   1, nullable=True),
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

V3_DEFAULTS = {"top_k": 8, "router.groups": 8, "router.top_groups": 4}

NO_DROPOUT = (AllowedValues("attention_dropout", (0,)),)  # our dropout is of the residual stream too
DEEPSEEK_ALLOWED = (
    AllowedValues("attention_bias", (False,)),
    AllowedValues("moe_layer_freq", (1,)),
)
NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")  # a head beside the model's
DEEPSEEK_UNREAD = (
    *("head_dim", "qk_head_dim"),  # follow from the others
    *NEXT_TOKENS,
    *("aux_loss_alpha", "seq_aux", "ep_size"),  # of training
)

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
    "olmo2": ConfigKind(
        architecture="Olmo2ForCausalLM",
        fixed=ROPE | OLMO2,
        rows=SIZE_KEYS + OLMO2_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=(*NO_DROPOUT, AllowedValues("attention_bias", (False,))),
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
        ),
        window=WindowKeys(4096, switched=True),
        dense=DenseKeys("mlp_only_layers", "intermediate_size", default_ffn=6144),
    ),
    "glm4_moe": ConfigKind(
        architecture="Glm4MoeForCausalLM",
        fixed=ROPE | {"bias": False, "router.score": "sigmoid", "router.bias": True},
        rows=SIZE_KEYS + GLM4_MOE_KEYS,
        act="hidden_act",
        acts=GATED,
        allowed=NO_DROPOUT,
        unread=NEXT_TOKENS,
        written={"num_nextn_predict_layers": 0},
    ),
    "deepseek_v2": ConfigKind(
        architecture="DeepseekV2ForCausalLM",
        fixed=ROPE | {"bias": False, "router.score": "softmax", "router.normalize": False},
        rows=(*DEEPSEEK_KEYS, ConfigRow("dense_layers", ("first_k_dense_replace",), int, 0)),
        act="hidden_act",
        acts=GATED,
        allowed=(
            *NO_DROPOUT,
            *DEEPSEEK_ALLOWED,
            AllowedValues("mlp_bias", (False,)),
            AllowedValues("scoring_func", ("softmax",)),
            AllowedValues("topk_method", ("greedy", "group_limited_greedy")),
            AllowedValues("norm_topk_prob", (False,)),  # transformers never divides, DeepSeek's code would
        ),
        unread=DEEPSEEK_UNREAD,
        written={"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ConfigKind(
        architecture="DeepseekV3ForCausalLM",
        fixed=ROPE | {"bias": False, "router.score": "sigmoid", "router.bias": True},
        rows=(
            *(replace(row, default=V3_DEFAULTS.get(row.ours, row.default)) for row in DEEPSEEK_KEYS),
            ConfigRow("dense_layers", ("first_k_dense_replace",), int, 3),
            ConfigRow("router.normalize", ("norm_topk_prob",), bool, True),
        ),
        act="hidden_act",
        acts=GATED,
        allowed=(
            *NO_DROPOUT,
            *DEEPSEEK_ALLOWED,
            AllowedValues("rope_interleave", (True,)),
            AllowedValues("scoring_func", ("sigmoid",)),
            AllowedValues("topk_method", ("noaux_tc",)),
        ),
        unread=DEEPSEEK_UNREAD,
        written={"num_nextn_predict_layers": 0},
    ),
}  # keyed by model_type
SAME_MODELS = {"kimi_k2": "deepseek_v3"}  # model_types of another's models, which are read and written as those (arXiv:2507.20534)


def is_rotary(kind: ConfigKind) -> bool:
    """Whether all models of a model_type have rotary embeddings."""
    return kind.fixed["positions"] == "rope"
