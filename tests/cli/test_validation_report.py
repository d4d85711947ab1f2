"""Losses of several validation sets: in rows, on the console, in charts, reports and lists, and in the judgement of a proof."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf, isnan
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.html.comparison_html import comparison_html
from distrain.cli.html.report_html import loss_drawing
from distrain.cli.pages.compare_page import compared_runs, comparison_text
from distrain.cli.pages.loss_chart import run_chart
from distrain.cli.pages.report_page import headline, history_sentences
from distrain.cli.pages.text_layout import Style
from distrain.trainer.prove.checks.curve import Curve, evaluation_difference, read_curve
from distrain.trainer.rundir.measured_run import read_measured_run
from distrain.trainer.rundir.metric_rows import main_validation_loss, validation_key, validation_losses
from distrain.trainer.rundir.run_summary import run_summary

HELD, WIKI, CODE = (validation_key(name) for name in ("", "wiki", "code"))


def row(step: int, loss: float, **losses: float | None) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 8.0, "seconds": 1.0, **losses}


ROWS = [row(1, 5.0), row(2, 4.0, **{HELD: 4.5, WIKI: 3.9, CODE: 3.5}), row(3, 3.0), row(4, 2.0, **{HELD: 2.5, WIKI: 2.75, CODE: 1.5})]


def write_run(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"name": folder.name, "model": {}, "train": {}}))
    (folder / "plan.json").write_text(json.dumps({"run": {"steps": 4}}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return folder


def without_held(rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if key != HELD} for each in rows]


def test_keys_of_sets_and_of_what_is_held_out() -> None:
    assert (HELD, WIKI) == ("validation_loss", "validation_loss/wiki")
    assert validation_losses(ROWS[1]) == {"": 4.5, "wiki": 3.9, "code": 3.5}
    assert validation_losses({"validation_loss/": 1, "validation_losses": 2, "loss": 3}) == {}
    assert [main_validation_loss(each) for each in (ROWS[0], ROWS[1], {WIKI: 3.9, CODE: 3.5})] == [None, 4.5, 3.9]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({HELD: 2.5}, "loss 2.0000  validation 2.5000  norm"),
        ({HELD: 2.5, WIKI: 2.75, CODE: 1.5}, "loss 2.0000  validation 2.5000, wiki 2.7500, code 1.5000  norm"),
        ({WIKI: 2.75, CODE: None}, "loss 2.0000  validation wiki 2.7500  norm"),
        ({}, "loss 2.0000  norm"),
    ],
)
def test_the_console_has_them_in_one_line(losses: Mapping[str, float | None], said: str) -> None:
    from distrain.trainer.loop.metrics.step_row import console_line

    assert console_line(row(4, 2.0, **losses), 4) == f"step 4/4  {said} 1.000  lr 1.00e-01  8 tokens/s"


def test_a_report_has_a_curve_for_each_set(tmp_path: Path) -> None:
    found = read_measured_run(write_run(tmp_path / "run"))
    assert found.validations == (("", ((2, 4.5), (4, 2.5))), ("wiki", ((2, 3.9), (4, 2.75))), ("code", ((2, 3.5), (4, 1.5))))
    assert found.validation == ((2, 4.5), (4, 2.5))
    assert headline(found) == "run: 4 of 4 steps; loss 5.000 -> 2.000, validation 2.500, wiki 2.750, code 1.500"
    assert history_sentences(found)[-3:] == [
        "validation loss 4.500 at step 2, 2.500 at step 4",
        "validation loss of wiki 3.900 at step 2, 2.750 at step 4",
        "validation loss of code 3.500 at step 2, 1.500 at step 4",
    ]
    title, *lines = run_chart(found.losses, found.validations, Style(blocks=False), found.loss_unit)
    assert title == "Loss, nats a token, and validation (o), wiki (1), code (2)"
    assert [sum(line.partition("|")[2].count(mark) for line in lines[:-1]) for mark in "o12"] == [2, 2, 2]
    drawn = loss_drawing(found)
    assert all(f">{name}</text>" in drawn for name in ("loss", "validation", "wiki", "code"))


def test_the_first_set_stands_for_validation_where_nothing_is_held_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", without_held())
    found = read_measured_run(folder)
    assert [name for name, _ in found.validations] == ["wiki", "code"]
    assert found.validation == ((2, 3.9), (4, 2.75))
    assert headline(found).endswith("validation wiki 2.750, code 1.500")
    assert run_summary(folder).validation == 2.75
    assert run_summary(write_run(tmp_path / "other", ROWS)).validation == 2.5
    later = [*without_held(), row(5, 1.0), row(6, 0.5)]
    assert (run_summary(write_run(tmp_path / "later", later)).loss, run_summary(tmp_path / "later").validation) == (0.5, 2.75)


def test_runs_are_compared_set_by_set(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "one"), write_run(tmp_path / "two", without_held())]
    runs = compared_runs(folders, folders)
    text = comparison_text(runs, Style())
    blocks = {block.splitlines()[0]: block.splitlines()[-1].split() for block in text.split("\n\n")}
    assert blocks["Validation loss"] == ["step", "4", "2.5000", "-"]
    assert blocks["Validation loss of wiki"] == ["step", "4", "2.7500", "2.7500", "+0.0000"]
    assert blocks["Validation loss of code"] == ["step", "4", "1.5000", "1.5000", "+0.0000"]
    page = comparison_html(runs, ["", ""], "report")
    assert all(f">Validation loss{of}</h2>" in page for of in ("", " of wiki", " of code"))


def test_a_proof_compares_every_loss_of_an_evaluation(tmp_path: Path) -> None:
    curve = read_curve(write_run(tmp_path / "run"))
    assert curve is not None
    assert curve.evaluations == {HELD: 2.5, WIKI: 2.75, CODE: 1.5}
    assert curve.evaluation == 2.5

    def other(evaluations: Mapping[str, float]) -> Curve:
        return Curve(losses=curve.losses, norms=curve.norms, rates=curve.rates, evaluations=evaluations)

    assert evaluation_difference(curve, curve) == 0
    assert evaluation_difference(curve, other({HELD: 2.5, WIKI: 2.75, CODE: 1.25})) == 0.25
    assert evaluation_difference(curve, other({HELD: 2.5, WIKI: 2.75})) == inf
    assert evaluation_difference(other({}), curve) is None
    lost = read_curve(write_run(tmp_path / "lost", [row(4, 2.0, **{HELD: 2.5, WIKI: None})]))
    assert lost is not None
    assert isnan(lost.evaluations[WIKI])
    assert evaluation_difference(curve, lost) == inf


def test_tensorboard_groups_the_curves_of_all_sets_and_lists_them_in_its_table(tmp_path: Path) -> None:
    from importlib import import_module

    from distrain.cli.config.load import load_recipe
    from distrain.trainer.loop.metrics.sinks import SinkContext, Sinks
    from distrain.trainer.plan.plan import make_plan

    run = load_recipe("quickstart", ["data.validate={wiki: w.txt, code: c.txt}", "log.sinks=[tensorboard]"])
    made = Sinks(SinkContext(run=run, plan=make_plan(run), folder=tmp_path, first=0, last=4, say=print))
    for each in ROWS:
        made.write(each)
    made.close({})
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    read = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars(CODE)] == [(2, 3.5), (4, 1.5)]
    form: Any = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    table = form.FromString(read.PluginTagToContent("hparams")["_hparams_/experiment"]).experiment
    assert {each.name.tag for each in table.metric_infos} >= {"loss", HELD, WIKI, CODE}


def test_the_report_has_the_accuracy_of_preferences_and_the_losses_of_the_averaged_weights(tmp_path: Path) -> None:
    """Of the pairs that are held out and of those of a set, where rows have them."""
    figures = {"validation_accuracy": 0.625, "validation_accuracy/wiki": 0.5, "validation_ema_loss": 4.25}
    rows = [row(1, 5.0), row(2, 4.0, **{HELD: 4.5}, **figures), row(4, 2.0, **{HELD: 2.5, "validation_accuracy": 0.75})]
    assert history_sentences(read_measured_run(write_run(tmp_path / "run", rows)))[-4:] == [
        "validation loss 4.500 at step 2, 2.500 at step 4",
        "validation loss of the averaged weights 4.250 at step 2",
        "validation accuracy 0.625 at step 2, 0.750 at step 4",
        "validation accuracy on wiki 0.500 at step 2",
    ]
    assert not [line for line in history_sentences(read_measured_run(write_run(tmp_path / "plain"))) if "accuracy" in line]


def test_a_curve_has_the_validation_losses_of_the_averaged_weights_too(tmp_path: Path) -> None:
    """So that a proof compares them."""
    curves = [
        read_curve(write_run(tmp_path / name, [row(1, 2.0, **{HELD: 2.5, "validation_ema_loss": loss})]))
        for name, loss in (("one", 3.0), ("other", 3.25))
    ]
    assert [each and dict(each.evaluations) for each in curves] == [
        {HELD: 2.5, "validation_ema_loss": 3.0},
        {HELD: 2.5, "validation_ema_loss": 3.25},
    ]
    assert curves[0] is not None
    assert curves[1] is not None
    assert evaluation_difference(curves[0], curves[1]) == 0.25
    assert curves[0].evaluation == 2.5


def test_the_console_shows_the_loss_of_further_tokens_and_the_figures_of_pairs() -> None:
    from distrain.trainer.loop.metrics.step_row import console_line

    shown = console_line({"step": 3, "loss": 2.0, "mtp_loss": 3.5, "accuracy": 0.75, "margin": 0.5, "grad_norm": 1.0, "batch": 8}, 10)
    assert shown == "step  3/10  loss 2.0000  mtp 3.5000  accuracy 0.750  margin 0.5000  norm 1.000  batch 8"
