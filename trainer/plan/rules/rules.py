"""The rules that a run must keep to be laid out, one function each.

A rule looks at one relation between keys and yields every way in which it is broken, as a sentence. Its changes are candidates for a
fix: trainer/plan/fixes.py plans each of them again before a user sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ...models.families import FAMILIES, has_experts, is_made_by_transformers
from ...spec.changed_run import Change
from ...spec.derived.batch_levels import run_steps
from ...spec.numbers.divisors import divisors
from ...spec.problem import suggest_name
from ...spec.run import Parallel, Run
from ..axes import AXES, degree_keys
from ..costs.precision import COMPUTES
from ..engines import ENGINES, PAPERS_NAME
from ..layout.mesh import replica_degrees
from .broken_rule import BrokenRule, Rule
from .data_rules import stages_rule, validate_rule
from .degrees import nearest_divisors, replicas
from .fp8_rule import fp8_rule
from .gradient_sum_rules import servers_rule, staleness_rule
from .hybrid_rule import fla_rule, hybrid_layout_rule, hybrid_rule
from .latent_rule import latent_rule
from .lora_rule import lora_rule
from .loss_chunks_rule import loss_chunks_rule
from .multi_token_prediction_rule import further_tokens_rule
from .mup_rule import mup_rule
from .norm_rule import norm_rule
from .pipeline_rules import pipeline_rule
from .position_rules import exchanged_heads_rule, rotary_rule, window_layout_rule, window_rule
from .preference_rule import preference_rule
from .rampup_rules import rampup_layout_rule, rampup_rule
from .router_rule import router_rule
from .sinks_rule import sinks_rule
from .sync_rule import agreement_rule, sync_rule
from .value_rules import folders_rule, pairs_rule, plannable_ranks_rule, rates_rule, step_windows_rule, timeline_rule

EXAMPLES = {"mla": "deepseek_v3", "hybrid": "qwen3_next_80b"}  # of models of families that need more keys
MOST_SMALLER = 16  # smaller degrees of an axis that are tried
FEWEST_BYTES = 1e6  # bytes: no device has fewer


def names_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Families and engines are names in their tables."""
    for key, word, known in (
        ("model.family", run.model.family, tuple(FAMILIES)),
        ("engine", run.engine, ("auto", *ENGINES, PAPERS_NAME)),
    ):
        if word not in known:
            yield BrokenRule("name", f"{key}={word} is not known", fix=suggest_name(word, known))


def model_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The sizes of a model fit each other."""
    words = run.model
    if is_made_by_transformers(words):
        return
    needs = FAMILIES[words.family].needs if words.family in FAMILIES else ()
    if missing := [f"model.{key}" for key in needs if getattr(words, key) is None]:
        them = "it" if len(missing) == 1 else "them"
        none = " (model.q_lora_rank=0: queries have no latent)" if "model.q_lora_rank" in missing else ""
        yield BrokenRule(
            "sizes",
            f"family {words.family} needs {', '.join(missing)}",
            fix=f"set {them}, as conf/model/{EXAMPLES[words.family]}.yaml does{none}",
        )
    if words.head_dim is None and "v_head_dim" not in needs and words.hidden % words.heads:
        yield BrokenRule(
            "heads",
            f"model.heads={words.heads} does not divide model.hidden={words.hidden}",
            nearest_divisors("model.heads", words.heads, words.hidden),
        )
    kv_heads = words.kv_heads or words.heads
    if words.heads % kv_heads:
        yield BrokenRule(
            "kv_heads",
            f"model.kv_heads={kv_heads} does not divide model.heads={words.heads}",
            nearest_divisors("model.kv_heads", kv_heads, words.heads),
        )
    if words.positions == "learned" and words.context is not None and words.context < run.train.seq:
        tries: tuple[Change, ...] = ((("train.seq", words.context),), (("model.context", run.train.seq),))
        yield BrokenRule(
            "context", f"train.seq={run.train.seq} is longer than model.context={words.context}, the length of the position table", tries
        )


def hugging_face_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A model made by transformers is as its config.json says, without what only our own layers do."""
    words = run.model
    if not is_made_by_transformers(words):
        return
    if not words.parameters:
        yield BrokenRule("hf", f"family {words.family} has no sizes of its own", fix="set model.hf to the path of a config.json")
    if words.context is not None and words.context < run.train.seq:
        says = f"train.seq={run.train.seq} is longer than the {words.context} tokens of its config.json"
        yield BrokenRule("context", says, ((("train.seq", words.context),),))
    if words.dropout:
        says = f"model.dropout={words.dropout:g}: dropout of family {words.family} is not keyed by train.seed and differs between layouts"
        yield BrokenRule("dropout", says, ((("model.dropout", 0),),))
    if run.data.has_prompts:
        says = f"data={run.data.name}: attention of family {words.family} crosses the boundaries of examples"
        yield BrokenRule("documents", says, fix="train a model of another family: `distrain ls model` lists them")
    elif run.data.documents:
        says = f"data.documents=true: attention of family {words.family} crosses document boundaries"
        yield BrokenRule("documents", says, ((("data.documents", False),),))


