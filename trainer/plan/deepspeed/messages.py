"""Holds the messages that a rank was counted to send against those that its plan says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from ...spec.run import Run
from ..mesh_position import Seat
from ..precision import widths
from ..result import Message
from ..weight_slices import Placed
from .flat_tensors import ALIGNED
from .memory import MASTER, stage_of

CONTROL = "control"  # the axis of norms, flags, sums of losses, shapes, objects and barriers
PERSISTENT = 100_000  # elements of a parameter that stage 3 never lets go of (stage3_param_persistence_threshold)
REUSED = 1_000_000_000  # elements further than which stage 3 does not keep a parameter for its next use (stage3_max_reuse_distance)

TOGETHER = ("dp", "ep")  # axes of which a verb's messages are held to the plan together, in bytes

Verdict = Literal["equal", "explained", "differs"]


@dataclass(frozen=True, kw_only=True, order=True)
class Row:
    """Messages of one rank and step that are alike: the axis, the verb, bytes of one, how many."""

    axis: str
    verb: str
    payload: int
    count: int

    @property
    def bytes(self) -> int:
        return self.payload * self.count


@dataclass(frozen=True, kw_only=True)
class Term:
    """What DeepSpeed sends on the data axis in a step with one verb for one reason: bytes, and the reason in words."""

    verb: str
    bytes: int
    says: str


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One line of the audit. `payload` None: all messages of a verb together, as on the data axis, where DeepSpeed cuts them."""

    axis: str
    verb: str
    payload: int | None
    planned_count: int
    planned_bytes: int
    counted_count: int
    counted_bytes: int
    verdict: Verdict
    why: str = ""


class Alike(NamedTuple):
    """The messages of one line: of an axis and a verb those of one payload, or all."""

    axis: str
    verb: str
    payload: int | None

    def holds(self, row: Row) -> bool:
        return (self.axis, self.verb) == (row.axis, row.verb) and self.payload in (None, row.payload)


