"""Low-rank adaptation (arXiv:2106.09685) as a change of an op table: every weight is frozen, and each target gets two trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...spec.run import Model, Run, Train
from ...spec.sections.lora import Lora
from .op_table import Dims, Op, OpTable, Tensor, Weight
from .shared_ops import MASK, TOKENS, linear


def with_lora(table: OpTable, model: Model, train: Train) -> OpTable:
    """Return a table whose weights are frozen, and in which A [inner, rank] and B [rank, outer] follow each target of `model.lora`."""
    if not model.lora.rank:
        return table
    return table.replace_ops(lambda op: _layer_ops(op, model, train), ends=lambda op: _frozen_op(op, train, is_target=False))


def without_lora(run: Run) -> Run:
    """Return the run whose model has the same weights without A and B."""
    return replace(run, model=replace(run.model, lora=Lora()))


def _layer_ops(op: Op, model: Model, train: Train) -> Iterator[Op]:
    """Yield a layer's op, frozen, and the products of A and of B for each of its weights that is a target."""
    product = op.product
    weights = [each for each in op.weights if product and each.name.endswith(".weight") and _target(each) in model.lora.targets]
    yield _frozen_op(op, train, is_target=bool(weights))
    for weight in weights:
        assert product is not None
        name, inner = weight.name.removesuffix(".weight"), product.inner
        outer: Dims = weight.dims[len(inner) :]
        yield linear(f"{name}.lora_a", inner, (("", ("lora",)),), bias=False)
        yield linear(f"{name}.lora_b", ("lora",), (("", outer),), bias=False, saves=(Tensor((*TOKENS, "lora")),))


def _target(weight: Weight) -> str:
    """Return the last word of a weight's name before `.weight`: attention.query.weight is `query`."""
    return weight.name.removesuffix(".weight").rpartition(".")[2]


def _frozen_op(op: Op, train: Train, *, is_target: bool) -> Op:
    """Return an op with frozen weights. Its backward needs no input, which is saved only for A, or as what flash attention returned."""
    if not op.weights:
        return op
    weights = tuple(replace(each, frozen=True) for each in op.weights)
    op = replace(op, weights=weights, partial=())
    if op.product is None:
        rows = Tensor(("tokens",), 8)  # of the position table; of dropout after a frozen embedding nothing is saved either
        return replace(op, saves_torch=tuple(each for each in op.saves_torch if each not in (rows, MASK)))
    if is_target or (op.name == "attention.out" and train.attention == "flash"):
        return op
    return replace(op, saves_megatron=op.saves_megatron[1:], saves_torch=op.saves_torch[1:])
