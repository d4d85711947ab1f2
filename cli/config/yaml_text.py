"""YAML edited as text, so that all else of it stays as it was written: comments added to keys, values replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

Pairs = Iterator[tuple[str, Any, Any]]


def add_comments(text: str, comments: Mapping[str, str]) -> str:
    """A text of mappings in block style with a comment for each key, by its dotted name, at the end of the line where its value ends,
    or where a mapping or list below it begins."""
    lines = text.split("\n")
    for key, name, value in _pairs(_node(text)):
        ends = value if isinstance(value, yaml.ScalarNode) or value.flow_style else name
        if key in comments and getattr(value, "style", None) not in ("|", ">"):
            lines[ends.end_mark.line] += f"  # {comments[key]}"
    return "\n".join(lines)


def replace_values(text: str, values: Mapping[str, str]) -> str:
    """The text with other values for keys, by their dotted names, where it says them; one that has an anchor or is an alias stays."""
    found = [(value, values[key]) for key, _, value in _pairs(_node(text)) if key in values and isinstance(value, yaml.ScalarNode)]
    for node, word in sorted(found, key=lambda pair: -pair[0].start_mark.index):
        start, end = node.start_mark.index, node.end_mark.index
        if text[start : start + 1] != "&":
            before, after = " " if text[start - 1] == ":" else "", "\n" if node.style in ("|", ">") else ""
            text = f"{text[:start]}{before}{scalar(word)}{after}{text[end:]}"
    return text


def scalar(word: str) -> str:
    """A text as YAML reads it back as that text, wherever it stands: plain where that does, else in double quotes."""
    try:
        plain = word.isprintable() and yaml.safe_load(f"{{a: [{word}]}}") == {"a": [word]}
    except (yaml.YAMLError, RecursionError, ValueError):
        plain = False
    return word if plain else str(yaml.safe_dump(word, default_style='"', width=float("inf"))).rstrip("\n")


def text_values(text: str) -> dict[str, str]:
    """Every text that a YAML file says itself, by its dotted key."""
    return {key: value.value for key, _, value in _pairs(_node(text)) if isinstance(value, yaml.ScalarNode)}


def _node(text: str) -> Any:
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _pairs(node: Any, at: str = "") -> Pairs:
    """Every key of a mapping and of the mappings in it: its dotted name, its node and its value's node."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if value.start_mark.index >= name.end_mark.index:  # else it is an alias of what stands before
            key = f"{at}{name.value}"
            yield key, name, value
            yield from _pairs(value, f"{key}.")
