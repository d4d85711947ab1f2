"""Seconds of a block's passes, from ops and messages whose seconds are round numbers."""

from __future__ import annotations

import pytest

from distrain.trainer.plan.axes.collectives import Wire
from distrain.trainer.plan.axes.message import AxisMessage
from distrain.trainer.plan.costs.local_tensors import BlockSplit
from distrain.trainer.plan.costs.op_seconds import OpSeconds
from distrain.trainer.plan.costs.pass_seconds import (
    HOST_WAITS,
    OVERLAP_LOSS,
    BlockMessage,
    BlockSeconds,
    RankOp,
    block_seconds,
    dispatched_ops,
)
from distrain.trainer.plan.layout.mesh import Wires

FAST, SLOW = 1e-9, 1e3  # seconds of the device or of the host, beside which the other's count alone, or not at all
WIRE = Wire(size=4, in_node=8, rate=2.0, hop=0.0)
WIRES = Wires(axes={"tp": WIRE}, data=WIRE, expert_copies=WIRE, pair=WIRE)
PAYLOAD = 4  # bytes: an all-reduce over 4 ranks sends 6, which take 3 seconds


def seconds_of(
    device: float, host: float, dispatch: float = 0.0, *, runs_again: bool = False, is_overlapped: bool = False, forward: int = 2
) -> BlockSeconds:
    """The seconds of a block of two ops with as many messages in backward as in forward."""
    split = BlockSplit(
        degrees=(("tp", 4),), overlapped=("tp",) if is_overlapped else (), sequence=False, recompute="full" if runs_again else "none",
        microbatch=1, form="megatron", fused=True, hooks=0,
    )  # fmt: skip
    again = forward if runs_again else 0
    message = BlockMessage(AxisMessage("tp", "all_reduce", PAYLOAD, forward, forward + again), again)
    ops = [RankOp(OpSeconds(device, device, device), host, runs_again)] * 2
    return block_seconds(ops, [message], split, WIRES, dispatch)


def test_ops_beside_a_host_that_is_as_slow_take_longer_than_either() -> None:
    """Short kernels wait for the host where its lead is short; where one of both is much slower, the other hides under it."""
    device, host = [1.0, 3.0], [2.0, 2.0]
    assert dispatched_ops(device, host).seconds() == 4 + HOST_WAITS * 1
    assert dispatched_ops(device, [2e-6, 2e-6]).seconds() == pytest.approx(4)
    assert dispatched_ops([0.0, 0.0], host, 1.0).seconds() == 5
    assert dispatched_ops(device, [0.0, 0.0]).seconds() == 4
    assert dispatched_ops([], [], 1.0).seconds() == 0
    assert dispatched_ops([1.0, 5.0], [3.0, 2.0], 0.5, in_turn=True).seconds(2.0) == 13.5  # one processor is both
    assert dispatched_ops([0.0, 0.0], [0.0, 0.0]).seconds() == 0  # of ops that are not counted


def test_a_message_hides_where_the_device_would_wait_for_the_host() -> None:
    """The host goes on while the device waits for a message: to a slow host it is nothing, to a fast one all of it is added."""
    slow, fast = dispatched_ops([1e-6], [9.0]), dispatched_ops([9.0], [1e-6])
    assert slow.seconds(2.0) == pytest.approx(9 + HOST_WAITS * 2 * 2 / 9)  # 2 of the host's 9 seconds are the device's
    assert fast.seconds(2.0) - fast.seconds() == pytest.approx(2)
    even = dispatched_ops([2.0, 2.0], [1.0, 4.0], 1.0)  # waits of 1 of 5 seconds, less and less apart
    assert 0 < even.seconds(1.0) - even.seconds() < 1


@pytest.mark.parametrize(("runs_again", "passes"), [(False, 1), (True, 2)])
def test_a_slow_host_dispatches_ops_and_messages_one_by_one(runs_again: bool, passes: int) -> None:
    """Forward once, backward twice as much, and forward again where it runs again."""
    found = seconds_of(FAST, 10.0, 1.0, runs_again=runs_again)
    once = 2 * 10 + 2 * 1
    assert found.forward == pytest.approx(once)
    assert found.backward == pytest.approx((1 + passes) * once)


@pytest.mark.parametrize(("runs_again", "passes"), [(False, 1), (True, 2)])
def test_a_slow_device_waits_for_every_message(runs_again: bool, passes: int) -> None:
    found = seconds_of(10.0, FAST, runs_again=runs_again)
    assert found.forward == pytest.approx(20)
    assert found.backward == pytest.approx(40 + 20 * (passes - 1))
    assert found.weight_gradients == 20
    assert found.message_forward == pytest.approx(6)
    assert found.message_backward == pytest.approx(6 * passes)


def test_messages_beside_a_slow_host_take_no_time() -> None:
    found = seconds_of(FAST, SLOW)
    assert found.message_forward == pytest.approx(0, abs=0.1)
    assert found.message_backward == pytest.approx(0, abs=0.1)


def test_an_overlapped_message_slows_computation_or_ends_after_it() -> None:
    """What is longer: one piece of as many as ranks, a share of its own time, or what the computation does not cover."""
    assert seconds_of(10.0, FAST, is_overlapped=True).message_forward == pytest.approx(max(6 / 4, OVERLAP_LOSS * 6))
    assert seconds_of(10.0, FAST, is_overlapped=True, forward=20).message_forward == pytest.approx(60 - 20)


def test_without_rates_messages_have_seconds_and_ops_none() -> None:
    split = BlockSplit(
        degrees=(("tp", 4),), overlapped=(), sequence=False, recompute="none", microbatch=1, form="megatron", fused=True, hooks=0
    )  # fmt: skip
    message = BlockMessage(AxisMessage("tp", "all_reduce", PAYLOAD, 1, 2), 0)
    assert block_seconds([], [message], split, WIRES, 0.0) == BlockSeconds(None, None, 0.0, 3.0, 6.0)
