"""Rules of hybrids, most of whose layers have linear attention: what their groups are, what they do not have, what kernels take."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.hybrid.ops import LINEAR
from ...spec.numbers.as_text import plural
from ...spec.read import value_text
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule
from .degrees import nearest_divisors

MOST_FLA_KEY = 256  # elements (fla/ops/common/chunk_delta_h.py of fla-core 0.6.0)

# Keys of other families, with the value that switches each off
NONE_OF = {
    "bias": False,
    "qkv_bias": False,
    "sinks": False,
    "expert_bias": False,
    "window": None,
    "dense_layers": 0,
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


def computes_by_fla(run: Run) -> bool:
    """Whether a run has linear attention, and package fla computes it."""
    return run.model.family == "hybrid" and run.model.layers_in_group > 1 and run.train.linear_attention == "fla"


def fla_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The kernels of package fla multiply float32 in TF32 on a GPU, and hold the state of a key of at most 256 elements."""
    model = run.model
    if not computes_by_fla(run):
        return
    apart = (("train.linear_attention", "torch"),)
    if run.train.precision == "fp32" and run.cluster.device.kind == "cuda":
        says = "train.linear_attention=fla multiplies train.precision=fp32 in TF32"
        yield BrokenRule("linear_attention", says, (apart, (("train.precision", "bf16"),)))
    if (width := model.linear_key_head_dim) is not None and width > MOST_FLA_KEY:
        says = f"train.linear_attention=fla takes no keys of {width} elements, at most {MOST_FLA_KEY}"
        yield BrokenRule("linear_attention", says, (apart,))


def hybrid_layout_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Ranks that share a sequence share out the key heads of linear attention that a tensor-parallel rank has: a state follows its sequence
    on one rank."""
    model, cp, heads = run.model, parallel.cp, run.model.linear_num_key_heads
    if model.family != "hybrid" or cp == 1 or heads is None or model.layers_in_group == 1:
        return
    size = -(-heads // parallel.tp)
    if size % cp == 0:
        return
    of = " of a tensor rank" if parallel.tp > 1 else ""
    says = f"parallel.cp={cp} does not share out {plural(size, 'key head')} of linear attention{of} evenly"
    yield BrokenRule("hybrid", says, nearest_divisors("parallel.cp", cp, size))
