"""Sinks: metrics.jsonl loses no row to a full disk or a killed writer, and no sink ends a run."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE, wait_for
from distrain.tests.fakes.rank_pool import RankPool
from distrain.tests.fakes.rank_threads import file_size_limit
from distrain.tests.fakes.wandb_file import history, records
from distrain.trainer.loop.metrics import sink_thread, sinks
from distrain.trainer.loop.metrics.sink_thread import SinkThread, is_any_stuck
from distrain.trainer.loop.metrics.sinks import MAX_ROW_BYTES, WANDB, JsonLines, SinkContext, Sinks, Wandb, flat_items
from distrain.trainer.loop.metrics.step_row import Row
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Run


@pytest.fixture(scope="module")
def run() -> Run:
    return load_recipe("quickstart", ["log.sinks=[jsonl]"])


@pytest.fixture(scope="module")
def context(run: Run, tmp_path_factory: pytest.TempPathFactory) -> SinkContext:
    """The context of the sinks of a new run."""
    return SinkContext(run=run, plan=make_plan(run), folder=tmp_path_factory.mktemp("run"), first=0, last=10, say=print)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder)]


def row(step: int) -> Row:
    return {"step": step, "loss": 0.5, "text": "x" * 60}


SIZE = len(json.dumps(row(1))) + 1  # bytes of a row


@pytest.mark.parametrize("room", [0, 1, SIZE - 1])
def test_rows_wait_in_order_while_the_disk_is_full(context: SinkContext, tmp_path: Path, room: int) -> None:
    said: list[str] = []
    made = Sinks(replace(context, folder=tmp_path, say=said.append))
    made.write(row(1))
    with file_size_limit(SIZE + room):
        for step in (2, 3):
            made.write(row(step))
        assert steps(tmp_path) == [1], "nor is a part of one left"
    made.write(row(4))
    assert steps(tmp_path) == [1, 2, 3, 4]
    (line,) = said
    assert line.startswith("warning: metrics.jsonl: ")
    assert line.endswith("; its rows wait for room")


def test_waiting_rows_are_written_at_the_end(context: SinkContext, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(replace(context, folder=tmp_path, say=said.append))
    with file_size_limit(SIZE):
        for step in (1, 2, 3):
            made.write(row(step))
    made.close({})
    assert steps(tmp_path) == [1, 2, 3]
    assert len(said) == 1


def test_lost_rows_are_reported(context: SinkContext, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(replace(context, folder=tmp_path, say=said.append))
    with file_size_limit(SIZE):
        for step in (1, 2):
            made.write(row(step))
        made.close({})
    assert steps(tmp_path) == [1]
    assert [line.partition("; ")[2] for line in said] == ["its rows wait for room", "its last rows are lost"]


def test_a_disk_that_fills_up_twice_gives_two_warnings(context: SinkContext, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(replace(context, folder=tmp_path, say=said.append))
    for step in (1, 3):
        with file_size_limit(step * SIZE - 1):
            made.write(row(step))
        made.write(row(step + 1))
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert len(said) == 2


def test_a_file_that_can_not_be_created_is_created_later(context: SinkContext, tmp_path: Path) -> None:
    said: list[str] = []
    made = Sinks(replace(context, folder=tmp_path / "gone", say=said.append))
    made.write(row(1))
    (tmp_path / "gone").mkdir()
    made.write(row(2))
    assert steps(tmp_path / "gone") == [1, 2]
    assert len(said) == 1


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "x", "x" * (MAX_ROW_BYTES - 2 * SIZE - 1)])
def test_the_incomplete_line_of_a_killed_writer_is_removed(context: SinkContext, tmp_path: Path, torn: str) -> None:
    whole = "".join(json.dumps(row(step)) + "\n" for step in (1, 2))
    (tmp_path / "metrics.jsonl").write_text(whole + torn)
    made = JsonLines(replace(context, folder=tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    made.write(row(3))
    made.close({})
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("there", ["", '{"step": 1'])
def test_a_file_without_a_complete_line_is_emptied(context: SinkContext, tmp_path: Path, there: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(there)
    JsonLines(replace(context, folder=tmp_path)).close({})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_nan_and_infinity_become_null(context: SinkContext, tmp_path: Path) -> None:
    made = JsonLines(replace(context, folder=tmp_path))
    made.write({"step": 1, "loss": float("nan"), "norm": float("inf"), "lr": 1e-3, "samples": (0, 7), "skipped": True})
    made.close({})
    assert rows(tmp_path) == [{"step": 1, "loss": None, "norm": None, "lr": 1e-3, "samples": [0, 7], "skipped": True}]


class Breaks:
    """A sink that raises."""

    calls = 0

    def __init__(self, context: SinkContext) -> None:
        if context.run.name == "at once":
            raise RuntimeError("no server\nand more")

    def write(self, row: Row) -> None:
        Breaks.calls += 1
        raise RuntimeError if row["step"] == 1 else AssertionError("it was left")

    def close(self, summary: Row) -> None:
        raise AssertionError("it was left")


@pytest.mark.parametrize(("name", "why"), [("at once", "no server"), ("later", "RuntimeError")])
def test_a_sink_that_raises_is_reported_once_and_dropped(
    context: SinkContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.setitem(sinks.SINKS, "tensorboard", Breaks)
    said: list[str] = []
    named = load_recipe("quickstart", [f"name={name}", "log.sinks=[jsonl,tensorboard]"])
    made = Sinks(replace(context, run=named, folder=tmp_path, say=said.append))
    for step in (1, 2):
        made.write(row(step))
    made.close({})
    assert said == [f"warning: log sink tensorboard stopped: {why}"]
    assert steps(tmp_path) == [1, 2]


class Hangs:
    """A sink that does not answer."""

    answers = threading.Event()

    def __init__(self, context: SinkContext) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.answers.wait(DEADLINE)
        self.rows.append(row)

    def close(self, summary: Row) -> None:
        self.rows.append(summary)


def test_a_sink_that_does_not_answer_holds_nothing_up_and_is_reported_at_the_end(context: SinkContext) -> None:
    made, waits, opens = list[Hangs](), list[int](), threading.Event()

    def make() -> Hangs:
        opens.wait(DEADLINE)
        made.append(Hangs(context))
        return made[0]

    thread = SinkThread("slow", make, (0.01, 0.01), lambda: waits.append(0))
    assert waits == [0], "the watchdog is told"
    opens.set()
    for step in (1, 2):
        thread.write(row(step))
    with pytest.raises(TimeoutError, match=r"^it did not end within 0 s, and its last rows may be lost$"):
        thread.close({"planned": 1}, lambda: waits.append(1))
    assert 1 in waits, "the watchdog is told"
    assert is_any_stuck()
    Hangs.answers.set()
    wait_for(lambda: not is_any_stuck())
    assert made[0].rows == [row(1), row(2), {"planned": 1}]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_sinks_of_third_parties_have_threads_of_their_own(name: str, context: SinkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    Hangs.answers.clear()
    monkeypatch.setitem(sinks.SINKS, name, Hangs)
    made = Sinks(replace(context, run=load_recipe("quickstart", [f"log.sinks=[{name}]"])))
    made.write(row(1))
    assert is_any_stuck(), "it was not waited for"
    Hangs.answers.set()
    made.close({})
    assert not is_any_stuck()


def test_rows_that_a_slow_sink_does_not_take_are_dropped(context: SinkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    Hangs.answers.clear()
    monkeypatch.setattr(sink_thread, "MOST_WAITING", 2)
    thread = SinkThread("slow", lambda: Hangs(context), (0.01, DEADLINE))
    for step in range(1, 6):
        thread.write(row(step))
    threading.Timer(0.1, Hangs.answers.set).start()
    with pytest.raises(TimeoutError, match=r"^it was slow, and \d rows were dropped$"):
        thread.close({})
    assert not is_any_stuck()


def replace_by_empty(path: Path) -> None:
    path.rename(path.with_suffix(".1"))
    path.touch()


@pytest.mark.parametrize("change", [Path.unlink, replace_by_empty])
def test_metrics_jsonl_that_is_removed_or_rotated_is_made_again(
    context: SinkContext, tmp_path: Path, change: Callable[..., object]
) -> None:
    made = JsonLines(replace(context, folder=tmp_path))
    made.write(row(1))
    change(tmp_path / "metrics.jsonl")
    for step in (2, 3):
        made.write(row(step))
    made.close({})
    assert steps(tmp_path) == [2, 3]


# wandb and TensorBoard: what they write is read back with their own readers

FIRST, AGAIN = range(1, 7), range(4, 10)  # steps of a start, and of the next, which resumes from step 3
OWN = ("WANDB_MODE", "WANDB_SILENT", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_ENTITY", "WANDB_DIR",
       "WANDB_RUN_GROUP")  # fmt: skip


@pytest.fixture
def wandb_starts(context: SinkContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Log steps to wandb as one attempt of the run; return the messages."""
    import wandb

    for name in OWN:
        monkeypatch.setenv(name, "x")  # so that what the sink sets goes with the test
        monkeypatch.delenv(name)

    def start(steps: Sequence[int], run: Run = context.run) -> list[str]:
        said: list[str] = []
        sink = Wandb(replace(context, run=run, folder=tmp_path, first=steps[0] - 1, say=said.append))
        for step in steps:
            sink.write({"step": step, "loss": step + 0.5, "grad_norm": None})
        sink.close({"planned_seconds": 2.0})
        wandb.teardown()  # it reads the environment once
        return said

    yield start
    wandb.teardown()


