"""Copies recipes and options of config groups. A copy is kept only if it composes to the same config as its source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, Self

from ...trainer.spec.problem import Problem, Unreadable, one_line
from ..arguments.command_name import command_name
from ..arguments.target_file import file_exists, target_file
from ..config.load import compose_config, compose_configs
from ..keys import config_files
from . import yaml_edit

STDOUT = "-"
RECIPE_PATHS = ("model.hf", "model.weights")  # paths that may be relative to the recipe
SAME_NAME = "name=same"  # the override that gives a recipe and its copy the same name
TRIAL_RECIPE = "quickstart"  # a recipe that composes with every option of every group


def copy_config(name: str, file: str, config_dir: Path | None) -> str:
    """Write the copy of `distrain cp NAME FILE` and return a line for the user; with FILE - return the text of the copy.

    Raises Unreadable, and OSError if the file can't be written.
    """
    group, _, option = name.partition("/")
    options = config_files.options(group, config_dir) if group in config_files.groups(config_dir) else {}
    if option in options:
        text = _read(options[option])
        return text.rstrip("\n") if file == STDOUT else _copy_option(group, text, recipe_file(file, option))
    if option and options and not os.path.exists(name):
        raise Unreadable([Problem(rule="option", says=f"no {group} {option}", mend=config_files.suggest_option(option, options))])
    source = config_files.recipe_path(name, config_dir)
    expected = compose_config(conf_argument(source), (SAME_NAME,), config_dir)
    text = _with_absolute_paths(_read(source), source)
    return text.rstrip("\n") if file == STDOUT else _copy_recipe(source, text, expected, recipe_file(file, source.stem), config_dir)


def _copy_recipe(source: Path, text: str, expected: Mapping[str, Any], target: Path, config_dir: Path | None) -> str:
    """Write a recipe under its new name: with its `name` replaced, else with one added at the end, else unchanged."""
    name, why = target.stem, ""
    renamed = yaml_edit.replace_values(text, {"name": name})
    for each in (*((renamed,) if renamed != text else ()), f"{text.rstrip()}\nname: {yaml_edit.scalar(name)}\n", text):
        with NewFile(target, each) as new_file:
            try:
                with_same_name, copy = compose_configs(conf_argument(target), ((SAME_NAME,), ()), config_dir)
            except Unreadable as error:
                why = f" ({error.problems[0].says})"
                continue
            if with_same_name == expected and (copy["name"] == name or each is text):
                new_file.keep = True
                old_name = "" if copy["name"] == name else f", whose runs are still named {copy['name']}"
                dirs = f" --config-dir {quote(str(config_dir))}" if config_dir else ""
                return one_line(f"wrote {target}{old_name}; next: {command_name()} plan conf={quote(conf_argument(target))}{dirs}")
    says = f"{target} would differ from {source}{why}"
    raise Unreadable([Problem(rule="copy", says=says, mend=f"copy it into the folder of {source}, which has the files that it names")])


def _copy_option(group: str, text: str, target: Path) -> str:
    """Write an option of a group. In a folder of the group's name, check that it composes from there."""
    name, parent = target.stem, target.parent.parent
    with NewFile(target, text) as new_file:
        if target.absolute().parent.name != group:
            new_file.keep = True
            return one_line(f"wrote {target}; to use it, move it to DIR/{group}/ and add {group}={name} --config-dir DIR")
        try:
            compose_config(TRIAL_RECIPE, (f"{group}={name}",), parent)
        except Unreadable as error:
            says = f"{target} can't be composed as {group}={name} ({error.problems[0].says})"
            raise Unreadable([Problem(rule="copy", says=says, mend="choose a name that its defaults do not use")]) from None
        new_file.keep = True
        return one_line(
            f"wrote {target}; next: {command_name()} plan conf={TRIAL_RECIPE} {group}={quote(name)} --config-dir {quote(str(parent))}"
        )


class NewFile:
    """A new file, removed at the end of the block unless `keep` is set. Raises Unreadable if the file exists, else OSError."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.keep = path, text, False

    def __enter__(self) -> Self:
        try:
            file = self.path.open("xb")
        except FileExistsError:
            raise file_exists(self.path) from None
        try:
            with file:
                file.write(self.text.encode())
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if not self.keep:
            self.path.unlink(missing_ok=True)


def recipe_file(file: str, stem: str) -> Path:
    """Return the YAML file to write; raises Unreadable as `target_file` does."""
    return target_file(file, stem, config_files.SUFFIXES)


def _read(source: Path) -> str:
    """Return the text of a YAML file with its line ends; raises Unreadable."""
    try:
        return source.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise Unreadable([Problem(rule="file", says=f"{source}: {why}")]) from None


def _with_absolute_paths(text: str, source: Path) -> str:
    """Return the text with absolute paths for files beside the source, so that a copy in another folder finds them."""
    values = yaml_edit.text_values(text)
    near = {
        key: source.parent / values[key] for key in RECIPE_PATHS if values.get(key) and not Path(values[key]).expanduser().is_absolute()
    }
    return yaml_edit.replace_values(text, {key: str(path.absolute()) for key, path in near.items() if path.exists()})


def conf_argument(path: Path) -> str:
    """Return a file as a value of `conf=`, which needs a folder before its name."""
    return str(path) if path.parent != Path() else f"./{path}"
