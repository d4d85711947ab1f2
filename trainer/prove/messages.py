"""The messages that a layout's ranks counted in a step, held against those that its plan says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ...cli.pages.format import size
from ..plan.deepspeed.messages import CONTROL, Compared, compared, data_terms, read
from ..plan.mesh_position import seat
from ..plan.traffic import rank_traffic
from .trials import Trial

VERDICTS = ("equal", "explained", "differs")  # the last of them that a line has is the layout's
SHOWN = 3  # lines that differ, told in words


def messages(trial: Trial) -> dict[str, Any] | None:
    """{"verdict", "says", "ranks": the lines of every rank}; None where nothing was counted."""
    ledger = _counted(trial)
    if ledger is None:
        return None
    ranks = [_audited(trial, rank, rows) for rank, rows in enumerate(ledger)]
    found = {line.verdict for lines in ranks for line in lines if line.axis != CONTROL}
    return {
        "verdict": next((each for each in reversed(VERDICTS) if each in found), VERDICTS[0]),
        "says": _said(list(_differences(ranks))),
        "ranks": [[asdict(line) for line in lines] for lines in ranks],
    }


def _counted(trial: Trial) -> Sequence[Sequence[Mapping[str, Any]]] | None:
    with suppress(OSError, ValueError, KeyError):
        ranks: list[list[dict[str, Any]]] = json.loads((trial.folder / "ledger.json").read_text())["ranks"]
        return ranks
    return None


def _audited(trial: Trial, rank: int, rows: Sequence[Mapping[str, Any]]) -> list[Compared]:
    return compared(read(rows), rank_traffic(trial.run, rank), data_terms(trial.run, seat(trial.run, rank)))


def _differences(ranks: Sequence[Sequence[Compared]]) -> Iterator[str]:
    """Each line that differs, of the first rank where it does: `tp all_reduce 24 for 26 of 16.0 KiB`."""
    told: set[tuple[str, str, int | None]] = set()
    for lines in ranks:
        for line in lines:
            key = (line.axis, line.verb, line.payload)
            if line.verdict == "differs" and key not in told:
                told.add(key)
                yield f"{line.axis} {line.verb} {_figures(line)}"


def _said(differences: Sequence[str]) -> str:
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"messages counted for planned: {', '.join(differences[:SHOWN])}{more}" if differences else ""


def _figures(line: Compared) -> str:
    if line.payload is not None:
        return f"{line.counted_count} for {line.planned_count} of {size(line.payload)}"
    return f"{size(line.counted_bytes)} for {size(line.planned_bytes)}"
