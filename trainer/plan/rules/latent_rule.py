"""Rule of latent attention: what its layers do not have."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.read import value_text
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule


def latent_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Every head has a key and a value of its own, made from one latent; products have no biases, and only latents are normed."""
    model = run.model
    if model.family != "mla":
        return
    if model.kv_heads not in (None, model.heads):
        says = f"model.kv_heads={model.kv_heads}: family mla has a key and a value for each of model.heads={model.heads}"
        yield BrokenRule("kv_heads", says, ((("model.kv_heads", None),),))
    for key in ("bias", "qkv_bias", "qk_norm"):
        if value := getattr(model, key):
            yield BrokenRule("latent", f"model.{key}={value_text(value)}: family mla has none", (((f"model.{key}", False),),))
