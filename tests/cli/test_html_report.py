"""`distrain report --html` on real runs: the figures of `--json`, curves with every point, what went wrong; several runs."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

pytest.importorskip("torch")

from msgspec import json as encoder

from distrain.cli.app import command
from distrain.cli.html.plan_html import CONFIG
from distrain.cli.pages.compare_page import MARKS
from distrain.tests.fakes.html_page import SVG, HtmlPage, text_of
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.numbers.as_text import count_text, seconds_text, share_text, size_text
from distrain.trainer.spec.run import Run

SMALL = ("model.hidden=32", "model.heads=2", "model.ffn=64", "model.layers=1", "train.seq=16", "train.batch=4", "train.microbatch=2")
WORDS = ("data=synthetic", *SMALL, "optim.warmup=1", "train.steps=12", "train.evaluate={every: 4, batches: 1}", "checkpoint.every=6")
RATES = ("cluster.device.peak={fp32: 5e10}", "cluster.device.bandwidth=1e10", "cluster.inside={bandwidth: 1e10, latency: 1e-5}")
SHOWN = {"bytes": size_text, "seconds": seconds_text, "rate": count_text, "share": share_text}


@pytest.fixture(scope="module")
def runs(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of 12 steps: `slow` logs every step, `fast` every second one at ten times the rate."""
    top = tmp_path_factory.mktemp("html")
    for name, words in {"slow": ("log.every=1",), "fast": ("log.every=2", "optim.lr=1e-2")}.items():
        ranks.train(top / name, "quickstart", *WORDS, *RATES, *words)
        run = encoder.decode((top / name / "run.json").read_bytes(), type=Run)
        (top / name / "plan.json").write_bytes(encoder.encode(make_plan(run)))
    return top / "slow", top / "fast"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def page_and_json(folders: Sequence[Path], capsys: pytest.CaptureFixture[str]) -> tuple[HtmlPage, Any]:
    """The page of runs, and what `--json` prints of them."""
    assert command(["report", *map(str, folders), "--json", "--html", "page.html"]) == 0
    return HtmlPage.read(Path("page.html")), json.loads(capsys.readouterr().out)


def points_of(page: HtmlPage, heading: str) -> list[int]:
    """The number of points of each curve of a drawing."""
    curves = [each for each in page.drawing(heading).iter(f"{SVG}path") if each.get("class") == "curve"]
    return [len(re.findall("[ML]", each.attrib["d"])) for each in curves]


