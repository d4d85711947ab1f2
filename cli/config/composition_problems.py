"""Problems of files that can't be read or composed, from errors of YAML, Hydra and OmegaConf."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...trainer.spec.problem import Problem, Unreadable, no_key_problem, suggest_name
from ...trainer.system.regular_file import why_unreadable
from ..keys import config_files, synonyms
from ..keys.keys import config_keys, unknown_key_problem
from .other_trainers import leaves

REQUIRED_SECTIONS = ("model", "cluster", "train")
DEFAULTS_ENTRY = {  # the key that chooses an option of a section in a recipe's defaults
    **{section: section for section in (*REQUIRED_SECTIONS, "parallel", "optim", "data", "log", "checkpoint", "launch")},
    "cluster.device": "override /device@cluster.device",
}
EXAMPLES = {"cluster": "cluster=dgx_h100, or cluster=local for this machine"}
LORA_TARGETS, ALL_TARGETS = "model.lora.targets", ("all-linear", "all", ["all-linear"], ["all"])  # PEFT's and torchtune's words
COMPARED_SIZES = ("family", "layers", "hidden", "heads", "vocab")


def composition_problem(error: Exception, file: Path, config_dir: Path | None, primary: str) -> Problem:
    """Return the problem of a recipe or of a file that it names; Hydra knows the recipe as `primary`."""
    if isinstance(error, Unreadable):
        return error.problems[0]
    if isinstance(error, RecursionError):
        return Problem(rule="yaml", says=f"{file} contains itself", mend="break the loop of defaults, anchors or ${...}")
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
        return Problem(rule="yaml", says=f"{where}: {getattr(error, 'problem', None) or 'this is not YAML'}")
    if isinstance(error, FileNotFoundError) and _is_current_folder_gone():
        return Problem(rule="file", says="the current folder was removed", mend="change to one that exists")
    if isinstance(error, OSError) and error.strerror:
        return Problem(rule="file", says=f"{file}: {error.strerror}")
    if isinstance(error, UnicodeDecodeError):
        return Problem(rule="yaml", says=f"{file} is not valid UTF-8", mend="save it as UTF-8")
    text = str(error) or str(error.__cause__ or type(error).__name__)
    missed = re.search(r"Could not (?:find|load) '([^']+)'", text)
    if not missed:
        return _hydra_problem(text, file, primary)
    named_in = re.search(r"In '([^']+)'", text)
    return _default_inside(missed[1], file, config_dir, named_in[1] if named_in else "") or _missing_default(missed[1], file, config_dir)


def _is_current_folder_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _default_inside(name: str, file: Path, config_dir: Path | None, named_in: str) -> Problem | None:
    """Return the problem of a group that is looked for inside another, as the defaults of the option `named_in` are, unless they begin with
    a slash; None where `name` is not of such a group."""
    groups = config_files.groups(config_dir)
    group, _, option = name.rpartition("/")
    within, _, inner = group.rpartition("/")
    if within not in groups or inner not in groups:
        return None
    parent_group, _, parent = named_in.rpartition("/")
    if parent_group != within:  # the recipe names it
        entry = DEFAULTS_ENTRY.get(f"{within}.{inner}", inner)
        return Problem(rule="option", says=f"{file}: there is no group {group}", mend=f"write `- {entry}: {option}`")
    own = config_files.options(within, config_dir).get(parent, file)
    says = f"{own}: its defaults look for {option} in a group {group}, which does not exist"
    if inner == within:
        return Problem(rule="option", says=says, mend=f"write `- {option}`")
    if any(key.startswith(f"{within}.{inner}.") for key in config_keys()):
        return Problem(rule="option", says=says, mend=f"write `- /{inner}@{inner}: {option}`")
    return Problem(rule="option", says=says, mend=f"choose {inner}={option} in the recipe")


def _missing_default(name: str, file: Path, config_dir: Path | None) -> Problem:
    group, _, option = name.rpartition("/")
    groups = config_files.groups(config_dir)
    if group and group not in groups:
        return Problem(
            rule="option", says=f"{file}: its defaults name group {group}, which does not exist", mend=suggest_name(group, groups)
        )
    known = config_files.options(group, config_dir) if group else config_files.recipes(config_dir)
    if option in known:
        return Problem(rule="file", says=f"{known[option]} can't be read: {why_unreadable(known[option])}")
    says = f"{file}: its defaults name {group or 'recipe'} {option}, which does not exist"
    return Problem(rule="option", says=says, mend=suggest_name(option, known))


def _hydra_problem(text: str, file: Path, primary: str) -> Problem:
    lines = text.replace(f"In '{primary}': ", "").replace(primary, file.stem).splitlines()
    if twice := re.match(r"(?s).*Multiple values for (\S+)\. To override a value use 'override ([^']+)'", text):
        mend = f"keep one, or write `- override {twice[2]}` where another recipe chooses it"
        return Problem(rule="compose", says=f"{file}: {twice[1]} is chosen twice", mend=mend)
    first = next((line.strip() for line in lines if line.strip() and not line.rstrip().endswith(":")), lines[0])
    return Problem(rule="compose", says=f"{file} can't be composed", mend=first.rstrip("."))


def check_is_recipe(recipe: Mapping[Any, Any], file: Path, known: Iterable[str], groups: Collection[str]) -> None:
    """Raise Unreadable if all keys of a file are those of one section that has a group of options. `known`: every key of a run."""
    names, keys = set(map(str, recipe)), [key.split(".") for key in known]
    if "defaults" in names or names <= {key[0] for key in keys}:
        return
    for section in dict.fromkeys(tuple(key[:end]) for key in keys for end in range(1, len(key)) if key[end - 1] in groups):
        if names <= {key[len(section)] for key in keys if tuple(key[: len(section)]) == section and len(key) > len(section)}:
            says = f"{file} holds keys of {'.'.join(section)} alone: it is an option, not a recipe"
            raise Unreadable([Problem(rule="conf", says=says, mend=f"name it as {section[-1]}=NAME, beside conf=RECIPE")])


def check_sizes_agree(sizes: Mapping[str, object], model: Mapping[Any, Any], file: Path) -> None:
    """Raise Unreadable if a model composed from several files differs in size from its config.json."""
    for key in COMPARED_SIZES:
        if key in sizes and model.get(key, sizes[key]) != sizes[key]:
            says = f"{file}: model.hf has {key}={sizes[key]}, but another file sets {key}={model[key]}"
            raise Unreadable([Problem(rule="hf", says=says, mend="set model.hf in the recipe itself")])


def improve_problems(problem: Problem, config: Mapping[str, Any], config_dir: Path | None = None) -> list[Problem]:
    """Return a problem of a composed config with a better fix if there is one: for a key of another trainer, of which a section is one
    problem for each key in it, or a whole section. `config_dir` is the user's folder of options."""
    if not problem.key:
        return [_improve_problem(problem, config, config_dir)]
    key = problem.key
    value = _value_at(config, key)
    inside = leaves(value, f"{key}.") if isinstance(value, Mapping) else ()
    answers = {each: synonyms.synonym_problem(each, one) for each, one in inside}
    if any(answers.values()):
        return [found or no_key_problem(each, "nothing here means it: leave it out") for each, found in answers.items()]
    return [
        synonyms.synonym_problem(key, value) or (unknown_key_problem(key, config_keys()) if "known: " in problem.mend else None) or problem
    ]


