"""Workers that step alone, as they are planned: who steps together, what they send in one of so many steps, what they hold."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from distrain.tests.fakes.planned_messages import plan_of, run_of
from distrain.trainer.plan.layout.mesh import Mesh
from distrain.trainer.plan.layout.workers import worker_count, worker_ranks
from distrain.trainer.plan.traffic import rank_traffic
from distrain.trainer.spec.run import Parallel, Sync

EVERY = 10
TWO_NODES: dict[str, Any] = {"ranks": 16, "parallel__sync__every": EVERY, "parallel__sync__across": "node", "micros": 2}
HEAVY: dict[str, Any] = {"parallel__sync__outer__lr": 0.7, "parallel__sync__outer__momentum": 0.9}

# fmt: off
MESHES: list[tuple[dict[str, int], Literal["all", "node"], int, int]] = [  # degrees, who steps alone, ranks of the data axis and workers
    ({"dp": 16},                     "all",   1, 16),
    ({"dp": 16},                     "node",  8,  2),
    ({"dp": 8, "cp": 2},             "all",   2,  8),
    ({"dp": 8, "cp": 2},             "node",  8,  2),
    ({"dp": 4, "tp": 4},             "node",  2,  2),
    ({"dp": 2, "tp": 8},             "node",  1,  2),
    ({"dp": 1, "cp": 16},            "node", 16,  1),
    ({"dp": 4, "pp": 4},             "node",  4,  1),
]
# fmt: on


@pytest.mark.parametrize(("degrees", "across", "ranks", "workers"), MESHES)
def test_a_worker_is_a_replica_or_those_of_a_node(
    degrees: dict[str, int], across: Literal["all", "node"], ranks: int, workers: int
) -> None:
    mesh, parallel = Mesh(**degrees), Parallel(sync=Sync(every=EVERY, across=across))
    assert (worker_ranks(parallel, mesh, 8), worker_count(parallel, mesh, 8)) == (ranks, workers)
    assert worker_ranks(Parallel(), mesh, 8) == mesh.size("data")


def rows(zero: int) -> set[tuple[str, str, int, int, int]]:
    """The messages of the data axis: verb, link, bytes of all of a step that has them, the mean bytes sent, how rarely."""
    plan = plan_of(**TWO_NODES, parallel__zero=zero)
    return {(each.verb, each.link, each.payload * each.count, each.sent, each.every) for each in plan.traffic if each.axis == "dp"}


def test_workers_average_float32_weights_in_one_of_so_many_steps() -> None:
    """Gradients, in bf16, stay inside a node of 8; between two nodes travel the weights that a rank steps, in a ring of two."""
    memory = plan_of(**TWO_NODES).memory
    assert memory is not None
    whole = 2 * memory.stages[0].parameters
    shard = whole // 2 // 8 * 4
    summed = ("all_reduce", "inside", whole, 2 * 7 * whole // 8, 1)
    assert rows(0) == {summed, ("all_reduce", "between", 2 * whole, 2 * whole // EVERY, EVERY)}
    scattered, gathered = (("reduce_scatter", "inside", whole, 7 * whole // 8, 1), ("all_gather", "inside", whole, 7 * whole // 8, 1))
    again = ("all_gather", "inside", whole, 7 * whole // 8 // EVERY, EVERY)
    assert rows(1) == {scattered, gathered, ("all_reduce", "between", shard, shard // EVERY, EVERY), again}
    rare = {row for row in rows(3) if row[-1] == EVERY}  # the next forward gathers the weights anyway
    assert rare == {("all_reduce", "between", shard, shard // EVERY, EVERY)}


def test_a_step_takes_its_share_of_the_step_together() -> None:
    seconds = {}
    for every in (1, 2, 10, 1000):
        plan = plan_of(**(TWO_NODES | {"parallel__sync__every": every}), parallel__zero=1, engine="native")
        assert plan.time is not None
        seconds[every] = plan.time.step
    alone = seconds[1000] - (seconds[2] - seconds[1000]) / (1000 / 2 - 1)  # of steps that are never taken together
    assert seconds[10] - alone == pytest.approx((seconds[2] - alone) / 5, rel=1e-6)
    assert seconds[10] < min(seconds[2], seconds[1])


def test_an_outer_step_keeps_a_weight_and_a_momentum() -> None:
    held = []
    for keys in ({}, {"parallel__sync__outer__lr": 0.7}, HEAVY):
        plan = plan_of(**TWO_NODES, parallel__zero=1, **keys)
        assert plan.memory is not None
        held.append(plan.memory.stages[0].bytes.optimizer)
    stepped = held[0] // 12
    assert [each - held[0] for each in held] == [0, 4 * stepped, 8 * stepped]


def test_a_checkpoint_keeps_the_outer_momentum_once() -> None:
    sizes = []
    for keys in ({"parallel__sync__outer__lr": 0.7}, HEAVY, HEAVY | {"parallel__sync__across": "all"}, HEAVY | {"ranks": 8}):
        plan = plan_of(**(TWO_NODES | keys))
        assert plan.run is not None
        assert plan.model is not None
        sizes.append(plan.run.checkpoint_bytes / plan.model.parameters)
    assert sizes == [12, 16, 16, 12]  # a weight and Adam's moments; of the 8 ranks of one node nobody steps alone


def test_a_rank_sends_what_the_busiest_does() -> None:
    run = run_of(**TWO_NODES, parallel__zero=1)
    assert {each.every for each in rank_traffic(run, 9)} == {1, EVERY}
