"""Products of layers in 8-bit floats, as a change of an op table: what our modules save of them (trainer/layers/fp8.py)."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Run
from .op_table import Op, OpTable, Tensor
from .shared_ops import TOKENS


def with_fp8(table: OpTable, run: Run) -> OpTable:
    """Return a table in which the products of attention and feed-forwards save their inputs as bytes, and what else needs an input saves
    it itself: flash attention its result, a ReLU its own, a router the stream. Head, routers and experts compute in bf16."""
    if run.train.precision != "fp8":
        return table
    return table.replace_ops(lambda op: (_in_fp8(op) if is_cast(op) else _saving_its_result(op, run),))


def is_cast(op: Op) -> bool:
    """Return whether a layer's op is a product that is computed in 8-bit floats."""
    return op.product is not None and bool(op.weights) and "experts" not in op.product.groups and op.product.outers != (("choices",),)


def _in_fp8(op: Op) -> Op:
    assert op.product is not None
    values = Tensor(TOKENS + op.product.inner)
    others = op.saves_torch[1:] if op.saves_torch[:1] == (values,) else op.saves_torch
    return replace(op, in_fp8=True, saves_torch=(replace(values, width=1), *others))


def _saving_its_result(op: Op, run: Run) -> Op:
    has_flash = run.train.attention == "flash" and not run.model.dropout and not run.model.effective_window(run.train.seq)
    if op.name == "attention.core" and has_flash:
        return replace(op, saves_torch=(*op.saves_torch, Tensor((*TOKENS, "heads", "head_dim"))))
    if run.model.act == "relu" and op.product is None and op.name.endswith(".act") and op.name != "experts.act":
        return replace(op, saves_torch=(*op.saves_torch, op.moves[-1]))
    return op
