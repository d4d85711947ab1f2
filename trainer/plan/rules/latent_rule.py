"""Rule of latent attention: what its layers do not have."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.read import value_text
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule

# Keys of other families, with the value that switches each off
NONE_OF = {"bias": False, "qkv_bias": False, "qk_norm": False, "sinks": False, "rope_local_base": None, "query_pre_attn_scalar": None}


def latent_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Every head has a key and a value of its own, made from one latent; products have no biases, and only latents are normed."""
    model = run.model
    if model.family != "mla":
        return
    if model.kv_heads not in (None, model.heads):
        says = f"model.kv_heads={model.kv_heads}: family mla has a key and a value for each of model.heads={model.heads}"
        yield BrokenRule("kv_heads", says, ((("model.kv_heads", None),),))
    for key, off in NONE_OF.items():
        if (value := getattr(model, key)) and value != off:
            yield BrokenRule("latent", f"model.{key}={value_text(value)}: family mla has none", (((f"model.{key}", off),),))
    if model.norm == "rmsnorm1p":
        yield BrokenRule("latent", "model.norm=rmsnorm1p: family mla has no scale of 1 + weight", ((("model.norm", "rmsnorm"),),))
