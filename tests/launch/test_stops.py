"""The controller is stopped or killed: its ranks save and end, or die with it, and so do the processes that they started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distrain.tests.fakes.deadline import DEADLINE, wait_for
from distrain.tests.fakes.processes import marked_processes

MARK = "LAUNCH_TEST"
LAUNCHER = """
import os, signal, sys
from pathlib import Path
from distrain.trainer.launch.single_host import launch_local_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_IGN if "NOHUP" in os.environ else signal.SIG_DFL)
command = [sys.executable, "-c", sys.argv[2]]
show = lambda line: print(line, flush=True)
outcome = launch_local_ranks(command, ranks=3, folder=Path(sys.argv[1]), environment=os.environ, show=show, grace=1.0)
print(outcome.says)
sys.exit(outcome.status)
"""
BEGIN = """
import os, signal, subprocess, sys, time
from distrain.trainer.system.parent_watch import watch_parent_from_environment
from distrain.trainer.launch.rank.channel import Channel
channel, rank = Channel.from_environment(), int(os.environ["RANK"])
def ready():
    open(os.path.join(os.environ["LAUNCH_TEST"], f"ready{rank}"), "w").write(f"{os.getpid()} {os.getppid()}\\n")
    while True: time.sleep(0.1)
"""
SAVES = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))\nchannel.report_step(0)\nready()\n"
SAVES_LATER = SAVES.replace("ready()", "channel.report_step(1)\nready()")
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\n"
CHILDREN = "for own in (0, 1): subprocess.Popen(['sleep', '1000'], start_new_session=bool(own))\n"


class LaunchedRanks:
    """A process that launches three ranks, which are ready once it is constructed."""

    def __init__(self, folder: Path, program: str, **variables: str) -> None:
        self.folder = folder
        environment = {**os.environ, MARK: str(folder), **variables}
        command = [sys.executable, "-c", LAUNCHER, str(folder), BEGIN + program]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_for(lambda: all(len(self.pids(rank)) == 2 for rank in range(3)))

    def pids(self, rank: int) -> list[int]:
        """Return the process ids of a rank and its agent; empty until the rank is ready."""
        path = self.folder / f"ready{rank}"
        text = path.read_text() if path.exists() else ""
        return [int(word) for word in text.split()] if text.endswith("\n") else []

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> tuple[int, list[str]]:
        """Wait for its end; return its exit status and the lines that it printed."""
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output.splitlines()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Check that no process that a test started outlives it."""
    yield
    wait_for(lambda: not marked_processes(MARK, tmp_path))


def test_a_signal_in_a_later_step_lets_the_ranks_finish_it(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, SAVES_LATER)
    launched.send(signal.SIGINT)
    assert launched.first_line() == "SIGINT: finishing the step and saving; Ctrl-C stops at once\n"
    assert launched.end()[0] == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_ranks_save_and_the_run_exits_75(tmp_path: Path, number: int) -> None:
    launched = LaunchedRanks(tmp_path, SAVES)
    launched.send(number)
    name = signal.Signals(number).name
    assert launched.end() == (
        75,
        [
            f"{name}: finishing the first step and saving; Ctrl-C stops at once, and loses that step alone",
            "stopped; a checkpoint is saved: the same command continues",
        ],
    )


def test_ranks_that_stop_before_a_step_have_saved_no_checkpoint(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nready()\n")
    launched.send(signal.SIGTERM)
    assert launched.end()[1][-1] == "stopped before the first step; the same command continues"


def test_a_second_sigterm_does_not_interrupt_the_save(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, SAVES)
    launched.send(signal.SIGTERM)
    time.sleep(0.3)
    launched.send(signal.SIGTERM)
    assert launched.end()[0] == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_without_saving_exits_with_128_and_the_signal(tmp_path: Path, number: int) -> None:
    launched = LaunchedRanks(tmp_path, "ready()\n")
    launched.send(number)
    assert launched.end() == (
        128 + number,
        [
            f"{signal.Signals(number).name}: stopping before the first step; Ctrl-C stops at once",
            f"stopped by {signal.Signals(number).name} before all ranks had saved",
        ],
    )


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, CHILDREN + IGNORES)
    launched.send(signal.SIGINT)
    launched.first_line()
    time.sleep(0.3)
    launched.send(signal.SIGINT)
    assert launched.end() == (130, ["stopped at once by SIGINT"])


