"""`distrain report` on saves and restarts: what rows of metrics.jsonl tell of them, whole, damaged or missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.html.report_html import report_html
from distrain.cli.pages.report_page import LONGEST_REASON, history_sentences, incident_lines, planned_measured_rows, report_text
from distrain.cli.pages.text_layout import Style
from distrain.cli.verbs.fit_run import closing_text
from distrain.cli.verbs.report import report_document
from distrain.tests.fakes.html_page import SVG, HtmlPage, text_of
from distrain.trainer.prove.checks.curve import read_curve
from distrain.trainer.rundir.measured_run import read_measured_run
from distrain.trainer.rundir.run_summary import run_summary

Rows = Sequence[dict[str, Any]]


def step(number: int) -> dict[str, Any]:
    """The row of a logged step."""
    return {"step": number, "loss": 4.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 1.0, "tokens_per_second": 8.0}


def save(number: int, seconds: float, pause: float, interval: float = 10.0, size: int = 1 << 20) -> dict[str, Any]:
    """The row of a complete save."""
    return {"step": number, "save_seconds": seconds, "save_bytes": size, "save_pause": pause, "save_interval": interval}


def at_end(number: int, seconds: float, pause: float, wait: float) -> dict[str, Any]:
    """The row of a save in the background that an attempt waited for after its last step."""
    return {**save(number, seconds, pause), "save_end_wait": wait}


def failed(number: int, pause: float) -> dict[str, Any]:
    """The row of a save that failed."""
    return {"step": number, "save_failed": 1, "save_pause": pause, "save_interval": 10.0}


def restart(number: int, says: str = "rank 1 was killed by SIGKILL; its log is /runs/a/1.log", **more: Any) -> dict[str, Any]:
    """The row of a restart."""
    return {"restart": number, "step": 10 * number, "lost_steps": number, "says": says, **more}


def write_run(folder: Path, rows: Rows, plan: dict[str, Any] | None = None, *, background: bool = False) -> Path:
    """Write a run folder with these rows; return it."""
    (folder / "run.json").write_text(json.dumps({"name": "run", "model": {}, "train": {}, "checkpoint": {"background": background}}))
    (folder / "plan.json").write_text(json.dumps({"run": {"steps": 99}} | (plan or {})))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def sentences(folder: Path, rows: Rows) -> list[str]:
    """What the report says of a run's history."""
    return history_sentences(read_measured_run(write_run(folder, rows)))


# fmt: off
SAVES: dict[str, tuple[Rows, list[str]]] = {
    "none": ([step(1)], []),
    "one": ([step(1), save(1, 2.0, 2.5)],
            ["1 save took 2.00 s and wrote 1.00 MiB; training waited 2.50 s in all, 25.0 % of the time up to the last"]),
    "of two attempts": ([step(2), save(2, 1.0, 1.0), save(4, 3.0, 3.0, 20.0), step(4), save(4, 8.0, 2.0)],
            [("3 saves took a median of 3.00 s (longest 8.00 s) and wrote 3.00 MiB; training waited 6.00 s in all, 15.0 % "
              "of the time up to the last")]),
    "the ends of two attempts": ([step(4), save(2, 3.0, 0.5), at_end(4, 3.0, 2.0, 1.5), step(6), at_end(6, 3.0, 3.5, 3.0)],
            [("3 saves took a median of 3.00 s (longest 3.00 s) and wrote 3.00 MiB; training waited 1.50 s in all, 5.9 % "
              "of the time up to the last")]),
    "one failed": ([save(2, 1.0, 1.0), failed(4, 4.0)],
            ["1 save took 1.00 s and wrote 1.00 MiB; 1 save failed; training waited 5.00 s in all, 25.0 % of the time up to the last"]),
    "all failed": ([failed(4, 1.0), failed(6, 1.0)],
            ["2 saves failed; training waited 2.00 s in all, 10.0 % of the time up to the last"]),
}
# fmt: on


@pytest.mark.parametrize("name", SAVES)
def test_saves_are_summed_up_in_a_sentence(name: str, tmp_path: Path) -> None:
    rows, says = SAVES[name]
    assert [each for each in sentences(tmp_path, rows) if "save" in each] == says


WHOLE = save(4, 1.0, 0.5, 5.0)
DAMAGED = [
    *({**WHOLE, key: value} for key in ("save_seconds", "save_bytes", "save_pause", "step") for value in ("x", None, -1, [1], 1e400, True)),
    *({name: value for name, value in WHOLE.items() if name != key} for key in ("save_seconds", "save_bytes", "step")),
    {**WHOLE, "save_failed": 1},
    {"step": 4, "save_pause": 1.0, "save_failed": "yes"},
]


