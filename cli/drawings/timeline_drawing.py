"""A step's timeline as an SVG: a row a stage, a box a pass, and the activations that stages hold meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import floor, log10

from ...trainer.plan.timeline.chrome_trace import GENERATOR, SPAN_NAMES
from ...trainer.plan.timeline.column_shares import IDLE, column_shares
from ...trainer.plan.timeline.timeline import StageTimeline, StepSpan, Timeline, held_activations
from ...trainer.spec.numbers.as_text import plural, seconds_text, share_text, size_text, time_unit
from .svg import MARGIN, box, document, label, legend

WIDTH = 1120
LEFT, RIGHT = 92, 76  # of the rows: room for a stage's name, and for its idle share
TOP, INNER_TOP = 72, 20  # of the first row, with a heading above it and without
ROWS = (8, 22, 640)  # the least and the most height of a row, and that of all rows of many stages
GAP = 0.12  # of a row
CURVES = 96  # height of the curves of activations
MOST_BOXES = 15_000  # spans that are drawn one by one; of more, columns are
COLUMN = 4  # pixels of a column at least
IN_COLUMN = 8  # passes in a column, about
LEAST_SHARE = 0.12  # of a column, that its colour shows
LABELLED = 13  # pixels of a box that has the number of its micro-batch

# fmt: off
COLOURS = {  # of kinds of span
    "F":      "#4c78a8",
    "B":      "#54a24b",
    "I":      "#54a24b",
    "W":      "#a0c98b",
    "send":   "#f58518",
    "sum":    "#f58518",
    "tied":   "#f58518",
    "gather": "#f58518",
    "step":   "#b279a2",
    "host":   "#9d9da0",
    "data":   "#9d9da0",
    "other":  "#9d9da0",
    IDLE:     "#f0f0ee",
}
# fmt: on
LATER_PART = {"F": "#9ecae9", "B": "#88d27a", "I": "#88d27a", "W": "#c8e3b8"}  # of a stage's second part and those after it
CURVE_COLOURS = ("#e45756", "#4c78a8", "#54a24b")


def draw_timeline(timeline: Timeline, name: str) -> str:
    """Return the SVG of a run's step."""
    elements, height = _body(timeline, TOP)
    return document([f"<metadata>{GENERATOR}</metadata>", *_heading(timeline, name), *elements], height, WIDTH)


def timeline_drawing(timeline: Timeline) -> str:
    """Return the SVG of a step without its heading, for a page that holds it."""
    elements, height = _body(timeline, INNER_TOP)
    return document(elements, height, WIDTH, is_inner=True, title=_shape_text(timeline))


def _body(timeline: Timeline, top: float) -> tuple[list[str], float]:
    """The rows, their axis and legend, and the curves of activations, from `top` on; the height of all."""
    row = row_height(len(timeline.stages))
    bottom = top + row * len(timeline.stages)
    elements = [
        *stage_rows(timeline, top, row, timeline.seconds),
        *time_axis(timeline.seconds, bottom),
        *kinds_legend([timeline], bottom + 40),
    ]
    curves = list(_curves(timeline, bottom + 68))
    return [*elements, *curves], bottom + (68 + CURVES + 40 if curves else 56)


def _heading(timeline: Timeline, name: str) -> Iterator[str]:
    yield label(MARGIN, 28, f"{name}: one step, {seconds_text(timeline.seconds)} simulated", size=17, weight="bold")
    yield label(MARGIN, 48, _shape_text(timeline))


def _shape_text(timeline: Timeline) -> str:
    stages, micros = plural(len(timeline.stages), "stage"), f"{timeline.micros:,} micro-batch{'' if timeline.micros == 1 else 'es'}"
    schedule = f" of {timeline.schedule}" if timeline.schedule else ""
    return f"{stages} x {micros}{schedule}; {seconds_text(timeline.planned)} planned"


def _pixels_per_second(seconds: float) -> float:
    return (WIDTH - LEFT - RIGHT) / seconds if seconds else 0.0


def row_height(stages: int) -> float:
    """The height of a row where a drawing has so many."""
    return max(ROWS[0], min(ROWS[1], ROWS[2] / stages))


