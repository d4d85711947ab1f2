"""The model families: one row each, with every fact that the planner, the trainer and the exporter need to know about a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..spec.problem import Problem, Unreadable, suggest_name
from ..spec.run import Model, Run, Train
from .bert.ops import table as bert
from .gpt.ops import table as gpt
from .hf.ops import table as hf
from .hybrid.ops import LINEAR
from .hybrid.ops import table as hybrid
from .llama.ops import table as llama
from .mla.ops import LATENT
from .mla.ops import table as mla
from .moe.ops import table as moe
from .ops.document_shares import with_document_shares
from .ops.document_starts import with_document_starts
from .ops.fp8 import with_fp8
from .ops.fused_attention_saves import with_fused_attention_saves
from .ops.head_exchange import with_head_exchange
from .ops.lora import with_lora
from .ops.loss_chunks import with_loss_chunks
from .ops.multi_token_prediction import with_further_tokens
from .ops.op_table import OpTable
from .ops.preferences import with_preferences


@dataclass(frozen=True, kw_only=True)
class Family:
    """The facts about one family.

    - `table` makes its op table, from which it is planned.
    - `defaults` are the keys of `model` that a recipe may leave out.
    - `needs` are the keys of `model`, by default None, that it can't do without.
    - `axes` are the mesh axes, besides dp, that split its op table and its module.
    - `module` is its torch half, "package.module:name", imported when a rank builds the model; None: it can be planned, not trained.
      It names a class that is called as trainer/layers/transformer/transformer.py's `Transformer`.
    - `made_by_transformers`: the `module` is instead a function (run, device, dtype, seed) that has transformers make the model of
      `model.hf`. Such a model has its own initial weights and names, and no keyed dropout, documents or recomputation.
    - `states_saved`: its ops state what its module saves for backward (`Op.saves_torch`), so that it is counted on a CPU.
    - `model_types` are Hugging Face's, whose config.json and weights are read as this family and written from it.
    """

    table: Callable[[Model, Train], OpTable]
    axes: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    module: str | None = None
    made_by_transformers: bool = False
    states_saved: bool = False
    model_types: tuple[str, ...] = ()

    @property
    def has_experts(self) -> bool:
        """Whether its layers have experts, which `ep` splits."""
        return "ep" in self.axes


DENSE = ("tp", "pp", "cp")
LLAMA_DEFAULTS = {"norm": "rmsnorm", "act": "swiglu", "positions": "rope", "bias": False, "tied": False}  # arXiv:2302.13971

FAMILIES: dict[str, Family] = {
    "bert": Family(
        table=bert,
        axes=DENSE,
        defaults={"norm": "layernorm", "act": "gelu", "positions": "learned", "bias": True, "tied": True},  # arXiv:1810.04805
    ),
    "gpt": Family(
        table=gpt,
        axes=DENSE,
        defaults={"norm": "layernorm", "act": "gelu_tanh", "positions": "learned", "bias": True, "tied": True},  # GPT-2
        module="distrain.trainer.layers.transformer.transformer:Transformer",
        states_saved=True,
        model_types=("gpt2",),
    ),
    "hf": Family(  # every other causal language model of transformers; its config.json states all of its keys
        table=hf,
        axes=(),
        module="distrain.trainer.models.hf.module:build_causal_lm",
        made_by_transformers=True,
        states_saved=True,
    ),
    "hybrid": Family(  # Qwen3-Next: arXiv:2412.06464, and Hugging Face Qwen/Qwen3-Next-80B-A3B-Instruct
        table=hybrid,
        needs=LINEAR,
        axes=(*DENSE, "ep"),
        defaults=LLAMA_DEFAULTS | {"norm": "rmsnorm1p", "qk_norm": True},
        module="distrain.trainer.models.hybrid.module:HybridTransformer",
        states_saved=True,
        model_types=("qwen3_next",),
    ),
    "llama": Family(
        table=llama,
        axes=DENSE,
        defaults=LLAMA_DEFAULTS,
        module="distrain.trainer.layers.transformer.transformer:Transformer",
        states_saved=True,
        model_types=("llama", "mistral", "ministral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma3_text"),
    ),
    "mla": Family(  # DeepSeek-V2 and V3: arXiv:2405.04434, 2412.19437; Kimi K2: 2507.20534
        table=mla,
        needs=LATENT,
        axes=(*DENSE, "ep"),
        defaults=LLAMA_DEFAULTS,
        module="distrain.trainer.models.mla.module:LatentTransformer",
        states_saved=True,
        model_types=("deepseek_v2", "deepseek_v3"),
    ),
    "moe": Family(  # Mixtral: arXiv:2401.04088; Qwen3-MoE: arXiv:2505.09388; GLM-4.5: arXiv:2508.06471; gpt-oss: 2508.10925
        table=moe,
        axes=(*DENSE, "ep"),
        defaults=LLAMA_DEFAULTS,
        module="distrain.trainer.models.moe.module:MoETransformer",
        states_saved=True,
        model_types=("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"),
    ),
}


def family_of(model: Model) -> Family:
    """Return the row of a model's family; raises Unreadable where there is none."""
    if model.family not in FAMILIES:
        raise Unreadable(
            [Problem(rule="name", says=f"model.family={model.family} is not known", mend=suggest_name(model.family, FAMILIES))]
        )
    return FAMILIES[model.family]


def is_made_by_transformers(model: Model) -> bool:
    """Whether a model's family is made by transformers; False for an unknown family."""
    return model.family in FAMILIES and FAMILIES[model.family].made_by_transformers


def has_experts(model: Model) -> bool:
    """Whether a model's family has experts; False for an unknown family."""
    return model.family in FAMILIES and FAMILIES[model.family].has_experts


def op_table(run: Run) -> OpTable:
    """Return the op table of a run's model."""
    table = with_fused_attention_saves(family_of(run.model).table(run.model, run.train), run)
    table = with_document_starts(with_document_shares(table, run), run)
    table = with_lora(with_fp8(table, run), run)
    table = with_preferences(with_head_exchange(table, run), run)
    return with_further_tokens(with_loss_chunks(table, run), run)
