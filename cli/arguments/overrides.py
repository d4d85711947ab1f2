"""Overrides of a run sorted by their effect, their problems, and the layouts of a sweep."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, get_origin

from ...trainer.models.hf_format.hub_name import download_mend
from ...trainer.spec.problem import Problem, Unreadable, no_key_problem, suggest_name
from ...trainer.spec.read import value_text
from ...trainer.system.regular_file import expand_home
from ..keys import config_files, synonym
from ..keys.keys import respelled_key, unknown_key_problem
from .arguments import syntax_problem
from .cluster_argument import SHAPE_FORMS, is_shape

MOST_LAYOUTS = 10_000  # layouts of one sweep
FULLY_SHARDED = ("fsdp", "fsdp2", "full_shard")  # names of others for parallel=zero3


@dataclass(frozen=True, kw_only=True)
class Override:
    """One parsed override: `parallel.tp=8`, `model=gpt2_124m`, `~log`."""

    text: str
    key: str
    package: str | None = None  # the key that an option of a group goes to: `device@cluster.device`
    deletes: bool = False
    value: Any = None
    sweeps: Sequence[str] | Callable[[list[str]], list[str]] | None = None  # values, or a filter of option names

    @property
    def hydra_group(self) -> str:
        """The group with its package in Hydra's notation; `device` goes to the cluster."""
        package = self.package or ("cluster.device" if self.key == "device" else None)
        return f"{self.key}@{package}" if package else self.key

    @property
    def target_key(self) -> str:
        """The key that an option of a group goes to."""
        return self.hydra_group.partition("@")[2] or self.key.replace("/", ".")

    @property
    def hydra_override(self) -> str:
        """The choice of an option, or of none, in Hydra's notation."""
        return f"~{self.hydra_group}" if self.deletes else f"{self.hydra_group}={value_text(self.value)}"


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The overrides of one run: `choices` choose options of groups, `settings` set or delete keys, `shape` is the cluster's size."""

    choices: tuple[Override, ...]
    settings: tuple[Override, ...]
    shape: str | None
    problems: tuple[Problem, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Every key that the user sets, with its value; nested keys (`parallel={tp:8}`) by their dotted names."""
        return dict(pair for each in self.settings if not each.deletes for pair in _flatten(each.key, each.value))


ParseOverride = Callable[[str], Override | Problem]


def sort_overrides(texts: Sequence[str], parse: ParseOverride, known: Mapping[str, Any], config_dir: Path | None) -> Overrides:
    """Sort overrides by their effect and collect every problem; `known` are the config keys and their types."""
    groups = config_files.groups(config_dir)
    choices: list[Override] = []
    settings: list[Override] = []
    shapes: list[str] = []
    problems: list[Problem] = []
    for text in texts:
        override = parse(text)
        if isinstance(override, Problem):
            problems.append(override)
        elif problem := _override_problem(override, known, groups, config_dir):
            problems.append(problem)
        elif override.key == "cluster" and is_shape(override.value):
            shapes.append(override.value)
        else:
            (choices if _is_choice(override, groups) else settings).append(override)
    shape = shapes[-1] if shapes else None
    return Overrides(choices=tuple(choices), settings=tuple(settings), shape=shape, problems=tuple(problems))


def sweep_layouts(
    arguments: Sequence[str], parse: ParseOverride, config_dir: Path | None
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield (all arguments, those that sweep) of every combination, the last argument varying fastest; raises Unreadable."""
    problems: list[Problem] = []
    columns: list[list[tuple[str, bool]]] = []  # for each argument its values, and whether it sweeps
    for text in arguments:
        override = parse(text)
        if isinstance(override, Problem) or override.sweeps is None:
            columns.append([(text, False)])
            continue
        values = _sweep_values(override, config_dir)
        if not values:
            group = "recipes" if override.key == "conf" else override.key
            problems.append(Problem(rule="sweep", says=f"{text} matches nothing", mend=f"`distrain ls {group}` lists the names"))
        prefix = text.partition("=")[0]
        columns.append([(f"{prefix}={value}", True) for value in values])
    layouts = list(islice(product(*columns), MOST_LAYOUTS + 1))
    if len(layouts) > MOST_LAYOUTS:
        problems.append(Problem(rule="sweep", says=f"the sweep has more than {MOST_LAYOUTS:,} layouts", mend="sweep fewer values"))
    if problems:
        raise Unreadable(problems)
    for layout in layouts:
        yield tuple(text for text, _ in layout), tuple(text for text, sweeps in layout if sweeps)


def _sweep_values(override: Override, config_dir: Path | None) -> Sequence[str]:
    if callable(override.sweeps):
        names = config_files.recipes(config_dir) if override.key == "conf" else config_files.options(override.key, config_dir)
        return override.sweeps(list(names))
    return override.sweeps or ()


def _is_choice(override: Override, groups: Sequence[str]) -> bool:
    return override.key in groups and not isinstance(override.value, dict)


def _override_problem(override: Override, known: Mapping[str, Any], groups: Sequence[str], config_dir: Path | None) -> Problem | None:
    key, text = override.key, override.text
    if not key or text.endswith("="):
        return syntax_problem(text, known)
    if override.sweeps is not None:
        value = text.partition("=")[2]
        list_hint = f", or write {key}=[{value}] for a list" if get_origin(known.get(key)) is tuple else ""
        return Problem(rule="sweep", says=f"{text} is a sweep", mend=f"add -m to plan or fit each{list_hint}")
    if _is_choice(override, groups):
        return _choice_problem(override, config_dir)
    if key.partition(".")[0].partition("/")[0] == "hydra":
        return no_key_problem(key, "distrain does not use Hydra's settings")
    if "/" in key and respelled_key(key, known):
        return unknown_key_problem(key, known, override.value)
    if override.package or "/" in key:
        return Problem(rule="unknown", says=f"{text}: no group {key}", mend=suggest_name(key, groups))
    if key == "cluster.device" and isinstance(override.value, str):
        return Problem(rule="type", says=f"{text} names a device", mend=f"write device={override.value}")
    return unknown_key_problem(key, known, override.value)


def _choice_problem(choice: Override, config_dir: Path | None) -> Problem | None:
    if choice.package not in (None, choice.key, f"cluster.{choice.key}"):
        says = f"{choice.text}: {choice.package} takes no {choice.key}"
        setting = f"{choice.key}={value_text(choice.value)}"
        return Problem(rule="option", says=says, mend=f"write {setting}", settings=(setting,))
    is_size = choice.key == "cluster" and is_shape(choice.value)
    return None if choice.deletes or is_size else _option_problem(choice.key, choice.value, config_dir)


def _option_problem(group: str, value: Any, config_dir: Path | None) -> Problem | None:
    options = config_files.options(group, config_dir)
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name not in options:
            settings: list[str] = []
            if group == "cluster" and value_text(name)[:1].isdigit():
                mend = _size_mend(value_text(name))
            elif group == "model" and isinstance(name, str) and _is_hf_config(name):
                settings = [f"model.hf={name}"]
                mend = f"write {settings[0]}"
            elif group == "optim" and isinstance(name, str) and name in synonym.OPTIMIZERS:
                settings = f"optim={synonym.OPTIMIZERS[name]}".split(" ")
                mend = f"write {' '.join(settings)}"
            elif group == "parallel" and name in FULLY_SHARDED:
                mend, settings = "write parallel=zero3", ["parallel=zero3"]
            elif group == "model" and isinstance(name, str) and (download := download_mend(Path(os.path.abspath(name)), "model.hf")):
                mend = download
            elif isinstance(name, str):
                mend = config_files.suggest_option(name, options)
            else:
                mend = f"`distrain ls {group}` lists the names; write keys as {group}.KEY={value_text(name)}"
            says = f"{group}={value_text(value)} names no {group}"
            return Problem(rule="option", says=says, mend=mend, settings=tuple(settings))
    return None


def _size_mend(name: str) -> str:
    """Return what to write for a cluster that begins with a digit: 4x8xH100 is a size and a device."""
    size, _, device = name.rpartition("x")
    if is_shape(size) and device[:1].isalpha():
        return f"write cluster={size} device=NAME; `distrain ls device` lists the names"
    return f"a size is {SHAPE_FORMS}"


def _is_hf_config(path: str) -> bool:
    """Whether a path is that of a JSON file, or of a folder with a config.json."""
    at = str(expand_home(path))
    return (at.endswith(".json") and os.path.isfile(at)) or os.path.isfile(os.path.join(at, "config.json"))


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _flatten(f"{key}.{name}", each)
    else:
        yield key, value