def test_planned_and_measured_figures_are_those_of_the_json(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    page, run = page_and_json(runs[:1], capsys)
    rows = {row[0]: row[1:] for row in page.tables("Planned and measured")[0][1:]}
    figures = [*run["memory"], *run["time"], *run["speed"], *(each for each in run["saving"] if each["measured"] is not None)]
    assert list(rows) == [each["name"] for each in figures]
    for each in figures:
        shown = [SHOWN[each["unit"]](each[side]) if each[side] is not None else "?" for side in ("planned", "measured")]
        assert rows[each["name"]][:2] == shown
        assert_drift_is(rows[each["name"]][2], each["drift"], may_be_too_short=each["unit"] == "seconds")
    assert page.tiles["tokens/s"][0] == count_text(next(each["measured"] for each in run["speed"] if each["name"] == "tokens/s"))
    assert page.tiles["loss"] == (f"{run['losses'][-1][1]:.3f}", f"{run['losses'][0][1]:.3f} at step 1")
    assert page.tiles["validation loss"][0] == f"{run['validation'][-1][1]:.3f}"
    assert page.texts("span", "badge") == ["12 of 12 steps"]


def assert_drift_is(shown: str, drift: float | None, *, may_be_too_short: bool) -> None:
    """A drift as the page shows it is that of the JSON. A busy machine decides which form it has: `+4.2 %`, `39.7 times` or `too short`."""
    assert (shown == "") == (drift is None)
    if drift is None:
        return
    if shown == "too short":
        assert may_be_too_short
    elif shown.endswith(" times"):
        assert float(shown.removesuffix(" times")) == pytest.approx(1 + drift, rel=0.0051)
    else:
        assert float(shown.removesuffix(" %")) == pytest.approx(100 * drift, abs=0.051, rel=0.06)


def test_curves_have_every_logged_step(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    page, run = page_and_json(runs[:1], capsys)
    assert [len(run[key]) for key in ("losses", "validation", "tokens_per_second")] == [12, 3, 12]
    assert points_of(page, "Loss") == [12, 3]
    assert points_of(page, "Tokens/s") == [12]
    logged = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    assert run["tokens_per_second"] == [[row["step"], row["tokens_per_second"]] for row in logged if "tokens_per_second" in row]
    titles = [text_of(each) for each in page.drawing("Loss").iter(f"{SVG}circle")]
    assert [said for said in titles if said] == [f"validation: {loss:.4f} at step {step}" for step, loss in run["validation"]]


def test_the_config_is_that_of_run_json_and_is_read_back(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from distrain.cli.config.load import load_recipe

    page, _ = page_and_json(runs[:1], capsys)
    config, typed = page.texts("pre")
    Path("again.yaml").write_text(config)
    assert encoder.encode(load_recipe("./again.yaml")) == encoder.encode(encoder.decode((runs[0] / "run.json").read_bytes(), type=Run))
    assert not re.search(r"^\w+: null$", config, re.MULTILINE)
    assert typed == f"distrain report {runs[0]} --html page.html"


def test_faults_skipped_steps_and_damage_are_told_and_drawn(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(copytree(runs[0], tmp_path / "hurt"))
    with (folder / "metrics.jsonl").open("a") as file:
        for row in ({"restart": 1, "step": 7, "lost_steps": 2}, {"step": 13, "skipped": True}, {"step": 14, "loss": 1.0, "goodput": 0.75}):
            file.write(f"{json.dumps(row)}\n")
        file.write("hello\n")
    page, run = page_and_json([folder], capsys)
    assert run["restarts"] == [[7, 2]]
    assert page.tiles["restarts after faults"] == ("1", "goodput 75.0 %")
    notes = page.texts("p", "note")
    assert "Damaged and left out: 1 line of metrics.jsonl" in notes
    assert {"1 restart after faults; goodput 75.0 %", "Restart from step 7, 2 steps lost"} <= set(notes)
    assert any(each.startswith("1 of 14 steps was skipped") for each in notes)
    for heading in ("Loss", "Tokens/s"):
        (event,) = (each for each in page.drawing(heading).iter(f"{SVG}path") if each.get("class") == "event")
        assert text_of(event) == "restart from step 7, 2 steps lost"


@pytest.mark.parametrize("config", ['{"name": "new"}', "{", "[]", '{"name": {"a": ["<b>", null, 1e999]}, "\\u0000<x>": "\\ud800"}'])
def test_a_run_that_has_just_begun_or_is_damaged_has_a_page(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("new").mkdir()
    Path("new/run.json").write_text(config)
    page, _ = page_and_json([Path("new")], capsys)
    assert page.texts("h1") == ["new"]
    assert page.texts("h2") == ["Planned and measured"]
    assert "Nothing was measured yet." in page.texts("p")
    page_and_json([Path("new"), Path("new")], capsys)


def test_several_runs_stand_side_by_side_as_the_text_page_has_them(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    page, both = page_and_json(runs, capsys)
    command(["report", *map(str, runs)])
    text = capsys.readouterr().out
    assert page.texts("h1") == ["slow, fast"]
    assert page.tables("What differs") == [[["", "A", "B"], ["optim.lr", "0.001", "0.01"], ["log.every", "1", "2"]]]
    slow, fast = (dict(map(tuple, run["losses"])) for run in both)
    heading, *rows = page.tables("Loss")[0]
    assert heading == ["", "A", "B", "B - A"]
    assert rows == [[f"step {at}", f"{slow[at]:.4f}", f"{fast[at]:.4f}", f"{fast[at] - slow[at]:+.4f}"] for at in range(2, 13, 2)]
    first, second = (dict(map(tuple, run["validation"])) for run in both)
    assert [row[1:3] for row in page.tables("Validation loss")[0][1:]] == [[f"{first[at]:.4f}", f"{second[at]:.4f}"] for at in (4, 8, 12)]
    for name, *figures in page.tables("Measured, and (planned)")[0][1:]:
        assert any(line.split() == [*name.split(), *" ".join(figures).split()] for line in text.splitlines()), name
    assert points_of(page, "Loss") == [12, 6]
    assert points_of(page, "Validation loss") == [3, 3]
    assert points_of(page, "Tokens/s") == [12, 6]
    assert page.texts("summary") == [f"{CONFIG} of A, slow", f"{CONFIG} of B, fast"]


def test_as_many_runs_as_there_are_marks_have_a_page(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = page_and_json([runs[0]] * len(MARKS), capsys)
    assert points_of(page, "Loss") == [12] * len(MARKS)
    assert "Nothing: their configs are the same" in page.texts("p")


HOSTILE = "</style><script>alert(1)</script><b onload=x> & \"'"


def test_names_folders_and_configs_are_shown_as_text(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(copytree(runs[0], Path("<b>&amp;'x'")))
    config = json.loads((folder / "run.json").read_text())
    config["name"] = config["data"]["path"] = HOSTILE
    (folder / "run.json").write_text(json.dumps(config))
    (folder / "plan.json").write_text((folder / "plan.json").read_text().replace('"device":"cpu"', json.dumps({"device": HOSTILE})[1:-1]))
    page, _ = page_and_json([folder], capsys)
    assert page.texts("h1") == [HOSTILE]
    assert shlex.split(page.texts("pre")[-1])[2:] == [str(folder), "--html", "page.html"]
    page, _ = page_and_json([folder, runs[1]], capsys)
    assert page.texts("h1") == [f"{HOSTILE}, fast"]
    assert ["data.path", HOSTILE, "null"] in page.tables("What differs")[0]