def _improve_problem(problem: Problem, config: Mapping[str, Any], config_dir: Path | None) -> Problem:
    if problem.rule == "type" and _value_at(config, LORA_TARGETS) in ALL_TARGETS and problem.says.startswith(f"{LORA_TARGETS}="):
        return replace(problem, mend=f"leave it out: {LORA_TARGETS}=null, the default, is all linear layers but routers")
    section, _, value = problem.says.partition(" is not a mapping of ")[0].partition("=")
    is_text = value and " is not a mapping of " in problem.says and isinstance(_value_at(config, section), str)
    if problem.rule == "type" and is_text and section in DEFAULTS_ENTRY:
        return _option_as_text_problem(section, value, config_dir)
    return _missing_section(problem)


def _option_as_text_problem(section: str, value: str, config_dir: Path | None) -> Problem:
    """Return the problem of a section whose value is a text: the name of an option, or nearly one."""
    group = section.rpartition(".")[2]
    options = config_files.options(group, config_dir)
    entry = f"- {DEFAULTS_ENTRY[section]}"
    if value in options:
        says = f"{section}={value} is not a mapping of keys"
        return Problem(rule="type", says=says, mend=f"to choose an option, write `{entry}: {value}` in the recipe's defaults instead")
    hint = config_files.suggest_option(value, options)
    stop = "" if hint.endswith("?") else "."
    return Problem(
        rule="type",
        says=f"{section}={value} names no {group}",
        mend=f"{hint}{stop} Write `{entry}: NAME` in the recipe's defaults instead",
    )


def device_name_problems(
    config: Mapping[str, Any], options: Mapping[str, Path], read_device: Callable[[str], Mapping[str, Any]]
) -> Iterator[Problem]:
    """Yield a problem if a device has the name of one option and the figures of another; `read_device` reads an option."""
    name, device = _value_at(config, "cluster.device.name"), _value_at(config, "cluster.device")
    if not isinstance(name, str) or name not in options:
        return
    option = read_device(name)
    if option.get("name") != name and any(device.get(key) != option.get(key) for key in ("memory", "bandwidth", "peak")):
        says = f"cluster.device.name={name} changes only the name of the device, not its figures"
        yield Problem(rule="device", says=says, mend=f"write device={name}")


def _value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in a composed config; None if it is not set."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _missing_section(problem: Problem) -> Problem:
    """Return the problem of a missing section with its fix: to choose an option of its group."""
    section = problem.says.removesuffix(" is not set")
    if problem.rule != "missing" or section not in (*REQUIRED_SECTIONS, "cluster.device"):
        return problem
    group = section.partition(".")[0]
    example = f", as {EXAMPLES[group]}" if group in EXAMPLES else ""
    return Problem(rule="missing", says=problem.says, mend=f"choose {group}=NAME{example}; `distrain ls {group}` lists the names")
