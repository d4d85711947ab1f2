"""`distrain report --timeline`: a measured step beside the simulated one, as a page."""

from __future__ import annotations

from ...trainer.plan.timeline.column_shares import column_shares
from ...trainer.plan.timeline.compare_steps import ActionDifference, StepComparison
from ...trainer.plan.timeline.step_segments import Cause
from ...trainer.plan.timeline.timeline import Timeline
from ...trainer.rundir.measured_step import MachineUse, MeasuredStep
from ...trainer.rundir.timeline_report import TimelineReport
from ...trainer.spec.numbers.as_text import digits, plural, seconds_text, time_unit
from ...trainer.spec.problem import one_line
from .simulate_page import MARK_NAMES, kind_mark, largest_kind
from .text_layout import Style, evenly_spaced, narrow_table, page_width, with_heading, wrap

MOST_ROWS = 8  # stages of the timeline and of the table
MOST_CAUSES = 4  # of the steps' difference
LEAST_SHARE = 0.05  # of that difference, for which a cause is named
LEAST_SLOW = 1.02  # times as long as the other ranks of its stage, for which a rank is named
LEAST_SECONDS = 1e-9
LEAST_RAN = 0.9  # share of their passes for which processes had a core, below which other work is named
SMALL_SHARE = 10  # of a step: the table's unit suits a tenth of it
NAMES = ("measured", "simulated")
# fmt: off
COLUMNS: tuple[tuple[str, tuple[Cause, ...]], ...] = (  # of the table of stages
    ("forward",  ("F",)),
    ("backward", ("B", "I", "W")),
    ("messages", ("messages", "sums")),
    ("step",     ("step",)),
    ("other",    ("data", "other")),
    ("fill",     ("fill",)),
    ("wait",     ("wait",)),
    ("drain",    ("drain",)),
)
CAUSE_NAMES: dict[str, str] = {
    "F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights", "messages": "messages between stages",
    "sums": "sums after the passes", "step": "optimizer step", "data": "reading data", "other": "the host between actions",
    "fill": "filling", "wait": "waiting", "drain": "draining",
}
# fmt: on


