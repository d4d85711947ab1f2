"""A simulated step of any lists of actions: each action starts as soon as it can, and lists that cannot run are refused."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.tests.fakes.action_orders import Lists, action_orders, can_start, pipelines
from distrain.trainer.plan.layout.schedules import SCHEDULES, Action, Kind, Schedule, part_of
from distrain.trainer.plan.layout.simulate import Simulation, simulate
from distrain.trainer.plan.layout.step_order import step_order

Seconds = dict[tuple[str, int], int]


class Case(NamedTuple):
    lists: Lists
    folded: bool
    seconds: Seconds
    send: int

    def simulate(self) -> Simulation:
        return simulate(self.lists, folded=self.folded, seconds=lambda kind, part: self.seconds[kind, part], send=self.send)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Legal lists of any pipeline, with seconds of each action and message."""
    pipeline = draw(pipelines())
    lists = draw(action_orders(pipeline))
    seconds = {(kind, part): draw(st.integers(0, 5)) for kind in "FBIW" for part in range(pipeline.stages * pipeline.chunks)}
    return Case(lists, pipeline.folded, seconds, draw(st.integers(0, 3)))


@given(cases())
def test_each_action_starts_as_soon_as_its_stage_is_free_and_its_input_is_there(case: Case) -> None:
    stages = len(case.lists)
    step = case.simulate()
    assert [[event.action for event in events] for events in step.events] == case.lists
    ended: dict[tuple[bool, int, int], tuple[int, float]] = {}  # (forward, micro-batch, part) -> the stage that computed it, and when
    for stage, events in enumerate(step.events):
        for _, (kind, micro, chunk), _, end in events:
            if kind != "W":
                ended[kind == "F", micro, part_of(stage, chunk, stages, folded=case.folded)] = stage, end
    for stage, events in enumerate(step.events):
        free = 0.0
        for event in events:
            kind, micro, chunk = event.action
            part = part_of(stage, chunk, stages, folded=case.folded)
            source = None if kind == "W" else ended.get((kind == "F", micro, part + (-1 if kind == "F" else 1)))
            arrives = 0.0 if source is None else source[1] + (case.send if source[0] != stage else 0)
            assert (event.stage, event.start) == (stage, max(free, arrives))
            assert event.end == event.start + case.seconds[kind, part]
            free = event.end


@given(cases())
def test_the_step_ends_with_the_last_action_and_stages_idle_the_rest(case: Case) -> None:
    step = case.simulate()
    assert step.seconds == max(events[-1].end for events in step.events)
    for stage, events in enumerate(step.events):
        waits = events[0].start + sum(after.start - before.end for before, after in pairwise(events)) + step.seconds - events[-1].end
        assert step.idle[stage] * step.seconds == pytest.approx(waits, abs=1e-9)


@given(cases())
def test_a_stage_holds_a_micro_batch_from_its_forward_to_its_weights_gradient(case: Case) -> None:
    step = case.simulate()
    for stage, actions in enumerate(case.lists):
        chunks = 1 + max(action.chunk for action in actions)
        ends = {action[1:]: at for at, action in enumerate(actions)}
        begins = {action[1:]: at for at, action in reversed(list(enumerate(actions)))}
        most = max(sum(begins[each] <= at < ends[each] for each in ends) for at in range(len(actions)))
        assert step.peak[stage] == most / chunks


@given(cases())
def test_the_order_of_a_step_takes_as_long_as_its_simulation(case: Case) -> None:
    chunks = 1 + max(action.chunk for each in case.lists for action in each)
    row = Schedule(actions=lambda stage, *_: case.lists[stage], folded=case.folded, chunked=not case.folded, source="this test")
    order = step_order(row, len(case.lists), 1 + max(action.micro for each in case.lists for action in each), chunks)
    assert order.seconds(lambda kind, part: case.seconds[kind, part], case.send) == case.simulate().seconds


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.flushes])
def test_the_order_of_a_schedule_takes_as_long_as_its_simulation(name: str) -> None:
    row, random = SCHEDULES[name], Random(1)
    for stages, micros in ((2, 4), (3, 7), (4, 8), (4, 20)):
        chunks = 3 if row.chunked and micros % stages == 0 else 1
        seconds = {(kind, part): random.random() for kind in "FBIW" for part in range(stages * row.parts(chunks))}
        lists = [row.actions(stage, stages, micros, chunks) for stage in range(stages)]
        simulated = simulate(lists, folded=row.folded, seconds=lambda *key, each=seconds: each[key], send=0.125).seconds
        assert step_order(row, stages, micros, chunks).seconds(lambda *key, each=seconds: each[key], 0.125) == simulated


@given(cases(), st.randoms(use_true_random=False))
def test_lists_are_refused_where_and_only_where_no_order_of_all_stages_runs_them(case: Case, random: Random) -> None:
    lists = [sorted(actions, key=lambda _: random.random()) for actions in case.lists]
    stages, ran, at = len(lists), set[tuple[str, int, int]](), [0] * len(lists)
    last = stages * (1 + max(action.chunk for action in lists[0])) - 1
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                part = part_of(stage, action.chunk, stages, folded=case.folded)
                if not can_start(action, part, last, ran):
                    break
                ran.add((action.kind.replace("I", "B"), action.micro, part))
                at[stage] += 1
                moved = True
    if all(done == len(actions) for done, actions in zip(at, lists, strict=True)):
        case._replace(lists=lists).simulate()
    else:
        with pytest.raises(ValueError, match=r"stage \d (runs \d[FBIW]\d before|waits for ever)"):
            case._replace(lists=lists).simulate()


