"""Llama, Mistral and Qwen2 as torch modules: the same transformer, whose parts its model names."""

from __future__ import annotations

from ..gpt.module import Transformer

__all__ = ["Transformer"]
