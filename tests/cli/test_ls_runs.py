"""`distrain ls runs`: what each run folder says of itself, whole, under way or damaged."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest

pytest.importorskip("torch")

from msgspec import json as encoder

from distrain.cli.app import command
from distrain.cli.pages.format import USUAL
from distrain.cli.pages.runs_page import ListedRun, listed_run, listed_runs
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.files import write_end
from distrain.trainer.rundir.lock import held, holder
from distrain.trainer.spec.run import Run

SMALL = ("model.hidden=32", "model.heads=2", "model.ffn=64", "model.layers=1", "train.seq=16", "train.batch=4", "train.microbatch=2")
WORDS = ("data=synthetic", *SMALL, "optim.warmup=1", "log.every=1", "train.evaluate={every: 4, batches: 1}", "checkpoint.every=4")


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints of 4 and 6, and of no `fit`: nothing says how it ended."""
    folder: Path = tmp_path_factory.mktemp("listed") / "run"
    ranks.trained(folder, "quickstart", *WORDS, "train.steps=6")
    (folder / "plan.json").write_bytes(encoder.encode(make_plan(encoder.decode((folder / "run.json").read_bytes(), type=Run))))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return Path(copytree(trained, tmp_path / "runs" / "mine"))


def said(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = command(shlex.split(words))
    return status, *capsys.readouterr()


def cut(run: Path, steps: int) -> None:
    """Take the rows of metrics.jsonl beyond a step away, and the checkpoints of later ones."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["step"] <= steps))
    for path in run.glob("checkpoints/step_*"):
        if int(path.name[5:]) > steps:
            rmtree(path)


def state_of(run: Path) -> tuple[str, str]:
    found = listed_run(run)
    return found.state, found.says


def test_a_run_that_trained_to_its_end_is_finished(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert listed_run(run) == ListedRun(
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


def test_a_run_of_which_nothing_says_how_it_ended_is_judged_by_its_checkpoint(run: Path) -> None:
    cut(run, 5)
    assert (state_of(run), listed_run(run).checkpoint, listed_run(run).steps) == (("failed", ""), 4, 5)
    cut(run, 4)
    assert state_of(run) == ("stopped", "")
    cut(run, 0)
    assert state_of(run) == ("new", "")


@pytest.mark.parametrize(
    ("status", "state"), [(0, ("finished", "")), (1, ("failed", "rank 1 failed")), (75, ("stopped", "")), (143, ("stopped", ""))]
)
def test_a_run_is_what_the_fit_that_ended_said(status: int, state: tuple[str, str], run: Path) -> None:
    cut(run, 4)
    write_end(run, status, "rank 1 failed")
    assert state_of(run) == state


def test_an_end_that_is_older_than_the_last_step_says_nothing(run: Path) -> None:
    write_end(run, 1, "rank 1 failed")
    os.utime(run / "ended.json", (1e9, 1e9))
    assert state_of(run) == ("finished", "")


def test_a_run_is_running_as_long_as_its_lock_is_held(run: Path) -> None:
    with held(run):
        assert state_of(run) == ("running", "")
        assert holder(run).startswith(f"process {os.getpid()} on ")
    assert (state_of(run), holder(run)) == (("finished", ""), "")


HOLDER = """
import sys, time
from pathlib import Path
from distrain.trainer.rundir.lock import held
with held(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(60)
"""


@pytest.fixture
def killed(run: Path) -> str:
    """A holder of the lock that was killed; what the lock says of it."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        read, running = child.stdout.readline(), state_of(run)[0]
        child.send_signal(signal.SIGKILL)
    assert (read, running) == (b"\n", "running")
    return (run / "lock").read_text().strip()


def test_a_run_whose_fit_was_killed_has_failed(run: Path, killed: str) -> None:
    cut(run, 4)
    assert killed
    assert state_of(run) == ("failed", f"{killed}, was killed")


def test_looking_at_a_lock_that_a_killed_process_left_frees_it_again(run: Path, killed: str) -> None:
    """Also where another process has its number since."""
    (run / "lock").write_text(killed.replace(killed.split()[1], str(os.getpid()), 1))
    assert holder(run) == ""
    with held(run) as warning:
        assert warning == ""


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_folder_whose_config_cannot_be_read_is_damaged(content: bytes, run: Path) -> None:
    (run / "run.json").write_bytes(content)
    found = listed_run(run)
    assert (found.state, found.says, found.steps) == ("damaged", "damaged: run.json can't be read", 6)


def test_a_checkpoint_that_is_not_whole_is_said_and_the_one_before_is_named(run: Path) -> None:
    shard = next(run.glob("checkpoints/step_6/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = listed_run(run)
    size = shard.stat().st_size
    assert (found.checkpoint, found.says) == (4, f"damaged: checkpoint step_6: {shard.name} is {size} bytes, not {size + 1}")


def test_lines_that_are_none_are_counted_and_a_torn_last_one_is_not(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"\xff\x00\n", *lines[1:], b'{"step": 7, "lo']))
    found = listed_run(run)
    assert (found.steps, found.says) == (6, "damaged: 1 line of metrics.jsonl can't be read")


def test_losses_that_are_no_numbers_are_passed_over(run: Path) -> None:
    before = listed_run(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": null}\n{"step": 8, "loss": NaN, "validation_loss": "low"}\n{"restarts": 1, "goodput": 0.5}\n')
    found = listed_run(run)
    assert (found.steps, found.loss, found.validation) == (8, before.loss, before.validation)


def test_a_fifo_in_place_of_a_file_holds_nothing_up(run: Path) -> None:
    for name in ("run.json", "metrics.jsonl"):
        (run / name).unlink()
        os.mkfifo(run / name)
    assert listed_run(run).state == "damaged"


# The folder


def test_runs_are_listed_newest_first_also_those_whose_names_have_slashes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = run.parent
    for at, name in enumerate(("a/deep/one", "old", ".hidden", "x.prove/dp2")):
        copytree(run, top / name)
        os.utime(top / name / "metrics.jsonl", (1e9 + at, 1e9 + at))
    (top / "notes").mkdir()
    (top / "notes" / "text.txt").write_text("of no run\n")
    assert [str(each.folder.relative_to(top)) for each in listed_runs(top)] == ["mine", "old", "a/deep/one"]
    status, out, err = said(f"ls runs {top}", capsys)
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["run", "steps", "loss", "validation", "saved", "when", "state"]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("mine", "finished"),
        ("old", "finished"),
        ("a/deep/one", "finished"),
    ]
    assert lines[1].split()[1] == "6/6"
    assert "2001-09-09" in lines[1]


def test_the_folder_of_a_run_is_that_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(f"ls runs {run}", capsys)[1].splitlines()[1].split()[:2] == ["mine", "6/6"]


def test_a_folder_alone_lists_its_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(f"ls {run.parent}/", capsys) == said(f"ls runs {run.parent}", capsys)


def test_json_is_a_list_with_a_run_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (only,) = json.loads(said(f"ls runs {run.parent} --json", capsys)[1])
    assert set(only) == {"folder", "name", "steps", "of", "loss", "validation", "checkpoint", "when", "state", "says"}
    assert (only["folder"], only["steps"], only["state"]) == (str(run), 6, "finished")


def test_where_there_is_no_run_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert said("ls runs", capsys) == (0, "no runs in runs\n", "")
    assert said("ls runs --json", capsys)[1] == "[]\n"
    assert said("ls runs nowhere", capsys) == (2, "", "distrain: nowhere is no folder: name the log.dir of runs, such as runs\n")


def test_a_long_name_and_control_characters_keep_a_line_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copytree(run, run.parent / ("long\n" * 30))
    out = said(f"ls runs {run.parent}", capsys)[1]
    lines = out.splitlines()
    assert len(lines) == 4
    assert max(len(line) for line in lines if "long" not in line) <= USUAL
