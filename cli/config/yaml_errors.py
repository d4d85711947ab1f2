"""Errors of YAML in plain words: where a file is wrong, what is wrong there, and how to write it."""

from __future__ import annotations

from yaml import Mark, MarkedYAMLError

# A part of PyYAML's message: whether the place is where the construct began, what is wrong there, and the fix
PLAIN_WORDS: tuple[tuple[str, bool, str, str], ...] = (
    ("'\\t'", False, "the line begins with a tab", "indent with spaces"),
    ("mapping values are not", False, "a second key in one value", "indent keys alike, a space after each colon; quote a text with `: `"),
    ("expected ':'", True, "this is not `KEY: VALUE`", "write a colon and a space after the key"),
    ("but found '-'", False, "a list entry stands where a key belongs", "indent the list below its key, or leave out `- `"),
    ("expected <block end>", False, "the line does not fit those above it", "indent all keys of a section alike, and none below a value"),
    ("unexpected end of stream", True, "a quote opens here and does not close", "close it"),
    ("but got '{'", False, "${...} inside { } or [ ]", "put it in quotes"),
    ("expected ',' or '}'", True, "a { opens here and does not close", "close it, and put commas between its keys"),
    ("expected ',' or ']'", True, "a [ opens here and does not close", "close it, and put commas between its entries"),
    ("but found ','", False, "nothing stands before this comma", "write an entry there, or leave the comma out"),
    ("content, but found ']'", False, "no [ opens here", "leave ] out, or put the text in quotes"),
    ("content, but found '}'", False, "no { opens here", "leave } out, or put the text in quotes"),
    ("cannot start any token", False, "no value begins with this character", "put the value in quotes"),
    ("found undefined alias", False, "* names an anchor, and none here is called so", "put a text that begins with * in quotes"),
    ("a constructor for the tag", False, "! begins a tag, and recipes have none", "put a text that begins with ! in quotes"),
    ("unknown escape character", False, "a backslash and no letter that YAML knows behind it", "put the text in single quotes"),
    ("expected chomping or indentation", False, "| or > begins a text on lines of its own", "put a text that begins with it in quotes"),
    ("found duplicate key", False, "", "keep one"),
    ("found another document", False, "a second document begins", "leave out the line ---"),
)  # fmt: skip


def yaml_problem(error: MarkedYAMLError, text: str) -> tuple[Mark | None, str, str]:
    """Return where a file of this text is not YAML, what is wrong, and a fix or an empty text."""
    found = error.problem or "this is not YAML"
    if (line := _line_problem(error, found, text)) is not None:
        return error.problem_mark, *line
    for words, is_at_begin, says, mend in PLAIN_WORDS:
        if words in found:
            begin = error.context_mark if is_at_begin else None
            return begin or error.problem_mark or error.context_mark, says or found, mend
    return error.problem_mark or error.context_mark, found, ""


def _line_problem(error: MarkedYAMLError, found: str, text: str) -> tuple[str, str] | None:
    """Return what is wrong in the middle of a line, and a fix; None where the line does not tell."""
    lines, at, begin = text.splitlines(), error.problem_mark, error.context_mark
    if at is None or at.line >= len(lines):
        return None
    before = lines[at.line][: at.column]
    if "but got '{'" in found:
        return (
            None
            if lines[at.line][: at.column + 1].endswith("${")
            else ("a comma is missing before this {", "put commas between the entries")
        )
    if "expected ',' or " in found and begin is not None and begin.line == at.line:
        return "a comma is missing before this", "put commas between the entries"
    if found.endswith(("content, but found ']'", "content, but found '}'")) and "flow node" in (error.context or ""):
        return "a [ or { before this is not closed", "close it"
    if "but found '<scalar>'" in found and before.rstrip().endswith(("'", '"')):
        return "text stands behind a quoted value", "put all of it inside the quotes"
    return None