def hugging_face_layout_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A model made by transformers is whole on every rank, except for what ZeRO shards, and recomputes nothing."""
    if not is_made_by_transformers(run.model):
        return
    again: Change = () if parallel.dp == "auto" else (("parallel.dp", "auto"),)
    for axis in degree_keys(parallel):
        degree = getattr(parallel, axis)
        if axis != "dp" and AXES[axis].within is None and degree > 1:
            says = f"parallel.{axis}={degree} does not apply to family {run.model.family}, which trains with data parallelism and ZeRO only"
            yield BrokenRule("hf", says, (((f"parallel.{axis}", 1), *again),))
    if parallel.recompute != "none":
        says = f"parallel.recompute={parallel.recompute}: family {run.model.family} saves all activations"
        yield BrokenRule("hf", says, ((("parallel.recompute", "none"),),))


def experts_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A mixture of experts has experts, and routes a token to some of them; other families have none."""
    words = run.model
    if not has_experts(words):
        if words.experts and not is_made_by_transformers(words):
            mixtures = " or ".join(name for name, row in FAMILIES.items() if row.has_experts)
            yield BrokenRule(
                "experts", f"model.experts={words.experts} is for family {mixtures}, not {words.family}", ((("model.experts", 0),),)
            )
        if words.dense_layers:
            says = f"model.dense_layers={words.dense_layers}: all layers of family {words.family} are dense"
            yield BrokenRule("experts", says, ((("model.dense_layers", 0),),))
        if parallel.ep > 1:
            yield BrokenRule(
                "experts", f"parallel.ep={parallel.ep} splits experts, and family {words.family} has none", ((("parallel.ep", 1),),)
            )
        return
    if not words.experts:
        yield BrokenRule("experts", f"model.experts=0: family {words.family} has at least one expert", fix="set model.experts")
    elif words.dense_layers >= words.layers:
        says = f"model.dense_layers={words.dense_layers} is not below model.layers={words.layers}, whose others have experts"
        yield BrokenRule("experts", says, ((("model.dense_layers", words.layers - 1),),))
    elif not 1 <= words.top_k <= words.experts:
        yield BrokenRule(
            "top_k",
            f"model.top_k={words.top_k} is not from 1 to model.experts={words.experts}",
            ((("model.top_k", min(2, words.experts)),),),
        )
    elif words.experts % parallel.ep:
        yield BrokenRule(
            "ep",
            f"parallel.ep={parallel.ep} does not divide model.experts={words.experts}",
            nearest_divisors("parallel.ep", parallel.ep, words.experts),
        )
    elif parallel.ep > 1 and parallel.ep_load > (most := words.most_ep_load):
        says = f"parallel.ep_load={parallel.ep_load:g}: no rank of experts computes more than {most:g} times an even share of the copies"
        yield BrokenRule("ep_load", says, ((("parallel.ep_load", most),),))


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items())


def _devices(run: Run) -> str:
    return f"the cluster has {run.cluster.nodes} x {run.cluster.gpus} = {run.cluster.nodes * run.cluster.gpus} devices"


