"""Rule of LoRA: which models it trains, and that their layers have what it changes."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import has_experts, is_made_by_transformers
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule

NONE = (("model.lora.rank", 0),)


def lora_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Families with dense layers of their own have LoRA, on layers that they have."""
    model, targets = run.model, run.model.lora.targets
    if not model.lora.rank:
        return
    if is_made_by_transformers(model) or has_experts(model):
        says = f"model.lora.rank={model.lora.rank} does not apply to family {model.family}: LoRA changes our own dense layers"
        yield BrokenRule("lora", says, (NONE,))
        return
    if not set(targets) - ({"gate"} if not model.has_gate else set()):
        says = f"model.lora.targets=[{','.join(targets)}] names no layer of this model, so nothing would be trained"
        yield BrokenRule("lora", says, ((("model.lora.targets", ("query", "value")),),))
