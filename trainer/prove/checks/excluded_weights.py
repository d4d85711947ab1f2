"""Weights that no comparison of layouts reads: their gradient is zero in exact arithmetic, and Adam makes whole steps of its rounding."""

from __future__ import annotations

from ...models.families import is_made_by_transformers
from ...spec.run import Run

KEY_BIAS = r"(^|[._])(key|k_proj)\.bias$"  # of our models, and of most in transformers
FUSED_BIAS = r"(query_key_value|qkv|qkv_proj|c_attn|Wqkv)\.bias$"  # of transformers' models that fuse it with other biases


def zero_gradient_pattern(run: Run) -> str:
    """A regular expression for the names of such weights; "" if the model has none.

    A key bias adds the same number to all scores of a query, which softmax cancels, unless positions rotate the keys. Where they rotate a
    part of each key, the rest of its bias has no gradient, unless a norm of the whole key comes between.
    """
    if is_made_by_transformers(run.model):
        return f"{KEY_BIAS}|{FUSED_BIAS}"
    has_gradient = run.model.positions == "rope" and (run.model.rope_share == 1 or run.model.qk_norm)
    return "" if has_gradient else KEY_BIAS
