"""Rule of muP: the weights and the optimizer whose rates it knows."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import is_made_by_transformers
from ...spec.changed_run import Change
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule


def mup_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """One table can't have the rates of both an embedding and a head; its rates are Adam's, for weights whose names say what they are."""
    mup, model, none = run.optim.mup, run.model, (("optim.mup", None),)
    if mup is None:
        return
    conflicts: tuple[tuple[bool, str, tuple[Change, ...]], ...] = (
        (model.tied, "model.tied=true: the embedding and the head have other rates", ((("model.tied", False),), none)),
        (run.optim.name != "adamw", f"optim.name={run.optim.name}: its rates are those of Adam", ((("optim.name", "adamw"),), none)),
        (is_made_by_transformers(model), f"model.family={model.family}: it goes by the names of our own weights", (none,)),
        (model.lora.rank > 0, f"model.lora.rank={model.lora.rank}: LoRA's factors are not of the model's width", (none,)),
    )
    for broken, says, changes in conflicts:
        if broken:
            yield BrokenRule("mup", f"optim.mup={mup} does not work with {says}", changes)
            return
