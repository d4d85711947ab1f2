"""Runs over virtual hosts with spares: one that loses its hosts for good ends on spares, and one that shrank grows back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distrain.scripts.virtual_hosts import VirtualHosts, missing_tools
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.held_step import HeldStep
from distrain.tests.fakes.host_runs import (
    ONE_EACH,
    PIPELINE,
    QUICK_RUNNER,
    FitOnHosts,
    controller_environment,
    one_process_losses,
    wait_for,
)

# A controller that runs on host0. Its arguments: folder, hostfile, program of a rank, runner.
CONTROLLER = """
import sys
from pathlib import Path
from distrain.tests.fakes.attempts import attempt_run
from distrain.trainer.launch.hosts_and_commands import resolve_hosts
from distrain.trainer.launch.restart import run_attempts
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.files import write_launch_files
folder, command = Path(sys.argv[1]), [sys.executable, "-c", sys.argv[3], sys.argv[1]]
run = attempt_run("cluster=2x1", "launch=deepspeed", f"launch.hostfile={sys.argv[2]}", f"launch.runner={sys.argv[4]}", "launch.restarts=2",
                  "launch.preflight=false", f"log.dir={folder.parent}")
plan = make_plan(run)
write_launch_files(run, plan, folder)
show = lambda line: print(line, flush=True)
sys.exit(run_attempts(run, plan, resolve_hosts(run).hosts, folder, show, show, command=command).status)
"""
# A rank that ends well only where there are two and the lost host is back; alone, it fails by its device once that host is back.
RANK = """
import os, sys, time
from pathlib import Path
from distrain.trainer.launch.rank.channel import Channel
channel, folder, ranks = Channel.from_environment(), Path(sys.argv[1]), os.environ["WORLD_SIZE"]
channel.report_step(6); channel.report_step(7)
if ranks == "2" and (folder / "back").exists():
    channel.report_done()
    sys.exit()
(folder / f"ready{os.environ['RANK']}of{ranks}").touch()
while not (ranks == "1" and (folder / "back").exists()): time.sleep(0.05)
raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHosts]:
    """Four hosts on one switch."""
    if why := missing_tools():
        pytest.skip(why)
    with VirtualHosts(4, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def hosts(network: VirtualHosts) -> Iterator[VirtualHosts]:
    """The hosts, whose links are up again afterwards, and on which no process that a test started is left."""
    yield network
    for number in range(len(network.hosts)):
        network.set_link(number, "up")
    wait_for(lambda: not any(host.processes() for host in network.hosts))


def write_hostfile(folder: Path, *names: str) -> Path:
    file = folder / "hostfile"
    file.write_text("".join(f"{name} slots=1\n" for name in names))
    return file


def test_a_run_whose_hosts_die_for_good_ends_on_spares_with_the_same_losses(hosts: VirtualHosts, tmp_path: Path) -> None:
    """host1 is dead before the first start, and host2, on which rank 0 runs then, dies in it. The controller's host is the last spare."""
    file = write_hostfile(tmp_path, "host1", "host2", "host3", "host0")
    hosts.set_link(1, "down")
    held = HeldStep(tmp_path / "held", 7)
    fit = FitOnHosts(
        hosts, tmp_path, *PIPELINE, ONE_EACH, "checkpoint.every=5", "train.steps=12", "launch.spares=2", "launch.restarts=1",
        f"launch.runner={QUICK_RUNNER}", f"launch.address={hosts.hosts[1].address}", "launch.preflight=true", hostfile=file, held=held,
    )  # fmt: skip
    held.wait_for(2, fit.controller)
    hosts.set_link(2, "down")
    held.release()
    status, output = fit.end()
    assert status == 0, output
    said = " ".join(output.split())
    assert "note: host1 is left out (host1 can't be asked: ssh: connect to host host1 port 22: " in said
    assert "): spare host3 takes its place" in said
    assert f"launch.address={hosts.hosts[1].address} is not used: it belongs to host1" in said
    assert "restart 1 of 1, from the newest checkpoint, on host3, host0: spare host0 for host2 (it can't be reached)" in said
    (restart,) = (row for row in fit.rows() if "restart" in row)
    assert restart["hosts"] == "on host3, host0: spare host0 for host2 (it can't be reached)"
    assert fit.losses() == pytest.approx(one_process_losses(12), abs=2e-6, rel=0)


def test_a_run_that_shrank_grows_back_when_its_host_is_back(hosts: VirtualHosts, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-c", CONTROLLER, str(folder), str(write_hostfile(tmp_path, "host0", "host1")), RANK, QUICK_RUNNER]
    controller = hosts.hosts[0].start(command, controller_environment(hosts))

    def wait_for_ranks(*names: str) -> None:
        wait_for(lambda: all((folder / name).exists() for name in names) or controller.poll() is not None)
        assert controller.poll() is None, controller.communicate()[0]

    wait_for_ranks("ready0of2", "ready1of2")
    hosts.set_link(1, "down")
    wait_for_ranks("ready0of1")
    hosts.set_link(1, "up")
    (folder / "back").touch()
    output, _ = controller.communicate(timeout=DEADLINE)
    assert controller.returncode == 0, output
    says = [line.partition(", from the newest checkpoint, ")[::2] for line in output.splitlines() if line.startswith("restart ")]
    assert says == [
        ("restart 1 of 2", "on host0: dp 2 -> 1, the same 12 sequences a step; without host1 (it can't be reached)"),
        ("restart 2 of 2", "on host0, host1: dp 1 -> 2, the same 12 sequences a step; with host1 (back)"),
    ]
    assert "2 restarts" in output
