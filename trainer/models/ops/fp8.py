"""Products of layers in 8-bit floats, as a change of an op table: what our modules save of them (trainer/layers/fp8.py)."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Run
from .op_table import Dims, Op, OpTable, Tensor, is_hidden_matrix
from .shared_ops import TOKENS, fused_core_result, has_fused_core


def with_fp8(table: OpTable, run: Run) -> OpTable:
    """Return a table in which the products of attention and feed-forwards save their inputs as bytes, and what else needs an input saves
    it itself: flash attention and a ReLU their results. Head, routers and experts compute in bf16."""
    if run.train.precision != "fp8":
        return table
    return table.replace_ops(lambda op: (_in_fp8(op) if _is_cast(op) else _saving_its_result(op, run),))


def _is_cast(op: Op) -> bool:
    return any(is_hidden_matrix(op, weight) and "experts" not in weight.dims for weight in op.weights)


def is_cast_output(outer: Dims) -> bool:
    """Whether a product that is computed in fp8 has this output of it in fp8: not one of a number for each head, as beta and decay are."""
    return outer[-1] != "values_per_key"


def _in_fp8(op: Op) -> Op:
    assert op.product is not None
    values = Tensor(TOKENS + op.product.inner)
    is_mixed = not all(map(is_cast_output, op.product.outers))  # other products save the input too
    others = op.saves_torch[1:] if op.saves_torch[:1] == (values,) and not is_mixed else op.saves_torch
    return replace(op, in_fp8=True, saves_torch=(replace(values, width=1), *others))


def _saving_its_result(op: Op, run: Run) -> Op:
    model = run.model
    if op.name == "shared_gate":  # shared experts hold its input as bytes
        return replace(op, shares_input=False)
    is_saved_by_gate = model.family == "hybrid"
    if op.name == "attention.core" and not is_saved_by_gate and has_fused_core(model, run.train):
        return replace(op, saves_torch=(*op.saves_torch, fused_core_result(run)))
    if model.act == "relu" and op.product is None and op.name.endswith(".act") and op.name != "experts.act":
        return replace(op, saves_torch=(*op.saves_torch, op.moves[-1]))
    return op
