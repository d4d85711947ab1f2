"""Qwen3-Next: a mixture of experts, most of whose layers have linear attention by the gated delta rule (arXiv:2412.06464), and the last of
each group gated attention."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Model, Train
from ..ops.mixture_ops import mixture
from ..ops.op_table import Dims, Op, OpTable, Product, Tensor, Weight
from ..ops.shared_ops import KEY, QUERY, STREAM, TOKENS, attention, decoder_table, layer_ops, linear
from .fla_kernels import BACKWARD, FORWARD, KERNELS, SOLVED, fla_product, held_by_fla, moved_by
from .linear_dims import LINEAR_KEY, LINEAR_VALUE, OWN_HEADS, OWN_KEY, OWN_VALUE, VALUE_HEADS, WHOLE

LINEAR = (  # keys of `model`, as config.json has them
    "full_attention_interval",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
CHUNK = 64  # tokens that trainer/layers/gated_delta.py computes at once; all, of a shorter sequence
MOVES = ("rule_forward", "rule_backward")
GATE_PASSES = 5.0  # counted in bf16: an element is read and written in float32 by each of the kernels of a gate
NORM_PASSES = 8.0
RULE_KERNELS, CHUNK_KERNELS = 72, 5  # counted: of a pass, and of each chunk
CONV_PASSES = 14.0  # counted: W operators in float32 and SiLU for the 4 bytes of one kernel
# What the kernels of convolutions and rule move on a GPU, forward and backward, as multiples of the values in float32: counted where a key
# head has two value heads, keys are as wide as values, and a chunk has half as many tokens. They are not compiled.
RULE_MOVES = (90, 373)


def table(model: Model, train: Train) -> OpTable:
    """The op table of a hybrid, whose layer is a group: linear layers and one with full attention. `full_attention_interval` 1 has no
    linear layer."""
    interval, keys, values, key_dim, value_dim, taps = (getattr(model, key) for key in LINEAR)
    sizes = {"linear_keys": keys, "values_per_key": values // keys, "linear_key_dim": key_dim, "linear_value_dim": value_dim}
    sizes |= dict(zip(MOVES, RULE_MOVES, strict=True))
    sizes |= {
        "core_linear_keys": keys,
        "conv_taps": taps,
        "solved": SOLVED,
        "chunk": min(CHUNK, train.seq),
        "chunks": -(-train.seq // CHUNK),
    }
    whole = decoder_table(model, train, (), (), sizes)
    experts = _gated_mixture(model)
    linear_layer = layer_ops(model, _linear_attention(model, sizes["chunks"], by_fla=train.linear_attention == "fla"), experts)
    full_layer = layer_ops(model, _gated_attention(model, train), experts)
    group = (*(linear_layer,) * (interval - 1), full_layer)
    return replace(whole, layer=tuple(_numbered(op, at) for at, ops in enumerate(group) for op in ops))


def _numbered(op: Op, at: int) -> Op:
    """An op of layer number `at` of a group, whose number begins the names of its weights."""

    def named(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(replace(each, name=f"{at}.{each.name}") for each in weights)

    return replace(op, weights=named(op.weights), constants=named(op.constants))


def _gated_attention(model: Model, train: Train) -> tuple[Op, ...]:
    """Attention whose result is multiplied by the sigmoid of a gate, which is a product of the layer's input beside queries, keys and
    values. The gate saves the result and the logits, the output product what it multiplies."""
    first, *others, out = attention(model, train)
    gate = Tensor(TOKENS + QUERY)
    query, key = (".query", QUERY), (".key", KEY)
    parts = linear("attention", ("hidden",), (query, key, (".value", KEY), (".gate", QUERY)), bias=False)
    first = replace(first, weights=parts.weights, product=parts.product)
    product = Op(
        name="attention.gate",
        moves=(gate, gate, gate),
        saves_megatron=(gate, gate),
        saves_torch=(gate, gate),
        eager_passes=GATE_PASSES,
    )
    return (first, *others, product, out)


def _linear_attention(model: Model, chunks: int, *, by_fla: bool) -> tuple[Op, ...]:
    """Linear attention: products, convolutions, the gated delta rule, a gated norm of each head, and the output product.

    Saved are what the convolutions read and the logits of beta and of the decay: backward computes the rest again. Ranks that share a
    sequence exchange these, and what is read, as Megatron-LM's do: tokens of all heads for all tokens of some.
    """
    value = Tensor(TOKENS + LINEAR_VALUE)
    own_key, own_value, own_logits = Tensor(WHOLE + OWN_KEY), Tensor(WHOLE + OWN_VALUE), Tensor(WHOLE + OWN_HEADS)
    inputs = (own_key, own_key, own_value, own_logits, own_logits)
    of_keys, of_values = ((".query", LINEAR_KEY), (".key", LINEAR_KEY)), ((".value", LINEAR_VALUE), (".gate", LINEAR_VALUE))
    parts = (*of_keys, *of_values, (".beta", VALUE_HEADS), (".decay", VALUE_HEADS))
    convs = (("query", LINEAR_KEY), ("key", LINEAR_KEY), ("value", LINEAR_VALUE))
    taps = tuple(Weight(f"attention.{part}_conv.weight", ("conv_taps", *dims), flat=True, rows=1) for part, dims in convs)
    rates = tuple(Weight(f"attention.{name}", VALUE_HEADS, flat=True) for name in ("a_log", "dt_bias"))
    scale = Weight("attention.gated_norm.weight", ("linear_value_dim",))
    moved = (moved_by(FORWARD, model), moved_by(FORWARD + BACKWARD, model))
    if not by_fla:
        moved = (Tensor((*WHOLE, *OWN_VALUE, MOVES[0]), 4),), (Tensor((*WHOLE, *OWN_VALUE, MOVES[1]), 4),)
    return (
        linear("attention", ("hidden",), parts, bias=False, saves=(STREAM,)),
        Op(
            name="attention.conv",
            weights=(*taps, *rates),
            moves=(*(own_key,) * 4, own_value, own_value),
            saves_megatron=inputs,
            saves_torch=inputs,
            head_exchanges=inputs,
            kernels=KERNELS if by_fla else 6,
            eager_passes=1.0 if by_fla else CONV_PASSES,
            own_kernels=moved,
        ),
        Op(
            name="attention.delta",
            product=fla_product(model) if by_fla else delta_rule(model),
            kernels=0 if by_fla else RULE_KERNELS + CHUNK_KERNELS * chunks,
            holds=held_by_fla() if by_fla else _held_by_rule(),
            head_exchanges=(own_value,),
        ),
        Op(
            name="attention.gated_norm",
            weights=(scale,),
            moves=(value, value, value),
            saves_megatron=(value, value),
            saves_torch=(value, value, Tensor(TOKENS + VALUE_HEADS, 4)),
            partial=(Tensor(scale.dims),),
            eager_passes=NORM_PASSES,
        ),
        linear("attention.out", LINEAR_VALUE, (("", ("hidden",)),), bias=False, saves=(value,)),
    )


def _held_by_rule() -> tuple[Tensor, ...]:
    """What the rule's backward holds at most, when it runs back through the chunks, in float32: of a key head queries and keys; of a value
    head 5 tensors as wide as values, 6 as keys, 4 as chunks, the state before each chunk and 4 of one. The gradients of what was read and
    of its gate wait."""
    rows: Dims = ("chunks", "chunk", "batch")
    keys = Tensor((*rows, *OWN_KEY), 4)
    values, old_keys, pairs = (Tensor((*rows, *OWN_HEADS, dim), 4) for dim in ("linear_value_dim", "linear_key_dim", "chunk"))
    states = Tensor(("chunks", "batch", *OWN_HEADS, "linear_key_dim", "linear_value_dim"), 4)
    state, waiting = Tensor(states.dims[1:], 4), Tensor(("tokens", "batch", *LINEAR_VALUE))
    return (keys,) * 2 + (values,) * 5 + (old_keys,) * 6 + (pairs,) * 4 + (states,) + (state,) * 4 + (waiting,) * 2


def delta_rule(model: Model) -> Product:
    """The products of the gated delta rule. A token counts those with the state of each value head, 6 D V FLOPs; in chunks of L tokens our
    modules compute more (trainer/layers/gated_delta.py), and in backward all of them again."""
    _, keys, values, key_dim, value_dim, _ = (getattr(model, key) for key in LINEAR)
    of_state, of_keys, of_values = key_dim * value_dim, CHUNK * key_dim, CHUNK * value_dim
    solved = of_keys + of_values  # two triangular systems
    forward = 6 * of_state + 2 * of_values + 4 * of_keys * keys / values + solved
    gradients = 10 * of_state + 4 * of_values + 10 * of_keys + solved  # beside forward again, without what queries read
    return Product(
        rows=WHOLE,
        inner=("linear_key_dim",),
        outers=(("linear_value_dim",),) * 3,
        groups=OWN_HEADS,
        computed=forward / (6 * of_state),
        backward=1 + gradients / forward,
        in_float32=True,
    )


def _gated_mixture(model: Model) -> tuple[Op, ...]:
    """Experts, of which the shared ones are multiplied by the sigmoid of one logit a token. The logit's input is the router's, which saves
    it."""
    logit = Tensor((*TOKENS, "one"))
    return (
        *mixture(model),
        replace(linear("shared_gate", ("hidden",), (("", ("one",)),), bias=False), shares_input=True),
        Op(
            name="shared_gate.sum",
            moves=(STREAM, STREAM, STREAM, logit),
            saves_megatron=(STREAM, logit),
            saves_torch=(STREAM, logit),
            eager_passes=GATE_PASSES,
        ),
    )
