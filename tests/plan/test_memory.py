"""Memory of every stage: ZeRO's and Megatron's bytes a parameter, Korthikanti's worked figures, and properties of every layout."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distrain.trainer.plan.changed_run import with_changes
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.result import Memory, MemoryBytes
from distrain.trainer.plan.schedules import SCHEDULES, peak_in_flight
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

# Large enough for every run, so that nothing is mended.
DEVICE = Device(name="A100", memory=1e18, bandwidth=2e12, peak={"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12}, units=108, context=7e8)
LINK = Link(bandwidth=25e9, latency=1e-5)
GIB = 2**30


def run_of(model: Model, ranks: int, **changes: Any) -> Run:
    """A run on nodes of 8 (fewer where there are fewer ranks), with keys changed: parallel__tp=8."""
    gpus = min(8, ranks)
    cluster = Cluster(nodes=ranks // gpus, gpus=gpus, device=DEVICE, inside=LINK, between=LINK)
    train = Train(batch=ranks, seq=2048, steps=1, precision="fp16", attention="math")
    run = Run(name="test", model=model, cluster=cluster, parallel=Parallel(), train=train)
    return with_changes(run, [(key.replace("__", "."), value) for key, value in changes.items()])


def memory_of(run: Run) -> Memory:
    plan = make_plan(run)
    assert plan.problems == ()
    assert plan.memory is not None
    return plan.memory


def first(run: Run) -> MemoryBytes:
    return memory_of(run).stages[0].bytes


def states(held: MemoryBytes) -> int:
    return held.weights + held.gradients + held.optimizer


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, **sizes: Any) -> Model:
    sizes = {"tied": True, "dropout": 0.1} | sizes
    return Model(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=vocab, bias=True, **sizes)


# 32 (12 h^2 + 13 h) + (336534 + 2048 + 2) h = 7.5e9 parameters, and 127 layers of 25600 with 44399 words 1e12.
ZERO_7B = gpt(32, 4000, 32, vocab=336534)
ZERO_1T = gpt(127, 25600, 160, vocab=44399)


# arXiv:1910.02054 figure 1: 120, 31.4, 16.6 and 1.9 GB for 7.5B parameters on 64 ranks, K = 12.
@pytest.mark.parametrize(("zero", "each", "gigabytes"), [(0, 16, 120), (1, 4 + 12 / 64, 31.4), (2, 2 + 14 / 64, 16.6), (3, 16 / 64, 1.9)])
def test_zero_stages_take_the_papers_gigabytes_of_7_5b_on_64_ranks(zero: int, each: float, gigabytes: float) -> None:
    held = states(first(run_of(ZERO_7B, 64, parallel__zero=zero)))
    assert held == each * 7.5e9
    assert round(held / 1e9, 1) == gigabytes


def test_a_trillion_parameters_take_16_gigabytes_a_rank_on_1024() -> None:
    """arXiv:1910.02054 section 1: 16 TB over 1024."""
    assert states(first(run_of(ZERO_1T, 1024, parallel__zero=3))) == 16e12 / 1024


# Bytes a parameter that every rank has and that ranks share: Megatron-LM docs/user-guide/features/dist_optimizer.md, whose
# fp16 optimizer keeps a second, fp32 copy of the gradients.
# fmt: off
VARIANTS = pytest.mark.parametrize(("precision", "gradients", "copy", "name", "whole", "shared"), [
    ("fp16", "auto", False, "adamw", 4, 12),
    ("fp16", "auto", True,  "adamw", 4, 16),
    ("bf16", "fp32", False, "adamw", 6, 12),
    ("fp32", "auto", False, "adamw", 8,  8),
    ("bf16", "auto", False, "sgd",   4,  4),
])
# fmt: on


@VARIANTS
@pytest.mark.parametrize("d", [2, 8, 64])
def test_the_distributed_optimizer_shards_its_bytes_of_a_parameter(
    precision: str, gradients: str, copy: bool, name: str, whole: int, shared: int, d: int
) -> None:
    keys = {"train__precision": precision, "train__gradients": gradients, "optim__gradient_copy": copy, "optim__name": name}
    assert states(first(run_of(ZERO_7B, d, **keys))) == (whole + shared) * 7.5e9
    assert states(first(run_of(ZERO_7B, d, **keys, parallel__zero=1))) == (whole + shared / d) * 7.5e9


# arXiv:2205.05198 table 3: layers, hidden, heads, stages, chunks of a stage, micro-batch; tp 8, seq 2048, vocab 51200.
# fmt: off
KORTHIKANTI = {
    "22B":  ( 48,  6144,  64,  1, 1, 4),
    "175B": ( 96, 12288,  96,  8, 3, 1),
    "530B": (105, 20480, 128, 35, 3, 1),
    "1T":   (128, 25600, 160, 64, 1, 1),
}
# Its figure 1, in GiB, first stage: parameters and optimizer; activations as they are, and with sequence parallel and selective
# recomputation. The numbers are of validation.py in Calculon's repository: of a stage's layers, without the embedding, and of
# parameters the matrices alone (ours, with biases and norms, are up to 0.1 % more).
FIGURE_1 = [
    ("22B",  45.56,  59.25,  9.56),
    ("175B", 45.56,  66.84, 12.35),
    ("530B", 31.64, 114.02, 23.08),
    ("1T",   32.96, 131.25, 26.56),
]
# Its figure 7: activations in % of tensor parallel's with sequence parallel, selective recomputation, both, full recomputation.
FIGURE_7 = [
    ("22B",  66.84, 49.42, 16.18, 7.64),
    ("175B", 62.04, 56.53, 18.49, 8.71),
    ("530B", 58.31, 62.04, 20.27, 9.42),
    ("1T",   58.31, 62.04, 20.27, 9.42),
]
# fmt: on


def of_layers(name: str, **changes: Any) -> tuple[float, float]:
    """(parameters and optimizer, activations) of the first stage's layers, in bytes: what more layers add, in proportion."""
    layers, hidden, heads, stages, chunks, micro = KORTHIKANTI[name]
    keys = {"parallel__tp": 8, "parallel__pp": stages, "parallel__chunks": chunks, "train__microbatch": micro, "train__gradients": "fp32"}
    keys |= {"parallel__schedule": "interleaved" if chunks > 1 else "1f1b", "train__batch": micro * 4 * stages}
    held = []
    for more in (0, stages * chunks):
        held.append(first(run_of(gpt(layers + more, hidden, heads), 8 * stages, **keys | changes)))
    share = layers / (stages * chunks)
    return (states(held[1]) - states(held[0])) * share, (held[1].activations - held[0].activations) * share


