"""`distrain simulate`: a step as a page: its timeline in characters, what each stage does, the critical path, what would change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...trainer.plan.timeline.column_shares import IDLE, column_shares
from ...trainer.plan.timeline.critical_path import CriticalPath, slowest_stage
from ...trainer.plan.timeline.step_simulation import StepSimulation
from ...trainer.plan.timeline.timeline import StageTimeline, Timeline
from ...trainer.plan.timeline.what_if import NO_LAUNCHES
from ...trainer.spec.numbers.as_text import digits, plural, seconds_text, share_text, time_unit
from ...trainer.spec.problem import one_line
from .plan_facts import HOST_WAIT, fewer_launches
from .text_layout import Style, evenly_spaced, narrow_table, page_width, with_heading, wrap

MOST_ROWS = 16  # stages of the timeline, evenly spaced
MOST_STAGES = 8  # rows of the table of stages
LEAST_SHARE = 0.001  # of the critical path, that a cause is named for
LEAST_SECONDS = 1e-9
APART = 0.002  # share by which a simulated and a planned step differ so that a page says why
MARKS = {  # (with block characters, without) for what fills most of a column
    "F": ("░", "f"),
    "B": ("█", "B"),
    "I": ("▓", "I"),
    "W": ("▒", "W"),
    "messages": ("~", "~"),
    "step": ("#", "#"),
    "host": ("h", "h"),
    "data": ("d", "d"),
    "other": ("·", "."),
    IDLE: (" ", " "),
}
MARK_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "messages": "messages",
    "step": "optimizer step",
    "host": "host",
    "data": "reading data",
    "other": "host",
}
CAUSES = {
    "computing": "computing",
    "messages": "messages inside passes and sums",
    "sends": "sends",
    "step": "optimizer step",
    "host": "host",
}


def simulate_text(step: StepSimulation, name: str, style: Style) -> str:
    """The page of a simulated step."""
    timeline, path = step.timeline, step.path
    sections = (
        [style.paint(line, "bold") for line in wrap(f"{one_line(name)}: {title_text(timeline)}", hang="  ")],
        with_heading(_timeline_lines(timeline, style), style),
        with_heading(_stage_lines(timeline, path), style),
        wrap(path_text(step), hang="  "),
        with_heading(_what_if_lines(step), style),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def slow_text(slow: Mapping[int, float], seconds: float, planned: float) -> str:
    """What slow stages change of a step that would take `planned` seconds without them."""
    stages = ", ".join(f"stage {stage} computing {digits(factor, 2)} times as long" for stage, factor in slow.items())
    return f"With {stages} the step takes {seconds_text(seconds)}, {_change(seconds, planned)}"


def title_text(timeline: Timeline) -> str:
    """How long a step takes, simulated and planned."""
    apart = timeline.seconds / timeline.planned - 1
    planned = f" simulated, {seconds_text(timeline.planned)} planned" if abs(apart) > APART else ", as planned"
    shown = "" if timeline.flushes else ", between steps that are alike"
    return f"a step takes {seconds_text(timeline.seconds)}{planned}{shown}"


def _timeline_lines(timeline: Timeline, style: Style) -> list[str]:
    """A row of characters a stage."""
    stages = evenly_spaced(timeline.stages, MOST_ROWS)
    names = [f"stage {stage.index}" for stage in stages]
    idle = [share_text(stage.idle(timeline.seconds)) for stage in stages]
    columns = page_width() - max(map(len, names)) - max(map(len, idle)) - 6
    shares = [column_shares(stage, timeline.seconds, columns) for stage in stages]
    marks = ["".join(kind_mark(largest_kind(each), style) for each in row) for row in shares]
    used = {largest_kind(each) for row in shares for each in row}
    legend = "  ".join(f"{kind_mark(kind, style)} {MARK_NAMES[kind]}" for kind in MARK_NAMES if kind in used)
    micros = f"{timeline.micros:,} micro-batch{'' if timeline.micros == 1 else 'es'}"
    each = f"{seconds_text(timeline.seconds / columns)} a column, in which the mark is of what takes most of it"
    schedule = f" ({timeline.schedule})" if timeline.schedule else ""
    heading = f"Timeline of {plural(len(timeline.stages), 'stage')} and {micros}{schedule}; {each}"
    width = max(map(len, names))
    return [
        *wrap(heading),
        *(f"  {name.ljust(width)}  {row}  {share.rjust(max(map(len, idle)))}" for name, row, share in zip(names, marks, idle, strict=True)),
        *wrap(f"{legend}; the share at the right is idle", indent="  "),
    ]


def largest_kind(shares: Counter[str]) -> str:
    """What takes most of a column; all messages together are one."""
    merged = Counter[str]()
    for kind, share in shares.items():
        merged[kind if kind in MARKS else "messages"] += share
    return merged.most_common(1)[0][0]


def kind_mark(kind: str, style: Style) -> str:
    """The character of a kind of span."""
    return MARKS[kind][0 if style.blocks else 1]


def _stage_lines(timeline: Timeline, path: CriticalPath) -> list[str]:
    """What stages spend a step on; the one that most others wait for is among those shown."""
    if len(timeline.stages) == 1:
        return []
    shown = {stage.index for stage in evenly_spaced(timeline.stages, MOST_STAGES)} | {slowest_stage(path)}
    unit, name = time_unit(timeline.seconds)
    table = [["stage", "layers", "compute", "messages", "fill", "wait", "drain", "held", "path"]]
    for stage in (timeline.stages[index] for index in sorted(shown)):
        seconds = (stage.computing, stage.messages, stage.filling, stage.waiting, stage.draining)
        figures = [digits(each / unit) if each > LEAST_SECONDS else "-" for each in seconds]
        on_path = share_text(path.by_stage.get(stage.index, 0.0) / timeline.seconds)
        table.append([str(stage.index), _layers(stage), *figures, digits(stage.in_flight, 1), on_path])
    some = f" ({len(shown)} of {len(timeline.stages)})" if len(shown) < len(timeline.stages) else ""
    heading, *rows = narrow_table(table, (0, 1), width=page_width() - 2)
    title = f"Stages{some}: what a step is spent on, in {name}; micro-batches held at once; share of the critical path"
    return [*wrap(title), f"  {heading}", *(f"  {row}" for row in rows)]


def _layers(stage: StageTimeline) -> str:
    parts = [f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in stage.parts if end > first]
    return ", ".join(parts if len(parts) < 3 else [parts[0], "..", parts[-1]]) or "-"


def path_text(step: StepSimulation) -> str:
    """The causes of the step's length."""
    whole = step.timeline.seconds
    causes = [f"{CAUSES[cause]} {share_text(each / whole)}" for cause, each in step.path.by_cause.items() if each / whole >= LEAST_SHARE]
    return f"Critical path, in which each span starts when the one before ends: {', '.join(causes)}"


def what_if_rows(step: StepSimulation) -> list[list[str]]:
    """A row for each condition: its words, the step under it, by how much that is longer or shorter."""
    now = step.timeline.seconds
    return [[each.says, seconds_text(each.seconds), _change(each.seconds, now)] for each in step.what_if]


def _what_if_lines(step: StepSimulation) -> list[str]:
    rows = what_if_rows(step)
    if not rows:
        return []
    least = (1 - HOST_WAIT) * step.timeline.seconds
    is_slow = any(each.says == NO_LAUNCHES and each.seconds <= least for each in step.what_if)
    hint = f"launching operators takes much of the step: {fewer_launches(step.timeline.micros)}" if is_slow else ""
    table = narrow_table(rows, (0,), width=page_width() - 2)
    return ["What if", *(f"  {line}" for line in table), *(wrap(hint, indent="  ") if hint else [])]


def _change(seconds: float, before: float) -> str:
    return f"{100 * (seconds / before - 1):+.1f} %"
