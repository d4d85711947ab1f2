"""Rows that families share: attention, feed-forward, norms, embedding and head, with what is kept of each.

`kept` follows Korthikanti et al. 2022 (arXiv:2205.05198 section 4.1), whose count for one GPT layer is
s b h (34 + 5 a s / h) bytes at 2 bytes an element and 1 a mask. `saved` is what trainer/layers/transformer.py saves: the same count
without dropout is s b h (32 + 2 a s / h) + 8 s b there too, 8 s b being the norms' means and deviations.
"""

from __future__ import annotations

from dataclasses import replace

from ..spec.run import Model, Train
from .table import Dims, Op, Product, Tensor, Weight

TOKENS: Dims = ("seq", "batch")
STREAM = Tensor((*TOKENS, "hidden"))  # the residual stream
MASK = Tensor((*TOKENS, "hidden"), 1)
QUERY: Dims = ("heads", "head_dim")
KEY: Dims = ("kv_heads", "head_dim")
SCORES: Dims = ("batch", "heads", "seq", "keys")


def norm(name: str, model: Model) -> Op:
    """LayerNorm or RMSNorm of the residual stream; keeps its input, 2sbh. Ours save a mean and a deviation a token besides."""
    scale = (Weight(f"{name}.weight", ("hidden",)),)
    shift = (Weight(f"{name}.bias", ("hidden",)),) if model.norm == "layernorm" else ()
    # torch's LayerNorm is one kernel, in float32 under autocast; an RMSNorm is a cast, a square, a mean and two products.
    eager = 2.0 if model.norm == "layernorm" else 4.0
    each = (Tensor(TOKENS), Tensor(TOKENS)) if model.norm == "layernorm" else (Tensor(TOKENS, 4),)
    return Op(name=name, weights=scale + shift, moves=(STREAM, STREAM), kept=(STREAM,), saved=(STREAM, *each), eager=eager)


def linear(
    name: str,
    inner: Dims,
    outers: tuple[tuple[str, Dims], ...],
    *,
    bias: bool,
    kept: tuple[Tensor, ...] = (),
    rows: Dims = TOKENS,
    groups: Dims = (),
) -> Op:
    """A matrix product with weights; `outers` name each weight's output, all of one input."""
    held = tuple(Weight(f"{name}{part}.weight", (*groups, *inner, *outer)) for part, outer in outers)
    shifts = tuple(Weight(f"{name}{part}.bias", (*groups, *outer)) for part, outer in outers) if bias else ()
    product = Product(rows=rows, inner=inner, outers=tuple(outer for _, outer in outers), groups=groups)
    return Op(name=name, weights=held + shifts, product=product, kept=kept, saved=kept)


def attention(model: Model, train: Train, *, causal: bool = True) -> tuple[Op, ...]:
    """Query, key, value products, the core of attention, and the projection back: 11sbh + 5as2b."""
    query, key, value = Tensor(TOKENS + QUERY), Tensor(TOKENS + KEY), Tensor(TOKENS + KEY)
    bias = model.bias if model.qkv_bias is None else model.qkv_bias
    parts = ((".query", QUERY), (".key", KEY), (".value", KEY))
    turn = (Op(name="attention.rope", moves=(query, query, key, key), eager=4.0),) if model.positions == "rope" else ()
    return (
        linear("attention", ("hidden",), parts, bias=bias, kept=(STREAM, query, key, value)),
        *turn,
        *(_flash(model, causal) if train.attention == "flash" else _math(model)),
        linear("attention.out", QUERY, (("", ("hidden",)),), bias=model.bias, kept=(query,)),
    )


def _flash(model: Model, causal: bool) -> tuple[Op, ...]:
    """FlashAttention-2 (arXiv:2307.08691): keeps a float32 log-sum-exp; backward costs 2.5 forwards.

    Its dropout can't be keyed, so that ours takes the plain path where there is dropout and saves what that saves.
    """
    product = Product(
        rows=("seq",),
        inner=("head_dim",),
        outers=(("keys",), ("keys",)),
        groups=("batch", "heads"),
        computed=0.5 if causal else 1.0,
        backward=2.5,
        fused=True,
    )
    kept = (Tensor(("batch", "heads", "seq"), 4),)
    return (Op(name="attention.core", product=product, kept=kept, saved=_scores(model) if model.dropout else kept, core=True),)


def _scores(model: Model) -> tuple[Tensor, ...]:
    """What attention with scores in memory keeps of them: softmax's result, and of dropout the mask and its result."""
    scores, mask = Tensor(SCORES), Tensor(SCORES, 1)
    return (scores, mask, scores) if model.dropout else (scores,)


def _math(model: Model) -> tuple[Op, ...]:
    """Scores, softmax, dropout and values as separate kernels: keeps 2as2b, and 3as2b more with dropout."""
    scores, *dropped = kept = _scores(model)
    heads: Dims = ("batch", "heads")
    return (
        Op(name="attention.scores", product=Product(rows=("seq",), inner=("head_dim",), outers=(("keys",),), groups=heads), core=True),
        Op(
            name="attention.softmax",
            moves=(scores, scores, *((scores, *dropped) if dropped else ())),
            kept=kept,
            saved=kept,
            core=True,
            kernels=2 if dropped else 1,
            eager=2.0,  # scale and mask apart
        ),
        Op(name="attention.values", product=Product(rows=("seq",), inner=("keys",), outers=(("head_dim",),), groups=heads), core=True),
    )


