"""Where rows go: metrics.jsonl loses none to a full disk or a killed writer, and no sink ends a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.load import load
from distrain.tests.narrow import files_of_at_most
from distrain.trainer.loop import sinks
from distrain.trainer.loop.sinks import LONGEST, Lines, Row, Sinks
from distrain.trainer.spec.run import Run


@pytest.fixture(scope="module")
def run() -> Run:
    return load("quickstart")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder)]


def row(step: int) -> Row:
    return {"step": step, "loss": 0.5, "text": "x" * 60}


SIZE = len(json.dumps(row(1))) + 1  # bytes of a row


@pytest.mark.parametrize("room", [0, 1, SIZE - 1])
def test_rows_that_find_no_room_wait_for_it_in_order(run: Run, tmp_path: Path, room: int) -> None:
    said: list[str] = []
    made = Sinks(run, tmp_path, said.append)
    made.write(row(1))
    with files_of_at_most(SIZE + room):
        for step in (2, 3):
            made.write(row(step))
        assert steps(tmp_path) == [1], "nor is a part of one left"
    made.write(row(4))
    assert steps(tmp_path) == [1, 2, 3, 4]
    (line,) = said
    assert line.startswith("warning: metrics.jsonl: ")
    assert line.endswith("; its rows wait for room")


def test_rows_that_still_wait_are_tried_again_at_the_end(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(run, tmp_path, said.append)
    with files_of_at_most(SIZE):
        for step in (1, 2, 3):
            made.write(row(step))
    made.close({})
    assert steps(tmp_path) == [1, 2, 3]
    assert len(said) == 1


def test_rows_that_are_lost_are_said(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(run, tmp_path, said.append)
    with files_of_at_most(SIZE):
        for step in (1, 2):
            made.write(row(step))
        made.close({})
    assert steps(tmp_path) == [1]
    assert [line.partition("; ")[2] for line in said] == ["its rows wait for room", "its last rows are lost"]


def test_a_disk_that_fills_up_twice_is_said_twice(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(run, tmp_path, said.append)
    for step in (1, 3):
        with files_of_at_most(step * SIZE - 1):
            made.write(row(step))
        made.write(row(step + 1))
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert len(said) == 2


def test_a_file_that_can_not_be_made_is_made_later(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(run, tmp_path / "gone", said.append)
    made.write(row(1))
    (tmp_path / "gone").mkdir()
    made.write(row(2))
    assert steps(tmp_path / "gone") == [1, 2]
    assert len(said) == 1


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "x", "x" * (LONGEST - 2 * SIZE - 1)])
def test_the_half_line_of_a_killed_writer_is_taken_off(run: Run, tmp_path: Path, torn: str) -> None:
    whole = "".join(json.dumps(row(step)) + "\n" for step in (1, 2))
    (tmp_path / "metrics.jsonl").write_text(whole + torn)
    made = Lines(run, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    made.write(row(3))
    made.close({})
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("there", ["", '{"step": 1'])
def test_a_file_of_no_line_is_empty_afterwards(run: Run, tmp_path: Path, there: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(there)
    Lines(run, tmp_path).close({})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_what_is_no_number_is_null(run: Run, tmp_path: Path) -> None:
    made = Lines(run, tmp_path)
    made.write({"step": 1, "loss": float("nan"), "norm": float("inf"), "lr": 1e-3, "samples": (0, 7), "skipped": True})
    made.close({})
    assert rows(tmp_path) == [{"step": 1, "loss": None, "norm": None, "lr": 1e-3, "samples": [0, 7], "skipped": True}]


class Breaks:
    """A sink of somebody else's."""

    calls = 0

    def __init__(self, run: Run, folder: Path) -> None:
        if run.name == "at once":
            raise RuntimeError("no server\nand more")

    def write(self, row: Row) -> None:
        Breaks.calls += 1
        raise RuntimeError if row["step"] == 1 else AssertionError("it was left")

    def close(self, summary: Row) -> None:
        raise AssertionError("it was left")


@pytest.mark.parametrize(("name", "why"), [("at once", "no server"), ("later", "RuntimeError")])
def test_a_sink_that_raises_is_said_once_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setitem(sinks.SINKS, "tensorboard", Breaks)
    said: list[str] = []
    made = Sinks(load("quickstart", [f"name={name}", "log.sinks=[jsonl,tensorboard]"]), tmp_path, said.append)
    for step in (1, 2):
        made.write(row(step))
    made.close({})
    assert said == [f"warning: log sink tensorboard stopped: {why}"]
    assert steps(tmp_path) == [1, 2]
