"""Dropout whose mask is the same in every layout."""

from __future__ import annotations

from torch import Tensor, nn

from .counter_rng import dropout, dropout_mask, hash64, numbers_from, splitmix64

# B batch, S sequence, A heads


class Dropout(nn.Module):
    """Dropout at one site of one layer (-1: before the first layer), keyed by each token's state; no states, no dropout."""

    def __init__(self, p: float, layer: int, site: str) -> None:
        super().__init__()
        self.p, self.address = p, hash64(layer, site)

    def is_active(self, states: Tensor | None) -> bool:
        return bool(self.p) and states is not None

    def forward(self, x: Tensor, states: Tensor | None, heads: range | None = None) -> Tensor:
        """Drop elements of x [B, S, H] by states [B, S]; of x [B, A, S, keys] each head, by its number in the whole layer, draws
        its own mask."""
        if states is None or not self.p:
            return x
        return dropout(x, self.p, self.row_states(states, heads))

    def mask(self, states: Tensor, heads: range, keys: int) -> Tensor:
        """Return which elements are dropped from these heads' rows of `keys` elements: bool [B, A, S, keys]."""
        return dropout_mask(self.row_states(states, heads), keys, self.p)

    def row_states(self, states: Tensor, heads: range | None = None) -> Tensor:
        """Return the state of each row: [B, S], or [B, A, S] with heads."""
        rows = splitmix64(states + self.address)
        if heads is None:
            return rows
        numbers = numbers_from(heads.start + 1, len(heads), states.device)[:, None]  # [A, 1]
        return splitmix64(rows[:, None] + numbers * self.address)
