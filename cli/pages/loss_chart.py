"""Charts of losses over steps, in text: one run's curve, or the curves of several runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from math import isfinite

from .text_layout import Style, page_width, wrap

HEIGHT = 12  # lines of a chart
LABEL_WIDTH = 8  # columns of the labels beside it
SHARED_CELL = "*"  # where curves of several runs meet
BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # the bit of a dot by its column and row in a character

Points = Sequence[tuple[int, float]]


def run_chart(losses: Points, validations: Sequence[tuple[str, Points]], style: Style, unit: str) -> list[str]:
    """The loss over steps, as braille dots (2 x 4 a character) or stars; validation losses as `o`, those of a named set as its number."""
    if len(losses) < 2:
        return []
    width, (across, down) = page_width() - LABEL_WIDTH - 2, (2, 4) if style.blocks else (1, 1)
    numbers = cycle("123456789")
    marks = [next(numbers) if name else "o" for name, _ in validations]
    points = [*losses, *(point for _, curve in validations for point in curve)]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    first, last = min(step for step, _ in points), max(step for step, _ in points)

    def position(step: int, loss: float, columns: int, rows: int) -> tuple[int, int]:
        x = round((step - first) / max(1, last - first) * (columns - 1))
        return x, round((high - loss) / ((high - low) or 1.0) * (rows - 1))

    dots = {position(step, loss, width * across, HEIGHT * down) for step, loss in losses}
    characters = _braille(dots) if style.blocks else dict.fromkeys(dots, "*")
    for (_, curve), mark in zip(validations, marks, strict=True):
        characters |= dict.fromkeys((position(step, loss, width, HEIGHT) for step, loss in curve), mark)
    named = ", ".join(f"{name or 'validation'} ({mark})" for (name, _), mark in zip(validations, marks, strict=True))
    title = f"Loss, {unit}" + (f", and {named}" if named else "")
    heading = [style.paint(line, "bold") for line in wrap(title, hang="  ")]
    return [*heading, *_with_axes(characters, width, (low, high), (first, last), style)]


def comparison_chart(curves: Mapping[str, Points], style: Style) -> list[str]:
    """Curves by mark on one scale, each drawn with its mark and straight between its points; empty for fewer than two steps."""
    finite = {mark: [(step, loss) for step, loss in curve if isfinite(loss)] for mark, curve in curves.items()}
    points = [point for curve in finite.values() for point in curve]
    first, last = min((step for step, _ in points), default=0), max((step for step, _ in points), default=0)
    if first == last:
        return []
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    width = page_width() - LABEL_WIDTH - 2
    cells: dict[tuple[int, int], str] = {}
    for mark, curve in finite.items():
        for x, loss in _losses_by_column(curve, first, last, width):
            at = (x, round((high - loss) / ((high - low) or 1.0) * (HEIGHT - 1)))
            cells[at] = mark if cells.get(at, mark) == mark else SHARED_CELL
    return _with_axes(cells, width, (low, high), (first, last), style)


def _with_axes(
    characters: Mapping[tuple[int, int], str], width: int, losses: tuple[float, float], steps: tuple[int, int], style: Style
) -> list[str]:
    """The characters of a chart by (column, row), `width` columns wide, with the lowest and highest loss and the first and last step."""
    labels = {0: loss_label(losses[1]), HEIGHT - 1: loss_label(losses[0])}
    bar = "│" if style.blocks else "|"
    rows = ["".join(characters.get((x, y), " ") for x in range(width)).rstrip() for y in range(HEIGHT)]
    lines = [f"{labels.get(y, ''):>{LABEL_WIDTH}} {bar}{row}" for y, row in enumerate(rows)]
    return [*lines, f"{'step':>{LABEL_WIDTH}}  {steps[0]:<{width // 2}}{steps[1]:>{width - width // 2}}"]


def _losses_by_column(curve: Points, first: int, last: int, width: int) -> Iterator[tuple[int, float]]:
    """The loss of a curve in each column from its first point to its last; columns run over the steps from `first` to `last`."""

    def column(step: int) -> int:
        return round((step - first) / (last - first) * (width - 1))

    if len(curve) == 1:
        yield column(curve[0][0]), curve[0][1]
    for (step, loss), (next_step, next_loss) in pairwise(sorted(curve)):
        start, end = column(step), column(next_step)
        for x in range(start, end + 1):
            share = (x - start) / (end - start) if end > start else 1.0
            yield x, loss + share * (next_loss - loss)


def loss_label(loss: float) -> str:
    """A loss in at most LABEL_WIDTH columns."""
    return text if len(text := f"{loss:.3f}") <= LABEL_WIDTH else f"{loss:.2g}"


def _braille(dots: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Characters by (column, row) from dots by (column, row)."""
    bits: dict[tuple[int, int], int] = {}
    for x, y in dots:
        at = (x // 2, y // 4)
        bits[at] = bits.get(at, 0) | BRAILLE[x % 2][y % 4]
    return {at: chr(0x2800 + each) for at, each in bits.items()}