def world_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The degrees multiply to the number of devices; the expert axis is a part of the data axis."""
    ranks = run.cluster.nodes * run.cluster.gpus
    degrees = replica_degrees(parallel)
    others = prod(degrees.values())
    dp: int | str = parallel.dp
    if dp == "auto":
        if ranks % others:
            less = tuple(
                ((key, each),) for key, now in _degrees(parallel) for each in divisors(ranks, now)[: -MOST_SMALLER - 1 : -1] if each != now
            )
            yield BrokenRule(
                "world", f"{_product(degrees)} = {others} does not divide: {_devices(run)}", (*_enough_nodes(run, others), *less)
            )
            return
        dp = ranks // others
    elif parallel.dp * others != ranks:
        fills: tuple[Change, ...] = ((("parallel.dp", ranks // others),),) if ranks % others == 0 else ()
        tries = (*fills, *_enough_nodes(run, int(dp) * others), (("parallel.dp", "auto"),))
        yield BrokenRule("world", f"parallel.dp={dp} x {_product(degrees)} = {int(dp) * others}, but {_devices(run)}", tries)
        return
    if int(dp) % parallel.ep:
        yield BrokenRule(
            "ep",
            f"parallel.ep={parallel.ep} does not divide parallel.dp={dp}, whose ranks hold the experts",
            nearest_divisors("parallel.ep", parallel.ep, int(dp)),
        )
    data = int(dp) * parallel.cp
    if parallel.shard != "all" and data % parallel.shard:
        says = f"parallel.shard={parallel.shard} does not divide dp {dp} x cp {parallel.cp} = {data}"
        yield BrokenRule("shard", says, nearest_divisors("parallel.shard", parallel.shard, data))
    elif parallel.shard != "all" and parallel.shard % parallel.ep:
        says = f"parallel.shard={parallel.shard} is not a multiple of parallel.ep={parallel.ep}"
        yield BrokenRule("shard", says, ((("parallel.shard", "all"),),))


def _degrees(parallel: Parallel) -> tuple[tuple[str, int], ...]:
    return tuple((f"parallel.{name}", degree) for name, degree in reversed(replica_degrees(parallel).items()) if degree > 1)


def _enough_nodes(run: Run, wanted: int) -> tuple[Change, ...]:
    """Return the number of whole nodes for `wanted` ranks as a change, if there is one."""
    gpus = run.cluster.gpus
    return ((("cluster.nodes", -(-wanted // gpus)),),) if wanted % gpus == 0 else ()


def tensor_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Sequence parallelism splits the sequence by tp too. Heads, feed-forward and vocabulary are padded where tp does not divide them."""
    degree = parallel.tp
    if degree > 1 and parallel.sequence and run.train.seq % (degree * parallel.cp):
        of = f"train.seq={run.train.seq} over tp {degree} x cp {parallel.cp}"
        yield BrokenRule("sequence", f"parallel.sequence does not split {of} evenly", ((("parallel.sequence", False),),))


