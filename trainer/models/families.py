"""The model families, one row each: what a family's table is, and what its models have by default."""

from __future__ import annotations

from collections.abc import Callable

from ..spec.run import Model, Train
from .auto.ops import table as hf
from .bert.ops import table as bert
from .gpt.ops import table as gpt
from .llama.ops import table as llama
from .moe.ops import table as moe
from .table import Table

# What a model of a family has where nothing is said of it; of family hf its config.json says all.
# fmt: off
_LLAMA = {"norm": "rmsnorm", "act": "swiglu", "positions": "rope", "bias": False, "tied": False}
DEFAULTS: dict[str, dict[str, object]] = {
    "bert":  {"norm": "layernorm", "act": "gelu",      "positions": "learned", "bias": True, "tied": True},  # arXiv:1810.04805
    "gpt":   {"norm": "layernorm", "act": "gelu_tanh", "positions": "learned", "bias": True, "tied": True},  # GPT-2
    "llama": _LLAMA,  # arXiv:2302.13971
    "moe":   _LLAMA,  # Mixtral: arXiv:2401.04088
}
# fmt: on

FAMILIES: dict[str, Callable[[Model, Train], Table]] = {
    "bert": bert,
    "gpt": gpt,
    "hf": hf,
    "llama": llama,
    "moe": moe,
}