def stage_rows(timeline: Timeline, first: float, row: float, seconds: float) -> Iterator[str]:
    """A row a stage, on a scale on which a row is `seconds` long; of many stages, only some are named."""
    every = -(-len(timeline.stages) * 12 // ROWS[2]) if row < 12 else 1
    one_by_one = sum(len(stage.spans) for stage in timeline.stages) <= MOST_BOXES
    columns = _columns(timeline)
    yield label(WIDTH - MARGIN, first - 8, "idle", anchor="end")
    for stage in timeline.stages:
        top, tall = first + row * stage.index, row * (1 - GAP)
        yield box(LEFT, top, timeline.seconds * _pixels_per_second(seconds), tall, COLOURS[IDLE])
        yield from _boxes(stage, seconds, top, tall) if one_by_one else _column_boxes(stage, seconds, top, tall, columns)
        if stage.index % every == 0:
            yield label(LEFT - 8, top + tall / 2 + 4, f"stage {stage.index}", anchor="end")
            yield label(WIDTH - MARGIN, top + tall / 2 + 4, share_text(stage.idle(timeline.seconds)), anchor="end")


def _columns(timeline: Timeline) -> int:
    """Columns of a row of which each has several passes, so that equal work has equal colours."""
    passes = max(1, max(sum(span.is_pass for span in stage.spans) for stage in timeline.stages))
    return max(1, min(int((WIDTH - LEFT - RIGHT) / COLUMN), passes // IN_COLUMN))


def _boxes(stage: StageTimeline, seconds: float, top: float, tall: float) -> Iterator[str]:
    """A box a span: what it waits for messages is a strip at its foot; a wide one has the number of its micro-batch."""
    scale, first = _pixels_per_second(seconds), min((span.part for span in stage.spans if span.is_pass), default=0)
    for span in stage.spans:
        left, wide = LEFT + span.start * scale, span.seconds * scale
        later = span.is_pass and span.part != first
        yield box(left, top, wide, tall, (LATER_PART if later else COLOURS)[span.kind], title=_title(span))
        if span.is_pass and span.messages * scale > 0.3:
            yield box(left, top + tall * 0.82, span.messages * scale, tall * 0.18, COLOURS["send"])
        if span.is_pass and wide >= LABELLED and tall >= 12:
            yield label(left + wide / 2, top + tall / 2 + 4, str(span.micro), size=10, anchor="middle")


def _title(span: StepSpan) -> str:
    """What a browser says of a box."""
    of = f" of micro-batch {span.micro}, part {span.part}" if span.has_micro_batch else ""
    waits = f", of which {seconds_text(span.messages)} messages" if span.is_pass and span.messages else ""
    return f"{SPAN_NAMES[span.kind]}{of}: {seconds_text(span.seconds)} from {seconds_text(span.start)}{waits}"


def _column_boxes(stage: StageTimeline, seconds: float, top: float, tall: float, columns: int) -> Iterator[str]:
    """Columns in the mean colour of what they show; equal neighbours are one box."""
    wide, left = (WIDTH - LEFT - RIGHT) / columns, 0
    for colour, same in groupby(map(_mean_colour, column_shares(stage, seconds, columns))):
        many = sum(1 for _ in same)
        if colour != COLOURS[IDLE]:
            yield box(LEFT + left * wide, top, many * wide, tall, colour)
        left += many


def _mean_colour(shares: Counter[str]) -> str:
    """The mean of the colours of a column, by their shares in tenths."""
    tenths = {kind: round(10 * share) for kind, share in shares.items() if share >= LEAST_SHARE}
    whole = sum(tenths.values()) or 1
    mixed = [round(sum(many * int(COLOURS[kind][at : at + 2], 16) for kind, many in tenths.items()) / whole) for at in (1, 3, 5)]
    return "#" + "".join(f"{min(255, each):02x}" for each in mixed)


def time_axis(seconds: float, top: float) -> Iterator[str]:
    """Ticks of time below the rows."""
    scale, tick = _pixels_per_second(seconds), _round_tick(seconds / 8)
    unit, name = time_unit(seconds)
    for count in range(int(seconds / tick * (1 + 1e-9)) + 1):
        at = LEFT + count * tick * scale
        yield f'<path d="M{at:.1f} {top:.1f}v5" stroke="#222"/>'
        yield label(at, top + 17, f"{count * tick / unit:.3g}", anchor="middle", size=11)
    yield label(WIDTH - RIGHT, top + 17, name, anchor="end", size=11)


def _round_tick(about: float) -> float:
    """1, 2 or 5 times a power of ten, next above."""
    power = 10.0 ** floor(log10(about)) if about > 0 else 1.0
    return next(times * power for times in (1, 2, 5, 10) if times * power >= about * (1 - 1e-9))


def kinds_legend(timelines: Sequence[Timeline], top: float) -> Iterator[str]:
    """The names and colours of the kinds of spans that timelines have."""
    kinds = {span.kind for timeline in timelines for stage in timeline.stages for span in stage.spans}
    named: Mapping[str, Sequence[str]] = {
        "forward": ("F",),
        "backward": ("B", "I"),
        "backward of weights": ("W",),
        "messages": ("send", "sum", "tied", "gather"),
        "optimizer step": ("step",),
        "host": ("host", "data", "other"),
    }
    rows = [(name, COLOURS[of[0]]) for name, of in named.items() if kinds & set(of)]
    if timelines[0].chunks > 1:
        rows.append(("paler: a later part of the model", LATER_PART["F"]))
    yield from legend([*rows, ("idle", "#d8d8d4")], top, LEFT)


def _curves(timeline: Timeline, top: float) -> Iterator[str]:
    """The activations that the fullest stage, the first and the last hold over the step."""
    curves = {stage.index: held_activations(stage) for stage in timeline.stages}
    peaks = {index: max(held for _, held in curve) for index, curve in curves.items()}
    highest = max(peaks.values())
    if not highest:
        return
    shown = list(dict.fromkeys((max(peaks, key=peaks.__getitem__), 0, len(timeline.stages) - 1)))
    yield label(LEFT, top, "activations that a rank holds:", weight="bold")
    left = LEFT + 212.0
    for index, colour in zip(shown, CURVE_COLOURS, strict=False):
        says = f"stage {index}, at most {size_text(peaks[index])}"
        yield from legend([(says, colour)], top, left)
        left += 36 + 6.4 * len(says)
        yield _curve(curves[index], timeline.seconds, top + 14, CURVES / highest, colour)
    yield f'<path d="M{LEFT} {top + 14 + CURVES:.1f}H{WIDTH - RIGHT}" stroke="#888"/>'


def _curve(curve: Sequence[tuple[float, float]], seconds: float, top: float, per_byte: float, colour: str) -> str:
    """A line of steps; of many, the highest in each pixel."""
    scale, highest = _pixels_per_second(seconds), dict[int, float]()
    for at, held in curve:
        pixel = round(2 * at * scale)
        highest[pixel] = max(highest.get(pixel, 0.0), held)
    path, last = "", 0.0
    for pixel, held in sorted(highest.items()):
        x, y = LEFT + pixel / 2, top + CURVES - held * per_byte
        path += f"M{x:.1f} {y:.1f}" if not path else f"L{x:.1f} {last:.1f}V{y:.1f}"
        last = y
    return f'<path d="{path}H{LEFT + seconds * scale:.1f}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
