"""Engine `native` posts each receive of a pipeline before its message is sent, as simulated steps show."""

from collections import Counter
from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from distrain.tests.fakes.planned_memory import gpt, memory_of, run_of  # noqa: E402
from distrain.trainer.engines.native.stage_messages import MessageKey, StageChain, StageMessages  # noqa: E402
from distrain.trainer.parallel.process_groups import make_grid  # noqa: E402
from distrain.trainer.parallel.world import World  # noqa: E402
from distrain.trainer.plan.layout.mesh import Mesh  # noqa: E402
from distrain.trainer.plan.layout.schedules import SCHEDULES  # noqa: E402
from distrain.trainer.plan.layout.simulate import Simulation, TimedAction, simulate  # noqa: E402
from distrain.trainer.plan.mesh_position import MeshPosition  # noqa: E402
from distrain.trainer.plan.native.posted_receives import receives_ahead  # noqa: E402

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@pytest.mark.parametrize("micros", [8, 16])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_are_posted_before_their_messages_are_sent(name: str, stages: int, micros: int) -> None:
    schedule = SCHEDULES[name]
    chunks = schedule.parts(2 if schedule.chunked else 1)
    lists = [schedule.actions(stage, stages, micros, chunks) for stage in range(stages)]
    step = simulate(lists, folded=schedule.folded, seconds=lambda kind, _: SECONDS[kind])
    chain = StageChain(stages=stages, chunks=chunks, folded=schedule.folded)
    assert most_ahead(step, chain) <= receives_ahead(chunks)


def test_with_fewer_receives_some_messages_of_interleaved_stages_come_too_early() -> None:
    lists = [SCHEDULES["interleaved"].actions(stage, 2, 8, 2) for stage in range(2)]
    step = simulate(lists, folded=False, seconds=lambda kind, _: SECONDS[kind])
    assert most_ahead(step, StageChain(stages=2, chunks=2, folded=False)) == 2


def most_ahead(step: Simulation, chain: StageChain) -> int:
    """The most messages by which a sender is ahead of what its receiver waits for or has used."""
    sent = {key: event.end for stage, events in enumerate(step.events) for key, event in messages(chain, stage, events).items()}
    asked: dict[MessageKey, float] = {}  # when a stage begins to wait for a message: its action before has ended
    for stage, events in enumerate(step.events):
        free = 0.0
        for event in events:
            part = chain.part(stage, event.action.chunk)
            if event.action.kind != "W":
                before = part - 1 if event.action.kind == "F" else part + 1
                asked[MessageKey("F" if event.action.kind == "F" else "B", before, event.action.micro)] = free
            free = event.end
    most = 0
    for stage in range(chain.stages):
        for keys in chain.sends(stage, [event.action for event in step.events[stage]]).values():
            for number, key in enumerate(keys):
                used = max((at for at, each in enumerate(keys) if asked[each] <= sent[key]), default=-1)
                most = max(most, number - used)
    return most


def messages(chain: StageChain, stage: int, events: tuple[TimedAction, ...]) -> Mapping[MessageKey, TimedAction]:
    """The messages that a stage sends, and the action after which each goes."""
    made = {}
    for event in events:
        if event.action.kind != "W":
            kind, micro, chunk = event.action
            made[MessageKey("F" if kind == "F" else "B", chain.part(stage, chunk), micro)] = event
    return made


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_stage_asks_for_no_more_messages_of_another(name: str, chunks: int) -> None:
    """A middle stage, in a group that sends nothing."""
    mesh = Mesh(pp=3)
    lists = [SCHEDULES[name].actions(stage, 3, 6, chunks) for stage in range(3)]
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        world = World(rank=1, size=3, device=torch.device("cpu"))
        grid = make_grid(world, MeshPosition(rank=1, mesh=mesh, coordinates=mesh.coordinates(1), parts=()))
        chain = StageChain(stages=3, chunks=chunks, folded=False)
        stage = StageMessages(grid, chain)
        stage.begin(lists, torch.empty(1, 2), world.device)
        most = 0
        for action in lists[1]:
            before = chain.part(1, action.chunk) + (-1 if action.kind == "F" else 1)
            if 0 <= before < chain.parts:
                stage.receive(MessageKey("F" if action.kind == "F" else "B", before, action.micro))
                ahead = Counter(chain.stage(key.part) for key in stage._posted)
                most = max(most, *ahead.values(), 0)
        assert most == receives_ahead(chunks)
        assert not stage._posted
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("stages", "schedule", "chunks"), [(1, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved", 2)])
def test_a_stage_holds_the_message_that_it_uses_and_those_whose_receives_are_posted(stages: int, schedule: str, chunks: int) -> None:
    """Each is a micro-batch's hidden states; a run without stages has none."""
    held = []
    for microbatch in (1, 2):
        keys = {"engine": "native", "parallel__pp": stages, "parallel__schedule": schedule, "parallel__chunks": chunks}
        run = run_of(gpt(4, 64, 4, tied=False), 2, **keys, train__batch=8, train__microbatch=microbatch, train__precision="fp32")
        held.append(memory_of(run).stages[0].bytes.buffers)
    assert held[1] - held[0] == (1 + receives_ahead(chunks)) * 2048 * 64 * 4 * (stages > 1)
