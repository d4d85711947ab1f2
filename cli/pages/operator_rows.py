"""Where the time of a step goes by kind of operator, as rows of a table: `distrain plan --operators` and the HTML page show them."""

from __future__ import annotations

from ...trainer.plan.costs.operator_kinds import OPERATOR_KINDS
from ...trainer.plan.plan_data import OperatorSeconds, Plan
from ...trainer.spec.numbers.as_text import seconds_text, share_text
from .plan_facts import TIME_PARTS

AGAIN = "again"  # the column of what is recomputed, which a plan has only where something is


def operator_rows(plan: Plan) -> list[list[str]]:
    """The table's headings and rows: each kind of operator, their sum, and the other parts of the step; [] where no times are known."""
    if plan.time is None:
        return []
    whole, again = plan.time.step, any(each.recomputed for each in plan.operators)
    rows = [_row(OPERATOR_KINDS[each.kind], each, again=again) for each in plan.operators]
    total = [sum(getattr(each, part) for each in plan.operators) for part in ("forward", "backward", "recomputed")]
    rows.append(_figures("computing", total, plan.time.compute, whole, again=again))
    others = [(name, getattr(plan.time, part)) for part, name in TIME_PARTS.items() if part != "compute"]
    rows += [_figures(name, [], seconds, whole, again=again) for name, seconds in others if seconds]
    return [["operator", "forward", "backward", *([AGAIN] if again else []), "a step", "share", "of peak", "tiles"], *rows]


def operator_notes(plan: Plan) -> str:
    """What the columns mean."""
    again = f"{AGAIN}: computed again in backward; " if any(each.recomputed for each in plan.operators) else ""
    return (
        f"{again}share: of the step; of peak: FLOP/s of a row's products over the device's peak; "
        "tiles: the share of a row that its products lose in tiles and waves that are not full"
    )


def _row(name: str, each: OperatorSeconds, *, again: bool) -> list[str]:
    figures = _figures(name, [each.forward, each.backward, each.recomputed], each.seconds, each.seconds / each.share, again=again)
    if each.peak is not None:
        figures[-2:] = [share_text(each.peak), share_text(each.unfilled / each.seconds)]
    return figures


def _figures(name: str, passes: list[float], seconds: float, whole: float, *, again: bool) -> list[str]:
    shown = [seconds_text(each) if each else "" for each in passes] or ["", "", ""]
    return [name, *shown[: 2 + again], seconds_text(seconds), share_text(seconds / whole), "", ""]
