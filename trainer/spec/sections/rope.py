"""How rotary positions are scaled, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..numbers.bounded import AtLeast1, Count, NotNegative, Positive

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KEYS: dict[str, tuple[str, ...]] = {  # the keys that each type reads
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How the rotary frequencies are scaled for sequences longer than those of the first training; the names are transformers'."""

    type: RopeType = "default"
    factor: AtLeast1 = 1.0
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: bool = True

    @property
    def values(self) -> dict[str, object]:
        """The type, and the keys that it reads."""
        return {"type": self.type, **{key: getattr(self, key) for key in ROPE_KEYS[self.type]}}
