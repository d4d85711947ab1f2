"""How ranks end: asked to stop before they have begun, failing alone or together, with a last checkpoint that can't be saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.cli.app import command
from distrain.tests.fakes.unrepeated_words import unrepeated
from distrain.trainer.launch.single_host import launch
from distrain.trainer.system.end_child import end_child

if TYPE_CHECKING:
    from distrain.tests.conftest import Job, Ranks

STOPPED = 75
DEADLINE = 120.0  # seconds, for what takes ten on an idle machine
WORDS = (
    "quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=2",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=0", "optim.schedule=constant", "cluster.gpus=2", "train.steps=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks of which one goes wrong as RUN_DIR/spoiler says."""
    from distrain.tests.conftest import Ranks

    pool = Ranks(
        tmp_path_factory.mktemp("spoiled") / "server.log",
        command=[sys.executable, str(Path(__file__).parents[1] / "rank_programs" / "fit_ranks.py")],
    )
    with pool.server:
        yield pool


def fit(ranks: Ranks, folder: Path, *words: str, how: str = "", rank: int = 1, signals: Sequence[tuple[int, int, int]] = ()) -> Job:
    """A run of which this rank is spoiled so."""
    folder.mkdir(exist_ok=True)
    (folder / "spoiler").write_text(json.dumps({"how": how, "rank": rank if how else -1}))
    return ranks.fit(folder, *WORDS, *words, signals=signals)


def log(folder: Path, rank: int) -> str:
    return (folder / "ranks" / f"{rank}.log").read_text()


# Asked to stop before the first step


def test_a_run_that_goes_on_and_is_asked_to_stop_at_once_takes_no_step(spoiled: Ranks, tmp_path: Path) -> None:
    fit(spoiled, tmp_path / "run", "train.steps=2")
    job = fit(spoiled, tmp_path / "run", how="told")
    assert set(job.codes) == {STOPPED}
    assert [row["step"] for row in job.rows] == [1, 2]
    assert set(fit(spoiled, tmp_path / "run").codes) == {0}


def test_a_run_that_begins_and_is_asked_to_stop_at_once_saves_its_first_step(spoiled: Ranks, tmp_path: Path) -> None:
    job = fit(spoiled, tmp_path / "run", how="told")
    assert set(job.codes) == {STOPPED}
    assert [row["step"] for row in job.rows] == [1]
    assert "goes on from step 1" in fit(spoiled, tmp_path / "run").said


DEFERS = "distrain.trainer.loop.rank"  # a word by which a keeper holds SIGTERM and SIGINT back
BEGIN = """
import os, signal, sys, time
from pathlib import Path
from distrain.trainer.system.stop_requests import Stop
at, rank = Path(sys.argv[2]), int(os.environ["RANK"])
(at / f"new{rank}").write_text(str(os.getpid()))
(at / f"new{rank}").rename(at / f"pid{rank}")
"""


def test_a_rank_that_is_being_loaded_hears_of_a_stop_once_it_listens(tmp_path: Path) -> None:
    program = 'while not (at / "sent").exists(): time.sleep(0.01)\nsys.exit(75 if Stop().asked else 1)'

    def send() -> None:
        for rank, number in ((0, signal.SIGINT), (1, signal.SIGTERM)):
            os.kill(pid_of(tmp_path, rank), number)
        (tmp_path / "sent").touch()

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send)
        ended = launch(
            [sys.executable, "-c", BEGIN + program, DEFERS, str(tmp_path)],
            ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=DEADLINE,
        )  # fmt: skip
        sent.result()
    assert (ended.status, [end.code for end in ended.ranks]) == (STOPPED, [STOPPED, STOPPED])


def test_a_rank_that_never_listens_is_killed_after_the_grace(tmp_path: Path) -> None:
    program = 'while not (at / "pid0").exists(): time.sleep(0.01)\nsys.exit(1) if rank else time.sleep(1000)'
    ended = launch(
        [sys.executable, "-c", BEGIN + program, DEFERS, str(tmp_path)],
        ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=0.3,
    )  # fmt: skip
    assert [(end.code, end.cut) for end in ended.ranks] == [(-signal.SIGKILL, True), (1, False)]
    assert ended.says.startswith("rank 1 exited with 1")


