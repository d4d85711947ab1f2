"""Ranks get the absolute paths of a run, so they may start in any folder."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from msgspec import json as encoder

from distrain.cli.config.load import load_recipe
from distrain.trainer.loop.data.check_data import TEXT_SEARCH
from distrain.trainer.loop.data.files.find import find_files
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.absolute_paths import PATH_KEYS, with_absolute_paths
from distrain.trainer.rundir.files import write_launch_files
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Run

# Keys of free text that do not name a file.
NOT_PATHS = {
    "name", "reading", "engine", "model.family", "cluster.device.name", "parallel.schedule", "parallel.actions",
    "data.text_key",
    "data.prompt_key", "data.completion_key", "data.messages_key", "data.chosen_key", "data.rejected_key",
    "launch.include", "launch.exclude", "launch.address", "launch.environment", "checkpoint.accept", "search.nodes",
}  # fmt: skip


def texts_of(part: Any, at: str = "") -> list[str]:
    """Return the dotted keys of a data class that may have any text as value."""
    keys: list[str] = []
    for row in fields(part):
        value = getattr(part, row.name)
        if is_dataclass(value):
            keys += texts_of(value, f"{at}{row.name}.")
        elif "str" in str(row.type).replace("dict[str", ""):
            keys.append(f"{at}{row.name}")
    return keys


def test_every_text_key_is_known_to_be_a_path_or_not() -> None:
    """A new key must be added to one of the two tables."""
    assert set(texts_of(load_recipe("quickstart"))) - NOT_PATHS == {*PATH_KEYS, "data.path", "data.tokenizer", "data.validate"}


@pytest.fixture
def relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run whose paths are all relative."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    values: list[tuple[str, object]] = [(key, f"in/{key}") for key in PATH_KEYS]
    return with_changes(
        load_recipe("quickstart"), [*values, ("data.path", ("a.txt", "~/b", "/c/*.txt", "d/**/*.txt")), ("data.tokenizer", "tok")]
    )


def test_ranks_get_absolute_paths_and_the_run_keeps_its_own(relative: Run, tmp_path: Path) -> None:
    write_launch_files(relative, make_plan(relative), tmp_path)
    run = encoder.decode((tmp_path / "run.json").read_bytes(), type=Run)
    for key in PATH_KEYS:
        assert attrgetter(key)(run) == f"{tmp_path}/in/{key}"
        assert attrgetter(key)(relative) == f"in/{key}"
    assert run.data.path == (f"{tmp_path}/a.txt", "/home/me/b", "/c/*.txt", f"{tmp_path}/d/**/*.txt")
    assert run.data.tokenizer == f"{tmp_path}/tok"
    assert with_absolute_paths(run) == run


@pytest.mark.parametrize("word", ["bytes", "~nobody-of-this-name/x", "a b/$c'\n", ".", ".."])
def test_a_tokenizer_is_a_name_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = with_absolute_paths(with_changes(load_recipe("quickstart"), [("data.tokenizer", word)])).data.tokenizer
    assert path == (word if word == "bytes" else str(tmp_path / word))


def test_an_empty_path_stays_empty() -> None:
    run = with_changes(load_recipe("quickstart"), [("data.path", ""), ("data.cache", ""), ("log.dir", "/runs")])
    assert with_absolute_paths(run) == run


PATTERN_NAME = "a[1]b *{x}"  # a folder whose name is a pattern that does not match the name


@pytest.mark.parametrize("word", ["*.txt", "one.txt", "t[ow]o.txt", "**/*.txt", ".", "is[it].txt"])
def test_a_pattern_matches_the_same_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    folder = tmp_path / PATTERN_NAME
    (folder / "in").mkdir(parents=True)
    for name in ("one.txt", "two.txt", "in/three.txt", "is[it].txt"):
        (folder / name).write_text(name)
    monkeypatch.chdir(folder)
    found_there = find_files([word], TEXT_SEARCH, print, [])
    absolute = with_absolute_paths(with_changes(load_recipe("quickstart"), [("data.path", word)])).data.path
    assert isinstance(absolute, str)
    assert os.path.isabs(absolute)
    monkeypatch.chdir(tmp_path)
    found_elsewhere = find_files([absolute], TEXT_SEARCH, print, [])
    assert [(each.name, each.size) for each in found_elsewhere[0]] == [(each.name, each.size) for each in found_there[0]]
    assert found_there[0]


def test_show_prints_paths_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distrain.cli.app import command

    monkeypatch.chdir(tmp_path)
    assert command(["show", "conf=quickstart", "data=text", "data.path=a/*.txt", "log.dir=runs"]) == 0
    said = capsys.readouterr().out
    assert "path: a/*.txt\n" in said
    assert "dir: runs\n" in said
