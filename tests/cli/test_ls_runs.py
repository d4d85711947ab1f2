"""`distrain ls runs`: the state of each run folder, whole, running or damaged."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest

pytest.importorskip("torch")

from msgspec import json as encoder

from distrain.cli.pages.text_layout import DEFAULT_WIDTH
from distrain.tests.fakes.run_command import run_command
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.files import write_outcome
from distrain.trainer.rundir.lock import hold_run_folder, lock_holder
from distrain.trainer.rundir.metric_rows import read_step_rows
from distrain.trainer.rundir.run_summary import RunSummary, run_summaries, run_summary
from distrain.trainer.spec.run import Run

SMALL = ("model.hidden=32", "model.heads=2", "model.ffn=64", "model.layers=1", "train.seq=16", "train.batch=4", "train.microbatch=2")
WORDS = ("data=synthetic", *SMALL, "optim.warmup=1", "log.every=1", "train.evaluate={every: 4, batches: 1}", "checkpoint.every=4")


@pytest.fixture(scope="module")
def trained_run(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints at 4 and 6, started without `fit`, so that it has no ended.json."""
    folder: Path = tmp_path_factory.mktemp("listed") / "run"
    ranks.train(folder, "quickstart", *WORDS, "train.steps=6")
    (folder / "plan.json").write_bytes(encoder.encode(make_plan(encoder.decode((folder / "run.json").read_bytes(), type=Run))))
    return folder


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(copytree(trained_run, tmp_path / "runs" / "mine"))


def keep_steps(run: Path, steps: int) -> None:
    """Remove the rows of metrics.jsonl and the checkpoints after a step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["step"] <= steps))
    for path in run.glob("checkpoints/step_*"):
        if int(path.name[5:]) > steps:
            rmtree(path)


def state_of(run: Path) -> tuple[str, str]:
    found = run_summary(run)
    return found.state, found.says


def test_a_run_that_trained_to_its_end_is_finished(run: Path) -> None:
    rows = read_step_rows(run)
    assert run_summary(run) == RunSummary(
        folder=run,
        name="run",
        steps=6,
        of=6,
        loss=rows[-1]["loss"],
        validation=rows[-1]["validation_loss"],
        checkpoint=6,
        when=(run / "metrics.jsonl").stat().st_mtime,
        state="finished",
        says="",
    )


def test_without_ended_json_a_run_is_judged_by_its_checkpoint(run: Path) -> None:
    keep_steps(run, 5)
    assert (state_of(run), run_summary(run).checkpoint, run_summary(run).steps) == (("failed", ""), 4, 5)
    keep_steps(run, 4)
    assert state_of(run) == ("stopped", "")
    keep_steps(run, 0)
    assert state_of(run) == ("new", "")


@pytest.mark.parametrize(
    ("status", "state"), [(0, ("finished", "")), (1, ("failed", "rank 1 failed")), (75, ("stopped", "")), (143, ("stopped", ""))]
)
def test_the_state_of_a_run_follows_from_the_exit_status_of_fit(status: int, state: tuple[str, str], run: Path) -> None:
    keep_steps(run, 4)
    write_outcome(run, status, "rank 1 failed")
    assert state_of(run) == state


def test_an_ended_json_older_than_the_last_step_is_ignored(run: Path) -> None:
    write_outcome(run, 1, "rank 1 failed")
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 6, "loss": 5.0}\n')
    assert state_of(run) == ("finished", "")


@pytest.mark.parametrize("when", [1e9, 3e9])
def test_clocks_and_copies_change_no_state(run: Path, when: float) -> None:
    """A clock that was set back, or a copy that keeps no times."""
    write_outcome(run, 1, "rank 1 failed")
    os.utime(run / "ended.json", (when, when))
    assert state_of(run) == ("failed", "rank 1 failed")


def test_a_fit_that_had_no_step_left_keeps_the_end_before_it(run: Path) -> None:
    """It logs the goodput of all attempts, and puts ended.json back as it was."""
    write_outcome(run, 1, "rank 1 failed")
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write('{"restarts": 0, "lost_steps": 0, "goodput": 0.5, "seconds_in_all": 3.0}\n')
    assert state_of(run) == ("failed", "rank 1 failed")


def test_an_ended_json_of_an_earlier_version_is_judged_by_its_time(run: Path) -> None:
    (run / "ended.json").write_text('{"status": 1, "says": "rank 1 failed"}')
    assert state_of(run) == ("failed", "rank 1 failed")
    os.utime(run / "ended.json", (1e9, 1e9))
    assert state_of(run) == ("finished", "")


def test_a_run_is_running_while_its_lock_is_held(run: Path) -> None:
    with hold_run_folder(run):
        assert state_of(run) == ("running", "")
        assert lock_holder(run).startswith(f"process {os.getpid()} on ")
    assert (state_of(run), lock_holder(run)) == (("finished", ""), "")


HOLDER = """
import sys, time
from pathlib import Path
from distrain.trainer.rundir.lock import hold_run_folder
with hold_run_folder(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(60)
"""


@pytest.fixture
def killed_holder(run: Path) -> str:
    """The text of a lock whose holder was killed."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        read, running = child.stdout.readline(), state_of(run)[0]
        child.send_signal(signal.SIGKILL)
    assert (read, running) == (b"\n", "running")
    return (run / "lock").read_text().strip()


def test_a_run_whose_fit_was_killed_has_failed(run: Path, killed_holder: str) -> None:
    keep_steps(run, 4)
    assert killed_holder
    assert state_of(run) == ("failed", f"{killed_holder}, was killed")


def test_a_lock_left_by_a_killed_process_can_be_taken(run: Path, killed_holder: str) -> None:
    """Also where another process has the same pid by now."""
    (run / "lock").write_text(killed_holder.replace(killed_holder.split()[1], str(os.getpid()), 1))
    assert lock_holder(run) == ""
    with hold_run_folder(run) as warning:
        assert warning == ""


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_folder_whose_config_cannot_be_read_is_damaged(content: bytes, run: Path) -> None:
    (run / "run.json").write_bytes(content)
    found = run_summary(run)
    assert (found.state, found.says, found.steps) == ("damaged", "damaged: run.json can't be read", 6)


def test_a_json_object_that_is_no_config_is_damaged(run: Path) -> None:
    (run / "run.json").write_text('{"name": "run"}')
    assert state_of(run) == ("damaged", "damaged: run.json is not a run's config")
    (run / "run.json").unlink()
    assert state_of(run) == ("damaged", "damaged: run.json is missing")


def test_a_damaged_checkpoint_is_reported_and_the_one_before_counts(run: Path) -> None:
    shard = next(run.glob("checkpoints/step_6/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = run_summary(run)
    size = shard.stat().st_size
    assert (found.checkpoint, found.says) == (4, f"damaged: checkpoint step_6: {shard.name} is {size} bytes, not {size + 1}")


def test_unreadable_lines_are_counted_but_not_a_torn_last_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"\xff\x00\n", *lines[1:], b'{"step": 7, "lo']))
    found = run_summary(run)
    assert (found.steps, found.says) == (6, "damaged: 1 line of metrics.jsonl can't be read")


