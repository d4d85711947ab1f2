"""Compares the messages that a rank counted in a step with those that its plan says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..spec.run import Run
from .axes.dp import HOST
from .axes.weight_slices import WeightShard
from .costs.control_message import ControlMessage
from .costs.traffic_term import TrafficTerm
from .engines import cost_model, engine_for
from .mesh_position import MeshPosition, mesh_position
from .plan_data import Message
from .traffic import rank_traffic

CONTROL = "control"  # the axis of norms, flags, sums of losses, shapes, objects and barriers

TOGETHER = ("dp", "ep")  # axes whose messages of a verb are compared with the plan together, in bytes

Verdict = Literal["equal", "explained", "differs"]


@dataclass(frozen=True, kw_only=True, order=True)
class MessageRow:
    """Equal messages of one rank and step: the axis, the verb, bytes of one, how many."""

    axis: str
    verb: str
    payload: int
    count: int

    @property
    def bytes(self) -> int:
        """Bytes of all."""
        return self.payload * self.count


@dataclass(frozen=True, kw_only=True)
class ComparedMessages:
    """One line of the comparison. `payload` None: all messages of a verb together, as on the data axis, where engines cut them."""

    axis: str
    verb: str
    payload: int | None
    planned_count: int
    planned_bytes: int
    counted_count: int
    counted_bytes: int
    verdict: Verdict
    why: str = ""


class MessageKind(NamedTuple):
    """The messages of one line: those of an axis, a verb and one payload, or (None) of any payload."""

    axis: str
    verb: str
    payload: int | None

    def includes(self, row: MessageRow) -> bool:
        """Whether a row is of this kind."""
        return (self.axis, self.verb) == (row.axis, row.verb) and self.payload in (None, row.payload)


def message_rows(rows: Iterable[Mapping[str, Any]]) -> list[MessageRow]:
    """Return one rank's rows of RUN_DIR/ledger.json."""
    return [MessageRow(axis=row["axis"], verb=row["verb"], payload=row["payload"], count=row["count"]) for row in rows]


def compare_rank_messages(run: Run, rank: int, rows: Iterable[Mapping[str, Any]], *, averages: bool = True) -> list[ComparedMessages]:
    """Compare one rank's rows of RUN_DIR/ledger.json with the plan of a legal run. `averages`: in that step workers averaged their weights,
    if there are several."""
    position = mesh_position(run, rank)
    engine, _ = engine_for(run, run.parallel)
    costs, shards = cost_model(engine.name if engine else None), rank_shards(run, position)
    terms = costs.traffic_terms(run, position.mesh, shards, position.mesh.data_rank(position.coordinates))
    mixtures = run.model.layers_in_group * sum(layer >= run.model.dense_layers for part in position.parts for layer in part.layers)
    mixtures += run.model.mtp.layers * any(part.last for part in position.parts)
    control = costs.control_messages(run, position.mesh, shards, mixtures)
    planned = (each for each in rank_traffic(run, rank) if each.link != HOST and (averages or each.every == 1))
    return compare_with_plan(message_rows(rows), planned, (each for each in terms if averages or each.every == 1), control)


def rank_shards(run: Run, position: MeshPosition) -> list[WeightShard]:
    """Each weight that a rank holds, once: a tied one may be in two of its parts."""
    return list({shard.name: shard for part in position.parts for shard in position.weight_shards(run, part)}.values())


def compare_with_plan(
    counted: Iterable[MessageRow],
    planned: Iterable[Message],
    terms: Iterable[TrafficTerm] = (),
    control: Sequence[ControlMessage] | None = None,
) -> list[ComparedMessages]:
    """Compare one rank's counted messages with those planned for it: row by row, on the data axis verb by verb, in bytes.

    There `terms` say what the engine makes of the plan: where they sum to what was counted, to the byte, the difference is explained.
    `control` None: the engine does not plan control messages.
    """
    counted_rows, planned_rows, reasons = list(counted), [_planned_row(each) for each in planned], tuple(terms)
    every = (*planned_rows, *counted_rows)
    kinds = {MessageKind(row.axis, row.verb, None if row.axis in TOGETHER else row.payload) for row in every if row.axis != CONTROL}
    lines: list[ComparedMessages] = []
    for kind in sorted(kinds, key=lambda kind: (kind.axis == "dp", kind.axis, kind.verb, kind.payload or 0)):
        wanted, found = ([row for row in rows if kind.includes(row)] for rows in (planned_rows, counted_rows))
        lines.append(_data_line(kind, wanted, found, reasons) if kind.axis in TOGETHER else _exact_line(kind, wanted, found))
    return [*lines, *_control_lines([row for row in counted_rows if row.axis == CONTROL], control)]


