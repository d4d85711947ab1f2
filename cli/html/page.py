"""The skeleton of an HTML page and its parts: tiles of figures, tables, problems, drawings, details text. No page loads anything."""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Mapping, Sequence

from ...trainer.spec.problem import Problem
from ..keys.config_files import distrain_version
from ..pages.text_layout import UNIT
from .markup import Markup, element, join, markup
from .stylesheet import STYLESHEET

GENERATOR = '<meta name="generator" content="distrain"/>'  # what a file of ours holds near its beginning
_BEFORE_UNIT = re.compile(rf"(?<=[0-9]) (?={UNIT})")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser runs and loads nothing


def page(title: str, says: str, content: Iterable[Markup], command: str) -> str:
    """Return a whole page; `says` is its sum in one sentence, `command` what made it."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Markup(GENERATOR),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="description", content=says),
        element("title", title),
        element("style", Markup(STYLESHEET)),
    )
    made = f"distrain {distrain_version()}, {time.strftime('%Y-%m-%d %H:%M')}"
    foot = element("footer", element("p", "Made by ", made, " with"), element("pre", command))
    body = element("body", element("main", *(Markup(f"{each}\n") for each in content if each), foot))
    return f'<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">{head}\n{body}</html>\n'


def section(title: str, *content: str) -> Markup:
    """Return a section with its heading; "" where it has no content."""
    return element("section", element("h2", title), *content) if any(content) else Markup("")


def paragraphs(sentences: Iterable[str], class_: str = "") -> Markup:
    """Return a paragraph for each sentence that is not empty."""
    return join(element("p", _with_fixed_units(each), class_=class_) for each in sentences if each)


def tiles(figures: Sequence[tuple[str, str, str]]) -> Markup:
    """Return the figures that a reader looks for first: (name, figure, note) each."""
    each = (element("div", element("dt", name), element("dd", figure, _small(note))) for name, figure, note in figures)
    return element("dl", *each, class_="tiles") if figures else Markup("")


def problem_list(problems: Sequence[Problem], noun: str, kind: str) -> Markup:
    """Return problems, each with its fix."""
    items = (element("li", element("b", noun), element("span", _with_fixed_units(str(each))), class_=kind) for each in problems)
    return element("ul", *items, class_="says") if problems else Markup("")


def table(
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Container[int] = (0,),
    *,
    strong: Container[int] = (),
    wrapped: Container[int] = (),
) -> Markup:
    """Return a table whose columns in `left` hold text, those in `wrapped` text that may break, and the others figures.

    A row of one cell stands across the table. Rows in `strong` stand out.
    """

    def kind(column: int) -> str:
        return "words" if column in wrapped else "text" if column in left else ""

    def line(number: int, row: Sequence[str]) -> Markup:
        if len(row) == 1 and len(heading) > 1:
            return element("tr", element("td", row[0], class_="gap", colspan=str(len(heading))))
        cells = (element("td", cell, class_=kind(at)) for at, cell in enumerate(row))
        return element("tr", *cells, class_="strong" if number in strong else "")

    head = element("tr", *(element("th", cell, class_="text" if kind(at) else "", scope="col") for at, cell in enumerate(heading)))
    body = element("tbody", *(line(number, row) for number, row in enumerate(rows)))
    return element("div", element("table", *([element("thead", head)] if any(heading) else []), body), class_="wide")


def fact_tables(tables: Iterable[Mapping[str, str]]) -> Markup:
    """Return tables of figures by name, side by side."""
    filled = [each for each in tables if each]
    each = (element("div", table(("", ""), ([fact, name] for name, fact in facts.items())), class_="facts") for facts in filled)
    return element("div", *each, class_="side") if filled else Markup("")


def sentence(text: str) -> str:
    """Return text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def figure(svg: str) -> Markup:
    """Return a drawing; "" where there is none."""
    return element("figure", Markup(svg.rstrip())) if svg else Markup("")


def swatch(colour: str) -> Markup:
    """Return a small box of a colour of a drawing."""
    return element("span", class_="swatch", style=f"background: {colour}")


def details(summary: str, text: str) -> Markup:
    """Return long text that opens at a click; "" where there is none."""
    return element("details", element("summary", summary), element("pre", text)) if text else Markup("")


def _with_fixed_units(text: str) -> Markup:
    """Return text with no line break between a figure and its unit."""
    return Markup(_BEFORE_UNIT.sub("&#160;", markup(text)))


def _small(note: str) -> Markup:
    return element("small", note) if note else Markup("")
