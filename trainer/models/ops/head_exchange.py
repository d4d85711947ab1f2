"""Attention whose context ranks exchange tokens for heads (parallel.cp_comm=all_to_all), as a change of an op table."""

from __future__ import annotations

from dataclasses import replace

from ...spec.derived.document_kernel import has_whole_windows
from ...spec.run import Run
from .op_table import Dims, Op, OpTable, Product, Tensor
from .shared_ops import QUERY, TOKENS

# In attention's core a rank has all tokens of its share of the heads.
IN_CORE = {"seq": "core_tokens", "tokens": "core_tokens", "heads": "core_heads", "kv_heads": "core_kv_heads"}


def with_head_exchange(table: OpTable, run: Run) -> OpTable:
    """Return a table whose attention has queries, keys and values exchanged before its core, and values after it."""
    if run.parallel.cp_comm != "all_to_all":
        return table
    return table.replace_ops(lambda op: (_op_with_exchange(op, run),), ends=_with_whole_mask)


def _op_with_exchange(op: Op, run: Run) -> Op:
    """Return an op of a layer: where it makes the core's inputs, or is a part of the core, its tensors with heads are those of the core."""
    if op.gathers:
        return replace(
            op,
            gathers=(),
            head_exchanges=tuple(_in_core(each) for each in op.saves_megatron if _has_heads(each)),
            saves_megatron=_heads_in_core(op.saves_megatron),
            saves_torch=_heads_in_core(op.saves_torch),
        )
    if op.core:
        return replace(
            op,
            product=_product_in_core(op.product) if op.product else None,
            moves=tuple(map(_in_core, op.moves)),
            saves_megatron=tuple(map(_in_core, op.saves_megatron)),
            saves_torch=tuple(map(_in_core, op.saves_torch)),
            saves_exchanged=_values_of_kernel(op, run),
            in_fours=_dims_in_core(op.in_fours),
        )
    is_output = op.name == "attention.out" and op.product is not None and _has_heads(Tensor(op.product.inner))  # not of linear attention
    return replace(op, head_exchanges=(_in_core(Tensor(TOKENS + QUERY)),)) if is_output else op


def _values_of_kernel(op: Op, run: Run) -> tuple[Tensor, ...]:
    """Return the values as flash attention returned them. Without an exchange they are one tensor with the input of the output product; a
    window's blocks, and what our products in fp8 cast, are saved apart in any case; a frozen product saves no input."""
    model, values = run.model, Tensor(TOKENS + QUERY)
    is_fused = op.product is not None and op.product.fused and not model.dropout
    output_saves_no_input = model.lora.rank > 0 and ("out" not in model.lora_layers or model.lora.dropout > 0)
    if (
        not is_fused or values in op.saves_torch or (output_saves_no_input and model.family != "hybrid")
    ):  # a hybrid's gate saves it as its own input
        return ()
    return (Tensor(("core_tokens" if has_whole_windows(run) else "unwindowed_tokens", "batch", *_dims_in_core(QUERY))),)


def _product_in_core(product: Product) -> Product:
    return replace(product, rows=_dims_in_core(product.rows), groups=_dims_in_core(product.groups))


def _with_whole_mask(op: Op) -> Op:
    """Return the embedding's or head's op. The mask of documents has the rows of all tokens."""
    return replace(op, saves_torch=tuple(_in_core(each) if "keys" in each.dims else each for each in op.saves_torch))


def _heads_in_core(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(_in_core(each) if _has_heads(each) else each for each in tensors)


def _has_heads(tensor: Tensor) -> bool:
    return bool({"heads", "kv_heads"} & set(tensor.dims))


def _in_core(tensor: Tensor) -> Tensor:
    return replace(tensor, dims=_dims_in_core(tensor.dims))


def _dims_in_core(dims: Dims) -> Dims:
    return tuple(IN_CORE.get(dim, dim) for dim in dims)