def test_all_attempts_of_a_folder_are_one_wandb_run_and_no_row_is_lost(
    wandb_starts: Callable[..., list[str]], tmp_path: Path, context: SinkContext
) -> None:
    for steps in (FIRST, AGAIN):
        (said,) = wandb_starts(steps)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    runs = [record.run for file in files for record in records(file) if record.HasField("run")]
    assert len(files) == 2
    assert {each.run_id for each in runs} == {json.loads((tmp_path / WANDB).read_text())["id"]}
    assert all(each.resume for each in runs)
    assert [[row["step"] for row in history(file)] for file in files] == [[*FIRST], [*AGAIN]]
    assert [row["_step"] for file in files for row in history(file)] == [*range(6), *range(6)], "numbered as they come"
    metrics = [(record.metric.glob_name, record.metric.step_metric) for record in records(files[1]) if record.HasField("metric")]
    assert ("*", "step") in metrics, "the x axis"
    assert said == f"wandb run distrain/{runs[0].run_id}: offline; `wandb sync {tmp_path}/wandb/offline-run-*-{runs[0].run_id}` uploads it"


def test_each_attempt_sends_wandb_the_whole_config_and_plan(
    wandb_starts: Callable[..., list[str]], tmp_path: Path, context: SinkContext
) -> None:
    wandb_starts(FIRST)
    wandb_starts(AGAIN, with_changes(context.run, [("optim.lr", 7e-4)]))
    configs = []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        (told,) = (record.run.config for record in records(file) if record.HasField("run"))
        configs.append({each.key: json.loads(each.value_json) for each in told.update if each.key != "_wandb"})
    assert configs[0] == json.loads(json.dumps(context.config()))
    assert [each["optim"]["lr"] for each in configs] == [1e-3, 7e-4]


