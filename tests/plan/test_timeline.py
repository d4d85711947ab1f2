"""A step's timeline: it is as long as the plan says, its spans follow the rules of pipelines, and each second has one cause."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from distrain.cli.config.load import load_recipe
from distrain.cli.keys.config_files import recipes
from distrain.tests.fakes.action_orders import Lists, Pipeline, action_orders
from distrain.trainer.plan.layout.action_csv import write_action_csv
from distrain.trainer.plan.layout.schedules import SCHEDULES, stage_and_chunk
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.plan.timeline.make_timeline import make_timeline
from distrain.trainer.plan.timeline.step_costs import StepCosts, step_costs
from distrain.trainer.plan.timeline.timeline import Timeline, held_activations
from distrain.trainer.spec.run import Run

STAGES, MICROS = 4, 16
# fmt: off
PIPELINE = (
    "llama3_8b_1node", "engine=native", f"parallel.pp={STAGES}", "parallel.dp=2", "parallel.tp=1", "train.microbatch=1",
    f"train.batch={2 * MICROS}",
)
# fmt: on
HIDDEN = "parallel.overlap.pipeline=true"
CHUNKED = [(name, chunks) for name, row in SCHEDULES.items() for chunks in ((2, 4) if row.chunked else (1,))]
EVERY_SCHEDULE = pytest.mark.parametrize(("name", "chunks"), CHUNKED)


def run_of(recipe: str, *words: str) -> Run:
    return load_recipe(recipe, words)


def costs_of(run: Run) -> StepCosts:
    costs = step_costs(run)
    assert costs
    return costs


def pipeline(name: str, chunks: int, *words: str) -> StepCosts:
    """The costs of four stages of a schedule."""
    return costs_of(run_of(*PIPELINE, f"parallel.schedule={name}", f"parallel.chunks={chunks}", *words))


def timed_plan(run: Run) -> Plan | None:
    """The plan of a run; None: it has no times."""
    plan = make_plan(run)
    return plan if plan.time else None


@pytest.mark.parametrize("recipe", sorted(recipes(None)))
def test_a_recipes_step_is_as_long_as_planned(recipe: str) -> None:
    """A plan lets each stage wait for two sends a micro-batch; the last stage, which the others wait for, has one."""
    run = run_of(recipe)
    if timed_plan(run) is None:
        pytest.skip("the speed of this machine is not measured")
    costs = costs_of(run)
    apart = 1e-9 if costs.layout.mesh.pp == 1 else 0.03
    assert make_timeline(costs).seconds == pytest.approx(costs.planned, rel=apart)


@EVERY_SCHEDULE
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_schedules_step_is_as_long_as_planned(name: str, chunks: int, zero: int) -> None:
    hidden, shown = (pipeline(name, chunks, f"parallel.zero={zero}", *words) for words in ((HIDDEN,), ()))
    repeats = any(
        message_round.is_repeated and message_round.exposed for stage in hidden.rounds for message_round in stage
    )  # a plan has them after all passes
    even = name not in ("interleaved", "zb_v") and not repeats  # whose closed forms count all parts as equally long
    assert make_timeline(hidden).seconds == pytest.approx(hidden.planned, rel=1e-6 if even else 0.03)
    assert make_timeline(shown).seconds == pytest.approx(shown.planned, rel=0.03)


def check_order(timeline: Timeline) -> None:
    """Spans of a stage follow each other, and all lie in the step."""
    close = 1e-9 * timeline.seconds
    for stage in timeline.stages:
        assert all(span.end >= span.start and span.stage == stage.index for span in stage.spans)
        assert all(0 <= span.messages <= span.seconds + close for span in stage.spans)
        assert all(after.start >= before.end - close for before, after in pairwise(stage.spans))
        assert stage.spans[0].start >= -close
        assert stage.spans[-1].end <= timeline.seconds + close


def check_inputs(costs: StepCosts, timeline: Timeline) -> None:
    """A pass starts once its input is there: the result of the pass before it, and if that is of another stage, after its send."""
    ends = {
        (span.kind == "F", span.micro, span.part): span for stage in timeline.stages for span in stage.spans if span.kind in ("F", "B", "I")
    }
    checked = 0
    for span in (span for stage in timeline.stages for span in stage.spans if span.is_pass):
        keys = {"F": (True, span.micro, span.part - 1), "W": (False, span.micro, span.part)}
        needed = ends.get(keys.get(span.kind, (False, span.micro, span.part + 1)))
        own = ends.get((True, span.micro, span.part)) if span.kind in ("B", "I") else None
        assert own is None or span.start >= own.end - 1e-9
        if needed is not None:
            sent = costs.send if needed.stage != span.stage else 0.0
            assert span.start >= needed.end + sent - 1e-9 * timeline.seconds
            checked += 1
    assert checked


def check_causes(timeline: Timeline) -> None:
    """The seconds of each stage add up to the step's."""
    for stage in timeline.stages:
        causes = (stage.computing, stage.messages, stage.filling, stage.waiting, stage.draining)
        assert sum(causes) == pytest.approx(timeline.seconds, rel=1e-9)
        assert min(causes) >= -1e-9 * timeline.seconds
        assert stage.idle(timeline.seconds) == pytest.approx(1 - (stage.computing + stage.messages) / timeline.seconds, abs=1e-9)


