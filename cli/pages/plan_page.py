"""`distrain plan`: a plan as a page of text: its verdict, problems, mesh, memory, traffic, time, and the whole run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...trainer.plan.plan_data import Memory, Plan
from ...trainer.spec.numbers.as_text import plural, seconds_text, share_text
from ...trainer.spec.problem import Problem
from . import plan_facts as facts
from . import whole_run_facts as whole_run
from .document_facts import documents_text
from .memory_facts import capacity_share_text, capacity_shares, memory_kinds, memory_rows, memory_title, shown_ranges
from .operator_rows import operator_notes, operator_rows
from .text_layout import Style, narrow_table, page_width, table, with_heading, wrap

HEADINGS = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "temporary": "temp", "overhead": "other"}
MIN_BAR = 4  # columns of a bar
MIN_KINDS = 3  # kinds of memory that have a column of their own on any page


def plan_text(plan: Plan, style: Style, *, operators: bool = False) -> str:
    """The page of a plan; with `operators` the seconds of each kind of operator too."""
    sections = (
        [style.paint(line, "green" if plan.ok and plan.fits else "red") for line in wrap(facts.verdict(plan), hang="  ")],
        [*_problem_lines(plan.problems, "problem", "red", style), *_problem_lines(plan.warnings, "warning", "yellow", style)],
        with_heading(_mesh_lines(plan), style),
        with_heading(_memory_lines(plan, style), style),
        with_heading(_traffic_lines(plan), style),
        with_heading(_time_lines(plan, style), style),
        with_heading(_operator_lines(plan), style) if operators else [],
        with_heading(_run_lines(plan), style),
        wrap(text) if (text := facts.bars_text(plan)) else [],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _problem_lines(problems: Sequence[Problem], noun: str, colour: str, style: Style) -> Iterator[str]:
    for each in problems:
        first, *rest = wrap(f"{noun}: {each}", indent="")
        yield first.replace(noun, style.paint(noun, colour), 1)
        yield from rest


def _mesh_lines(plan: Plan) -> list[str]:
    """The mesh, outermost axis first, the nodes of each axis's groups, and the schedule."""
    return [
        *wrap(f"Mesh: {facts.mesh_text(plan)}"),
        *(wrap(plan.reading, indent="  ") if plan.reading else ()),
        *(line for axis, lie in plan.groups.items() for line in wrap(f"{axis.ljust(4)}{lie}", indent="  ")),
        *(wrap(facts.schedule_text(plan), indent="  ") if plan.memory else ()),
    ]


def _memory_lines(plan: Plan, style: Style) -> list[str]:
    """Bytes of one rank by kind, a line for each range of similar stages, with bars of the capacity."""
    memory = plan.memory
    if memory is None:
        return []
    kinds = memory_kinds(memory)
    cells = memory_rows(memory, kinds, HEADINGS)
    while len(kinds) > MIN_KINDS and len(table(cells, (0, 1), " ")[0]) + len("  100 %") + 2 > page_width():
        kinds.remove(min(kinds, key=lambda kind: max(getattr(stage.bytes, kind) for stage in memory.stages)))
        cells = memory_rows(memory, kinds, HEADINGS)
    heading, *lines = _with_bars(cells, capacity_shares(memory), style)
    host = facts.host_text(plan)
    return [*wrap(memory_title(memory)), f"  {heading}", *_shown_lines(lines, memory), *(wrap(host, indent="  ") if host else [])]


def _with_bars(cells: Sequence[Sequence[str]], shares: Sequence[float], style: Style) -> list[str]:
    """A table's heading line, and its rows with a percentage and, where there is room for one, a bar."""
    percents = [capacity_share_text(each) for each in shares]
    longest, columns = max(4, *map(len, percents)), page_width()
    for gap in ("  ", " "):
        heading, *lines = table(cells, (0, 1), gap)
        bar_width = min(24, columns - max(map(len, (heading, *lines))) - longest - 5)
        if bar_width >= MIN_BAR:
            break
    bars = [f"{style.bar(each, bar_width)} " if bar_width >= MIN_BAR else "" for each in shares]
    return [heading, *(f"  {line}  {bar}{each.rjust(longest)}" for line, bar, each in zip(lines, bars, percents, strict=True))]


