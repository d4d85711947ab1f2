"""`distrain plan -m`: the plans of a sweep as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ...trainer.plan.plan_data import Plan
from ...trainer.spec.numbers.as_text import count_text, part_of_size, seconds_text, share_text
from ...trainer.spec.problem import one_line
from .plan_facts import engine_limit, fit_words, host_part, overflows_host, refusal_here
from .text_layout import Style, page_width, table, wrap

COLUMNS = ("verdict", "memory", "step", "tokens/s", "MFU")
WHOLE_RUN = "whole run"  # a column more, where the page has room


def sweep_text(plans: Sequence[tuple[Sequence[str], Plan]], style: Style) -> str:
    """A table with one line a layout: its overrides, verdict, memory and speed."""
    cells = [[*COLUMNS], *(plan_cells(plan) for _, plan in plans)]
    words, room = ["layout", *(layout_name(words, plan) for words, plan in plans)], page_width() - 2
    with_run = table([[*row, run] for row, run in zip(cells, [WHOLE_RUN, *(whole_run_cell(plan) for _, plan in plans)], strict=True)])
    is_known = any(plan.run and plan.run.seconds is not None for _, plan in plans)
    numbers = with_run if is_known and max(map(len, words)) + max(map(len, with_run)) <= room else table(cells)
    if max(map(len, numbers)) > room - len("layout"):  # the verdict stands with the words
        words = [f"{word}: {row[0]}" for word, row in zip(words, cells, strict=True)]
        numbers = table([row[1:] for row in cells], left=())
    wide = max(0, min(max(map(len, words)), room - max(map(len, numbers))))
    painted = ["bold", *("green" if plan.ok and plan.fits else "red" for _, plan in plans)]
    lines: list[str] = []
    for word, line, colour in zip(words, numbers, painted, strict=True):
        if len(word) > wide:
            lines += wrap(word)
            word = ""
        lines.append(style.paint(f"{word.ljust(wide)}  {line}" if wide else f"  {line}", colour))
    best = fastest_layout([plan for _, plan in plans])
    fastest = [] if best is None or len(plans) == 1 else [f"fastest that fits: {layout_name(*plans[best])}{unrun_words(plans[best][1])}"]
    notes = [*fastest, *_problem_notes(plans), *sweep_notes([plan for _, plan in plans])]
    return "\n".join([*lines, *(line for each in notes for line in wrap(each))])


def fastest_layout(plans: Sequence[Plan]) -> int | None:
    """The number of the plan that fits and has the most tokens a second, since layouts may differ in their batch, of those that an engine
    here runs, if there are any; None: no plan fits."""
    speeds = {
        at: (plan.runnable, plan.throughput.tokens_per_second) for at, plan in enumerate(plans) if plan.ok and plan.fits and plan.throughput
    }
    return max(speeds, key=lambda at: speeds[at], default=None)


def unrun_words(plan: Plan) -> str:
    """What follows the name of a layout that no engine here runs."""
    return "" if plan.runnable or refusal_here(plan) else ", which no engine here runs"


def _problem_notes(plans: Sequence[tuple[Sequence[str], Plan]]) -> list[str]:
    """Why layouts can't be run, by the rule that their verdict names: the first one's problem, and how many others have one."""
    broken: dict[str, list[tuple[Sequence[str], Plan]]] = {}
    for words, plan in plans:
        if plan.problems and (plan.memory is None or plan.fits):
            broken.setdefault(plan.problems[0].rule, []).append((words, plan))
    return [
        f"can't: {rule}: {layout_name(*first)}: {first[1].problems[0]}{f'; {len(others):,} more' if others else ''}"
        for rule, (first, *others) in broken.items()
    ]


def sweep_notes(plans: Sequence[Plan]) -> list[str]:
    """How clusters were read, and why this machine would refuse layouts that fit."""
    readings = dict.fromkeys(plan.reading for plan in plans if plan.reading)
    refused = dict.fromkeys(f"refused: {why}" for plan in plans if plan.ok and plan.fits and (why := refusal_here(plan)))
    return [*readings, *refused]


def plan_cells(plan: Plan) -> list[str]:
    """The cells of a layout in COLUMNS."""
    memory, time, speed = plan.memory, plan.time, plan.throughput
    return [
        _verdict_cell(plan),
        (host_part(plan) if overflows_host(plan) else part_of_size(memory.peak, memory.capacity)) if memory else "-",
        seconds_text(time.step) if time else "-",
        count_text(speed.tokens_per_second) if speed else "-",
        share_text(speed.mfu) if speed else "-",
    ]


def whole_run_cell(plan: Plan) -> str:
    """How long all steps of a layout take."""
    return seconds_text(plan.run.seconds) if plan.run and plan.run.seconds is not None else "-"


def _verdict_cell(plan: Plan) -> str:
    if plan.memory is not None and not plan.fits:
        return f"{fit_words(plan)} on its hosts" if overflows_host(plan) else fit_words(plan)
    if plan.ok and plan.fits:
        fits = fit_words(plan)
        if plan.runnable:
            return fits
        if refusal_here(plan):
            return f"{fits}, refused"
        return f"{fits}, not run: {engine_limit(plan).replace('parallel.', '').replace('train.', '')}"
    return f"can't: {plan.problems[0].rule}" if plan.problems else "can't"


def layout_name(words: Sequence[str], plan: Plan) -> str:
    """The overrides of a layout, each by the last part of its key: `tp=8 pp=4`; the name of the run where there are none."""
    return " ".join(word.partition("=")[0].rpartition(".")[2] + "=" + word.partition("=")[2] for word in words) or one_line(plan.name)
