"""From words to a `Run`: the one file that knows Hydra and OmegaConf."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser import types as hydra_types
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...trainer.spec.plain_file import expand_home
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.quantity import dimension_of
from ...trainer.spec.read import read_run
from ...trainer.spec.run import Run
from . import hf_model, library
from .arguments import syntax_problem
from .auto_device import auto_memory, fill_auto_device, fill_cpu_rates
from .cluster_shape import apply_shape
from .errors import check_sizes_agree, composition_problem, device_name_problems, improve_problem
from .family_defaults import fill_in_family
from .keys import config_keys, text_keys
from .overrides import MOST_LAYOUTS, Override, Overrides, sort_overrides, sweep_layouts
from .yaml_file import install_plain_source, read_config

RECIPE_NAME = "_recipe_"  # the name under which Hydra finds the recipe that was read here
COMMA_KEYS = ("launch.include", "launch.exclude")  # keys whose values have commas of their own: host1:0,2
MOST_DOTS = 12  # dots of a key; deeper is a loop of ${...}

# What Hydra and OmegaConf raise on a file that a user wrote; the last four for one whose form they do not check.
CONFIG_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,
    RecursionError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)


@dataclass(frozen=True, kw_only=True)
class SweepLayout:
    """One layout of a sweep: the words that make it, all words that give it (its recipe first), and its run."""

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    run: Run


def load_recipe(conf: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Run:
    """The `Run` that a recipe and overrides say; raises Unreadable with every problem."""
    return Loader(config_dir).run(conf, overrides)


def compose_config(conf: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> dict[str, Any]:
    """The composed config as plain data, unchecked and without defaults; raises Unreadable."""
    words, problems = Loader(config_dir).words(conf, overrides)
    if problems:
        raise Unreadable(problems)
    return words


def checked_run(words: Mapping[str, Any]) -> Run:
    """The `Run` that composed words say; raises Unreadable with all that is wrong."""
    try:
        return read_run(words)
    except Unreadable as error:
        raise Unreadable(improve_problem(each, words) for each in error.problems) from None


def load_sweep(conf: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> list[SweepLayout]:
    """A run for every combination of the values that sweep, the last word fastest; raises Unreadable."""
    loader, runs, problems = Loader(config_dir), list[SweepLayout](), dict[Problem, None]()
    parse = partial(_parse_override, known=loader.known)
    for (recipe, *words), swept in sweep_layouts((f"conf={conf}", *overrides), parse, config_dir):
        try:
            runs.append(SweepLayout(words=swept, arguments=(recipe, *words), run=loader.run(recipe.removeprefix("conf="), words)))
        except Unreadable as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise Unreadable(problems)
    return runs


def empty_sweep_problem() -> Problem:
    """What is wrong with -m where no word lists values."""
    return Problem(rule="sweep", says="-m has nothing to sweep", mend="write KEY=A,B to plan each, or leave -m out")


def override_problems(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[Problem, ...]:
    """What is wrong with overrides, whatever the recipe."""
    return Loader(config_dir).said(overrides).problems


def config_yaml(words: Mapping[str, Any]) -> str:
    """Plain data as YAML that `conf=` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(words)))


