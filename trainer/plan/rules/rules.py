"""The rules that a run must keep to be laid out, one function each.

A rule looks at one relation between keys and yields every way in which it is broken, as a sentence. Its changes are candidates for a
fix: trainer/plan/fixes.py plans each of them again before a user sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nsmallest
from math import ceil, prod

from ...models.families import FAMILIES, has_experts, is_made_by_transformers
from ...spec.changed_run import Change
from ...spec.divisors import divisors
from ...spec.problem import suggest_name
from ...spec.run import Parallel, Run
from ..costs.precision import COMPUTES
from ..engines import ENGINES, PAPERS_NAME
from ..layout.mesh import replica_degrees, replica_size
from ..layout.schedules import SCHEDULES
from .broken_rule import BrokenRule, Rule
from .lora_rule import lora
from .position_rules import rotary, window, window_layout
from .value_rules import folders, pairs, plannable_ranks, profiler_window, rates

MOST_STAGES = 10_000
MOST_SMALLER = 16  # smaller degrees of an axis that are tried


def _nearest_divisors(key: str, value: int, of: int) -> tuple[Change, ...]:
    """Return the divisors of `of` nearest to a value as changes, the smaller first."""
    ranked = nsmallest(3, divisors(of), key=lambda each: (abs(each - value), each))
    return tuple(((key, each),) for each in ranked)


def names(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Families and engines are names in their tables."""
    for key, word, known in (
        ("model.family", run.model.family, tuple(FAMILIES)),
        ("engine", run.engine, ("auto", *ENGINES, PAPERS_NAME)),
    ):
        if word not in known:
            yield BrokenRule("name", f"{key}={word} is not known", fix=suggest_name(word, known))


