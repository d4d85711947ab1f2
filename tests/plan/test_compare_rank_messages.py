"""Messages compared with the plan: control messages by number and bytes, and gathers of ZeRO-3 that are known only roughly."""

from __future__ import annotations

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.compare_rank_messages import MessageRow, compare_with_plan
from distrain.trainer.plan.costs.control_message import ControlMessage
from distrain.trainer.plan.costs.cost_model import CostModel
from distrain.trainer.plan.costs.traffic_term import TrafficTerm
from distrain.trainer.plan.deepspeed.control_messages import control_messages
from distrain.trainer.plan.deepspeed.messages import traffic_terms
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan_data import Message

NORM = ControlMessage(verb="all_reduce", payload=4, count=2, says="gradient norm")
LOSS = ControlMessage(verb="all_reduce", payload=4, count=1, says="loss")
LABELS = ControlMessage(verb="all_reduce", payload=8, count=1, says="label count")
BASE = ("model=tiny", "data=synthetic", "train.batch=8", "train.seq=32", "train.microbatch=1", "train.precision=fp32")


def control(payload: int, count: int) -> MessageRow:
    return MessageRow(axis="control", verb="all_reduce", payload=payload, count=count)


@pytest.mark.parametrize(
    ("count", "verdict", "why"),
    [
        (3, "equal", "gradient norm 2, loss 1"),
        (2, "differs", "more or fewer than planned; gradient norm 2, loss 1"),
        (4, "differs", "more or fewer than planned; gradient norm 2, loss 1"),
    ],
)
def test_a_missing_or_an_extra_control_message_differs(count: int, verdict: str, why: str) -> None:
    (line,) = compare_with_plan([control(4, count)], [], (), [NORM, LOSS])
    assert (line.axis, line.planned_count, line.counted_count, line.verdict, line.why) == ("control", 3, count, verdict, why)


def test_control_messages_of_another_size_are_another_kind() -> None:
    lines = compare_with_plan([control(4, 3), control(16, 1)], [], (), [NORM, LOSS, LABELS])
    assert [(line.payload, line.verdict, line.why) for line in lines] == [
        (4, "equal", "gradient norm 2, loss 1"),
        (8, "differs", "planned, and never sent; label count 1"),
        (16, "differs", "sent, and not planned"),
    ]


def test_an_engine_that_plans_no_control_explains_it() -> None:
    run = load_recipe("quickstart", [*BASE, "cluster.gpus=2"])
    assert CostModel().control_messages(run, mesh_position(run, 0).mesh, (), 4) is None
    (line,) = compare_with_plan([control(4, 3)], [], (), None)
    assert line.verdict == "explained"


@pytest.mark.parametrize(
    ("sent", "verdict"), [(99, "differs"), (100, "explained"), (150, "explained"), (200, "explained"), (201, "differs")]
)
def test_bytes_that_are_known_only_roughly_are_explained_between_their_bounds(sent: int, verdict: str) -> None:
    terms = [TrafficTerm(verb="all_gather", bytes=100, most=200, says="once or twice")]
    rows = [MessageRow(axis="dp", verb="all_gather", payload=sent, count=1)]
    planned = [Message(axis="dp", verb="all_gather", payload=300, count=1, sent=0, link="inside", seconds=None, exposed=None)]
    (line,) = compare_with_plan(rows, planned, terms)
    assert line.verdict == verdict


@pytest.mark.parametrize(("model", "is_rough"), [("tiny_llama", False), ("llama3_8b", True)])
def test_a_large_model_gathers_some_of_its_weights_twice_at_stage_3(model: str, is_rough: bool) -> None:
    """8 G parameters: backward uses the first of them more than a billion elements after forward did."""
    run = load_recipe("quickstart", [f"model={model}", "cluster.gpus=2", "parallel.zero=3", "train.batch=8", "train.microbatch=4"])
    position = mesh_position(run, 0)
    shards = [shard for part in position.parts for shard in position.weight_shards(run, part)]
    gathers = [each for each in traffic_terms(run, position.mesh, shards) if each.verb == "all_gather"]
    assert [each.most == 2 * each.bytes for each in gathers if each.most] == [True] * is_rough


# fmt: off
PLANNED: tuple[tuple[tuple[str, ...], dict[tuple[str, int], int]], ...] = (  # words, {(verb, bytes): count}
    (("cluster.gpus=1",), {}),
    (("cluster.gpus=2", "parallel.zero=0"), {("all_reduce", 4): 1, ("all_reduce", 8): 1}),  # finite check, loss
    (("cluster.gpus=2", "parallel.zero=2"), {("all_reduce", 4): 3, ("all_reduce", 8): 1}),  # and the norms of matrices and of vectors
    (("cluster.gpus=2", "parallel.zero=3"), {("all_reduce", 4): 1, ("all_reduce", 8): 3}),
    (("cluster.gpus=2", "parallel.tp=2", "parallel.zero=0"), {("all_reduce", 4): 1, ("all_reduce", 8): 1}),
    (("cluster.gpus=4", "parallel.tp=2", "parallel.zero=1"), {("all_reduce", 4): 5, ("all_reduce", 8): 1}),  # norms over both axes
    (("cluster.gpus=2", "train.precision=bf16", "parallel.zero=1"), {("all_reduce", 4): 3, ("all_reduce", 8): 1, ("all_reduce", 1): 1}),
    (("cluster.gpus=2", "parallel.pp=2", "parallel.zero=0"), {("all_reduce", 4): 1, ("all_reduce", 8): 2}),
    (("cluster.gpus=2", "parallel.zero=0", "data.documents=true"), {("all_reduce", 4): 1, ("all_reduce", 8): 2}),  # and labels
    (("model=tiny_moe", "model.layers=2", "cluster.gpus=2", "parallel.ep=2", "parallel.zero=1"),
     {("all_reduce", 4): 4, ("all_reduce", 8): 1, ("all_reduce", 96): 1, ("all_to_all", 32): 8}),
    (("model=tiny_moe", "model.layers=2", "cluster.gpus=2", "parallel.ep=2", "parallel.zero=1", "parallel.recompute=full"),  # routed twice
     {("all_reduce", 4): 4, ("all_reduce", 8): 1, ("all_reduce", 96): 1, ("all_to_all", 32): 16}),
)
# fmt: on


@pytest.mark.parametrize(("words", "expected"), PLANNED, ids=lambda each: " ".join(each) if isinstance(each, tuple) else "")
def test_control_messages_follow_from_the_layout(words: tuple[str, ...], expected: dict[tuple[str, int], int]) -> None:
    run = load_recipe("quickstart", [*BASE, *words])
    position = mesh_position(run, 0)
    shards = [shard for part in position.parts for shard in position.weight_shards(run, part)]
    counts: dict[tuple[str, int], int] = {}
    for each in control_messages(run, position.mesh, shards, run.model.layers // run.parallel.pp) or ():
        counts[each.verb, each.payload] = counts.get((each.verb, each.payload), 0) + each.count
    assert counts == expected