def test_a_rank_that_fails_to_save_fails_the_run(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: [][0] if rank == 1 else sys.exit(75))\nready()\n")
    launched.send(signal.SIGTERM)
    status, lines = launched.end()
    assert status == 1
    assert lines[-1].startswith("rank 1 exited with 1: IndexError: list index out of range; its log")


@pytest.mark.parametrize("which", [0, 1], ids=["ranks", "agents"])
def test_sigterm_to_the_ranks_or_their_agents_stops_the_run_too(tmp_path: Path, which: int) -> None:
    launched = LaunchedRanks(tmp_path, SAVES)
    for rank in range(3):
        os.kill(launched.pids(rank)[which], signal.SIGTERM)
    assert launched.end() == (75, ["stopped; a checkpoint is saved: the same command continues"])


def test_a_signal_that_the_launching_process_ignores_stays_ignored(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, SAVES, NOHUP="1")
    launched.send(signal.SIGHUP)
    time.sleep(0.5)
    launched.send(signal.SIGTERM)
    assert launched.end()[1][0].startswith("SIGTERM")


@pytest.mark.parametrize("program", [CHILDREN + "ready()\n", CHILDREN + IGNORES, CHILDREN + "watch_parent_from_environment()\n" + IGNORES])
def test_nothing_outlives_a_launching_process_that_is_killed(tmp_path: Path, program: str) -> None:
    """The fixture looks for the ranks and the processes that they started, including those in sessions of their own."""
    launched = LaunchedRanks(tmp_path, program)
    wait_for(lambda: len(marked_processes(MARK, tmp_path)) == 1 + 3 * 4)  # the controller; agent, rank and two children
    launched.send(signal.SIGKILL)
    assert launched.end()[0] == -signal.SIGKILL


def test_stopped_ranks_die_with_the_launching_process(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, CHILDREN + "ready()\n")
    for rank in range(3):
        os.kill(launched.pids(rank)[0], signal.SIGSTOP)
    launched.send(signal.SIGKILL)
    launched.end()


def test_ranks_watch_their_parent_where_their_agents_can_not(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, "subprocess.Popen(['sleep', '1000'])\nwatch_parent_from_environment()\nready()\n")
    agents = [launched.pids(rank)[1] for rank in range(3)]
    for agent in agents:
        os.kill(agent, signal.SIGSTOP)
    try:
        launched.send(signal.SIGKILL)
        launched.end()
        wait_for(lambda: not [line for line in marked_processes(MARK, tmp_path).values() if line and "pipe_agent.py" not in line])
    finally:
        for agent in agents:
            os.kill(agent, signal.SIGCONT)


def test_nothing_is_left_when_agents_and_launching_process_die_together(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, "ready()\n")
    for rank in range(3):
        os.kill(launched.pids(rank)[1], signal.SIGKILL)
    launched.send(signal.SIGKILL)
    launched.end()


def test_a_launching_process_that_raises_leaves_nothing(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, CHILDREN + "channel.say('x')\n" + IGNORES)
    assert launched.process.stdout is not None
    launched.process.stdout.close()
    launched.send(signal.SIGTERM)  # the line about it can't be printed
    assert launched.process.wait(DEADLINE) == 1


def test_the_last_step_of_a_failed_rank_is_named(tmp_path: Path) -> None:
    launched = LaunchedRanks(tmp_path, "channel.report_step(41); channel.report_step(42)\nready()\n")
    os.kill(launched.pids(2)[0], signal.SIGKILL)
    assert "rank 2 was killed by SIGKILL, perhaps by the kernel for want of memory, at step 42;" in json.dumps(launched.end())
