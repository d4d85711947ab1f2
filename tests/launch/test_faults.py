"""Faults that a seed draws come to real runs, and what must be true whatever broke is true.

A few of them, for the time it takes; `python -m distrain.scripts.faults` has hundreds, on this machine and over hosts. What watches over
ranks is held against more of them with ranks that are small programs without torch, in lockstep as ranks are.
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

from distrain.scripts.faults import Campaign, allowed_statuses, result_table
from distrain.scripts.faults_drawn import SHARES, SIGNALS, draw_faults
from distrain.scripts.faults_runs import RUNS_VARIABLE, Disk, LocalRuns, loss_curve, metric_rows, process_role, send_signal, wait_until

DRAWN, SMALL = 60, 24  # faults of which one of each kind comes to a run that trains, and faults that come to ranks without torch
DEADLINE = 120.0  # seconds, for what takes two on an idle machine
RANKS, LENGTH = 3, 40  # of a run without torch: ranks, and steps of 20 ms
HEAD = """
import os, sys
from pathlib import Path
from distrain.trainer.launch.agent.local_agent import DEFERRING
from distrain.trainer.launch.single_host import launch_local_ranks
from distrain.trainer.launch.supervisor.watchdog import Watchdog
folder = Path(sys.argv[1])
ended = launch_local_ranks([sys.executable, "-c", sys.argv[2], str(folder), *DEFERRING], ranks=3, folder=folder, environment=os.environ, show=print,
               grace=3.0, watchdog=Watchdog(patience=2.0))
print(ended.says)
sys.exit(ended.status)
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
    talk.step(step)
    time.sleep(0.02)
    shared[step * ranks + rank] = 2 if asked else 1
    while 0 in (met := shared[step * ranks : (step + 1) * ranks]):
        time.sleep(0.001)
    if 2 in met:
        break
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if 2 in met:
    sys.exit(STOPPED)
talk.done()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk | None]:
    """A small disk, which root may make."""
    made = Disk(tmp_path / "disk") if os.geteuid() == 0 else None
    yield made
    if made:
        made.close()


def test_real_runs_survive_what_is_drawn(tmp_path: Path, disk: Disk | None, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(LocalRuns(tmp_path / "disk" / "runs"), disk, print)
    without = ("flipped", *(() if disk else ("full",)))
    faults = {fault.kind: fault for fault in draw_faults(DRAWN, 5, "local", without=without) if not fault.at_start}
    outcomes = [campaign.apply(fault) for fault in faults.values()]
    campaign.finish()
    shown = "\n".join(result_table(outcomes))
    assert [each for each in outcomes if each.violations] == [], shown
    assert campaign.violations == 0, capsys.readouterr().out


def start(folder: Path) -> subprocess.Popen[bytes]:
    """A run of ranks without torch."""
    (folder / "met").write_bytes(bytes(RANKS * LENGTH))
    marked = {**os.environ, RUNS_VARIABLE: str(folder.parent)}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", HEAD, str(folder), RANK], env=marked, stdout=log, stderr=log, start_new_session=True)


def over(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[LocalRuns]:
    """Where runs run, of which nothing is left afterwards."""
    made = LocalRuns(tmp_path / "ground")
    yield made
    made.close()


def test_whatever_watches_over_ranks_survives_what_is_drawn(ground: LocalRuns) -> None:
    """The seconds of a whole run are drawn over: its start, its steps, its end."""
    for fault in draw_faults(SMALL, 7, "hosts", without=("cut",)):
        folder = ground.folder / str(fault.number)
        folder.mkdir()
        began, head = time.monotonic(), start(folder)
        wait_until(partial(over, head), 2.0 * fault.moment)
        there = ground.processes()
        whom = fault.pick(sorted({process_role(words, whole="launch_local_ranks(") for words in there.values()})) if there else "nobody"
        for pid in sorted(pid for pid, words in there.items() if process_role(words, whole="launch_local_ranks(") == whom)[:1]:
            send_signal(pid, SIGNALS[fault.kind])
            if (fault.kind, whom) == ("stop", "fit"):
                time.sleep(0.5)
                send_signal(pid, signal.SIGCONT)
        said = f"{fault} of {whom} after {time.monotonic() - began:.1f} s"
        assert wait_until(partial(over, head), DEADLINE), said
        assert wait_until(lambda: not ground.processes(), DEADLINE), f"{said}: {ground.processes()}"
        log = (folder / "log").read_text()
        assert head.returncode in allowed_statuses(fault, whom, "local"), f"{said}: {head.returncode}\n{log}"
        assert "Traceback" not in log, said
        met = (folder / "met").read_bytes()
        assert head.returncode != 0 or 0 not in met, f"{said}: it trained, and did not\n{log}"


def test_as_many_faults_of_a_kind_are_drawn_as_its_share_says() -> None:
    for ground, shares in SHARES.items():
        faults = draw_faults(200, 1, ground)
        assert Counter(each.kind for each in faults) == {kind: 2 * share for kind, share in shares.items()}
        assert faults == draw_faults(200, 1, ground) != draw_faults(200, 2, ground)


def test_a_half_line_that_a_killed_writer_left_is_no_row(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 5.0, "grad_norm": 1.0, "lr": 1e-3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "lo')
    assert metric_rows(tmp_path) == [row]
    assert loss_curve(tmp_path) == {1: (5.0, 1.0)}
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "lo{"step": 3}\n')
    with pytest.raises(ValueError, match="delimiter"):
        metric_rows(tmp_path)
