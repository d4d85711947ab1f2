"""Composes a recipe with Hydra and OmegaConf: groups, overrides, the sizes of `model.hf`, and the result as plain data."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.system.regular_file import expand_home, read_plain
from ..arguments.cluster_argument import join_readings
from ..arguments.overrides import Override
from ..keys import config_files
from . import ask_transformers
from .composition_problems import check_sizes_agree, composition_problem
from .interrupts import raise_if_interrupted
from .own_sections import is_whole_section, kept_keys
from .recipe_defaults import (
    drop_device_figures,
    note_dropped,
    note_links,
    select_value,
    with_plain_default,
    without_default,
    without_other_device,
)
from .yaml_file import LENGTHS, install_plain_source

WEIGHTS = ("model.weights", "model.lora.weights")  # folders of weights that training begins from
RECIPE_NAME = "_recipe_"  # the name under which Hydra finds the recipe, which is read here
MOST_DOTS = 12  # dots in a key; more mean a loop of ${...}

# Errors of Hydra and OmegaConf for a user's file; the last four for a file whose form they do not check.
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


# Configs are pickled: to read one is a copy, in a fifth of the time that OmegaConf's own takes.
_built_in_configs: dict[tuple[str, ...], bytes] = {}  # composed from files of the package alone, which do not change


class Composer:
    """Composes recipes with options of groups; a recipe with the same options is composed once, as for the layouts of a sweep."""

    def __init__(self, config_dir: Path | None) -> None:
        self._config_dir = config_dir
        self._roots = config_files.roots(config_dir)
        self._configs: dict[tuple[str, ...], bytes] = {}

    def compose(self, recipe: DictConfig, choices: Sequence[Override], file: Path) -> DictConfig:
        """Return a copy of the recipe in `file` composed with chosen options; raises Unreadable."""
        is_built_in = self._config_dir is None and file.is_relative_to(config_files.PACKAGE_ROOT)
        configs = _built_in_configs if is_built_in else self._configs
        cache_key = (str(file), *(each.text for each in choices))
        if cache_key not in configs:
            configs[cache_key] = pickle.dumps(self._compose(recipe, choices, file))
        config: DictConfig = pickle.loads(configs[cache_key])
        return config

    def _compose(self, recipe: DictConfig, choices: Sequence[Override], file: Path) -> DictConfig:
        """Compose; the keys that a recipe sets itself stay over a chosen option, also of a group that is not in the recipe's defaults."""
        in_defaults, others, whole = {each.hydra_group: each for each in choices}, list[Override](), recipe
        if "cluster" in in_defaults:
            recipe = without_default(recipe, "device@cluster.device")
        recipe = without_other_device(recipe, choices)
        try:
            while True:
                try:
                    config = self._call_hydra(recipe, in_defaults.values(), file)
                    break
                except HydraException as error:
                    raise_if_interrupted(error)
                    missed = re.search(r"Could not (?:override|delete) '([^'=]+)(?:=[^']*)?'\. No match", str(error))
                    plain = with_plain_default(recipe, missed[1]) if missed else recipe
                    if plain != recipe:
                        recipe = plain
                    elif missed and missed[1] in in_defaults:
                        others.append(in_defaults.pop(missed[1]))
                    else:
                        raise
            if any(each.key == "cluster" for each in others):  # which brings a device: one that is chosen takes its place
                others += [each for each in in_defaults.values() if each.key == "device"]
            for each in sorted(others, key=lambda choice: choice.key == "device"):
                self._add_group(config, each, file)
        except CONFIG_ERRORS as error:
            raise_if_interrupted(error)
            raise Unreadable([composition_problem(error, file, self._config_dir, RECIPE_NAME)]) from None
        device = next((each for each in choices if each.key == "device" and not each.deletes), None)
        if device:
            try:
                before = self._compose(whole, [each for each in choices if each is not device], file)
            except Unreadable:  # the device that is replaced can't be read
                return config
            note_links(config, device, before)
            drop_device_figures(config, device, before)
        return config

    def _add_group(self, config: DictConfig, choice: Override, file: Path) -> None:
        """Put an option of a group that no defaults name below the recipe's own keys, or in place of a section written as a whole."""
        if choice.deletes:
            if problems := apply_override(config, choice):
                raise Unreadable(problems)
            return
        key = choice.target_key
        source = self._call_hydra(OmegaConf.create({"defaults": [{choice.hydra_group: choice.value}]}), (), file)
        option, own = OmegaConf.select(source, key), OmegaConf.select(config, key)
        if isinstance(own, DictConfig) and isinstance(option, DictConfig):
            if not is_whole_section(key, own):
                option = OmegaConf.merge(option, OmegaConf.masked_copy(own, kept_keys(key, own)))
                note_dropped(config, choice, own)
            elif key == choice.key and own != option:
                config.reading = join_readings(
                    config.get("reading"), f"{choice.text}: replaces section {key} of the recipe, which sets all of it"
                )
        OmegaConf.update(config, key, option, merge=False, force_add=True)

    def _call_hydra(self, recipe: DictConfig, choices: Iterable[Override], file: Path) -> DictConfig:
        """Compose with Hydra: the user's folder is its main one, then the built-in ones, then the recipe's own."""
        node = recipe.copy()
        node["hydra"] = {"searchpath": [f"file://{root}" for root in (*self._roots[1:], file.parent.absolute())]}
        if "defaults" in node and "_self_" not in node["defaults"]:
            node["defaults"].append("_self_")
        os.getcwd()  # raises FileNotFoundError if the current folder was removed, in which a run could read and write nothing
        install_plain_source()
        ConfigStore.instance().store(name=RECIPE_NAME, node=node)
        with initialize_config_dir(str(self._roots[0]), job_name="distrain", version_base="1.3"):
            return _compose_stored([each.hydra_override for each in choices])


