"""Writes the best layout of a search as a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from ...trainer.plan.search.search_result import Answer
from ...trainer.spec.numbers.as_text import count_text, seconds_text, size_text
from ...trainer.spec.problem import one_line
from ..arguments.command_name import command_name
from . import yaml_edit
from .config_text import config_text
from .recipe_copy import NewFile, conf_argument, recipe_file


def write_recipe(file: str, conf: str, overrides: Sequence[str], answer: Answer, config_dir: Path | None) -> str:
    """Write a recipe with every key, and return a line for the user; raises Unreadable if the file exists, else OSError."""
    target = recipe_file(file, answer.name)
    name = yaml_edit.scalar(target.stem)
    text = config_text(conf, (*overrides, f"name={name}"), config_dir, comments=True)
    head = one_line(
        f"# the best of {answer.legal:,} layouts of {answer.name} on {answer.nodes} x {answer.gpus} {answer.device}: {_figures(answer)}"
    )
    with NewFile(target, f"{head}\n{text}\n") as new_file:
        new_file.keep = True
    return one_line(f"wrote {target}; next: {command_name()} fit conf={quote(conf_argument(target))}")


def _figures(answer: Answer) -> str:
    best = answer.rows[0]
    memory = f"{size_text(best.memory)} a device"
    if best.step is None or best.tokens_per_second is None:
        return memory
    return f"{memory}, {seconds_text(best.step)} a step, {count_text(best.tokens_per_second)} tokens/s as planned"