def pid_of(folder: Path, rank: int) -> int:
    """The process of a rank, once it says so."""
    until = time.monotonic() + DEADLINE
    while not (folder / f"pid{rank}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    return int((folder / f"pid{rank}").read_text())


def test_sigterm_to_one_rank_that_imports_torch_stops_the_run_in_order(tmp_path: Path) -> None:
    words = unrepeated(f"conf={WORDS[0]}", *WORDS[1:], "train.steps=2000", f"log.dir={tmp_path}", "name=run")
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-m", "distrain", "fit", *words], stdout=pipe, stderr=pipe, env=quiet, text=True)
    try:
        os.kill(imports_torch(process, bytes(tmp_path / "run" / "run.json")), signal.SIGTERM)
        said, wrong = process.communicate(timeout=DEADLINE)
    finally:
        end_child(process)
    assert (process.returncode, wrong) == (STOPPED, "distrain: stopped; a checkpoint is saved\n"), said


def imports_torch(process: subprocess.Popen[str], run: bytes) -> int:
    """A rank of the run that begins to import torch: so much of it is in its memory, and it has not met the others."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        assert process.poll() is None
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (each / "cmdline").read_bytes().split(b"\0")
                if words[1:4] == [b"-m", DEFERS.encode(), run] and b"libtorch" in (each / "maps").read_bytes():
                    return int(each.name)
    raise AssertionError("no rank begins")


# Failing


def test_a_rank_that_raises_ends_though_a_thread_of_its_own_waits(spoiled: Ranks, tmp_path: Path) -> None:
    job = fit(spoiled, tmp_path / "run", how="stuck")
    assert job.codes == (1, 1)
    assert "ArithmeticError: what a rank may raise" in job.problems
    assert "Traceback (most recent call last)" in log(tmp_path / "run", 1)
    assert "and explain" in log(tmp_path / "run", 1)


def test_what_one_rank_can_not_read_it_says_itself(spoiled: Ranks, tmp_path: Path) -> None:
    fit(spoiled, tmp_path / "run", "train.steps=2")
    job = fit(spoiled, tmp_path / "run", how="unread")
    assert (job.codes, job.problems) == ((1, 1), ("a shard is on no disk of this host",))
    for rank in (0, 1):
        assert log(tmp_path / "run", rank).endswith("a shard is on no disk of this host\n")
        assert "Traceback" not in log(tmp_path / "run", rank)


def test_a_corpus_may_take_longer_than_any_step(spoiled: Ranks, tmp_path: Path) -> None:
    job = fit(spoiled, tmp_path / "run", how="slow", rank=0)
    assert set(job.codes) == {0}, job.problems


# The last checkpoint


def test_a_run_whose_checkpoints_have_no_folder_is_not_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    status = command(["fit", *unrepeated(f"conf={WORDS[0]}", *WORDS[1:], "cluster.gpus=1", f"log.dir={tmp_path}", "name=run")])
    said = capfd.readouterr()
    assert status == 1
    (line,) = said.err.splitlines()
    says = "rank 0 exited with 1, at step 3: trained to step 4, which could not be saved: no checkpoint of it is there; its log is "
    assert line.startswith(f"distrain: {says}")
    assert "warning: step 4 was not saved: file exists: " in said.out


def test_a_run_whose_last_save_fails_says_from_where_it_goes_on(spoiled: Ranks, tmp_path: Path) -> None:
    fit(spoiled, tmp_path / "run", "train.steps=2")
    job = fit(spoiled, tmp_path / "run", how="limited")
    says = "trained to step 4, which could not be saved: make room and start it again, and it goes on from step 2"
    assert (job.codes, job.problems) == ((1, 1), (says,))
    assert "warning: step 4 was not saved: a file would be larger than this process may write" in "\n".join(job.said)
    assert set(fit(spoiled, tmp_path / "run").codes) == {0}


def test_a_run_that_is_asked_to_stop_and_can_not_save_says_so_by_its_status(spoiled: Ranks, tmp_path: Path) -> None:
    job = fit(spoiled, tmp_path / "run", "train.steps=500", how="limited", signals=[(1, 1, signal.SIGTERM)])
    assert (set(job.codes), job.problems) == ({128 + signal.SIGTERM}, ())


def test_a_run_that_is_done_with_more_steps_is_done_with_fewer(spoiled: Ranks, tmp_path: Path) -> None:
    rows = fit(spoiled, tmp_path / "run").rows
    job = fit(spoiled, tmp_path / "run", "train.steps=2")
    assert (set(job.codes), job.problems, job.rows) == ({0}, (), rows)


# What is written beside


def test_files_that_can_not_be_written_end_no_run(spoiled: Ranks, tmp_path: Path) -> None:
    for name in ("measured.json", "ledger.json"):
        (tmp_path / "run" / name / "in the way").mkdir(parents=True)
    (tmp_path / "run" / "trace").touch()
    job = fit(spoiled, tmp_path / "run", "log.ledger=true", "log.profile=[2,2]")
    assert set(job.codes) == {0}, job.problems
    warned = [line for line in job.said if line.startswith("warning: ")]
    assert [line.partition(" could not be written: ")[0].rpartition("/")[2] for line in warned] == [
        "measured.json",
        "warning: the profiler's trace",
        "ledger.json",
    ]
    assert not list((tmp_path / "run").glob(".*.json.*"))


def test_a_validation_loss_that_is_no_number_is_null(spoiled: Ranks, tmp_path: Path) -> None:
    job = fit(spoiled, tmp_path / "run", "train.evaluate={every: 4, batches: 1}", how="unsure", rank=0)
    assert set(job.codes) == {0}, job.problems
    assert job.rows[-1]["validation_loss"] is None
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