def keys_of(part: Any, at: str = "") -> Iterator[str]:
    """The dotted keys of a data class that hold no other data class."""
    for row in fields(part):
        value = getattr(part, row.name)
        yield from keys_of(value, f"{at}{row.name}.") if is_dataclass(value) else (f"{at}{row.name}",)


def test_the_config_holds_every_key_of_a_run(context: SinkContext) -> None:
    run = with_changes(context.run, [("model.parameters", {"a.weight": (3, 4)}), ("cluster.device.peak", {"fp32": 1e9})])
    told = dict(flat_items(replace(context, run=run).config()))
    assert {key for key in told if not key.startswith("plan.")} == {*keys_of(run), "cluster.device.peak.fp32"} - {
        "model.parameters",
        "cluster.device.peak",
    }
    assert told["plan.memory.peak"] == context.plan.memory.peak  # type: ignore[union-attr]
    assert told["plan.mesh.dp"] == 2


Named = tuple[dict[str, str], tuple[str, str | None, str, str, str]]
# fmt: off
NAMED: tuple[Named, ...] = (  # variables, and then the project, id, name, entity of the run and the folder of its files
    ({},                                               ("distrain", None,  "quickstart", "",     "")),
    ({"WANDB_PROJECT": "mine", "WANDB_NAME": "first"}, ("mine",     None,  "first",      "",     "")),
    ({"WANDB_RUN_ID": "abc", "WANDB_ENTITY": "team"},  ("distrain", "abc", "quickstart", "team", "")),
    ({"WANDB_RUN_GROUP": "sweep"},                     ("distrain", None,  "quickstart", "",     "")),
    ({"WANDB_DIR": "elsewhere"},                       ("distrain", None,  "quickstart", "",     "elsewhere")),
)
# fmt: on


