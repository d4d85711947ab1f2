"""`distrain doctor` on virtual hosts: hosts that reach each other, and what is reported of those that do not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from distrain.scripts import virtual_hosts
from distrain.scripts.virtual_hosts import VirtualHosts


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHosts]:
    """Three hosts on one switch."""
    if why := virtual_hosts.missing_tools():
        pytest.skip(why)
    with VirtualHosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def doctor(network: VirtualHosts, runs: Path, *words: str) -> tuple[int | None, list[str]]:
    """The status and the lines of `distrain doctor` on host0, for a run on all three hosts."""
    file = network.write_hostfile(2)
    given = ["conf=quickstart", "cluster=3x2", "train.batch=48", "launch=deepspeed", f"launch.hostfile={file}", f"log.dir={runs}", *words]
    # on a temporary file system of its own, which others may cover
    process = network.hosts[0].start([sys.executable, "-m", "distrain", "doctor", *given], os.environ)
    said, _ = process.communicate()
    return process.returncode, re.sub(r"\n {2,9}", " ", said).splitlines()  # without line breaks


def test_hosts_reach_each_other_and_all_reduce(network: VirtualHosts, tmp_path: Path) -> None:
    status, said = doctor(network, tmp_path, "cluster.between={bandwidth: 1e15, latency: 1e-6}")
    assert status == 0, said
    assert [line.split()[0] for line in said[1:4]] == ["host0", "host1", "host2"]
    assert all(line.endswith("2 of 2") for line in said[1:4])
    assert said[4].startswith("note: an all-reduce of 16.0 MiB between hosts runs at ")
    assert said[5].startswith("an all-reduce between the hosts runs at ")
    assert list((tmp_path / "quickstart").iterdir()) == []
    assert [host.processes() for host in network.hosts] == [{}, {}, {}]


def test_a_host_whose_link_is_down_is_reported(network: VirtualHosts, tmp_path: Path) -> None:
    network.set_link(2, "down")
    try:
        status, said = doctor(network, tmp_path)
    finally:
        network.set_link(2, "up")
    assert status == 1
    (line,) = [line for line in said if line.startswith("problem: ")]
    assert line.startswith("problem: host2 can't be asked: ssh: connect to host host2 port 22: ")


NO_WAY = "problem: host1 does not reach host2: No route to host: open the firewall between the hosts, all ports"
ANOTHER_DISK = "does not see what host2 writes to {runs}/quickstart: set log.dir to a folder that all hosts share"
FULL_DISK = (
    "problem: host2 has 1.00 MiB free in {runs}/quickstart, and a checkpoint is 37.3 MiB: free some space, or set log.dir to another disk"
)
READ_ONLY_DISK = (
    "problem: host2 can't write to {runs}/quickstart: Read-only file system: set log.dir to a folder that all hosts can write to"
)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (
            {1: "ip route add unreachable 10.77.0.12/32", 2: "mount -t tmpfs -o size=1m tmpfs {runs}"},
            {1: "ip route del unreachable 10.77.0.12/32", 2: "umount -l {runs}"},
            [NO_WAY, ANOTHER_DISK, FULL_DISK],
        ),
        ({2: "mount -t tmpfs -o ro tmpfs {runs}"}, {2: "umount -l {runs}"}, [READ_ONLY_DISK]),
    ],
    ids=["no way, and another disk, which is full", "a disk that can't be written"],
)
def test_hosts_that_differ_from_the_others_are_reported(
    network: VirtualHosts, tmp_path: Path, before: dict[int, str], after: dict[int, str], lines: list[str]
) -> None:
    with ExitStack() as undone:
        for number in before:
            network.hosts[number].run(*before[number].format(runs=tmp_path).split())
            undone.callback(network.hosts[number].run, *after[number].format(runs=tmp_path).split())
        status, said = doctor(network, tmp_path)
    assert status == 1
    for line in lines:
        assert any(line.format(runs=tmp_path) in each for each in said), said
