"""Whether attention keeps documents apart in its kernel, by their bounds, or by a mask of every query and key."""

from __future__ import annotations

from ..run import Device, Model, Run

MOST_HEAD_DIM = 256  # elements of a query, key or value that FlashAttention-2 takes


def has_document_kernel(run: Run) -> bool:
    """Return whether attention keeps documents apart in its kernel, by their bounds: on a CPU ours, on a GPU from compute capability 8
    FlashAttention-2, which takes half precision. Not with dropout, which a kernel could not key, nor with sinks, which have calls of their
    own."""
    device = run.cluster.device
    if not run.data.documents or run.train.attention != "flash" or run.model.dropout or run.model.sinks:
        return False
    takes_heads = run.train.precision != "fp32" and has_flash_attention_2(device) and widest_head(run.model) <= MOST_HEAD_DIM
    return device.kind == "cpu" or takes_heads


def has_flash_attention_2(device: Device) -> bool:
    """Return whether a GPU runs FlashAttention-2: from compute capability 8 on, which is the first with bf16."""
    return "bf16" in device.peak


def widest_head(model: Model) -> int:
    """Return the elements of a head's query, key or value, the largest of them."""
    if model.family == "mla":
        return max((model.qk_nope_head_dim or 0) + (model.qk_rope_head_dim or 0), model.v_head_dim or 0)
    return model.head_dim or model.hidden // model.heads
