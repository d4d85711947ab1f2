"""Rules of hybrids, most of whose layers have linear attention: what their groups are, and what they do not have."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.hybrid.ops import LINEAR
from ...spec.read import value_text
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule
from .degrees import nearest_divisors

# Keys of other families, with the value that switches each off
NONE_OF = {
    "bias": False,
    "qkv_bias": False,
    "sinks": False,
    "expert_bias": False,
    "window": None,
    "dense_layers": 0,
    "lora.rank": 0,
    "mtp.layers": 0,
}


def hybrid_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Layers are whole groups, and value heads are shared out over key heads; some parts of other families have no form here."""
    model = run.model
    if model.family != "hybrid":
        return
    group, keys, values = (getattr(model, key) for key in LINEAR[:3])
    if group is not None and model.layers % group:
        says = f"model.layers={model.layers} are no whole groups of model.full_attention_interval={group}"
        up = model.layers + group - model.layers % group
        changes = nearest_divisors("model.full_attention_interval", group, model.layers)
        yield BrokenRule("groups", says, ((("model.layers", up),), *changes))
    if keys is not None and values is not None and values % keys:
        says = f"model.linear_num_key_heads={keys} does not divide model.linear_num_value_heads={values}"
        yield BrokenRule("linear_heads", says, nearest_divisors("model.linear_num_key_heads", keys, values))
    for name, off in NONE_OF.items():
        section, _, key = name.rpartition(".")
        if (value := getattr(getattr(model, section) if section else model, key)) and value != off:
            yield BrokenRule("hybrid", f"model.{name}={value_text(value)}: family hybrid has none", (((f"model.{name}", off),),))
    if not model.shared_experts:
        says = "model.shared_experts=0: a layer of family hybrid has a shared expert"
        yield BrokenRule("hybrid", says, ((("model.shared_experts", 1),),))
    if run.optim.mup is not None:
        says = f"optim.mup={run.optim.mup}: the rates of linear attention are not known to it"
        yield BrokenRule("hybrid", says, ((("optim.mup", None),),))
    if run.train.precision == "fp8":
        yield BrokenRule("hybrid", "train.precision=fp8: family hybrid has none", ((("train.precision", "bf16"),),))
    if run.data.has_prompts:
        says = f"data={run.data.name}: linear attention of family hybrid crosses the boundaries of examples"
        yield BrokenRule("documents", says, fix="train a model of another family: `distrain ls model` lists them")
    elif run.data.documents:
        says = "data.documents=true: linear attention of family hybrid crosses document boundaries"
        yield BrokenRule("documents", says, ((("data.documents", False),),))


def hybrid_layout_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A state follows a sequence from its first token to its last, on one rank."""
    if run.model.family == "hybrid" and parallel.cp > 1:
        again = () if parallel.dp == "auto" else (("parallel.dp", "auto"),)
        says = f"parallel.cp={parallel.cp}: linear attention of family hybrid needs whole sequences"
        yield BrokenRule("hybrid", says, ((("parallel.cp", 1), *again),))
