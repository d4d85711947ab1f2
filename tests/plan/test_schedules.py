"""Pipeline schedules: every action runs once, no stage waits for ever, and a step takes the planned time and memory."""

from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.trainer.plan.layout.schedules import SCHEDULES, Action, bubble_share, part_of, peak_in_flight, stage_and_chunk
from distrain.trainer.plan.layout.simulate import simulate
from distrain.trainer.plan.layout.stage_events import stage_events

Pipeline = tuple[str, int, int, int]  # schedule, stages, micro-batches, chunks
Task = tuple[str, int, int]  # kind, micro-batch, chunk (of a stage, or counted along the model)

FLUSHING = [name for name, row in SCHEDULES.items() if row.flushes and name != "dualpipev"]  # DeepSpeed's sends some results late
STREAMING = [name for name, row in SCHEDULES.items() if not row.flushes]


def least_micros(name: str, stages: int) -> int:
    return 2 * stages if name.startswith("dualpipev") else 1


@st.composite
def pipelines(draw: st.DrawFn, names: list[str]) -> Pipeline:
    """A pipeline; a schedule with chunks takes micro-batches in rounds of its stages, DualPipeV two a stage or more."""
    name = draw(st.sampled_from(names))
    if SCHEDULES[name].folded:
        stages = draw(st.integers(1, 7))
        least = least_micros(name, stages)
        return name, stages, draw(st.integers(least, least + 9)), 2
    if SCHEDULES[name].chunked:
        stages = draw(st.integers(2, 6))
        return name, stages, stages * draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return name, draw(st.integers(1, 9)), draw(st.integers(1, 24)), 1


def actions_of(pipeline: Pipeline) -> list[list[Action]]:
    name, stages, micros, chunks = pipeline
    return [SCHEDULES[name].actions(stage, stages, micros, chunks) for stage in range(stages)]


def makespan(pipeline: Pipeline, weights: list[int] | None = None) -> Fraction:
    """Seconds of a step where a stage's forward takes 1 (`weights`: each stage's own) and backward twice that, messages none.

    An action starts when its stage is free and what it needs is there: a forward, the forward before it in the model; a
    backward, its own forward and the backward after it; a weight gradient, its backward.
    """
    name, stages, _, chunks = pipeline
    todo = [list(reversed(actions)) for actions in actions_of(pipeline)]
    seconds = {"F": 1, "B": 2, "I": 1, "W": 1}
    last = stages * chunks - 1
    ended: dict[Task, Fraction] = {}
    free = [Fraction(0)] * stages

    def needs(kind: str, micro: int, place: int) -> list[Task]:
        match kind:
            case "F":
                return [("F", micro, place - 1)] if place else []
            case "B" | "I":
                return [("F", micro, place), *([("B", micro, place + 1)] if place < last else [])]
            case _:
                return [("B", micro, place)]  # of an I too: the input's gradient

    while any(todo):
        started = 0
        for stage, waiting in enumerate(todo):
            while waiting:
                kind, micro, chunk = waiting[-1]
                place = 2 * stages - 1 - stage if SCHEDULES[name].folded and chunk else chunk * stages + stage
                wanted = needs(kind, micro, place)
                if not all(task in ended for task in wanted):
                    break
                begins = max([free[stage], *(ended[task] for task in wanted)])
                free[stage] = ended[kind.replace("I", "B"), micro, place] = begins + Fraction(
                    seconds[kind] * (weights[stage] if weights else 1), chunks
                )
                waiting.pop()
                started += 1
        assert started, f"{pipeline} waits for ever"
    return max(free)


def closed_form_seconds(pipeline: Pipeline, weights: list[int] | None = None) -> float:
    """The planner's closed form, in the same seconds: the busiest stage's micro-batches, the others' one, less what hides."""
    name, stages, micros, chunks = pipeline
    each = weights or [1] * stages
    others = sum(each) - max(each)
    row = SCHEDULES[name]
    return 3 * micros * max(each) + max(0.0, 3 * row.fill(chunks) * others - row.filled_by_weights(stages, micros) * others)


