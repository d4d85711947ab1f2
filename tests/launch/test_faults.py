"""Faults drawn from a seed are injected into real runs, and no invariant is violated.

Only a few faults, for the time they take; `python -m distrain.scripts.faults` injects hundreds, also over hosts. Supervision is tested
with more of them, on ranks that are small programs without torch, in lockstep as real ranks are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from distrain.scripts.fault_results import allowed_statuses, result_table
from distrain.scripts.faults import Campaign
from distrain.scripts.faults_runs import RUNS_VARIABLE, Disk, LocalRuns, loss_curve, metric_rows, process_role, send_signal, wait_until
from distrain.scripts.random_faults import SHARES, SIGNALS, draw_faults
from distrain.tests.fakes.deadline import DEADLINE

DRAWN, SMALL = 60, 16  # faults from which real runs get one of each kind; faults for ranks without torch
STEPS = 30  # of a real run, with a checkpoint every 5
# What test_hangs, test_fit_resume (twice), test_anomalies, test_device_checks and test_checkpoint_save do to real runs.
ELSEWHERE = ("kill", "term", "nan", "flipped", "slow", "deleted")
RANKS, LENGTH = 3, 40  # of a run without torch: ranks, and steps of 20 ms
CONTROLLER = """
import os, sys
from pathlib import Path
from distrain.trainer.launch.agent.pipe_agent import DEFERRING
from distrain.trainer.launch.single_host import launch_local_ranks
from distrain.trainer.launch.supervisor.watchdog import Watchdog
folder = Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2], str(folder), *DEFERRING]
watchdog = Watchdog(patience=float(sys.argv[3]))
outcome = launch_local_ranks(command, ranks=3, folder=folder, environment=os.environ, show=print, grace=3.0, watchdog=watchdog)
print(outcome.says)
sys.exit(outcome.status)
"""
RANK = """
import faulthandler, mmap, os, signal, sys, time
from distrain.trainer.system.parent_watch import watch_parent_from_environment
from distrain.trainer.launch.rank.channel import STOPPED, Channel
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
faulthandler.register(signal.SIGUSR2)
talk, rank, ranks = Channel.from_environment(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
watch_parent_from_environment()
with open(sys.argv[1] + "/met", "r+b") as file:
    shared = mmap.mmap(file.fileno(), 0)
for step in range(len(shared) // ranks):
    talk.report_step(step)
    time.sleep(0.02)
    shared[step * ranks + rank] = 2 if asked else 1
    while 0 in (met := shared[step * ranks : (step + 1) * ranks]):
        time.sleep(0.001)
    if 2 in met:
        break
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if 2 in met:
    sys.exit(STOPPED)
talk.report_done()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk | None]:
    """A small disk; mounting it needs root."""
    made = Disk(tmp_path / "disk") if os.geteuid() == 0 else None
    yield made
    if made:
        made.close()


def test_real_runs_survive_faults(tmp_path: Path, disk: Disk | None, capsys: pytest.CaptureFixture[str]) -> None:
    """In one run: a rank is stopped, the disk is full, the newest checkpoint is damaged; it trains to its end after each."""
    campaign = Campaign(LocalRuns(tmp_path / "disk" / "runs", steps=STEPS), disk, print)
    without = (*ELSEWHERE, *(() if disk else ("full",)))
    faults = {fault.kind: fault for fault in draw_faults(DRAWN, 34, "local", without=without) if not fault.at_start}
    results = [campaign.apply(fault) for fault in faults.values()]
    if not campaign.is_checked:  # else the last fault's run has trained to its end
        campaign.finish()
    shown = "\n".join(result_table(results))
    assert [each for each in results if each.violations] == [], shown
    assert campaign.violations == 0, capsys.readouterr().out


def test_a_disk_is_filled_though_a_run_writes_meanwhile(disk: Disk | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size under what is in use by now is refused."""
    if disk is None:
        pytest.skip("mounting a disk needs root")
    statvfs = os.statvfs
    before = [statvfs(disk.folder)]
    (disk.folder / "written").write_bytes(bytes(100_000))
    monkeypatch.setattr(os, "statvfs", lambda path: before.pop() if before else statvfs(path))
    disk.fill(0)
    assert (before, statvfs(disk.folder).f_bavail) == ([], 0)


def start(folder: Path, patience: float) -> subprocess.Popen[bytes]:
    """Start a run of ranks without torch, of which one that makes no progress for so many seconds counts as hung."""
    (folder / "met").write_bytes(bytes(RANKS * LENGTH))
    marked = {**os.environ, RUNS_VARIABLE: str(folder.parent)}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(folder), RANK, str(patience)], env=marked, stdout=log, stderr=log, start_new_session=True
        )


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[LocalRuns]:
    """Local runs, of which nothing is left afterwards."""
    made = LocalRuns(tmp_path / "runs")
    yield made
    made.close()


def test_supervision_survives_faults(runs: LocalRuns) -> None:
    """The faults come at any moment of a run: its start, its steps, its end."""
    for fault in draw_faults(SMALL, 7, "hosts", without=("cut",)):
        folder = runs.folder / str(fault.number)
        folder.mkdir()
        patience = 2.0 if fault.kind == "stop" else DEADLINE  # a busy machine stops processes for seconds too
        began, controller = time.monotonic(), start(folder, patience)
        wait_until(partial(has_ended, controller), 2.0 * fault.moment)
        processes = runs.processes()
        target = (
            fault.pick(sorted({process_role(command, controller="launch_local_ranks(") for command in processes.values()}))
            if processes
            else "nothing"
        )
        for pid in sorted(pid for pid, command in processes.items() if process_role(command, controller="launch_local_ranks(") == target)[
            :1
        ]:
            send_signal(pid, SIGNALS[fault.kind])
            if (fault.kind, target) == ("stop", "fit"):
                time.sleep(0.5)
                send_signal(pid, signal.SIGCONT)
        said = f"{fault} of {target} after {time.monotonic() - began:.1f} s"
        assert wait_until(partial(has_ended, controller), DEADLINE), said
        assert wait_until(lambda: not runs.processes(), DEADLINE), f"{said}: {runs.processes()}"
        log = (folder / "log").read_text()
        assert controller.returncode in allowed_statuses(fault, target, "local"), f"{said}: {controller.returncode}\n{log}"
        assert "Traceback" not in log, said
        met = (folder / "met").read_bytes()
        assert controller.returncode != 0 or 0 not in met, f"{said}: it exited 0 without having trained\n{log}"


def test_each_kind_of_fault_is_drawn_as_often_as_its_share() -> None:
    for kind_of_run, shares in SHARES.items():
        faults = draw_faults(200, 1, kind_of_run)
        assert Counter(each.kind for each in faults) == {kind: 2 * share for kind, share in shares.items()}
        assert faults == draw_faults(200, 1, kind_of_run) != draw_faults(200, 2, kind_of_run)


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 5.0, "grad_norm": 1.0, "lr": 1e-3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "lo')
    assert metric_rows(tmp_path) == [row]
    assert loss_curve(tmp_path) == {1: (5.0, 1.0)}
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "lo{"step": 3}\n')
    with pytest.raises(ValueError, match="delimiter"):
        metric_rows(tmp_path)