@EVERY_SCHEDULE
@pytest.mark.parametrize("zero", [1, 3])
def test_a_timeline_follows_the_rules_of_pipelines_also_with_slow_stages(name: str, chunks: int, zero: int) -> None:
    costs, random = pipeline(name, chunks, f"parallel.zero={zero}"), Random(f"{name} {chunks} {zero}")
    for slowness in ({}, {stage: random.uniform(0.5, 3) for stage in range(STAGES)}):
        timeline = make_timeline(costs, slowness)
        check_order(timeline)
        check_inputs(costs, timeline)
        check_causes(timeline)


@EVERY_SCHEDULE
def test_every_part_runs_every_micro_batch_once(name: str, chunks: int) -> None:
    costs = pipeline(name, chunks)
    timeline = make_timeline(costs)
    passes = Counter(
        (span.part, span.kind.replace("I", "B"), span.micro) for stage in timeline.stages for span in stage.spans if span.is_pass
    )
    if SCHEDULES[name].flushes:
        parts = range(len(costs.layout.partition.parts))
        assert {key for key in passes if key[1] in "FB"} == {
            (part, kind, micro) for part in parts for kind in "FB" for micro in range(MICROS)
        }
        assert set(passes.values()) == {1}
    else:  # a step between others: as many passes, of which those at its two ends are cut
        for stage in timeline.stages:
            seconds = sum(span.seconds for span in stage.spans if span.kind == "F")
            assert seconds == pytest.approx(MICROS * costs.passes["F", stage.index].total, rel=1e-6)


@EVERY_SCHEDULE
def test_a_stage_holds_the_planned_micro_batches(name: str, chunks: int) -> None:
    costs = pipeline(name, chunks)
    timeline, plan = make_timeline(costs), make_plan(run_of(*PIPELINE, f"parallel.schedule={name}", f"parallel.chunks={chunks}"))
    assert plan.memory
    for stage, memory in zip(timeline.stages, plan.memory.stages, strict=True):
        curve = held_activations(stage)
        assert max(held for _, held in curve) == pytest.approx(memory.in_flight * stage.saved * costs.layout.chunks, rel=1e-9)
        assert curve == sorted(curve, key=lambda row: row[0])
        ends = stage.held * stage.saved if SCHEDULES[name].flushes else pytest.approx(stage.held * stage.saved, abs=stage.saved)
        assert curve[-1][1] == ends  # without a flush, a pass may be cut by the step's end


