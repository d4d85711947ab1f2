"""A rank that torchrun or Slurm started dies with its launcher and has its own log; a rank of ours is unaffected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.processes import alive, until
from distrain.trainer.launch.rank.foreign_launcher import hold_folder
from distrain.trainer.rundir.lock import LOCK_FILE, hold_run_folder, lock_holder
from distrain.trainer.system.child_process import end_child

RANK = """
import os, sys
from pathlib import Path
from distrain.trainer.launch.rank.foreign_launcher import keep_log, open_channel
channel = open_channel(Path(sys.argv[1]))
print("noise")
if "REPLACED" in os.environ:
    early = Path(sys.argv[1], "launch", "3.log")
    early.unlink()
    early.write_text("of another start")
if "JOINS" in os.environ: keep_log(Path(sys.argv[1]))
os.system("echo more of it >&2")
channel.say("step 1"); channel.report_status("50 %"); channel.report_step(1)
channel.report_phase("save"); channel.report_problem("no room")
"""
HOLDER = """
import sys
from pathlib import Path
from distrain.trainer.launch.rank.foreign_launcher import hold_folder
from distrain.trainer.rundir.lock import lock_holder
with hold_folder(Path(sys.argv[1])):
    print("held" if lock_holder(Path(sys.argv[1])) else "free")
"""
FAILING = """
import contextlib, sys
from pathlib import Path
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.launch.rank.foreign_launcher import hold_folder
from distrain.trainer.loop import rank
sys.modules["distrain.trainer.loop.train_rank"] = type("Failing", (), {"train_rank": staticmethod(lambda *_: 3)})
held, channel = contextlib.ExitStack(), Channel(None)
held.enter_context(hold_folder(Path(sys.argv[1])))
rank.run_rank(Path(sys.argv[1]), channel, held.close)
"""
WAITING = """
import atexit, sys, time
from pathlib import Path
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop import rank
from distrain.trainer.loop.metrics.sink_thread import SinkThread
def train_rank(*_):
    SinkThread("slow", lambda: time.sleep(1000), (0.01, 0.01))
    atexit.register(time.sleep, 1000)
    return 0
sys.modules["distrain.trainer.loop.train_rank"] = type("Trains", (), {"train_rank": staticmethod(train_rank)})
sys.exit(rank.run_rank(Path(sys.argv[1]), Channel(None)))
"""
STOPPED = """
import os, signal, sys
from pathlib import Path
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop import rank
def train_rank(path, channel, stop, started):
    if "JOINS" in os.environ: stop.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    return 75 if stop.requested else 0
sys.modules["distrain.trainer.loop.train_rank"] = type("Stopped", (), {"train_rank": staticmethod(train_rank)})
sys.exit(rank.run_rank(Path(sys.argv[1]), Channel(None)))
"""
MESSAGES = ["step 1", "no room"]


def run_rank(folder: Path, program: str = RANK, **environment: str) -> tuple[list[str], list[str]]:
    """Run a rank; return the lines that it prints to the terminal, and those in its log."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("DISTRAIN_", "TORCHELASTIC_", "SLURM_"))}
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    log = folder / "ranks" / "3.log"
    return [*done.stdout.splitlines(), *done.stderr.splitlines()], log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "SLURM_PROCID"])
def test_output_of_a_rank_of_another_launcher_is_in_its_log_and_its_messages_on_the_terminal(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "3.log").write_text("cut off")
    shown, (before, *log) = run_rank(tmp_path, RANK="3", WORLD_SIZE="4", PYTHONUNBUFFERED="1", JOINS="1", **{launcher: "3"})
    assert (shown, before) == (MESSAGES, "cut off")
    assert log[0].startswith("== rank 3 of 4 starts, ")
    assert log[1:] == ["noise", "more of it"]
    assert list((tmp_path / "launch").iterdir()) == []


def test_a_rank_that_has_not_joined_rank_0_leaves_the_logs_of_the_run_folder_as_they_are(tmp_path: Path) -> None:
    """Its rank 0 may be refused, because another run trains there."""
    for _ in range(2):
        shown, log = run_rank(tmp_path, RANK="3", WORLD_SIZE="4", TORCHELASTIC_RUN_ID="1")
        assert (shown, log) == (MESSAGES, [])
        assert (tmp_path / "launch" / "3.log").read_text().count("noise") == 1


