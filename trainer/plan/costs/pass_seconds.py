"""Seconds of a block's passes on one rank, for one micro-batch: its ops, as the host dispatches them, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..axes import AXES
from ..axes.collectives import collective_cost
from ..axes.message import AxisMessage
from ..layout.mesh import Wires
from .local_tensors import BlockSplit
from .number_or_array import larger
from .op_seconds import OpSeconds

HOST_WAITS = 0.4  # share of short kernels' waits for the host that its lead does not cover, where device and host are equally slow
OVERLAP_LOSS = 0.36  # share of a hidden message's time that the computation beside it loses, inside a block
INSTANT = 1e-30  # seconds; less than any kernel takes, for ops that cost nothing


class BlockMessage(NamedTuple):
    """A message of a block; `repeated` of its backward ones are forward's, sent again where its ops run again."""

    message: AxisMessage
    repeated: int


class BlockSeconds(NamedTuple):
    """Seconds of a block's computation in forward and backward (None where the device's peak is unknown), the part of backward that
    computes weight gradients, and exposed seconds of its messages."""

    forward: float | None
    backward: float | None
    weight_gradients: float
    message_forward: float
    message_backward: float


class RankOp(NamedTuple):
    """An op on this rank: its seconds, those in which the host dispatches its forward, and whether it runs again before backward."""

    seconds: OpSeconds
    host: float
    repeats: bool


class Passes(NamedTuple):
    """Seconds in forward, in backward, and in the forward that recomputation runs again."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0


class DispatchedOps(NamedTuple):
    """Ops that the device runs as the host dispatches them: seconds of both in all, seconds in which op by op the slower of both works, the
    host's seconds for messages beside the ops, and whether both are one processor, which does one after the other."""

    computing: float
    dispatching: float
    alternating: float
    messages: float
    in_turn: bool = False

    def seconds(self, waited: float = 0.0) -> float:
        """Seconds of the ops, among which the device waits so long for messages, and the host does not.

        At best the larger of the device's sum and the host's: under long kernels the host gets ahead, and short ones do not wait for it.
        The closer the sums, the less it gets ahead. On one processor nothing overlaps.
        """
        computing = self.computing + waited
        if self.in_turn:
            return computing + self.dispatching
        longer = larger(computing, self.dispatching)
        waits = self.alternating + larger(self.messages, waited) - longer
        evenness = (computing + self.dispatching - longer) / larger(longer, INSTANT)  # 1: both sums are equal; 0: one of them is nothing
        return longer + HOST_WAITS * waits * evenness


def dispatched_ops(device: Sequence[float], host: Sequence[float], messages: float = 0.0, *, in_turn: bool = False) -> DispatchedOps:
    """Return ops that take the device and the host so long each, and the host `messages` beside them, `in_turn` where both are one
    processor; ops that do not run send none."""
    if not device:
        return DispatchedOps(0.0, 0.0, 0.0, 0.0)
    alternating = sum([larger(*both) for both in zip(device, host, strict=True)])
    return DispatchedOps(sum(device), sum(host) + messages, alternating, messages, in_turn)


def block_seconds(
    ops: Sequence[RankOp], messages: Sequence[BlockMessage], split: BlockSplit, wires: Wires, dispatch: float, *, in_turn: bool = False
) -> BlockSeconds:
    """Return the seconds of a block's ops, none where the device's rates aren't known, and of its messages, each of which takes the host
    `dispatch` seconds; `in_turn` where the host is the device.

    The device waits for a message that nothing overlaps, and the host goes on: where the host is the slower, the device would have waited
    for it anyway. Overlapped messages travel in as many pieces as the axis has ranks: one piece is always exposed, and what is hidden
    slows the computation beside it.
    """
    waited, hidden = _message_passes(messages, split, wires)
    if not ops:
        apart = _sum_passes([waited, *hidden.values()])
        return BlockSeconds(None, None, 0.0, apart.forward, apart.backward + apart.again)
    forward, backward, again = dispatched_passes(ops, dispatch * messages_sent(messages, split), in_turn=in_turn)
    computing = Passes(forward.seconds(), backward.seconds(), again.seconds())
    message_forward = forward.seconds(waited.forward) - computing.forward
    message_backward = backward.seconds(waited.backward) + again.seconds(waited.again) - computing.backward - computing.again
    for axis, each in hidden.items():
        message_forward += _exposed_seconds(each.forward, computing.forward, split.degree(axis))
        message_backward += _exposed_seconds(each.backward + each.again, computing.backward + computing.again, split.degree(axis))
    return BlockSeconds(
        forward=computing.forward,
        backward=computing.backward + computing.again,
        weight_gradients=sum([op.seconds.weight_gradients for op in ops]),
        message_forward=message_forward,
        message_backward=message_backward,
    )


def messages_sent(messages: Sequence[BlockMessage], split: BlockSplit) -> int:
    """Return how many messages a block's forward sends."""
    return sum([message.forward * (split.degree(message.axis) > 1) for message, _ in messages])


def dispatched_passes(ops: Sequence[RankOp], sent: float, *, in_turn: bool) -> tuple[DispatchedOps, DispatchedOps, DispatchedOps]:
    """Return a block's ops in forward, in backward and in the forward that recomputation runs again; the host takes `sent` seconds for
    the messages of a forward, and all of its seconds `in_turn` with the device's where it is the device."""
    repeated = [op for op in ops if op.repeats]
    gradients, sent_again = [op.seconds.input_gradients + op.seconds.weight_gradients for op in ops], len(repeated) == len(ops)
    return (
        dispatched_ops([op.seconds.forward for op in ops], [op.host for op in ops], sent, in_turn=in_turn),
        dispatched_ops(gradients, [2 * op.host for op in ops], 2 * sent, in_turn=in_turn),
        dispatched_ops([op.seconds.forward for op in repeated], [op.host for op in repeated], sent * sent_again, in_turn=in_turn),
    )


def _message_passes(messages: Sequence[BlockMessage], split: BlockSplit, wires: Wires) -> tuple[Passes, dict[str, Passes]]:
    """Return the seconds of messages that nothing overlaps, and by axis of those that do overlap."""
    waited, hidden = Passes(), dict[str, Passes]()
    for message, repeated in messages:
        _, each = collective_cost(message.verb, message.payload, wires.axes[message.axis])
        passes = Passes(message.forward * each, (message.backward - repeated) * each, repeated * each)
        if message.axis in split.overlapped and message.verb not in AXES[message.axis].never_hidden:
            hidden[message.axis] = _sum_passes([hidden.get(message.axis, Passes()), passes])
        else:
            waited = _sum_passes([waited, passes])
    return waited, hidden


def _sum_passes(rows: Sequence[Passes]) -> Passes:
    """Return the sums, pass by pass."""
    return Passes(*[sum(column) for column in zip(*rows, strict=True)])


def _exposed_seconds(sent: float, computing: float, degree: int) -> float:
    """Return what overlapped messages add to a pass."""
    return larger(larger(sent / degree, sent * OVERLAP_LOSS), sent - computing)