def _shown_lines(lines: Sequence[str], memory: Memory) -> list[str]:
    """The lines of the ranges of stages that are shown, with the number of those left out between them."""
    shown: list[str] = []
    for before, at in pairwise([-1, *shown_ranges(memory)]):
        shown += [f"  ... {plural(at - before - 1, 'line')} like these"] if at - before > 1 else []
        shown.append(lines[at])
    return shown


def _traffic_lines(plan: Plan) -> list[str]:
    """The messages that one rank sends in a step, by axis and link, largest first."""
    if not plan.traffic:
        return []
    rows = [facts.MESSAGE_COLUMNS, *facts.message_rows(plan)]
    rest = facts.rest_of_messages(plan)
    return [
        *wrap(facts.traffic_title(plan)),
        *(f"  {line}" for line in narrow_table(rows, (0, 1, 2), width=page_width() - 2)),
        *([f"  {rest}"] if rest else []),
        *(wrap(rare, indent="  ") if (rare := facts.rare_messages(plan)) else []),
    ]


def _time_lines(plan: Plan, style: Style) -> list[str]:
    if plan.memory is None:
        return []
    if plan.time is None or plan.throughput is None:
        missing = facts.missing_rates(plan)
        return ["Time, throughput and days are not known", *(wrap(missing, indent="  ") if missing else [])]
    parts = facts.time_parts(plan)
    lines = table([[label, seconds_text(seconds), share_text(share)] for label, seconds, share in parts])
    bars = [style.bar(share, min(30, page_width() - len(lines[0]) - 4)) for _, _, share in parts]
    documents, waits = documents_text(plan), facts.host_wait_text(plan)
    arithmetic, tokens = facts.speed_texts(plan)
    return [
        f"Time of a step: {facts.step_figure(plan)}",
        *(f"  {line}  {bar}" for line, bar in zip(lines, bars, strict=True)),
        *(wrap(waits, indent="  ") if waits else []),
        *wrap(arithmetic, indent="  "),
        f"  {tokens}",
        *(wrap(documents, indent="  ") if documents else []),
    ]


def _operator_lines(plan: Plan) -> list[str]:
    """The seconds of a step by kind of operator, and what its table's columns mean."""
    rows = operator_rows(plan)
    if not rows:
        return []
    lines = narrow_table(rows, width=page_width() - 2)
    return [
        "Operators of a step, on a rank of the busiest stage",
        *(f"  {line}" for line in lines),
        *wrap(operator_notes(plan), indent="  "),
    ]


def _run_lines(plan: Plan) -> list[str]:
    model, run = facts.model_figures(plan), whole_run.run_figures(plan)
    if not model:
        return []
    *counts, (of_token, flops) = model.items()
    lines = wrap(f"Model: {', '.join(f'{figure} {name}' for name, figure in counts)}; {flops} {of_token}")
    if not run or plan.run is None:
        return lines
    ideal = f" ({peak} at every device's peak)" if (peak := run.get("at every device's peak")) else ""
    cost = f", {price} at cluster.price" if (price := run.get("at cluster.price")) else ""
    work = f"{plural(plan.run.steps, 'step')}, {run['tokens']} tokens, {run['FLOP of the model']} FLOP of the model"
    saving, rampup = whole_run.saving_text(plan), whole_run.rampup_text(plan)
    stages, preferences = whole_run.stages_text(plan), whole_run.preference_text(plan)
    return [
        *lines,
        *wrap(f"{work}: {run.get('of training', 'time not known')}{ideal}{cost}", indent="  "),
        *(wrap(rampup, indent="  ") if rampup else []),
        *(wrap(stages, indent="  ") if stages else []),
        *(wrap(preferences, indent="  ") if preferences else []),
        f"  a checkpoint takes {run['a checkpoint']}",
        *(wrap(saving, indent="  ") if saving else []),
    ]
