"""Keys, options and recipes that are about a word: in their names, meanings, units or descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import config_files
from .key_help import KeyHelp, key_fields, key_help

SHORTEST_WORD = 2  # letters


def keys_about(word: str) -> list[KeyHelp]:
    """Return the keys whose name, meaning, unit or choices have a word that begins so: first those whose name has, each in the order of
    the data classes."""
    found = [row for row in _all_keys() if _has_word(word, (row.key, row.says, row.unit, row.null, *row.choices))]
    return sorted(found, key=lambda row: not _has_word(word, (row.key,)))


def keys_with_part(name: str) -> list[KeyHelp]:
    """Return the keys of which a part between dots is `name`, in the order of the data classes."""
    return [row for row in _all_keys() if name in row.key.split(".")]


def _all_keys() -> list[KeyHelp]:
    return [row for name in [key for key, _, _ in key_fields()] for row in key_help(name) if row.key == name]


def options_about(word: str, config_dir: Path | None) -> dict[str, Path]:
    """Return the recipes and the options of every group whose name or description has a word that begins so, as a command line chooses
    them: `conf=NAME`, `GROUP=NAME`."""
    return {name: file for name, file in _choices(config_dir) if _has_word(word, (name, config_files.first_comment(file)))}


def _choices(config_dir: Path | None) -> Iterator[tuple[str, Path]]:
    yield from ((f"conf={name}", file) for name, file in config_files.recipes(config_dir).items())
    for group in config_files.groups(config_dir):
        yield from ((f"{group}={name}", file) for name, file in config_files.options(group, config_dir).items())


def _has_word(word: str, texts: Iterable[str]) -> bool:
    """Whether a word of the texts begins with `word`, in any case and with any separators between its letters: huggingface finds
    "Hugging Face"."""
    letters = re.findall(r"[^\W_]", word.lower())
    if len(letters) < SHORTEST_WORD:
        return False
    pattern = re.compile(r"(?<![^\W_])" + r"[\W_]?".join(map(re.escape, letters)))
    return any(pattern.search(text.lower()) for text in texts)