def f(micro: int, chunk: int = 0) -> Action:
    return Action("F", micro, chunk)


def b(micro: int, chunk: int = 0) -> Action:
    return Action("B", micro, chunk)


i, w = Action("I", 0), Action("W", 0)
EVERY = "every part of the model runs all the micro-batches from 0 to"
ONCE = "a micro-batch has one F and one B on a part, or one F, one I and one W"
RANGE = "it is F, B, I or W, of micro-batch 0 or later, on one of its 2 chunks"
NEEDS = "it needs the {} of micro-batch 0 on part {}, which stage {} runs only after"
# fmt: off
REFUSED = pytest.mark.parametrize(("lists", "folded", "says"), [
    ([],                                             False, "there are no lists of actions: write one for each stage"),
    ([[f(0), b(0)], []],                             False, "stage 1 has no actions"),
    ([[f(0), b(0)], [f(0)]],                         False, f"stage 1 never runs 1B0, or 1I0 and 1W0: {EVERY} 0"),
    ([[f(0), b(0), f(1), b(1)], [f(0), b(0)]],       False, f"stage 1 never runs 1F1: {EVERY} 1"),
    ([[f(0), i]],                                    False, f"stage 0 never runs 0W0: {EVERY} 0"),
    ([[f(0), b(0), f(0, 1), b(0, 1)], [f(0), b(0)]], False, f"stage 1 never runs 3F0: {EVERY} 0"),
    ([[f(0), f(0), b(0)]],                           False, "stage 0 runs 0F0 twice: remove one of them"),
    ([[f(0), b(0), b(0)]],                           False, "stage 0 runs 0B0 twice: remove one of them"),
    ([[b(0), f(0)]],                                 False, "stage 0 runs 0B0 before 0F0: move it behind"),
    ([[f(0), w, i]],                                 False, "stage 0 runs 0W0 before 0I0: move it behind"),
    ([[f(0), b(0), w]],                              False, f"stage 0 runs 0W0 after 0B0: {ONCE}"),
    ([[f(0), f(0, 2)]],                              True,  f"stage 0 has the action 'F' of micro-batch 0 on chunk 2: {RANGE}"),
    ([[f(0), b(0), f(1), b(1)], [f(1), f(0), b(0), b(1)]],
                                                     False, f"stage 0 waits for ever to run 0B0: {NEEDS.format('backward', 1, 1)} 1F1"),
    ([[f(0, 1), f(0), b(0, 1), b(0)]],               False, f"stage 0 waits for ever to run 1F0: {NEEDS.format('forward', 0, 0)} 1F0"),
])
# fmt: on


@REFUSED
def test_lists_that_cannot_run_are_refused_in_one_sentence(lists: Lists, folded: bool, says: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        simulate(lists, folded=folded, seconds=lambda kind, part: 1.0)
    assert str(error.value) == says


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_messages_lengthen_a_step_of_one_micro_batch_by_each_of_them(name: str) -> None:
    seconds: Callable[[str, int], float] = lambda kind, part: 2.0 if kind == "B" else 1.0  # noqa: E731
    lists = [SCHEDULES[name].actions(stage, 4, 1, 1) for stage in range(4)]
    without, sent = (simulate(lists, folded=False, seconds=seconds, send=send).seconds for send in (0.0, 0.25))
    assert sent - without == 6 * 0.25  # three forward, three back


@pytest.mark.parametrize(("name", "stages", "micros", "chunks"), [
    ("GPipe", 4, 6, 1), ("Interleaved1F1B", 4, 8, 2), ("Interleaved1F1B", 3, 9, 3), ("InterleavedZeroBubble", 4, 8, 2),
])  # fmt: skip
def test_pytorchs_lists_are_timed_as_its_own_visualizer_spaces_them(name: str, stages: int, micros: int, chunks: int) -> None:
    """A forward and each half of a backward take a unit of time there; other schedules of its have no spacing that is complete."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    kinds: dict[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    listed = visualizer.get_schedule_ops(name, stages, micros, chunks if chunks > 1 else None)
    theirs = [[each for each in rank if each is not None and each.computation_type.name in kinds] for rank in listed]
    lists = [
        [Action(kinds[each.computation_type.name], each.microbatch_index, each.stage_index // stages) for each in rank] for rank in theirs
    ]
    step = simulate(lists, folded=False, seconds=lambda kind, part: 2.0 if kind == "B" else 1.0)
    for events, spaced in zip(step.events, visualizer.add_schedule_op_spacing(theirs), strict=True):
        starts, at = [], 0
        for each in spaced:
            if each is not None:
                starts.append(at)
            at += 1 if each is None or each.computation_type.name != "FULL_BACKWARD" else 2
        assert [event.start for event in events] == starts
