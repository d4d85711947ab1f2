"""Engine `native` posts each receive of a pipeline before its message is sent, as simulated steps show."""

import os
from collections import Counter
from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from distrain.tests.fakes.planned_memory import gpt, memory_of, run_of  # noqa: E402
from distrain.trainer.engines.native.kernel_loading import load_kernels_before_messages  # noqa: E402
from distrain.trainer.engines.native.stage_chain import MessageKey, StageChain  # noqa: E402
from distrain.trainer.engines.native.stage_messages import StageMessages  # noqa: E402
from distrain.trainer.parallel.process_groups import make_grid  # noqa: E402
from distrain.trainer.parallel.world import World  # noqa: E402
from distrain.trainer.plan.layout.mesh import Mesh  # noqa: E402
from distrain.trainer.plan.layout.schedules import SCHEDULES, Action  # noqa: E402
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
        for ran, action in enumerate(lists[1]):
            stage.begin_action(ran)
            before = chain.part(1, action.chunk) + (-1 if action.kind == "F" else 1)
            if 0 <= before < chain.parts:
                stage.receive(MessageKey("F" if action.kind == "F" else "B", before, action.micro))
                ahead = Counter(chain.stage(key.part) for key in stage._posted)
                most = max(most, *ahead.values(), 0)
        assert most == receives_ahead(chunks)
        assert not stage._posted
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "stages", "micros"), [*((name, stages, 8) for name in SCHEDULES for stages in (2, 4)), ("interleaved", 4, 16), ("zb_v", 4, 16)]
)
def test_a_step_ends_though_an_action_waits_for_all_that_its_gpu_has_begun(name: str, stages: int, micros: int) -> None:
    """As where CUDA loads a kernel or frees memory, and a receive that is posted is a kernel that waits for its message."""
    lists, chain = scheduled(name, stages, micros)
    posted = [posted_receives(stage, lists, chain) for stage in range(stages)]
    assert ends(lists, posted, chain, set())
    for stage, own in enumerate(lists):
        assert all(ends(lists, posted, chain, {(stage, at)}) for at in range(len(own)))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_kernels_are_loaded_early_where_the_first_actions_could_wait_for_each_other(
    name: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first action of each kind on each chunk, whose kernels are else loaded then."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # so that it is restored
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    lists, chain = scheduled(name, stages, 8)
    posted = [posted_receives(stage, lists, chain) for stage in range(stages)]
    first: dict[tuple[int, str, int], int] = {}
    for stage, own in enumerate(lists):
        for at, action in enumerate(own):
            first.setdefault((stage, action.kind, action.chunk), at)
    load_kernels_before_messages(1, name)
    assert "CUDA_MODULE_LOADING" not in os.environ
    load_kernels_before_messages(stages, name)
    assert ends(lists, posted, chain, {(stage, at) for (stage, _, _), at in first.items()}) == ("CUDA_MODULE_LOADING" not in os.environ)


def test_receives_as_on_a_cpu_would_stop_a_step_on_a_gpu() -> None:
    """Two ahead, whatever they depend on: a receive that is posted on a CPU keeps nothing waiting."""
    lists, chain = scheduled("interleaved", 2, 8)
    posted = [posted_receives(stage, lists, chain, "cpu") for stage in range(chain.stages)]
    assert not all(ends(lists, posted, chain, {(stage, at)}) for stage, own in enumerate(lists) for at in range(len(own)))


Posted = dict[MessageKey, int]  # what a stage receives, in the order in which it posts it, and the action that it then begins


def scheduled(name: str, stages: int, micros: int) -> tuple[list[list[Action]], StageChain]:
    """The actions of a schedule's stages, two chunks each where it has chunks."""
    schedule = SCHEDULES[name]
    chunks = schedule.parts(2 if schedule.chunked else 1)
    lists = [list(schedule.actions(stage, stages, micros, chunks)) for stage in range(stages)]
    return lists, StageChain(stages=stages, chunks=chunks, folded=schedule.folded)


def posted_receives(stage: int, lists: list[list[Action]], chain: StageChain, device: str = "meta") -> Posted:
    """The receives that engine `native` posts on a stage, in a group that sends nothing; a `meta` device is no CPU."""
    mesh = Mesh(pp=chain.stages)
    dist.init_process_group("fake", rank=stage, world_size=chain.stages, store=FakeStore())
    try:
        world = World(rank=stage, size=chain.stages, device=torch.device(device))
        grid = make_grid(world, MeshPosition(rank=stage, mesh=mesh, coordinates=mesh.coordinates(stage), parts=()))
        messages, posted = StageMessages(grid, chain), Posted()
        messages.begin(lists, torch.empty(1, 2), world.device)
        for at, action in enumerate(lists[stage]):
            messages.begin_action(at)
            posted |= dict.fromkeys([key for key in messages._posted if key not in posted], at)
            key = chain.taken_by(stage, action)
            if key and chain.stage(key.part) != stage:
                messages.receive(key)
                posted |= dict.fromkeys([each for each in (key, *messages._posted) if each not in posted], at)
        return posted
    finally:
        dist.destroy_process_group()


def ends(lists: list[list[Action]], posted: list[Posted], chain: StageChain, waits: set[tuple[int, int]]) -> bool:
    """Whether a step ends in which some (stage, action) wait on the host for all that their GPU has begun before they go on.

    A host begins its actions without waiting for any other. Its GPU runs them in order, each when its message is there. Between two
    stages messages pass in order, in each direction apart; one passes when its sender has made it and its receiver has run all actions
    before the one at which it posted the receive.
    """
    made = [{key: at for at, action in enumerate(own) if (key := chain.made_by(stage, action))} for stage, own in enumerate(lists)]
    queues: dict[tuple[int, int], list[MessageKey]] = {}
    for stage, received in enumerate(posted):
        for key in received:
            queues.setdefault((chain.stage(key.part), stage), []).append(key)
    begun, ran = [0] * chain.stages, [0] * chain.stages  # actions that the host began, and that the GPU ran
    passed: set[MessageKey] = set()

    def is_idle(stage: int) -> bool:
        """Whether a GPU has run all that its host began: actions, sends and receives."""
        at = begun[stage] - 1
        received = all(key in passed for key, when in posted[stage].items() if when <= at)
        sent = all(key in passed for (sender, _), keys in queues.items() if sender == stage for key in keys if made[stage][key] < at)
        return ran[stage] >= at and received and sent

    def step(stage: int) -> bool:
        moved, own = False, lists[stage]
        while begun[stage] < len(own) and ((stage, begun[stage] - 1) not in waits or is_idle(stage)):
            begun[stage] += 1
            moved = True
        can_run = begun[stage] - ((stage, begun[stage] - 1) in waits and not is_idle(stage))
        while ran[stage] < can_run:
            key = chain.taken_by(stage, own[ran[stage]])
            if key and chain.stage(key.part) != stage and key not in passed:
                break
            ran[stage] += 1
            moved = True
        for (sender, receiver), keys in queues.items():
            while keys and ran[sender] > made[sender][keys[0]] and begun[receiver] > posted[receiver][keys[0]] <= ran[receiver]:
                passed.add(keys.pop(0))
                moved = True
        return moved

    while any(step(stage) for stage in range(chain.stages)):
        pass
    return ran == [len(own) for own in lists]


@pytest.mark.parametrize(("stages", "schedule", "chunks"), [(1, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved", 2)])
def test_a_stage_holds_the_message_that_it_uses_and_those_whose_receives_are_posted(stages: int, schedule: str, chunks: int) -> None:
    """Each is a micro-batch's hidden states; a run without stages has none."""
    held = []
    for microbatch in (1, 2):
        keys = {"engine": "native", "parallel__pp": stages, "parallel__schedule": schedule, "parallel__chunks": chunks}
        run = run_of(gpt(4, 64, 4, tied=False), 2, **keys, train__batch=8, train__microbatch=microbatch, train__precision="fp32")
        held.append(memory_of(run).stages[0].bytes.buffers)
    assert held[1] - held[0] == (1 + receives_ahead(chunks)) * 2048 * 64 * 4 * (stages > 1)
