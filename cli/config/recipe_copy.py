"""Copies of recipes and of config options, each held against what it was copied from before it stays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, Self

from ...trainer.spec.problem import Problem, Unreadable, one_line
from . import library, yaml_text
from .command_name import command_name
from .load import compose_config

STDOUT = "-"
PATH_KEYS = ("model.hf", "model.weights")  # paths that the loader looks for beside the recipe first
SAME_NAME = "name=same"  # the override under which a recipe and its copy have one name
TRIAL_RECIPE = "quickstart"  # the recipe with which every option of a group composes


def copy_config(name: str, file: str, config_dir: Path | None) -> str:
    """Write the copy that `distrain cp NAME FILE` makes; the line that says what is next, or of FILE - the copy itself.

    Raises Unreadable, and OSError where the file can't be written.
    """
    group, _, option = name.partition("/")
    options = library.options(group, config_dir) if group in library.groups(config_dir) else {}
    if option in options:
        text = _read(options[option])
        return text.rstrip("\n") if file == STDOUT else _copy_option(group, text, _target(file, option), config_dir)
    if option and options and not os.path.exists(name):
        raise Unreadable([Problem(rule="option", says=f"no {group} {option}", mend=library.suggest_option(option, options))])
    source = library.recipe_path(name, config_dir)
    wanted = compose_config(_conf_argument(source), (SAME_NAME,), config_dir)
    text = _with_absolute_paths(_read(source), source)
    return text.rstrip("\n") if file == STDOUT else _copy_recipe(source, text, wanted, _target(file, source.stem), config_dir)


def _copy_recipe(source: Path, text: str, wanted: Mapping[str, Any], target: Path, config_dir: Path | None) -> str:
    """Write a recipe under its new name: in the place of the one that it says, else after all that it says, else unchanged."""
    name, wrong = target.stem, ""
    said = yaml_text.replace_values(text, {"name": name})
    for each in (*((said,) if said != text else ()), f"{text.rstrip()}\nname: {yaml_text.scalar(name)}\n", text):
        with NewFile(target, each) as made:
            try:
                same, whole = (
                    compose_config(_conf_argument(target), (SAME_NAME,), config_dir),
                    compose_config(_conf_argument(target), (), config_dir),
                )
            except Unreadable as error:
                wrong = error.problems[0].says
                continue
            if same == wanted and (whole["name"] == name or each is text):
                made.stays = True
                kept = "" if whole["name"] == name else f", whose runs are still named {whole['name']}"
                dirs = f" --config-dir {quote(str(config_dir))}" if config_dir else ""
                return one_line(f"wrote {target}{kept}; next: {command_name()} plan conf={quote(_conf_argument(target))}{dirs}")
    says = f"{target} would not be what {source} is{f' ({wrong})' if wrong else ''}"
    raise Unreadable([Problem(rule="copy", says=says, mend=f"copy it beside {source}, whose folder has what it names")])


def _copy_option(group: str, text: str, target: Path, config_dir: Path | None) -> str:
    """Write an option of a group; where it lies in a folder of the group's name it is composed from there."""
    name, top = target.stem, target.parent.parent
    with NewFile(target, text) as made:
        if target.absolute().parent.name != group:
            made.stays = True
            return one_line(f"wrote {target}; {group}={name} chooses it once it is DIR/{group}/{target.name}, with --config-dir DIR")
        try:
            compose_config(TRIAL_RECIPE, (f"{group}={name}",), top)
        except Unreadable as error:
            says = f"{target} can't be composed as {group}={name} ({error.problems[0].says})"
            raise Unreadable([Problem(rule="copy", says=says, mend="give it a name that its defaults don't have")]) from None
        made.stays = True
        return one_line(
            f"wrote {target}; next: {command_name()} plan conf={TRIAL_RECIPE} {group}={quote(name)} --config-dir {quote(str(top))}"
        )


class NewFile:
    """A new file, which is removed at the end of the block unless it `stays`. Raises Unreadable where there is one, else OSError."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.stays = path, text, False

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
        if not self.stays:
            self.path.unlink(missing_ok=True)


def _target(file: str, stem: str) -> Path:
    """The file to write; raises Unreadable where it is there already or has no folder."""
    path = Path(file).expanduser()
    if path.is_dir():
        path = path / f"{stem}.yaml"
    elif path.suffix not in library.SUFFIXES:
        path = path.with_name(f"{path.name}.yaml")
    if os.path.lexists(path):
        raise _file_exists(path)
    if not path.parent.is_dir():
        raise Unreadable([Problem(rule="file", says=f"{path}: there is no folder {path.parent}", mend="make it first")])
    return path


def _file_exists(path: Path) -> Unreadable:
    return Unreadable([Problem(rule="file", says=f"{path} is there already", mend="name another file, or remove it first")])


def _read(source: Path) -> str:
    """A YAML file as it is, to its line ends; raises Unreadable."""
    try:
        return source.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise Unreadable([Problem(rule="file", says=f"{source}: {why}")]) from None


def _with_absolute_paths(text: str, source: Path) -> str:
    """The text with whole paths for what the loader finds beside its file, so that a copy elsewhere finds it too."""
    said = yaml_text.text_values(text)
    near = {key: source.parent / said[key] for key in PATH_KEYS if said.get(key) and not Path(said[key]).expanduser().is_absolute()}
    return yaml_text.replace_values(text, {key: str(path.absolute()) for key, path in near.items() if path.exists()})


def _conf_argument(path: Path) -> str:
    """A file as `conf=` takes it: with a folder before its name."""
    return str(path) if path.parent != Path() else f"./{path}"
