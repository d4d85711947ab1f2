"""How ranks end: on a stop request before the first step, on a failure of one or all, on a last checkpoint that can't be saved."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.overrides import without_repeats
from distrain.tests.fakes.rank_pool import PoolJob, RankPool, choose_program
from distrain.trainer.launch.single_host import launch_local_ranks
from distrain.trainer.rundir.measured_run import read_measured_run
from distrain.trainer.system.child_process import end_child

STOPPED = 75
ARGUMENTS = (
    "quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=2",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=0", "optim.schedule=constant", "cluster.gpus=2", "train.steps=4",
)  # fmt: skip


def fit(ranks: RankPool, folder: Path, *words: str, how: str = "", rank: int = 1, signals: Sequence[tuple[int, int, int]] = ()) -> PoolJob:
    """Train a run in which `rank` has the fault `how`, if any is given."""
    choose_program(folder, "fit")
    (folder / "spoiler").write_text(json.dumps({"how": how, "rank": rank if how else -1}))
    return ranks.fit(folder, *ARGUMENTS, *words, signals=signals)


def log(folder: Path, rank: int) -> str:
    return (folder / "ranks" / f"{rank}.log").read_text()


# Stop requests before the first step


def test_a_stop_request_before_the_first_step_of_a_resumed_run_stops_it_without_a_step(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path / "run", "train.steps=2")
    job = fit(ranks, tmp_path / "run", how="stop_request")
    assert set(job.codes) == {STOPPED}
    assert [row["step"] for row in job.rows] == [1, 2]
    assert set(fit(ranks, tmp_path / "run").codes) == {0}


def test_a_stop_request_before_the_first_step_of_a_new_run_stops_it_after_that_step(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", how="stop_request")
    assert set(job.codes) == {STOPPED}
    assert [row["step"] for row in job.rows] == [1]
    assert "resumes from step 1" in fit(ranks, tmp_path / "run").lines


def test_the_same_command_makes_the_validation_that_a_stop_request_in_the_last_step_leaves_out(ranks: RankPool, tmp_path: Path) -> None:
    words = ("train.steps=1", "train.evaluate={every: 1, batches: 1}")
    job = fit(ranks, tmp_path / "run", *words, how="stop_request")
    assert set(job.codes) == {0}
    assert "validation_loss" not in job.rows[0]
    says = "stopped in its last step: the same command makes the validation that was left out"
    assert says in job.lines
    whole = fit(ranks, tmp_path / "other", *words)
    assert says not in whole.lines
    metrics, before = tmp_path / "run" / "metrics.jsonl", {**job.rows[0], "validation_loss": 9.0}  # of an attempt whose step was lost
    metrics.write_text(f"{json.dumps(before)}\n{metrics.read_text()}")
    for _ in range(2):  # the second finds it there
        again = fit(ranks, tmp_path / "run", *words)
        assert (set(again.codes), again.figures("validation_loss")) == ({0}, whole.figures("validation_loss"))
        assert len(again.rows) == 3
    assert [loss for _, loss in read_measured_run(tmp_path / "run").validation] == whole.figures("validation_loss")
    assert read_measured_run(tmp_path / "run").losses == read_measured_run(tmp_path / "other").losses


def test_a_stop_request_ends_a_long_validation_which_the_resumed_run_makes_whole(ranks: RankPool, tmp_path: Path) -> None:
    words = ("engine=native", "optim.ema=0.9", "train.steps=4", "train.evaluate={every: 2, batches: 4}", "log.every=4")
    whole = fit(ranks, tmp_path / "whole", *words)
    job = fit(ranks, tmp_path / "run", *words, how="stop_in_averaged_validation")
    assert set(job.codes) == {STOPPED}
    assert [(row["step"], "loss" in row, "validation_loss" in row) for row in job.rows] == [(2, True, False)]
    assert [row["step"] for row in job.saves] == [2]
    again = fit(ranks, tmp_path / "run", *words, how="stop_in_validation")
    assert (set(again.codes), len(again.rows)) == ({STOPPED}, 1)
    done = fit(ranks, tmp_path / "run", *words)
    for figure in ("validation_loss", "validation_ema_loss"):
        assert done.figures(figure) == whole.figures(figure)
        assert len(done.figures(figure)) == 2
    assert done.figures("loss")[-1] == whole.figures("loss")[-1]
    assert read_measured_run(tmp_path / "run").again == (), "a row that was made up is no step that was done twice"


@pytest.mark.parametrize("how", ["stop_in_validation", "stop_in_save", "stop_in_copy"])
def test_a_stop_request_while_a_rank_evaluates_or_saves_ends_the_run_without_another_step(
    ranks: RankPool, tmp_path: Path, how: str
) -> None:
    saves = {"stop_in_save": ["checkpoint.every=2"], "stop_in_copy": ["checkpoint.every=2", "checkpoint.background=true"]}
    words = ("train.steps=4", "train.evaluate={every: 2, batches: 1}", *saves.get(how, []))
    job = fit(ranks, tmp_path / "run", *words, how=how)
    assert set(job.codes) == {STOPPED}
    assert [row["step"] for row in job.rows if "loss" in row] == [1, 2]
    assert job.rows[1]["validation_loss"] > 0
    assert len([line for line in job.lines if line.startswith("saved step")]) == 1
    assert "resumes from step 2" in fit(ranks, tmp_path / "run", *words).lines


RANK_MODULE = "distrain.trainer.loop.rank"  # its agent holds SIGTERM and SIGINT back from a command with this argument
PROGRAM_START = """
import os, signal, sys, time
from pathlib import Path
from distrain.trainer.system.stop_requests import StopFlag
at, rank = Path(sys.argv[2]), int(os.environ["RANK"])
(at / f"new{rank}").write_text(str(os.getpid()))
(at / f"new{rank}").rename(at / f"pid{rank}")
"""


def test_a_rank_that_is_still_loading_receives_a_stop_request_once_it_listens(tmp_path: Path) -> None:
    program = 'while not (at / "sent").exists(): time.sleep(0.01)\nsys.exit(75 if StopFlag().requested else 1)'

    def send() -> None:
        for rank, number in ((0, signal.SIGINT), (1, signal.SIGTERM)):
            os.kill(rank_pid(tmp_path, rank), number)
        (tmp_path / "sent").touch()

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send)
        outcome = launch_local_ranks(
            [sys.executable, "-c", PROGRAM_START + program, RANK_MODULE, str(tmp_path)],
            ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=DEADLINE,
        )  # fmt: skip
        sent.result()
    assert (outcome.status, [rank.code for rank in outcome.ranks]) == (STOPPED, [STOPPED, STOPPED])


def test_a_rank_that_never_listens_is_killed_after_the_grace(tmp_path: Path) -> None:
    program = 'while not (at / "pid0").exists(): time.sleep(0.01)\nsys.exit(1) if rank else time.sleep(1000)'
    outcome = launch_local_ranks(
        [sys.executable, "-c", PROGRAM_START + program, RANK_MODULE, str(tmp_path)],
        ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=0.3,
    )  # fmt: skip
    assert [(rank.code, rank.killed) for rank in outcome.ranks] == [(-signal.SIGKILL, True), (1, False)]
    assert outcome.says.startswith("rank 1 exited with 1")


def rank_pid(folder: Path, rank: int) -> int:
    """Wait for the process id that a rank writes."""
    deadline = time.monotonic() + DEADLINE
    while not (folder / f"pid{rank}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int((folder / f"pid{rank}").read_text())


def test_sigterm_to_a_rank_that_is_importing_torch_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    words = without_repeats(f"conf={ARGUMENTS[0]}", *ARGUMENTS[1:], "train.steps=100000", f"log.dir={tmp_path}", "name=run")
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-m", "distrain", "fit", *words], stdout=pipe, stderr=pipe, env=quiet, text=True)
    try:
        os.kill(rank_importing_torch(process, bytes(tmp_path / "run" / "run.json")), signal.SIGTERM)
        output, errors = process.communicate(timeout=DEADLINE)
    finally:
        end_child(process)
    assert (process.returncode, errors) == (STOPPED, "distrain: stopped; a checkpoint is saved: the same command continues\n"), output


def rank_importing_torch(process: subprocess.Popen[str], run: bytes) -> int:
    """The id of a rank's process that is importing torch: its library is mapped, and the rank has not joined the others yet."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        assert process.poll() is None
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (each / "cmdline").read_bytes().split(b"\0")
                if words[1:4] == [b"-m", RANK_MODULE.encode(), run] and b"libtorch" in (each / "maps").read_bytes():
                    return int(each.name)
        time.sleep(0.05)
    raise AssertionError("no rank imports torch")