@pytest.mark.parametrize(("name", "parameters", "activations", "least"), FIGURE_1)
def test_a_first_stage_holds_korthikantis_gibibytes(name: str, parameters: float, activations: float, least: float) -> None:
    held, kept = of_layers(name)
    _, fewer = of_layers(name, parallel__sequence=True, parallel__recompute="selective")
    assert held / GIB == pytest.approx(parameters, rel=1e-3)
    assert [round(each / GIB, 2) for each in (kept, fewer)] == [activations, least]


@pytest.mark.parametrize(("name", "sequence", "selective", "both", "full"), FIGURE_7)
def test_the_remaining_share_of_activations_is_korthikantis(name: str, sequence: float, selective: float, both: float, full: float) -> None:
    """Within 0.15 of a percentage point: the shares were read off a drawing."""
    ways = ({"sequence": True}, {"recompute": "selective"}, {"sequence": True, "recompute": "selective"}, {"recompute": "full"})
    whole = of_layers(name)[1]
    left = [100 * of_layers(name, **{f"parallel__{key}": value for key, value in way.items()})[1] / whole for way in ways]
    assert left == pytest.approx([sequence, selective, both, full], abs=0.15)


# What holds for every layout.
DEGREES = st.sampled_from([1, 1, 2, 4])
MODELS: list[dict[str, Any]] = [
    {"family": "gpt", "bias": True, "tied": True, "dropout": 0.1},
    {"family": "llama", "norm": "rmsnorm", "act": "swiglu", "positions": "rope", "kv_heads": 2, "ffn": 96},
    {"family": "moe", "act": "swiglu", "positions": "rope", "kv_heads": 4, "ffn": 96, "experts": 8, "top_k": 2, "shared_experts": 1},
    {"family": "bert", "bias": True, "tied": True, "dropout": 0.1},
]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A small legal run of any family, schedule and layout; layers may be uneven over the stages."""
    shape = draw(st.sampled_from(MODELS))
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    ep = draw(st.sampled_from([1, 2, 4])) if shape["family"] == "moe" else 1
    tp, cp, dp, pp = draw(DEGREES), draw(st.sampled_from([1, 1, 2])), ep * draw(DEGREES), draw(st.integers(1, 4))
    chunks, layers, micros = 1, draw(st.integers(pp, 12)), draw(st.integers(1, 9))
    if SCHEDULES[schedule].chunked:
        chunks, micros = draw(st.integers(2, 3)), pp * draw(st.integers(1, 3))
        layers = pp * chunks * draw(st.integers(1, 2))
    if SCHEDULES[schedule].folded:
        layers, micros = draw(st.integers(2 * pp, 12)), 2 * pp + draw(st.integers(0, 3))
    micro = draw(st.sampled_from([1, 2, 3]))
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    keys = {
        "cluster__nodes": 1,
        "cluster__gpus": tp * cp * dp * pp,
        "parallel__dp": dp,
        "parallel__tp": tp,
        "parallel__pp": pp,
        "parallel__cp": cp,
        "parallel__ep": ep,
        "parallel__zero": draw(st.integers(0, 3)),
        "parallel__shard": draw(st.sampled_from(["all", ep, dp, dp * cp])),
        "parallel__schedule": schedule,
        "parallel__chunks": chunks,
        "parallel__sequence": draw(st.booleans()),
        "parallel__recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "parallel__bucket": draw(st.sampled_from([1000, 50_000_000])),
        "train__seq": 64,
        "train__microbatch": micro,
        "train__batch": micro * dp * micros,
        "train__precision": precision,
        "train__gradients": draw(st.sampled_from(["auto", "fp32"])),
        "train__attention": draw(st.sampled_from(["flash", "math"])),
    }
    return run_of(Model(**shape, layers=layers, hidden=64, heads=8, vocab=draw(st.sampled_from([1000, 1001]))), 1, **keys)


def also(run: Run, key: str, value: object) -> list[MemoryBytes]:
    return [stage.bytes for stage in memory_of(with_changes(run, [(key, value)])).stages]


@given(runs())
def test_a_stages_total_is_the_sum_of_its_kinds(run: Run) -> None:
    memory = memory_of(run)
    for stage in memory.stages:
        kinds = {row.name: getattr(stage.bytes, row.name) for row in fields(stage.bytes)}
        assert kinds.pop("total") == sum(kinds.values())
        assert all(type(size) is int and size >= 0 for size in kinds.values())
    assert memory.peak == max(stage.bytes.total for stage in memory.stages) == memory.stages[memory.stage].bytes.total


@given(runs())
def test_stages_hold_every_layer_once_in_order(run: Run) -> None:
    parts = sorted(part for stage in memory_of(run).stages for part in (stage.layers, stage.back) if part is not None)
    assert [each for begin, end in parts for each in range(begin, end)] == list(range(run.model.layers))


@given(runs())
def test_weights_gradients_and_optimizer_never_rise_with_zero(run: Run) -> None:
    sizes = [[states(held) for held in also(run, "parallel.zero", zero)] for zero in range(4)]
    assert all(less <= more for after, before in zip(sizes[1:], sizes, strict=False) for less, more in zip(after, before, strict=True))


@given(runs())
def test_saved_activations_never_rise_with_recomputation(run: Run) -> None:
    sizes = [[held.activations for held in also(run, "parallel.recompute", way)] for way in ("none", "selective", "full")]
    assert all(less <= more for after, before in zip(sizes[1:], sizes, strict=False) for less, more in zip(after, before, strict=True))


@given(runs())
def test_sequence_parallelism_never_saves_more_activations(run: Run) -> None:
    split, whole = (also(run, "parallel.sequence", sequence) for sequence in (True, False))
    assert all(less.activations <= more.activations for less, more in zip(split, whole, strict=True))


@given(runs())
def test_micro_batches_in_flight_are_those_of_the_schedules_actions(run: Run) -> None:
    parallel, dp = run.parallel, int(run.parallel.dp)
    row, micros = SCHEDULES[parallel.schedule], run.train.batch // (dp * run.train.microbatch)
    for stage in memory_of(run).stages:
        actions = row.actions(stage.index, parallel.pp, micros, parallel.chunks)
        assert stage.in_flight == (peak_in_flight(actions, row.parts(parallel.chunks)) if parallel.pp > 1 else 1)


@given(runs())
def test_a_stage_saves_activations_of_each_micro_batch_in_flight(run: Run) -> None:
    """An inner stage holds layers alone, so its activations are in proportion to those of a step of one micro-batch."""
    schedule = SCHEDULES[run.parallel.schedule]
    assume(run.parallel.pp > 2 and not (schedule.chunked or schedule.folded))
    alone = also(run, "train.batch", int(run.parallel.dp) * run.train.microbatch)
    for stage, one in list(zip(memory_of(run).stages, alone, strict=True))[1:-1]:
        assert stage.bytes.activations == stage.in_flight * one.activations


# One mechanism each, on a layer of 12 h^2 + 13 h parameters.
H, V = 1024, 50000
LAYER = 12 * H * H + 13 * H
SMALL = gpt(4, H, 16, vocab=V)


def parameters(run: Run) -> list[int]:
    return [stage.parameters for stage in memory_of(run).stages]


def test_tied_weights_are_held_once_on_one_stage_and_twice_on_two() -> None:
    (alone,) = parameters(run_of(SMALL, 1))
    assert alone == 4 * LAYER + V * H + 2048 * H + 2 * H
    assert parameters(run_of(SMALL, 2, parallel__pp=2)) == [2 * LAYER + V * H + 2048 * H, 2 * LAYER + V * H + 2 * H]


def test_untied_embedding_and_head_are_two_weights_everywhere() -> None:
    apart = gpt(4, H, 16, vocab=V, tied=False)
    assert sum(parameters(run_of(apart, 1))) == sum(parameters(run_of(apart, 2, parallel__pp=2))) == 4 * LAYER + 2 * V * H + 2050 * H


def test_a_vocabulary_is_padded_so_that_each_rank_has_a_multiple() -> None:
    """Megatron pads GPT-2's 50257 words to 51200 at tp 8: 128 x 8 goes into it 50 times."""
    rank = {"parallel__tp": 8, "model__vocab_multiple": 128}
    assert parameters(run_of(gpt(4, H, 16, vocab=50257), 8, **rank)) == parameters(run_of(gpt(4, H, 16, vocab=51200), 8, **rank))
    assert parameters(run_of(gpt(4, H, 16, vocab=50257), 1)) == [4 * LAYER + 50257 * H + 2050 * H]


