"""Attention across ranks as an operator outside the graphs of compiled layers. To import this is to import torch's compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from .context_parallel import AttentionCore, ContextParallel, context_attention


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled_context_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, core: AttentionCore, cp: ContextParallel, *, recompute: bool
) -> Tensor:
    """As `context_attention`. In a graph, torch's compiler would keep the keys and values of all ranks from forward to backward."""
    return context_attention(query, key, value, mask, core, cp, recompute=recompute)
