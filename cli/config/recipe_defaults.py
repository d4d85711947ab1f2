"""Changes of a recipe's defaults and own sections that options chosen on the command line ask for, before Hydra composes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..arguments.cluster_argument import join_readings
from ..arguments.overrides import Override
from .interrupts import raise_if_interrupted
from .own_sections import OF_DEVICE, dropped_keys, is_whole_section, kept_keys

LINKS = {"inside": "inside a node", "between": "between nodes"}  # keys of a cluster, and where each link is


def without_default(recipe: DictConfig, override: str) -> DictConfig:
    """Return a recipe without one `override` entry of its defaults: another cluster brings its own device."""
    copy = recipe.copy()
    if isinstance(recipe.get("defaults"), ListConfig):
        drop = (f"override /{override}", f"override {override}")
        copy["defaults"] = [each for each in recipe["defaults"] if not (isinstance(each, DictConfig) and set(each) & set(drop))]
    return copy


def with_plain_default(recipe: DictConfig, group: str) -> DictConfig:
    """Return a recipe whose `override` entries of a group choose it plainly, as nothing else in its defaults does. They come first: Hydra
    wants overrides last, and a recipe's own keys stay over an option that stands before `_self_`."""
    copy = recipe.copy()
    forms = (f"override /{group}", f"override {group}")
    if isinstance(recipe.get("defaults"), ListConfig):
        plain, others = list[Any](), list[Any]()
        for each in recipe["defaults"]:
            names = [name for name in each if name in forms] if isinstance(each, DictConfig) else []
            plain += [{f"/{group}": each[name]} for name in names]
            if not names:
                others.append(each)
        copy["defaults"] = [*plain, *others]
    return copy


def without_other_device(recipe: DictConfig, choices: Sequence[Override]) -> DictConfig:
    """Return a recipe whose defaults choose a cluster without the figures of a whole device of its own, where another device or cluster is
    chosen; with another cluster also without what goes with the device."""
    chosen = {each.key: each for each in choices if each.key in ("cluster", "device") and not each.deletes}
    if not chosen or not _names_cluster(recipe):
        return recipe
    cluster: Any = OmegaConf.to_container(recipe, resolve=False).get("cluster")  # type: ignore[union-attr]
    device = cluster.get("device") if isinstance(cluster, dict) else None
    if not isinstance(device, dict) or not is_whole_section("cluster.device", device):
        return recipe
    copy = recipe.copy()
    if "cluster" in chosen:
        copy["cluster"] = {name: cluster[name] for name in kept_keys("cluster", cluster)}
        note_dropped(copy, chosen["cluster"], cluster)
    else:
        del copy["cluster"]["device"]
    return copy


def note_dropped(config: DictConfig, choice: Override, own: Any) -> None:
    """Add to the reading of a config what a chosen option leaves out of the recipe's own section."""
    if dropped := dropped_keys(choice.target_key, own):
        says = f"{choice.text}: leaves out {' and '.join(dropped)} of the recipe, which are another device's"
        config["reading"] = join_readings(config.get("reading"), says)


def device_figures(config: DictConfig) -> list[str]:
    """Return the keys of a composed cluster that are set and are figures of one device."""
    return [name for name in OF_DEVICE if select_value(config, f"cluster.{name}") is not None]


def note_links(config: DictConfig, choice: Override, before: DictConfig) -> None:
    """Add to the reading of a config that its links stay, where the chosen device is another GPU than that of the config `before`."""
    old, new = (select_value(each, "cluster.device.name") for each in (before, config))
    rates = [(where, select_value(config, f"cluster.{key}.bandwidth")) for key, where in LINKS.items()]
    known = [f"{rate / 1e9:g} GB/s {where}" for where, rate in rates if isinstance(rate, int | float)]
    if old and old != new and known and select_value(config, "cluster.device.kind") != "cpu":
        says = f"{choice.text}: links stay those of the cluster of {old} where no key sets them: {' and '.join(known)}, for each device"
        config["reading"] = join_readings(config.get("reading"), says)


def drop_device_figures(config: DictConfig, choice: Override, before: DictConfig) -> None:
    """Leave a cluster's figures of one device out of a config where the chosen device is another than that of the config `before`."""
    old = select_value(before, "cluster.device.name")
    if old in (None, select_value(config, "cluster.device.name")):
        return
    dropped = [name for name in device_figures(config) if config.cluster[name] == select_value(before, f"cluster.{name}")]
    for name in dropped:
        del config.cluster[name]
    if dropped:
        keys = " and ".join(f"cluster.{name}" for name in dropped)
        says = f"{choice.text}: leaves out {keys} of {old}"
        config["reading"] = join_readings(config.get("reading"), says)


def select_value(config: DictConfig, key: str) -> object:
    """Return the value of a key; None if it is missing, or if it can't be resolved, which `to_plain` reports."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        raise_if_interrupted(error)
        return None


def _names_cluster(recipe: DictConfig) -> bool:
    """Whether the defaults of a recipe choose a cluster."""
    defaults = recipe.get("defaults")
    named = [str(name) for each in defaults if isinstance(each, DictConfig) for name in each] if isinstance(defaults, ListConfig) else []
    return any(name.removeprefix("override ").strip("/") == "cluster" for name in named)
