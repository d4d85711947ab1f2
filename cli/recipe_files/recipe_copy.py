"""Copies recipes and options of config groups. A copy is kept only if it composes to the same config as its source."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, Self

from ...trainer.spec.problem import Problem, Unreadable, one_line
from ..arguments.command_name import command_name
from ..config.load import compose_config, compose_configs
from ..keys import library
from . import yaml_edit

STDOUT = "-"
RECIPE_PATHS = ("model.hf", "model.weights")  # paths that may be relative to the recipe
_VERSION = re.compile(r"\.v?[0-9]")  # the end of mine.v2 or llama3.1, which is no suffix
SAME_NAME = "name=same"  # the override that gives a recipe and its copy the same name
TRIAL_RECIPE = "quickstart"  # a recipe that composes with every option of every group


def copy_config(name: str, file: str, config_dir: Path | None) -> str:
    """Write the copy of `distrain cp NAME FILE` and return a line for the user; with FILE - return the text of the copy.

    Raises Unreadable, and OSError if the file can't be written.
    """
    group, _, option = name.partition("/")
    options = library.options(group, config_dir) if group in library.groups(config_dir) else {}
    if option in options:
        text = _read(options[option])
        return text.rstrip("\n") if file == STDOUT else _copy_option(group, text, target_file(file, option), config_dir)
    if option and options and not os.path.exists(name):
        raise Unreadable([Problem(rule="option", says=f"no {group} {option}", mend=library.suggest_option(option, options))])
    source = library.recipe_path(name, config_dir)
    expected = compose_config(conf_argument(source), (SAME_NAME,), config_dir)
    text = _with_absolute_paths(_read(source), source)
    return text.rstrip("\n") if file == STDOUT else _copy_recipe(source, text, expected, target_file(file, source.stem), config_dir)


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


def _copy_option(group: str, text: str, target: Path, config_dir: Path | None) -> str:
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
            raise _file_exists(self.path) from None
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


def target_file(file: str, stem: str) -> Path:
    """Return the file to write; raises Unreadable if it exists, its folder does not or can't be written, or it has another suffix."""
    if file.strip() in ("", STDOUT):
        raise Unreadable([Problem(rule="file", says=f"'{file}' is not the name of a file", mend="name one that ends in .yaml")])
    path = Path(file).expanduser()
    if path.is_dir():
        path = path / f"{stem}.yaml"
    elif not path.suffix or _VERSION.match(path.suffix):
        path = path.with_name(f"{path.name}.yaml")
    elif path.suffix not in library.SUFFIXES:
        says = f"{path} does not end in .yaml or .yml"
        raise Unreadable([Problem(rule="file", says=says, mend=f"name it {path.with_suffix('.yaml')}")])
    if os.path.lexists(path):
        raise _file_exists(path)
    if not path.parent.is_dir():
        raise Unreadable([Problem(rule="file", says=f"{path}: there is no folder {path.parent}", mend="create it first")])
    if not os.access(path.parent, os.W_OK):
        says = f"{path} can't be written: no file can be created in {path.parent}"
        raise Unreadable([Problem(rule="file", says=says, mend="choose another folder")])
    return path


def _file_exists(path: Path) -> Unreadable:
    return Unreadable([Problem(rule="file", says=f"{path} already exists", mend="name another file, or remove it first")])


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
