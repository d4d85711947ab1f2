"""Llama, Mistral and Qwen2 in torch: the same transformer as GPT, with the parts that `model.*` names."""

from __future__ import annotations

from ..gpt.module import Transformer

__all__ = ["Transformer"]
