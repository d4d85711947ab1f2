"""`distrain report A B ... --html`: several runs side by side as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...trainer.rundir.measured_run import MeasuredRun
from ...trainer.spec.numbers.as_text import plural
from ...trainer.spec.problem import one_line
from ..drawings.curve_drawing import DrawnCurve, curve_drawing, line_of
from ..pages.compare_page import (
    NO_COMMON_STEP,
    SAME_CONFIGS,
    ComparedRun,
    config_differences,
    figure_rows,
    loss_rows,
    lowest_loss_text,
    progress,
    validation_heading,
    validation_names,
)
from ..pages.loss_chart import Points
from ..pages.report_page import validation_words
from .markup import Markup, element, join
from .page import details, figure, page, paragraphs, section, sentence, swatch, table
from .report_html import CONFIG


def comparison_html(runs: Sequence[ComparedRun], configs: Sequence[str], command: str) -> str:
    """Return the page of several runs; `configs` is the YAML of each, `command` what made the page."""
    names = [one_line(run.measured.name) for run in runs]
    title = ", ".join(names)
    legend = [[_mark(at, run), name, progress(run), run.given] for at, (run, name) in enumerate(zip(runs, names, strict=True))]
    differences = config_differences(runs)
    content = [
        element("p", f"{plural(len(runs), 'run')} side by side", class_="kind"),
        element("h1", title),
        table(("", "run", "steps and losses", "folder"), legend, (0, 1), wrapped=(1, 2, 3)),
        *([paragraphs([sentence(best)])] if (best := lowest_loss_text(runs)) else []),
        section("What differs", _side_by_side(runs, differences, wrapped=True) if differences else paragraphs([sentence(SAME_CONFIGS)])),
        section("Loss", figure(_drawing(runs, "loss, nats a token", lambda run: run.losses)), _losses(runs, lambda run: run.losses)),
        *(section(validation_heading(name), *_validation(runs, name)) for name in validation_names(runs)),
        section("Measured, and (planned)", _side_by_side(runs, figure_rows(runs))),
        section("Tokens/s", figure(_drawing(runs, "tokens/s", lambda run: run.tokens_per_second, floor_at=0.0))),
        *(details(f"{CONFIG} of {run.mark}, {name}", config) for run, name, config in zip(runs, names, configs, strict=True)),
    ]
    return page(title, "; ".join(f"{run.mark} {name}: {progress(run)}" for run, name in zip(runs, names, strict=True)), content, command)


def _mark(number: int, run: ComparedRun) -> Markup:
    return join([swatch(line_of(number)[0]), run.mark])


def _side_by_side(runs: Sequence[ComparedRun], rows: Mapping[str, Sequence[str]], *, wrapped: bool = False) -> Markup:
    """A table with a row a name and a column a run; with `wrapped`, of text that may be long."""
    marks = [_mark(at, run) for at, run in enumerate(runs)]
    columns = range(1, len(runs) + 1)
    return table(
        ("", *marks),
        ([name, *values] for name, values in rows.items()),
        (0, *columns) if wrapped else (0,),
        wrapped=columns if wrapped else (),
    )


def _losses(runs: Sequence[ComparedRun], losses: Callable[[MeasuredRun], Points]) -> Markup:
    """The losses at the steps that all runs logged."""
    headings, rows = loss_rows(runs, [losses(run.measured) for run in runs])
    return table(("", *headings), ([name, *values] for name, values in rows.items())) if rows else paragraphs([sentence(NO_COMMON_STEP)])


def _validation(runs: Sequence[ComparedRun], name: str) -> list[Markup]:
    """The picture and the table of the losses of a validation set."""

    def points(run: MeasuredRun) -> Points:
        return dict(run.validations).get(name, ())

    return [figure(_drawing(runs, validation_words(name), points, dots=True)), _losses(runs, points)]


def _drawing(
    runs: Sequence[ComparedRun], axis: str, points: Callable[[MeasuredRun], Points], *, dots: bool = False, floor_at: float | None = None
) -> str:
    """The curves of all runs in one picture."""
    curves = []
    for number, run in enumerate(runs):
        colour, dashes = line_of(number)
        name = f"{run.mark} {one_line(run.measured.name)}"
        curves.append(DrawnCurve(name=name, points=points(run.measured), colour=colour, dashes=dashes, dots=dots))
    return curve_drawing(curves, axis, floor_at=floor_at, even_steps=floor_at is not None)
