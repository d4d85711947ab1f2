"""The keys of Hugging Face's config.json files, as rows by model_type: our key, the file's, its type and transformers' default."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

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
OLMO3_KEYS = (
    ConfigRow("kv_heads",        ("num_key_value_heads",),  int,   None),
    ConfigRow("norm_eps",        ("rms_norm_eps",),         float, 1e-5),
    ConfigRow("rope_base",       ("rope_theta",),           float, 500000.0),
    ConfigRow("rope_local_base", ("rope_local_base_freq",), float, 500000.0),
)  # fmt: skip
GEMMA3_DEFAULTS = {"vocab": 262208, "hidden": 2304, "ffn": 9216, "layers": 26, "heads": 8, "head_dim": 256, "tied": True}
GEMMA3_KEYS = (
    *(replace(row, default=GEMMA3_DEFAULTS[row.ours]) for row in SIZE_KEYS),
    ConfigRow("kv_heads",              ("num_key_value_heads",),   int,   4),
    ConfigRow("norm_eps",              ("rms_norm_eps",),          float, 1e-6),
    ConfigRow("query_pre_attn_scalar", ("query_pre_attn_scalar",), int,   256),
    ConfigRow("rope_base",             ("rope_theta",),            float, 1000000.0),
    ConfigRow("rope_local_base",       ("rope_local_base_freq",),  float, 10000.0),
)  # fmt: skip
MIXTRAL_KEYS = (
    ConfigRow("kv_heads",   ("num_key_value_heads",), int,   8, nullable=True),
    ConfigRow("norm_eps",   ("rms_norm_eps",),        float, 1e-5),
    ConfigRow("rope_base",  ("rope_theta",),          float, 1000000.0),
    ConfigRow("experts",    ("num_local_experts",),   int,   8),
    ConfigRow("top_k",      ("num_experts_per_tok",), int,   2),
    ConfigRow("expert_ffn", ("intermediate_size",),   int),
)  # fmt: skip
GPT_OSS_KEYS = (
    *(replace(row, default=64, nullable=True) if row.ours == "head_dim" else row for row in SIZE_KEYS),
    ConfigRow("kv_heads",   ("num_key_value_heads",), int,   8, nullable=True),
    ConfigRow("bias",       ("attention_bias",),      bool,  True),
    ConfigRow("norm_eps",   ("rms_norm_eps",),        float, 1e-5),
    ConfigRow("rope_base",  ("rope_theta",),          float, 150000.0),
    ConfigRow("experts",    ("num_local_experts", "num_experts"), int, 128, synonyms=True),
    ConfigRow("top_k",      ("num_experts_per_tok",), int,   4),
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
QWEN3_NEXT_KEYS = (
    *(replace(row, default=256) if row.ours == "head_dim" else row for row in SIZE_KEYS if row.ours != "ffn"),
    ConfigRow("kv_heads",               ("num_key_value_heads",),             int,   2, nullable=True),
    ConfigRow("norm_eps",               ("rms_norm_eps",),                    float, 1e-6),
    ConfigRow("rope_base",              ("rope_theta",),                      float, 10000.0),
    ConfigRow("rope_share",             ("partial_rotary_factor",),           float, 0.25),
    ConfigRow("linear_num_key_heads",   ("linear_num_key_heads",),            int,   16),
    ConfigRow("linear_num_value_heads", ("linear_num_value_heads",),          int,   32),
    ConfigRow("linear_key_head_dim",    ("linear_key_head_dim",),             int,   128),
    ConfigRow("linear_value_head_dim",  ("linear_value_head_dim",),           int,   128),
    ConfigRow("linear_conv_kernel_dim", ("linear_conv_kernel_dim",),          int,   4),
    ConfigRow("experts",                ("num_experts", "num_local_experts"), int,   512, synonyms=True),
    ConfigRow("top_k",                  ("num_experts_per_tok",),             int,   10),
    ConfigRow("expert_ffn",             ("moe_intermediate_size",),           int,   512),
    ConfigRow("router.normalize",       ("norm_topk_prob",),                  bool,  True),
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