def _compose_stored(choices: list[str]) -> DictConfig:
    """Compose the stored recipe with the options that are chosen, as `hydra.compose` does, but for Hydra's settings of itself: these are
    two thirds of the files that it reads, and are dropped at last. Raises HydraException."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    assert isinstance(loader, ConfigLoaderImpl)
    try:
        loader.ensure_main_config_source_available()
        overrides, repository = loader._parse_overrides_and_create_caching_repo(RECIPE_NAME, choices)
        loader.validate_sweep_overrides_legal(overrides, RunMode.RUN, from_shell=False)
        found = create_defaults_list(repository, RECIPE_NAME, overrides, prepend_hydra=False, skip_missing=False)
        config = loader._compose_config_from_defaults_list(found.defaults, repository)
        OmegaConf.set_struct(config, True)  # an option that is chosen may only replace one
        loader._apply_overrides_to_config(found.config_overrides, config)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException().with_traceback(error.__traceback__) from error
    OmegaConf.set_struct(config, False)
    config.pop("hydra", None)
    return config


def apply_override(config: DictConfig, override: Override) -> list[Problem]:
    """Set or delete one key; return the problem if that is impossible."""
    try:
        if not override.deletes:
            OmegaConf.update(config, override.key, override.value, merge=True, force_add=True)
            return []
        section, _, name = override.key.rpartition(".")
        node = OmegaConf.select(config, section) if section else config
        if isinstance(node, DictConfig) and name in node and override.value in (None, node[name]):
            del node[name]
            return []
        return [Problem(rule="unknown", says=f"{override.text} removes a key that the recipe does not set", mend="leave it out")]
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        raise_if_interrupted(error)
        return [Problem(rule="type", says=f"{override.text} can't be set", mend=str(error).splitlines()[0])]


def merge_hf_sizes(config: DictConfig, recipe: DictConfig, file: Path, user_values: Mapping[str, Any]) -> None:
    """Merge the sizes that `model.hf` names into a config, or those of the folder of `model.weights` where nothing names a family.

    Keys that stand beside `model.hf` win: on the command line (which is applied later), in the recipe, or in the group's file. A
    folder that the command line names replaces the recipe's sizes; `model.lora`, which says how to train them, stays. Raises Unreadable.
    """
    key = _sizes_key(config, user_values)
    path = user_values.get(key) or select_value(config, key)
    if not isinstance(path, str):
        return
    from ...trainer.models.hf_format.config import needs_family_hf, read_hf_config

    from_command_line = key in user_values
    plain_recipe = OmegaConf.to_container(recipe, resolve=False)
    recipe_model: Any = plain_recipe.get("model") if isinstance(plain_recipe, dict) else None
    beside = config.get("model", {})
    if key == "model.hf" and from_command_line:
        if select_value(config, "model.weights") is not None and "model.weights" not in user_values:
            says = f"model.hf={path}: leaves out model.weights of the recipe: set model.weights={path} to begin with its weights"
            config["reading"] = join_readings(config.get("reading"), says)
        beside = {"lora": beside["lora"]} if beside.get("lora") else {}
    elif isinstance(recipe_model, dict) and "hf" in recipe_model:
        beside = recipe_model
    source = _resolve_path(path, file, from_command_line=from_command_line)
    is_hf = any(map(ask_transformers.is_hf_family, (user_values.get("model.family"), beside.get("family"))))
    try:
        sizes = ask_transformers.model_keys(source) if is_hf or needs_family_hf(source) else read_hf_config(source)
    except Unreadable as error:
        raise Unreadable(
            replace(each, **{part: getattr(each, part).replace("model.hf=", f"{key}=") for part in ("says", "mend")})
            for each in error.problems
        ) from None
    if beside is config.get("model"):
        check_sizes_agree(sizes, config.model, file)
    config.model = OmegaConf.merge(sizes, beside, {"hf": str(source)})


def _sizes_key(config: DictConfig, user_values: Mapping[str, Any]) -> str:
    """Return the key whose folder has the model's sizes."""
    has_sizes = any(key in user_values or select_value(config, key) is not None for key in ("model.hf", "model.family"))
    return "model.hf" if has_sizes else "model.weights"