def _control_lines(found: Sequence[MessageRow], planned: Sequence[ControlMessage] | None) -> Iterator[ComparedMessages]:
    """Yield the lines of norms, losses, flags and counts: each kind as often as planned, or one line for all if none is planned."""
    if planned is None:
        if found:
            says = "norms, flags, sums of losses and handshakes: small, and not planned"
            yield _line(MessageKind(CONTROL, "any", None), [], found, "explained", says)
        return
    wanted = [MessageRow(axis=CONTROL, verb=each.verb, payload=each.payload, count=each.count) for each in planned]
    for kind in sorted({MessageKind(CONTROL, row.verb, row.payload) for row in (*wanted, *found)}):
        named = [f"{each.says} {each.count}" for each in planned if (each.verb, each.payload) == (kind.verb, kind.payload)]
        line = _exact_line(kind, [row for row in wanted if kind.includes(row)], [row for row in found if kind.includes(row)])
        yield replace(line, why="; ".join(filter(None, [line.why, ", ".join(named)])))


def _planned_row(message: Message) -> MessageRow:
    """Return a planned message as a row; the group of first and last stage, which the plan counts to the pipeline, is an axis here."""
    axis = "ends" if (message.axis, message.verb) == ("pp", "all_reduce") else message.axis
    return MessageRow(axis=axis, verb=message.verb, payload=message.payload, count=message.count)


def _exact_line(kind: MessageKind, wanted: Sequence[MessageRow], found: Sequence[MessageRow]) -> ComparedMessages:
    same = sum(row.count for row in wanted) == sum(row.count for row in found)
    return _line(kind, wanted, found, "equal" if same else "differs", "" if same else _difference(wanted, found))


def _data_line(
    kind: MessageKind, wanted: Sequence[MessageRow], found: Sequence[MessageRow], terms: Iterable[TrafficTerm]
) -> ComparedMessages:
    reasons = [term for term in terms if term.verb == kind.verb]
    says = "; ".join(term.says for term in reasons)
    sent = sum(row.bytes for row in found)
    as_many = sum(row.count for row in found) == sum(row.count for row in wanted)
    if sent == sum(row.bytes for row in wanted):
        return _line(kind, wanted, found, "equal", "" if as_many else says or "the same bytes in other messages")
    least, most = (sum(each) for each in ([term.bytes for term in reasons], [term.most or term.bytes for term in reasons]))
    if reasons and least <= sent <= most:
        return _line(kind, wanted, found, "explained", says)
    if kind.axis == "ep" and wanted and as_many:
        says = "planned for the load of the busiest rank, and half of these bytes are for tokens that other ranks route here"
        return _line(kind, wanted, found, "explained", says)
    return _line(kind, wanted, found, "differs", _difference(wanted, found))


def _difference(wanted: Sequence[MessageRow], found: Sequence[MessageRow]) -> str:
    if not found:
        return "planned, and never sent"
    return "more or fewer than planned" if wanted else "sent, and not planned"


def _line(kind: MessageKind, wanted: Sequence[MessageRow], found: Sequence[MessageRow], verdict: Verdict, why: str) -> ComparedMessages:
    return ComparedMessages(
        axis=kind.axis,
        verb=kind.verb,
        payload=kind.payload,
        planned_count=sum(row.count for row in wanted),
        planned_bytes=sum(row.bytes for row in wanted),
        counted_count=sum(row.count for row in found),
        counted_bytes=sum(row.bytes for row in found),
        verdict=verdict,
        why=why,
    )