def test_a_rank_that_has_joined_takes_no_log_of_a_start_that_is_refused_meanwhile(tmp_path: Path) -> None:
    _, log = run_rank(tmp_path, RANK="3", WORLD_SIZE="4", TORCHELASTIC_RUN_ID="1", PYTHONUNBUFFERED="1", JOINS="1", REPLACED="1")
    assert log == ["more of it"]
    assert (tmp_path / "launch" / "3.log").read_text() == "of another start"


def test_output_and_messages_of_a_rank_started_by_hand_are_on_the_terminal(tmp_path: Path) -> None:
    shown, log = run_rank(tmp_path, RANK="3")
    assert (sorted(shown), log) == (sorted([*MESSAGES, "noise", "more of it"]), [])


def test_a_rank_of_ours_inside_a_slurm_allocation_is_unaffected(tmp_path: Path) -> None:
    shown, log = run_rank(tmp_path, RANK="3", SLURM_PROCID="0", DISTRAIN_PARENT_WATCH_FD="0")
    assert (sorted(shown), log) == (sorted([*MESSAGES, "noise", "more of it"]), [])


def test_a_rank_whose_log_can_not_be_opened_still_runs(tmp_path: Path) -> None:
    (tmp_path / "launch").touch()
    shown, _ = run_rank(tmp_path, RANK="3", TORCHELASTIC_RUN_ID="1")
    assert {*MESSAGES, "noise"} <= {*shown}
    assert any(line.startswith("the output of rank 3 goes to no log: ") for line in shown)


def held_by(folder: Path, **environment: str) -> tuple[str, str]:
    """Return who holds the run folder while a rank trains, by its own account (its process id or nothing), and afterwards."""
    shown, _ = run_rank(folder, HOLDER, **environment)
    return shown[-1], lock_holder(folder)


def test_rank_0_alone_holds_the_run_folder_and_not_where_fit_does(tmp_path: Path) -> None:
    launched = {"TORCHELASTIC_RUN_ID": "1"}
    assert held_by(tmp_path, RANK="0", **launched) == ("held", "")
    assert held_by(tmp_path, RANK="3", **launched) == ("free", "")
    assert held_by(tmp_path, RANK="0", DISTRAIN_PARENT_WATCH_FD="0", **launched) == ("free", "")


@pytest.mark.parametrize("holder", ["fit", "rank"])
def test_ranks_of_another_launcher_do_not_start_in_a_folder_in_which_another_run_trains(tmp_path: Path, holder: str) -> None:
    words = [sys.executable, "-m", "distrain.trainer.loop.rank", str(tmp_path / "run.json")]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"}
    with hold_run_folder(tmp_path) if holder == "fit" else hold_folder(tmp_path, {}):
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (1, "")
    says = rf"process {os.getpid()} on \S+, since .* trains in {tmp_path}: stop it, or set name= to train another run\n"
    assert re.fullmatch(says, done.stdout)
    assert lock_holder(tmp_path) == ""
    assert not (tmp_path / "ranks").exists()  # the log of the run that trains there


def test_a_rank_that_fails_is_not_said_to_be_killed(tmp_path: Path) -> None:
    """It leaves an empty lock, though it does not wait for Python's exit."""
    words = [sys.executable, "-c", FAILING, str(tmp_path)]
    assert subprocess.run(words, env={**os.environ, "RANK": "0"}, timeout=DEADLINE).returncode == 3
    assert (tmp_path / LOCK_FILE).read_text() == ""


@pytest.mark.parametrize(("joins", "code"), [({}, -15), ({"JOINS": "1"}, 75)])
def test_a_rank_of_another_launcher_ends_at_once_before_it_has_joined_the_others(joins: dict[str, str], code: int, tmp_path: Path) -> None:
    """It would wait for a rank 0 that was refused."""
    done = subprocess.run([sys.executable, "-c", STOPPED, str(tmp_path)], env={**os.environ, "RANK": "1", **joins}, timeout=DEADLINE)
    assert done.returncode == code


def test_a_rank_that_has_trained_does_not_wait_for_a_log_sink_at_pythons_exit(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", WAITING, str(tmp_path)], env={**os.environ, "RANK": "0"}, timeout=DEADLINE).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process when its parent dies")
def test_a_rank_of_another_launcher_dies_with_it(tmp_path: Path) -> None:
    rank = RANK + "import time; Path(sys.argv[1], 'pid').write_text(str(os.getpid())); time.sleep(1000)"
    agent = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True).wait()"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
    launcher = subprocess.Popen([sys.executable, "-c", agent, "-c", rank, str(tmp_path)], env=environment)
    try:
        pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    finally:
        end_child(launcher)
    until(lambda: not alive({pid}))
