"""What a recipe's own section is to an option that is chosen on the command line for it: whole, or keys that stay over the option's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..keys.keys import config_keys

# Keys that make a section a whole: sizes of a model, figures of a device. Those of another model or device are no changes of an option.
WHOLE = {"model": ("family", "hf"), "cluster.device": ("memory",)}
CHOSEN = "name"  # the key of optim, data and launch that says which one it is: choosing an option decides it
OF_DEVICE = ("price", "mtbf")  # keys of a cluster that are figures of one device
SIZES = ("nodes", "gpus", "storage")  # what stays of a cluster whose device an option replaces


def is_whole_section(key: str, own: Mapping[Any, Any]) -> bool:
    """Return whether a recipe's own section describes a whole, as files that distrain writes do: an option takes its place."""
    prefix = f"{key}."
    fields = {known.removeprefix(prefix).partition(".")[0] for known in config_keys() if known.startswith(prefix)}
    is_full = key != "cluster" and bool(fields) and fields <= set(map(str, own))
    return is_full or any(own.get(each) is not None for each in WHOLE.get(key, ()))


def kept_keys(key: str, own: Mapping[Any, Any]) -> list[str]:
    """Return the keys of a recipe's own section that stay over a chosen option: not its name, nor another device's figures."""
    device = own.get("device") if key == "cluster" and "device" in own else None
    is_other = isinstance(device, str) or (isinstance(device, Mapping) and is_whole_section("cluster.device", device))
    return [str(name) for name in own if (name in SIZES if is_other else name != CHOSEN)]


def dropped_keys(key: str, own: Mapping[Any, Any]) -> list[str]:
    """Return the keys of a recipe's own cluster that go with its device when another is chosen, and that a user may miss."""
    kept = kept_keys(key, own)
    return [f"{key}.{name}" for name in OF_DEVICE if key == "cluster" and own.get(name) is not None and name not in kept]