@pytest.mark.parametrize(("variables", "named"), NAMED)
def test_wandb_variables_of_the_environment_take_precedence(
    wandb_starts: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    named: tuple[str, str | None, str, str, str],
) -> None:
    project, number, name, entity, place = named
    (tmp_path / "elsewhere").mkdir()
    for key, value in variables.items():
        monkeypatch.setenv(key, str(tmp_path / value) if key == "WANDB_DIR" else value)
    wandb_starts([1])
    for key in variables.keys() - {"WANDB_DIR"}:
        monkeypatch.delenv(key)
    wandb_starts([2])  # the next start may have forgotten them
    group = variables.get("WANDB_RUN_GROUP", "")
    found = [
        record.run
        for file in sorted((tmp_path / place).glob("wandb/offline-run-*/*.wandb"))
        for record in records(file)
        if record.HasField("run")
    ]
    assert [(each.project, each.entity, each.run_group) for each in found] == [(project, entity, group)] * 2
    assert {each.run_id for each in found} == {number or found[0].run_id}
    assert found[0].display_name == name


def test_a_damaged_wandb_json_is_reported(wandb_starts: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / WANDB).write_text('{"id": 7')
    warning, _ = wandb_starts([1])
    assert warning == f"warning: {tmp_path / WANDB} can't be read: this attempt starts a new wandb run"
    assert json.loads((tmp_path / WANDB).read_text())["project"] == "distrain"


def test_disabled_wandb_writes_no_files(wandb_starts: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_starts([1]) == []
    assert not list(tmp_path.iterdir())


def board(folder: Path) -> Any:
    """TensorBoard's own reader of a run's events."""
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    read = reader.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def test_tensorboard_shows_a_steps_last_value_and_the_config_of_each_attempt(context: SinkContext, tmp_path: Path) -> None:
    for first, steps in ((0, FIRST), (3, AGAIN)):
        run = with_changes(context.run, [("optim.lr", 7e-4 if first else 1e-3), ("log.sinks", ("tensorboard",))])
        made = Sinks(replace(context, run=run, folder=tmp_path, first=first))
        for step in steps:
            made.write({"step": step, "loss": 10.0 * first + step, "grad_norm": None, "samples": (1, 2)})
        made.close({})
    read = board(tmp_path)
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(step, step if step < 4 else 30 + step) for step in range(1, 10)]
    assert read.Tags()["scalars"] == ["loss"]
    texts = {each.step: each.tensor_proto.string_val[0].decode() for each in read.Tensors("run/text_summary")}
    assert [f"    optim.lr={lr}\n" in texts[step] for step, lr in ((0, "0.001"), (3, "0.0007"))] == [True, True]
    assert "    parallel.zero=1\n" in texts[0]
    form: Any = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    table = form.FromString(read.PluginTagToContent("hparams")["_hparams_/session_start_info"]).session_start_info.hparams
    assert table["optim.lr"].number_value == 1e-3
    assert table["train.compile"].string_value == "false"
    assert table["plan.mesh.dp"].number_value == 2


def test_a_killed_and_resumed_run_is_one_curve_in_tensorboard_and_one_wandb_run(ranks: RankPool, tmp_path: Path) -> None:
    overrides = (
        "quickstart", "model=tiny", "model.layers=1", "data=synthetic", "cluster.gpus=1", "train.batch=4", "train.microbatch=4",
        "train.seq=16", "train.evaluate.every=0", "log.every=1", "optim.warmup=0", "train.steps=12", "checkpoint.every=4",
        "log.sinks=[jsonl,tensorboard,wandb]",
    )  # fmt: skip
    step = random.Random(5).randrange(6, 8)
    killed = ranks.fit(tmp_path / "run", *overrides, signals=[(step, 0, signal.SIGKILL)])
    assert killed.codes == (-signal.SIGKILL,)
    noted = (tmp_path / "run" / WANDB).read_text()
    job = ranks.train(tmp_path / "run", *overrides)
    assert "resumes from step 4" in job.lines
    curve = [(each.step, each.value) for each in board(tmp_path / "run").Scalars("loss")]
    assert [step for step, _ in curve] == list(range(1, 13))
    assert [loss for _, loss in curve] == pytest.approx(job.figures("loss"), rel=1e-6)
    saves = [(each.step, each.value) for each in board(tmp_path / "run").Scalars("save_seconds")]
    assert saves == [(row["step"], pytest.approx(row["save_seconds"], rel=1e-6)) for row in job.saves]
    assert [step for step, _ in saves] == [4, 8, 12]
    assert (tmp_path / "run" / WANDB).read_text() == noted
    assert {each.name.rpartition("-")[2] for each in (tmp_path / "run" / "wandb").glob("offline-run-*")} == {json.loads(noted)["id"]}
    assert not [key for key in os.environ if key.startswith("WANDB_")]
