"""Runs over two hosts through DeepSpeed's launcher: the curve is one process's, and whatever dies or is cut off, all is over soon.

The hosts are namespaces of this machine (vhosts.py says how to make some by hand). Where a fault is looked at and not a curve,
ranks are small programs without torch: they come and go in the time that DeepSpeed's launcher takes to start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from distrain.tests.one_process import reference
from distrain.tests.vhosts import Host, Hosts, missing

DEADLINE = 120.0  # seconds, for what takes ten on an idle machine
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

# A head that runs on host0: folder, hostfile, program of a rank, patience, runner.
HEAD = """
import os, sys
from pathlib import Path
from distrain.trainer.launch.hostfile import read_hosts
from distrain.trainer.launch.hosts import Start, launch_hosts
from distrain.trainer.launch.watchdog import Watchdog
from distrain.trainer.launch.words import Start as Starting, deepspeed
folder, hosts = Path(sys.argv[1]), read_hosts(sys.argv[2])
told = Starting(module="distrain.trainer.launch.guest", arguments=(str(folder / "run.json"),), python=sys.executable, folder=folder,
                address=hosts[0].name, port=29400)
made = deepspeed(told, hosts, os.environ, (), sys.argv[5])
start = Start(hosts=hosts, folder=folder, launcher=made.commands[0], files=made.files,
              texts={"run.json": "{}"}, command=[sys.executable, "-c", sys.argv[3]], environment=os.environ, handed={"NCCL_TOLD": "a b"})
ended = launch_hosts(start, show=lambda line: print(line, flush=True), grace=2.0,
                     watchdog=Watchdog(patience=float(sys.argv[4])))
print(ended.says)
sys.exit(ended.status)
"""
BEGIN = """
import os, signal, subprocess, sys, time
from distrain.trainer.launch.lifeline import hold_from_environment
from distrain.trainer.launch.talk import Talk
talk, rank = Talk.from_environment(), int(os.environ["RANK"])
hold_from_environment()
import faulthandler; faulthandler.register(signal.SIGUSR2)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
def ready(folder=os.getcwd()):
    talk.beat(6); talk.beat(7)
    open(os.path.join(folder, f"ready{rank}"), "w").write(f"{os.getpid()} {os.getppid()}\\n")
    while True: time.sleep(0.1)
"""
SAVES = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(75)))\nready()\n"
STOPPED = "stopped; a checkpoint is saved"
MPI = pytest.param("openmpi", marks=pytest.mark.skipif(which("mpirun") is None, reason="no mpirun here: apt-get install openmpi-bin"))
over = pytest.mark.parametrize("runner", ["pdsh", MPI])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts, with two slots each."""
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        made.hostfile(2)
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(hosts: Hosts) -> Iterator[None]:
    """No process that a test started outlives it on any host."""
    yield
    wait_for(lambda: not any(host.processes() for host in hosts.hosts))


def wait_for(met: Callable[[], object], why: Callable[[], str] = lambda: "the deadline passed") -> None:
    until = time.monotonic() + DEADLINE
    while not met():
        assert time.monotonic() < until, why()
        time.sleep(0.05)


