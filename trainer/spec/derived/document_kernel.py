"""Whether attention keeps documents apart in its kernel, by their bounds, or by a mask of every query and key."""

from __future__ import annotations

from ..run import Model, Run

MOST_HEAD_DIM = 256  # elements of a query, key or value that FlashAttention-2 takes


def takes_bounds(run: Run) -> bool:
    """Return whether a run's training steps give attention the bounds of documents, wherever its device has a kernel that takes them.

    Not where ranks gather the keys of a sequence, and not with dropout, which a kernel could not key.
    """
    whole = run.parallel.cp == 1 or run.parallel.cp_comm == "all_to_all"
    return run.data.documents and run.train.attention == "flash" and not run.model.dropout and whole


def has_document_kernel(run: Run) -> bool:
    """Return whether attention keeps documents apart in its kernel: on a CPU ours, on a GPU from compute capability 8 FlashAttention-2,
    which takes half precision."""
    device = run.cluster.device
    if not takes_bounds(run):
        return False
    return device.kind == "cpu" or (run.train.precision != "fp32" and "bf16" in device.peak and widest_head(run.model) <= MOST_HEAD_DIM)


def widest_head(model: Model) -> int:
    """Return the elements of a head's query, key or value, the largest of them."""
    if model.family == "mla":
        return max((model.qk_nope_head_dim or 0) + (model.qk_rope_head_dim or 0), model.v_head_dim or 0)
    return model.head_dim or model.hidden // model.heads
