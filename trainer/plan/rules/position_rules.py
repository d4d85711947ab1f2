"""Rules of positions: what each kind of rotary scaling needs, and which layers have a window."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ...models.families import is_made_by_transformers
from ...models.ops.shared_ops import has_fused_core
from ...spec.derived.document_kernel import takes_flash_attention_2, widest_head
from ...spec.numbers.as_text import plural
from ...spec.run import Parallel, Run
from ...spec.sections.rope import ROPE_KEYS
from ..axes.weight_slices import HeadShards
from .broken_rule import BrokenRule
from .degrees import nearest_divisors

ORIGINAL = "model.rope.original_max_position_embeddings"


def rotary_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Rope turns pairs of elements of a head; each kind of scaling has what it computes with."""
    model, rope = run.model, run.model.rope
    if model.positions != "rope" or is_made_by_transformers(model):
        return
    key, head_dim = "qk_rope_head_dim" if model.family == "mla" else "head_dim", model.rotary_dim
    if model.rope_share < 1 and model.family != "mla" and (head_dim % 2 or not head_dim):
        whole = model.head_dim or model.hidden // model.heads
        says = f"model.rope_share={model.rope_share:g} of a head's {whole} elements are {head_dim}, and model.positions=rope turns pairs"
        yield BrokenRule("rope", says, ((("model.rope_share", (head_dim + 2 - head_dim % 2) / whole),), (("model.rope_share", 1.0),)))
        return
    if head_dim % 2:
        says = f"model.positions=rope turns pairs of elements, but a head has {head_dim}"
        yield BrokenRule("rope", says, (((f"model.{key}", head_dim + 1),),))
        return
    if "original_max_position_embeddings" in ROPE_KEYS[rope.type] and rope.original_max_position_embeddings is None:
        fix = f"set {ORIGINAL} to the length of the sequences that the model was first trained on, as {ORIGINAL}=8192"
        yield BrokenRule("rope", f"model.rope.type={rope.type} needs {ORIGINAL}", fix=fix)
    if rope.type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        says = f"model.rope.high_freq_factor={rope.high_freq_factor:g} is not above model.rope.low_freq_factor={rope.low_freq_factor:g}"
        yield BrokenRule("rope", says, ((("model.rope.high_freq_factor", 4 * rope.low_freq_factor),),))
    if rope.type == "yarn" and rope.beta_fast < rope.beta_slow:
        says = f"model.rope.beta_fast={rope.beta_fast:g} is below model.rope.beta_slow={rope.beta_slow:g}"
        yield BrokenRule("rope", says, ((("model.rope.beta_fast", 32 * rope.beta_slow),),))
    if rope.type == "yarn" and model.rope_base <= 1:
        yield BrokenRule("rope", f"model.rope_base={model.rope_base:g}: yarn needs a base above 1", ((("model.rope_base", 10000),),))
    if rope.type == "dynamic" and head_dim == 2:
        yield BrokenRule(
            "rope", "model.rope.type=dynamic needs more than 2 elements of a head to turn", ((("model.rope.type", "linear"),),)
        )


def window_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Layers that have a window have its width, and the list of layers, which repeats until the last, is not empty or too long."""
    model, types = run.model, run.model.layer_types
    if is_made_by_transformers(model) or types is None:
        return
    if not 0 < len(types) <= model.layers:
        says = (
            f"model.layer_types names {len(types)} layers, more than model.layers={model.layers}" if types else "model.layer_types is empty"
        )
        yield BrokenRule("window", says, ((("model.layer_types", None),),))
    if "sliding_attention" in types and model.window is None:
        says = "model.layer_types names layers with sliding_attention, but model.window=null"
        yield BrokenRule("window", says, ((("model.layer_types", None),),))


def window_layout_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """On a GPU ranks that gather keys compute a window by FlashAttention-2, or by separate kernels."""
    model, device = run.model, run.cluster.device
    if parallel.cp == 1 or parallel.cp_comm != "all_gather" or not model.effective_window(run.train.seq):
        return
    if device.kind == "cpu" or not has_fused_core(model, run.train) or takes_flash_attention_2(run):
        return
    size = f"heads of {widest_head(model)} elements in {run.train.precision}"
    says = f"parallel.cp={parallel.cp} needs FlashAttention-2 for model.window={model.window}, and {device.name} does not run it on {size}"
    yield BrokenRule("window", says, ((("parallel.cp_comm", "all_to_all"),), (("parallel.cp", 1),), (("train.attention", "math"),)))


def exchanged_heads_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Ranks that exchange tokens for heads share out the heads that a tensor-parallel rank has: each has as many queries, and the keys of
    these alone."""
    model, cp = run.model, parallel.cp
    kv_heads = model.kv_heads or model.heads
    if cp == 1 or parallel.cp_comm != "all_to_all" or model.heads % kv_heads:
        return
    shards = HeadShards(model.heads, kv_heads, parallel.tp)
    if shards.size % cp == 0 and (shards.kv_size % cp == 0 or cp % shards.kv_size == 0):
        return
    heads = plural(shards.size, "head") + ("" if shards.kv_size == shards.size else f" and {plural(shards.kv_size, 'key head')}")
    of = " of a tensor rank" if parallel.tp > 1 else ""
    says = f"parallel.cp_comm=all_to_all does not share out {heads}{of} over parallel.cp={cp} evenly"
    yield BrokenRule("cp_comm", says, ((("parallel.cp_comm", "all_gather"),), *nearest_divisors("parallel.cp", cp, gcd(shards.size, cp))))
