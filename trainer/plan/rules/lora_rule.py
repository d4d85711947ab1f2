"""Rule of LoRA: which models it trains, and that their layers have what it changes."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import is_made_by_transformers
from ...spec.run import Model, Parallel, Run
from ...spec.sections.lora import layers_of_target, target_of_layer
from .broken_rule import BrokenRule

NONE = (("model.lora.rank", 0),)


def lora_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Families with linear layers of their own have LoRA, on layers that they have; nothing else is trained beside it."""
    model, targets = run.model, run.model.lora.targets
    if not model.lora.rank:
        return
    if is_made_by_transformers(model):
        says = f"model.lora.rank={model.lora.rank} does not apply to family {model.family}: LoRA changes our own linear layers"
        yield BrokenRule("lora", says, (NONE,))
        return
    if model.lora.weights and not model.weights:
        says = f"model.lora.weights={model.lora.weights} adds to published weights, and model.weights names none"
        yield BrokenRule("lora", says, fix="set model.weights to the folder that the adapter was trained on")
    has = [each for each in targets or () if _is_there(each, model)]
    if (targets is not None and len(has) < len(targets)) or not model.lora_layers:
        lacks = [each for each in targets or () if each not in has]
        says = f"model.lora.targets=[{','.join(targets or ())}] names "
        says += f"{', '.join(lacks)}, which this model does not have" if lacks else "no layer, so nothing would be trained"
        yield BrokenRule("lora", says, ((("model.lora.targets", tuple(has) or ("query", "value")),), (("model.lora.targets", None),)))
    if model.router.steps_bias and model.experts:
        rate = model.router.bias_rate
        says = f"model.router.bias_rate={rate} does not go with model.lora.rank={model.lora.rank}, which freezes the router"
        yield BrokenRule("lora", says, ((("model.router.bias_rate", 0.0),),))
    if model.lora.dropout:
        yield from _dropout_rule(run)


def _dropout_rule(run: Run) -> Iterator[BrokenRule]:
    """Masks are keyed by tokens, which the rows of routed experts have left, and drawn anew where backward needs them."""
    model, none = run.model, (("model.lora.dropout", 0.0),)
    says = f"model.lora.dropout={model.lora.dropout:g} does not go with "
    if model.experts and (routed := sorted(model.lora_layers & {"gate", "up", "down"})):
        family, targets = model.family, model.lora.targets or ()
        others = {target_of_layer(each, family) for each in model.lora_layers - set(routed)}
        rest = tuple(sorted(each for each in targets or others if not {*layers_of_target(each, family)} & set(routed))) or (
            "query",
            "value",
        )
        says += f"{', '.join(routed)} of routed experts, whose rows are sent without their tokens (PEFT refuses it too)"
        yield BrokenRule("lora", says, ((("model.lora.targets", rest),), none))
    elif run.train.compile:
        yield BrokenRule("lora", f"{says}train.compile=true", ((("train.compile", False),), none))


def _is_there(target: str, model: Model) -> bool:
    """Whether a model has a linear layer by a target's name. The published name of an attention's projection says which attention it is."""
    is_latent, has_query_latent = model.family == "mla", model.family == "mla" and bool(model.q_lora_rank)
    match target:
        case "q_a_proj" | "q_b_proj":
            return has_query_latent
        case "kv_a_proj_with_mqa" | "kv_b_proj":
            return is_latent
        case "q_proj":
            return not has_query_latent
        case "k_proj" | "v_proj":
            return not is_latent
        case _:
            words = set(layers_of_target(target, model.family))
            return bool(words & model.linear_layers) if model.family == "hybrid" else words <= model.linear_layers
