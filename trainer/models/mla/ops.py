"""DeepSeek-V2 and V3: a mixture of experts whose attention has latent queries, keys and values (MLA, arXiv:2412.19437 section 2.1.1).

Every layer is counted as a mixture, also V3's first three, which have a dense feed-forward of as many FLOPs.
"""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.op_table import Dims, Op, OpTable, Product, Tensor, Weight
from ..ops.shared_ops import STREAM, TOKENS, linear, mixture_table

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
    return mixture_table(model, train, _attention(has_query_latent=query_latent > 0), sizes)


def _attention(*, has_query_latent: bool) -> tuple[Op, ...]:
    """Queries, keys and values from their latents, the core, and the output product; keys' positions are of one head for all. Without a
    latent of their own queries come from the stream, as in V2-Lite."""
    query, value = Tensor(TOKENS + MLA_QUERY), Tensor(TOKENS + VALUE)
    latents = (("query_latent",), ("key_latent",), ("rope_dim",))
    query_latent, key_latent = Tensor((*TOKENS, "query_latent")), Tensor((*TOKENS, "key_latent"))
    down = tuple((f".{dims[0]}", dims) for dims in latents if has_query_latent or dims != ("query_latent",))
    queries = (
        _latent_norm("attention.query_latent_norm", query_latent),
        linear("attention.query", ("query_latent",), (("", MLA_QUERY),), bias=False, saves=(query_latent,)),
    )
    # Its input is saved by the product beside it.
    plain = (linear("attention.query", ("hidden",), (("", MLA_QUERY),), bias=False, saves=()),)
    core = Product(
        rows=("seq",),
        inner=("mean_dim",),
        outers=(("keys",), ("keys",)),
        groups=("batch", "heads"),
        computed=0.5,
        backward=2.5,
        fused=True,
    )
    return (
        linear("attention.down", ("hidden",), down, bias=False, saves=(STREAM,)),
        *(queries if has_query_latent else plain),
        _latent_norm("attention.key_latent_norm", key_latent),
        linear("attention.key_value", ("key_latent",), ((".key", MLA_KEY), (".value", VALUE)), bias=False, saves=(key_latent,)),
        Op(name="attention.rope", moves=(query, query, query, query), saves_megatron=(query, query, value)),
        Op(name="attention.core", product=core, saves_megatron=(Tensor(("batch", "heads", "seq"), 4),), core=True),
        linear("attention.out", VALUE, (("", ("hidden",)),), bias=False, saves=(value,)),
    )


def _latent_norm(name: str, latent: Tensor) -> Op:
    return Op(name=name, weights=(Weight(f"{name}.weight", (latent.dims[-1],)),), moves=(latent, latent), saves_megatron=(latent,))
