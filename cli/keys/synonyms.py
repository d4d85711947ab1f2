"""Our key for a key of another trainer."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...trainer.spec.problem import Problem, no_key_problem
from ...trainer.spec.read import accepts, value_text
from .synonym import Synonym
from .synonym_rows import ROWS

# Names that mean another thing in a section, so they match only without one.
TOP_LEVEL_ONLY = ("optimizer", "lr", "block_size", "gpus", "nodes", "patience")
EPOCHS = "num_train_epochs"  # a key whose problem says how many steps they are, where the data are here


@cache
def _table() -> dict[str, Synonym]:
    return {name: row for row in ROWS for name in row.names}


def find_synonym(key: str) -> Synonym | None:
    """Return the row for a key of another trainer, written with dashes or underscores and in any section; None for an unknown key."""
    parts = [part for part in key.strip("+~- ").lower().replace("-", "_").split(".") if part]
    names = [".".join(parts[at:]) for at in range(len(parts))]
    rows = (_table().get(name) for at, name in enumerate(names) if at == 0 or name not in TOP_LEVEL_ONLY)
    return next((row for row in rows if row), None)


def synonym_problem(key: str, value: Any = None) -> Problem | None:
    """Return the problem of a key of another trainer, with our key, and its value if there is an equivalent; None for an unknown key."""
    row = find_synonym(key)
    if row is None:
        return None
    if not row.key:
        return no_key_problem(key, row.note)
    note = f" ({row.note})" if row.note else ""
    settings = _our_settings(value, row)
    return no_key_problem(key, f"write {' '.join(settings) or f'{row.key}=VALUE'}{note}", settings)


def value_here(key: str, value: Any) -> str:
    """Return another trainer's value for what is a key of ours too, such as `precision`; "" if there is none."""
    if accepts(key, value):
        return value_text(value)
    text = value_text(value)
    return next((row.values[text] for row in ROWS if row.key == key and row.values and text in row.values), "")


def _our_settings(value: Any, row: Synonym) -> list[str]:
    """Return the KEY=VALUEs that are the equivalent of another trainer's value; none if there is no equivalent."""
    if value is None or value in ("", -1, "-1"):  # -1 is "all" or "the rest" there
        return []
    text = value_text(value)
    if row.values is not None:
        return [] if text not in row.values else f"{row.key}={row.values[text]}".split(" ")
    is_ours = text not in ("auto", "inf", "nan") and accepts(row.key, value)  # auto: whoever launches sets it
    return [f"{row.key}={text}"] if is_ours else []
