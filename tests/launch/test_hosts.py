"""Runs over two hosts through DeepSpeed's launcher: the curve is one process's, and whatever dies or is cut off, all is over soon.

The hosts are namespaces of this machine (vhosts.py says how to make some by hand). Where a fault is looked at and not a curve,
ranks are small programs without torch: they come and go in the time that DeepSpeed's launcher takes to start.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from distrain.scripts.virtual_hosts import Hosts, missing
from distrain.tests.fakes.host_runs import DEADLINE, HEAD, PIPELINE, SAVES, STEPS, STOPPED, TENSOR, WORDS, Fit, Launched, quiet, wait_for
from distrain.tests.fakes.one_process import reference

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

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
