"""The elements of an SVG drawing as text; lengths are in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from ...trainer.spec.problem import one_line

WIDTH, MARGIN = 760, 24  # of a drawing, and of the empty border at its left and right


def document(elements: Iterable[str], height: float, width: float = WIDTH, *, is_inner: bool = False, title: str = "") -> str:
    """Return the SVG of elements on a white page; an inner one has neither page nor border, for a page that holds it.

    `title` says what the drawing shows.
    """
    left, width = (MARGIN, width - 2 * MARGIN) if is_inner else (0, width)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left} 0 {width:g} {height:g}" font-family="sans-serif" font-size="12">'
    page = [] if is_inner else [f'<rect width="{width:g}" height="{height:g}" fill="white"/>']
    return "\n".join([head, *([f"<title>{escape_text(title)}</title>"] if title else []), *page, *elements, "</svg>"]) + "\n"


def escape_text(text: str) -> str:
    """Return text for the content of an element, also of XML, which has no place for control characters."""
    return escape(one_line(text))


def box(left: float, top: float, wide: float, tall: float, colour: str, *, title: str = "") -> str:
    """Return a filled rectangle; `title` is what a browser shows where the pointer rests on it."""
    place = f'x="{left:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{tall:.2f}" fill="{colour}"'
    return f"<rect {place}><title>{escape_text(title)}</title></rect>" if title else f"<rect {place}/>"


def label(left: float, top: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start") -> str:
    """Return a line of text whose baseline is at `top`."""
    place = f'x="{left:.1f}" y="{top:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text {place} fill="#222">{escape_text(text)}</text>'


def legend(names: Iterable[tuple[str, str]], top: float, left: float = MARGIN) -> Iterator[str]:
    """Yield (name, colour) pairs in a row, each with a small box of its colour."""
    for name, colour in names:
        yield box(left, top - 9, 10, 10, colour)
        yield label(left + 15, top, name)
        left += 33 + 6.2 * len(name)
