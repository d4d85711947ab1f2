"""Ops of a mixture of experts, with the activations that each saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...spec.run import Model, Train
from .op_table import Dims, Op, OpTable, Product, Tensor, Weight
from .shared_ops import CLAMPED_PASSES, STREAM, TOKENS, decoder_table, feed_forward, layer_ops, linear


def mixture(model: Model) -> tuple[Op, ...]:
    """Top-k routed experts, no token dropped: each token travels to top_k experts and back (arXiv:2401.04088).

    Tensor-parallel ranks need the tokens and logits whole, and add up the output; of the routed copies nothing travels between them.
    Every tensor rank of our modules saves the full routed copies, so their sequence dim is named `tokens`, which tensor parallelism
    does not split. What a rank's experts receive has the dim `ep_load`; what a rank sends of its own tokens has not.
    """
    rows: Dims = (*TOKENS, "top_k", "ep_load")
    sent, received = Tensor((*TOKENS, "top_k", "hidden")), Tensor((*rows, "hidden"))
    logits = Tensor((*TOKENS, "choices"), 4)
    copies: Dims = ("tokens", "batch", "top_k")
    returned_rows, received_rows = Tensor((*copies, "hidden")), Tensor((*copies, "ep_load", "hidden"))
    router = Op(
        name="router",
        weights=(Weight("router.weight", ("hidden", "choices")),),
        product=Product(rows=TOKENS, inner=("hidden",), outers=(("choices",),)),
        saves_megatron=(STREAM, logits),
        saves_torch=(STREAM, *_routing_saves(model, copies)),
        enters=(logits,),
        kernels=8 + _routing_kernels(model),  # the product, softmax, the choice, its weights, the counts of each expert
        constants=(Weight("router.bias", ("choices",), frozen=True),) if model.router.bias else (),
    )
    dispatch = Op(
        name="dispatch",
        moves=(STREAM, sent, received, received),  # sorted by rank for the exchange, and by expert after it
        kernels=4,
        saves_torch=(received_rows, Tensor(copies, 8), Tensor(("experts",), 8)),  # the last: the end of each expert's copies
        exchanges=(received,),
        enters=(STREAM,),
    )
    combine = Op(
        name="combine",
        moves=(received, received, sent, STREAM),
        kernels=4,
        saves_megatron=(sent,),
        saves_torch=(returned_rows,),
        exchanges=(received,),
        reduces=(("expert_ffn", STREAM),),
    )
    bias = Op(name="router.bias", weights=(Weight("router.logit_bias", ("choices",)),), moves=(logits, logits))
    shared = _shared_experts(model) if model.shared_experts else ()
    return router, *((bias,) if model.expert_bias else ()), dispatch, *_expert_ops(model, rows, received), combine, *shared


def _routing_saves(model: Model, copies: Dims) -> tuple[Tensor, ...]:
    """What our modules save of a choice (trainer/models/moe/routing.py): each copy's expert and weight, and what these are made from."""
    router = model.router
    choice, weight, of_token = Tensor(copies, 8), Tensor(copies, 4), Tensor(copies[:-1], 4)
    scores, share = Tensor((*copies[:-1], "choices"), 4), Tensor(("batch", "choices"), 4)
    has_sum = router.score == "sigmoid" and router.normalize
    before_scale = (weight,) if has_sum or (router.scale != 1 and not router.has_shared_scores) else ()
    sums = (of_token,) * (has_sum + (router.score == "sigmoid" and model.aux_loss > 0))
    balance = (scores, share) if model.aux_loss else (scores,) if router.has_shared_scores else ()
    logits = (scores,) if router.z_loss else ()
    return choice, weight, *before_scale, *sums, *balance, *logits


def _routing_kernels(model: Model) -> int:
    """The kernels of a choice beyond those of Mixtral's: of weights, of a bias, and of groups: their values, the best, the mask."""
    router = model.router
    weights = (router.scale != 1) + router.has_shared_scores + 2 * (router.score == "sigmoid" and router.normalize)
    return weights + (3 if router.bias else 0) + (6 if router.top_groups < router.groups else 0) + 3 * (router.z_loss > 0)


def _expert_ops(model: Model, rows: Dims, received: Tensor) -> tuple[Op, ...]:
    """The feed-forward of each expert over the copies that are sent to it."""
    wide = Tensor((*rows, "expert_ffn"))
    parts: tuple[tuple[str, Dims], ...] = ((".gate", ("expert_ffn",)), (".up", ("expert_ffn",)))
    # Of a ReLU autograd saves only the result, of a clamped gate our module saves its inputs.
    is_clamped, bias = model.act == "swiglu_clamped", model.expert_bias
    activated = (wide, wide) if model.act == "relu" or is_clamped else (wide, wide, wide)
    passes = CLAMPED_PASSES if is_clamped else 1.7
    return (
        replace(linear("experts", ("hidden",), parts, bias=bias, saves=(received,), rows=rows, groups=("experts",)), saves_torch=()),
        Op(name="experts.act", moves=(wide, wide, wide), saves_megatron=(wide, wide), saves_torch=activated, eager_passes=passes),
        linear("experts.down", ("expert_ffn",), (("", ("hidden",)),), bias=bias, saves=(wide,), rows=rows, groups=("experts",)),
    )


def _shared_experts(model: Model) -> tuple[Op, ...]:
    """The experts of all tokens. Their input is the router's, which saves it."""
    first, *others = feed_forward(model, name="shared", dim="shared_ffn")
    return replace(first, saves_megatron=(), saves_torch=()), *others


def mixture_table(model: Model, train: Train, attention: tuple[Op, ...], sizes: Mapping[str, int] | None = None) -> OpTable:
    """The op table of a model whose feed-forward is a mixture of experts, but for the first `model.dense_layers` layers."""
    table = decoder_table(model, train, attention, mixture(model), sizes)
    if not model.dense_layers:
        return table
    return replace(table, dense_layers=model.dense_layers, dense_layer=layer_ops(model, attention, feed_forward(model)))
