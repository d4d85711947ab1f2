"""Llama, Mistral, Qwen2, Qwen3, OLMo 2 and 3 and Gemma 3: RMSNorm, rotary positions, grouped key and value heads, a gated feed-forward."""

from __future__ import annotations

from ..gpt.ops import table

__all__ = ["table"]
