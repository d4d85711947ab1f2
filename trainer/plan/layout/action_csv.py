"""Lists of actions as text: the compute-only CSV of torch.distributed.pipelining, one row a stage, a cell like 3F1 an action."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, cast

from ...spec.numbers.as_text import plural
from .schedules import Action, Kind, part_of, stage_and_chunk
from .simulate import ActionsError, simulate

CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")  # part of the model, kind, micro-batch
MESSAGE = re.compile(r"[0-9]+(SEND|RECV|UNSHARD|RESHARD|REDUCE)", re.IGNORECASE)
EXAMPLE = "write the part of the model, F, B, I or W, and the micro-batch, as in 3F1"


@dataclass(frozen=True, kw_only=True)
class ActionLists:
    """The actions of every stage, and how the parts of the model lie on the stages."""

    actions: tuple[tuple[Action, ...], ...]
    folded: bool  # stage r of p runs the parts r and 2p - 1 - r, not r, p + r, 2p + r ...
    chunks: int  # parts of the model that a stage runs
    micros: int


class _Cell(NamedTuple):
    place: str  # for messages
    part: int
    kind: Kind
    micro: int


def read_action_csv(text: str, stages: int) -> ActionLists:
    """The actions that a CSV gives each stage. Raises ValueError, of one line, for a text that is no legal schedule of `stages`."""
    rows = [_cells(number, line) for number, line in enumerate(_lines(text, stages), 1)]
    parts = _parts(rows)
    folded = _is_folded(parts)
    actions = tuple(
        tuple(Action(cell.kind, cell.micro, stage_and_chunk(cell.part, stages, folded=folded)[1]) for cell in row) for row in rows
    )
    try:
        simulate(actions, folded=folded, seconds=lambda kind, part: 1.0)
    except ActionsError as error:
        place = f"row {error.stage + 1}" if error.at is None else rows[error.stage][error.at].place
        raise ValueError(f"{place}: {error}") from None
    return ActionLists(actions=actions, folded=folded, chunks=len(parts[0]), micros=1 + max(cell.micro for cell in rows[0]))


def write_action_csv(lists: Sequence[Sequence[Action]], *, folded: bool) -> str:
    """The CSV of each stage's actions; `folded` says how the parts of the model lie on the stages."""
    rows = (
        ",".join(f"{part_of(stage, chunk, len(lists), folded=folded)}{kind}{micro}" for kind, micro, chunk in actions)
        for stage, actions in enumerate(lists)
    )
    return "".join(f"{row}\n" for row in rows)


def _lines(text: str, stages: int) -> list[str]:
    """One line a stage; blank lines at the end are no rows."""
    lines = text.removeprefix("\ufeff").rstrip().splitlines()
    if len(lines) != stages or not lines:
        says = f"the file has {plural(len(lines), 'row')} and the pipeline {plural(stages, 'stage')}"
        raise ValueError(f"{says}: write one row for each stage, the first stage first")
    return lines


def _cells(row: int, line: str) -> list[_Cell]:
    """The actions of a row; a blank cell is a wait, which the stages find out themselves."""
    cells = [
        _cell(f"row {row}, cell {column}", text)
        for column, each in enumerate(line.split(","), 1)
        if (text := each.strip().strip('"').strip())
    ]
    if not cells:
        raise ValueError(f"row {row}: it has no actions: {EXAMPLE}")
    return cells


def _cell(place: str, text: str) -> _Cell:
    found = CELL.fullmatch(text)
    if not found:
        shown = text if len(text) <= 20 else f"{text[:20]}..."
        raise ValueError(f"{place}: {shown} is not an action: {_mend(text)}")
    return _Cell(place, int(found[1]), cast(Kind, found[2]), int(found[3]))


def _mend(text: str) -> str:
    """What to write in place of a cell that is not an action."""
    if CELL.fullmatch(text.upper()):
        return f"write {text.upper()}"
    if MESSAGE.match(text):
        return "leave messages and sharding out, for the trainer adds its own"
    if text.startswith("("):
        return "write the actions that it overlaps as cells of their own, one behind the other"
    if all(map(CELL.fullmatch, re.split(r"[;\t ]+", text))):
        return "separate cells by commas"
    return EXAMPLE


def _parts(rows: Sequence[Sequence[_Cell]]) -> list[list[int]]:
    """The parts of the model on each row in order: all of them on one row each, and as many on each row."""
    rows_of: dict[int, int] = {}
    for row, cells in enumerate(rows):
        for cell in cells:
            if rows_of.setdefault(cell.part, row) != row:
                says = f"part {cell.part} of the model is on row {rows_of[cell.part] + 1} already"
                raise ValueError(f"{cell.place}: {says}: keep all actions of a part on one row")
    missing = next(part for part in count() if part not in rows_of)
    if beyond := [cell for cells in rows for cell in cells if cell.part > missing]:
        says = f"it runs part {beyond[0].part} of the model, and no row runs part {missing}"
        raise ValueError(f"{beyond[0].place}: {says}: number the parts from 0 without gaps")
    parts = [sorted({cell.part for cell in cells}) for cells in rows]
    for row, held in enumerate(parts):
        if len(held) != len(parts[0]):
            says = f"it runs {_list_parts(held)} of the model and row 1 {_list_parts(parts[0])}"
            raise ValueError(f"row {row + 1}: {says}: give each row as many parts")
    return parts


def _is_folded(parts: Sequence[Sequence[int]]) -> bool:
    """Whether the parts go out and back over the rows; else they go round and round."""
    stages, chunks = len(parts), len(parts[0])

    def parts_of_row(stage: int, *, folded: bool) -> list[int]:
        return sorted(part_of(stage, chunk, stages, folded=folded) for chunk in range(chunks))

    is_folded = chunks == 2 and stages > 1 and parts[0] == parts_of_row(0, folded=True)
    for row, held in enumerate(parts):
        if held != parts_of_row(row, folded=is_folded):
            right = _list_parts(parts_of_row(row, folded=is_folded))
            if chunks == 2 and row == 0:
                right += f", or {_list_parts(parts_of_row(0, folded=True))} where the parts go out and back"
            raise ValueError(f"row {row + 1}: it runs {_list_parts(held)} of the model: give it {right}")
    return is_folded


def _list_parts(parts: Sequence[int]) -> str:
    """Some numbers of parts, the last of many left out."""
    shown = ", ".join(map(str, parts[:4])) + (" ..." if len(parts) > 4 else "")
    return f"part {shown}" if len(parts) == 1 else f"the parts {shown}"
