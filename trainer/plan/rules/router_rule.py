"""Rule of a mixture's router: groups of equal size, with enough experts for a choice from some of them."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import has_experts
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule
from .degrees import nearest_divisors


def router_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A token chooses its experts from some groups, which have as many."""
    model, router = run.model, run.model.router
    if not has_experts(model) or not 1 <= model.top_k <= model.experts or router.groups == 1:
        return
    if model.experts % router.groups:
        says = f"model.router.groups={router.groups} does not divide model.experts={model.experts}"
        yield BrokenRule("router", says, nearest_divisors("model.router.groups", router.groups, model.experts))
        return
    size = model.experts // router.groups
    least = -(-model.top_k // size)
    if router.top_groups > router.groups:
        says = f"model.router.top_groups={router.top_groups} is more than model.router.groups={router.groups}"
        yield BrokenRule("router", says, ((("model.router.top_groups", router.groups),),))
    elif router.top_groups < least:
        says = f"model.router.top_groups={router.top_groups} groups of {size} have fewer experts than model.top_k={model.top_k}"
        yield BrokenRule("router", says, ((("model.router.top_groups", least),),))
    elif router.bias and size < 2:
        says = f"model.router.bias=true adds up a group's two largest scores, and model.router.groups={router.groups} leave one expert each"
        yield BrokenRule("router", says, ((("model.router.groups", 1),), (("model.router.bias", False),)))
