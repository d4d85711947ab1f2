"""`distrain ls`: recipes and config groups, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..trainer.spec.problem import Problem, Unreadable, nearest
from . import library
from .text import one_line, width


def everything(config_dir: Path | None) -> str:
    """Every recipe with what it is, and every group with its options."""
    groups = {group: ", ".join(library.options(group, config_dir)) for group in library.groups(config_dir)}
    recipes = _about(library.recipes(config_dir))
    return "\n".join(["Recipes (conf=NAME)", *_lines(recipes), "", "Groups (GROUP=NAME; `distrain ls GROUP` says more)", *_lines(groups)])


def one_group(group: str, config_dir: Path | None) -> str:
    """Every option of a group with what it is; raises Unreadable where there is no such group."""
    groups = library.groups(config_dir)
    if group not in (*groups, "recipes"):
        raise Unreadable([Problem(rule="group", says=f"no group {group}", mend=nearest(group, (*groups, "recipes")))])
    files = library.recipes(config_dir) if group == "recipes" else library.options(group, config_dir)
    return "\n".join(line.strip() for line in _lines(_about(files)))


def _about(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: library.about(file) for name, file in files.items()}


def _lines(rows: Mapping[str, str]) -> list[str]:
    widest = max(map(len, rows), default=0)
    return [_cut(f"  {name.ljust(widest)}  {one_line(words)}".rstrip()) for name, words in rows.items()]


def _cut(line: str) -> str:
    return line if len(line) <= width() else f"{line[: width() - 4].rstrip(' ,')} ..."
