"""Why a file can't be read or composed: the errors of YAML, Hydra and OmegaConf in our words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...trainer.spec.plain_file import why_unreadable
from ...trainer.spec.problem import Problem, Unreadable, suggest_name
from . import library, synonyms

SECTIONS = ("model", "cluster", "parallel", "train")
DEFAULTS_ENTRY = {  # how an option of a section is chosen in a recipe's defaults
    **{section: section for section in (*SECTIONS, "optim", "data", "log", "checkpoint", "launch")},
    "cluster.device": "override /device@cluster.device",
}
COMPARED_SIZES = ("family", "layers", "hidden", "heads", "vocab")


def composition_problem(error: Exception, file: Path, config_dir: Path | None, primary: str) -> Problem:
    """What is wrong with a recipe or with what it names; Hydra knows the recipe as `primary`."""
    if isinstance(error, Unreadable):
        return error.problems[0]
    if isinstance(error, RecursionError):
        return Problem(rule="yaml", says=f"{file} contains itself", mend="break the loop of defaults, anchors or ${...}")
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
        return Problem(rule="yaml", says=f"{where}: {getattr(error, 'problem', None) or 'this is no YAML'}")
    if isinstance(error, OSError) and error.strerror:
        return Problem(rule="file", says=f"{file}: {error.strerror}")
    if isinstance(error, UnicodeDecodeError):
        return Problem(rule="yaml", says=f"{file} is not text in UTF-8")
    text = str(error) or str(error.__cause__ or type(error).__name__)
    missed = re.search(r"Could not (?:find|load) '([^']+)'", text)
    return _missing_default(missed[1], file, config_dir) if missed else _hydra_problem(text, file, primary)


def _missing_default(name: str, file: Path, config_dir: Path | None) -> Problem:
    group, _, option = name.rpartition("/")
    groups = library.groups(config_dir)
    if group and group not in groups:
        return Problem(rule="option", says=f"{file}: its defaults name group {group}, which is not there", mend=suggest_name(group, groups))
    known = library.options(group, config_dir) if group else library.recipes(config_dir)
    if option in known:
        return Problem(rule="file", says=f"{known[option]} can't be read: {why_unreadable(known[option])}")
    says = f"{file}: its defaults name {group or 'recipe'} {option}, which is not there"
    return Problem(rule="option", says=says, mend=suggest_name(option, known))


def _hydra_problem(text: str, file: Path, primary: str) -> Problem:
    lines = text.replace(f"In '{primary}': ", "").replace(primary, file.stem).splitlines()
    first = next((line.strip() for line in lines if line.strip() and not line.rstrip().endswith(":")), lines[0])
    return Problem(rule="compose", says=f"{file} can't be composed", mend=first.rstrip("."))


def check_sizes_agree(sizes: Mapping[str, object], model: Mapping[Any, Any], file: Path) -> None:
    """Raise Unreadable where a config.json and a model that was composed from several files are not the same one."""
    for key in COMPARED_SIZES:
        if key in sizes and model.get(key, sizes[key]) != sizes[key]:
            says = f"{file}: model.hf says {key}={sizes[key]}, and another file says {key}={model[key]}"
            raise Unreadable([Problem(rule="hf", says=says, mend="say model.hf in the recipe itself")])


def improve_problem(problem: Problem, words: Mapping[str, Any]) -> Problem:
    """A problem with composed words, where more can be said of it: a word of another trainer, a section that is to be chosen."""
    if problem.rule == "unknown":
        key = problem.says.removeprefix("no key ")
        return synonyms.synonym_problem(key, _value_at(words, key)) or problem
    section, _, value = problem.says.partition(" is not a mapping of ")[0].partition("=")
    if problem.rule == "type" and value and " is not a mapping of " in problem.says and isinstance(_value_at(words, section), str):
        says = f"{section}={value} is not a mapping of keys"
        if section in DEFAULTS_ENTRY:
            return Problem(
                rule="type", says=says, mend=f"an option is chosen in a recipe's defaults, as `- {DEFAULTS_ENTRY[section]}: {value}`"
            )
    return _missing_section(problem)


def device_name_problems(
    words: Mapping[str, Any], options: Mapping[str, Path], device: Callable[[str], Mapping[str, Any]]
) -> Iterator[Problem]:
    """Say that a device has the name of an option of group device and the figures of another; `device` reads an option."""
    name, mine = _value_at(words, "cluster.device.name"), _value_at(words, "cluster.device")
    if not isinstance(name, str) or name not in options:
        return
    its = device(name)
    if its.get("name") != name and any(mine.get(key) != its.get(key) for key in ("memory", "bandwidth", "peak")):
        says = f"cluster.device.name={name} is a name alone: the figures are another device's"
        yield Problem(rule="device", says=says, mend=f"write device={name}")


def _value_at(words: Mapping[str, Any], key: str) -> Any:
    """The value of a key in composed words."""
    found: Any = words
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _missing_section(problem: Problem) -> Problem:
    """A whole section that is missing is mended by choosing an option of its group."""
    section = problem.says.removesuffix(" is not set")
    if problem.rule != "missing" or section not in SECTIONS:
        return problem
    return Problem(rule="missing", says=problem.says, mend=f"choose {section}=NAME; `distrain ls {section}` lists them")
