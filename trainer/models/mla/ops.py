"""DeepSeek-V2 and V3: a mixture of experts whose attention has latent queries, keys and values (MLA, arXiv:2412.19437 section 2.1.1)."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Model, Train
from ..ops.mixture_ops import mixture_table
from ..ops.op_table import Dims, Op, OpTable, Tensor, Weight
from ..ops.shared_ops import STREAM, TOKENS, attention_core, linear

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # keys of `model`, as config.json has them
MLA_QUERY: Dims = ("heads", "query_dim")  # of a head: elements without positions, then those with
MLA_KEY: Dims = ("heads", "key_dim")  # without positions
VALUE: Dims = ("heads", "head_dim")


def table(model: Model, train: Train) -> OpTable:
    """The op table of a mixture of experts with latent attention."""
    query_latent, key_latent, key_dim, rope_dim, value_dim = (getattr(model, key) for key in LATENT)
    query_dim = key_dim + rope_dim
    sizes = {"query_latent": query_latent, "key_latent": key_latent, "key_dim": key_dim, "rope_dim": rope_dim, "head_dim": value_dim}
    sizes |= {"query_dim": query_dim, "mean_dim": (query_dim + value_dim) // 2}  # mean: of products with keys and with values
    return mixture_table(model, train, _attention(model, train), sizes)


def _attention(model: Model, train: Train) -> tuple[Op, ...]:
    """Queries, keys and values from their latents, the core, and the output product; keys' positions are of one head for all, which ranks
    with heads of their own all need. Without a latent of their own queries come from the stream, as in V2-Lite."""
    query, value, turned = Tensor(TOKENS + MLA_QUERY), Tensor(TOKENS + VALUE), Tensor((*TOKENS, "rope_dim"))
    query_latent, key_latent = Tensor((*TOKENS, "query_latent")), Tensor((*TOKENS, "key_latent"))
    down: tuple[tuple[str, Dims], ...] = ((".key_down", ("key_latent",)), (".rope_key", ("rope_dim",)))
    queries: tuple[Op, ...]
    if model.q_lora_rank:
        down = ((".query_down", ("query_latent",)), *down)
        queries = (
            _latent_norm("attention.query_latent_norm", query_latent),
            linear("attention.query", ("query_latent",), (("", MLA_QUERY),), bias=False, saves=(query_latent,)),
        )
    else:  # its input is saved by the product beside it
        queries = (linear("attention.query", ("hidden",), (("", MLA_QUERY),), bias=False, saves=()),)
    up = linear("attention", ("key_latent",), ((".key", MLA_KEY), (".value", VALUE)), bias=False, saves=(key_latent,))
    return (
        linear("attention", ("hidden",), down, bias=False, saves=(STREAM,)),
        *queries,
        _latent_norm("attention.key_latent_norm", key_latent),
        replace(up, name="attention.key_value"),
        Op(
            name="attention.rope",
            moves=(query, query, query, query),
            saves_megatron=(query, query, value),
            saves_torch=(query, query, value),
            enters=(turned,),
            gathers=(query, value),
        ),
        *(replace(each, saves_padded=()) for each in attention_core(model, train, query_dim="query_dim", mean_dim="mean_dim")),
        linear("attention.out", VALUE, (("", ("hidden",)),), bias=False, saves=(value,)),
    )


def _latent_norm(name: str, latent: Tensor) -> Op:
    return Op(
        name=name,
        weights=(Weight(f"{name}.weight", (latent.dims[-1],)),),
        moves=(latent, latent),
        saves_megatron=(latent,),
        saves_torch=(latent, Tensor(TOKENS, 4)),
    )
