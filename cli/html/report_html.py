"""`distrain report --html`: a run as one HTML file: its history, its plan against what was measured, its curves, its config."""

from __future__ import annotations

from collections.abc import Iterator

from ...trainer.rundir.measured_run import MeasuredRun
from ...trainer.rundir.planned_measured import PlannedMeasured
from ...trainer.spec.numbers.as_text import plural, seconds_text, share_text
from ...trainer.spec.problem import one_line
from ..drawings.curve_drawing import DrawnCurve, curve_drawing, line_of
from ..pages.loss_chart import loss_label
from ..pages.report_page import (
    NOTHING_MEASURED,
    PLANNED_COLUMNS,
    drift_sentences,
    drift_text,
    figure_text,
    headline,
    history_sentences,
    planned_measured_rows,
    planned_measured_title,
    restart_text,
    validation_words,
)
from .markup import Markup, element
from .page import details, figure, page, paragraphs, section, sentence, table, tiles

CONFIG = "The whole config"


def report_html(run: MeasuredRun, config: str, command: str) -> str:
    """Return the page of a run; `config` is its YAML, `command` what made the page."""
    state = f"{run.steps:,} of {plural(run.whole, 'step')}"
    kind = "good" if run.steps >= run.whole > 0 else "care"
    content = [
        element("p", "Run", class_="kind"),
        element("h1", one_line(run.name)),
        element("p", element("span", state, class_=f"badge {kind}"), *([f"on {one_line(run.device)}"] if run.device else [])),
        tiles(list(_tiles(run))),
        paragraphs(map(sentence, history_sentences(run)), "note"),
        section("Loss", figure(loss_drawing(run))),
        section("Planned and measured", *_planned_measured(run)),
        section("Tokens/s", figure(_speed_drawing(run))),
        details(CONFIG, config),
    ]
    return page(f"{one_line(run.name)}: {state}", headline(run), content, command)


def _tiles(run: MeasuredRun) -> Iterator[tuple[str, str, str]]:
    """The figures that a reader looks for first, as far as they are known."""
    if run.losses:
        yield "loss", loss_label(run.losses[-1][1]), f"{loss_label(run.losses[0][1])} at step {run.losses[0][0]:,}"
    for name, points in run.validations:
        lowest = min(loss for _, loss in points)
        yield validation_words(name), loss_label(points[-1][1]), f"at best {loss_label(lowest)}"
    for each in (*run.time[:1], *run.speed):
        if each.measured is not None:
            yield {"step": "a step"}.get(each.name, each.name), figure_text(each, each.measured), _against_plan(each)
    if run.restart_reasons or run.goodput is not None:
        good = f"goodput {share_text(run.goodput)}" if run.goodput is not None else ""
        yield "restarts after faults", f"{len(run.restart_reasons):,}", good
    if run.saves.count or run.saves.failed:
        share = f" ({share_text(run.saves.share)})" if run.saves.share is not None else ""
        yield "saves", f"{run.saves.count:,}", f"training waited {seconds_text(run.saves.pause)}{share}"


def _against_plan(each: PlannedMeasured) -> str:
    return f"planned {figure_text(each, each.planned)} ({drift_text(each)})" if each.drift is not None else ""


def _planned_measured(run: MeasuredRun) -> Iterator[Markup]:
    rows = planned_measured_rows(run)
    if not rows:
        yield paragraphs([f"{NOTHING_MEASURED}."])
        return
    yield paragraphs(drift_sentences(run))
    yield table(PLANNED_COLUMNS, rows)
    _, _, resident = planned_measured_title(run).partition("; ")
    yield paragraphs([f"{sentence(resident)}."] if resident else [], "note")


def loss_drawing(run: MeasuredRun) -> str:
    """Return the SVG of a run's losses and validation losses over steps."""
    curves = [
        DrawnCurve(name="loss", points=run.losses, colour=line_of(0)[0]),
        *(
            DrawnCurve(name=name or "validation", points=points, colour=line_of(number)[0], dashes=line_of(number)[1], dots=True)
            for number, (name, points) in enumerate(run.validations, 1)
        ),
    ]
    return curve_drawing(curves, f"loss, {run.loss_unit}", events=_restarts(run))


def _speed_drawing(run: MeasuredRun) -> str:
    planned = next((each.planned for each in run.speed if each.name == "tokens/s"), None)
    curve = DrawnCurve(name="tokens/s", points=run.tokens_per_second, colour=line_of(2)[0])
    level = ("planned", planned) if planned is not None else None
    return curve_drawing([curve], "tokens/s", events=_restarts(run), floor_at=0.0, level=level, even_steps=True)


def _restarts(run: MeasuredRun) -> list[tuple[int, str, str]]:
    return [(each.step, "restart", restart_text(each)) for each in run.restart_reasons if each.step is not None]
