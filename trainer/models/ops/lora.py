"""Low-rank adaptation (arXiv:2106.09685) as a change of an op table: every weight is frozen, and each target gets two trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...spec.run import Model, Run
from ...spec.sections.lora import Lora
from .op_table import Dims, Op, OpTable, Product, Tensor, Weight
from .shared_ops import MASK, QUERY, TOKENS, fused_core_result, has_fused_core, linear

# Ops whose input another op of the layer saves, which is frozen
INPUT_SAVED_BY_ROUTER, ROWS_SAVED_BY_DISPATCH = ("shared", "shared_gate"), "experts"
LATENTS = {"query_down", "key_down", "rope_key"}  # products of the same input as queries without a latent of their own


def with_lora(table: OpTable, run: Run) -> OpTable:
    """Return a table whose weights are frozen, and in which A [inner, rank] and B [rank, outer] follow each target of `model.lora`, one of
    each for each expert."""
    if not run.model.lora.rank:
        return table
    return table.replace_ops(lambda op: _layer_ops(op, run), ends=lambda op: _frozen_op(op, run.model, is_target=False))


def without_lora(run: Run) -> Run:
    """Return the run whose model has the same weights without A and B."""
    return replace(run, model=replace(run.model, lora=Lora()))


def _layer_ops(op: Op, run: Run) -> Iterator[Op]:
    """Yield a layer's op, frozen, and the products of A and of B for each of its weights that is a target."""
    product, model = op.product, run.model
    weights = [
        each for each in op.weights if product and each.name.endswith(".weight") and model.layer_word(each.name) in model.lora_layers
    ]
    drops = model.lora.dropout > 0
    yield _core_that_saves_its_result(op, run) if op.core else _frozen_op(op, model, is_target=bool(weights) and not drops)
    shares = _is_query_of_shared_input(op, model) or _is_gate_of_shared_input(op, model)
    for weight in weights:
        assert product is not None
        a, b = _added_ops(weight, product)
        if drops:
            yield from (_dropout_op(a, product), replace(a, saves_megatron=(own := _input_of(product),), saves_torch=(own,)), b)
        else:
            yield from (replace(a, shares_input=shares or weight is not weights[0]), b)


def _input_of(product: Product) -> Tensor:
    return Tensor(product.rows + product.inner)


def _dropout_op(a: Op, product: Product) -> Op:
    """Return the dropout of A's input: it saves a mask, and A what is left of its input, which no other product has."""
    whole = _input_of(product)
    mask = replace(whole, width=1)
    moves = (whole, whole, mask)
    return Op(name=a.name.replace(".lora_a", ".lora_dropout"), moves=moves, saves_megatron=(mask,), saves_torch=(mask,), eager_passes=1.5)


def _added_ops(weight: Weight, product: Product) -> tuple[Op, Op]:
    """Return the products of A and of B beside that of a weight. Every rank of the tensor axis has all rows of experts, and, of an A whose
    B is split, or of a B whose A is, the part of the gradient that its own columns or rows make."""
    name, groups, inner = weight.name.removesuffix(".weight"), product.groups, product.inner
    outer: Dims = weight.dims[len(groups + inner) :]
    rows = tuple("tokens" if dim == "seq" else dim for dim in product.rows) if groups else product.rows
    a = linear(f"{name}.lora_a", inner, (("", ("lora",)),), bias=False, rows=rows, groups=groups)
    b = linear(f"{name}.lora_b", ("lora",), (("", outer),), bias=False, saves=(Tensor((*rows, "lora")),), rows=rows, groups=groups)
    if groups:
        is_row = "expert_ffn" in inner
        whole = b if is_row else a
        summed = replace(whole, partial=(Tensor(whole.weights[0].dims),))
        a, b = (a, summed) if is_row else (summed, b)
    return a, b


def _core_that_saves_its_result(op: Op, run: Run) -> Op:
    """Return an op of attention's core. A fused kernel saves what it returns, which is the input of a frozen output product; of a window's
    blocks it is another tensor. The gate of a hybrid's attention saves it as its own input."""
    op = replace(op, weights=tuple(replace(each, frozen=True) for each in op.weights))
    is_saved_by_a = "out" in run.model.lora_layers and not run.model.lora.dropout
    if is_saved_by_a or run.model.family == "hybrid" or not (op.product and op.product.fused and has_fused_core(run.model, run.train)):
        return op
    saves = *op.saves_torch, fused_core_result(run)
    op = replace(op, saves_megatron=(*op.saves_megatron, Tensor(TOKENS + QUERY)), saves_torch=saves)
    return replace(op, saves_padded=())  # which is beside the input that an output product saves


def _frozen_op(op: Op, model: Model, *, is_target: bool) -> Op:
    """Return an op with frozen weights. Its backward needs no input, which is saved only for A, or as what a ReLU returned."""
    if op.name == "dispatch":  # the experts save the copied rows where A needs them
        return replace(op, saves_torch=op.saves_torch[1:])
    if not op.weights:
        return op
    weights = tuple(replace(each, frozen=True) for each in op.weights)
    op = replace(op, weights=weights, partial=())
    product = op.product
    if product is None:
        rows = Tensor(("tokens",), 8)  # of the position table; of dropout after a frozen embedding nothing is saved either
        return replace(op, saves_torch=tuple(each for each in op.saves_torch if each not in (rows, MASK)))
    if is_target:
        return _with_input(op, product, model)
    if op.name.endswith(".down") and _keeps_result(op, model):
        return op
    own = Tensor(product.rows + product.inner)
    has_own = op.saves_torch[:1] in ((own,), (replace(own, width=1),))  # in fp8 as bytes
    return replace(
        op,
        saves_megatron=op.saves_megatron[1:] if op.saves_megatron[:1] == (own,) else op.saves_megatron,
        saves_torch=op.saves_torch[1:] if has_own else op.saves_torch,
    )


def _is_query_of_shared_input(op: Op, model: Model) -> bool:
    """Whether an op is the product of queries without a latent of their own, and a target beside it has the same input."""
    return op.name == "attention.query" and bool(LATENTS & model.lora_layers) and not model.q_lora_rank


def _is_gate_of_shared_input(op: Op, model: Model) -> bool:
    """Whether an op is the gate of shared experts, and a target among these has the same input."""
    return op.name == "shared_gate" and bool({"gate", "up"} & model.lora_layers)


def _keeps_result(op: Op, model: Model) -> bool:
    """Whether the activation before a product saves its result alone: a ReLU without a gate."""
    return model.act == "relu" and "experts" not in op.product.groups if op.product else False


def _with_input(op: Op, product: Product, model: Model) -> Op:
    """Return a target's op, which saves its input also where an op that is frozen now would have saved it."""
    if op.name == ROWS_SAVED_BY_DISPATCH:
        rows = tuple("tokens" if dim == "seq" else dim for dim in product.rows)
        return replace(op, saves_torch=(Tensor((*rows, *product.inner)), *op.saves_torch))
    own = Tensor(product.rows + product.inner)
    if own in op.saves_torch or _is_query_of_shared_input(op, model) or _is_gate_of_shared_input(op, model) or op.in_fp8:
        return op
    assert op.name in (*INPUT_SAVED_BY_ROUTER, "attention.query"), op.name
    return replace(op, saves_megatron=(own, *op.saves_megatron), saves_torch=(own, *op.saves_torch))
