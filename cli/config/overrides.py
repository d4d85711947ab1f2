"""Overrides of a run: what each of them does, what is wrong with it, and the layouts that a sweep of them spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, get_origin

from ...trainer.spec.problem import Problem, Unreadable, suggest_name
from ...trainer.spec.read import value_text
from . import library
from .arguments import syntax_problem
from .cluster_shape import FORMS, is_shape
from .keys import respelled_key, unknown_key_problem

MOST_LAYOUTS = 10_000  # layouts of one sweep


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override, parsed: `parallel.tp=8`, `model=gpt2_124m`, `~log`."""

    text: str
    key: str
    package: str | None = None  # where an option of a group goes: `device@cluster.device`
    deletes: bool = False
    value: Any = None
    sweeps: Sequence[str] | Callable[[list[str]], list[str]] | None = None  # values, or a choice among the options there are

    @property
    def at(self) -> str:
        """The group and the place that Hydra is told: `device` is the cluster's."""
        package = self.package or ("cluster.device" if self.key == "device" else None)
        return f"{self.key}@{package}" if package else self.key

    @property
    def place(self) -> str:
        """The key under which the option of a group lands."""
        return self.at.partition("@")[2] or self.key.replace("/", ".")

    @property
    def choice(self) -> str:
        """The option of a group as Hydra is told it."""
        return f"~{self.at}" if self.deletes else f"{self.at}={value_text(self.value)}"


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The overrides of one run by what they do: choose an option, set a key, give the cluster's size."""

    choices: tuple[Override, ...]
    sets: tuple[Override, ...]
    shape: str | None
    problems: tuple[Problem, ...]

    @property
    def keys(self) -> dict[str, Any]:
        """Every key that is set, with its value, also those inside `parallel={tp:8}`."""
        return dict(pair for each in self.sets if not each.deletes for pair in _flatten(each.key, each.value))


Parse = Callable[[str], Override | Problem]


def sort_overrides(texts: Sequence[str], parse: Parse, known: Mapping[str, Any], config_dir: Path | None) -> Overrides:
    """Sort overrides by what they do, with all that is wrong with them."""
    groups = library.groups(config_dir)
    choices: list[Override] = []
    sets: list[Override] = []
    sizes: list[str] = []
    problems: list[Problem] = []
    for text in texts:
        word = parse(text)
        if isinstance(word, Problem):
            problems.append(word)
        elif wrong := _override_problem(word, known, groups, config_dir):
            problems.append(wrong)
        elif word.key == "cluster" and is_shape(word.value):
            sizes.append(word.value)
        else:
            (choices if _is_choice(word, groups) else sets).append(word)
    return Overrides(choices=tuple(choices), sets=tuple(sets), shape=sizes[-1] if sizes else None, problems=tuple(problems))


def sweep_layouts(columns: Sequence[str], parse: Parse, config_dir: Path | None) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Every combination of what sweeps, the last word fastest: all its words, and those that sweep; raises Unreadable."""
    problems: list[Problem] = []
    spread: list[list[tuple[str, bool]]] = []
    for text in columns:
        word = parse(text)
        if isinstance(word, Problem) or word.sweeps is None:
            spread.append([(text, False)])
            continue
        values = _sweep_values(word, config_dir)
        if not values:
            problems.append(Problem(rule="sweep", says=f"{text} matches nothing", mend=f"`distrain ls {word.key}` lists what there is"))
        prefix = text.partition("=")[0]
        spread.append([(f"{prefix}={value}", True) for value in values])
    found = list(islice(product(*spread), MOST_LAYOUTS + 1))
    if len(found) > MOST_LAYOUTS:
        problems.append(Problem(rule="sweep", says=f"the sweep has more than {MOST_LAYOUTS} layouts", mend="sweep fewer values"))
    if problems:
        raise Unreadable(problems)
    for row in found:
        yield tuple(text for text, _ in row), tuple(text for text, sweeps in row if sweeps)


def _sweep_values(word: Override, config_dir: Path | None) -> Sequence[str]:
    if callable(word.sweeps):
        names = library.recipes(config_dir) if word.key == "conf" else library.options(word.key, config_dir)
        return word.sweeps(list(names))
    return word.sweeps or ()


def _is_choice(word: Override, groups: Sequence[str]) -> bool:
    return word.key in groups and not isinstance(word.value, dict)


def _override_problem(word: Override, known: Mapping[str, Any], groups: Sequence[str], config_dir: Path | None) -> Problem | None:
    if not word.key or word.text.endswith("="):
        return syntax_problem(word.text, known)
    if word.sweeps is not None:
        value = word.text.partition("=")[2]
        listed = f", or write {word.key}=[{value}] for a list" if get_origin(known.get(word.key)) is tuple else ""
        return Problem(rule="sweep", says=f"{word.text} is a sweep", mend=f"add -m to plan or fit each{listed}")
    if _is_choice(word, groups):
        if word.package not in (None, word.key, f"cluster.{word.key}"):
            says = f"{word.text}: {word.package} takes no {word.key}"
            return Problem(rule="option", says=says, mend=f"write {word.key}={value_text(word.value)}")
        sizes = word.key == "cluster" and is_shape(word.value)
        return None if word.deletes or sizes else _option_problem(word.key, word.value, config_dir)
    if word.key.partition(".")[0].partition("/")[0] == "hydra":
        return Problem(rule="unknown", says=f"no key {word.key}", mend="distrain has no settings of Hydra's")
    if "/" in word.key and respelled_key(word.key, known):
        return unknown_key_problem(word.key, known, word.value)
    if word.package or "/" in word.key:
        return Problem(rule="unknown", says=f"{word.text}: no group {word.key}", mend=suggest_name(word.key, groups))
    if word.key == "cluster.device" and isinstance(word.value, str):
        return Problem(rule="type", says=f"{word.text} names a device", mend=f"write device={word.value}")
    return unknown_key_problem(word.key, known, word.value)


def _option_problem(group: str, value: Any, config_dir: Path | None) -> Problem | None:
    options = library.options(group, config_dir)
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name not in options:
            if group == "cluster" and value_text(name)[:1].isdigit():
                mend = f"a size is {FORMS}"
            elif isinstance(name, str):
                mend = library.suggest_option(name, options)
            else:
                mend = f"`distrain ls {group}` lists them; its keys are written {group}.KEY={value_text(name)}"
            return Problem(rule="option", says=f"{group}={value_text(value)} names no {group}", mend=mend)
    return None


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _flatten(f"{key}.{name}", each)
    else:
        yield key, value
