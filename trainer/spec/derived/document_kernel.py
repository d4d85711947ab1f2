"""How attention's kernel sees documents and windows: by their bounds, or by masks."""

from __future__ import annotations

from ..run import Device, Model, Run

MOST_HEAD_DIM = 256  # elements of a query, key or value that FlashAttention-2 takes


def has_document_kernel(run: Run) -> bool:
    """Return whether attention keeps documents apart in its kernel, by their bounds: on a CPU ours, on a GPU from compute capability 8
    FlashAttention-2, which takes half precision. Not with dropout, which a kernel could not key, nor with sinks, which have calls of their
    own."""
    if not run.data.documents or run.train.attention != "flash" or run.model.dropout or run.model.sinks:
        return False
    return run.cluster.device.kind == "cpu" or takes_flash_attention_2(run)


def takes_flash_attention_2(run: Run) -> bool:
    """Return whether FlashAttention-2 computes attention on a run's GPU: in half precision, of heads of at most 256 elements."""
    return run.train.precision != "fp32" and has_flash_attention_2(run.cluster.device) and widest_head(run.model) <= MOST_HEAD_DIM


def has_whole_windows(run: Run) -> bool:
    """Return whether attention keeps one result of a layer with a window: with sinks, inside documents by their bounds, and where ranks
    gather keys. Elsewhere it is computed in blocks, whose results are kept besides."""
    gathers_keys = run.parallel.cp > 1 and run.parallel.cp_comm == "all_gather"
    return run.model.sinks or gathers_keys or has_document_kernel(run)


def has_flash_attention_2(device: Device) -> bool:
    """Return whether a GPU runs FlashAttention-2: from compute capability 8 on, which is the first with bf16."""
    return "bf16" in device.peak


def widest_head(model: Model) -> int:
    """Return the elements of a head's query, key or value, the largest of them."""
    if model.family == "mla":
        return max((model.qk_nope_head_dim or 0) + (model.qk_rope_head_dim or 0), model.v_head_dim or 0)
    return model.head_dim or model.hidden // model.heads
