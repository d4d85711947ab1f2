"""Reads an HTML page strictly: well-formed XML that an HTML parser reads the same, that loads and runs nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

VOID = {"meta", "br"}  # elements that HTML ends by themselves
SVG = "{http://www.w3.org/2000/svg}"
XHTML = "{http://www.w3.org/1999/xhtml}"
NAMESPACES = (
    "http://www.w3.org/1999/xhtml",
    "http://www.w3.org/2000/svg",
)  # the only addresses on a page, and nothing is fetched from them


class PageElements(HTMLParser):
    """The elements of a page as an HTML parser finds them; fails on a tag that HTML would read in another way than XML."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.found.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Read an element without content."""
        assert tag in VOID or "svg" in self.open, f"<{tag}/> is open in HTML"
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Close the element that was opened last."""
        assert self.open.pop() == tag


class HtmlPage:
    """A page that was read: its text, headings, tables and drawings."""

    def __init__(self, text: str) -> None:
        assert text.startswith("<!DOCTYPE html>\n")
        self.root = ElementTree.fromstring(text)
        parser = PageElements()
        parser.feed(text)
        parser.close()
        assert not parser.open
        in_xml = [each.tag.rpartition("}")[2].lower() for each in self.root.iter()]
        assert [tag for tag, _ in parser.found] == in_xml
        assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base", "a", "image", "use"} & set(in_xml)
        for tag, attributes in parser.found:
            loading = {name for name in attributes if name.startswith("on") or name in ("src", "href", "srcset", "action", "xlink:href")}
            assert not loading, f"<{tag} {loading}>"
        addresses = set(re.findall(r"[a-z]+://[^\s\"'<>)]*|url\(|@import", text))
        assert addresses <= set(NAMESPACES), addresses
        policies = [
            attributes.get("content") for _, attributes in parser.found if attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]

    @classmethod
    def read(cls, file: Path) -> HtmlPage:
        """Read a file."""
        return cls(file.read_text())

    def all(self, tag: str) -> list[ElementTree.Element]:
        """All elements of HTML with a tag."""
        return list(self.root.iter(f"{XHTML}{tag}"))

    def texts(self, tag: str, class_: str = "") -> list[str]:
        """The text of each element with a tag, and with a class."""
        return [text_of(each) for each in self.all(tag) if class_ in each.get("class", "").split() or not class_]

    @property
    def body(self) -> str:
        """All the text of the page."""
        return text_of(self.all("body")[0])

    @property
    def tiles(self) -> dict[str, tuple[str, str]]:
        """The figure and the note of each tile."""
        found = {}
        for each in self.all("dl"):
            for name, figure in ((tile[0], tile[1]) for tile in each):
                notes = list(figure.iter(f"{XHTML}small"))
                found[text_of(name)] = (figure.text or "", text_of(notes[0]) if notes else "")
        return found

    def section(self, heading: str) -> ElementTree.Element:
        """The section whose heading begins with a text."""
        (found,) = (each for each in self.all("section") if text_of(each[0]).startswith(heading))
        return found

    def tables(self, heading: str) -> list[list[list[str]]]:
        """The rows of each table of a section, with its heading where it has one."""
        tables = self.section(heading).iter(f"{XHTML}table")
        return [[[text_of(cell) for cell in row] for row in each.iter(f"{XHTML}tr")] for each in tables]

    def drawing(self, heading: str) -> ElementTree.Element:
        """The drawing of a section."""
        (found,) = self.section(heading).iter(f"{SVG}svg")
        return found


def text_of(element: ElementTree.Element) -> str:
    """All text in an element; a no-break space is a space."""
    return "".join(element.itertext()).replace("\xa0", " ")
