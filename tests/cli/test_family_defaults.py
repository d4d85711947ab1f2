"""A family's defaults fill in the keys of `model` that a recipe leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.trainer.models.families import FAMILIES

SIZES = "  layers: 2\n  hidden: 64\n  heads: 4\n  vocab: 256\n"
REST = "cluster: {nodes: 1, gpus: 1, device: {name: x, memory: 1e9}}\nparallel: {}\ntrain: {batch: 1, seq: 8, steps: 1}\n"


def recipe(folder: Path, family: str, more: str = "") -> str:
    file = folder / "mine.yaml"
    file.write_text(f"model:\n  family: {family}\n{SIZES}{more}{REST}")
    return str(file)


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.defaults])
def test_sizes_and_a_family_make_a_complete_model(tmp_path: Path, family: str) -> None:
    model = load_recipe(recipe(tmp_path, family)).model
    assert {key: getattr(model, key) for key in FAMILIES[family].defaults} == FAMILIES[family].defaults


def test_every_family_has_defaults_except_those_made_by_transformers() -> None:
    assert all(bool(row.defaults) != row.made_by_transformers for row in FAMILIES.values())


@pytest.mark.parametrize("line", ["norm: layernorm", "act: geglu", "bias: true", "tied: true", "positions: none"])
def test_a_key_in_the_recipe_wins_over_the_default(tmp_path: Path, line: str) -> None:
    key, _, value = line.partition(": ")
    actual = getattr(load_recipe(recipe(tmp_path, "llama", f"  {line}\n")).model, key)
    assert (str(actual).lower() if isinstance(actual, bool) else actual) == value


def test_another_family_on_the_command_line_brings_its_defaults() -> None:
    model = load_recipe("quickstart", ["model.family=llama"]).model
    assert {key: getattr(model, key) for key in FAMILIES["llama"].defaults} == FAMILIES["llama"].defaults


def test_keys_on_the_command_line_win_over_the_defaults_of_another_family() -> None:
    model = load_recipe("quickstart", ["model.family=llama", "model.norm=layernorm"]).model
    assert (model.norm, model.act) == ("layernorm", "swiglu")


def test_a_key_that_differs_from_its_familys_default_stays_under_another_family() -> None:
    assert load_recipe("nano_shakespeare", ["data=stdlib", "model.family=llama"]).model.bias is False
    assert load_recipe("nano_shakespeare", ["data=stdlib", "model.family=llama", "model.act=geglu"]).model.act == "geglu"


def test_show_prints_the_defaults_of_the_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", f"conf={recipe(tmp_path, 'llama')}"]) == 0
    out = capsys.readouterr().out
    assert "  norm: rmsnorm\n" in out
    assert "  positions: rope\n" in out
