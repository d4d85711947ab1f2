"""After a fault of a device: the run restarts, its host is avoided, and checkpoints saved since the last good check are set aside."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from distrain.tests.fakes.attempts import Attempts, write_checkpoint
from distrain.trainer.launch.rank.channel import Fault
from distrain.trainer.launch.rank.log import RemoteLog
from distrain.trainer.launch.supervisor.outcome import Outcome, RankOutcome
from distrain.trainer.launch.suspect_checkpoints import SuspectCheckpoints

# Rank 1 of the first attempt says that its device computes wrong, as all ranks end; `{}` is what it does before.
WRONG_ONCE = """
import os, sys, time
from pathlib import Path
from distrain.trainer.launch.rank.channel import Channel
talk, rank, folder = Channel.from_environment(), int(os.environ["RANK"]), Path(sys.argv[1])
first = not (folder / f"again{{rank}}").exists()
(folder / f"again{{rank}}").touch()
if first:
    {}
    if rank == 1:
        while not (folder / "again0").exists(): time.sleep(0.01)
        talk.report_problem("rank 1 (here, cpu) computes wrong", fault="device")
        (folder / "said").touch()
    while not (folder / "said").exists(): time.sleep(0.01)
    sys.exit(1)
talk.report_step(4); talk.report_done()
"""
STEPS = "talk.report_phase('check'); talk.report_checked(4); talk.report_step(4); talk.report_step(9)"


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path / "run")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def test_a_wrong_device_is_the_root_cause_and_the_run_restarts_from_the_last_good_check(attempts: Attempts) -> None:
    for step in (2, 4, 6, 8):
        write_checkpoint(attempts.folder, step)
    assert attempts.run(WRONG_ONCE.format(STEPS)).status == 0
    assert "rank 1 exited with 1, at step 9: rank 1 (here, cpu) computes wrong" in attempts.summary
    assert "restart 1 of 1, from the newest checkpoint" in attempts.summary
    assert (
        "set aside as suspect_step_N the checkpoints of step 6, 8: saved since the last good check of the devices, after step 4, and may"
        in (attempts.summary)
    )
    assert names(attempts.folder) == ["step_2", "step_4", "suspect_step_6", "suspect_step_8"]


def test_a_device_that_is_wrong_before_the_first_step_is_followed_by_another_attempt(attempts: Attempts) -> None:
    write_checkpoint(attempts.folder, 6)
    assert attempts.run(WRONG_ONCE.format("pass")).status == 0
    assert "\nrestart 1 of 1" in attempts.summary
    assert names(attempts.folder) == ["step_6"], "nothing tells since when it is wrong"


def test_without_restarts_suspect_checkpoints_are_set_aside_too(attempts: Attempts) -> None:
    for step in (4, 6):
        write_checkpoint(attempts.folder, step)
    assert attempts.run(WRONG_ONCE.format(STEPS), restarts=0).status == 1
    assert "no restart: launch.restarts=0; launch.restarts=3 would have restarted it from step 4" in attempts.summary
    assert names(attempts.folder) == ["step_4", "suspect_step_6"]


def failed(fault: Fault, checked: int | None) -> Outcome:
    rank = RankOutcome(rank=0, code=1, log=RemoteLog(Path("x")), problem="it computes wrong", fault=fault, checked=checked)
    return Outcome(status=1, ranks=(rank,), rank=0)


def suspects_of(folder: Path, *steps: int) -> SuspectCheckpoints:
    for step in steps:
        write_checkpoint(folder, step)
    return SuspectCheckpoints(folder=folder / "checkpoints")


def test_no_checkpoint_is_set_aside_after_another_fault(tmp_path: Path) -> None:
    suspects = suspects_of(tmp_path, 4, 6)
    assert suspects.set_aside(failed("", 4)) == ""
    assert suspects.set_aside(replace(failed("device", 4), rank=None)) == ""
    assert names(tmp_path) == ["step_4", "step_6"]


def test_a_check_of_the_attempt_before_counts_where_the_last_one_found_the_fault_at_once(tmp_path: Path) -> None:
    suspects = suspects_of(tmp_path, 4, 6)
    assert suspects.set_aside(failed("", 4)) == ""
    assert suspects.set_aside(failed("machine", None)).startswith("set aside as suspect_step_N the checkpoints of step 6: ")
    assert names(tmp_path) == ["step_4", "suspect_step_6"]


def test_suspect_checkpoints_stay_where_there_is_no_older_one_that_is_whole(tmp_path: Path) -> None:
    suspects = suspects_of(tmp_path, 4, 6)
    (tmp_path / "checkpoints" / "step_4" / "weight").write_bytes(b"x")
    assert suspects.set_aside(failed("device", 4)).endswith("; there is no older one to resume from")
    assert names(tmp_path) == ["step_4", "step_6"]


def test_a_checkpoint_is_set_aside_beside_one_of_the_same_step(tmp_path: Path) -> None:
    suspects = suspects_of(tmp_path, 4, 6)
    suspects.set_aside(failed("device", 4))
    write_checkpoint(tmp_path, 6)
    suspects.set_aside(failed("device", 4))
    assert names(tmp_path) == ["step_4", "suspect_step_6", "suspect_step_6.1"]


def test_checkpoints_that_can_not_be_renamed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suspects = suspects_of(tmp_path, 4, 6)
    monkeypatch.setattr("distrain.trainer.rundir.checkpoints.ASIDE", "no/such/folder/")
    assert suspects.set_aside(failed("device", 4)).endswith("and can't be renamed: No such file or directory")


def test_a_check_at_the_start_on_other_hosts_says_nothing_of_the_hosts_before(tmp_path: Path) -> None:
    """The one of step 4 was on a host that is lost; the attempt after it began at step 6 elsewhere, and its device fails later."""
    suspects = suspects_of(tmp_path, 4, 6)
    assert suspects.set_aside(failed("", 4)) == ""
    started = replace(failed("", 6).ranks[0], first_step=6)
    assert suspects.set_aside(Outcome(status=1, ranks=(started,), rank=0), same_hosts=False) == ""
    assert suspects.checked == 4
    suspects.set_aside(failed("device", None))
    assert names(tmp_path) == ["step_4", "suspect_step_6"]
    suspects.set_aside(Outcome(status=1, ranks=(replace(started, checked=8),), rank=0), same_hosts=False)
    assert suspects.checked == 8, "a check after its first step checks the devices that stepped"


def test_where_all_checkpoints_are_suspect_the_run_is_not_restarted(attempts: Attempts) -> None:
    write_checkpoint(attempts.folder, 6)
    assert attempts.run(WRONG_ONCE.format("talk.report_checked(4)")).status == 1
    assert "all checkpoints (of step 6) were saved since the last good check" in attempts.summary
    assert "no restart: the checkpoints may hold wrong weights" in attempts.summary
