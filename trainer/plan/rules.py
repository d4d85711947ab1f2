"""What is wrong with a run before it is laid out: one function a rule, each a sentence with its mend's direction.

A rule looks at one relation between keys and says every way in which it is broken. Changes that would mend it are
candidates only: trainer/plan/mends.py plans each of them again before it is told to anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from math import ceil

from ..models.families import FAMILIES
from ..spec.problem import nearest
from ..spec.run import Parallel, Run
from .broken_rule import Broken, Rule
from .changed_run import Change
from .divisors import divisors
from .engines import ENGINES
from .precision import COMPUTES
from .schedules import SCHEDULES
from .value_rules import countable, folders, rates, window

MOST_STAGES = 10_000
FEWER = 16  # smaller degrees of an axis that are tried


def _near(key: str, value: int, of: int) -> tuple[Change, ...]:
    """The divisors of `of` nearest to a value, the smaller first."""
    ranked = nsmallest(3, divisors(of), key=lambda each: (abs(each - value), each))
    return tuple(((key, each),) for each in ranked)


def names(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """Families and engines are names in our own tables."""
    for key, word, known in (
        ("model.family", run.model.family, tuple(FAMILIES)),
        ("engine", run.engine, ("auto", *(engine.name for engine in ENGINES))),
    ):
        if word not in known:
            yield Broken("name", f"{key}={word} is not known", mend=nearest(word, known))


def model(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A model's sizes fit each other."""
    words = run.model
    if words.family == "hf":
        return
    if words.head_dim is None and words.hidden % words.heads:
        yield Broken(
            "heads",
            f"model.heads={words.heads} does not divide model.hidden={words.hidden}",
            _near("model.heads", words.heads, words.hidden),
        )
    kv_heads = words.kv_heads or words.heads
    if words.heads % kv_heads:
        yield Broken(
            "kv_heads",
            f"model.kv_heads={kv_heads} does not divide model.heads={words.heads}",
            _near("model.kv_heads", kv_heads, words.heads),
        )
    if words.positions == "learned" and words.context is not None and words.context < run.train.seq:
        tries: tuple[Change, ...] = ((("train.seq", words.context),), (("model.context", run.train.seq),))
        yield Broken(
            "context", f"train.seq={run.train.seq} is longer than model.context={words.context}, the rows of the position table", tries
        )


