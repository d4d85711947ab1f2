"""`distrain report` on real runs: the plan agrees with the counted bytes, and the page shows both."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from msgspec import json as encoder

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.loss_chart import HEIGHT
from distrain.cli.pages.report_page import (
    drift_sentences,
    incident_lines,
    planned_measured_rows,
    planned_measured_title,
    report_text,
    routing_sentences,
)
from distrain.cli.pages.text_layout import DEFAULT_WIDTH, Style
from distrain.cli.verbs.fit_run import closing_text
from distrain.tests.fakes.run_command import run_command
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.measured_run import read_measured_run
from distrain.trainer.rundir.planned_measured import SNAPSHOT
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Run
from distrain.trainer.system.core_wait import seconds_without_core

SMALL = ("model.hidden=64", "model.heads=4", "model.ffn=160", "model.layers=2", "train.seq=32", "train.batch=8", "optim.warmup=1")
WORDS = ("data=synthetic", *SMALL, "train.evaluate.every=0", "checkpoint.resume=never")
PRECISIONS = {
    "fp32": ("train.precision=fp32",),
    "bf16": ("train.precision=bf16",),
    "bf16, gradients in fp32": ("train.precision=bf16", "train.gradients=fp32"),
}
CASES = [
    *((zero, precision, 2, 2) for zero in range(4) for precision in PRECISIONS),
    *((zero, "fp32", 2, 4) for zero in (1, 2)),  # one micro-batch: ZeRO-1 keeps only its own gradient slice
    *((zero, "bf16", 1, 4) for zero in (0, 3)),
]


def write_plan(folder: Path) -> None:
    """Write plan.json, as the controller does."""
    (folder / "plan.json").write_bytes(encoder.encode(make_plan(encoder.decode((folder / "run.json").read_bytes(), type=Run))))


@pytest.mark.parametrize(("zero", "precision", "dp", "microbatch"), CASES)
def test_planned_memory_equals_counted_memory(zero: int, precision: str, dp: int, microbatch: int, ranks: Any, tmp_path: Path) -> None:
    words = (f"parallel.zero={zero}", f"cluster=1x{dp}", f"train.microbatch={microbatch}", "train.steps=2", *PRECISIONS[precision])
    folder = tmp_path / "run"
    ranks.train(folder, "quickstart", *WORDS, *words)
    write_plan(folder)
    for each in read_measured_run(folder).memory:
        assert each.drift is not None, each.name
        assert abs(each.drift) <= 0.002, each  # the optimizer's count of steps, a scalar for each weight


@pytest.mark.parametrize(
    "words",
    [
        ("model=tiny_llama", "train.attention=math"),
        ("parallel.recompute=full", "model.dropout=0.1"),
        ("parallel.recompute=selective", "train.attention=math", "parallel.zero=3"),
    ],
    ids=" ".join,
)
def test_planned_saved_activations_equal_counted_ones(words: tuple[str, ...], ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = [each for each in WORDS if not (words[0].startswith("model=") and each.startswith("model."))]
    ranks.train(folder, "quickstart", *given, *words, "train.microbatch=2", "train.steps=2")
    write_plan(folder)
    drifts = {each.name: each.drift for each in read_measured_run(folder).memory}
    assert all(drift is not None and abs(drift) <= 0.002 for drift in drifts.values()), drifts


@pytest.fixture(scope="module")
def trained_run(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed once, with validation and a profiled window of steps."""
    folder: Path = tmp_path_factory.mktemp("report") / "run"
    words = ("data=synthetic", *SMALL, "train.microbatch=2", "log.every=1", "train.evaluate={every: 4, batches: 1}")
    ranks.train(folder, "quickstart", *words, "train.steps=6", "log.profile=[3,4]")
    ranks.train(folder, "quickstart", *words, "train.steps=12")
    write_plan(folder)
    return folder