def timeline_text(report: TimelineReport, style: Style) -> str:
    """The page."""
    step, comparison = report.step, report.comparison
    sections = (
        _title(report.name, step, comparison, style),
        with_heading(_timeline_lines(report.measured, report.simulated, style), style),
        with_heading(_stage_lines(comparison, report.slowest), style),
        [line for text in difference_sentences(step, comparison) for line in wrap(text, hang="  ")],
        wrap(clock_text(step), hang="  "),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _title(name: str, step: MeasuredStep, comparison: StepComparison, style: Style) -> list[str]:
    measured, simulated = comparison.measured.seconds, comparison.simulated.seconds
    says = f"{one_line(name)}: step {step.step:,} took {seconds_text(measured)}, simulated {seconds_text(simulated)}"
    lines = [style.paint(line, "bold") for line in wrap(f"{says} ({100 * (measured / simulated - 1):+.1f} %)", hang="  ")]
    if len(step.seconds) > 1:
        unit, unit_name = time_unit(measured)
        lowest, highest = (digits(end(step.seconds.values()) / unit) for end in (min, max))
        numbers = f"{min(step.seconds):,} to {max(step.seconds):,}"
        lines += wrap(f"It is the median of steps {numbers}, which took {lowest} to {highest} {unit_name}", indent="  ", hang="  ")
    return lines


def _timeline_lines(measured: Timeline, simulated: Timeline, style: Style) -> list[str]:
    """Two rows of characters a stage, on one scale of time."""
    seconds = max(measured.seconds, simulated.seconds)
    shown = [stage.index for stage in evenly_spaced(simulated.stages, MOST_ROWS)]
    width = max(len(f"stage {index}") for index in shown)
    columns = page_width() - width - len(NAMES[1]) - 6
    rows, used = list[str](), set[str]()
    for index in shown:
        for which, timeline in zip(NAMES, (measured, simulated), strict=True):
            kinds = [largest_kind(each) for each in column_shares(timeline.stages[index], seconds, columns)]
            used |= {*kinds}
            marks = "".join(kind_mark(kind, style) for kind in kinds)
            rows.append(f"  {(f'stage {index}' if which == NAMES[0] else '').ljust(width)}  {which.ljust(len(NAMES[1]))}  {marks}".rstrip())
    legend = "  ".join(f"{kind_mark(kind, style)} {MARK_NAMES[kind]}" for kind in MARK_NAMES if kind in used)
    micros = f"{simulated.micros:,} micro-batch{'' if simulated.micros == 1 else 'es'}"
    schedule = f" ({simulated.schedule})" if simulated.schedule else ""
    some = f" ({len(shown)} are shown)" if len(shown) < len(simulated.stages) else ""
    heading = (
        f"Timeline of {plural(len(simulated.stages), 'stage')}{some} and {micros}{schedule}; {seconds_text(seconds / columns)} a column"
    )
    return [*wrap(heading), *rows, *wrap(legend, indent="  ")]


def _stage_lines(comparison: StepComparison, slowest: int) -> list[str]:
    """What stages spend the measured and the simulated step on."""
    measured, simulated = comparison.stages
    shown = sorted({*evenly_spaced(range(len(measured)), MOST_ROWS), slowest})
    unit, name = time_unit(comparison.measured.seconds / SMALL_SHARE)
    rows = [["stage", "", *(column for column, _ in COLUMNS)]]
    for index in shown:
        for which, seconds in zip(NAMES, (measured[index], simulated[index]), strict=True):
            figures = [sum(seconds[cause] for cause in causes) for _, causes in COLUMNS]
            cells = [digits(each / unit) if each > LEAST_SECONDS else "-" for each in figures]
            rows.append([str(index) if which == NAMES[0] else "", which, *cells])
    some = f" ({len(shown)} of {len(measured)})" if len(shown) < len(measured) else ""
    heading, *lines = narrow_table(rows, (0, 1), width=page_width() - 2)
    return [*wrap(f"Stages{some}: what a step is spent on, in {name}"), f"  {heading}", *(f"  {line}" for line in lines)]


def difference_sentences(step: MeasuredStep, comparison: StepComparison) -> list[str]:
    """What makes the measured step longer or shorter, the action whose seconds differ most, and the rank that stands out."""
    found = [_path_text(comparison)]
    if actions := comparison.actions():
        found.append(_action_text(actions[0]))
    slow = comparison.slow_rank()
    if slow and slow.times >= LEAST_SLOW:
        rank, stage = step.ranks[slow.lane], step.lanes[slow.lane].stage
        found.append(f"Rank {rank} computes {digits(slow.times)} times as long as the other ranks of stage {stage}.")
    return found


def _path_text(comparison: StepComparison) -> str:
    difference = comparison.measured.seconds - comparison.simulated.seconds
    causes = [
        f"{CAUSE_NAMES[cause]} {_difference_text(seconds)}"
        for cause, seconds in comparison.path_differences()[:MOST_CAUSES]
        if abs(seconds) >= LEAST_SHARE * abs(difference)
    ]
    longer = "longer" if difference > 0 else "shorter"
    return (
        f"On the critical path the measured step is {seconds_text(abs(difference))} {longer}: {', '.join(causes) or 'nothing stands out'}."
    )


def _action_text(action: ActionDifference) -> str:
    a_micro = "" if action.kind == "step" else " a micro-batch"
    name = CAUSE_NAMES[action.kind]
    change = f"{100 * (action.measured / action.simulated - 1):+.1f} %, {_difference_text(action.seconds)} a step"
    both = f"{seconds_text(action.measured)}{a_micro}, simulated {seconds_text(action.simulated)}"
    return f"The action that differs most is {name} on stage {action.stage}: {both} ({change})."


def _difference_text(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{seconds_text(abs(seconds))}"


def clock_text(step: MeasuredStep) -> str:
    """What measured seconds are: by which clocks, and whether processes shared cores."""
    says = []
    if step.machines:
        largest = max(step.machines, key=lambda each: each.processes * each.threads / each.cores)
        says.append(_cores_text(largest, len(step.machines)))
    else:
        says.append("Measured spans lie between events of each GPU's stream.")
    if step.clock_error:
        says.append(f"Clocks of the machines agree to {seconds_text(step.clock_error)}.")
    return " ".join(says)


def _cores_text(use: MachineUse, machines: int) -> str:
    """Whether the processes of a machine share its cores."""
    who = f"{use.processes:,} processes" if use.processes > 1 else "a process"
    threads = f"{plural(use.threads, 'thread')}{' each' if use.processes > 1 else ''}"
    where = f"{plural(use.cores, 'core')} of {'one of the machines' if machines > 1 else 'one machine'}"
    says = f"Measured seconds are wall-clock: {who} on {where}, {threads}, used {100 * use.busy:.0f} % of these cores' time."
    if use.processes * use.threads > use.cores:
        return f"{says} They share cores: what one does takes longer while others compute, and the step is not that of separate devices."
    if use.threads == 1 and use.ran < LEAST_RAN:
        return f"{says} In their passes and steps they had a core for {100 * use.ran:.0f} % of the time: other work took the rest."
    shared = "They have a core each, but share caches, memory and what else runs there." if use.processes > 1 else ""
    return f"{says} {shared}".rstrip()