@given(pipelines(list(SCHEDULES)))
def test_each_chunk_of_each_micro_batch_runs_forward_and_backward_once(pipeline: Pipeline) -> None:
    _, _, micros, chunks = pipeline
    every = Counter((micro, chunk) for micro in range(micros) for chunk in range(chunks))
    for actions in actions_of(pipeline):
        ran = {kinds: Counter((micro, chunk) for kind, micro, chunk in actions if kind in kinds) for kinds in ("F", "BI", "I", "W")}
        assert ran["F"] == ran["BI"] == every
        assert ran["I"] == ran["W"]


@given(pipelines(list(SCHEDULES)))
def test_forward_comes_before_backward_and_backward_before_weight_gradients(pipeline: Pipeline) -> None:
    for actions in actions_of(pipeline):
        at: dict[Task, int] = {(kind, micro, chunk): index for index, (kind, micro, chunk) in enumerate(actions)}
        for kind, micro, chunk in actions:
            before = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
            assert before is None or at[before, micro, chunk] < at[kind, micro, chunk]


def legal(name: str, stages: int) -> list[tuple[int, int]]:
    """(micro-batches, chunks) of a schedule of that many stages: every one up to a few more than fill a small pipeline, the counts at which
    a larger one fills, and 64; of rounds of stages 1 to 3, of 1 to 4 chunks."""
    few = range(1, 2 * stages + 5) if stages <= 8 else (1, 2, *(filled + more for filled in (stages, 2 * stages) for more in (-1, 0, 1)))
    if SCHEDULES[name].chunked:
        return [(rounds * stages, chunks) for rounds in (1, 2, 3) for chunks in (range(1, 5) if stages <= 8 else (2, 3))]
    return [(micros, 1) for micros in (*few, 64) if micros >= least_micros(name, stages)]


STAGES = (1, 2, 3, 4, 5, 6, 7, 8, 13)  # larger pipelines hold nothing that these do not


def even_seconds(parts: int) -> Callable[[str, int], float]:
    """Seconds of an action where those of a micro-batch on a stage are 1 forward and 2 back, over the stage's parts."""
    return lambda kind, part: (2 if kind == "B" else 1) / parts


@pytest.mark.parametrize("name", FLUSHING)
def test_memory_and_bubble_of_every_small_pipeline_are_the_rows_closed_forms(name: str) -> None:
    row = SCHEDULES[name]
    for stages in STAGES:
        for micros, chunks in legal(name, stages):
            lists = [row.actions(stage, stages, micros, chunks) for stage in range(stages)]
            step = simulate(lists, folded=row.folded, seconds=even_seconds(row.parts(chunks)))
            assert list(step.peak) == [row.in_flight(stage, stages, micros, chunks) for stage in range(stages)], (stages, micros, chunks)
            bubble = bubble_share(row, stages, micros, chunks)
            assert step.idle == pytest.approx([bubble] * stages, rel=1e-9, abs=1e-12), (stages, micros, chunks)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(FLUSHING)))
def test_memory_of_every_small_pipeline_is_the_rows_closed_form(name: str) -> None:
    row = SCHEDULES[name]
    for stages in STAGES:
        for micros, chunks in legal(name, stages):
            for stage in range(stages):
                held = peak_in_flight(row.actions(stage, stages, micros, chunks), row.parts(chunks))
                assert held == row.in_flight(stage, stages, micros, chunks), (stage, stages, micros)


