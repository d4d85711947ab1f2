"""The starts of a run by small ranks without torch: which fault is followed by another start, on what, and what stops that."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.attempts import Attempts, attempt_run, write_checkpoint
from distrain.trainer.launch import restart, watchdog_times
from distrain.trainer.launch.goodput import GoodputMeter
from distrain.trainer.launch.next_attempt import HostFaults
from distrain.trainer.launch.rank.log import RemoteLog
from distrain.trainer.launch.restart import is_machine_failure, no_restart_reason, pause_seconds
from distrain.trainer.launch.supervisor.outcome import Fate, Outcome, RankOutcome
from distrain.trainer.launch.supervisor.watchdog import Watchdog
from distrain.trainer.launch.train_run import train_run, write_end
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.files import read_launch_files, run_folder, write_launch_files, write_outcome
from distrain.trainer.rundir.lock import RunFolderInUse, hold_run_folder
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.system.child_process import end_child
from distrain.trainer.system.stop_requests import collect_stop_requests

HERE = socket.gethostname()
FAILS_ONCE = """
import os, signal, sys, time
from pathlib import Path
from distrain.trainer.launch.rank.channel import Channel
talk, rank, folder = Channel.from_environment(), int(os.environ["RANK"]), Path(sys.argv[1])
def fails():
    while not (folder / "again0").exists(): time.sleep(0.01)
    if rank == 1: {0}
    time.sleep(1000)
