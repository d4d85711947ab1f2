"""The rule of `data=preferences`: what else gives gradients would be of tokens, and not of pairs."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule


def preference_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The loss on preferences weighs each token by its pair: no further loss of tokens goes with it."""
    if not run.data.has_preferences:
        return
    if run.model.mtp.layers:
        says = f"model.mtp.layers={run.model.mtp.layers} does not go with data=preferences: modules would learn rejected answers too"
        yield BrokenRule("preferences", says, ((("model.mtp.layers", 0),),))
    if run.train.z_loss:
        says = f"train.z_loss={run.train.z_loss:g} does not go with data=preferences, whose loss is of pairs and not of tokens"
        yield BrokenRule("preferences", says, ((("train.z_loss", 0.0),),))
