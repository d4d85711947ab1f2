"""`distrain report A B ...`: runs side by side, their differences, losses at common steps, and one chart."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from msgspec import json as encoder

from distrain.cli.pages.compare_page import MARKS, common_steps, compared_runs, comparison_text, config_differences
from distrain.cli.pages.loss_chart import HEIGHT, LABEL_WIDTH, SHARED_CELL, comparison_chart
from distrain.cli.pages.text_layout import DEFAULT_WIDTH, Style
from distrain.tests.fakes.run_command import run_command
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.measured_run import read_measured_run
from distrain.trainer.spec.numbers.as_text import count_text
from distrain.trainer.spec.run import Run

SMALL = ("model.hidden=32", "model.heads=2", "model.ffn=64", "model.layers=1", "train.seq=16", "train.batch=4", "train.microbatch=2")
WORDS = ("data=synthetic", *SMALL, "optim.warmup=1", "checkpoint.every=0", "train.evaluate={every: 4, batches: 1}")


@pytest.fixture(scope="module")
def runs(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of 8 steps: `slow` logs every step, `fast` every second one, at ten times the rate and with other betas."""
    top = tmp_path_factory.mktemp("side")
    made = []
    for name, words in {"slow": ("log.every=1",), "fast": ("log.every=2", "optim.lr=1e-2", "optim.betas=[0.8,0.9]")}.items():
        ranks.train(top / name, "quickstart", *WORDS, "train.steps=8", *words)
        run = encoder.decode((top / name / "run.json").read_bytes(), type=Run)
        (top / name / "plan.json").write_bytes(encoder.encode(make_plan(run)))
        made.append(top / name)
    return made[0], made[1]


def sections(page: str) -> dict[str, list[str]]:
    """The sections of a page: their lines by their heading."""
    return {part.splitlines()[0]: part.splitlines()[1:] for part in page.split("\n\n")}