def quiet() -> dict[str, str]:
    """The environment of a head: this one's, without GPUs."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SECRET_CANARY": "a canary; $(never) seen"}


class Launched:
    """A head on host0 with four ranks on two hosts, which are ready when this returns."""

    def __init__(self, hosts: Hosts, folder: Path, program: str, patience: float = 100.0, runner: str = "pdsh") -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "launch").mkdir()
        rank = f"{BEGIN}os.chdir({str(folder)!r})\n{program}".replace("folder=os.getcwd()", f"folder={str(folder)!r}")
        words = [sys.executable, "-c", HEAD, str(folder), str(hosts.folder / "hostfile"), rank, str(patience), runner]
        self.head = hosts.hosts[0].start(words, quiet())  # by way of nsenter
        wait_for(lambda: all(self.pids(rank) for rank in range(4)) or self.head.poll() is not None)
        assert self.head.poll() is None, self.head.communicate()[0]

    def host(self, rank: int) -> Host:
        return self.hosts.hosts[rank // 2]

    def pids(self, rank: int) -> list[int]:
        """A rank's process and its keeper's, as its host counts them."""
        path = self.folder / f"ready{rank}"
        text = path.read_text() if path.exists() else ""
        return [int(word) for word in text.split()] if text.endswith("\n") else []

    def send(self, number: int, rank: int, *, keeper: bool = False) -> None:
        """A signal to a rank, or to its keeper."""
        self.host(rank).run("kill", f"-{int(number)}", str(self.pids(rank)[keeper]))

    def send_to(self, host: int, part: str, number: int) -> None:
        """A signal to the processes of a host whose command lines have this in them."""
        found = [pid for pid, words in self.hosts.hosts[host].processes().items() if part in words and "keeper.py" not in words]
        assert found
        for pid in found:
            os.kill(pid, number)

    def signal(self, number: int) -> None:
        """A signal to the head."""
        self.send_to(0, "launch_hosts(start", number)

    def log(self, name: str) -> str:
        return (self.folder / "ranks" / f"{name}.log").read_text()

    def end(self) -> tuple[int, list[str]]:
        """The head's exit status and what it printed."""
        said, _ = self.head.communicate(timeout=DEADLINE)
        return self.head.returncode, said.splitlines()


@over
def test_a_rank_that_is_killed_on_the_far_host_is_named(hosts: Hosts, tmp_path: Path, runner: str) -> None:
    launched = Launched(hosts, tmp_path, SAVES, runner=runner)
    launched.send(signal.SIGKILL, 3)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line == (
        "rank 3 on host1 (device 1) was killed by SIGKILL, perhaps by the kernel for want of memory, at step 7; "
        f"its log is host1:{tmp_path}/ranks/3.log"
    )


def test_the_exception_of_a_far_rank_is_fetched_and_no_secret_crosses(hosts: Hosts, tmp_path: Path) -> None:
    program = "if rank == 2: signal.signal(signal.SIGTERM, lambda *_: [][0])\n"
    program += "print(os.environ['NCCL_TOLD'], 'SECRET_CANARY' in os.environ, os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])\n"
    launched = Launched(hosts, tmp_path, program + SAVES.replace("signal.signal", "rank == 2 or signal.signal"))
    assert [launched.log(str(rank)).splitlines()[1] for rank in range(4)] == [f"a b False {rank % 2} 2" for rank in range(4)]
    assert (tmp_path / "launch" / "ticket").stat().st_mode & 0o777 == 0o600
    launched.send(signal.SIGTERM, 2)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line.startswith("rank 2 on host1 (device 0) exited with 1, at step 7: IndexError: list index out of range; its log is host1:")
    assert not (tmp_path / "launch" / "ticket").exists()
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"canary" not in written