def test_losses_that_are_not_finite_numbers_are_skipped(run: Path) -> None:
    before = run_summary(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": null}\n{"step": 8, "loss": NaN, "validation_loss": "low"}\n{"restarts": 1, "goodput": 0.5}\n')
    found = run_summary(run)
    assert (found.steps, found.loss, found.validation) == (8, before.loss, before.validation)


def test_a_fifo_in_place_of_a_file_does_not_block(run: Path) -> None:
    for name in ("run.json", "metrics.jsonl"):
        (run / name).unlink()
        os.mkfifo(run / name)
    assert run_summary(run).state == "damaged"


# The folder


def test_runs_are_listed_newest_first_with_names_that_have_slashes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = run.parent
    for at, name in enumerate(("a/deep/one", "old", ".hidden", "x.prove/dp2")):
        copytree(run, top / name)
        os.utime(top / name / "metrics.jsonl", (1e9 + at, 1e9 + at))
    (top / "notes").mkdir()
    (top / "notes" / "text.txt").write_text("of no run\n")
    assert [str(each.folder.relative_to(top)) for each in run_summaries(top)] == ["mine", "old", "a/deep/one"]
    status, out, err = run_command(f"ls runs {top}", capsys)
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["run", "steps", "loss", "validation", "saved", "when", "state"]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("mine", "finished"),
        ("old", "finished"),
        ("a/deep/one", "finished"),
    ]
    assert lines[1].split()[1] == "6/6"
    assert time.strftime("%Y-%m-%d", time.localtime(1e9 + 1)) in lines[1]  # the 8th or the 9th of September 2001, as the zone has it


def test_ls_of_a_run_folder_lists_that_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(f"ls runs {run}", capsys)[1].splitlines()[1].split()[:2] == ["mine", "6/6"]


def test_ls_of_a_folder_lists_its_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(f"ls {run.parent}/", capsys) == run_command(f"ls runs {run.parent}", capsys)


def test_json_is_a_list_of_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (only,) = json.loads(run_command(f"ls runs {run.parent} --json", capsys)[1])
    assert set(only) == {"folder", "name", "steps", "of", "loss", "validation", "checkpoint", "when", "state", "says"}
    assert (only["folder"], only["steps"], only["state"]) == (str(run), 6, "finished")


def test_a_folder_without_runs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("ls runs", capsys) == (0, "no runs in runs\n", "")
    assert run_command("ls runs --json", capsys)[1] == "[]\n"
    assert run_command("ls runs nowhere", capsys) == (2, "", "distrain: nowhere is not a folder: give the log.dir of runs, such as runs\n")


def test_a_long_name_with_control_characters_stays_on_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copytree(run, run.parent / ("long\n" * 30))
    out = run_command(f"ls runs {run.parent}", capsys)[1]
    lines = out.splitlines()
    assert len(lines) == 4
    assert max(len(line) for line in lines if "long" not in line) <= DEFAULT_WIDTH