def test_the_page_names_each_run_and_the_keys_that_differ(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(f"report {runs[0]} {runs[1]}", capsys)
    page = sections(out)
    assert (status, err) == (0, "")
    text = " ".join(out.split())  # where a line breaks depends on the folder's name
    assert text.startswith(f"A {runs[0]}: 8 of 8 steps; loss ")
    assert f"B {runs[1]}: 8 of 8 steps; loss " in text
    rows = [line.split() for line in page["What differs"]]
    assert rows == [["A", "B"], ["optim.lr", "0.001", "0.01"], ["optim.betas", "[0.9,0.99]", "[0.8,0.9]"], ["log.every", "1", "2"]]
    assert max(map(len, (line for line in out.splitlines() if not line.startswith(("A  /", "B  /"))))) <= DEFAULT_WIDTH


def test_losses_are_side_by_side_at_the_steps_that_both_logged(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = sections(run_command(f"report {runs[0]} {runs[1]}", capsys)[1])
    slow, fast = (dict(read_measured_run(folder).losses) for folder in runs)
    head, *rows = [line.split() for line in page["Loss, nats a token"]]
    assert head == ["A", "B", "B", "-", "A"]
    assert rows == [["step", str(at), f"{slow[at]:.4f}", f"{fast[at]:.4f}", f"{fast[at] - slow[at]:+.4f}"] for at in (2, 4, 6, 8)]
    assert [line.split()[1] for line in page["Validation loss"][1:]] == ["4", "8"]


def test_the_run_with_the_lowest_loss_of_a_validation_is_named(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    last = {mark: read_measured_run(folder).validation[-1][1] for mark, folder in zip("AB", runs, strict=True)}
    best = min(last, key=lambda mark: last[mark])
    text = " ".join(run_command(f"report {runs[0]} {runs[1]}", capsys)[1].split())
    assert f"Lowest validation loss at step 8, the last that all logged: {best}, {last[best]:.4f}" in text


def test_speed_and_memory_are_shown_as_measured_and_as_planned(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = sections(run_command(f"report {runs[0]} {runs[1]}", capsys)[1])
    rows = {line.split("  ")[1].strip(): line for line in page["Measured, and (planned)"][1:]}
    assert list(rows) == ["weights", "gradients", "optimizer", "activations", "these together", "step", "tokens/s", "MFU"]
    held = [sum(each.measured or 0 for each in read_measured_run(folder).memory) for folder in runs]
    assert rows["weights"].count(f"{(read_measured_run(runs[0]).memory[0].measured or 0) / 1024:.1f} KiB (") == 2
    assert rows["these together"].count(f"{held[0] / 1024:.0f} KiB (") == 2
    assert f"{count_text(read_measured_run(runs[0]).speed[0].measured or 0)} (" in rows["tokens/s"]


def test_json_of_several_runs_is_a_list_and_of_one_a_document(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    both = json.loads(run_command(f"report {runs[0]} {runs[1]} --json", capsys)[1])
    assert [each["name"] for each in both] == ["slow", "fast"]
    assert json.loads(run_command(f"report {runs[0]} --json", capsys)[1]) == both[0]


def test_every_wrong_folder_is_named_at_once(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(f"report {tmp_path}/nowhere {runs[0]} {tmp_path}", capsys)
    assert (status, out) == (2, "")
    assert [line.split(": ")[1] for line in err.splitlines()] == [f"{tmp_path}/nowhere does not exist", f"{tmp_path} holds no run.json"]


def test_more_runs_than_there_are_marks_are_refused(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    many = " ".join([str(runs[0])] * (len(MARKS) + 1))
    assert run_command(f"report {many}", capsys)[::2] == (2, f"distrain: 53 runs are too many for a page: give at most {len(MARKS)}\n")


def test_runs_with_the_same_config_have_no_differences(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copytree(runs[0], tmp_path / "again")
    page = sections(run_command(f"report {runs[0]} {tmp_path}/again", capsys)[1])
    assert page["What differs"] == ["  nothing: their configs are the same"]
    assert f"Loss over steps; {SHARED_CELL}: several" in page


def test_a_new_run_and_a_damaged_one_do_not_spoil_the_page(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_bytes((runs[0] / "run.json").read_bytes())
    (tmp_path / "bad").mkdir()
    for name, content in {"run.json": b"\xff[", "metrics.jsonl": b"{\n[]\n", "plan.json": b"[]"}.items():
        (tmp_path / "bad" / name).write_bytes(content)
    status, out, err = run_command(f"report {runs[0]} {tmp_path}/new {tmp_path}/bad", capsys)
    assert (status, err) == (0, "")
    rows = [line.split() for line in sections(out)["Loss, nats a token"]]
    assert rows[0] == ["A", "B", "C"]
    assert rows[-1][-2:] == ["-", "-"]


def test_values_too_wide_for_columns_have_a_line_each(runs: tuple[Path, Path], tmp_path: Path) -> None:
    copytree(runs[0], tmp_path / "long")
    config = json.loads((runs[0] / "run.json").read_text())
    config["data"]["path"] = "x" * 70
    (tmp_path / "long" / "run.json").write_text(json.dumps(config))
    two = (runs[0], tmp_path / "long")
    rows = sections(comparison_text(compared_runs(two, two), Style()))["What differs"]
    assert rows == ["  data.path", "    A  null", f"    B  {'x' * 70}"]


def test_names_and_folders_are_not_compared(runs: tuple[Path, Path]) -> None:
    assert not {"name", "log.dir"} & config_differences(compared_runs(runs, runs)).keys()


# The chart

curve = st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6)), max_size=20, unique_by=lambda point: point[0])


@given(curves=st.dictionaries(st.sampled_from(MARKS[:4]), curve, max_size=4), blocks=st.booleans())
def test_a_chart_has_a_fixed_size_and_only_the_marks_of_its_curves(curves: dict[str, list[tuple[int, float]]], blocks: bool) -> None:
    lines = comparison_chart(curves, Style(blocks=blocks))
    steps = {step for points in curves.values() for step, _ in points}
    assert len(lines) == (HEIGHT + 1 if len(steps) > 1 else 0)
    assert max(map(len, lines), default=0) <= DEFAULT_WIDTH
    drawn = set("".join(line[LABEL_WIDTH + 2 :] for line in lines[:HEIGHT])) - {" "}
    assert drawn <= {*(mark for mark, points in curves.items() if points), SHARED_CELL}


def test_curves_that_meet_share_a_cell() -> None:
    lines = comparison_chart({"A": [(0, 1.0), (10, 0.0)], "B": [(0, 0.0), (10, 0.0)]}, Style(blocks=False))
    top, bottom = lines[0][LABEL_WIDTH + 2 :], lines[HEIGHT - 1][LABEL_WIDTH + 2 :]
    assert set(top) == {"A"}
    assert bottom.startswith("B")
    assert bottom.endswith(SHARED_CELL)
    assert lines[0].split()[0] == "1.000"


@given(curves=st.lists(curve, max_size=4))
def test_common_steps_are_those_that_every_curve_with_points_has(curves: list[list[tuple[int, float]]]) -> None:
    found = common_steps(curves)
    assert found == sorted(found)
    full = [dict(points) for points in curves if points]
    assert set(found) == {step for step in (full[0] if full else ()) if all(step in points for points in full)}
