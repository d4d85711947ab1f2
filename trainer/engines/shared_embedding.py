"""The embedding of a model whose last part uses it too: as its head, or to predict further tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from ..spec.run import Run


def share_embedding(first: nn.Module, last: nn.Module) -> None:
    """Where one rank holds both ends of such a model in two parts, make the last use the embedding's own parameter."""
    if first.first and last.last:
        last.embedding.weight = first.embedding.weight  # type: ignore[union-attr]
        if last.head.tied:  # type: ignore[union-attr]
            last.head.weight = first.embedding.weight  # type: ignore[union-attr]


def further_uses(run: Run, part: Any) -> Counter[nn.Parameter]:
    """Return how many gradients a micro-batch gives each weight of a part beyond one, where gradients of products are deferred, each apart:
    those of the head's product for further tokens, and of a tied weight that of their embeddings."""
    modules, head = run.model.mtp.layers, getattr(part, "head", None)
    if not modules or head is None:
        return Counter()
    products = modules if run.train.loss_chunks == 1 else 0  # a head in chunks takes its gradients in backward
    return Counter({head.weight: products + (head.tied and run.train.loss_chunks == 1)})
