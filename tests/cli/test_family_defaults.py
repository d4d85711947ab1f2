"""A model of a family has what that family has, where nothing is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load
from distrain.trainer.models.families import FAMILIES

SIZES = "  layers: 2\n  hidden: 64\n  heads: 4\n  vocab: 256\n"
REST = "cluster: {nodes: 1, gpus: 1, device: {name: x, memory: 1e9}}\nparallel: {}\ntrain: {batch: 1, seq: 8, steps: 1}\n"


def recipe(folder: Path, family: str, more: str = "") -> str:
    file = folder / "mine.yaml"
    file.write_text(f"model:\n  family: {family}\n{SIZES}{more}{REST}")
    return str(file)


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.defaults])
def test_sizes_alone_make_a_model_of_the_family(tmp_path: Path, family: str) -> None:
    model = load(recipe(tmp_path, family)).model
    assert {key: getattr(model, key) for key in FAMILIES[family].defaults} == FAMILIES[family].defaults


def test_every_family_with_parts_of_its_own_choice_has_defaults() -> None:
    assert all(bool(row.defaults) != row.made_by_transformers for row in FAMILIES.values())


@pytest.mark.parametrize("said", ["norm: layernorm", "act: geglu", "bias: true", "tied: true", "positions: none"])
def test_what_is_said_stays(tmp_path: Path, said: str) -> None:
    key, _, value = said.partition(": ")
    shown = getattr(load(recipe(tmp_path, "llama", f"  {said}\n")).model, key)
    assert (str(shown).lower() if isinstance(shown, bool) else shown) == value


def test_another_family_on_the_command_line_brings_its_own_defaults() -> None:
    model = load("quickstart", ["model.family=llama"]).model
    assert {key: getattr(model, key) for key in FAMILIES["llama"].defaults} == FAMILIES["llama"].defaults


def test_what_the_command_line_says_beside_another_family_stays() -> None:
    model = load("quickstart", ["model.family=llama", "model.norm=layernorm"]).model
    assert (model.norm, model.act) == ("layernorm", "swiglu")


def test_what_a_recipe_says_against_its_family_stays_under_another() -> None:
    assert load("nano_shakespeare", ["data=stdlib", "model.family=llama"]).model.bias is False
    assert load("nano_shakespeare", ["data=stdlib", "model.family=llama", "model.act=geglu"]).model.act == "geglu"


def test_show_prints_the_familys_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", f"conf={recipe(tmp_path, 'llama')}"]) == 0
    shown = capsys.readouterr().out
    assert "  norm: rmsnorm\n" in shown
    assert "  positions: rope\n" in shown