def test_the_page_of_a_run_is_plain_text_of_page_width(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(f"report '{trained_run}'", capsys)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= DEFAULT_WIDTH
    assert out.startswith("run: 12 of 12 steps; loss ")
    for kind in ("weights", "gradients", "optimizer", "activations", "forward and backward", "optimizer step", "tokens/s"):
        assert f"  {kind} " in out


def test_the_planned_parts_of_a_step_add_up_to_it(trained_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained_run, folder)
    plan = make_plan(load_recipe("gpt2_124m"))  # of devices whose rates are stated
    assert plan.time is not None
    assert plan.time.host > 0
    (folder / "plan.json").write_bytes(encoder.encode(plan))
    planned = {row.name: row.planned or 0.0 for row in read_measured_run(folder).time}
    parts = sum(planned[name] for name in ("data", "forward and backward", "optimizer step"))
    assert parts == pytest.approx(planned["step"], rel=1e-9)
    assert parts > 0


@pytest.mark.skipif(seconds_without_core() is None, reason="this system does not count the time without a core")
def test_rows_count_the_time_without_a_core(trained_run: Path) -> None:
    rows = [row for line in (trained_run / "metrics.jsonl").read_text().splitlines() if "seconds_forward" in (row := json.loads(line))]
    assert len(rows) == 12
    waited = [row["seconds_without_core"] for row in rows]
    assert all(0 <= each <= row["seconds"] for each, row in zip(waited, rows, strict=True))
    assert any(waited)


def test_the_report_has_checkpoints_validation_and_every_step_of_both_attempts(trained_run: Path) -> None:
    found = read_measured_run(trained_run)
    assert found.saved == (6, 12)
    assert [step for step, _ in found.validation] == [4, 6, 8, 12]
    assert [step for step, _ in found.losses] == list(range(1, 13))
    assert "validation loss " in report_text(found, Style())


def test_the_chart_is_labelled_with_the_highest_and_lowest_loss(trained_run: Path) -> None:
    found = read_measured_run(trained_run)
    losses = [loss for _, loss in (*found.losses, *found.validation)]
    for blocks, drawn in ((True, "│"), (False, "|")):
        lines = [line for line in report_text(found, Style(blocks=blocks)).splitlines() if drawn in line[:12]]
        assert len(lines) == HEIGHT
        assert lines[0].split()[0] == f"{max(losses):.3f}"
        assert f"{min(losses):.3f}" in lines[-1]
    assert report_text(found, Style(blocks=False)).isascii()


def test_json_is_one_document_with_every_drift(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(f"report '{trained_run}' --json", capsys)
    document = json.loads(out)
    assert (status, document["version"], document["steps"], document["whole"]) == (0, 1, 12, 12)
    assert [set(row) for row in document["memory"]] == [{"name", "unit", "planned", "measured", "drift"}] * 4


def test_the_profiled_steps_are_a_chrome_trace(trained_run: Path) -> None:
    (file,) = (trained_run / "trace").iterdir()
    events = json.loads(file.read_bytes())["traceEvents"]
    assert file.name == "steps_3_4.json"
    assert any("mm" in event.get("name", "") for event in events)


@pytest.mark.parametrize("stage", [0, 1])
def test_measured_memory_is_that_of_the_planned_fullest_stage(stage: int, tmp_path: Path) -> None:
    kinds = ("weights", "gradients", "optimizer", "activations")
    ranks = [dict.fromkeys(kinds, size) for size in (1, 2, 3, 4)]
    plan = {"mesh": {"pp": 2}, "memory": {"stage": stage, "stages": [{"bytes": dict.fromkeys(kinds, 9)}] * 2}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "measured.json").write_text(json.dumps({"memory": dict.fromkeys(kinds, 4), "ranks": ranks}))
    assert {each.measured for each in read_measured_run(tmp_path).memory} == {2 * stage + 2}


@pytest.mark.parametrize(("ranks", "most"), [([{"host": 5}, {"host": 7}, {}], 7), (None, None), (3, None)])
def test_measured_memory_of_the_host_is_that_of_the_rank_that_holds_most(ranks: Any, most: int | None, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"memory": {"host": {"rank": {"optimizer": 8, "parameters": 1, SNAPSHOT: 90}}}}))
    (tmp_path / "measured.json").write_text(json.dumps({"ranks": ranks}))
    *_, host = read_measured_run(tmp_path).memory
    assert (host.name, host.planned, host.measured) == ("on the host", 9, most)