def context_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """cp gives each rank two pieces of the sequence, one from the front and one from the back, so that causal attention is balanced."""
    if parallel.cp > 1 and run.train.seq % (2 * parallel.cp):
        fits = tuple(change for change in nearest_divisors("parallel.cp", parallel.cp, max(1, run.train.seq // 2)))
        yield BrokenRule("cp", f"parallel.cp={parallel.cp}: train.seq={run.train.seq} is not a multiple of 2 x cp", fits)


def batch_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The global batch is a whole number of micro-batches on every replica."""
    dp = replicas(run, parallel)
    if dp is None or run.train.batch % (dp * microbatch) == 0:
        return
    says = f"train.batch={run.train.batch} is not a multiple of dp {dp} x train.microbatch={microbatch}"
    tries: list[Change] = []
    if run.train.batch % dp == 0:
        tries += [(("train.microbatch", each),) for each in reversed(divisors(run.train.batch // dp, microbatch))][:1]
    up = -(-run.train.batch // (dp * microbatch)) * dp * microbatch
    tries.append((("train.batch", up),))
    yield BrokenRule("batch", says, tuple(tries))


def length_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A run has one length, and its warm-up is shorter."""
    train = run.train
    if train.steps is None and train.tokens is None:
        yield BrokenRule("length", "neither train.steps nor train.tokens is set", fix="set one of them")
    if train.steps is not None and train.tokens is not None:
        tries: tuple[Change, ...] = ((("train.tokens", None),), (("train.steps", None),))
        yield BrokenRule("length", f"train.steps={train.steps} and train.tokens={train.tokens:g} are both set: a run has one length", tries)
        return
    steps = run_steps(train)
    if steps and run.optim.warmup >= steps and run.optim.warmup:
        length = f"train.steps={steps}" if train.steps else f"the {steps} steps of train.tokens={train.tokens:g}"
        yield BrokenRule("warmup", f"optim.warmup={run.optim.warmup} is not shorter than {length}", ((("optim.warmup", steps // 10),),))


def precision_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A GPU whose peaks are stated computes in those precisions only; a CPU computes in every one, at rates that may not be known."""
    peaks = run.cluster.device.peak if run.cluster.device.kind != "cpu" else {}
    for each in COMPUTES[run.train.precision] if peaks else ():
        if each not in peaks:
            fits = tuple((("train.precision", name),) for name in ("bf16", "fp16", "fp32") if name in peaks)
            yield BrokenRule(
                "precision", f"train.precision={run.train.precision}: {run.cluster.device.name} does not compute in {each}", fits[:2]
            )
            return
    wide = {"fp32": ("fp32",), "bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32")}.get(run.train.precision, ("bf16", "fp32"))
    if run.train.gradients not in ("auto", *wide):
        says = f"train.gradients={run.train.gradients} is not supported with train.precision={run.train.precision}"
        yield BrokenRule("gradients", says, tuple((("train.gradients", name),) for name in ("auto", "fp32")))


def offload_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """ZeRO offloads what it shards: optimizer states from ZeRO 1, parameters at ZeRO 3."""
    if parallel.offload.optimizer and parallel.zero == 0:
        yield BrokenRule("offload", "parallel.offload.optimizer=true needs parallel.zero of 1 or more", ((("parallel.zero", 1),),))
    if parallel.offload.parameters and parallel.zero < 3:
        yield BrokenRule(
            "offload", f"parallel.offload.parameters=true needs parallel.zero=3, not {parallel.zero}", ((("parallel.zero", 3),),)
        )


def device_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The memory of the device is a number by the time a plan is made, and not one of GB; what the host of a GPU takes is stated."""
    memory, device = run.cluster.device.memory, run.cluster.device
    if device.kind == "cuda" and device.dispatch is None:
        says = "cluster.device.dispatch=null: how long the host takes to issue one op is measured of CPUs only"
        yield BrokenRule("device", says, ((("cluster.device.dispatch", 6e-5),),))
    if memory == "auto":
        yield BrokenRule(
            "device", f"cluster.device.memory=auto: the memory of {run.cluster.device.name} is not known", fix="set it in bytes"
        )
    elif memory < FEWEST_BYTES:
        yield BrokenRule("device", f"cluster.device.memory={memory:g} is {memory:g} bytes", fix=f"write it as {memory:g}e9 or {memory:g}GB")


# Rules of a run that do not depend on its degrees, and rules of a layout, which a sweep applies to each.
OF_RUN: tuple[Rule, ...] = (
    names_rule, folders_rule, model_rule, rotary_rule, window_rule, norm_rule, latent_rule, hybrid_rule, fla_rule, router_rule, lora_rule,
    further_tokens_rule, hugging_face_rule, mup_rule, pairs_rule, stages_rule, validate_rule, rampup_rule, length_rule, rates_rule,
    step_windows_rule, precision_rule, device_rule, agreement_rule, preference_rule,
)  # fmt: skip
OF_LAYOUT: tuple[Rule, ...] = (
    hugging_face_layout_rule, window_layout_rule, experts_rule, world_rule, sync_rule, servers_rule, staleness_rule, tensor_rule,
    context_rule, exchanged_heads_rule, pipeline_rule, batch_rule, rampup_layout_rule, offload_rule, plannable_ranks_rule, timeline_rule,
    fp8_rule, loss_chunks_rule, sinks_rule, hybrid_layout_rule,
)  # fmt: skip
# Those of a layout that read its micro-batch or its recomputation, and all keys of parallel that they read. The others read neither.
OF_STEP: tuple[Rule, ...] = (hugging_face_layout_rule, pipeline_rule, batch_rule, rampup_layout_rule, fp8_rule)
STEP_KEYS = (*AXES, "sequence", "recompute", "schedule", "actions", "chunks", "stages", "vertical")


def broken_rules(run: Run, parallel: Parallel, microbatch: int, rules: tuple[Rule, ...] = OF_RUN + OF_LAYOUT) -> list[BrokenRule]:
    """Return every rule that a run breaks with these degrees; a run that breaks none can be laid out."""
    return [each for rule in rules for each in rule(run, parallel, microbatch)]
