"""Runs over two hosts through DeepSpeed's launcher: when a process dies or a host is cut off, the run ends soon and says why.

The hosts are namespaces of this machine (scripts/virtual_hosts.py makes some by hand). Most ranks are small programs without torch, so
that a test takes little longer than DeepSpeed's launcher takes to start; what is the same under any launcher is tested under mpirun, which
takes less time than DeepSpeed's own through pdsh.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from shutil import which

import pytest

from distrain.scripts.virtual_hosts import VirtualHosts
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.host_runs import (
    CONTROLLER,
    ONE_EACH,
    PIPELINE,
    SAVES,
    STOPPED,
    FitOnHosts,
    RanksOnHosts,
    controller_environment,
    one_process_losses,
    wait_for,
)

MPI = pytest.param("openmpi", marks=pytest.mark.skipif(which("mpirun") is None, reason="no mpirun here: apt-get install openmpi-bin"))
each_runner = pytest.mark.parametrize("runner", ["pdsh", MPI])
under_mpirun = pytest.mark.parametrize("runner", [MPI])


@under_mpirun
def test_a_rank_that_is_killed_on_the_other_host_is_named(hosts: VirtualHosts, tmp_path: Path, runner: str) -> None:
    launched = RanksOnHosts(hosts, tmp_path, SAVES, runner=runner)
    launched.send(signal.SIGKILL, 3)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line == (
        "rank 3 on host1 (device 1) was killed by SIGKILL, perhaps by the kernel for want of memory, at step 7; "
        f"its log is host1:{tmp_path}/ranks/3.log"
    )


@under_mpirun
def test_the_exception_of_a_rank_on_the_other_host_is_reported_and_no_secret_is_sent_there(
    hosts: VirtualHosts, tmp_path: Path, runner: str
) -> None:
    """The controller's own host has the secret, and mpirun needs to send it nothing. What pdsh sends is in tests/launch/test_secrets.py."""
    program = "if rank == 2: signal.signal(signal.SIGTERM, lambda *_: [][0])\n"
    program += "print(os.environ['NCCL_TOLD'], 'SECRET_CANARY' in os.environ, os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])\n"
    launched = RanksOnHosts(hosts, tmp_path, program + SAVES.replace("signal.signal", "rank == 2 or signal.signal"), runner=runner)
    assert [launched.log(str(rank)).splitlines()[1] for rank in range(4)] == [f"a b {rank < 2} {rank % 2} 2" for rank in range(4)]
    assert (tmp_path / "launch" / "join_token").stat().st_mode & 0o777 == 0o600
    launched.send(signal.SIGTERM, 2)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line.startswith("rank 2 on host1 (device 0) exited with 1, at step 7: IndexError: list index out of range; its log is host1:")
    assert not (tmp_path / "launch" / "join_token").exists()
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"canary" not in written


@each_runner
def test_nothing_outlives_a_controller_that_is_killed(hosts: VirtualHosts, tmp_path: Path, runner: str) -> None:
    """The fixture looks for processes that are left; one rank ignores SIGTERM, and one is stopped. pdsh starts all hosts alike."""
    on = (1,) if runner == "pdsh" else (0, 1)
    program = "rank == 1 and signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SAVES
    launched = RanksOnHosts(hosts, tmp_path, program, runner=runner, on=on)
    launched.send(signal.SIGSTOP, 2 * (len(on) - 1))
    launched.signal(signal.SIGKILL)
    launched.end()


@pytest.mark.parametrize(
    ("runner", "on", "host", "part", "number"),
    [
        ("pdsh", (1,), 0, "deepspeed.launcher.runner", signal.SIGKILL),
        ("pdsh", (1,), 0, "pdsh -S", signal.SIGTERM),
        ("pdsh", (0, 1), 1, "deepspeed.launcher.launch ", signal.SIGTERM),
        pytest.param("openmpi", (0, 1), 0, "mpirun ", signal.SIGTERM, marks=MPI.marks),
        pytest.param("openmpi", (0, 1), 1, "orted ", signal.SIGKILL, marks=MPI.marks),
    ],
)
def test_the_ranks_of_a_launcher_that_dies_save_and_the_run_exits_75(
    hosts: VirtualHosts, tmp_path: Path, runner: str, on: tuple[int, ...], host: int, part: str, number: int
) -> None:
    """A launcher that is killed ends nothing; one that is terminated ends what it has started: each of both, on either host.

    What dies on the controller's host is the same whichever hosts have ranks: the other, for pdsh.
    """
    launched = RanksOnHosts(hosts, tmp_path, SAVES.replace("0.5", "1.5"), runner=runner, on=on)
    launched.send_to_processes(host, part, number)
    status, lines = launched.end()
    assert (status, lines[-1]) == (75, STOPPED)