def residual(name: str, model: Model) -> Op:
    """Dropout and the sum with the residual stream; keeps a mask, sbh, where there is dropout."""
    masks = (MASK,) if model.dropout else ()
    return Op(name=name, moves=(STREAM, STREAM, STREAM, *masks), kept=masks, saved=masks, eager=1.5 if masks else 1.0)


def feed_forward(model: Model, *, name: str = "mlp", dim: str = "ffn") -> tuple[Op, ...]:
    """The two (gated: three) products around an activation: 18sbh of the paper's 19 at ffn = 4h."""
    wide = Tensor((*TOKENS, dim))
    gated = model.act in ("swiglu", "geglu")
    parts: tuple[tuple[str, Dims], ...] = ((".gate", (dim,)), (".up", (dim,))) if gated else ((".up", (dim,)),)
    inputs = (wide,) * len(parts)
    # Autograd saves the activated gate too, and of a ReLU its result alone, which the next product saves.
    saved = () if model.act == "relu" else (*inputs, wide) if gated else inputs
    return (
        linear(name, ("hidden",), parts, bias=model.bias, kept=(STREAM,)),
        Op(name=f"{name}.act", moves=(*inputs, wide), kept=inputs, saved=saved, eager=1.7 if gated else 1.0),
        linear(f"{name}.down", (dim,), (("", ("hidden",)),), bias=model.bias, kept=(wide,)),
    )


def mixture(model: Model) -> tuple[Op, ...]:
    """Top-k routed experts, none dropped: each token travels to top_k experts and back (arXiv:2401.04088).

    Tokens and logits enter a tensor-parallel region whole, and their sum leaves it: of copies nothing travels there. Ours save
    what they route whole on every tensor rank, wherefore its sequence is called `tokens`.
    """
    rows: Dims = (*TOKENS, "top_k")
    sent, wide = Tensor((*rows, "hidden")), Tensor((*rows, "expert_ffn"))
    logits = Tensor((*TOKENS, "choices"), 4)
    copies: Dims = ("tokens", "batch", "top_k")
    held = Tensor((*copies, "hidden"))
    choice = (Tensor(copies, 8), Tensor(copies, 4))  # its number, its weight
    uneven = (Tensor(("tokens", "batch", "choices"), 4), Tensor(("batch", "choices"), 4)) if model.aux_loss else ()
    each = (Tensor(("experts",), 8),)  # where each expert's copies end
    parts: tuple[tuple[str, Dims], ...] = ((".gate", ("expert_ffn",)), (".up", ("expert_ffn",)))
    activated = (wide, wide) if model.act == "relu" else (wide, wide, wide)  # autograd saves of a ReLU its result alone
    router = Op(
        name="router",
        weights=(Weight("router.weight", ("hidden", "choices")),),
        product=Product(rows=TOKENS, inner=("hidden",), outers=(("choices",),)),
        kept=(STREAM, logits),
        saved=(STREAM, *choice, *uneven),
        enters=(logits,),
    )
    shared = feed_forward(model, name="shared", dim="shared_ffn") if model.shared_experts else ()
    return (
        router,
        Op(name="dispatch", moves=(STREAM, sent), saved=(held, Tensor(copies, 8), *each), exchanges=(sent,), enters=(STREAM,)),
        replace(linear("experts", ("hidden",), parts, bias=False, kept=(sent,), rows=rows, groups=("experts",)), saved=()),
        Op(name="experts.act", moves=(wide, wide, wide), kept=(wide, wide), saved=activated, eager=1.7),
        linear("experts.down", ("expert_ffn",), (("", ("hidden",)),), bias=False, kept=(wide,), rows=rows, groups=("experts",)),
        Op(name="combine", moves=(sent, STREAM), kept=(sent,), saved=(held,), exchanges=(sent,), reduces=(("expert_ffn", STREAM),)),
        *shared,
    )


def embedding(model: Model, *, types: bool = False) -> tuple[Op, ...]:
    """Token, position and segment tables; keeps the dropout mask, sbh. Ours save positions: the row looked up, or the angles."""
    tables = [Weight("embedding.weight", ("vocab", "hidden"))]
    if model.positions == "learned":
        tables.append(Weight("positions.weight", ("context", "hidden")))
    if types:
        tables.append(Weight("types.weight", ("types", "hidden")))
    masks = (MASK,) if model.dropout else ()
    positions = {"learned": (Tensor(("tokens",), 8),), "rope": (Tensor(("tokens", "head_dim"), 4),), "none": ()}[model.positions]
    return (
        Op(
            name="embedding",
            weights=tuple(tables),
            moves=(STREAM,) * (len(tables) + 1) + masks,
            kept=masks,
            saved=masks + positions,
            reduces=(("vocab", STREAM),),
        ),
    )


def head(model: Model, *, bias: bool = False) -> tuple[Op, ...]:
    """Logits and the cross entropy: 2sbv for the logits and 4sbv for its float32 softmax (fp32: 4 and 4). Ours save the first, and
    a float32 a token."""
    logits, softmax = Tensor((*TOKENS, "vocab")), Tensor((*TOKENS, "vocab"), 4)
    each = Tensor(TOKENS, 4)
    return (
        linear("head", ("hidden",), (("", ("vocab",)),), bias=bias, kept=(STREAM,)),
        Op(
            name="loss",
            moves=(logits, softmax, softmax),
            saved=(logits, Tensor(("tokens", "batch"), 4)),  # on every tensor rank, however the sequence is split elsewhere
            logits=(logits, softmax),
            reduces=(("vocab", each), ("vocab", each), ("vocab", each)),
            kernels=3,
            eager=1.5,
        ),
    )