@pytest.mark.parametrize(("rows", "is_warm"), [(1, False), (2, True)])
def test_the_time_of_the_first_steps_alone_is_no_drift(rows: int, is_warm: bool, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"time": {"step": 1.0}}))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "seconds": 9.0}}\n' for step in range(1, rows + 1)))
    sentence = drift_sentences(read_measured_run(tmp_path))[0]
    assert sentence.startswith("Time: step is 800.0 % above the plan" if is_warm else "Time: the first steps alone, which warm up")


@pytest.mark.parametrize(
    ("planned", "measured", "says", "sentence"),
    [
        (0.1, 0.25, "+150.0 %", "Time: step is 150.0 % above the plan"),
        (0.002, 0.079, "39.5 times", "Time: step is 39.5 times the plan."),
        (1e-5, 9e-4, "too short", "Time: step is too short to compare with the plan."),
        (1e-5, 2e-3, "200 times", "Time: step is 200 times the plan."),
    ],
)
def test_drifts_of_short_steps_frighten_nobody(planned: float, measured: float, says: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"time": {"step": planned}}))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "seconds": {measured}}}\n' for step in (1, 2)))
    run = read_measured_run(tmp_path)
    assert next(row[3] for row in planned_measured_rows(run) if row[0] == "step") == says
    assert drift_sentences(run)[0].startswith(sentence)


@pytest.mark.parametrize(
    ("seconds", "without", "says"),
    [(2.0, 0.5, " For 25.0 % of that time rank 0 had no core: others used it."), (2.0, 0.1, ""), (1.0, 0.5, ""), (2.0, None, "")],
)
def test_a_slow_step_says_how_long_rank_0_had_no_core(seconds: float, without: float | None, says: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"time": {"step": 1.0}}))
    rows = [{"step": step, "seconds": seconds, **({} if without is None else {"seconds_without_core": without})} for step in range(1, 5)]
    if without is not None:
        rows.append({"step": 5, "seconds": 20.0, "seconds_without_core": 19.0})  # one of many
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (sentence,) = drift_sentences(read_measured_run(tmp_path))
    assert sentence.endswith(f".{says}")
    assert ("no core" in sentence) is bool(says)


def test_how_a_mixture_routed_is_said(tmp_path: Path) -> None:
    rows = [
        {"step": step, "loss": 2.0, "expert_load": load, "busiest_layer": layer, "idle_experts": idle, "dropped_copies": 0.125, **added}
        | ({"ep_load": load / 2} if step > 1 else {})
        for step, load, layer, idle, added in ((1, 3.5, 2, 4, {"router_loss": 0.02}), (2, 2.0, 0, 4, {}), (3, 1.25, 7, 1, {}))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert routing_sentences(read_measured_run(tmp_path)) == [
        "load of the busiest expert (even: 1): 3.50 at step 1, 2.00 at step 2, 1.25 at step 3 (layer 7); 1 expert without a token",
        "load of the busiest rank of experts (parallel.ep_load plans it): 1.00 at step 2, 0.62 at step 3",
        "copies dropped beyond model.capacity, in %: 12.5 at step 1, 12.5 at step 2, 12.5 at step 3",
        "routers add to the loss: 0.0200 at step 1",
    ]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert routing_sentences(read_measured_run(tmp_path)) == []


@pytest.mark.parametrize(
    ("measured", "at_load", "says"),
    [
        (1500, 1480, "activations is 50.0 % above the plan. The busiest rank of experts computed 1.50 times an even share, for which"),
        (1010, 1480, "activations is as planned (+1.0 %)."),
        (1500, 1000, "activations is 50.0 % above the plan."),  # all layers run again: no load adds to what they keep
        (1500, None, "activations is 50.0 % above the plan."),
    ],
)
def test_a_drift_of_activations_says_how_uneven_routing_was(measured: int, at_load: int | None, says: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"memory": {"stage": 0, "stages": [{"bytes": {"activations": 1000}}]}}))
    expert_ranks = {} if at_load is None else {"expert_ranks": {"load": 1.5, "activations": at_load}}
    (tmp_path / "measured.json").write_text(json.dumps({"memory": {"activations": measured}, **expert_ranks}))
    planned = " (parallel.ep_load) 1.45 KiB of activations are planned: +1.4 %." if says.endswith("for which") else ""
    assert drift_sentences(read_measured_run(tmp_path)) == [f"Memory: {says}{planned}"]


