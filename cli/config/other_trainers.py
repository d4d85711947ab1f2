"""Answers a file that is given as a recipe and is none: a Hugging Face config.json, or a config of another trainer (DeepSpeed's JSON,
torchtitan's TOML, YAML of axolotl, NeMo, nanotron, OLMo or accelerate), key by key."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...trainer.spec.problem import Problem, Unreadable, no_key_problem
from ...trainer.system.regular_file import read_plain
from ..keys import synonyms
from ..keys.answer_summary import nothing_means
from ..keys.config_files import MOST_BYTES
from ..keys.keys import write_instead

LEAST_KNOWN = 2  # keys of other trainers in a file that is no recipe; with one it is a recipe with a mistake
RECIPE_IS_YAML = "a recipe is YAML: `distrain cp quickstart mine.yaml` writes one"
HF_CONFIG = ("model_type", "architectures")  # keys of which a config.json of a Hugging Face model has one
COPY = "`distrain cp quickstart mine.yaml` writes a recipe to set them in"


def check_is_ours(config: Mapping[Any, Any], file: Path, known: Collection[str], problems: Iterable[Problem] = ()) -> None:
    """Raise Unreadable if a file is a model's config.json, or, with an answer to each key, if it is one of another trainer: without
    `defaults`, half or more of its sections or keys unknown here and unlike ours, and several of them known there. `known`: every key of
    a run; `problems`: of its values."""
    sections = {key.partition(".")[0] for key in known}
    strange = [name for name in config if str(name) not in sections and not _is_misspelt(str(name), sections)]
    if "defaults" in config or len(strange) < len(config) / 2:
        return
    if set(HF_CONFIG) & set(config) and file.suffix == ".json":
        mend = f"write model.hf={file} beside a recipe, which has the rest: `distrain ls` lists them"
        raise Unreadable([Problem(rule="conf", says=f"{file} is the config.json of a Hugging Face model, not a recipe", mend=mend)])
    answers = {key: _answer(key, value, known) for key, value in leaves(config) if key not in known}
    if sum(bool(answer and answer.mend) and synonyms.find_synonym(key) is not None for key, answer in answers.items()) >= LEAST_KNOWN:
        raise Unreadable([*_problems(answers, file), *problems])


def _is_misspelt(name: str, sections: Collection[str]) -> bool:
    """Whether a name is that of a section but for a letter or two; `optimizer` and `parallelism` are names of other trainers."""
    return any(abs(len(name) - len(each)) <= 1 for each in get_close_matches(name, sections, cutoff=0.8))


def read_toml(file: Path) -> dict[str, Any]:
    """Return the keys of a TOML file, which is no recipe but may be torchtitan's config; raises Unreadable where it can't be read."""
    try:
        return tomllib.loads(read_plain(file, MOST_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Unreadable([Problem(rule="yaml", says=f"{file} can't be read as TOML: {why}", mend=RECIPE_IS_YAML)]) from None


def toml_problem(file: Path) -> Problem:
    """Return the problem of a TOML file of which no key says whose it is."""
    return Problem(rule="yaml", says=f"{file} is TOML", mend=RECIPE_IS_YAML)


def leaves(config: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything that a file turns on or sets; not what it leaves empty, nor sections with
    `enabled: false`."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            if value.get("enabled") is not False:
                yield from leaves(value, f"{at}{name}.")
        elif value not in (None, "", []):
            yield f"{at}{name}", value


def _answer(key: str, value: Any, known: Collection[str]) -> Problem | None:
    """Return the problem of a key of another trainer, without a fix if nothing here means it; None if it is off and needs nothing."""
    if key.startswith("speed_monitor."):  # of OLMo: figures of the machine
        return no_key_problem(key, "")
    if key == "optim" or key.endswith("optim.name"):  # the Trainer's and NeMo's; their names of optimizers are not ours
        key = "optimizer"
    row = synonyms.find_synonym(key)
    if row is not None and not (value is False and row.values is not None and "false" not in row.values):
        return synonyms.synonym_problem(key, value)
    parts = key.split(".")
    ours = next((found for at in range(len(parts) - 1) if (found := ".".join(parts[at:])) in known), "")
    same = [each for each in known if each.rpartition(".")[2] == parts[-1]]
    if (ours or (len(same) == 1 and value is not False)) and (value_of_ours := synonyms.value_here(ours or same[0], value)):
        return write_instead(key, ours or same[0], value_of_ours)
    return None if value is False else no_key_problem(key, "")


def _problems(answers: Mapping[str, Problem | None], file: Path) -> Iterator[Problem]:
    yield Problem(rule="conf", says=f"{file} is a config of another trainer, not a recipe: its keys here are below", mend=COPY)
    keys: dict[str, list[str]] = {}  # by what to write for them
    settings: dict[str, tuple[str, ...]] = {}
    for key, answer in answers.items():
        if answer:
            keys.setdefault(answer.mend, []).append(key)
            settings[answer.mend] = answer.settings
    without = keys.pop("", [])
    yield from (
        Problem(rule="unknown", says=f"no key {', '.join(names)}", mend=mend, settings=settings[mend]) for mend, names in keys.items()
    )
    if without:
        yield nothing_means(without)