def hugging_face(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A model of family hf is what its config.json says; what our own layers do beside is not there."""
    words = run.model
    if words.family != "hf":
        return
    if not words.parameters:
        yield Broken("hf", "family hf has no sizes of its own", mend="set model.hf to the path of a config.json")
    if words.context is not None and words.context < run.train.seq:
        says = f"train.seq={run.train.seq} is longer than the {words.context} tokens of its config.json"
        yield Broken("context", says, ((("train.seq", words.context),),))
    if words.dropout:
        says = f"model.dropout={words.dropout:g}: dropout of family hf can't be keyed, so that layouts would train apart"
        yield Broken("dropout", says, ((("model.dropout", 0),),))
    if words.weights is not None:
        yield Broken("weights", "model.weights: a model of family hf begins from no weights here", ((("model.weights", None),),))
    if run.data.documents:
        says = "data.documents=true: attention of family hf does not stay inside documents"
        yield Broken("documents", says, ((("data.documents", False),),))


def hugging_face_layout(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A model of family hf is whole on every rank, but for what ZeRO shards, and nothing of it is computed again."""
    if run.model.family != "hf":
        return
    again: Change = () if parallel.dp == "auto" else (("parallel.dp", "auto"),)
    for axis in ("tp", "pp", "cp"):
        degree = getattr(parallel, axis)
        if degree > 1:
            says = f"parallel.{axis}={degree} splits nothing of family hf: it trains under dp and ZeRO"
            yield Broken("hf", says, (((f"parallel.{axis}", 1), *again),))
    if parallel.recompute != "none":
        says = f"parallel.recompute={parallel.recompute}: family hf keeps all of its activations"
        yield Broken("hf", says, ((("parallel.recompute", "none"),),))


def experts(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A mixture has experts, and sends a token to some of them."""
    words = run.model
    if words.family != "moe":
        if words.experts:
            yield Broken("experts", f"model.experts={words.experts} is for family moe, not {words.family}", ((("model.experts", 0),),))
        if parallel.ep > 1:
            yield Broken(
                "experts", f"parallel.ep={parallel.ep} splits experts, and family {words.family} has none", ((("parallel.ep", 1),),)
            )
        return
    if not words.experts:
        yield Broken("experts", "model.experts=0: family moe has at least one expert", mend="set model.experts")
    elif not 1 <= words.top_k <= words.experts:
        yield Broken(
            "top_k",
            f"model.top_k={words.top_k} is not from 1 to model.experts={words.experts}",
            ((("model.top_k", min(2, words.experts)),),),
        )
    elif words.experts % parallel.ep:
        yield Broken(
            "ep",
            f"parallel.ep={parallel.ep} does not divide model.experts={words.experts}",
            _near("parallel.ep", parallel.ep, words.experts),
        )


def world(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """The degrees multiply to the number of devices, and expert ranks come out of the data axis."""
    ranks = run.cluster.nodes * run.cluster.gpus
    others = parallel.tp * parallel.pp * parallel.cp
    product = f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}"
    has = f"the cluster has {run.cluster.nodes} x {run.cluster.gpus} = {ranks} devices"
    dp: int | str = parallel.dp
    if dp == "auto":
        if ranks % others:
            less = tuple(
                ((key, each),) for key, now in _degrees(parallel) for each in divisors(ranks, now)[: -FEWER - 1 : -1] if each != now
            )
            yield Broken("world", f"{product} = {others} does not divide: {has}", (*_nodes(run, others), *less))
            return
        dp = ranks // others
    elif parallel.dp * others != ranks:
        fills: tuple[Change, ...] = ((("parallel.dp", ranks // others),),) if ranks % others == 0 else ()
        tries = (*fills, *_nodes(run, int(dp) * others), (("parallel.dp", "auto"),))
        yield Broken("world", f"parallel.dp={dp} x {product} = {int(dp) * others}, but {has}", tries)
        return
    if int(dp) % parallel.ep:
        yield Broken(
            "ep",
            f"parallel.ep={parallel.ep} does not divide the data axis, dp {dp}, whose ranks it takes",
            _near("parallel.ep", parallel.ep, int(dp)),
        )
    data = int(dp) * parallel.cp
    if parallel.shard != "all" and data % parallel.shard:
        says = f"parallel.shard={parallel.shard} does not divide dp {dp} x cp {parallel.cp} = {data}"
        yield Broken("shard", says, _near("parallel.shard", parallel.shard, data))
    elif parallel.shard != "all" and parallel.shard % parallel.ep:
        says = f"parallel.shard={parallel.shard} is not a multiple of parallel.ep={parallel.ep}"
        yield Broken("shard", says, ((("parallel.shard", "all"),),))


def _degrees(parallel: Parallel) -> tuple[tuple[str, int], ...]:
    return tuple((f"parallel.{axis}", getattr(parallel, axis)) for axis in ("pp", "cp", "tp") if getattr(parallel, axis) > 1)


def _nodes(run: Run, wanted: int) -> tuple[Change, ...]:
    """Enough whole nodes for a number of ranks."""
    gpus = run.cluster.gpus
    return ((("cluster.nodes", -(-wanted // gpus)),),) if wanted % gpus == 0 else ()


def tensor(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """Sequence parallel splits the sequence by tp too; heads, feed-forward and vocabulary are padded where tp does not divide them."""
    degree = parallel.tp
    if degree > 1 and parallel.sequence and run.train.seq % (degree * parallel.cp):
        of = f"train.seq={run.train.seq} over tp {degree} x cp {parallel.cp}"
        yield Broken("sequence", f"parallel.sequence does not split {of} evenly", ((("parallel.sequence", False),),))


def context(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """cp gives each rank two pieces of the sequence, one from its front and one from its back, so that causal work is even."""
    if parallel.cp > 1 and run.train.seq % (2 * parallel.cp):
        fits = tuple(change for change in _near("parallel.cp", parallel.cp, max(1, run.train.seq // 2)))
        yield Broken("cp", f"parallel.cp={parallel.cp}: train.seq={run.train.seq} is not a multiple of 2 x cp", fits)


def pipeline(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """Each stage, and each part of it, has a layer; chunks are for interleaved schedules, which want micro-batches in rounds."""
    schedule = SCHEDULES.get(parallel.schedule)
    layers, stages, chunks = run.model.layers, parallel.pp, parallel.chunks
    if stages > MOST_STAGES:
        yield Broken("pp", f"parallel.pp={stages} is more than the {MOST_STAGES:,} stages that a plan lists", ((("parallel.pp", 1),),))
    elif stages * chunks > layers:
        each = f"parallel.pp={stages}" + (f" x parallel.chunks={chunks}" if chunks > 1 else "")
        fewer: tuple[Change, ...] = ((("parallel.chunks", max(1, layers // stages)),),) if chunks > 1 and stages <= layers else ()
        yield Broken("pp", f"{each} is more than model.layers={layers}", fewer + _near("parallel.pp", stages, layers))
    if schedule is None:
        yield Broken("name", f"parallel.schedule={parallel.schedule} is not known", mend=nearest(parallel.schedule, SCHEDULES))
        return
    if chunks > 1 and not schedule.chunked:
        either: tuple[Change, ...] = ((("parallel.schedule", "interleaved"),), (("parallel.chunks", 1),))
        yield Broken("chunks", f"parallel.chunks={chunks} is for schedule interleaved, not {parallel.schedule}", either)
    if stages > 1 and schedule.chunked:
        yield from _rounds(run, parallel, microbatch)
    if stages > 1 and schedule.folded:
        yield from _fold(run, parallel, microbatch)


def _rounds(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A schedule with chunks wants more than one, and micro-batches in rounds of its stages."""
    plain: Change = (("parallel.schedule", "1f1b"), ("parallel.chunks", 1))
    if parallel.chunks == 1:
        says = f"parallel.schedule={parallel.schedule} wants parallel.chunks of 2 or more"
        yield Broken("chunks", says, ((("parallel.chunks", 2),), plain))
    micros, stages = _micros(run, parallel, microbatch), parallel.pp
    if micros is not None and micros % stages:
        says = f"{micros} micro-batches a step are not a multiple of parallel.pp={stages}, as schedule {parallel.schedule} wants"
        more = run.train.batch // micros * -(-micros // stages) * stages
        yield Broken("microbatches", says, ((("train.batch", more),), plain))


def _fold(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A folded schedule gives each stage two parts of the model, and wants a micro-batch for each part that there is."""
    layers, parts = run.model.layers, 2 * parallel.pp
    plain: Change = (("parallel.schedule", "1f1b"),)
    if parallel.pp <= layers < parts:
        says = f"parallel.schedule={parallel.schedule} cuts a model into 2 x parallel.pp={parallel.pp} parts, and model.layers={layers}"
        yield Broken("pp", says, (plain, *_near("parallel.pp", layers // 2, layers)))
    micros = _micros(run, parallel, microbatch)
    if micros is not None and micros < parts:
        says = f"{micros} micro-batches a step are fewer than 2 x parallel.pp={parallel.pp}, as schedule {parallel.schedule} wants"
        yield Broken("microbatches", says, ((("train.batch", run.train.batch // micros * parts),), plain))


def _micros(run: Run, parallel: Parallel, microbatch: int) -> int | None:
    dp = _dp(run, parallel)
    return run.train.batch // (dp * microbatch) if dp and run.train.batch % (dp * microbatch) == 0 else None


def _dp(run: Run, parallel: Parallel) -> int | None:
    if parallel.dp != "auto":
        return parallel.dp
    ranks, others = run.cluster.nodes * run.cluster.gpus, parallel.tp * parallel.pp * parallel.cp
    return ranks // others if ranks % others == 0 else None


def batch(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A step's sequences are so many whole micro-batches on every replica."""
    dp = _dp(run, parallel)
    if dp is None or run.train.batch % (dp * microbatch) == 0:
        return
    says = f"train.batch={run.train.batch} is not a multiple of dp {dp} x train.microbatch={microbatch}"
    tries: list[Change] = []
    if run.train.batch % dp == 0:
        tries += [(("train.microbatch", each),) for each in reversed(divisors(run.train.batch // dp, microbatch))][:1]
    up = -(-run.train.batch // (dp * microbatch)) * dp * microbatch
    tries.append((("train.batch", up),))
    yield Broken("batch", says, tuple(tries))


def length(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A run has an end, said once; the warm-up comes before it."""
    train = run.train
    if train.steps is None and train.tokens is None:
        yield Broken("length", "neither train.steps nor train.tokens is set", mend="set one of them")
    if train.steps is not None and train.tokens is not None:
        tries: tuple[Change, ...] = ((("train.tokens", None),), (("train.steps", None),))
        yield Broken("length", f"train.steps={train.steps} and train.tokens={train.tokens:g} are both set: one is the length", tries)
        return
    steps = train.steps or (ceil(train.tokens / (train.batch * train.seq)) if train.tokens else 0)
    if steps and run.optim.warmup >= steps and run.optim.warmup:
        told = f"train.steps={steps}" if train.steps else f"the {steps} steps of train.tokens={train.tokens:g}"
        yield Broken("warmup", f"optim.warmup={run.optim.warmup} is not shorter than {told}", ((("optim.warmup", steps // 10),),))


def precision(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A device that states its peaks computes in those precisions only."""
    peaks = run.cluster.device.peak
    for each in COMPUTES[run.train.precision] if peaks else ():
        if each not in peaks:
            fits = tuple((("train.precision", name),) for name in ("bf16", "fp16", "fp32") if name in peaks)
            yield Broken(
                "precision", f"train.precision={run.train.precision}: {run.cluster.device.name} does not compute in {each}", fits[:2]
            )
            return
    wide = {"fp32": ("fp32",), "bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32")}.get(run.train.precision, ("bf16", "fp32"))
    if run.train.gradients not in ("auto", *wide):
        says = f"train.gradients={run.train.gradients} does not go with train.precision={run.train.precision}"
        yield Broken("gradients", says, tuple((("train.gradients", name),) for name in ("auto", "fp32")))


def offload(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """ZeRO moves to the host what it shards: the optimizer from stage 1 on, parameters at stage 3."""
    if parallel.offload.optimizer and parallel.zero == 0:
        yield Broken("offload", "parallel.offload.optimizer=true wants parallel.zero of 1 or more", ((("parallel.zero", 1),),))
    if parallel.offload.parameters and parallel.zero < 3:
        yield Broken("offload", f"parallel.offload.parameters=true wants parallel.zero=3, not {parallel.zero}", ((("parallel.zero", 3),),))


def device(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A device's memory is a number by the time a plan is made."""
    if run.cluster.device.memory == "auto":
        yield Broken("device", f"cluster.device.memory=auto: the memory of {run.cluster.device.name} is not known", mend="set it in bytes")


# Rules of the run alone, whatever its degrees; and those of a layout, which a sweep asks of each.
OF_RUN: tuple[Rule, ...] = (names, folders, model, hugging_face, length, rates, window, precision, device)
OF_LAYOUT: tuple[Rule, ...] = (hugging_face_layout, experts, world, tensor, context, pipeline, batch, offload, countable)


def broken(run: Run, parallel: Parallel, microbatch: int, rules: tuple[Rule, ...] = OF_RUN + OF_LAYOUT) -> list[Broken]:
    """Every rule that a run breaks with these degrees; none: it can be laid out."""
    return [each for rule in rules for each in rule(run, parallel, microbatch)]
