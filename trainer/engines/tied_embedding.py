"""A tied model's embedding and head on one rank."""

from __future__ import annotations

from torch import nn


def share_tied_embedding(first: nn.Module, last: nn.Module) -> None:
    """Where one rank holds both ends of a tied model in two parts, make the head use the embedding's own parameter."""
    if first.first and last.last:
        last.head.weight = last.embedding.weight = first.embedding.weight  # type: ignore[union-attr]
