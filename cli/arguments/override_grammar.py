"""Reads one override by Hydra's grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from hydra.core.override_parser import types as hydra_types
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ...trainer.spec.numbers.quantity import dimension_of
from ...trainer.spec.problem import Problem
from ..keys.keys import takes_text
from .arguments import syntax_problem
from .overrides import MOST_LAYOUTS, Override

COMMA_KEYS = ("launch.include", "launch.exclude")  # keys whose values contain commas that do not sweep: host1:0,2


def parse_override(text: str, known: Mapping[str, Any]) -> Override | Problem:
    """Parse an override. A value that the grammar can't read (~/config.json) is taken as text if its key takes text or a quantity."""
    key, _, value = text.partition("=")
    quoted = hydra_types.QuotedString(text=value, quote=hydra_types.Quote.single).with_quotes()
    name = key.lstrip("+")
    is_text = name in known and takes_text(known[name])
    for attempt in (text, f"{key}={quoted}") if is_text or dimension_of(name) else (text,):
        try:
            row = _parse_with_grammar(attempt)
            is_sweep = row.is_sweep_override()
            if attempt is text and name in COMMA_KEYS and is_sweep:
                continue
            parsed = None if is_sweep else row.value()
            return Override(
                text=text,
                key=row.key_or_group,
                package=row.package,
                deletes=row.is_delete(),
                value=value if is_text and isinstance(parsed, int | float) else parsed,  # a number for a text key stays as typed
                sweeps=_sweep_values(row) if is_sweep else None,
            )
        except (HydraException, ValueError):
            continue
    return syntax_problem(text, known)


@lru_cache(maxsize=4096)
def _parse_with_grammar(text: str) -> hydra_types.Override:
    """Parse an override with Hydra's grammar, a text once: the layouts of a sweep share most of theirs. Raises HydraException."""
    return OverridesParser.create().parse_override(text)


def _sweep_values(row: hydra_types.Override) -> Sequence[str] | Callable[[list[str]], list[str]]:
    """Return the values that an override sweeps, as text, or a filter of option names; raises if the values are infinite."""
    value = row.value()
    return value.filter if isinstance(value, hydra_types.Glob) else tuple(islice(row.sweep_string_iterator(), MOST_LAYOUTS + 1))
