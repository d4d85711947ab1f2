"""A rank that torchrun or Slurm started dies with them and has its own log; one of ours is left as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distrain.trainer.system.end_child import end_child

DEADLINE = 60.0  # seconds, for what takes one on an idle machine
RANK = """
import os, sys
from pathlib import Path
from distrain.trainer.launch.rank.foreign_launcher import talk_of
talk = talk_of(Path(sys.argv[1]))
print("noise")
os.system("echo more of it >&2")
talk.say("step 1"); talk.status("50 %"); talk.beat(1); talk.phase("save"); talk.problem("no room")
"""
SAID = ["step 1", "no room"]


def ran(folder: Path, **environment: str) -> tuple[list[str], list[str]]:
    """What a rank leaves on the terminal, and what in its log."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("DISTRAIN_", "TORCHELASTIC_", "SLURM_"))}
    words = [sys.executable, "-c", RANK, str(folder)]
    done = subprocess.run(words, env={**clean, **environment}, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    log = folder / "ranks" / "3.log"
    return [*done.stdout.splitlines(), *done.stderr.splitlines()], log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "SLURM_PROCID"])
def test_what_an_adopted_rank_prints_is_in_its_log_and_what_it_says_on_the_terminal(tmp_path: Path, launcher: str) -> None:
    shown, log = ran(tmp_path, RANK="3", WORLD_SIZE="4", PYTHONUNBUFFERED="1", **{launcher: "3"})
    assert shown == SAID
    assert log[0].startswith("== rank 3 of 4 starts, ")
    assert log[1:] == ["noise", "more of it"]


def test_a_rank_that_is_run_by_hand_says_and_prints_on_the_terminal(tmp_path: Path) -> None:
    shown, log = ran(tmp_path, RANK="3")
    assert (sorted(shown), log) == (sorted([*SAID, "noise", "more of it"]), [])


def test_a_rank_of_ours_in_an_allocation_of_slurms_is_left_as_it_is(tmp_path: Path) -> None:
    shown, log = ran(tmp_path, RANK="3", SLURM_PROCID="0", DISTRAIN_LIFELINE_FD="0")
    assert (sorted(shown), log) == (sorted([*SAID, "noise", "more of it"]), [])


def test_a_folder_that_takes_no_log_stops_no_rank(tmp_path: Path) -> None:
    (tmp_path / "ranks").touch()
    shown, _ = ran(tmp_path, RANK="3", TORCHELASTIC_RUN_ID="1")
    assert {*SAID, "noise"} <= {*shown}
    assert any(line.startswith("what rank 3 prints goes to no log: ") for line in shown)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_an_adopted_rank_dies_with_its_launcher(tmp_path: Path) -> None:
    rank = RANK + "import time; Path(sys.argv[1], 'there').write_text(str(os.getpid())); time.sleep(1000)"
    agent = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True).wait()"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
    launcher = subprocess.Popen([sys.executable, "-c", agent, "-c", rank, str(tmp_path)], env=environment)
    try:
        pid = int(until(lambda: (tmp_path / "there").exists() and (tmp_path / "there").read_text()))
    finally:
        end_child(launcher)
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2])


def until(met):
    """What it gives, once it gives anything."""
    end = time.monotonic() + DEADLINE
    while not (got := met()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return got