talk.report_step(6); talk.report_step(7)
first = not (folder / f"again{{rank}}").exists()
(folder / f"again{{rank}}").touch()
if first: fails()
talk.report_done()
"""
ECC = 'raise RuntimeError("CUDA error: uncorrectable ECC error encountered")'


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path / "run")


@pytest.mark.parametrize("fault", [ECC, "os.kill(os.getpid(), signal.SIGKILL)", "raise OSError(5, os.strerror(5))"])
def test_a_run_is_restarted_after_a_machine_fault(attempts: Attempts, fault: str) -> None:
    ended = attempts.run(FAILS_ONCE.format(fault))
    assert (ended.status, ended.has_stepped) == (0, True)
    assert "restart 1 of 1, from the newest checkpoint" in attempts.summary


@pytest.mark.parametrize("fault", ["raise ValueError('no such token')", "raise RuntimeError('CUDA out of memory')", "sys.exit(3)"])
def test_a_run_is_not_restarted_after_an_error_of_the_program(attempts: Attempts, fault: str) -> None:
    assert attempts.run(FAILS_ONCE.format(fault)).status == 1
    assert "restart 1" not in attempts.summary


FAILS_EACH_TIME = FAILS_ONCE.replace("if first: fails()", "fails()")
NO_STEP = FAILS_ONCE.replace("talk.report_step(6); talk.report_step(7)\n", "")
ALIKE = "and most likely would again: fix the error above, and the same command goes on from step 5"
NO_SUCH = FAILS_ONCE.format("raise ValueError('no such token')")
WOULD = "launch.restarts=0; launch.restarts=3 would have restarted it from step 5, where the same command goes on"
# fmt: off
REFUSED = (
    (FAILS_ONCE.format(ECC),      0, WOULD),
    (FAILS_EACH_TIME.format(ECC), 1, "launch.restarts=1 is used up; the same command goes on from step 5"),
    (NO_SUCH,                     1, f"the program failed, not the machine, {ALIKE}"),
    (NO_STEP.format(ECC),         1, f"no attempt reached its first step, {ALIKE}"),
    (NO_SUCH,                     0, None),  # no restart was configured, and none would help
)
# fmt: on


@pytest.mark.parametrize(("program", "restarts", "why"), REFUSED)
def test_a_run_that_is_not_restarted_says_why_and_what_to_do(attempts: Attempts, program: str, restarts: int, why: str | None) -> None:
    write_checkpoint(attempts.folder, 5)
    assert attempts.run(program, restarts).status == 1
    assert [line for line in attempts.lines if line.startswith("no restart: ")] == ([f"no restart: {why}"] if why else [])
    assert attempts.summary.count("\nrestart ") == (restarts if "used up" in (why or "") else 0)


def test_a_run_without_a_checkpoint_would_restart_from_the_beginning(attempts: Attempts) -> None:
    attempts.run(FAILS_ONCE.format(ECC), restarts=0)
    assert "launch.restarts=3 would have restarted it from the beginning, where" in attempts.summary


@pytest.mark.parametrize(
    "ended",
    [Outcome(status=0, ranks=()), Outcome(status=75, ranks=(), stop_requested=True), Outcome(status=1, ranks=(), stop_requested=True)],
)
@pytest.mark.parametrize("most", [0, 3])
def test_a_run_that_trained_or_was_stopped_says_nothing_of_restarts(ended: Outcome, most: int) -> None:
    run = attempt_run("cluster=1x2", f"launch.restarts={most}")
    assert no_restart_reason(run, ended, restarts=most, has_stepped=True, saved_step=5) == ""


@pytest.mark.parametrize(
    ("saved", "status", "left"),
    [
        ((4, 5), 75, "the newest whole checkpoint is of step 5: the same command goes on from there"),
        ((), 143, "there is no checkpoint: the same command starts from the beginning"),
    ],
)
def test_sigterm_between_two_attempts_stops_the_run(attempts: Attempts, saved: Sequence[int], status: int, left: str) -> None:
    for step in saved:
        write_checkpoint(attempts.folder, step)
    attempts.signals["\nrestart "] = signal.SIGTERM

    def outside(number: int, frame: object) -> None:
        raise AssertionError("the signal was not collected")

    before = signal.signal(signal.SIGTERM, outside)
    try:
        ended = attempts.run(FAILS_ONCE.format(ECC))
        assert signal.getsignal(signal.SIGTERM) is outside
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ended.status, ended.stop_requested) == (status, True)
    assert ended.says.startswith("rank 1 exited with 1, at step 7: RuntimeError: CUDA error: uncorrectable ECC")
    assert ended.says.endswith(f"; SIGTERM came before the restart; {left}")
    assert len((attempts.folder / "ranks" / "0.log").read_text().split("== rank 0")) == 2, "one attempt"


STOPS = """
import sys
from distrain.trainer.launch.rank.channel import STOPPED, Channel
Channel.from_environment().report_step(6)
sys.exit(STOPPED)
"""


@pytest.mark.parametrize(
    ("resume", "onward"), [("auto", "the same command continues"), ("never", "checkpoint.resume=auto goes on from it")]
)
def test_a_stopped_run_says_how_it_goes_on(attempts: Attempts, resume: str, onward: str) -> None:
    write_checkpoint(attempts.folder, 6)
    assert attempts.run(STOPS, 1, f"checkpoint.resume={resume}").says == f"stopped; a checkpoint is saved: {onward}"


STEPS_ONCE = """
import os, sys, time
from pathlib import Path
from distrain.trainer.launch.rank.channel import Channel
talk, before = Channel.from_environment(), Path(sys.argv[1], f"before{os.environ['RANK']}")
if not before.exists(): talk.report_step(6)
before.touch()
while len(list(Path(sys.argv[1]).glob("before*"))) < 2: time.sleep(0.02)
raise OSError(5, os.strerror(5))
"""


def test_attempts_that_begin_no_step_do_not_use_up_all_restarts_at_once(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop request ends the pause between two of them."""

    def sleep(seconds: float) -> None:
        raise AssertionError("it waits, and a stop was requested")

    monkeypatch.setattr(restart, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    write_checkpoint(attempts.folder, 5)
    attempts.signals["in a row"] = signal.SIGTERM
    with collect_stop_requests():  # so that the signal does not end this process
        ended = attempts.run(STEPS_ONCE, 9)
    pauses = [at for at, line in enumerate(attempts.lines) if "in a row" in line]
    assert [attempts.lines[at] for at in pauses] == ["2 attempts in a row have begun no step: the next one follows in 30 s"]
    why = attempts.lines[pauses[0] - 1]
    assert why.startswith("rank ")
    assert "restart" not in why
    assert (ended.status, attempts.summary.count("\nrestart ")) == (75, 3)
    assert [pause_seconds(count) for count in (0, 1, 2, 3, 4, 9)] == [0, 0, 30, 60, 120, 600]


IGNORES = """
import signal, time
from distrain.trainer.launch.rank.channel import Channel
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Channel.from_environment().say("trains")
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("saved", "words", "left"),
    [
        ((4, 5), (), "the newest whole checkpoint is of step 5: the same command goes on from there"),
        ((4, 5), ("checkpoint.resume=never",), "the newest whole checkpoint is of step 5: checkpoint.resume=auto goes on from there"),
        ((), (), "there is no checkpoint: the same command starts from the beginning"),
    ],
)
def test_a_second_ctrl_c_names_the_newest_whole_checkpoint(
    attempts: Attempts, saved: Sequence[int], words: Sequence[str], left: str
) -> None:
    for step in saved:
        write_checkpoint(attempts.folder, step)
    (attempts.folder / "checkpoints" / "step_6").mkdir(parents=True)  # not whole
    attempts.signals |= {"trains": signal.SIGINT, "Ctrl-C stops at once": signal.SIGINT}
    ended = attempts.run(IGNORES, 0, *words)
    assert (ended.status, ended.says) == (130, f"stopped at once by SIGINT; {left}")


def test_a_disk_that_is_full_at_a_restart_does_not_hide_the_fault(attempts: Attempts) -> None:
    full = f"(folder / 'run.json').mkdir(); {ECC}"  # a folder in place of the file
    ended = attempts.run(FAILS_ONCE.format(full))
    assert (ended.status, ended.says.partition(",")[0]) == (1, "rank 1 exited with 1")
    assert "no restart: [Errno 21]" in attempts.summary
    assert not list(attempts.folder.glob(".*")), "no temporary file is left"


def test_launch_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    run = attempt_run("cluster=1x2")
    write_launch_files(run, make_plan(run), tmp_path)
    before, large = read_launch_files(tmp_path), make_plan(load_recipe("megatron_1t_6x8x64"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * len(before["run.json"]), limits[1]))  # as a disk with room for the first alone
        with pytest.raises(OSError, match="File too large"):
            write_launch_files(with_changes(run, [("train.seed", 7)]), large, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_launch_files(tmp_path) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plan.json", "run.json"]


# fmt: off
ENDS = (  # exit status, whether it has stepped; the steps of the run.json that is left, the exit status in ended.json
    (0,   False, 3, 0),   # nothing was left to train
    (75,  False, 3, 75),  # stopped in a validation that it makes up, or before its first step
    (143, False, 3, 75),
    (75,  True,  7, 75),  # the last of several attempts may have taken no step
    (0,   True,  7, 0),
    (1,   False, 7, 1),   # whose error the user looks for there
)
# fmt: on


@pytest.mark.parametrize(("status", "has_stepped", "kept", "ended"), ENDS)
def test_run_json_stays_that_of_the_run_that_trained(status: int, has_stepped: bool, kept: int, ended: int, tmp_path: Path) -> None:
    trained = attempt_run("cluster=1x2", "train.steps=3")
    write_launch_files(trained, make_plan(trained), tmp_path)
    write_outcome(tmp_path, 75, "stopped")
    write_checkpoint(tmp_path, 3)
    before, longer = read_launch_files(tmp_path), attempt_run("cluster=1x2", "train.steps=7")
    write_launch_files(longer, make_plan(longer), tmp_path)
    write_end(Outcome(status=status, ranks=(), has_stepped=has_stepped), before, tmp_path)
    now = read_launch_files(tmp_path)
    assert (json.loads(now["run.json"])["train"]["steps"], json.loads(now["plan.json"])["run"]["steps"]) == (kept, kept)
    assert json.loads(now["ended.json"])["status"] == ended


def test_a_run_goes_on_where_goodput_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    assert GoodputMeter(folder=tmp_path).write_summary().startswith("goodput 0")
    assert GoodputMeter(folder=tmp_path / "gone").write_summary().startswith("goodput 0")


def test_a_run_folder_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("/proc/none", str(tmp_path / "file" / "runs")):
        run = with_changes(attempt_run("cluster=1x2"), [("log.dir", folder)])
        result = train_run(run, make_plan(run), (), print, print)
        assert (result.status, "\n" in result.says) == (1, False)
        assert result.says.startswith(f"{run_folder(run)} can't be written (")


def test_a_second_fit_in_a_folder_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    run = with_changes(attempt_run("cluster=1x2"), [("log.dir", str(tmp_path))])
    folder = run_folder(run)
    folder.mkdir()
    with hold_run_folder(folder) as warning:
        assert warning == ""
        result = train_run(run, make_plan(run), (), print, print)
        assert os.listdir(folder) == ["lock"]
    assert (result.status, result.says.partition(", since ")[0]) == (1, f"process {os.getpid()} on {HERE}")
    assert result.says.endswith(f" trains in {folder}: stop it, or set name= to train another run")
    assert (folder / "lock").read_text() == ""
    with hold_run_folder(folder) as warning:
        assert warning == ""


HOLDER = """
import subprocess, sys, time
from pathlib import Path
from distrain.trainer.rundir.lock import hold_run_folder
with hold_run_folder(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    print(child.pid, flush=True)
    time.sleep(1000)
"""


def test_the_lock_is_released_when_its_holder_is_killed_even_if_its_children_live(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(RunFolderInUse, match=f"^process {holder.pid} on {HERE}, since "), hold_run_folder(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with hold_run_folder(tmp_path) as warning:
            assert warning == "", "a lock of this host is released with its processes"
    finally:
        end_child(holder)
        os.kill(child, signal.SIGKILL)


def test_a_lock_left_by_another_host_names_its_holder(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 7 on node12, since 2026-01-01 00:00:00 +0000\n")
    with hold_run_folder(tmp_path) as warning:
        assert warning.startswith(f"{tmp_path / 'lock'} was left by process 7 on node12, since ")


# fmt: off
LIKE: tuple[tuple[str, object, bool], ...] = (  # a change, and whether phases take as long as before
    ("train.steps",       90,      True),
    ("launch.patience",   7.0,     True),
    ("log.every",         3,       True),
    ("checkpoint.resume", "never", True),
    ("train.batch",       480,     False),
    ("train.compile",     True,    False),
    ("cluster.gpus",      4,       False),
    ("model.layers",      1,       False),
)
# fmt: on


@pytest.mark.parametrize(("key", "value", "alike"), LIKE)
def test_phase_times_are_used_by_runs_of_the_same_fingerprint(tmp_path: Path, key: str, value: object, alike: bool) -> None:
    one = attempt_run("cluster=1x2")
    other = with_changes(one, [(key, value)])
    taught = Watchdog(patience=1.0, seen={"start": 9.0, "first": 2.0}, timed_out={"step": (7, 30.0)})
    watchdog_times.save_phase_times(one, tmp_path, taught, resumed=True)
    found = watchdog_times.load_watchdog(other, tmp_path)
    assert found.patience == other.launch.patience
    assert (found.seen, found.timed_out) == ((taught.seen, taught.timed_out) if alike else ({}, {}))


def test_the_time_of_a_start_without_a_checkpoint_is_not_kept(tmp_path: Path) -> None:
    run = attempt_run("cluster=1x2")
    watchdog_times.save_phase_times(run, tmp_path, Watchdog(seen={"start": 9.0, "first": 2.0}), resumed=False)
    assert watchdog_times.load_watchdog(run, tmp_path).seen == {"first": 2.0}
    for spoilt in ("", "{}", '{"first": 2.0}'):
        (tmp_path / watchdog_times.INTERVALS_FILE).write_text(spoilt)
        assert watchdog_times.load_watchdog(run, tmp_path).seen == {}


def failed_outcome(rank: int, where: str, fate: Fate = "hung", **more: str) -> Outcome:
    """The outcome of a run that failed by this rank."""
    ends = [RankOutcome(rank=rank, where=where, code=-9, log=RemoteLog(Path("x")), fate=fate, **more)]  # type: ignore[arg-type]
    return Outcome(status=1, ranks=tuple(ends), rank=rank)


def test_hosts_that_could_not_be_used_are_a_machine_fault() -> None:
    assert is_machine_failure(Outcome(status=1, ranks=(), hosts=("b",)))
    assert not is_machine_failure(Outcome(status=1, ranks=()))
    assert not is_machine_failure(Outcome(status=1, ranks=(), hosts=("b",), stop_requested=True))


# fmt: off
AVOIDED: tuple[tuple[list[Outcome], dict[str, str]], ...] = (
    ([failed_outcome(1, "b (device 0)")],                                         {}),
    ([failed_outcome(1, "b (device 0)"), failed_outcome(2, "b (device 1)")],      {"b": "at fault 2 times"}),
    ([failed_outcome(1, "b (device 0)"), failed_outcome(2, "c (device 1)")],      {}),
    ([failed_outcome(1, "b (device 0)", problem="Connection reset by peer")] * 2, {}),
    ([failed_outcome(1, "b (device 0)", "stuck")],                                {"b": "at fault 2 times"}),
    ([failed_outcome(1, "b (device 0)", "ended", fault="device")],                {"b": "its device computes wrong"}),
    ([failed_outcome(1, "b (device 0)", "ended", fault="machine")] * 2,           {}),
    ([failed_outcome(1, "b (device 0)", "hung with others")] * 2,                    {}),
    ([failed_outcome(1, "(device 0)")] * 2,                                       {}),
    ([Outcome(status=1, ranks=(), hosts=("c",))],                                 {"c": "it could not be used"}),
)
# fmt: on


@pytest.mark.parametrize(("ends", "avoided"), AVOIDED)
def test_a_host_at_fault_twice_is_avoided(ends: list[Outcome], avoided: dict[str, str]) -> None:
    faults = HostFaults()
    for ended in ends:
        faults.count(ended)
    assert faults.hosts_to_avoid(ends[-1]) == avoided
