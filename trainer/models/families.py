"""The model families, one row each: what a family's table is, and what its model must say."""

from __future__ import annotations

from collections.abc import Callable

from ..spec.run import Model, Train
from .auto.ops import table as hf
from .bert.ops import table as bert
from .gpt.ops import table as gpt
from .llama.ops import table as llama
from .moe.ops import table as moe
from .table import Table

FAMILIES: dict[str, Callable[[Model, Train], Table]] = {
    "bert": bert,
    "gpt": gpt,
    "hf": hf,
    "llama": llama,
    "moe": moe,
}