def test_the_sum_of_a_tied_weight_follows_the_passes_of_both_ends() -> None:
    costs = costs_of(run_of("gpt3_175b", "model.tied=true", HIDDEN))
    timeline = make_timeline(costs)
    assert costs.tied > 0
    assert timeline.seconds == pytest.approx(costs.planned, rel=1e-6)
    shown = {stage.index: [span for span in stage.spans if span.kind == "tied"] for stage in timeline.stages}
    assert {index for index, spans in shown.items() if spans} == {0, costs.layout.mesh.pp - 1}
    (first,), (last,) = shown[0], shown[costs.layout.mesh.pp - 1]
    assert first.start == last.start
    assert first.seconds == pytest.approx(costs.tied)


def test_gradients_are_summed_after_the_half_of_a_backward_that_computes_them() -> None:
    sums, none = (pipeline("zb_h1", 1, f"parallel.zero={zero}", "parallel.overlap.data=false") for zero in (2, 1))
    exposed = sum(message_round.exposed for message_round in sums.rounds[0] if message_round.is_repeated)
    assert exposed > 0
    added = {kind: sums.passes[kind, 0].messages - none.passes[kind, 0].messages for kind in "FBIW"}
    assert added == {"F": 0, "B": pytest.approx(exposed), "I": 0, "W": pytest.approx(exposed)}


def test_messages_inside_a_backward_belong_to_its_first_half() -> None:
    costs = costs_of(run_of(*PIPELINE, "parallel.schedule=zb_h1", "parallel.dp=1", "parallel.tp=2"))
    whole, halves = costs.passes["B", 1], (costs.passes["I", 1], costs.passes["W", 1])
    assert whole.messages > 0
    assert [half.messages for half in halves] == [whole.messages, 0]
    assert sum(half.computing for half in halves) == pytest.approx(whole.computing)


def test_a_device_holds_activations_from_the_begin_of_a_forward_to_the_end_of_its_backward() -> None:
    (stage,) = make_timeline(costs_of(run_of("llama3_8b"))).stages
    changes = [(span.start, stage.saved) if span.kind == "F" else (span.end, 0.0) for span in stage.spans if span.is_pass]
    assert held_activations(stage) == [(0.0, 0.0), *changes]


@EVERY_SCHEDULE
def test_a_slow_stage_computes_longer_on_all_of_its_parts(name: str, chunks: int) -> None:
    costs = pipeline(name, chunks)
    planned, slow = make_timeline(costs), make_timeline(costs, {1: 2.0})
    for before, after in zip(planned.stages, slow.stages, strict=True):
        computed = [sum(span.seconds - span.messages for span in stage.spans if span.is_pass) for stage in (before, after)]
        assert computed[1] == pytest.approx(computed[0] * (2 if before.index == 1 else 1), rel=1e-6)


@EVERY_SCHEDULE
def test_one_stage_runs_each_micro_batch_forward_and_then_backward_whatever_schedule_is_named(name: str, chunks: int) -> None:
    run = run_of("llama3_8b_1node", "parallel.schedule=" + name)
    costs, plan = costs_of(run), make_plan(run)
    timeline = make_timeline(costs)
    assert timeline.seconds == pytest.approx(costs.planned, rel=1e-9)
    (stage,) = timeline.stages
    kinds = [(span.kind, span.micro) for span in stage.spans if span.is_pass]
    assert kinds == [(kind, micro) for micro in range(timeline.micros) for kind in "FB"]
    assert plan.memory
    assert (stage.in_flight, plan.memory.stages[0].in_flight) == (1, 1)
    assert timeline.schedule == ""


@pytest.mark.parametrize("recipe", ["gpt3_175b", "megatron_1t_6x8x64", "mixtral_8x7b", "llama3_8b_ethernet", "llama3_8b_1node"])
def test_a_recipes_stages_hold_no_more_micro_batches_than_planned(recipe: str) -> None:
    run = run_of(recipe)
    timeline, plan = make_timeline(costs_of(run)), make_plan(run)
    assert plan.memory
    for stage, memory in zip(timeline.stages, plan.memory.stages, strict=True):
        assert max(held for _, held in held_activations(stage)) == pytest.approx(memory.in_flight * stage.saved * timeline.chunks)


