"""Warnings of a plan: what costs time or memory, and what the plan assumes; one function each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..models.hf_format.model_type import has_no_class, nearest_classes
from ..models.ops.op_table import block_weights
from ..spec.derived.batch_levels import level_of_step, run_steps, samples_before
from ..spec.derived.data_blends import tokens_of_stages
from ..spec.derived.document_kernel import has_document_kernel
from ..spec.derived.document_pairs import stated_lengths
from ..spec.keys.units import LINK, gib_text, percent_text
from ..spec.numbers.as_text import count_text, plural
from ..spec.problem import Problem
from .axes.powersgd_factors import FactorElements
from .axes.weight_slices import HeadShards, idle_ranks, local_sizes
from .costs.cost_context import CostContext
from .engines import cost_model
from .fixes import engine_problems
from .implausible_links import implausible_links
from .layout.layout import Layout
from .layout.schedule_of_run import delay_of
from .layout_cost import LayoutCost
from .plan_data import Throughput
from .rules.unused_keys import unused_keys

SLOWEST_TO_NEAREST = 1 - 2**-8  # the decay from which bfloat16, of 8 significant bits, loses some moments' change
BUBBLE = 0.2  # share of a step from which a bubble is warned of
DOCUMENTS_RULE = "documents"  # of their unknown lengths
ATTENTION = 0.05  # share of a layer's time from which attention of documents of unknown lengths is warned of

MEASURED_ON_CPU = ("fp32", "bf16")  # precisions that the probe of this machine measures
# The highest model-FLOPs utilisation that was measured and published, by device (without its memory) and precision.
MEASURED: dict[tuple[str, str], tuple[float, str]] = {
    ("V100", "fp16"):  (0.39, "Megatron-LM 2020 scaling tables, 2B"),
    ("A100", "bf16"):  (0.67, "IBM fms-fsdp README, Llama 2 7B"),
    ("A100", "fp16"):  (0.57, "arXiv:2205.05198 table 5, 1T"),
    ("H100", "bf16"):  (0.60, "NVIDIA dgxc-benchmarking 24.11, Llama 3.1 8B"),
    ("H100", "fp8"):   (0.45, "NVIDIA dgxc-benchmarking 24.11, Llama 3.1 405B"),
    ("H200", "bf16"):  (0.58, "docs/gpu_acceptance.md, 16 layers of Llama 3 8B on one"),
    ("GB200", "bf16"): (0.46, "NVIDIA dgxc-benchmarking 25.05, Llama 3.1 405B"),
    ("GB200", "fp8"):  (0.45, "Megatron-Bridge 26.06, Llama 3.1 405B"),
    ("GB300", "fp8"):  (0.55, "Megatron-Bridge 26.02.01, Llama 3.1 405B"),
}  # fmt: skip


def _tensor_crosses_nodes(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    mesh, gpus = layout.mesh, context.run.cluster.gpus
    in_node = mesh.in_node("tp", gpus)
    if in_node < mesh.tp:
        says = f"parallel.tp={mesh.tp} crosses nodes of {gpus}: every layer waits for the link between nodes"
        yield Problem(rule="tp", says=says, mend=f"set parallel.tp to at most {gpus} and parallel.pp higher")


def _pipeline_bubble(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    if cost.seconds is not None and cost.seconds.fill > BUBBLE:
        idle = percent_text(cost.seconds.fill)
        says = f"the pipeline idles {idle} of its time: {layout.micros} micro-batches through {layout.mesh.pp} stages"
        yield Problem(
            rule="bubble", says=says, mend="a larger train.batch, a smaller train.microbatch, fewer stages or schedule=interleaved"
        )


def _late_weights(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """Without a flush gradients are computed with old weights, and no stage waits for the others' norms."""
    parallel, stages, clip = layout.parallel, layout.mesh.pp, context.run.train.clip
    delay = delay_of(parallel)
    if delay is None:
        return
    late = max(delay.late(stage, stages) for stage in (0, stages - 1))
    noun = "update" if late == 1 else "updates"
    says = f"parallel.schedule={parallel.schedule} trains another curve than 1f1b: gradients are of weights up to {late} {noun} old"
    yield Problem(rule="delay", says=says)
    if clip:
        yield Problem(rule="clip", says=f"train.clip={clip:g} clips each stage by its own norm under parallel.schedule={parallel.schedule}")