def model(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The sizes of a model fit each other."""
    words = run.model
    if is_made_by_transformers(words):
        return
    if words.head_dim is None and words.hidden % words.heads:
        yield BrokenRule(
            "heads",
            f"model.heads={words.heads} does not divide model.hidden={words.hidden}",
            _nearest_divisors("model.heads", words.heads, words.hidden),
        )
    kv_heads = words.kv_heads or words.heads
    if words.heads % kv_heads:
        yield BrokenRule(
            "kv_heads",
            f"model.kv_heads={kv_heads} does not divide model.heads={words.heads}",
            _nearest_divisors("model.kv_heads", kv_heads, words.heads),
        )
    if words.positions == "learned" and words.context is not None and words.context < run.train.seq:
        tries: tuple[Change, ...] = ((("train.seq", words.context),), (("model.context", run.train.seq),))
        yield BrokenRule(
            "context", f"train.seq={run.train.seq} is longer than model.context={words.context}, the length of the position table", tries
        )


def hugging_face(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
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
    if run.data.name == "pairs":
        says = f"data=pairs: attention of family {words.family} crosses the boundaries of examples"
        yield BrokenRule("documents", says, fix="train a model of another family: `distrain ls model` lists them")
    elif run.data.documents:
        says = f"data.documents=true: attention of family {words.family} crosses document boundaries"
        yield BrokenRule("documents", says, ((("data.documents", False),),))


def hugging_face_layout(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A model made by transformers is whole on every rank, except for what ZeRO shards, and recomputes nothing."""
    if not is_made_by_transformers(run.model):
        return
    again: Change = () if parallel.dp == "auto" else (("parallel.dp", "auto"),)
    for axis in ("tp", "pp", "cp"):
        degree = getattr(parallel, axis)
        if degree > 1:
            says = f"parallel.{axis}={degree} does not apply to family {run.model.family}, which trains with data parallelism and ZeRO only"
            yield BrokenRule("hf", says, (((f"parallel.{axis}", 1), *again),))
    if parallel.recompute != "none":
        says = f"parallel.recompute={parallel.recompute}: family {run.model.family} saves all activations"
        yield BrokenRule("hf", says, ((("parallel.recompute", "none"),),))


def experts(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A mixture of experts has experts, and routes a token to some of them; other families have none."""
    words = run.model
    if not has_experts(words):
        if words.experts and not is_made_by_transformers(words):
            mixtures = " or ".join(name for name, row in FAMILIES.items() if row.has_experts)
            yield BrokenRule(
                "experts", f"model.experts={words.experts} is for family {mixtures}, not {words.family}", ((("model.experts", 0),),)
            )
        if parallel.ep > 1:
            yield BrokenRule(
                "experts", f"parallel.ep={parallel.ep} splits experts, and family {words.family} has none", ((("parallel.ep", 1),),)
            )
        return
    if not words.experts:
        yield BrokenRule("experts", f"model.experts=0: family {words.family} has at least one expert", fix="set model.experts")
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
            _nearest_divisors("parallel.ep", parallel.ep, words.experts),
        )


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items())


def _devices(run: Run) -> str:
    return f"the cluster has {run.cluster.nodes} x {run.cluster.gpus} = {run.cluster.nodes * run.cluster.gpus} devices"


def world(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
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
            _nearest_divisors("parallel.ep", parallel.ep, int(dp)),
        )
    data = int(dp) * parallel.cp
    if parallel.shard != "all" and data % parallel.shard:
        says = f"parallel.shard={parallel.shard} does not divide dp {dp} x cp {parallel.cp} = {data}"
        yield BrokenRule("shard", says, _nearest_divisors("parallel.shard", parallel.shard, data))
    elif parallel.shard != "all" and parallel.shard % parallel.ep:
        says = f"parallel.shard={parallel.shard} is not a multiple of parallel.ep={parallel.ep}"
        yield BrokenRule("shard", says, ((("parallel.shard", "all"),),))


def _degrees(parallel: Parallel) -> tuple[tuple[str, int], ...]:
    return tuple((f"parallel.{name}", degree) for name, degree in reversed(replica_degrees(parallel).items()) if degree > 1)


def _enough_nodes(run: Run, wanted: int) -> tuple[Change, ...]:
    """Return the number of whole nodes for `wanted` ranks as a change, if there is one."""
    gpus = run.cluster.gpus
    return ((("cluster.nodes", -(-wanted // gpus)),),) if wanted % gpus == 0 else ()


def tensor(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Sequence parallelism splits the sequence by tp too. Heads, feed-forward and vocabulary are padded where tp does not divide them."""
    degree = parallel.tp
    if degree > 1 and parallel.sequence and run.train.seq % (degree * parallel.cp):
        of = f"train.seq={run.train.seq} over tp {degree} x cp {parallel.cp}"
        yield BrokenRule("sequence", f"parallel.sequence does not split {of} evenly", ((("parallel.sequence", False),),))


def context(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """cp gives each rank two pieces of the sequence, one from the front and one from the back, so that causal attention is balanced."""
    if parallel.cp > 1 and run.train.seq % (2 * parallel.cp):
        fits = tuple(change for change in _nearest_divisors("parallel.cp", parallel.cp, max(1, run.train.seq // 2)))
        yield BrokenRule("cp", f"parallel.cp={parallel.cp}: train.seq={run.train.seq} is not a multiple of 2 x cp", fits)


def pipeline(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Each stage, and each chunk of it, has a layer. Chunks are for interleaved schedules, which need micro-batches in rounds."""
    schedule = SCHEDULES.get(parallel.schedule)
    layers, stages, chunks = run.model.layers, parallel.pp, parallel.chunks
    if stages > MOST_STAGES:
        yield BrokenRule("pp", f"parallel.pp={stages} is more than the {MOST_STAGES:,} stages that a plan has", ((("parallel.pp", 1),),))
    elif stages * chunks > layers:
        each = f"parallel.pp={stages}" + (f" x parallel.chunks={chunks}" if chunks > 1 else "")
        fewer: tuple[Change, ...] = ((("parallel.chunks", max(1, layers // stages)),),) if chunks > 1 and stages <= layers else ()
        yield BrokenRule("pp", f"{each} is more than model.layers={layers}", fewer + _nearest_divisors("parallel.pp", stages, layers))
    if schedule is None:
        yield BrokenRule("name", f"parallel.schedule={parallel.schedule} is not known", fix=suggest_name(parallel.schedule, SCHEDULES))
        return
    if chunks > 1 and not schedule.chunked:
        either: tuple[Change, ...] = ((("parallel.schedule", "interleaved"),), (("parallel.chunks", 1),))
        yield BrokenRule("chunks", f"parallel.chunks={chunks} is for schedule interleaved, not {parallel.schedule}", either)
    if stages > 1 and parallel.stages:
        yield from _stages_rules(run, parallel, stages * schedule.parts(chunks))
    if stages > 1 and schedule.chunked:
        yield from _interleaved_rules(run, parallel, microbatch)
    if stages > 1 and schedule.folded:
        yield from _folded_rules(run, parallel, microbatch)


def _stages_rules(run: Run, parallel: Parallel, parts: int) -> Iterator[BrokenRule]:
    """parallel.stages has a number of layers for each part of the model, and they add up to the model's."""
    given, layers = parallel.stages or (), run.model.layers
    balanced: tuple[Change, ...] = ((("parallel.stages", None),),)
    words = f"parallel.stages={list(given)}".replace(" ", "")
    if len(given) != parts:
        yield BrokenRule("stages", f"{words} has {len(given)} entries, and the pipeline has {parts} parts", balanced)
    elif sum(given) != layers:
        yield BrokenRule("stages", f"{words} adds up to {sum(given)} layers, not to model.layers={layers}", balanced)


def _interleaved_rules(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A schedule with chunks needs at least two, and micro-batches in rounds of its stages."""
    plain: Change = (("parallel.schedule", "1f1b"), ("parallel.chunks", 1))
    if parallel.chunks == 1:
        says = f"parallel.schedule={parallel.schedule} needs parallel.chunks of 2 or more"
        yield BrokenRule("chunks", says, ((("parallel.chunks", 2),), plain))
    micros, stages = _microbatches(run, parallel, microbatch), parallel.pp
    if micros is not None and micros % stages:
        says = f"{micros} micro-batches a step are not a multiple of parallel.pp={stages}, which schedule {parallel.schedule} needs"
        more = run.train.batch // micros * -(-micros // stages) * stages
        yield BrokenRule("microbatches", says, ((("train.batch", more),), plain))


def _folded_rules(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A folded schedule gives each stage two parts of the model, and needs a micro-batch for each part of the model."""
    layers, parts = run.model.layers, 2 * parallel.pp
    plain: Change = (("parallel.schedule", "1f1b"),)
    if parallel.pp <= layers < parts:
        says = f"parallel.schedule={parallel.schedule} needs 2 x parallel.pp={parallel.pp} parts, more than model.layers={layers}"
        yield BrokenRule("pp", says, (plain, *_nearest_divisors("parallel.pp", layers // 2, layers)))
    micros = _microbatches(run, parallel, microbatch)
    if micros is not None and micros < parts:
        says = f"{micros} micro-batches a step are fewer than 2 x parallel.pp={parallel.pp}, which schedule {parallel.schedule} needs"
        yield BrokenRule("microbatches", says, ((("train.batch", run.train.batch // micros * parts),), plain))


def _microbatches(run: Run, parallel: Parallel, microbatch: int) -> int | None:
    dp = _dp(run, parallel)
    return run.train.batch // (dp * microbatch) if dp and run.train.batch % (dp * microbatch) == 0 else None


def _dp(run: Run, parallel: Parallel) -> int | None:
    if parallel.dp != "auto":
        return parallel.dp
    ranks, others = run.cluster.nodes * run.cluster.gpus, replica_size(parallel)
    return ranks // others if ranks % others == 0 else None


def batch(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The global batch is a whole number of micro-batches on every replica."""
    dp = _dp(run, parallel)
    if dp is None or run.train.batch % (dp * microbatch) == 0:
        return
    says = f"train.batch={run.train.batch} is not a multiple of dp {dp} x train.microbatch={microbatch}"
    tries: list[Change] = []
    if run.train.batch % dp == 0:
        tries += [(("train.microbatch", each),) for each in reversed(divisors(run.train.batch // dp, microbatch))][:1]
    up = -(-run.train.batch // (dp * microbatch)) * dp * microbatch
    tries.append((("train.batch", up),))
    yield BrokenRule("batch", says, tuple(tries))


def length(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A run has one length, and its warm-up is shorter."""
    train = run.train
    if train.steps is None and train.tokens is None:
        yield BrokenRule("length", "neither train.steps nor train.tokens is set", fix="set one of them")
    if train.steps is not None and train.tokens is not None:
        tries: tuple[Change, ...] = ((("train.tokens", None),), (("train.steps", None),))
        yield BrokenRule("length", f"train.steps={train.steps} and train.tokens={train.tokens:g} are both set: a run has one length", tries)
        return
    steps = train.steps or (ceil(train.tokens / (train.batch * train.seq)) if train.tokens else 0)
    if steps and run.optim.warmup >= steps and run.optim.warmup:
        length = f"train.steps={steps}" if train.steps else f"the {steps} steps of train.tokens={train.tokens:g}"
        yield BrokenRule("warmup", f"optim.warmup={run.optim.warmup} is not shorter than {length}", ((("optim.warmup", steps // 10),),))


def precision(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A device whose peaks are stated computes in those precisions only."""
    peaks = run.cluster.device.peak
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


def offload(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """ZeRO offloads what it shards: optimizer states from stage 1, parameters at stage 3."""
    if parallel.offload.optimizer and parallel.zero == 0:
        yield BrokenRule("offload", "parallel.offload.optimizer=true needs parallel.zero of 1 or more", ((("parallel.zero", 1),),))
    if parallel.offload.parameters and parallel.zero < 3:
        yield BrokenRule(
            "offload", f"parallel.offload.parameters=true needs parallel.zero=3, not {parallel.zero}", ((("parallel.zero", 3),),)
        )


def device(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The memory of the device is a number by the time a plan is made."""
    if run.cluster.device.memory == "auto":
        yield BrokenRule(
            "device", f"cluster.device.memory=auto: the memory of {run.cluster.device.name} is not known", fix="set it in bytes"
        )


# Rules of a run that do not depend on its degrees, and rules of a layout, which a sweep applies to each.
OF_RUN: tuple[Rule, ...] = (
    names, folders, model, rotary, window, lora, hugging_face, pairs, length, rates, profiler_window, precision, device,
)  # fmt: skip
OF_LAYOUT: tuple[Rule, ...] = (
    hugging_face_layout, window_layout, experts, world, tensor, context, pipeline, batch, offload, plannable_ranks,
)  # fmt: skip


def broken_rules(run: Run, parallel: Parallel, microbatch: int, rules: tuple[Rule, ...] = OF_RUN + OF_LAYOUT) -> list[BrokenRule]:
    """Return every rule that a run breaks with these degrees; a run that breaks none can be laid out."""
    return [each for rule in rules for each in rule(run, parallel, microbatch)]