def test_few_micro_batches_without_a_flush_are_held_over_several_steps() -> None:
    words = (*PIPELINE[:-1], "train.batch=2", "parallel.schedule=pipedream")
    timeline, plan = make_timeline(costs_of(run_of(*words))), make_plan(run_of(*words))
    assert plan.memory
    assert [stage.in_flight for stage in timeline.stages] == [stage.in_flight for stage in plan.memory.stages] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_a_tied_weight_is_summed_at_each_update_without_a_flush(name: str) -> None:
    words = ("gpt2_124m", "cluster=1x2", "parallel.pp=2", "parallel.dp=1", "train.microbatch=4", "engine=native", HIDDEN)
    costs = costs_of(run_of(*words, f"parallel.schedule={name}"))
    assert costs.tied > 0
    timeline = make_timeline(costs)
    for stage in timeline.stages:
        assert sum(span.seconds for span in stage.spans if span.kind == "tied") == pytest.approx(costs.tied, rel=0.02)
    assert timeline.seconds == pytest.approx(costs.planned, rel=2e-3)


def test_a_result_for_the_same_stage_is_not_sent() -> None:
    timeline = make_timeline(pipeline("zb_v", 1))
    assert len(timeline.transfers) == 2 * (2 * STAGES - 2) * MICROS
    assert all(sent.sender != sent.receiver for sent in timeline.transfers)


def test_a_slow_stage_lengthens_a_step_by_what_it_computes_longer() -> None:
    costs = costs_of(run_of("llama3_8b"))
    timeline, slow = make_timeline(costs), make_timeline(costs, {0: 1.5})
    passes = sum(span.seconds - span.messages for span in timeline.stages[0].spans if span.is_pass)
    assert slow.seconds == pytest.approx(timeline.seconds + passes / 2, rel=1e-9)


def test_transfers_leave_at_the_end_of_a_pass_and_arrive_before_the_next() -> None:
    costs = pipeline("1f1b", 1)
    timeline = make_timeline(costs)
    assert len(timeline.transfers) == 2 * (STAGES - 1) * MICROS
    spans = {(span.kind, span.micro, span.part): span for stage in timeline.stages for span in stage.spans if span.is_pass}
    for sent in timeline.transfers:
        source = spans[sent.kind, sent.micro, sent.part + (-1 if sent.kind == "F" else 1)]
        taker = spans[sent.kind, sent.micro, sent.part]
        assert (source.stage, taker.stage, source.end) == (sent.sender, sent.receiver, sent.start)
        assert abs(sent.sender - sent.receiver) == 1
        assert sent.end == pytest.approx(sent.start + costs.send)
        assert taker.start >= sent.end - 1e-9


@settings(max_examples=15, phases=[Phase.generate])
@given(action_orders(Pipeline(STAGES, 4, 1, False)), st.floats(0.5, 2))
def test_any_list_of_actions_is_drawn_by_the_rules(lists: Lists, factor: float) -> None:
    run = run_of(*PIPELINE[:-1], "train.batch=8")
    costs = costs_of(replace(run, parallel=replace(run.parallel, schedule="drawn.csv", actions=write_action_csv(lists, folded=False))))
    timeline = make_timeline(costs, {1: factor})
    check_order(timeline)
    check_inputs(costs, timeline)
    check_causes(timeline)
    shown = [[(span.kind, span.micro) for span in stage.spans if span.is_pass] for stage in timeline.stages]
    assert shown == [[(kind, micro) for kind, micro, _ in actions] for actions in lists]
    assert all(
        stage_and_chunk(span.part, STAGES, folded=False)[0] == stage.index
        for stage in timeline.stages
        for span in stage.spans
        if span.is_pass
    )
