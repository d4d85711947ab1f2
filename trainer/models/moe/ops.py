"""Mixtral: a Llama whose feed-forward is a mixture of experts (arXiv:2401.04088)."""

from __future__ import annotations

from ...spec.run import Model, Train
from ..ops.mixture_ops import mixture_table
from ..ops.op_table import OpTable
from ..ops.shared_ops import attention


def table(model: Model, train: Train) -> OpTable:
    """The op table of a mixture of experts."""
    return mixture_table(model, train, attention(model, train))