@pytest.mark.parametrize("row", DAMAGED, ids=json.dumps)
def test_a_damaged_row_of_a_save_is_left_out(row: dict[str, Any], tmp_path: Path) -> None:
    says = "1 save took 1.00 s and wrote 1.00 MiB; training waited 500 ms in all, 10.0 % of the time up to the last"
    assert sentences(tmp_path, [row, WHOLE, row]) == [says]


@pytest.mark.parametrize("interval", ["x", None, -1, 1e400, [], 0])
def test_without_the_time_between_saves_there_is_no_share(interval: Any, tmp_path: Path) -> None:
    says = "1 save took 1.00 s and wrote 1.00 MiB; training waited 500 ms in all"
    assert sentences(tmp_path, [{**WHOLE, "save_interval": interval}]) == [says]
    (both,) = sentences(tmp_path, [{**WHOLE, "save_interval": interval}, {**WHOLE, "save_interval": 5.0}])
    assert both.endswith("; training waited 1.00 s in all") or interval == 0


def saving_rows(folder: Path) -> dict[str, list[str]]:
    """The table's rows of saves."""
    rows = planned_measured_rows(read_measured_run(folder))
    return {row[0]: row[1:] for row in rows if "save" in row[0]}


PLANNED = {"saving": {"seconds": 2.0, "pause": 0.25}}


SAVE, PAUSE, NONE = "save", "pause of a save", ["?", ""]
# fmt: off
TABLES: tuple[tuple[Rows, dict[str, Any], dict[str, list[str]]], ...] = (  # rows, the plan, the table's rows of saves
    ([step(8), save(4, 3.0, 0.5), at_end(6, 3.0, 3.5, 3.0), step(8), at_end(8, 3.0, 2.5, 2.0)], PLANNED,
     {SAVE: ["2.00 s", "3.00 s", "+50.0 %"], PAUSE: ["250 ms", "500 ms", "+100.0 %"]}),
    ([step(8), at_end(8, 3.0, 3.5, 3.25)], PLANNED, {SAVE: ["2.00 s", "3.00 s", "+50.0 %"], PAUSE: ["250 ms", "250 ms", "+0.0 %"]}),
    ([step(8), save(4, 3.0, 0.5)], {}, {SAVE: ["?", "3.00 s", ""], PAUSE: ["?", "500 ms", ""]}),
    ([step(8)], PLANNED, {SAVE: ["2.00 s", *NONE], PAUSE: ["250 ms", *NONE]}),
    ([step(8), failed(4, 9.0)], {"saving": None}, {}),
    ([step(8)], {"saving": {"seconds": "x", "pause": -1e400}}, {}),
)
# fmt: on


@pytest.mark.parametrize(("rows", "plan", "shown"), TABLES)
def test_saves_are_measured_beside_the_plan(rows: Rows, plan: dict[str, Any], shown: dict[str, list[str]], tmp_path: Path) -> None:
    """In the background no step follows the last save of an attempt, which all wait for: only its copy is a pause."""
    assert saving_rows(write_run(tmp_path, rows, plan, background=True)) == shown


def test_training_waits_for_the_last_save_too_where_none_is_in_the_background(tmp_path: Path) -> None:
    assert saving_rows(write_run(tmp_path, [step(8), save(8, 3.0, 3.5)]))["pause of a save"] == ["?", "3.50 s", ""]


def test_the_end_of_a_fit_leaves_saves_to_their_own_lines(tmp_path: Path) -> None:
    run = load_recipe("quickstart", [f"log.dir={tmp_path.parent}", f"name={tmp_path.name}"])
    write_run(tmp_path, [step(8), save(4, 3.0, 0.5)], PLANNED)
    assert not [line for line in closing_text(run).splitlines() if "save" in line]


def test_rows_of_saves_are_no_steps(tmp_path: Path) -> None:
    """A save in the background ends after later steps; of such a run its losses, steps and attempts are those of its steps."""
    steps = [step(number) for number in range(1, 7)]
    rows = [*steps[:5], save(2, 1.0, 0.1), steps[5], failed(4, 0.1)]
    found, curve = read_measured_run(write_run(tmp_path, rows)), read_curve(tmp_path)
    assert (found.steps, found.again, [at for at, _ in found.losses]) == (6, (), [1, 2, 3, 4, 5, 6])
    assert curve is not None
    assert curve.losses == (4.0,) * 6
    assert run_summary(tmp_path).steps == 6