@over
def test_nothing_outlives_a_head_that_is_killed(hosts: Hosts, tmp_path: Path, runner: str) -> None:
    """The fixture looks for what is left; one rank is deaf, and one stopped."""
    launched = Launched(hosts, tmp_path, "rank == 1 and signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SAVES, runner=runner)
    launched.send(signal.SIGSTOP, 2)
    launched.signal(signal.SIGKILL)
    launched.end()


@pytest.mark.parametrize(
    ("runner", "host", "part", "number"),
    [
        ("pdsh", 0, "deepspeed.launcher.runner", signal.SIGKILL),
        ("pdsh", 0, "deepspeed.launcher.runner", signal.SIGTERM),
        ("pdsh", 0, "pdsh -S", signal.SIGTERM),
        ("pdsh", 1, "deepspeed.launcher.launch ", signal.SIGKILL),
        ("pdsh", 1, "deepspeed.launcher.launch ", signal.SIGTERM),
        pytest.param("openmpi", 0, "mpirun ", signal.SIGKILL, marks=MPI.marks),
        pytest.param("openmpi", 0, "mpirun ", signal.SIGTERM, marks=MPI.marks),
        pytest.param("openmpi", 1, "orted ", signal.SIGKILL, marks=MPI.marks),
    ],
)
def test_the_ranks_of_a_launcher_that_dies_save_and_the_run_exits_75(
    hosts: Hosts, tmp_path: Path, runner: str, host: int, part: str, number: int
) -> None:
    launched = Launched(hosts, tmp_path, SAVES.replace("0.5", "1.5"), runner=runner)
    launched.send_to(host, part, number)
    status, lines = launched.end()
    assert (status, lines[-1]) == (75, STOPPED)


def test_sigterm_to_the_head_lets_all_ranks_save_and_a_launcher_that_is_stopped_is_ended(hosts: Hosts, tmp_path: Path) -> None:
    launched = Launched(hosts, tmp_path, SAVES)
    launched.send_to(1, "deepspeed.launcher.launch ", signal.SIGSTOP)
    launched.signal(signal.SIGTERM)
    assert launched.end() == (75, ["SIGTERM: finishing the step and saving; Ctrl-C stops at once", STOPPED])


@over
def test_a_host_whose_link_is_cut_is_lost_and_ends_its_ranks_itself(hosts: Hosts, tmp_path: Path, runner: str) -> None:
    launched = Launched(hosts, tmp_path, SAVES, runner=runner)
    hosts.link(1, "down")
    try:
        status, (*_, line) = launched.end()
        wait_for(lambda: not any("ready" in words for words in hosts.hosts[1].processes().values()))
    finally:
        hosts.link(1, "up")
    assert status == 1
    assert line.startswith("rank 2 on host1 (device 0) was lost, at step 7: nothing was heard from its host for ")


def test_a_keeper_that_is_stopped_is_lost_and_what_it_kept_is_ended_on_its_host(hosts: Hosts, tmp_path: Path) -> None:
    launched = Launched(hosts, tmp_path, SAVES)
    launched.send(signal.SIGSTOP, 3, keeper=True)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line.startswith("rank 3 on host1 (device 1) was lost, at step 7: ")


def test_a_rank_that_is_stopped_hangs_the_run_and_is_named(hosts: Hosts, tmp_path: Path) -> None:
    launched = Launched(hosts, tmp_path, SAVES, patience=2.0)
    launched.send(signal.SIGSTOP, 2)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line.startswith("rank 2 on host1 (device 0) hung, at step 7: nothing for ")
    assert "and it does not answer; its log is host1:" in line
    assert "in ready" in launched.log("3"), "the others have written their stacks"


def test_hosts_that_can_not_be_used_are_named_before_anything_starts(hosts: Hosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("host0 slots=2\nhost7 slots=2\n")
    head = hosts.hosts[0].start([sys.executable, "-c", HEAD, str(tmp_path), str(hostfile), "", "100", "pdsh"], quiet())
    said, _ = head.communicate(timeout=DEADLINE)
    assert (head.returncode, said.splitlines()[-1].partition(":")[0]) == (1, "host7 can't be used")
    assert not (tmp_path / "launch").exists()


STEPS = 60
WORDS = (
    "quickstart", "model=tiny", "model.layers=2", "model.dropout=0.1", "data=synthetic", "train.batch=8", "train.seq=16",
    "train.microbatch=2", "train.evaluate.every=0", "log.every=1", "optim.warmup=3", f"train.steps={STEPS}",
)  # fmt: skip
TENSOR, PIPELINE = ("parallel.tp=2", "parallel.zero=1"), ("parallel.pp=2",)


class Fit:
    """`distrain fit` on host0, over both hosts."""

    def __init__(self, hosts: Hosts, folder: Path, *words: str, hostfile: Path | None = None) -> None:
        self.hosts, self.folder = hosts, folder / "run"
        over = ["cluster=2x2", "launch=deepspeed", f"launch.hostfile={hostfile or hosts.folder / 'hostfile'}", "launch.preflight=false"]
        given = [f"conf={WORDS[0]}", *WORDS[1:], *over, f"log.dir={folder}", "name=run", *words]
        self.head = hosts.hosts[0].start([sys.executable, "-m", "distrain", "fit", *given], quiet())

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl, as far as it goes."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def reaches(self, step: int) -> None:
        wait_for(lambda: any(row.get("step", 0) >= step for row in self.rows()) or self.head.poll() is not None)
        assert self.head.poll() is None, self.head.communicate()[0]

    def end(self) -> tuple[int, str]:
        """Its exit status and what it printed."""
        said, _ = self.head.communicate(timeout=DEADLINE)
        return self.head.returncode, said

    def losses(self) -> list[float]:
        """Of every step; where one was done twice, of the last time."""
        return list({row["step"]: row["loss"] for row in self.rows() if "loss" in row}.values())


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE], ids=["dp2_tp2", "dp2_pp2"])
def test_the_curve_over_two_hosts_is_one_process_s(hosts: Hosts, tmp_path: Path, layout: tuple[str, ...]) -> None:
    fit = Fit(hosts, tmp_path, *layout)
    status, said = fit.end()
    assert status == 0, said
    assert fit.losses() == pytest.approx(reference(WORDS)[0], abs=2e-6, rel=0)


