"""Answers a config file of another trainer (DeepSpeed's JSON, torchtitan's TOML, YAML of axolotl or NeMo) given as a recipe, key by key."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.read import value_text
from ...trainer.system.regular_file import read_plain
from ..keys import synonyms
from ..keys.config_files import MOST_BYTES

LEAST_KNOWN = 2  # keys of other trainers in a file that is no recipe; with one it is a recipe with a mistake
COPY = "`distrain cp quickstart mine.yaml` writes a recipe to set them in"


def check_is_ours(config: Mapping[Any, Any], file: Path, known: Collection[str]) -> None:
    """Raise Unreadable with an answer to each key if a file is one of another trainer: without `defaults`, half or more of its sections or
    keys unknown here, and several of them known there. `known`: every key of a run."""
    sections = {key.partition(".")[0] for key in known}
    strange = [name for name in config if str(name) not in sections]
    if "defaults" in config or len(strange) < len(config) / 2:
        return
    answers = {key: _answer(key, value, known) for key, value in leaves(config) if key not in known}
    if sum(bool(answer) for answer in answers.values()) >= LEAST_KNOWN:
        raise Unreadable(_problems(answers, file))


def read_toml(file: Path) -> dict[str, Any]:
    """Return the keys of a TOML file, which is no recipe but may be torchtitan's config; raises Unreadable where it can't be read."""
    try:
        return tomllib.loads(read_plain(file, MOST_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}


def toml_problem(file: Path) -> Problem:
    """Return the problem of a TOML file of which no key says whose it is."""
    return Problem(rule="yaml", says=f"{file} is TOML", mend="a recipe is YAML: `distrain cp quickstart mine.yaml` writes one")


def leaves(config: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything that a file turns on or sets; not what it leaves empty, nor sections with
    `enabled: false`."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            if value.get("enabled") is not False:
                yield from leaves(value, f"{at}{name}.")
        elif value not in (None, "", []):
            yield f"{at}{name}", value


def _answer(key: str, value: Any, known: Collection[str]) -> str | None:
    """Return what to write for a key of another trainer; None if nothing here means it, "" if it is off and needs nothing."""
    if key == "optim" or key.endswith("optim.name"):  # the Trainer's and NeMo's; their names of optimizers are not ours
        key = "optimizer"
    row = synonyms.find_synonym(key)
    if row is not None and not (value is False and row.values is not None and "false" not in row.values):
        problem = synonyms.synonym_problem(key, value)
        return problem.mend if problem else None
    parts = key.split(".")
    ours = next((found for at in range(len(parts) - 1) if (found := ".".join(parts[at:])) in known), "")
    same = [each for each in known if each.rpartition(".")[2] == parts[-1]]
    if ours or len(same) == 1:
        return f"write {ours or same[0]}={value_text(value)}"
    return "" if value is False else None


def _problems(answers: Mapping[str, str | None], file: Path) -> Iterator[Problem]:
    yield Problem(rule="conf", says=f"{file} is a config of another trainer, not a recipe: its keys here are below", mend=COPY)
    yield from (Problem(rule="unknown", says=f"no key {key}", mend=answer) for key, answer in answers.items() if answer)
    if without := [key for key, answer in answers.items() if answer is None]:
        yield Problem(rule="unknown", says=f"nothing here means {', '.join(without)}", mend="leave them out")
