"""docs/coming_from.md: each option of another trainer that it lists is answered with the key of its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distrain.cli.arguments.arguments import key_instead_of_option
from distrain.cli.keys import config_files
from distrain.cli.keys.keys import config_keys

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
TRAINERS = ["Megatron-LM", "torchtitan", "DeepSpeed", "Trainer"]


def rows() -> list[tuple[list[str], str]]:
    """The options of each row of the tables, and its last cell."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]
    return [([option for cell in row[:-1] for option in re.findall(r"`([^`]+)`", cell)], row[-1]) for row in cells if row[-1] != "distrain"]


def key_of(cell: str) -> str:
    """The key that a last cell begins with; "" where it says instead what an option follows from."""
    found = re.match(r"`([\w.]+)(=[^`]+)?`$", cell)
    return found[1] if found else ""


OPTIONS = [(option, cell) for options, cell in rows() for option in options]


@pytest.mark.parametrize(("option", "cell"), OPTIONS, ids=[option for option, _ in OPTIONS])
def test_an_option_is_answered_with_the_key_of_its_row(option: str, cell: str) -> None:
    name, _, value = option.lstrip("-").partition("=")
    problem = key_instead_of_option(name, value)
    assert problem is not None
    answer = problem.mend
    if not key_of(cell):
        assert answer == cell
    elif "=" in cell:
        assert re.fullmatch(rf"write {re.escape(cell.strip('`'))}( \(.*\)|, without dashes)?", answer)
    else:
        assert re.search(rf"write {re.escape(key_of(cell))}\b(?![.\w])", answer)


def test_every_row_has_an_option_and_a_key_that_exists_or_a_sentence() -> None:
    known = {*config_keys(), *config_files.groups(None)}
    assert [cell for options, cell in rows() if not options or (cell.startswith("`") and key_of(cell) not in known)] == []


def test_each_trainer_has_a_column_of_many_options() -> None:
    assert len(OPTIONS) >= 150
    tables = re.findall(r"^\| (.*) \| distrain \|$", PAGE.read_text(), re.MULTILINE)
    assert {name for table in tables for name in table.split(" | ")} == {*TRAINERS, "config.json of Hugging Face"}