@given(st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_each_part_of_the_model_is_one_chunk_of_one_stage(stages: int, chunks: int, folded: bool) -> None:
    chunks = 2 if folded else chunks
    places = [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
    parts = [part_of(stage, chunk, stages, folded=folded) for stage, chunk in places]
    assert sorted(parts) == list(range(stages * chunks))
    assert [stage_and_chunk(part, stages, folded=folded) for part in parts] == places


def test_a_folded_pipeline_goes_out_and_back() -> None:
    assert [stage_and_chunk(part, 3, folded=True) for part in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert [stage_and_chunk(part, 3, folded=False) for part in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_no_stage_of_zb_v_waits_once_it_has_begun(stages: int, more: int) -> None:
    actions = [SCHEDULES["zb_v"].actions(stage, stages, 2 * stages - 1 + more, 2) for stage in range(stages)]
    for stage, events in enumerate(simulate(actions, folded=True, seconds=lambda *_: 1.0).events):
        assert [event.start for event in events] == [float(stage + at) for at in range(len(events))]


@given(pipelines(FLUSHING))
def test_a_simulated_step_takes_the_planned_time(pipeline: Pipeline) -> None:
    assert float(makespan(pipeline)) == pytest.approx(closed_form_seconds(pipeline), rel=1e-12)


@given(pipelines(FLUSHING))
def test_the_bubble_share_is_the_idle_share_of_a_simulated_step(pipeline: Pipeline) -> None:
    name, stages, micros, chunks = pipeline
    waits = 1 - 3 * micros / makespan(pipeline)
    assert bubble_share(SCHEDULES[name], stages, micros, chunks) == pytest.approx(float(waits), rel=1e-9, abs=1e-12)


@given(pipelines(STREAMING))
def test_a_schedule_without_a_flush_idles_only_at_its_start(pipeline: Pipeline) -> None:
    name, stages, micros, chunks = pipeline
    longer = (name, stages, micros + stages, chunks)
    assert makespan((name, stages, 2 * micros + stages, chunks)) - makespan(longer) == 3 * micros
    assert bubble_share(SCHEDULES[name], stages, micros, chunks) == 0


PLAIN = [name for name, row in SCHEDULES.items() if row.is_plain]


@given(pipelines(PLAIN))
def test_events_of_stages_never_wait_for_each_other_where_sends_block(pipeline: Pipeline) -> None:
    name, stages, micros, _ = pipeline
    todo = [deque(events) for events in stage_events(SCHEDULES[name].actions, stages, micros)]
    while any(todo):
        left = sum(map(len, todo))
        for stage, events in enumerate(todo):
            while events and events[0].verb == "compute":
                events.popleft()
            if events and events[0].verb == "send":
                receiver = todo[stage + 1 if events[0].kind == "F" else stage - 1]
                if receiver and receiver[0] == events[0]._replace(verb="receive"):
                    receiver.popleft()
                    events.popleft()
        assert sum(map(len, todo)) < left, f"{pipeline} waits for ever"


@given(pipelines(PLAIN))
def test_events_compute_the_actions_in_order(pipeline: Pipeline) -> None:
    name, stages, micros, _ = pipeline
    for events, actions in zip(stage_events(SCHEDULES[name].actions, stages, micros), actions_of(pipeline), strict=True):
        assert [Action(event.kind, event.micro) for event in events if event.verb == "compute"] == actions


def test_a_schedule_whose_stages_wait_for_ever_is_refused() -> None:
    def backward_first(stage: int, stages: int, micros: int, chunks: int) -> list[Action]:
        return [Action("B", 0), Action("F", 0)] if stage == 0 else [Action("F", 0), Action("B", 0)]

    with pytest.raises(ValueError, match="waits for ever"):
        stage_events(backward_first, 2, 1)


# DeepSpeed's own schedule: the output of a forward that is paired with a backward is sent after both.


def instructions(stages: int, micros: int) -> list[list[Any]]:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    return [[each for step in schedule.DualPipeVSchedule(micros, stages, stage).steps() for each in step] for stage in range(stages)]


def instruction_seconds(stages: int, micros: int) -> Fraction:
    """Seconds of a step of DeepSpeed's instructions, where a part's forward takes 1/2, its backward 1, and messages no time."""
    steps = {"SendActivation": ("F", 0), "RecvActivation": ("F", -1), "SendGrad": ("B", 0), "RecvGrad": ("B", 1)}
    todo = [list(reversed(each)) for each in instructions(stages, micros)]
    waiting: list[list[Task]] = [[] for _ in range(stages)]
    going: list[list[Task]] = [[] for _ in range(stages)]
    free, sent = [Fraction(0)] * stages, dict[Task, Fraction]()
    while any(todo):
        before = sum(map(len, todo))
        for stage, left in enumerate(todo):
            while left:
                each, name = left[-1], left[-1].name
                if name in steps:
                    kind, step = steps[name]
                    place = 2 * stages - 1 - stage if each.phase else stage
                    (going if step == 0 else waiting)[stage].append((kind, each.buffer_id % micros, place + step))
                elif name == "CommitP2P":
                    sent |= dict.fromkeys(going[stage], free[stage])
                    going[stage] = []
                    if not all(task in sent for task in waiting[stage]):
                        break
                    free[stage] = max([free[stage], *(sent[task] for task in waiting[stage])])
                    waiting[stage] = []
                free[stage] += {"ForwardPass": Fraction(1, 2), "BackwardPass": Fraction(1)}.get(name, Fraction(0))
                left.pop()
        assert sum(map(len, todo)) < before, "it waits for ever"
    return max(free)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_dualpipev_has_deepspeeds_order_and_time(stages: int, more: int) -> None:
    micros = 2 * stages + more
    pipeline = ("dualpipev", stages, micros, 2)
    kinds = {"ForwardPass": "F", "BackwardPass": "B"}
    theirs = [
        [(kinds[each.name], each.buffer_id % micros, each.phase) for each in row if each.name in kinds]
        for row in instructions(stages, micros)
    ]
    assert [list(map(tuple, actions)) for actions in actions_of(pipeline)] == theirs
    seconds = instruction_seconds(stages, micros)
    assert float(seconds) == pytest.approx(closed_form_seconds(pipeline), rel=1e-12)
    assert bubble_share(SCHEDULES["dualpipev"], stages, micros, 1) == pytest.approx(float(1 - 3 * micros / seconds), rel=1e-9, abs=1e-12)
    assert makespan(pipeline) <= seconds < makespan(("1f1b", stages, micros, 1)) or stages == 1


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_folded_stage_sends_as_often_as_deepspeeds(stages: int) -> None:
    micros = 2 * stages + 1
    sends = [sum(each.name in ("SendActivation", "SendGrad") for each in row) for row in instructions(stages, micros)]
    assert sends == [micros * 2 * (2 - (stage == 0) - (stage == stages - 1)) for stage in range(stages)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_dualpipev_w_has_pytorchs_order(stages: int, more: int) -> None:
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = theirs.ScheduleDualPipeV.__new__(theirs.ScheduleDualPipeV)  # the order depends on these two numbers alone
    schedule.pp_group_size, schedule._n_microbatches = stages, 2 * stages + more
    for stage, actions in enumerate(actions_of(("dualpipev_w", stages, 2 * stages + more, 2))):
        order = [each for step in schedule._calculate_single_rank_operations(stage) for each in step.sub_actions or (step,)]
        assert order == [(part_of(stage, chunk, stages, folded=True), kind, micro, None) for kind, micro, chunk in actions]


# Bubble over ideal: (p - 1)/m, arXiv:2104.04473 section 2.2.1; over chunks v, section 2.2.2; a third, arXiv:2401.10241 table 2;
# half a forward of each later stage, by which it begins later than the one before, arXiv:2401.10241 section 6.
# fmt: off
BUBBLES = pytest.mark.parametrize(("name", "p", "m", "v", "over"), [
    ("1f1b",        4,  8, 1, 3 / 8),
    ("1f1b",       64, 512, 1, 63 / 512),
    ("gpipe",       4,  8, 1, 3 / 8),
    ("interleaved", 4,  8, 2, 3 / 16),
    ("interleaved", 8, 64, 3, 7 / 192),
    ("zb_h1",       4,  8, 1, 1 / 8),
    ("zb_h1",       8, 24, 1, 7 / 72),
    ("zb_v",        4,  8, 2, 3 / 48),
    ("zb_v",        8, 24, 2, 7 / 144),
])
# fmt: on


@BUBBLES
def test_the_bubble_over_ideal_time_is_the_papers(name: str, p: int, m: int, v: int, over: float) -> None:
    assert float(makespan((name, p, m, v))) / (3 * m) - 1 == pytest.approx(over, rel=1e-12)
    assert bubble_share(SCHEDULES[name], p, m, v) == pytest.approx(over / (1 + over), rel=1e-12)


@given(pipelines(["gpipe"]), st.data())
def test_uneven_stages_of_gpipe_wait_for_the_busiest_one(pipeline: Pipeline, data: st.DataObject) -> None:
    weights = [data.draw(st.integers(1, 9)) for _ in range(pipeline[1])]
    assert float(makespan(pipeline, weights)) == pytest.approx(closed_form_seconds(pipeline, weights), rel=1e-12)


@given(pipelines(["1f1b", "interleaved"]), st.data())
def test_uneven_stages_of_1f1b_take_at_most_the_planned_time(pipeline: Pipeline, data: st.DataObject) -> None:
    """A bound only: actions of light stages fit into the waits of others."""
    weights = [data.draw(st.integers(1, 9)) for _ in range(pipeline[1])]
    assert 3 * pipeline[2] * max(weights) <= float(makespan(pipeline, weights)) <= closed_form_seconds(pipeline, weights) * (1 + 1e-12)
