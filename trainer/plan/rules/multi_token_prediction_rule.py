"""Rule of multi-token prediction: which models have modules for further tokens, and that some label is that far on."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import FAMILIES, is_made_by_transformers
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule

NONE = (("model.mtp.layers", 0),)


def further_tokens_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Modules are built of our own causal layers, which are all alike."""
    model, many = run.model, run.model.mtp.layers
    if not many or model.family not in FAMILIES:
        return
    if is_made_by_transformers(model) or FAMILIES[model.family].module is None:
        says = f"model.mtp.layers={many} does not apply to family {model.family}: its modules are made of our own causal layers"
        yield BrokenRule("mtp", says, (NONE,))
    elif model.lora.rank:
        says = f"model.mtp.layers={many} does not go with model.lora.rank={model.lora.rank}, which freezes the embedding and the head"
        yield BrokenRule("mtp", says, (NONE, (("model.lora.rank", 0),)))
    elif 0 < model.windowed_layers < model.layers:
        says = f"model.mtp.layers={many} adds layers, and model.layer_types does not say whether they have the window"
        yield BrokenRule("mtp", says, (NONE, (("model.window", None),)))
    elif many >= run.train.seq:
        says = f"model.mtp.layers={many} predicts tokens beyond sequences of train.seq={run.train.seq}"
        yield BrokenRule("mtp", says, ((("model.mtp.layers", run.train.seq - 1),), NONE))
