"""What fused attention saves where documents are kept apart, or in float32 on GPUs, as a change of an op table."""

from __future__ import annotations

from dataclasses import replace

from ...spec.derived.document_kernel import has_document_kernel, has_whole_windows
from ...spec.run import Run
from .op_table import Op, OpTable, Tensor
from .shared_ops import KEY, QUERY, TOKENS, has_fused_core

MASK_OF_DOCUMENTS = Tensor(("batch", "tokens", "keys"))


def with_fused_attention_saves(table: OpTable, run: Run) -> OpTable:
    """Return a table in which fused attention saves what it saves of documents, and learned positions are each sequence's.

    A kernel that takes the bounds of documents saves no mask (trainer/layers/transformer/document_attention.py), and computes a layer with
    a window whole, as do ranks that gather keys (windowed_core.py). Elsewhere there is a mask of documents, once for all layers.
    Of CUDA's fused kernels the one that takes a mask, or float32, takes no grouped heads: keys and values are copied for each query head
    (trainer/layers/transformer/core_attention.py). So are those of a window's blocks, all of which but the first have a mask.
    """
    model = run.model
    has_flash, windowed = has_fused_core(model, run.train), model.effective_window(run.train.seq)
    if has_document_kernel(run):
        table = _with_whole_windows(table, run)
        return replace(table, embedding=tuple(_with_mask(op, fused=False) for op in table.embedding))
    if has_flash and windowed and not model.sinks and has_whole_windows(run):
        return _with_whole_windows(table, run)
    if has_flash and model.sinks and run.cluster.device.kind != "cpu":
        return replace(table, embedding=tuple(_without_window_mask(op) for op in table.embedding))
    if has_flash and windowed and run.cluster.device.kind != "cpu" and model.kv_heads not in (None, model.heads):
        table = table.replace_ops(lambda op: (_with_copied_blocks(op),))
    fused = has_flash and (model.sinks or not model.window)
    if run.data.documents:
        table = replace(table, embedding=tuple(_with_mask(op, fused=fused) for op in table.embedding))
    has_own_core = run.parallel.cp == 1 or run.parallel.cp_comm == "all_to_all"
    copied = run.cluster.device.kind != "cpu" and (run.data.documents or run.train.precision == "fp32") and has_own_core
    if fused and copied:
        table = table.replace_ops(lambda op: (_with_copies(op),))
    return table


def _with_whole_windows(table: OpTable, run: Run) -> OpTable:
    """Return the table of kernels that keep one result of a layer with a window, which on a GPU costs what its queries see, and no mask."""
    sees = run.cluster.device.kind != "cpu"

    def whole(op: Op) -> Op:
        if not op.core or op.product is None:
            return op
        computed = op.product.counted / 2 if sees else op.product.computed
        saves = tuple(each for each in op.saves_torch if "windowed_tokens" not in each.dims)
        return replace(op, product=replace(op.product, computed=computed), saves_torch=saves)

    table = replace(table, embedding=tuple(_without_window_mask(op) for op in table.embedding))
    return table.replace_ops(lambda op: (whole(op),))


def _without_window_mask(op: Op) -> Op:
    """Return the embedding's op without the mask of a window's block: with sinks attention has windows of its own
    (trainer/layers/transformer/attention_sinks.py)."""
    return replace(op, saves_torch=tuple(each for each in op.saves_torch if "window" not in each.dims))


def _with_mask(op: Op, *, fused: bool) -> Op:
    """Return the embedding's op with the mask [batch, tokens, keys]."""
    saves = [Tensor(("tokens", "batch"), 8) if each == Tensor(("tokens",), 8) else each for each in op.saves_torch]
    return replace(op, saves_torch=(*saves, *((MASK_OF_DOCUMENTS,) if fused else ())))


def _with_copied_blocks(op: Op) -> Op:
    """Return attention's core with the keys and values of masked blocks, for each query head."""
    copies = Tensor(("masked_keys", "batch", *QUERY))
    return replace(op, saves_torch=(*op.saves_torch, copies, copies)) if op.name == "attention.core" else op


def _with_copies(op: Op) -> Op:
    """Return an op that saves a copy of keys or values for each query head where it saved them."""
    grouped, copies = Tensor(TOKENS + KEY), Tensor(TOKENS + QUERY)
    is_input = op.name == "attention" and op.product is not None
    return replace(op, saves_torch=tuple(copies if each == grouped else each for each in op.saves_torch)) if is_input else op
