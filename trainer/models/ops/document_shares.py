"""What attention computes inside documents of stated lengths, as a change of an op table."""

from __future__ import annotations

from dataclasses import replace

from ...spec.derived.document_kernel import has_document_kernel
from ...spec.derived.document_pairs import document_lengths, mean_documents, mean_pairs, seen_pairs
from ...spec.run import Run
from .op_table import Op, OpTable, Product
from .shared_ops import windowed_share


def with_document_shares(table: OpTable, run: Run) -> OpTable:
    """Return a table whose attention counts the pairs inside documents, where data.document_tokens states how long these are; a kernel that
    takes the bounds of documents computes no others."""
    lengths = document_lengths(run)
    if lengths is None:
        return table
    seq, windowed = run.train.seq, windowed_share(run.model, run.train.seq)
    whole, seen = mean_pairs(lengths, seq) / seq**2, mean_pairs(lengths, seq, run.model.window) / seq**2 if windowed else 0.0
    counted = (1 - windowed) * whole + windowed * seen
    fewer = seen * seq**2 / seen_pairs(seq, run.model.window) if windowed and run.model.window else 0.0  # in layers with a window
    has_kernel, sees_window = has_document_kernel(run), run.cluster.device.kind != "cpu"

    def inside(product: Product) -> Product:
        if not has_kernel:
            return replace(product, counted=counted)
        unwindowed = (1 - windowed) / 2
        computed = counted / 2 if sees_window else unwindowed * whole + (product.computed - unwindowed) * fewer
        documents = 0.0 if sees_window else mean_documents(lengths, seq)
        return replace(product, counted=counted, computed=computed, span=whole, documents=documents)

    def change(op: Op) -> tuple[Op]:
        return (replace(op, product=inside(op.product)) if op.core and op.product else op,)

    return table.replace_ops(change)