@pytest.mark.parametrize("runner", [MPI])
def test_mpirun_which_begins_with_its_own_host_seats_ranks_as_the_hostfile_does(hosts: Hosts, tmp_path: Path, runner: str) -> None:
    other = tmp_path / "hostfile"
    other.write_text("host1 slots=2\nhost0 slots=2\n")
    fit = Fit(hosts, tmp_path, *PIPELINE, f"launch.runner={runner}", hostfile=other)
    status, said = fit.end()
    assert status == 0, said
    assert fit.losses() == pytest.approx(reference(WORDS)[0], abs=2e-6, rel=0)


def test_a_run_that_one_far_rank_is_told_to_stop_goes_on_as_if_it_had_not(hosts: Hosts, tmp_path: Path) -> None:
    fit = Fit(hosts, tmp_path, *TENSOR)
    fit.reaches(5)
    far = next(pid for pid, words in hosts.hosts[1].processes().items() if "trainer.loop.rank" in words)
    os.kill(far, signal.SIGTERM)
    status, said = fit.end()
    assert status == 75, said
    reached = fit.rows()[-1]["step"]
    assert 5 <= reached < STEPS
    again = Fit(hosts, tmp_path, *TENSOR, "checkpoint.resume=must")
    status, said = again.end()
    assert status == 0, said
    assert f"goes on from step {reached}" in said
    assert again.losses() == pytest.approx(reference(WORDS)[0], abs=2e-6, rel=0)


def test_a_run_that_loses_a_host_goes_on_with_the_others_as_if_it_had_not(hosts: Hosts, tmp_path: Path) -> None:
    fit = Fit(hosts, tmp_path, *PIPELINE, "checkpoint.every=5", "launch.restarts=1")
    try:
        fit.reaches(12)
        hosts.link(1, "down")
        status, said = fit.end()
    finally:
        hosts.link(1, "up")
    assert status == 0, said
    assert "restart 1 of 1, from the newest checkpoint, on host0: dp 2 -> 1, the same 8 sequences a step" in said
    assert "goodput " in said
    (restart,) = (row for row in fit.rows() if "restart" in row)
    assert (restart["restart"], restart["step"] % 5) == (1, 0)
    assert 0 <= restart["lost_steps"] <= 10
    assert "was lost, at step " in restart["says"]
    assert fit.losses() == pytest.approx(reference(WORDS)[0], abs=2e-6, rel=0)