class Loader:
    """Composes runs from one set of folders; what a sweep's layouts share is composed once."""

    def __init__(self, config_dir: Path | None) -> None:
        self.config_dir = config_dir
        self.roots = library.roots(config_dir)
        self.known = config_keys()
        self._bases: dict[tuple[str, ...], DictConfig] = {}

    def said(self, overrides: Sequence[str]) -> Overrides:
        """Overrides sorted by what they do."""
        return sort_overrides(overrides, partial(_parse_override, known=self.known), self.known, self.config_dir)

    def run(self, conf: str, overrides: Sequence[str]) -> Run:
        """One checked run; raises Unreadable with every problem."""
        words, problems = self.words(conf, overrides)
        fill_cpu_rates(words)
        memory = auto_memory(words)
        if isinstance(memory, int):
            words["cluster"]["device"]["memory"] = memory
        elif memory:
            problems.append(memory)
        if isinstance(words.get("model"), dict):
            problems += hf_model.fill_in_parameters(words["model"])
        try:
            run = checked_run(words)
        except Unreadable as error:
            raise Unreadable([*problems, *(each for each in error.problems if each.rule != "missing" or not problems)]) from None
        if problems:
            raise Unreadable(problems)
        return run

    def words(self, conf: str, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
        """The composed config as plain data, and what is wrong so far; raises Unreadable where there is none."""
        told = self.said(overrides)
        problems = list(told.problems)
        try:
            file = library.recipe_path(conf, self.config_dir)
            recipe = read_config(file)
            config = self._base(recipe, told.choices, file).copy()
            before = _named_family(config)
            _merge_hf_sizes(config, recipe, file, told)
            for word in told.sets:
                problems += _apply(config, word)
            _resolve_weights_path(config, file, said_here="model.weights" in told.keys)
            words = _to_plain(config, "", problems)
        except Unreadable as error:
            raise Unreadable([*problems, *error.problems]) from None
        except RecursionError as error:
            raise Unreadable([*problems, composition_problem(error, file, self.config_dir, RECIPE_NAME)]) from None
        words.setdefault("name", file.stem)
        fill_in_family(words.get("model"), before, told.keys)
        fill_auto_device(words, self._device, sized=bool(told.shape) or "cluster.gpus" in told.keys)
        if told.shape:
            problems += apply_shape(words, told.shape, told.keys)
        problems += device_name_problems(words, library.options("device", self.config_dir), self._device)
        return words, problems

    def _device(self, name: str) -> dict[str, Any]:
        """What an option of group device says."""
        read: dict[str, Any] = _to_plain(read_config(library.options("device", self.config_dir)[name]), "", [])
        return read

    def _base(self, recipe: DictConfig, choices: Sequence[Override], file: Path) -> DictConfig:
        at = (str(file), *(word.text for word in choices))
        if at not in self._bases:
            self._bases[at] = self._composed(recipe, choices, file)
        return self._bases[at]

    def _composed(self, recipe: DictConfig, choices: Sequence[Override], file: Path) -> DictConfig:
        """A recipe composed with groups; an option of a group that its defaults don't name replaces what it says itself."""
        inside, outside = {word.at: word for word in choices}, list[Override]()
        if "cluster" in inside:
            recipe = _without_default(recipe, "device@cluster.device")
        try:
            while True:
                try:
                    config = self._hydra(recipe, inside.values(), file)
                    break
                except HydraException as error:
                    missed = re.match(r"Could not (?:override|delete) '([^'=]+)(?:=[^']*)?'\. No match", str(error))
                    if not missed or missed[1] not in inside:
                        raise
                    outside.append(inside.pop(missed[1]))
            for word in sorted(outside, key=lambda word: word.key == "device"):
                self._replace(config, word, file)
        except CONFIG_ERRORS as error:
            raise Unreadable([composition_problem(error, file, self.config_dir, RECIPE_NAME)]) from None
        return config

    def _replace(self, config: DictConfig, word: Override, file: Path) -> None:
        if word.deletes:
            if problems := _apply(config, word):
                raise Unreadable(problems)
            return
        whole = self._hydra(OmegaConf.create({"defaults": [{word.at: word.value}]}), (), file)
        OmegaConf.update(config, word.place, OmegaConf.select(whole, word.place), merge=False, force_add=True)

    def _hydra(self, recipe: DictConfig, choices: Iterable[Override], file: Path) -> DictConfig:
        """Hydra's composition: the user's folder is its main one, then the built-in ones, then the recipe's own."""
        node = recipe.copy()
        node["hydra"] = {"searchpath": [f"file://{root}" for root in (*self.roots[1:], file.parent.absolute())]}
        if "defaults" in node and "_self_" not in node["defaults"]:
            node["defaults"].append("_self_")
        install_plain_source()
        ConfigStore.instance().store(name=RECIPE_NAME, node=node)
        with initialize_config_dir(str(self.roots[0]), job_name="distrain", version_base="1.3"):
            config = hydra_compose(RECIPE_NAME, overrides=[word.choice for word in choices])
        OmegaConf.set_struct(config, False)
        return config


def _without_default(recipe: DictConfig, override: str) -> DictConfig:
    """A recipe without what its defaults override: another cluster comes with its own device."""
    left = recipe.copy()
    if isinstance(recipe.get("defaults"), ListConfig):
        drop = (f"override /{override}", f"override {override}")
        left["defaults"] = [each for each in recipe["defaults"] if not (isinstance(each, DictConfig) and set(each) & set(drop))]
    return left


def _parse_override(text: str, known: Mapping[str, Any]) -> Override | Problem:
    """One override by Hydra's grammar; a key that takes text takes what the grammar can't read (~/config.json)."""
    key, _, value = text.partition("=")
    quoted = hydra_types.QuotedString(text=value, quote=hydra_types.Quote.single).with_quotes()
    bare = key.lstrip("+")
    for each in (text, f"{key}={quoted}") if bare in text_keys(known) or dimension_of(bare) else (text,):
        try:
            word = OverridesParser.create().parse_override(each)
            if each is text and bare in COMMA_KEYS and word.is_sweep_override():
                continue
            return Override(
                text=text,
                key=word.key_or_group,
                package=word.package,
                deletes=word.is_delete(),
                value=None if word.is_sweep_override() else _typed_text(word.value(), value) if bare in text_keys(known) else word.value(),
                sweeps=_swept_values(word),
            )
        except (HydraException, ValueError):
            continue
    return syntax_problem(text, known)


def _typed_text(value: Any, typed: str) -> Any:
    """The value of a key that takes text: a number or a truth as it was typed."""
    return typed if isinstance(value, int | float) else value


def _swept_values(word: hydra_types.Override) -> Sequence[str] | Callable[[list[str]], list[str]] | None:
    """The values that an override sweeps, as text; raises where they have no end."""
    if not word.is_sweep_override():
        return None
    value = word.value()
    return value.filter if isinstance(value, hydra_types.Glob) else tuple(islice(word.sweep_string_iterator(), MOST_LAYOUTS + 1))


def _merge_hf_sizes(config: DictConfig, recipe: DictConfig, file: Path, told: Overrides) -> None:
    """Put the sizes of `model.hf` under what is said beside it: on the command line, in the recipe, or in the group's file."""
    own = OmegaConf.to_container(recipe, resolve=False)
    own = own.get("model") if isinstance(own, dict) else None
    try:
        path = told.keys.get("model.hf") or OmegaConf.select(config, "model.hf")
    except OmegaConfBaseException:
        return  # reported with every other value that can't be resolved
    if not isinstance(path, str):
        return
    from ...trainer.models.hf_format.config import needs_family_hf, read_hf_config

    said_here = "model.hf" in told.keys
    beside = {} if said_here else own if isinstance(own, dict) and "hf" in own else config.model
    at = _resolve_path(path, file, said_here=said_here)
    is_hf = any(map(hf_model.is_hf_family, (told.keys.get("model.family"), beside.get("family"))))
    sizes = hf_model.model_keys(at) if is_hf or needs_family_hf(at) else read_hf_config(at)
    if beside is config.model:
        check_sizes_agree(sizes, config.model, file)
    config.model = OmegaConf.merge(sizes, beside, {"hf": str(at)})


def _resolve_weights_path(config: DictConfig, file: Path, *, said_here: bool) -> None:
    """Make `model.weights` a whole path: what is handed to ranks holds wherever they run."""
    try:
        path = OmegaConf.select(config, "model.weights")
    except OmegaConfBaseException:
        return  # reported with every other value that can't be resolved
    if isinstance(path, str):
        OmegaConf.update(config, "model.weights", str(_resolve_path(path, file, said_here=said_here)))


def _resolve_path(path: str, file: Path, *, said_here: bool) -> Path:
    """A path of a recipe is looked for beside it first; one of the command line is from the folder that it is typed in."""
    near = file.parent / expand_home(path)
    return (near if os.path.exists(near) and not said_here else expand_home(path)).absolute()


def _named_family(config: DictConfig) -> object:
    """The family that the recipe itself names."""
    try:
        return OmegaConf.select(config, "model.family")
    except OmegaConfBaseException:
        return None  # reported with every other value that can't be resolved


def _apply(config: DictConfig, word: Override) -> list[Problem]:
    """Set or take out one key; the problem where that can't be done."""
    try:
        if not word.deletes:
            OmegaConf.update(config, word.key, word.value, merge=True, force_add=True)
            return []
        holder, _, last = word.key.rpartition(".")
        node = OmegaConf.select(config, holder) if holder else config
        if isinstance(node, DictConfig) and last in node and word.value in (None, node[last]):
            del node[last]
            return []
        return [Problem(rule="unknown", says=f"{word.text} takes out what the recipe doesn't say", mend="leave it out")]
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        return [Problem(rule="type", says=f"{word.text} can't be set", mend=str(error).splitlines()[0])]


def _to_plain(node: DictConfig | ListConfig, at: str, problems: list[Problem]) -> Any:
    """Plain data with every ${...} resolved and what is missing (???) left out."""
    read: dict[Any, Any] = {}
    keys_: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys_:
        where = f"{at}{key}"
        try:
            if OmegaConf.is_missing(node, key):
                continue
            value = node[key]
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,unused-ignore]
            why = str(error).splitlines()[0]
            problems.append(Problem(rule="interpolation", says=f"{where}={raw} can't be resolved", mend=why))
            continue
        if where.count(".") >= MOST_DOTS:
            problems.append(Problem(rule="interpolation", says=f"{at.split('.')[0]} contains itself", mend="break the loop of ${...}"))
        else:
            read[key] = _to_plain(value, f"{where}.", problems) if isinstance(value, DictConfig | ListConfig) else value
    return read if isinstance(node, DictConfig) else list(read.values())
