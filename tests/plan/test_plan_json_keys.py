"""Every key of `distrain plan --json` has a unit and a meaning, and docs/plan_json.md lists them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from distrain.cli.app import command
from distrain.scripts.plan_keys import PAGE, page_text
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.plan.plan_json_keys import PLAN_KEYS


def keys_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each key of a dataclass of the plan, and whether it may be null."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
        (held,) = (each for each in options if each is not NoneType)
        path, inner = f"{prefix}{field.name}", held
        if get_origin(held) is tuple and is_dataclass(get_args(held)[0]):
            path, inner = f"{path}[]", get_args(held)[0]
        elif get_origin(held) is dict and is_dataclass(get_args(held)[1]):
            path, inner = f"{path}.*", get_args(held)[1]
        yield path, NoneType in options
        if is_dataclass(inner):
            yield from keys_of(inner, f"{path}.")


KEYS = dict(keys_of(Plan))


def test_every_key_has_a_unit_and_a_meaning() -> None:
    assert set(PLAN_KEYS) == set(KEYS)
    assert all(unit and meaning for unit, meaning in PLAN_KEYS.values())


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_may_be_null_says_when(key: str) -> None:
    assert ("null" in PLAN_KEYS[key][1]) == KEYS[key]


def test_the_page_is_made_of_them() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text()


def printed_keys(value: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of a JSON document as the table names them; tables by free names are named `.*`, or not opened."""
    if isinstance(value, list):
        for each in value:
            yield from printed_keys(each, f"{path}[]") if isinstance(each, dict) else ()
        return
    for key, inner in value.items():
        found = f"{path}.{key}" if path else key
        known = next((each for each in (found, f"{found}[]", f"{found}.*", f"{path}.*") if each in PLAN_KEYS), found)
        yield known
        if isinstance(inner, dict) and known not in ("mesh", "groups"):
            if known == "bars.*":
                for each in inner.values():
                    yield from printed_keys(each, known)
            else:
                yield from printed_keys(inner, found)
        elif isinstance(inner, list):
            yield from printed_keys(inner, found)


@pytest.mark.parametrize("words", ["conf=mixtral_8x7b", "conf=gpt3_175b train.rampup.batch=32 train.rampup.by=32 train.rampup.until=1e9"])
def test_a_printed_plan_has_no_other_keys(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command(["plan", *words.split(), "--json"])
    found = set(printed_keys(json.loads(capsys.readouterr().out)))
    assert found <= set(PLAN_KEYS)
    assert {"operators[].peak", "memory.stages[].bytes.total", "bars.*.low", "time.step"} <= found