# Failures


def test_a_rank_that_raises_ends_even_if_one_of_its_threads_waits(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", how="stuck_thread")
    assert job.codes == (1, 1)
    assert "ArithmeticError: what a rank may raise" in job.problems
    assert "Traceback (most recent call last)" in log(tmp_path / "run", 1)
    assert "and explain" in log(tmp_path / "run", 1)


def test_a_rank_without_memory_says_what_was_planned_and_what_needs_less(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", how="no_memory")
    assert job.codes == (1, 1)
    (says,) = (each for each in job.problems if "memory" in each)
    assert re.fullmatch(r"out of memory: asked for 128 TiB; [\d.]+ MiB planned in all; less is needed with \S+=.*", says)
    assert "DefaultCPUAllocator: can't allocate memory" in log(tmp_path / "run", 1)


def test_ranks_whose_hosts_have_other_files_refuse_to_train(ranks: RankPool, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(400)))
    words = ("data=text", f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "train.evaluate.every=0")
    job = fit(ranks, tmp_path / "run", *words, how="other_text")
    says = f"data.path={text} holds other tokens here than on rank 0: give all hosts the same files"
    assert (job.codes, job.problems) == ((1, 1), (says,))
    assert log(tmp_path / "run", 1).endswith(f"{says}\n")


@pytest.mark.parametrize("words", [(), ("engine=native", "parallel.zero=1")], ids=["zero", "native"])
def test_a_rank_that_cannot_read_its_shard_reports_it_itself(ranks: RankPool, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Of engine native the others gather weights only after it has."""
    fit(ranks, tmp_path / "run", *words, "train.steps=2")
    job = fit(ranks, tmp_path / "run", *words, how="unreadable_shard")
    assert (job.codes, job.problems) == ((1, 1), ("a shard is on no disk of this host",))
    for rank in (0, 1):
        assert log(tmp_path / "run", rank).endswith("a shard is on no disk of this host\n")
        assert "Traceback" not in log(tmp_path / "run", rank)


def test_preparing_a_corpus_may_take_longer_than_a_collective(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", how="slow_corpus", rank=0)
    assert set(job.codes) == {0}, job.problems


# The last checkpoint


def test_a_run_whose_checkpoint_folder_cannot_be_made_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    status = command(["fit", *without_repeats(f"conf={ARGUMENTS[0]}", *ARGUMENTS[1:], "cluster.gpus=1", f"log.dir={tmp_path}", "name=run")])
    said = capfd.readouterr()
    assert status == 1
    (line,) = said.err.splitlines()
    says = "rank 0 exited with 1, at step 3: trained to step 4, which could not be saved: it has no checkpoint; its log is "
    assert line.startswith(f"distrain: {says}")
    assert "warning: step 4 was not saved: file exists: " in said.out


def test_the_run_folder_is_shown_as_a_user_types_it_here(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status = command(["fit", *without_repeats(f"conf={ARGUMENTS[0]}", *ARGUMENTS[1:], "cluster.gpus=1", "train.steps=1", "name=run")])
    assert status == 0
    assert "run folder runs/run" in capfd.readouterr().out.splitlines()


def test_a_run_whose_last_save_fails_says_from_which_step_it_resumes(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path / "run", "train.steps=2")
    job = fit(ranks, tmp_path / "run", how="small_files")
    says = "trained to step 4, which could not be saved: make room and start it again, and it resumes from step 2"
    assert (job.codes, job.problems) == ((1, 1), (says,))
    assert "warning: step 4 was not saved: a file would be larger than this process may write" in "\n".join(job.lines)
    assert set(fit(ranks, tmp_path / "run").codes) == {0}


def test_a_stopped_run_that_cannot_save_exits_with_143(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", "train.steps=500", how="small_files", signals=[(1, 1, signal.SIGTERM)])
    assert (set(job.codes), job.problems) == ({128 + signal.SIGTERM}, ())


def test_a_finished_run_is_also_finished_with_fewer_steps(ranks: RankPool, tmp_path: Path) -> None:
    first = fit(ranks, tmp_path / "run")
    job = fit(ranks, tmp_path / "run", "train.steps=2")
    assert (set(job.codes), job.problems, job.rows) == ({0}, (), first.rows)
    assert ["nothing to train" in "".join(each.lines) for each in (first, job)] == [False, True]


# Other files


def test_a_file_of_figures_that_cannot_be_written_ends_no_run(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("measured.json", "ledger.json"):
        (tmp_path / "run" / name / "in the way").mkdir(parents=True)
    (tmp_path / "run" / "trace").touch()
    job = fit(ranks, tmp_path / "run", "log.ledger=true", "log.profile=[2,2]")
    assert set(job.codes) == {0}, job.problems
    warned = [line for line in job.lines if line.startswith("warning: ")]
    assert [line.partition(" could not be written: ")[0].rpartition("/")[2] for line in warned] == [
        "measured.json",
        "warning: the profiler's trace",
        "ledger.json",
    ]
    assert not list((tmp_path / "run").glob(".*.json.*"))


def test_a_validation_loss_that_is_nan_is_logged_as_null(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", "train.evaluate={every: 4, batches: 1}", how="nan_validation", rank=0)
    assert set(job.codes) == {0}, job.problems
    assert job.rows[-1]["validation_loss"] is None
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
