"""HTML elements as text that is well-formed XML too: all text is escaped, unless it is markup already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = ("meta", "br")  # elements without content


class Markup(str):
    """Text that is HTML already; any other text is escaped."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: str) -> Markup:
    """Return an element with its content; `class_` stands for the attribute class, and an attribute whose value is "" is left out."""
    words = [name, *(f'{key.strip("_").replace("_", "-")}="{markup(value)}"' for key, value in attributes.items() if value)]
    head = " ".join(words)
    return Markup(f"<{head}/>" if name in VOID else f"<{head}>{join(content)}</{name}>")


def join(content: Iterable[str]) -> Markup:
    """Return pieces of content one after the other, each escaped unless it is markup."""
    return Markup("".join(map(markup, content)))


def markup(text: str) -> Markup:
    """Return text as markup: escaped, with control characters as Python writes them, since XML has no place for them."""
    if isinstance(text, Markup):
        return text
    return Markup(escape("".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)))
