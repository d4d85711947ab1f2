"""How gradients are summed, as it is planned: in two levels, by parameter servers, used late, by whichever algorithm is faster."""

from __future__ import annotations

from typing import Any

import pytest

from distrain.tests.fakes.planned_messages import NIC, NVLINK, messages, plan_of, run_of
from distrain.trainer.plan.axes.collectives import Wire, collective_cost, server_seconds
from distrain.trainer.plan.axes.dp import CONTENTION
from distrain.trainer.plan.layout.gradient_routes import inner_ranks, server_count, server_ranks
from distrain.trainer.plan.layout.mesh import Mesh
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.plan.traffic import rank_traffic
from distrain.trainer.spec.run import Parallel

TWO_NODES: dict[str, Any] = {"ranks": 16, "micros": 2}
LEVELS = TWO_NODES | {"parallel__reduce": "hierarchical"}
SERVERS = TWO_NODES | {"parallel__reduce": "server", "parallel__servers": 2}

# fmt: off
MESHES: list[tuple[dict[str, int], int]] = [  # degrees on nodes of 8, ranks that sum before the nodes do
    ({"dp": 16},                 8),
    ({"dp": 8, "cp": 2},         8),
    ({"dp": 8, "tp": 2},         4),
    ({"dp": 2, "tp": 8},         1),  # one in each node
    ({"dp": 4, "pp": 4},         1),  # all in one
    ({"dp": 6, "tp": 4},         2),
]
# fmt: on


@pytest.mark.parametrize(("degrees", "inner"), MESHES)
def test_the_ranks_of_a_node_sum_first(degrees: dict[str, int], inner: int) -> None:
    mesh = Mesh(**degrees)
    assert inner_ranks(Parallel(reduce="hierarchical"), mesh, 8) == inner
    assert inner_ranks(Parallel(reduce="hierarchical", zero=1), mesh, 8) == inner_ranks(Parallel(), mesh, 8) == 1


def test_servers_are_spread_over_the_ranks() -> None:
    assert server_ranks(1, 16) == (0,)
    assert server_ranks(2, 16) == (0, 8)
    assert server_ranks(3, 8) == (0, 2, 5)
    assert server_ranks(4, 4) == (0, 1, 2, 3)
    server = Parallel(reduce="server", servers=3)
    assert [server_count(server, Mesh(dp=dp)) for dp in (1, 2, 8)] == [0, 2, 3]


def of_a_step(plan: Plan) -> set[tuple[str, str, int, int]]:
    """The messages of the data axis: verb, link, bytes of all, bytes sent."""
    return {(each.verb, each.link, each.payload * each.count, each.sent) for each in messages(plan, "dp")}


def parameters(plan: Plan) -> int:
    assert plan.memory is not None
    return plan.memory.stages[0].parameters