def test_sigterm_to_the_controller_lets_all_ranks_save_and_ends_a_stopped_launcher(hosts: VirtualHosts, tmp_path: Path) -> None:
    launched = RanksOnHosts(hosts, tmp_path, SAVES, on=(1,))
    launched.send_to_processes(1, "deepspeed.launcher.launch ", signal.SIGSTOP)
    launched.signal(signal.SIGTERM)
    assert launched.end() == (75, ["SIGTERM: finishing the step and saving; Ctrl-C stops at once", STOPPED])


@under_mpirun
def test_a_host_whose_link_is_cut_is_lost_and_ends_its_own_ranks(hosts: VirtualHosts, tmp_path: Path, runner: str) -> None:
    launched = RanksOnHosts(hosts, tmp_path, SAVES, runner=runner)
    hosts.set_link(1, "down")
    try:
        status, (*_, line) = launched.end()
        wait_for(lambda: not any("ready" in line for line in hosts.hosts[1].processes().values()))
    finally:
        hosts.set_link(1, "up")
    assert status == 1
    assert line.startswith("rank 2 on host1 (device 0) was lost, at step 7: nothing was heard from its host for ")


@under_mpirun
def test_a_rank_whose_agent_is_stopped_is_lost_and_ended_on_its_host(hosts: VirtualHosts, tmp_path: Path, runner: str) -> None:
    launched = RanksOnHosts(hosts, tmp_path, SAVES, runner=runner)
    launched.send(signal.SIGSTOP, 3, agent=True)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line.startswith("rank 3 on host1 (device 1) was lost, at step 7: ")


WAITS = """
from distrain.trainer.launch.rank.group_record import GroupRecord, Recorded
answer.read = lambda: [GroupRecord(name="1", label="dp", ranges=((0, 3, 1),), begun=5, recent=(Recorded(5, "all_reduce", 2**22, False),))]
"""


@under_mpirun
def test_a_stopped_rank_that_hangs_the_run_is_named(hosts: VirtualHosts, tmp_path: Path, runner: str) -> None:
    launched = RanksOnHosts(hosts, tmp_path, WAITS + SAVES, patience=2.0, runner=runner)
    launched.send(signal.SIGSTOP, 2)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line.startswith("rank 2 on host1 (device 0) hung, at step 7: no progress for ")
    group = r"dp group of ranks 0 to 3: ranks? [013, to]+ ha(ve|s) not finished all_reduce 5 of 4.00 MiB, ranks? .*2.* gave no record"
    assert re.search(f"and it does not answer; {group}; its log is host1:", line)  # on a busy machine others may be late
    assert "in ready" in launched.log("3"), "the others have written their stacks"


def test_a_host_that_can_not_be_used_is_named_before_anything_starts(hosts: VirtualHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("host0 slots=2\nhost7 slots=2\n")
    controller = hosts.hosts[0].start(
        [sys.executable, "-c", CONTROLLER, str(tmp_path), str(hostfile), "", "100", "pdsh"], controller_environment(hosts)
    )
    output, _ = controller.communicate(timeout=DEADLINE)
    assert (controller.returncode, output.splitlines()[-1].partition(":")[0]) == (1, "host7 can't be used")
    assert not (tmp_path / "launch").exists()


@under_mpirun
def test_ranks_under_mpirun_follow_the_order_of_the_hostfile(hosts: VirtualHosts, tmp_path: Path, runner: str) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("host1 slots=1\nhost0 slots=1\n")
    fit = FitOnHosts(hosts, tmp_path, *PIPELINE, ONE_EACH, f"launch.runner={runner}", hostfile=hostfile)
    status, output = fit.end()
    assert status == 0, output
    assert fit.losses() == pytest.approx(one_process_losses(), abs=2e-6, rel=0)