def test_the_times_of_a_run_that_changed_its_layout_are_of_its_last_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"time": {"step": 0.03}, "device": "cpu"}))
    names = ("step", "seconds", "planned_seconds", "planned_memory_peak", "memory_peak")
    before = [(10, 0.2, 0.1, 70, 1000), (20, 0.1, 0.1, 70, 1000)]
    since = [(30, 0.5, 0.03, 50, 600), (40, 0.03, 0.03, 50, 600), (50, 0.06, 0.03, 50, 500)]
    rows = [dict(zip(names, row, strict=True)) for row in (*before, *since)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = read_measured_run(tmp_path)
    assert [each.measured for each in found.time if each.name == "step"] == [pytest.approx(0.045)]
    assert (found.resident, found.planned_since, found.is_warm) == (600, 30, True)
    title = "Planned and measured from step 30 on, in the layout since then; the process takes 600 B in all"
    assert planned_measured_title(found) == title


@pytest.mark.parametrize("kept", ["run.json", "run.json metrics.jsonl"])
def test_a_run_that_has_just_begun_has_a_page(kept: str, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in kept.split():
        (tmp_path / name).write_bytes((trained_run / name).read_bytes()[: 100000 if name == "run.json" else -7])
    status, out, err = run_command(f"report '{tmp_path}'", capsys)
    assert (status, err) == (0, "")
    assert out.startswith("run: ")


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_folder_that_is_no_run_prints_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(f"report '{tmp_path / name}'", capsys)
    assert (status, out, len(err.splitlines())) == (2, "", 1)


# fmt: off
INCIDENTS: tuple[tuple[list[dict[str, Any]], str], ...] = (  # rows after the first one, and the line
    ([], ""),
    ([{"step": 2, "skipped": True}], "1 of 2 steps was skipped, weights unchanged, because a loss or gradient was not finite"),
    ([{"step": 2, "skipped": True}, {"step": 3, "skipped": True}, {"step": 4, "spike": 7.5}, {"restart": 1, "step": 3, "lost_steps": 1}],
     "2 of 4 steps were skipped, weights unchanged, because a loss or gradient was not finite; 1 loss spike; 1 restart after faults"),
    ([{"step": 2, "skipped": True, "spike": 9.0}, {"step": 2}], ""),  # the last row of a step counts
)
# fmt: on


@pytest.mark.parametrize(("rows", "line"), INCIDENTS)
def test_skipped_steps_spikes_and_restarts_are_counted_at_the_end(rows: list[dict[str, Any]], line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ({"step": 1, "loss": 3.0}, *rows)))
    assert " ".join(each.strip() for each in incident_lines(read_measured_run(tmp_path))) == line
    run = load_recipe("quickstart", ["name=run", f"log.dir={tmp_path.parent}"])
    told = closing_text(with_changes(run, [("log.dir", str(tmp_path.parent)), ("name", tmp_path.name)])).splitlines()
    assert told[0] == ""
    assert (told[1] == "Nothing was measured yet") == (not line)
    assert not any(" generate " in each for each in told), "there is no checkpoint to generate from"


def test_a_damaged_metrics_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("hello\n")
    assert read_measured_run(tmp_path).damaged == ("metrics.jsonl",)
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_measured_run(tmp_path).damaged == ()