def read(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One rank's rows of RUN_DIR/ledger.json."""
    return [Row(axis=row["axis"], verb=row["verb"], payload=row["payload"], count=row["count"]) for row in rows]


def compared(counted: Iterable[Row], planned: Iterable[Message], terms: Iterable[Term] = ()) -> list[Compared]:
    """Counted messages of one rank against those planned for it: row by row, but the data axis verb by verb, in bytes.

    There `terms` say what DeepSpeed makes of the plan: where their sum is what was counted, to the byte, it is explained.
    """
    found, wanted, reasons = list(counted), [_row(each) for each in planned], tuple(terms)
    lines = {Alike(row.axis, row.verb, None if row.axis in TOGETHER else row.payload) for row in (*wanted, *found) if row.axis != CONTROL}
    audit: list[Compared] = []
    for line in sorted(lines, key=lambda line: (line.axis == "dp", line.axis, line.verb, line.payload or 0)):
        mine, theirs = ([row for row in rows if line.holds(row)] for rows in (wanted, found))
        audit.append(_data(line, mine, theirs, reasons) if line.axis in TOGETHER else _exact(line, mine, theirs))
    if control := [row for row in found if row.axis == CONTROL]:
        says = "norms, flags, sums of losses and handshakes: small, and not planned"
        audit.append(_line(Alike(CONTROL, "any", None), [], control, "explained", says))
    return audit


def data_terms(run: Run, seat: Seat) -> Iterator[Term]:
    """What DeepSpeed 0.19.8 sends on the data axis for this rank's parameters, read in its source and counted to the byte."""
    train, ranks = run.train, seat.mesh.size("data")
    if ranks == 1:
        return
    width = widths(train)
    stage = stage_of(run.parallel.zero, half=width.weight < MASTER, ep=seat.mesh.ep)
    micros = train.batch // (seat.mesh.dp * train.microbatch)
    held = list({placed.name: placed for part in seat.parts for placed in seat.holds(run, part)}.values())
    if stage == 3:
        yield from _gathered([prod(each.size) for each in held], ranks, micros, width.weight)
        return
    rows = [(sum(prod(each.size) for each in group), copies) for group, copies in _groups(held, ranks, seat.mesh.ep) if copies > 1]
    flat = [elements for elements, _ in rows]
    padded = [_aligned(elements, ALIGNED * copies) for elements, copies in rows]
    # bf16 whose gradients add up in float32 has an optimizer of its own at stage 1, which reduces its flat tensors, padding and all.
    whole = sum(padded if stage == 1 and width.gradient > width.weight else flat)
    rounds = micros if stage == 2 else 1
    often = f", at each of {micros} micro-batches" if rounds > 1 else ""
    cut = "one message" if stage == 0 else "cut between parameters into buckets"
    yield Term(verb="all_reduce", bytes=rounds * whole * width.weight, says=f"gradients as wide as weights{often}, {cut}")
    if stage:
        added = (sum(padded) - sum(flat)) * width.weight
        says = (
            f"weights in one message for matrices and one for vectors, padded by {added} bytes to a multiple of {ALIGNED * ranks} elements"
        )
        yield Term(verb="all_gather", bytes=sum(padded) * width.weight, says=says)


def _groups(held: Sequence[Placed], ranks: int, ep: int) -> Iterator[tuple[list[Placed], int]]:
    """(weights that lie in one flat tensor, how many ranks of the data axis hold them): matrices, vectors, experts on several ranks."""
    for matrix, expert in ((True, False), (False, False), (True, True)):
        yield [each for each in held if (len(each.size) > 1, each.expert) == (matrix, expert)], ranks // ep if expert else ranks


def _gathered(sizes: Sequence[int], ranks: int, micros: int, width: int) -> Iterator[Term]:
    """Stage 3: each parameter is padded to a multiple of the ranks. What forward gathers is still there in backward, as far as it
    is used again within `REUSED` elements; beyond that what is gathered twice is known only roughly, and not told here."""
    every, kept = (sum(_aligned(size, ranks) * width for size in sizes if size <= most) for most in (max(sizes), PERSISTENT))
    if kept:
        says = f"parameters of at most {PERSISTENT} elements gathered once, after the optimizer's step"
        yield Term(verb="all_gather", bytes=kept, says=says)
    if every > kept and 2 * sum(sizes) <= REUSED:
        says = f"the others at each of {micros} micro-batches, once for forward and backward"
        yield Term(verb="all_gather", bytes=micros * (every - kept), says=says)
    says = f"gradients at each of {micros} micro-batches, each padded to a multiple of {ranks} elements, cut into buckets"
    yield Term(verb="reduce_scatter", bytes=micros * every, says=says)


def _aligned(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def _row(message: Message) -> Row:
    """A planned message; first and last stage, which the plan counts to the pipeline, have a group of their own."""
    axis = "ends" if (message.axis, message.verb) == ("pp", "all_reduce") else message.axis
    return Row(axis=axis, verb=message.verb, payload=message.payload, count=message.count)


def _exact(line: Alike, wanted: Sequence[Row], found: Sequence[Row]) -> Compared:
    same = sum(row.count for row in wanted) == sum(row.count for row in found)
    return _line(line, wanted, found, "equal" if same else "differs", "" if same else _apart(wanted, found))


def _data(line: Alike, wanted: Sequence[Row], found: Sequence[Row], terms: Iterable[Term]) -> Compared:
    mine = [term for term in terms if term.verb == line.verb]
    says = "; ".join(term.says for term in mine)
    sent = sum(row.bytes for row in found)
    if sent == sum(row.bytes for row in wanted):
        as_many = sum(row.count for row in found) == sum(row.count for row in wanted)
        return _line(line, wanted, found, "equal", "" if as_many else says or "the same bytes in other messages")
    if mine and sent == sum(term.bytes for term in mine):
        return _line(line, wanted, found, "explained", says)
    if line.axis == "ep" and wanted and sum(row.count for row in found) == sum(row.count for row in wanted):
        return _line(line, wanted, found, "explained", "planned for even routing: half of these bytes are what others' tokens want here")
    return _line(line, wanted, found, "differs", _apart(wanted, found))


def _apart(wanted: Sequence[Row], found: Sequence[Row]) -> str:
    if not found:
        return "planned, and never sent"
    return "more or fewer than planned" if wanted else "sent, and not planned"


def _line(line: Alike, wanted: Sequence[Row], found: Sequence[Row], verdict: Verdict, why: str) -> Compared:
    return Compared(
        axis=line.axis,
        verb=line.verb,
        payload=line.payload,
        planned_count=sum(row.count for row in wanted),
        planned_bytes=sum(row.bytes for row in wanted),
        counted_count=sum(row.count for row in found),
        counted_bytes=sum(row.bytes for row in found),
        verdict=verdict,
        why=why,
    )
