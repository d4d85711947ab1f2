"""Loads a `Run` from a recipe and overrides, and the runs of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.read import read_run
from ...trainer.spec.run import Run
from ..arguments.cluster_argument import apply_shape
from ..arguments.override_grammar import parse_override
from ..arguments.overrides import Overrides, sort_overrides, sweep_layouts
from ..keys import config_files
from ..keys.keys import config_keys
from . import ask_transformers
from .composition import (
    RECIPE_NAME,
    Composer,
    apply_override,
    fill_in_adapter,
    merge_hf_sizes,
    read_schedule,
    replace_length,
    resolve_weights_paths,
    to_plain,
)
from .composition_problems import check_is_recipe, composition_problem, device_name_problems, improve_problems
from .epochs import with_steps
from .family_defaults import fill_in_family
from .machine_values import auto_memory, fill_auto_device, fill_cpu_rates
from .other_trainers import check_is_ours, read_toml, toml_problem
from .recipe_defaults import select_value
from .yaml_file import read_config


@dataclass(frozen=True, kw_only=True)
class SweepLayout:
    """One layout of a sweep: the arguments that vary, all its arguments (the recipe first), and its run."""

    swept: tuple[str, ...]
    arguments: tuple[str, ...]
    run: Run


def load_recipe(conf: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Run:
    """Return the run of a recipe and overrides; raises Unreadable with every problem."""
    return Loader(config_dir).load(conf, overrides)


def compose_config(conf: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> dict[str, Any]:
    """Return the composed config as plain data, unchecked and without the defaults of the data classes; raises Unreadable."""
    (config,) = compose_configs(conf, (overrides,), config_dir)
    return config


def compose_configs(conf: str, several: Sequence[Sequence[str]], config_dir: Path | None = None) -> list[dict[str, Any]]:
    """Return what `compose_config` does for each of several lists of overrides; Hydra composes a recipe once for each choice of options."""
    loader, configs = Loader(config_dir), list[dict[str, Any]]()
    for overrides in several:
        config, problems = loader.compose(conf, overrides)
        if problems:
            raise Unreadable(problems)
        configs.append(config)
    return configs


def checked_run(config: Mapping[str, Any], config_dir: Path | None = None) -> Run:
    """Return the run of a composed config; raises Unreadable with every problem, whose fixes name options of `config_dir` too."""
    try:
        return read_run(config)
    except Unreadable as error:
        raise Unreadable(found for each in error.problems for found in improve_problems(each, config, config_dir)) from None


def load_sweep(conf: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> list[SweepLayout]:
    """Return a layout for every combination of swept values, the last argument varying fastest; raises Unreadable."""
    loader, layouts, problems = Loader(config_dir), list[SweepLayout](), dict[Problem, None]()
    for arguments, swept in sweep_layouts((f"conf={conf}", *overrides), partial(parse_override, known=loader.known), config_dir):
        recipe, *values = arguments
        try:
            layouts.append(SweepLayout(swept=swept, arguments=arguments, run=loader.load(recipe.removeprefix("conf="), values)))
        except Unreadable as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise Unreadable(problems)
    return layouts


def empty_sweep_problem() -> Problem:
    """Return the problem of -m on a command line without a list of values."""
    return Problem(rule="sweep", says="-m has nothing to sweep", mend="write KEY=A,B to plan each, or leave -m out")


def override_problems(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[Problem, ...]:
    """Return the problems of overrides that do not depend on the recipe."""
    return Loader(config_dir).sort(overrides).problems


class Loader:
    """Loads runs from one set of folders."""

    def __init__(self, config_dir: Path | None) -> None:
        self.config_dir = config_dir
        self.known = config_keys()
        self._composer = Composer(config_dir)

    def sort(self, overrides: Sequence[str]) -> Overrides:
        """Parse overrides and sort them by their effect."""
        return sort_overrides(overrides, partial(parse_override, known=self.known), self.known, self.config_dir)

    def load(self, conf: str, overrides: Sequence[str]) -> Run:
        """Return one checked run; raises Unreadable with every problem."""
        config, problems = self.compose(conf, overrides)
        fill_cpu_rates(config)
        memory = auto_memory(config)
        if isinstance(memory, int):
            config["cluster"]["device"]["memory"] = memory
        elif memory:
            problems.append(memory)
        if isinstance(config.get("model"), dict):
            problems += ask_transformers.fill_in_parameters(config["model"])
        try:
            run = checked_run(config, self.config_dir)
        except Unreadable as error:
            found = [*problems, *(each for each in error.problems if each.rule != "missing" or not problems)]
            raise Unreadable(with_steps(found, config, overrides)) from None
        if problems:
            raise Unreadable(with_steps(problems, config, overrides))
        return run

    def compose(self, conf: str, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
        """Return the composed config as plain data, and the problems so far; raises Unreadable if there is no config."""
        user = self.sort(overrides)
        problems = list(user.problems)
        try:
            file = config_files.recipe_path(conf, self.config_dir)
            groups = config_files.groups(self.config_dir)
            if file.suffix == ".toml":
                check_is_ours(read_toml(file), file, self.known)
                raise Unreadable([toml_problem(file)])
            recipe = read_config(file)
            if not recipe and not overrides:
                mend = f"`distrain cp quickstart {file}` writes a recipe to begin with, once it is removed"
                raise Unreadable([Problem(rule="conf", says=f"{file} sets no key", mend=mend)])
            check_is_recipe(recipe, file, self.known, groups)
            check_is_ours(to_plain(recipe, found := list[Problem]()), file, self.known, found)
            if user.shape or user.choices:
                recipe.pop("reading", None)  # of the arguments that the recipe was written from
            node = self._composer.compose(recipe, user.choices, file)
            merge_hf_sizes(node, recipe, file, user.values)
            recipe_family = select_value(node, "model.family")  # that of the file which model.hf names, whose keys are no defaults
            for each in user.settings:
                problems += apply_override(node, each)
            replace_length(node, user.values)
            resolve_weights_paths(node, file, user.values)
            read_schedule(node, file, problems, from_command_line="parallel.schedule" in user.values)
            config = to_plain(node, problems)
            fill_in_adapter(config.get("model"))
        except Unreadable as error:
            raise Unreadable([*problems, *error.problems]) from None
        except RecursionError as error:
            raise Unreadable([*problems, composition_problem(error, file, self.config_dir, RECIPE_NAME)]) from None
        config.setdefault("name", file.stem)
        if config.get("parallel") is None:
            config["parallel"] = {}  # each of its keys has a default
        fill_in_family(config.get("model"), recipe_family, user.values)
        fill_auto_device(config, self._read_device, is_sized=bool(user.shape) or "cluster.gpus" in user.values)
        if user.shape:
            problems += apply_shape(config, user.shape, user.values)
        problems += device_name_problems(config, config_files.options("device", self.config_dir), self._read_device)
        return config, problems

    def _read_device(self, name: str) -> dict[str, Any]:
        """Return the keys of an option in group device."""
        return to_plain(read_config(config_files.options("device", self.config_dir)[name]), [])
