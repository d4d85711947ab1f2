"""Properties of planned memory that hold for every family, schedule and layout."""

from dataclasses import fields

from hypothesis import assume, given
from hypothesis import strategies as st

from distrain.tests.fakes.planned_memory import MODELS, memory_of, run_of, stage_bytes, states
from distrain.trainer.plan.layout.schedules import SCHEDULES, peak_in_flight
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Model, Run

DEGREES = st.sampled_from([1, 1, 2, 4])


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
    if not SCHEDULES[schedule].flushes:
        micros = pp + draw(st.integers(0, 3))
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
    parts = sorted(part for stage in memory_of(run).stages for part in stage.parts)
    assert [each for begin, end in parts for each in range(begin, end)] == list(range(run.model.layer_groups))


@given(runs())
def test_weights_gradients_and_optimizer_never_rise_with_zero(run: Run) -> None:
    sizes = [[states(held) for held in stage_bytes(run, "parallel.zero", zero)] for zero in range(4)]
    assert all(less <= more for after, before in zip(sizes[1:], sizes, strict=False) for less, more in zip(after, before, strict=True))


@given(runs())
def test_saved_activations_never_rise_with_recomputation(run: Run) -> None:
    sizes = [[held.activations for held in stage_bytes(run, "parallel.recompute", way)] for way in ("none", "selective", "full")]
    assert all(less <= more for after, before in zip(sizes[1:], sizes, strict=False) for less, more in zip(after, before, strict=True))


@given(runs())
def test_sequence_parallelism_never_saves_more_activations(run: Run) -> None:
    split, whole = (stage_bytes(run, "parallel.sequence", sequence) for sequence in (True, False))
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
    flushed = with_changes(run, [("parallel.schedule", "1f1b")])  # one without a flush has micro-batches of the next steps in flight
    alone = stage_bytes(flushed, "train.batch", int(run.parallel.dp) * run.train.microbatch)
    for stage, one in list(zip(memory_of(run).stages, alone, strict=True))[1:-1]:
        assert stage.bytes.activations == stage.in_flight * one.activations