def test_each_restart_has_its_reason_and_its_hosts(tmp_path: Path) -> None:
    rows = [
        step(12),
        restart(1, hosts="on a, c: spare c for b (at fault 2 times)"),
        {"restart": 2, "step": 20, "lost_steps": 0, "says": "x" * 999},
        {"restart": 3, "says": "host c did not answer", "hosts": "on a: without c (it can't be reached)"},
        {"goodput": 0.9},
    ]
    assert sentences(tmp_path, rows) == [
        "3 restarts after faults; goodput 90.0 %",
        "restart from step 10, 1 step lost: rank 1 was killed by SIGKILL; on a, c: spare c for b (at fault 2 times)",
        f"restart from step 20, 0 steps lost: {'x' * (LONGEST_REASON - 4)} ...",
        "restart that reached no step: host c did not answer; on a: without c (it can't be reached)",
    ]
    assert incident_lines(read_measured_run(tmp_path)) == ["3 restarts after faults"]


@pytest.mark.parametrize(("count", "more"), [(5, []), (6, ["and 1 more before these"]), (8, ["and 3 more before these"])])
def test_the_last_five_of_many_restarts_have_a_line(count: int, more: list[str], tmp_path: Path) -> None:
    says = sentences(tmp_path, [restart(number, "") for number in range(2, count + 2)])
    lines = [f"restart from step {10 * at}, {at} steps lost" for at in range(count - 3, count + 2)]
    assert says == [f"{count} restarts after faults", *lines, *more]


@pytest.mark.parametrize("row", [{"says": 5}, {"says": "", "step": 3}, {"says": None, "step": "x", "lost_steps": 1}, {"hosts": "on a"}])
def test_a_damaged_row_of_a_restart_is_left_out(row: dict[str, Any], tmp_path: Path) -> None:
    assert sentences(tmp_path, [step(1), {"restart": 1, **row}]) == []


def test_a_reason_of_a_damaged_type_is_none(tmp_path: Path) -> None:
    assert sentences(tmp_path, [restart(1, hosts=[1], says={"a": 1})])[1:] == ["restart from step 10, 1 step lost"]  # type: ignore[arg-type]


def test_json_has_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [step(8), save(4, 3.0, 0.5), restart(1, "killed", hosts="on a"), {"restart": 2, "says": "gone"}]
    assert command(["report", str(write_run(tmp_path, rows, PLANNED)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["restarts"] == [[10, 1]]
    assert found["restart_reasons"] == [
        {"step": 10, "lost": 1, "says": "killed", "hosts": "on a"},
        {"step": None, "lost": None, "says": "gone", "hosts": ""},
    ]
    assert found["saves"] == {
        "count": 1, "failed": 0, "seconds": 3.0, "longest": 3.0, "bytes": 1 << 20, "pause": 0.5, "share": 0.05
    }  # fmt: skip
    assert found["saving"] == [
        {"name": "save", "unit": "seconds", "planned": 2.0, "measured": 3.0, "drift": 0.5},
        {"name": "pause of a save", "unit": "seconds", "planned": 0.25, "measured": 0.5, "drift": 1.0},
    ]


def test_the_html_page_has_the_same(tmp_path: Path) -> None:
    hostile = "<b>\x1b[31m&amp;"
    rows = [step(2), step(14), save(4, 3.0, 0.5), restart(1, hostile, hosts="on a: spare a for b")]
    run = read_measured_run(write_run(tmp_path, rows, PLANNED))
    page = HtmlPage(report_html(run, "", ""))
    assert page.tiles["saves"] == ("1", "training waited 500 ms (5.0 %)")
    assert page.tiles["restarts after faults"] == ("1", "")
    says = r"restart from step 10, 1 step lost: <b>\x1b[31m&amp;; on a: spare a for b"
    assert f"R{says[1:]}" in page.texts("p", "note")
    (event,) = (each for each in page.drawing("Loss").iter(f"{SVG}path") if each.get("class") == "event")
    assert text_of(event) == says
    table = {row[0]: row[1:] for row in page.tables("Planned and measured")[0]}
    assert table["save"] == ["2.00 s", "3.00 s", "+50.0 %"]
    assert "saves" not in HtmlPage(report_html(read_measured_run(write_run(tmp_path, [step(2)])), "", "")).tiles


def test_the_page_is_plain_text(tmp_path: Path) -> None:
    rows = [step(2), save(2, 3.0, 0.5), restart(1, "\x1b[31m\nx"), restart(2, "y" * 60000)]
    page = report_text(read_measured_run(write_run(tmp_path, rows)), Style(blocks=False))
    assert page.isascii()
    assert "\x1b" not in page
    assert len(page) < 3000
    assert report_document(read_measured_run(tmp_path))["version"] == 1
