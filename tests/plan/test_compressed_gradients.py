"""Compressed gradients in a plan: which matrices, the bytes of their messages, memory, time, and which engines run them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.planned_messages import GPT, MOE, messages, plan_of, run_of
from distrain.trainer.plan.axes.powersgd_factors import FactorElements, MatrixStack, compressed_stack, factor_elements
from distrain.trainer.plan.engines import engine_for
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.native.buckets import gradient_buckets
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.rundir.resume_changes import compare_runs
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.keys.units import percent_text
from distrain.trainer.spec.run import Cluster, Link, Run

RANK, BF16 = 4, 2
COMPRESSED: dict[str, Any] = {"parallel__compress__name": "powersgd", "engine": "native"}


def sent_payload(plan: Plan) -> int:
    """The bytes of the messages of the data axis in a step."""
    return sum(each.payload * each.count for each in messages(plan, "dp"))


@pytest.mark.parametrize(
    ("size", "rank", "stack"),
    [
        ((64, 256), 4, MatrixStack(1, 64, 256)),
        ((8, 8), 4, None),  # as many elements in its factors
        ((9, 8), 4, MatrixStack(1, 9, 8)),
        ((3, 64, 32), 2, MatrixStack(3, 64, 32)),
        ((1000,), 1, None),
        ((64, 256), 0, None),
    ],
)
def test_a_matrix_is_compressed_where_its_factors_are_smaller(size: tuple[int, ...], rank: int, stack: MatrixStack | None) -> None:
    assert compressed_stack(size, rank) == stack
    if stack:
        rows, columns = size[-2:]
        assert factor_elements(stack, rank) == (prod(size), prod(size[:-2]) * rows * rank, prod(size[:-2]) * columns * rank)


def by_hand(run: Run) -> tuple[int, FactorElements]:
    """The gradient elements that rank 0 sends whole, and those of its compressed weights, from its weight shards."""
    position = mesh_position(run, 0)
    whole, found = 0, FactorElements()
    for shard in {each.name: each for part in position.parts for each in position.weight_shards(run, part)}.values():
        if stack := compressed_stack(shard.size, run.parallel.compress.rank):
            found = found.plus(factor_elements(stack, run.parallel.compress.rank))
        else:
            whole += prod(shard.size)
    return whole, found


@pytest.mark.parametrize("changes", [{}, {"parallel__tp": 2}, {"parallel__cp": 2}, {"parallel__compress__rank": 1}])
def test_a_rank_sends_two_factors_of_each_matrix_and_the_rest_whole(changes: dict[str, Any]) -> None:
    run = run_of(GPT, **COMPRESSED, **changes)
    plan = plan_of(GPT, **COMPRESSED, **changes)
    whole, found = by_hand(run)
    assert sent_payload(plan) == BF16 * (whole + found.left + found.right)
    assert found.matrices > 0.98 * (found.matrices + whole)
    assert plan.memory is not None
    assert plan.memory.stages[0].bytes.buffers == BF16 * sum(found)  # an error for each element, and both factors


def test_experts_are_compressed_one_by_one_where_several_ranks_hold_the_same() -> None:
    """With a rank for each expert's copy none of their gradients travels; with two copies each expert has factors of its own."""
    sent = {}
    for ep in (8, 4):
        run = run_of(MOE, parallel__ep=ep, **COMPRESSED)
        experts = [
            shard for part in mesh_position(run, 0).parts for shard in mesh_position(run, 0).weight_shards(run, part) if shard.expert
        ]
        stacks = [stack for each in experts if (stack := compressed_stack(each.size, RANK))]
        assert len(stacks) == len(experts)
        assert {stack.matrices for stack in stacks} == {16 // ep}
        sent[ep] = sent_payload(plan_of(MOE, parallel__ep=ep, **COMPRESSED)), sum(sum(factor_elements(each, RANK)[1:]) for each in stacks)
    assert sent[4][0] - sent[8][0] == BF16 * sent[4][1]


def test_compressed_weights_have_buckets_of_their_own() -> None:
    run = run_of(GPT, **COMPRESSED)
    position = mesh_position(run, 0)
    shards = [shard for part in position.parts for shard in position.weight_shards(run, part)]
    buckets = gradient_buckets(run, position.mesh, shards)
    sizes = {each.name: each.size for each in shards}
    assert {each.kind.compressed for each in buckets} == {True, False}
    for bucket in buckets:
        assert {compressed_stack(sizes[name], RANK) is not None for name in bucket.names} == {bucket.kind.compressed}


def test_a_step_is_faster_on_a_slow_link_and_slower_without_need() -> None:
    """Errors and factors take time in any case."""
    steps = {}
    for rate in (1e8, 300e9):
        for name in ("none", "powersgd"):
            run = run_of(GPT, 16, parallel__compress__name=name, engine="native")
            link = Link(bandwidth=rate, latency=0.0)
            plan = make_plan(replace(run, cluster=replace(run.cluster, inside=link, between=link)))
            assert plan.time is not None
            steps[rate, name] = plan.time
    assert steps[1e8, "powersgd"].step < 0.2 * steps[1e8, "none"].step
    assert steps[300e9, "powersgd"].optimizer > 1.05 * steps[300e9, "none"].optimizer


def test_left_factors_hide_under_backward_and_right_ones_under_nothing() -> None:
    bucket = 2_000_000
    rows = messages(plan_of(GPT, **COMPRESSED, parallel__bucket=bucket), "dp")
    _, found = by_hand(run_of(GPT, **COMPRESSED))
    parts = -(-found.matrices // bucket)
    left, right = (next(row for row in rows if row.payload == -(-BF16 * each // parts)) for each in (found.left, found.right))
    assert parts == left.count == right.count > 1
    assert left.seconds is not None
    assert left.exposed is not None
    assert left.exposed < 0.9 * left.seconds
    assert right.exposed == right.seconds


# fmt: off
LIMITS = [  # what differs, the engine that auto takes (None: none), what is said of the first limit
    ({},                                                        "native", ""),
    ({"engine": "zero"},                                        "zero",   "engine zero does not run parallel.compress.name=powersgd"),
    ({"engine": "pipe", "parallel.pp": 2},                      "pipe",   "engine pipe does not run parallel.compress.name=powersgd"),
    ({"parallel.pp": 2},                                        "native", ""),
    ({"engine": "native", "parallel.zero": 1},                  "native",
     "engine native does not run parallel.compress.name=powersgd with parallel.zero=1"),
    ({"engine": "native", "train.precision": "fp16"},           "native",
     "engine native does not run parallel.compress.name=powersgd with train.precision=fp16"),
    ({"parallel.pp": 2, "parallel.schedule": "pipedream"},      None,
     "engine native does not run parallel.compress.name=powersgd with parallel.schedule=pipedream"),
    ({"parallel.zero": 2},                                      None,     "engine zero does not run parallel.compress.name=powersgd"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "engine", "says"), LIMITS)
def test_engines_that_do_not_compress_say_so(changes: dict[str, Any], engine: str | None, says: str) -> None:
    run = with_changes(run_of(GPT, parallel__compress__name="powersgd", micros=4), changes.items())
    row, limits = engine_for(run, run.parallel)
    assert (row.name if row else None) == engine
    assert (limits[0].says if limits else "") == says
    plan = make_plan(run)
    assert plan.runnable == (not says)
    assert all(each.mend for each in plan.warnings if each.rule == "engine")


def warnings_of(**changes: Any) -> list[str]:
    return [each.says for each in plan_of(GPT, **changes).warnings if each.rule == "compress"]


def test_a_plan_warns_of_another_curve_and_of_a_rank_that_compresses_nothing() -> None:
    (says,) = warnings_of(**COMPRESSED, parallel__compress__start=100)
    whole, found = by_hand(run_of(GPT, **COMPRESSED))
    assert says == (
        f"parallel.compress.name=powersgd trains another curve than none: {percent_text(found.matrices / (found.matrices + whole))} of the "
        f"gradients travel as factors of rank 4, {found.matrices / (found.left + found.right):.1f} times fewer elements, after 100 steps"
    )
    assert "compresses nothing" in warnings_of(**COMPRESSED, parallel__compress__rank=2000)[0]
    assert warnings_of() == []


def test_one_data_parallel_rank_compresses_nothing() -> None:
    alone: dict[str, Any] = {"parallel__tp": 2, "engine": "native"}
    one, other = plan_of(GPT, 2, **alone, parallel__compress__name="powersgd"), plan_of(GPT, 2, **alone)
    assert (one.memory, one.time, one.traffic) == (other.memory, other.time, other.traffic)


def test_a_checkpoint_keeps_an_error_for_each_compressed_element() -> None:
    layouts: tuple[dict[str, Any], ...] = ({}, {"parallel__tp": 2}, {"parallel__pp": 2})
    for changes in layouts:
        plans = [plan_of(GPT, engine="native", parallel__compress__name=name, **changes) for name in ("none", "powersgd")]
        sizes = [plan.run.checkpoint_bytes if plan.run else 0 for plan in plans]
        _, found = by_hand(run_of(GPT, 2, **COMPRESSED))  # of one rank that has all weights
        assert sizes[1] - sizes[0] == BF16 * found.matrices


def test_another_compression_is_reported_at_a_resume() -> None:
    words = ["parallel.zero=0", "cluster.gpus=2"]
    whole, low, lower = (
        load_recipe("quickstart", [*words, *more])
        for more in ([], ["parallel.compress.name=powersgd"], ["parallel.compress.name=powersgd", "parallel.compress.rank=1"])
    )
    assert [each.text for each in compare_runs(whole, low, step=3).reported] == ["parallel.compress.name none -> powersgd"]
    assert [each.text for each in compare_runs(low, lower, step=3).reported] == ["parallel.compress.rank 4 -> 1"]
    assert compare_runs(low, low, step=3).reported == ()


def test_a_cluster_of_any_size_is_planned() -> None:
    run = run_of(GPT, **COMPRESSED, parallel__pp=2, micros=4)
    plan = make_plan(replace(run, cluster=Cluster(**{**vars(run.cluster), "nodes": 64}), train=replace(run.train, batch=64 * 16)))
    assert plan.ok
    assert plan.runnable
