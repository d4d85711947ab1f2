"""Curves over steps as an SVG: axes with ticks, a legend, and marks at steps where something happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...trainer.spec.numbers.as_text import count_text
from .chart_scale import ChartScale, loose_scale
from .svg import MARGIN, WIDTH, document, escape_text, label

RIGHT, TOP, BOTTOM = MARGIN + 18.0, 12.0, 40.0  # the borders around the curves; the left one is as wide as its labels
HEIGHT = 270.0
LEGEND = 22.0  # the height of a line of the legend
WIDE_RATIO = 8  # of the last and first step, or of the highest and lowest value: above it an axis is logarithmic
MOST_NAMES = 4  # events that have their name beside them
MOST_DOTS = 60  # points of a curve that are drawn as dots too

Points = Sequence[tuple[int, float]]

# fmt: off
LINES = (  # colour and dashes of the first curve, the second and so on
    ("#4c78a8", ""),    ("#f58518", ""),    ("#54a24b", ""),    ("#e45756", ""),    ("#b279a2", ""),    ("#72b7b2", ""),
    ("#4c78a8", "6 3"), ("#f58518", "6 3"), ("#54a24b", "6 3"), ("#e45756", "6 3"), ("#b279a2", "6 3"), ("#72b7b2", "6 3"),
    ("#4c78a8", "2 3"), ("#f58518", "2 3"), ("#54a24b", "2 3"), ("#e45756", "2 3"), ("#b279a2", "2 3"), ("#72b7b2", "2 3"),
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class DrawnCurve:
    """A curve: its name in the legend, its points in any order, its colour and dashes; with `dots` each point is drawn too."""

    name: str
    points: Points
    colour: str
    dashes: str = ""
    dots: bool = False


def line_of(number: int) -> tuple[str, str]:
    """The colour and dashes of a curve by its number."""
    return LINES[number % len(LINES)]


def curve_drawing(
    curves: Sequence[DrawnCurve],
    axis: str,
    *,
    events: Sequence[tuple[int, str, str]] = (),
    floor_at: float | None = None,
    level: tuple[str, float] | None = None,
    even_steps: bool = False,
) -> str:
    """Return the SVG of curves, with steps to the right and `axis` upwards; "" where there is one step at most.

    `events` are steps, each with the name of what happened there and a sentence. `floor_at` is a value that the axis begins at.
    `level` is a horizontal line and its name. The axis is logarithmic where steps are many, unless `even_steps`.
    """
    drawn = [each for each in curves if each.points]
    steps = [max(1, step) for each in drawn for step, _ in each.points]
    if len(set(steps)) < 2:
        return ""
    values = [value for each in drawn for _, value in each.points] + ([level[1]] if level else [])
    names = [each.name for each in drawn] if len(drawn) > 1 else []
    wide = floor_at is None and min(values) > 0 and max(values) >= WIDE_RATIO * min(values)
    ticks = loose_scale(values, 0, 1, floor_at=floor_at, logarithmic=wide).tick_texts()
    left = MARGIN + 32 + 6.6 * max((len(text) for _, text in ticks), default=0)
    places, rows = _legend_places(names, left)
    top = TOP + rows * LEGEND
    up = loose_scale(values, top + HEIGHT - BOTTOM - TOP, top, floor_at=floor_at, logarithmic=wide)
    by_ratio = not even_steps and max(steps) >= WIDE_RATIO * min(steps)
    across = ChartScale(low=min(steps), high=max(steps), start=left, end=WIDTH - RIGHT, logarithmic=by_ratio)
    elements = [
        *(element for curve, place in zip(drawn, places, strict=False) for element in _legend_entry(curve, *place)),
        *_axes(across, up, axis),
        *_events(events, across, up),
        *(_level(*level, across, up) if level else ()),
        *(element for curve in drawn for element in _curve(curve, across, up)),
    ]
    return document(elements, top + HEIGHT - TOP, is_inner=True, title=f"{axis} over steps")


def thin_points(points: Points, across: ChartScale) -> list[tuple[int, float]]:
    """Return the first, the lowest, the highest and the last point of each pixel column, in order: all that a picture shows."""
    kept: list[tuple[int, float]] = []
    for _, some in groupby(sorted(points), key=lambda point: round(across.position(max(1, point[0])))):
        column = list(some)
        ends = {column[0], column[-1], min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _curve(curve: DrawnCurve, across: ChartScale, up: ChartScale) -> Iterator[str]:
    kept = thin_points(curve.points, across)
    places = [(across.position(max(1, step)), up.position(value)) for step, value in kept]
    if len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashes = f' stroke-dasharray="{curve.dashes}"' if curve.dashes else ""
        yield f'<path class="curve" d="M{path}" fill="none" stroke="{curve.colour}" stroke-width="1.6" stroke-linejoin="round"{dashes}/>'
    if len(places) == 1 or (curve.dots and len(places) <= MOST_DOTS):
        for (x, y), (step, value) in zip(places, kept, strict=True):
            said = escape_text(f"{curve.name}: {value:.4f} at step {step:,}")
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.colour}"><title>{said}</title></circle>'


def _axes(across: ChartScale, up: ChartScale, axis: str) -> Iterator[str]:
    bottom = up.start
    for value, text in up.tick_texts():
        y = up.position(value)
        yield f'<path class="grid" d="M{across.start:.1f} {y:.1f}H{across.end:.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
        yield label(across.start - 7, y + 4, text, anchor="end")
    for value, text in across.tick_texts():
        x = across.position(value)
        yield f'<path d="M{x:.1f} {bottom:.1f}v5" stroke="currentColor" stroke-opacity="0.6"/>'
        yield label(x, bottom + 18, text, anchor="middle")
    yield f'<path d="M{across.start:.1f} {bottom:.1f}H{across.end:.1f}" stroke="currentColor" stroke-opacity="0.6"/>'
    yield label((across.start + across.end) / 2, bottom + 34, f"step{' (logarithmic)' if across.logarithmic else ''}", anchor="middle")
    title = f"{axis}{' (logarithmic)' if up.logarithmic else ''}"
    middle = (up.start + up.end) / 2
    yield f'<g transform="rotate(-90 {MARGIN + 11} {middle:.1f})">{label(MARGIN + 11, middle, title, anchor="middle")}</g>'


def _events(events: Sequence[tuple[int, str, str]], across: ChartScale, up: ChartScale) -> Iterator[str]:
    for step, name, says in events:
        if across.low <= max(1, step) <= across.high:
            x = across.position(max(1, step))
            place, said = f"M{x:.1f} {up.end:.1f}V{up.start:.1f}", escape_text(says)
            yield f'<path class="event" d="{place}" stroke="#e45756" stroke-dasharray="3 3"><title>{said}</title></path>'
            if len(events) <= MOST_NAMES:
                yield label(x + 4, up.end + 10, name, size=11)


def _level(name: str, value: float, across: ChartScale, up: ChartScale) -> Iterator[str]:
    y = up.position(value)
    yield f'<path d="M{across.start:.1f} {y:.1f}H{across.end:.1f}" stroke="currentColor" stroke-dasharray="5 4"/>'
    yield label(across.end, y - 5, f"{name} {count_text(value)}", anchor="end")


def _legend_places(names: Sequence[str], start: float) -> tuple[list[tuple[float, float]], int]:
    """Where each name of a legend begins, in lines as wide as the drawing, and the number of lines."""
    places, left, row = list[tuple[float, float]](), start, 0
    for name in names:
        wide = 40 + 6.6 * len(name)
        if left > start and left + wide > WIDTH - RIGHT:
            left, row = start, row + 1
        places.append((left, TOP + 2 + row * LEGEND))
        left += wide
    return places, row + 1 if names else 0


def _legend_entry(curve: DrawnCurve, left: float, top: float) -> Iterator[str]:
    dashes = f' stroke-dasharray="{curve.dashes}"' if curve.dashes else ""
    yield f'<path d="M{left:.1f} {top:.1f}h18" stroke="{curve.colour}" stroke-width="2.4"{dashes}/>'
    if curve.dots:
        yield f'<circle cx="{left + 9:.1f}" cy="{top:.1f}" r="3" fill="{curve.colour}"/>'
    yield label(left + 24, top + 4, curve.name)
