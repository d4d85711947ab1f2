"""Engines `zero` and `pipe`, which run on DeepSpeed."""
