"""A measured step beside the simulated one as an SVG: for each of them a row a stage, on one scale of time."""

from __future__ import annotations

from collections.abc import Iterator

from ...trainer.plan.timeline.chrome_comparison import GENERATOR
from ...trainer.plan.timeline.timeline import Timeline
from ...trainer.spec.numbers.as_text import plural, seconds_text
from .svg import MARGIN, document, label
from .timeline_drawing import LEFT, WIDTH, kinds_legend, row_height, stage_rows, time_axis

TOP, HEADING = 60, 24  # of the first rows; above the rows of each step


def draw_comparison(measured: Timeline, simulated: Timeline, name: str, step: int) -> str:
    """Return the SVG of a run's measured step, whose number this is, and of the simulated one."""
    row = row_height(2 * len(simulated.stages))
    seconds = max(measured.seconds, simulated.seconds)
    tall = HEADING + row * len(simulated.stages)
    elements = [
        *_heading(simulated, name, step),
        *_step_rows(measured, f"measured, {seconds_text(measured.seconds)}", TOP, row, seconds),
        *_step_rows(simulated, f"simulated, {seconds_text(simulated.seconds)}", TOP + tall, row, seconds),
        *time_axis(seconds, TOP + 2 * tall),
        *kinds_legend([measured, simulated], TOP + 2 * tall + 40),
    ]
    return document([f"<metadata>{GENERATOR}</metadata>", *elements], TOP + 2 * tall + 56, WIDTH)


def _heading(simulated: Timeline, name: str, step: int) -> Iterator[str]:
    yield label(MARGIN, 28, f"{name}: step {step:,}, measured and simulated", size=17, weight="bold")
    micros = f"{simulated.micros:,} micro-batch{'' if simulated.micros == 1 else 'es'}"
    schedule = f" of {simulated.schedule}" if simulated.schedule else ""
    yield label(MARGIN, 48, f"{plural(len(simulated.stages), 'stage')} x {micros}{schedule}")


def _step_rows(timeline: Timeline, says: str, top: float, row: float, seconds: float) -> Iterator[str]:
    yield label(LEFT, top + HEADING - 8, says, weight="bold")
    yield from stage_rows(timeline, top + HEADING, row, seconds)
