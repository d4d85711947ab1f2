"""Seconds of planned messages: the links of a group, and what is hidden under computation."""

from dataclasses import replace
from typing import Any

import pytest

from distrain.tests.fakes.planned_messages import DEVICE, MOE, NIC, NVLINK, H, V, messages, plan_of
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.spec.run import Link, Model


def rate(plan: Plan, axis: str) -> float:
    """Bytes/s that a rank of an axis's group sends, where a hop takes no time."""
    (message,) = messages(plan, axis)
    assert message.seconds is not None
    return message.sent / message.seconds


# A group with g ranks in each node crosses nodes on g rails: arXiv:2104.04473 section 5.9.
@pytest.mark.parametrize(("tp", "rails"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_a_ring_over_nodes_has_a_rail_for_each_of_its_ranks_in_a_node(tp: int, rails: int) -> None:
    assert rate(plan_of(ranks=32, parallel__tp=tp, engine="papers"), "dp") == pytest.approx(rails * NIC.rate, rel=1e-9)


def test_rails_carry_no_more_than_the_links_inside() -> None:
    assert rate(plan_of(ranks=32, cluster__between=Link(bandwidth=100e9, latency=0.0), engine="papers"), "dp") == pytest.approx(
        NVLINK.rate, rel=1e-9
    )


def test_a_group_inside_a_node_has_its_links() -> None:
    (message,) = messages(plan_of(engine="papers"), "dp")
    assert message.link == "inside"
    assert rate(plan_of(engine="papers"), "dp") == pytest.approx(NVLINK.rate, rel=1e-9)


# Messages that computation hides, and those that it does not


def test_gradients_overlap_with_backward_unless_overlap_is_off() -> None:
    under, after = (plan_of(ranks=64, parallel__overlap__data=hide, parallel__bucket=10**6).traffic[0] for hide in (True, False))
    assert under.seconds == after.seconds == after.exposed
    assert under.exposed is not None
    assert after.exposed is not None
    assert under.exposed < after.exposed


def test_overlapped_messages_between_stages_expose_no_time() -> None:
    keys: dict[str, Any] = {"ranks": 4, "parallel__pp": 4, "micros": 4}
    shown, hidden = (messages(plan_of(**keys, parallel__overlap__pipeline=hide), "pp")[0] for hide in (False, True))
    assert shown.exposed == shown.seconds == hidden.seconds
    assert hidden.exposed == 0


@pytest.mark.parametrize("hide", [False, True])
def test_no_message_is_exposed_longer_than_it_takes(hide: bool) -> None:
    keys: dict[str, Any] = {f"parallel__overlap__{each}": hide for each in ("data", "tensor", "pipeline", "context")}
    for message in plan_of(ranks=64, parallel__tp=4, parallel__cp=2, parallel__pp=2, parallel__zero=1, micros=3, **keys).traffic:
        assert message.seconds is not None
        assert message.exposed is not None
        assert 0 <= message.exposed <= message.seconds


def test_a_tensor_group_across_nodes_is_as_slow_as_the_link_between_them() -> None:
    """Three ranks a group on nodes of 8: the ranks 6, 7 and 8 are one."""
    plan = plan_of(Model(family="gpt", layers=2, hidden=6144, heads=48, vocab=V), ranks=24, parallel__tp=3)
    for message in messages(plan, "tp"):
        assert message.link == "between"
        assert message.seconds is not None
        assert message.exposed is not None
        assert 0.7 < message.exposed / message.seconds < 1  # meanwhile the host gets further ahead


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_where_the_host_costs_nothing_every_message_that_nothing_overlaps_is_waited_for(recompute: str, sequence: bool) -> None:
    """Those that are sent again too."""
    device = replace(DEVICE, dispatch=0.0)
    plan = plan_of(parallel__tp=2, parallel__recompute=recompute, parallel__sequence=sequence, cluster__device=device, micros=3)
    for message in messages(plan, "tp"):
        assert message.exposed == pytest.approx(message.seconds, rel=1e-9)


def test_layers_that_wait_for_the_host_hide_their_messages() -> None:
    """Small layers of GPT-2 take the host longer than the device, which waits for messages in that time."""
    plan = plan_of(Model(family="gpt", layers=2, hidden=768, heads=12, vocab=V), parallel__tp=2)
    for message in messages(plan, "tp"):
        assert message.exposed is not None
        assert message.seconds is not None
        assert message.exposed < 0.1 * message.seconds


def test_expert_shards_are_on_the_ranks_of_the_experts_copies() -> None:
    """With 8 expert ranks in a node, the two ranks that share an expert's states are in two nodes."""
    plan = plan_of(MOE, ranks=32, parallel__ep=8, parallel__zero=3, parallel__shard=16)
    experts = 16 * 3 * H * 1024 // 8
    (gathered,) = {each for each in messages(plan, "dp", "all_gather") if each.payload == experts * 2}
    assert gathered.link == "between"
    assert gathered.seconds == pytest.approx(gathered.sent / NIC.rate, rel=1e-9)