def test_two_levels_send_an_eighth_between_nodes() -> None:
    """Gradients in bf16: scattered inside a node of 8, a part summed in a ring of two, gathered again."""
    plan = plan_of(**LEVELS, engine="native", parallel__bucket=2_116_992)
    whole = 2 * parameters(plan)
    assert of_a_step(plan) == {
        *(("reduce_scatter", "inside", whole, 7 * whole // 8), ("all_gather", "inside", whole, 7 * whole // 8)),
        ("all_reduce", "between", whole // 8, whole // 8),
    }
    flat = plan_of(**TWO_NODES, engine="native", parallel__bucket=2_116_992)
    assert plan.memory is not None
    assert flat.memory is not None
    assert plan.memory.stages[0].bytes.buffers - flat.memory.stages[0].bytes.buffers == whole // 8
    scattered, summed, gathered = sorted(
        messages(plan, "dp"), key=lambda row: ["reduce_scatter", "all_reduce", "all_gather"].index(row.verb)
    )
    assert scattered.exposed is not None
    assert scattered.seconds is not None
    assert scattered.exposed < scattered.seconds  # under backward
    assert (summed.exposed, gathered.exposed) == (summed.seconds, gathered.seconds)


def test_two_levels_take_fewer_hops_than_one_ring() -> None:
    """With messages of one element only latency counts: 14 + 2 hops of a ring of two instead of 30 of a ring of 16."""
    slow = {"cluster__inside__latency": 1.0, "cluster__between__latency": 1.0, "parallel__bucket": 10**9, "engine": "native"}
    seconds = []
    for keys in (LEVELS, TWO_NODES):
        rows = messages(plan_of(**(keys | slow)), "dp")
        seconds.append(sum(each.seconds for each in rows if each.seconds is not None))
    assert seconds == [pytest.approx(7 + 2 + 7, abs=0.1), pytest.approx(30, abs=0.1)]


def test_a_server_sends_weights_and_others_gradients() -> None:
    run = run_of(**SERVERS, engine="native")
    plan = make_plan(run)
    part = parameters(plan)  # elements of half a model, of two bytes
    sent = {rank: sum(each.sent for each in rank_traffic(run, rank) if each.axis == "dp") for rank in range(16)}
    assert sent == {rank: part + 15 * part if rank in (0, 8) else 2 * part for rank in range(16)}
    assert sum(sent.values()) == 15 * 2 * part * 2  # all ranks but its server give each part, and get it


def test_ranks_take_turns_on_a_servers_link() -> None:
    """15 others send a half of the gradients to each server over its own link between nodes, and get as many weights; 16 servers are as
    fast as a ring's two halves."""
    plan = plan_of(**SERVERS, engine="native")
    rows = messages(plan, "dp")
    rate = NIC.bandwidth * NIC.efficiency
    assert [each.seconds for each in rows] == [pytest.approx(15 * parameters(plan) / rate)] * 2
    assert rows[0].exposed == pytest.approx(rows[0].seconds)  # of one bucket
    wire = Wire(16, 1, 1e9, 0.0)
    assert 2 * server_seconds(16e6, 16, wire) == pytest.approx(2 * 16e6 / 1e9)  # each rank sends to all 16, itself included, at most
    assert server_seconds(16e6, 1, wire) == pytest.approx(15 * 16e6 / 1e9)
    inside = plan_of(**(SERVERS | {"ranks": 8}), engine="native")
    expected = 7 * parameters(inside) / (NVLINK.bandwidth * NVLINK.efficiency)
    assert [each.seconds for each in messages(inside, "dp")] == [pytest.approx(expected)] * 2


def test_a_server_holds_its_part_of_the_states_and_what_others_send_of_a_bucket() -> None:
    held = {}
    for servers, late in ((1, 0), (2, 0), (16, 0), (2, 1)):
        keys = SERVERS | {"parallel__servers": servers, "parallel__staleness": late, "train__steps": 9}
        plan = plan_of(**keys, engine="native", parallel__bucket=1_000_000)
        assert plan.memory is not None
        stage = plan.memory.stages[0]
        held[servers, late] = (stage.bytes.optimizer / stage.parameters, stage.bytes.buffers)
    whole = 2 * 15 * parameters(plan)  # bytes that 15 others send of all gradients
    assert held == {
        (1, 0): (12, 30_000_000),
        (2, 0): (6, 15_000_000),
        (16, 0): (pytest.approx(0.75), 30_000_000 // 16),
        (2, 1): (6, 2 * whole // 2),
    }


def test_the_faster_algorithm_is_taken_for_each_message() -> None:
    """A tree sends a little more in fewer hops."""
    for payload, faster in ((1_000, "tree"), (10**9, "ring")):
        wire = Wire(64, 8, 1e9, 1e-5)
        costs = {name: collective_cost("all_reduce", payload, wire, name) for name in ("ring", "tree", "auto")}
        assert costs["auto"] == costs[faster] == min(costs.values(), key=lambda cost: cost[1])
    sent, seconds = collective_cost("all_reduce", 1000, Wire(64, 8, 1e9, 1.0), "tree")
    assert (sent, round(seconds, 3)) == (2000, 12)
    assert collective_cost("all_gather", 1000, Wire(64, 8, 1e9, 1.0), "tree") == collective_cost("all_gather", 1000, Wire(64, 8, 1e9, 1.0))


SLOW: dict[str, Any] = {"ranks": 8, "micros": 2, "cluster__inside__bandwidth": 1e8, "engine": "native"}


@pytest.mark.parametrize("zero", [0, 1])
def test_a_whole_step_hides_a_sum_that_is_used_late(zero: int) -> None:
    """A link sends a sum in each step: where that takes longer than a step, no staleness makes steps shorter."""
    plans = [plan_of(**SLOW, parallel__zero=zero, parallel__staleness=late, train__steps=99) for late in (0, 1, 50)]
    rows = [next(each for each in messages(plan, "dp") if each.verb != "all_gather") for plan in plans]
    assert len({(each.payload, each.count, each.sent, each.seconds) for each in rows}) == 1
    fresh, one, many = (each.exposed or 0.0 for each in rows)
    assert plans[0].time is not None
    hidden = plans[0].time.compute * (1 - CONTENTION)  # by a step, whose passes slow down by what they hide
    assert one == many == pytest.approx((rows[0].seconds or 0.0) - hidden, rel=1e-6)
    assert fresh > one
    (row, *_) = messages(plan_of(ranks=8, micros=2, engine="native", parallel__zero=zero, parallel__staleness=1, train__steps=99), "dp")
    assert row.exposed == pytest.approx((row.seconds or 0.0) * CONTENTION)  # over a link as fast as NVLink


def test_a_rank_holds_gradients_for_each_step_under_way() -> None:
    held = {}
    for zero in (0, 1):
        for late in (0, 1, 3):
            plan = plan_of(**TWO_NODES, parallel__zero=zero, parallel__staleness=late, train__steps=9, engine="native")
            assert plan.memory is not None
            stage = plan.memory.stages[0]
            held[zero, late] = stage.bytes.gradients / stage.parameters
    alone = plan_of(ranks=1, parallel__staleness=1, train__steps=9, engine="native")
    assert alone.memory is not None
    assert alone.memory.stages[0].bytes.gradients == 2 * parameters(alone)
    assert held == {(0, 0): 2, (0, 1): 4, (0, 3): 8, (1, 0): 2, (1, 1): pytest.approx(4.125), (1, 3): pytest.approx(8.375)}