def test_heads_and_feed_forwards_that_do_not_divide_are_padded() -> None:
    """6 heads on 4 ranks are 2 each, 10 rows of a feed-forward 3 each; biases of columns go with them."""
    model = gpt(1, 48, 6, vocab=1024, ffn=10)
    heads, rows, head_dim = 2, 3, 8
    columns = 3 * (48 + 1) * heads * head_dim + (48 + 1) * rows
    expected = columns + heads * head_dim * 48 + rows * 48 + (2 + 2 + 1 + 1) * 48 + (1024 // 4 + 2048 + 2) * 48
    assert parameters(run_of(model, 4, parallel__tp=4)) == [expected]


def test_key_and_value_heads_are_replicated_where_ranks_are_more() -> None:
    few, many = (Model(**MODELS[1] | {"kv_heads": heads}, layers=2, hidden=64, heads=8, vocab=1000) for heads in (2, 8))
    assert parameters(run_of(few, 8, parallel__tp=8)) == parameters(run_of(many, 8, parallel__tp=8))
    assert parameters(run_of(few, 2, parallel__tp=2)) < parameters(run_of(many, 2, parallel__tp=2))


def test_zero_3_holds_two_layers_gathered_and_the_gradients_of_one() -> None:
    small = gpt(4, H, 16, vocab=1000)
    whole, sharded = (first(run_of(small, 8, parallel__zero=zero)) for zero in (0, 3))
    assert sharded.buffers - whole.buffers == (2 + 2 + 2) * LAYER


def test_zero_1_and_2_hold_a_bucket_of_gradients() -> None:
    for zero in (1, 2):
        held = first(run_of(SMALL, 8, parallel__zero=zero, parallel__bucket=1_000_000))
        assert held.buffers - first(run_of(SMALL, 8)).buffers == 2 * 1_000_000


def test_zero_over_one_rank_changes_nothing() -> None:
    assert [first(run_of(SMALL, 1, parallel__zero=zero)) for zero in range(4)] == [first(run_of(SMALL, 1))] * 4


def test_a_hybrid_shard_divides_by_its_ranks_alone() -> None:
    shared = states(first(run_of(ZERO_7B, 64, parallel__zero=3, parallel__shard=8)))
    assert shared == 16 * 7.5e9 / 8


def test_experts_are_divided_among_expert_ranks_and_sharded_over_the_others() -> None:
    model = Model(family="moe", layers=1, hidden=64, heads=8, vocab=1024, ffn=128, experts=8, top_k=2, positions="rope")
    experts = 8 * 3 * 64 * 128
    whole, split = (memory_of(run_of(model, 8, parallel__ep=ep)).stages[0] for ep in (1, 4))
    assert whole.parameters - split.parameters == experts - experts // 4
    rest = whole.parameters - experts
    assert states(split.bytes) == 16 * (rest + experts // 4)
    sharded = first(run_of(model, 8, parallel__ep=4, parallel__zero=3))
    assert states(sharded) == 16 * (rest + experts) // 8


def test_an_offloaded_optimizer_and_offloaded_weights_are_not_on_the_device() -> None:
    here = first(run_of(SMALL, 8, parallel__zero=3))
    optimizer = first(run_of(SMALL, 8, parallel__zero=3, parallel__offload__optimizer=True))
    everything = first(run_of(SMALL, 8, parallel__zero=3, parallel__offload__optimizer=True, parallel__offload__parameters=True))
    assert (optimizer.weights, optimizer.gradients, optimizer.optimizer) == (here.weights, here.gradients, 0)
    assert (everything.weights, everything.gradients, everything.optimizer) == (0, here.gradients, 0)


def test_logits_take_two_bytes_and_their_softmax_four() -> None:
    held = first(run_of(SMALL, 2, parallel__tp=2, train__microbatch=2, train__batch=2))
    assert held.logits == 2048 * 2 * (V // 2) * (2 + 4)


def test_gpipe_keeps_every_micro_batchs_logits_on_the_last_stage() -> None:
    stages = {
        name: memory_of(run_of(SMALL, 2, parallel__pp=2, parallel__schedule=name, train__batch=6)).stages for name in ("gpipe", "1f1b")
    }
    assert stages["gpipe"][1].bytes.logits == 6 * stages["1f1b"][1].bytes.logits == 6 * 2048 * V * 6
    assert stages["gpipe"][0].bytes.logits == 0


def test_a_folded_pipeline_has_both_ends_on_its_first_stage() -> None:
    """Stages 0 and 1 of 2 hold layers 0 and 3, 1 and 2; a tied weight is one there, and the logits of one micro-batch at once."""
    first, last = memory_of(run_of(SMALL, 2, parallel__pp=2, parallel__schedule="dualpipev", train__batch=4)).stages
    assert (first.layers, first.back, last.layers, last.back) == ((0, 1), (3, 4), (1, 2), (2, 3))
    assert (first.parameters, last.parameters) == (2 * LAYER + V * H + 2048 * H + 2 * H, 2 * LAYER)
    assert (first.in_flight, last.in_flight) == (2.5, 2.5)
    assert (first.bytes.logits, last.bytes.logits) == (2048 * V * 6, 0)


def test_schedules_that_do_not_flush_keep_older_weights() -> None:
    run = run_of(SMALL, 4, parallel__pp=4)
    once, stashed, twice = (also(run, "parallel.schedule", name) for name in ("1f1b", "pipedream", "pipedream_2bw"))
    assert [held.weights for held in stashed] == [(4 - stage) * held.weights for stage, held in enumerate(once)]
    assert [held.weights for held in twice] == [2 * held.weights for held in once]


def test_context_parallelism_splits_saved_activations() -> None:
    whole, split = (first(run_of(SMALL, 8, parallel__cp=cp, train__attention="flash")) for cp in (1, 8))
    assert split.activations * 8 == whole.activations


def test_the_drivers_memory_is_overhead() -> None:
    assert first(run_of(SMALL, 1)).overhead == 700_000_000


# What DeepSpeed and our own modules hold, on a CPU: as they were counted on live tensors.
CPU = Device(name="cpu", memory=1e12, kind="cpu")
TINY = gpt(4, 64, 4, vocab=250, dropout=0.0)


def cpu(ranks: int, **changes: Any) -> Run:
    keys: dict[str, Any] = {"cluster__device": CPU, "train__precision": "fp32", "train__seq": 32, "train__batch": 8, "train__microbatch": 1}
    return run_of(TINY, ranks, **keys | changes)


@pytest.mark.parametrize("keys", [{}, {"parallel__tp": 2}, {"parallel__pp": 2}, {"parallel__tp": 2, "parallel__pp": 2}])
@pytest.mark.parametrize("zero", [0, 1])
def test_deepspeed_holds_a_stages_own_parameters(keys: dict[str, Any], zero: int) -> None:
    """Weights 4 bytes, gradients 4, Adam's states 8 and from stage 1 on a master copy, of which each of dp ranks has its part."""
    memory = memory_of(cpu(4, parallel__zero=zero, **keys))
    assert memory.form == "torch"
    dp = 4 // (keys.get("parallel__tp", 1) * keys.get("parallel__pp", 1))
    for stage in memory.stages:
        held, each = stage.bytes, stage.parameters
        assert held.gradients == 4 * each
        assert held.weights == pytest.approx(4 * each, abs=16 * dp if zero else 0)  # flat tensors are padded
        assert held.optimizer == pytest.approx(12 * each / dp if zero else 8 * each, abs=48 * zero)


def test_a_pipelines_gradients_are_whole_until_the_last_backward() -> None:
    alone, first, _ = (
        stage.bytes.gradients / stage.parameters
        for keys in ({"train__batch": 4}, {"parallel__pp": 2, "train__batch": 2})
        for stage in memory_of(cpu(4, parallel__zero=1, **keys)).stages
    )
    assert alone < 4 == first


def test_rotary_angles_of_the_whole_sequence_are_saved_once_a_stage() -> None:
    """head_dim float32 a token and micro-batch in flight, and once for each of two parts where the pipeline is folded."""
    each = 32 * 16 * 4
    keys: dict[str, Any] = {"parallel__tp": 2, "parallel__sequence": True, "parallel__pp": 2}
    for schedule, flights, parts in (("1f1b", (2, 1), 1), ("dualpipev", (2.5, 2.5), 2)):
        with_angles, without = (
            [stage.bytes.activations for stage in memory_of(cpu(4, **keys, parallel__schedule=schedule, model__positions=word)).stages]
            for word in ("rope", "none")
        )
        assert [one - other for one, other in zip(with_angles, without, strict=True)] == [parts * each * held for held in flights]


def test_a_head_saves_one_float32_a_token_of_the_whole_sequence_and_its_logits() -> None:
    """Beside the input of the last norm and the head, a mean and a deviation: all but the logits are kept of the one in hand."""
    for tp, sequence in ((1, False), (2, False), (2, True)):
        stages = memory_of(cpu(4, parallel__tp=tp, parallel__pp=2, parallel__sequence=sequence)).stages
        kept = stages[1].bytes.activations - (stages[0].bytes.activations - 2 * 32 * 8) / 2
        run = 32 // tp if sequence else 32
        assert kept == 32 * 4 + run * (2 * 64 * 4 + 2 * 4)
        assert stages[1].bytes.logits == 32 * 250 // tp * 4


def test_a_pipeline_engine_holds_input_and_output_of_each_micro_batch_in_flight() -> None:
    """A stream of 32 x 64 float32; of each in flight one received and one sent on, and a buffer for each way; a bucket is whole."""
    stream = 32 * 64 * 4
    stages = memory_of(cpu(4, parallel__pp=4, parallel__zero=1)).stages
    streams = [stage.bytes.buffers / stream - 4 * stage.parameters / stream for stage in stages]
    assert streams == pytest.approx([4 + 1, 2 * 3 + 2, 2 * 2 + 2, 1 + 1])
