"""Edits YAML as text, which keeps the rest of it unchanged: adds comments to keys, replaces values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

Pairs = Iterator[tuple[str, Any, Any]]


def add_comments(text: str, comments: Mapping[str, str]) -> str:
    """Return YAML in block style with comments, which are given by dotted key. A comment goes to the end of the line where the value
    ends, or where a mapping or list begins."""
    places = []  # (index at which a line ends, comment)
    for key, name, value in _pairs(_node(text)):
        commented = value if isinstance(value, yaml.ScalarNode) or value.flow_style else name
        if key in comments and getattr(value, "style", None) not in ("|", ">"):
            end = text.find("\n", commented.end_mark.index)  # not end_mark.line: to YAML, U+0085 and U+2028 end a line too
            places.append((len(text) if end < 0 else end, comments[key]))
    for end, comment in sorted(places, reverse=True):
        text = f"{text[:end]}  # {comment}{text[end:]}"
    return text


def replace_values(text: str, values: Mapping[str, str]) -> str:
    """Return the text with new values for keys that it has, given by dotted key; a value with an anchor, or an alias, stays."""
    nodes = [(value, values[key]) for key, _, value in _pairs(_node(text)) if key in values and isinstance(value, yaml.ScalarNode)]
    for node, value in sorted(nodes, key=lambda pair: -pair[0].start_mark.index):
        start, end = node.start_mark.index, node.end_mark.index
        if text[start : start + 1] != "&":
            before, after = " " if text[start - 1] == ":" else "", "\n" if node.style in ("|", ">") else ""
            text = f"{text[:start]}{before}{scalar(value)}{after}{text[end:]}"
    return text


def scalar(value: str) -> str:
    """Return a string as YAML that reads back as that string in any position: plain if possible, else in double quotes."""
    try:
        is_plain = value.isprintable() and yaml.safe_load(f"{{a: [{value}]}}") == {"a": [value]}
    except (yaml.YAMLError, RecursionError, ValueError):
        is_plain = False
    return value if is_plain else str(yaml.safe_dump(value, default_style='"', width=float("inf"))).rstrip("\n")


def text_values(text: str) -> dict[str, str]:
    """Return every scalar of a YAML text, as it is written, by its dotted key."""
    return {key: value.value for key, _, value in _pairs(_node(text)) if isinstance(value, yaml.ScalarNode)}


def to_yaml(plain: Mapping[str, Any]) -> str:
    """Return plain data as YAML in block style, in its own order."""
    return str(yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True, width=120))


def _node(text: str) -> Any:
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _pairs(node: Any, at: str = "") -> Pairs:
    """Yield (dotted key, node of the key, node of the value) for a mapping and the mappings in it."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if value.start_mark.index >= name.end_mark.index:  # else the value is an alias
            key = f"{at}{name.value}"
            yield key, name, value
            yield from _pairs(value, f"{key}.")
