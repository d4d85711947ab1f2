"""DeepSeek-V2 and V3: a mixture of experts whose attention has latent queries, keys and values (MLA, arXiv:2412.19437 section 2.1.1).

Every layer is counted as a mixture, also V3's first three, which have a dense feed-forward of as many FLOPs. The latent sizes are V3's;
V2's are the same but for its smaller sizes.
"""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.op_table import Dims, Op, OpTable, Product, Tensor, Weight, logical_sizes
from ..ops.shared_ops import STREAM, TOKENS, linear, mixture, pre_norm_table

LATENT = {"query_latent": 1536, "key_latent": 512, "rope_dim": 64}  # arXiv:2412.19437 section 4.2
QUERY: Dims = ("heads", "query_dim")  # of a head: head_dim elements without positions, rope_dim with
VALUE: Dims = ("heads", "head_dim")


def table(model: Model, train: Train) -> OpTable:
    """The op table of a mixture of experts with latent attention."""
    head_dim = logical_sizes(model, train)["head_dim"]
    query_dim = head_dim + LATENT["rope_dim"]
    further = {**LATENT, "query_dim": query_dim, "mean_dim": (query_dim + head_dim) // 2}  # mean: of products with keys and with values
    return pre_norm_table(model, train, _attention(), mixture(model), further)


def _attention() -> tuple[Op, ...]:
    """Queries, keys and values from their latents, the core, and the output product; keys' positions are of one head for all."""
    query, value = Tensor(TOKENS + QUERY), Tensor(TOKENS + VALUE)
    latents = (("query_latent",), ("key_latent",), ("rope_dim",))
    query_latent, key_latent = Tensor((*TOKENS, "query_latent")), Tensor((*TOKENS, "key_latent"))
    down = tuple((f".{dims[0]}", dims) for dims in latents)
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
        _latent_norm("attention.query_latent_norm", query_latent),
        _latent_norm("attention.key_latent_norm", key_latent),
        linear("attention.query", ("query_latent",), (("", QUERY),), bias=False, saves=(query_latent,)),
        linear("attention.key_value", ("key_latent",), ((".key", VALUE), (".value", VALUE)), bias=False, saves=(key_latent,)),
        Op(name="attention.rope", moves=(query, query, query, query), saves_megatron=(query, query, value)),
        Op(name="attention.core", product=core, saves_megatron=(Tensor(("batch", "heads", "seq"), 4),), core=True),
        linear("attention.out", VALUE, (("", ("hidden",)),), bias=False, saves=(value,)),
    )


def _latent_norm(name: str, latent: Tensor) -> Op:
    return Op(name=name, weights=(Weight(f"{name}.weight", (latent.dims[-1],)),), moves=(latent, latent), saves_megatron=(latent,))