def _compressed_gradients(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """Compression trains another curve, or compresses nothing."""
    compress, engine = layout.parallel.compress, cost_model(layout.engine)
    if not layout.gradient_sync.rank or layout.mesh.size("data") == 1:
        return
    found, elements = FactorElements(), 0
    for kind, states, stages in zip(layout.partition.kinds, cost.kinds, layout.partition.stages_of_kind, strict=True):
        elements += stages * states.states.elements.trained_parameters
        for expert in (False, True):
            found = found.plus(engine.factors(context, layout, kind, expert=expert).times(stages))
    if not found.matrices:
        says = f"parallel.compress.rank={compress.rank} compresses nothing: the factors of every matrix have as many elements as it has"
        yield Problem(rule="compress", says=says, mend="set a lower parallel.compress.rank")
        return
    share, fewer = percent_text(found.matrices / elements), found.matrices / (found.left + found.right)
    start = f", after {compress.start:,} steps" if compress.start else ""
    says = f"parallel.compress.name={compress.name} trains another curve than none: {share} of the gradients travel as factors of rank "
    yield Problem(rule="compress", says=f"{says}{compress.rank}, {fewer:.1f} times fewer elements{start}")


def _workers_alone(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """Replicas that step alone train another curve, and clip alone."""
    workers, every, clip = layout.mesh.size("data") // layout.worker_ranks, layout.parallel.sync.every, context.run.train.clip
    if workers == 1:
        return
    says = f"parallel.sync.every={every} trains another curve than 1: {workers} workers take {every} steps alone, then one together"
    yield Problem(rule="sync", says=says)
    if clip:
        yield Problem(rule="clip", says=f"train.clip={clip:g} clips each worker by its own norm under parallel.sync.every={every}")


def _stalled_moments(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """Rounded to nearest, a moment whose decay in a step is less than half of bfloat16's spacing does not decay."""
    optim = context.run.optim
    if optim.moments != "bf16" or optim.rounding != "nearest":
        return
    first, second = optim.betas
    decays = {"adamw": (("optim.betas", first), ("optim.betas", second)), "sgd": (("optim.momentum", optim.momentum),)}
    matrices = (("optim.muon.momentum", optim.muon.momentum), *decays["adamw"])
    key, slowest = max(decays.get(optim.name, matrices), key=lambda each: each[1])
    if slowest > SLOWEST_TO_NEAREST:
        says = f"optim.rounding=nearest loses what {key} of {slowest:g} takes off a bf16 moment in a step"
        yield Problem(rule="moments", says=f"{says}: it hardly decays", mend="set optim.rounding=stochastic")


def _stale_gradients(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """Gradients that are used late train another curve."""
    if late := layout.gradient_sync.staleness:
        says = f"parallel.staleness={late} trains another curve than 0: gradients are of weights {plural(late, 'step')} old"
        yield Problem(rule="staleness", says=says)


def _unbalanced_stages(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    counts, chunks, parts = layout.partition.whole_counts, layout.parallel.chunks, layout.partition.whole_parts
    if min(counts) == max(counts):
        if min(parts) < max(parts):
            says = f"{sum(parts)} layers over {len(parts)} parts, two a stage: the bubble is planned as if they were balanced"
            yield Problem(rule="uneven", says=says)
        if counts[0] % chunks:
            yield Problem(
                rule="uneven", says=f"{counts[0]} layers of a stage over {chunks} chunks: the bubble is planned as if they were balanced"
            )
        return
    delay = ""
    if cost.seconds is not None:
        times = [kind.passes.compute for kind in cost.kinds]
        mean = sum(each * stages for each, stages in zip(times, layout.partition.stages_of_kind, strict=True)) / len(counts)
        lost = layout.micros * (max(times) - mean) / cost.seconds.step
        delay = f"; waiting for the busiest stage costs {percent_text(lost)} of a step"
    says = f"{sum(counts)} layers over {len(counts)} stages: {min(counts)} to {max(counts)} a stage{delay}"
    yield Problem(rule="uneven", says=says)


def _mfu_beyond_measured(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    run = context.run
    if throughput is None or run.cluster.device.kind == "cpu":  # a CPU's rates are measured on the machine itself
        return
    device = run.cluster.device.name
    known = MEASURED.get((device.split("-")[0], run.train.precision))
    if known is None:
        says = f"no measured run of {device} in {run.train.precision} is known: its MFU is calculated only"
        yield Problem(rule="mfu", says=says)
        return
    highest, source = known
    if throughput.mfu > highest:
        planned = percent_text(throughput.mfu)
        says = f"an MFU of {planned} is above the highest published for {device}, {percent_text(highest)} ({source})"
        yield Problem(rule="mfu", says=says)


# Dims that the tensor axis splits and padding lengthens, and whose matrix products they lengthen.
PADDED = {
    "heads": "attention",
    "ffn": "the feed-forward",
    "expert_ffn": "the experts",
    "shared_ffn": "the shared experts",
    "vocab": "the head",
}


def _unfinished_rampup(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """A run that ends before its batch is train.batch."""
    train = context.run.train
    last = level_of_step(train, run_steps(train) - 1)
    if last.batch < train.batch:
        says = f"the run ends with steps of {plural(last.batch, 'sequence')}: train.batch={train.batch} is never trained"
        yield Problem(rule="rampup", says=says, mend="end train.rampup.until before the run")


def _unread_stages(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """A run that ends before its last stage of data begins."""
    run = context.run
    tokens = samples_before(run.train, run_steps(run.train)) * run.train.seq
    many, begun = len(run.data.stages or ()), len(tokens_of_stages(run.data, tokens))
    if begun < many:
        says = f"the run ends at {count_text(tokens)} tokens, in stage {begun} of {many} of data.stages: later ones are never read"
        yield Problem(rule="stages", says=says, mend="end the stages before the run ends")


def _unknown_documents(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """Attention inside documents of unknown lengths, where it is a share of the computation."""
    run, layer = context.run, cost.blocks.layer
    if not has_document_kernel(run) or stated_lengths(run.data) or layer.forward is None or layer.backward is None:
        return
    share = layer.core / (layer.forward + layer.backward)
    if share > ATTENTION:
        says = f"data.documents=true: attention, {percent_text(share)} of a layer's time, is planned as if each sequence were one document"
        yield Problem(rule=DOCUMENTS_RULE, says=says, mend="set data.document_tokens to their lengths")


def _padding(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    model, sizes, degree = context.run.model, context.table.sizes, layout.mesh.tp
    local = local_sizes(sizes, degree, vocab_multiple=model.vocab_multiple)
    table = context.table
    used_dims = {dim for weight in block_weights(table.embedding + table.dense_layer + table.layer + table.head) for dim in weight.dims}
    for dim, part in PADDED.items():
        padded = local[dim] * degree
        if dim not in used_dims or padded == sizes[dim]:
            continue
        share = 1 - sizes[dim] / padded
        lost = percent_text(share) if share >= 0.01 else "less than 1 %"
        idle_count = idle_ranks(dim, sizes, degree, vocab_multiple=model.vocab_multiple)
        idle = f", and {idle_count} of {degree} ranks {'holds' if idle_count == 1 else 'hold'} padding only" if idle_count else ""
        why = f" so that tp {degree} splits it" if degree > 1 else f", a multiple of model.vocab_multiple={model.vocab_multiple}"
        says = f"model.{dim}={sizes[dim]} is padded to {padded}{why}: {lost} of {part}'s products are padding{idle}"
        yield Problem(rule=dim, says=says)


def _replicated_kv_heads(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    sizes, degree = context.table.sizes, layout.mesh.tp
    kv_heads, copies = sizes["kv_heads"], HeadShards(sizes["heads"], sizes["kv_heads"], degree).copies
    if copies > 1:
        yield Problem(rule="kv_heads", says=f"parallel.tp={degree} is more than model.kv_heads={kv_heads}: each is held by {copies} ranks")


def _useless_recompute(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    parallel, train = layout.parallel, context.run.train
    if parallel.recompute == "selective" and train.attention == "flash":
        says = "parallel.recompute=selective with train.attention=flash: flash attention stores no scores: recomputing saves nothing"
        yield Problem(rule="recompute", says=says, mend="set parallel.recompute=none")


def _tight_memory(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    if 0.95 * context.capacity < cost.peak <= context.capacity:
        says = f"{gib_text(cost.peak)} GiB of {gib_text(context.capacity)} leaves little room for fragmentation"
        yield Problem(rule="tight", says=says)


def _missing_times(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    if cost.seconds is not None:
        yield from context.unstated_float32()
        return
    device = (cluster := context.run.cluster).device
    if not context.table.has_costs:
        says = f"no times: the operations of family {context.run.model.family} are not in a table"
        yield Problem(rule="time", says=says, mend="`distrain fit` measures them as it trains")
    elif layout.offloads and device.kind == "cpu":
        yield Problem(rule="time", says="no times: a CPU has no separate host: offloading copies within its memory")
    elif device.peak.get(context.run.train.precision) is None or device.bandwidth is None:
        missing = {
            f"cluster.device.peak.{context.run.train.precision} (FLOP/s)": device.peak.get(context.run.train.precision),
            "cluster.device.bandwidth (bytes/s)": device.bandwidth,
        }
        keys = " and ".join(key for key, value in missing.items() if value is None)
        is_measured = device.kind == "cpu" and context.run.train.precision in MEASURED_ON_CPU
        measures = "`distrain fit` measures this machine, once; or " if is_measured else ""
        says = f"no times: how fast {device.name} is in {context.run.train.precision} is not stated"
        yield Problem(rule="time", says=says, mend=f"{measures}set {keys}")
    elif layout.offloads and context.host_rates is None:
        says = "no times: how fast its node's host is, to which the run offloads, is not stated"
        yield Problem(rule="time", says=says, mend=f"set cluster.host.bandwidth (bytes/s) and .link ({LINK})")
    else:
        where = "inside" if cluster.inside is None and cluster.gpus > 1 else "between"
        yield Problem(
            rule="time",
            says=f"no times: cluster.{where} is not stated",
            mend=f"set cluster.{where}.bandwidth ({LINK}) and .latency (seconds)",
        )


def _missing_activations(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    if not context.table.has_costs:
        says = f"activations of family {context.run.model.family} are not known: a step needs more memory than the plan says"
        yield Problem(rule="activations", says=says, mend="start with a small train.microbatch; `distrain report` shows what a step holds")


def _unused_keys(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    yield from unused_keys(context.run, layout.mesh)


def _engine_limits(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    yield from engine_problems(context.run)


def _no_hf_class(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    if has_no_class(context.run):
        says = "`export` to Hugging Face's format would refuse this model: no class of transformers computes it"
        yield Problem(rule="export", says=says, mend=nearest_classes(context.run))


WARNINGS: tuple[Callable[[CostContext, Layout, LayoutCost, Throughput | None], Iterator[Problem]], ...] = (
    _missing_times,
    _missing_activations,
    implausible_links,
    _tight_memory,
    _tensor_crosses_nodes,
    _pipeline_bubble,
    _late_weights,
    _compressed_gradients,
    _workers_alone,
    _stalled_moments,
    _stale_gradients,
    _unbalanced_stages,
    _unfinished_rampup,
    _unread_stages,
    _unknown_documents,
    _padding,
    _replicated_kv_heads,
    _useless_recompute,
    _mfu_beyond_measured,
    _unused_keys,
    _engine_limits,
    _no_hf_class,
)


def warnings(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> tuple[Problem, ...]:
    """Return the warnings of a plan."""
    return tuple(each for warning in WARNINGS for each in warning(context, layout, cost, throughput))
