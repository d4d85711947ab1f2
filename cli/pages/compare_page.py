"""Several runs side by side as a page of text: what differs between them, their losses and speeds, one chart of all curves."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from ...trainer.rundir.measured import Beside, Ran, ran
from ...trainer.spec.read import shown
from .format import Look, one_line, table, width, wrapped
from .report_page import EDGE, TALL, Points, evenly, figure, headline, level

MARKS = string.ascii_uppercase + string.ascii_lowercase  # one a run, in the order given
SEVERAL = "*"  # where curves share a cell
OWN = ("name", "reading", "log.dir", "model.parameters")  # keys that differ without a difference between runs, and one too long
STEPS = 8  # common steps that a table of losses shows


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of several runs: its mark, its folder as it was given, its config by dotted keys, its figures."""

    mark: str
    said: str
    config: Mapping[str, Any]
    ran: Ran


def compared_runs(said: Sequence[Path], folders: Sequence[Path]) -> list[ComparedRun]:
    """Runs with their marks; `said` are the folders as they were given."""
    rows = zip(MARKS, said, folders, strict=False)
    return [ComparedRun(mark=mark, said=one_line(str(word)), config=config_of(folder), ran=ran(folder)) for mark, word, folder in rows]


def config_of(folder: Path) -> dict[str, Any]:
    """RUN_DIR/run.json by dotted keys; empty where it can't be read."""
    with suppress(OSError, ValueError, RecursionError):
        read = json.loads((folder / "run.json").read_bytes())
        return dict(_flat(read)) if isinstance(read, dict) else {}
    return {}


def page_of_runs(runs: Sequence[ComparedRun], look: Look) -> str:
    """The whole page."""
    drawn = chart({run.mark: run.ran.losses for run in runs}, look)
    sections = {
        "": _legend(runs),
        "What differs": _differences(runs),
        "Loss, nats a token": _losses(runs, [run.ran.losses for run in runs]),
        "Validation loss": _losses(runs, [run.ran.validation for run in runs]) if any(run.ran.validation for run in runs) else [],
        "Measured, and (planned)": _side_by_side(runs, _figures(runs)),
        f"Loss over steps{f'; {SEVERAL}: several' if any(SEVERAL in line for line in drawn) else ''}": drawn,
    }
    shown_ = [[*([look.paint(title, "bold")] if title else []), *lines] for title, lines in sections.items() if lines]
    return "\n\n".join("\n".join(lines) for lines in shown_)


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The keys whose values differ, each with its value in every run; "-" where a run does not say it."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in OWN)
    rows = {key: [one_line(shown(run.config[key])) if key in run.config else "-" for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def common_steps(curves: Sequence[Points]) -> list[int]:
    """The steps that every curve has which has any, in order."""
    steps = [{step for step, _ in curve} for curve in curves if curve]
    return sorted(set.intersection(*steps)) if steps else []


def chart(curves: Mapping[str, Points], look: Look) -> list[str]:
    """Curves over one scale, each drawn with its mark, straight between its points."""
    points = {mark: [(step, loss) for step, loss in curve if isfinite(loss)] for mark, curve in curves.items()}
    every = [point for curve in points.values() for point in curve]
    first, last = min((step for step, _ in every), default=0), max((step for step, _ in every), default=0)
    if first == last:
        return []
    low, high = min(loss for _, loss in every), max(loss for _, loss in every)
    wide = width() - EDGE - 2
    cells: dict[tuple[int, int], str] = {}
    for mark, curve in points.items():
        for x, loss in _columns(curve, first, last, wide):
            at = (x, round((high - loss) / ((high - low) or 1.0) * (TALL - 1)))
            cells[at] = mark if cells.get(at, mark) == mark else SEVERAL
    scale = {0: level(high), TALL - 1: level(low)}
    bar = "│" if look.blocks else "|"
    rows = ["".join(cells.get((x, y), " ") for x in range(wide)).rstrip() for y in range(TALL)]
    drawn = [f"{scale.get(y, ''):>{EDGE}} {bar}{row}" for y, row in enumerate(rows)]
    return [*drawn, f"{'step':>{EDGE}}  {first:<{wide // 2}}{last:>{wide - wide // 2}}"]


def _columns(curve: Points, first: int, last: int, wide: int) -> Iterator[tuple[int, float]]:
    """The loss of a curve in each column between its first and last point."""

    def column(step: int) -> int:
        return round((step - first) / (last - first) * (wide - 1))

    if len(curve) == 1:
        yield column(curve[0][0]), curve[0][1]
    for (one, above), (two, below) in pairwise(sorted(curve)):
        start, end = column(one), column(two)
        for x in range(start, end + 1):
            share = (x - start) / (end - start) if end > start else 1.0
            yield x, above + share * (below - above)


def _legend(runs: Sequence[ComparedRun]) -> list[str]:
    rows = ((run, headline(run.ran).removeprefix(f"{run.ran.name}: ")) for run in runs)
    return [line for run, says in rows for line in wrapped(f"{run.mark}  {run.said}: {says}", hang="   ")]


def _differences(runs: Sequence[ComparedRun]) -> list[str]:
    return _side_by_side(runs, differences(runs)) or ["  nothing: their configs are the same"]


def _losses(runs: Sequence[ComparedRun], curves: Sequence[Points]) -> list[str]:
    """Losses at the steps that all runs with losses have; of two such runs their difference too."""
    steps = [step for step, _ in evenly([(step, 0.0) for step in common_steps(curves)], STEPS)]
    if not steps:
        return ["  there is no step that all of them logged"]
    found = [dict(curve) for curve in curves]
    rows = {f"step {step:,}": [f"{curve[step]:.4f}" if curve else "-" for curve in found] for step in steps}
    if len(runs) > 2 or not all(found):
        return _side_by_side(runs, rows)
    more = [f"{found[1][step] - found[0][step]:+.4f}" for step in steps]
    cells = [["", *(run.mark for run in runs), f"{runs[1].mark} - {runs[0].mark}"]]
    cells += [[name, *values, last] for (name, values), last in zip(rows.items(), more, strict=True)]
    return [f"  {line}" for line in table(cells)]


def _figures(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Memory, time and throughput of every run, as measured and, in brackets, as planned."""
    rows: dict[str, list[str]] = {"memory": [_beside(_total(run.ran)) for run in runs]}
    for name in ("step", "tokens/s", "MFU"):
        found = [next((each for each in (*run.ran.time, *run.ran.speed) if each.name == name), None) for run in runs]
        rows[name] = [_beside(each) if each else "-" for each in found]
    return rows


def _total(run: Ran) -> Beside:
    """The bytes of all kinds of tensors; None where one of them is not known."""
    planned, measured = [each.planned for each in run.memory], [each.measured for each in run.memory]
    return Beside(name="memory", unit="bytes", planned=_sum(planned), measured=_sum(measured))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def _beside(each: Beside) -> str:
    return f"{figure(each, each.measured)} ({figure(each, each.planned)})"


def _side_by_side(runs: Sequence[ComparedRun], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """A row a name and a column a run; where a page is too narrow for that, a line a value."""
    if not rows:
        return []
    lines = table([["", *(run.mark for run in runs)], *([name, *values] for name, values in rows.items())])
    if max(map(len, lines)) + 2 <= width():
        return [f"  {line}" for line in lines]
    found = []
    for name, values in rows.items():
        found.append(f"  {name}")
        for run, value in zip(runs, values, strict=True):
            found += wrapped(f"{run.mark}  {value}", indent="    ", hang="       ")
    return found


def _flat(words: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in words.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value