def replace_length(config: DictConfig, user_values: Mapping[str, Any]) -> None:
    """Drop the recipe's length of a run if the user sets the other one: train.steps replaces train.tokens, and the reverse."""
    for key, other in (LENGTHS, LENGTHS[::-1]):
        if user_values.get(f"train.{key}") is not None and f"train.{other}" not in user_values:
            if select_value(config, f"train.{other}") is not None:
                OmegaConf.update(config, f"train.{other}", None)
            return


def resolve_weights_paths(config: DictConfig, file: Path, user_keys: Container[str]) -> None:
    """Make the paths of WEIGHTS absolute, because ranks may run in other folders."""
    for key in WEIGHTS:
        path = select_value(config, key)
        if isinstance(path, str):
            OmegaConf.update(config, key, str(_resolve_path(path, file, from_command_line=key in user_keys)))


def fill_in_adapter(model: object) -> None:
    """Set the keys of model.lora that a composed model leaves out to those of the adapter that it begins with; raises Unreadable. Where
    the model has the rank, a run that resumes needs no folder."""
    lora = model.get("lora") if isinstance(model, dict) else None
    if not isinstance(lora, dict) or not isinstance(folder := lora.get("weights"), str):
        return
    from ...trainer.models.hf_format.adapter_folder import read_adapter_config
    from ...trainer.models.hf_format.adapter_names import lora_of_config

    if not {"rank", "alpha", "targets"} <= lora.keys() and ("rank" not in lora or Path(folder).is_dir()):
        said = read_adapter_config(Path(folder))
        found = lora_of_config(said)
        if not found and "rank" not in lora:
            says = f"{folder}/adapter_config.json names no r and lora_alpha: its peft_type is {said.get('peft_type', 'not named')}"
            raise Unreadable([Problem(rule="lora", says=says, mend="name the folder of a LoRA adapter")])
        lora |= found | lora


def read_schedule(config: DictConfig, file: Path, problems: list[Problem], *, from_command_line: bool) -> None:
    """Keep the text of the CSV file that `parallel.schedule` names, because ranks may run where it is not."""
    path = select_value(config, "parallel.schedule")
    if not isinstance(path, str) or not path.endswith(".csv"):
        return
    at = _resolve_path(path, file, from_command_line=from_command_line)
    try:
        OmegaConf.update(config, "parallel.actions", read_plain(at).decode(), force_add=True)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text"
        problems.append(Problem(rule="schedule", says=f"parallel.schedule={at}: {why}"))


def _resolve_path(path: str, file: Path, *, from_command_line: bool) -> Path:
    """Return an absolute path: relative to the recipe if it exists there, else, and on the command line, to the current folder."""
    near = file.parent / expand_home(path)
    return (near if os.path.exists(near) and not from_command_line else expand_home(path)).absolute()


def to_plain(config: DictConfig, problems: list[Problem]) -> dict[str, Any]:
    """Return plain data with every ${...} resolved and without missing values (???); add what can't be resolved to `problems`."""
    raw: Any = OmegaConf.to_container(config, resolve=False)
    plain: dict[str, Any] = raw if _is_resolved(raw) else _plain_node(config, "", problems)
    return plain


def _is_resolved(raw: Any, dots: int = -1) -> bool:
    """Whether plain data has no ${...} and no missing value, and is not nested too deeply: then nothing is left to resolve, which takes
    most of the time of a composition."""
    if isinstance(raw, dict | list):
        return dots < MOST_DOTS - 1 and all(_is_resolved(each, dots + 1) for each in (raw.values() if isinstance(raw, dict) else raw))
    return not isinstance(raw, str) or ("${" not in raw and raw != "???")


def _plain_node(node: DictConfig | ListConfig, at: str, problems: list[Problem]) -> Any:
    plain: dict[Any, Any] = {}
    names: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        key = f"{at}{name}"
        try:
            if OmegaConf.is_missing(node, name):
                continue
            value = node[name]
        except OmegaConfBaseException as error:
            raise_if_interrupted(error)
            raw = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index,unused-ignore]
            problems.append(Problem(rule="interpolation", says=f"{key}={raw} can't be resolved", mend=str(error).splitlines()[0]))
            continue
        if key.count(".") >= MOST_DOTS:
            problems.append(Problem(rule="interpolation", says=f"{at.split('.')[0]} contains itself", mend="break the loop of ${...}"))
        else:
            plain[name] = _plain_node(value, f"{key}.", problems) if isinstance(value, DictConfig | ListConfig) else value
    return plain if isinstance(node, DictConfig) else list(plain.values())


def config_yaml(plain: Mapping[str, Any]) -> str:
    """Return plain data as YAML that `conf=` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(plain)))
