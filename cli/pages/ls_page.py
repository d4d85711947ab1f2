"""`distrain ls`: recipes, config groups and keys, as lines or as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...trainer.spec.problem import Problem, Unreadable, nearest
from ..config import library
from ..verbs.ls import RUNS
from .format import look, one_line, width

RECIPES = "recipes"
SECTIONS = {"device": "cluster.device"}  # where the keys of a group are, if not under its own name


def everything(config_dir: Path | None) -> str:
    """Every recipe with what it is, and every group with its options."""
    groups = {group: ", ".join(library.options(group, config_dir)) for group in library.groups(config_dir)}
    recipes = _about(library.recipes(config_dir))
    return "\n".join(["Recipes (conf=NAME)", *_lines(recipes), "", "Groups (GROUP=NAME; `distrain ls GROUP` says more)", *_lines(groups)])


def named(word: str, config_dir: Path | None) -> str:
    """What a word of `ls` names: a group's options, then keys; raises Unreadable where it names nothing."""
    from ..config import key_help

    files, keys = _found(word, config_dir)
    options = [line.strip() for line in _lines(_about(files))]
    rows = key_help.lines(keys, look())
    return "\n".join([*options, *(["", f"Keys of {word}"] if files and rows else []), *rows])


def document(word: str | None, config_dir: Path | None) -> dict[str, Any]:
    """The same as plain data."""
    from ..config import key_help

    if word is None:
        groups = {group: list(library.options(group, config_dir)) for group in library.groups(config_dir)}
        return {"version": 1, "recipes": _about(library.recipes(config_dir)), "groups": groups}
    files, keys = _found(word, config_dir)
    return {"version": 1, "options": _about(files), "keys": key_help.document(keys)}


def json_text(what: object) -> str:
    """Plain data as one JSON document."""
    import json

    return json.dumps(what, indent=2)


def _found(word: str, config_dir: Path | None) -> tuple[Mapping[str, Path], list[Any]]:
    """The options and the keys that a word names, else what has it as its name; raises Unreadable where there is nothing."""
    from ..config.key_help import key_help

    if word == RECIPES:
        return library.recipes(config_dir), []
    groups = library.groups(config_dir)
    files = library.options(word, config_dir) if word in groups else {}
    keys = key_help(SECTIONS.get(word, word))
    found = files or ({} if keys else _by_name(word, groups, config_dir))
    if not found and not keys:
        raise Unreadable([_unknown(word, groups)])
    return found, keys


def _by_name(word: str, groups: tuple[str, ...], config_dir: Path | None) -> dict[str, Path]:
    """A recipe, and every option of a group, of this name: written as they are chosen."""
    found = {f"conf={name}": file for name, file in library.recipes(config_dir).items() if name == word}
    for group in groups:
        found |= {f"{group}={name}": file for name, file in library.options(group, config_dir).items() if name == word}
    return found


def _unknown(word: str, groups: tuple[str, ...]) -> Problem:
    """That a word names nothing, and what is near: a group, else a key."""
    from ..config.key_help import sections
    from ..config.keys import keys, unknown

    words = (*groups, RECIPES, RUNS)
    near = nearest(word, words)
    if "." not in word and near.startswith("did"):
        return Problem(rule="group", says=f"no group {word}", mend=near)
    wrong = unknown(word, keys())
    if wrong is not None and wrong.mend.startswith("did"):
        return wrong
    known = ", ".join([*words, *sorted(each for each in sections() if "." not in each and each not in words)])
    return Problem(rule="group", says=f"no group or key {word}", mend=f"known: {known}, and the keys in them")


def _about(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: library.about(file) for name, file in files.items()}


def _lines(rows: Mapping[str, str]) -> list[str]:
    widest = max(map(len, rows), default=0)
    return [_cut(f"  {name.ljust(widest)}  {one_line(words)}".rstrip()) for name, words in rows.items()]


def _cut(line: str) -> str:
    return line if len(line) <= width() else f"{line[: width() - 4].rstrip(' ,')} ..."
