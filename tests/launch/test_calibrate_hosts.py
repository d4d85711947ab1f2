"""`distrain calibrate` of several hosts: network namespaces of this machine with real ssh (scripts/virtual_hosts.py).

Only ratios with wide margins are asserted of what is measured. The probe's sizes are small, so that a test takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from msgspec import convert

from distrain.cli.config.load import load_recipe
from distrain.cli.recipe_files.calibrated_figures import four_digits
from distrain.scripts import virtual_hosts
from distrain.scripts.virtual_hosts import VirtualHosts
from distrain.tests.fakes.calibrated_yaml import calibrated_values
from distrain.tests.fakes.deadline import DEADLINE, wait_for
from distrain.trainer.machine.measurement import AllReduceTimes
from distrain.trainer.plan.plan import make_plan

SMALL = {"seconds": 0.04, "rounds": 1, "sides": [512], "copied": 4 << 20, "reduced": 1 << 20}
LONG = {**SMALL, "seconds": 60.0}  # of one rate, so that a signal arrives while hosts measure
CALIBRATE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from functools import partial
from distrain.trainer.launch import measure_hosts as measuring
measuring.measure_hosts = partial(measuring.measure_hosts, sizes={sizes!r})
from distrain.cli.app import main
main()
"""
SHAPED = 5e6  # bytes/s of the slow link
PROGRAM = "trainer.machine.calibrate_host"


class Calibrated(NamedTuple):
    """How `distrain calibrate` ended on host0."""

    status: int
    lines: list[str]
    folder: Path

    @property
    def document(self) -> Any:
        """The JSON document."""
        return json.loads("\n".join(self.lines))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHosts]:
    """Three hosts on one switch, with two slots each."""
    if why := virtual_hosts.missing_tools():
        pytest.skip(why)
    with VirtualHosts(3, tmp_path_factory.mktemp("hosts")) as made:
        made.write_hostfile(2)
        yield made


@pytest.fixture(autouse=True)
def nothing_left(network: VirtualHosts) -> Iterator[None]:
    """No process that a test started outlives it."""
    yield
    wait_for(lambda: not any(host.processes() for host in network.hosts))


def start(network: VirtualHosts, folder: Path, *words: str, sizes: object = SMALL) -> subprocess.Popen[str]:
    """Start `distrain calibrate` on host0, with its files in the folder `out`."""
    given = ["calibrate", "launch=deepspeed", f"launch.hostfile={network.folder / 'hostfile'}", "-o", str(folder / "out"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return network.hosts[0].start([sys.executable, "-P", "-c", CALIBRATE.format(sizes=sizes), *given], environment)


def calibrate(network: VirtualHosts, folder: Path, *words: str) -> Calibrated:
    process = start(network, folder, *words)
    output, _ = process.communicate(timeout=DEADLINE)
    return Calibrated(process.returncode, output.splitlines(), folder / "out")


@pytest.fixture(scope="module")
def two(network: VirtualHosts, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """Two hosts with two processes each."""
    done = calibrate(network, tmp_path_factory.mktemp("two"), "launch.include=host0@host1", "--json")
    assert done.status == 0, done.lines
    return done


def link(row: Any) -> AllReduceTimes:
    return convert(row, AllReduceTimes)


# What is measured, written and planned with


def test_all_devices_and_the_links_between_the_hosts_are_measured(two: Calibrated) -> None:
    assert [row["name"] for row in two.document["hosts"]] == ["host0", "host1"]
    for row in two.document["hosts"]:
        assert [len(each["rates"]) for each in row["devices"]["products"]] == [2, 2]
        assert len(row["devices"]["copies"]) == row["devices"]["devices"] == row["devices"]["all_reduce"]["ranks"] == 2
    for found in map(link, two.document["between"].values()):
        assert (found.library, found.ranks, found.long_bytes) == ("gloo", 2, 1 << 20)
        assert min(found.short_seconds, found.long_seconds, found.bandwidth) > 0


def test_the_files_hold_the_figures_of_the_document(two: Calibrated) -> None:
    for group in ("device", "cluster"):
        file = Path(two.document[group]["file"])
        assert file == two.folder / group / "measured.yaml"
        assert calibrated_values(file) == two.document[group]["values"]


def test_the_cluster_has_the_rates_of_the_slowest_host_and_those_between_hosts_while_all_devices_send(two: Calibrated) -> None:
    document, values = two.document, two.document["cluster"]["values"]
    assert (values["nodes"], values["gpus"]) == (2, 2)
    together = link(document["between"]["together"])
    assert values["between"] == {"bandwidth": four_digits(together.bandwidth), "latency": four_digits(together.latency), "efficiency": 1.0}
    inside = min((link(row["devices"]["all_reduce"]) for row in document["hosts"]), key=lambda each: each.bandwidth)
    assert values["inside"]["bandwidth"] == four_digits(inside.bandwidth)
    assert document["device"]["values"]["bandwidth"] == four_digits(min(max(row["devices"]["copies"]) for row in document["hosts"]))
    assert "nodes: 2  # host0, host1\n" in Path(document["cluster"]["file"]).read_text()


def test_a_plan_reads_the_files_and_sends_its_messages_over_the_measured_links(two: Calibrated) -> None:
    typed = two.document["next"]
    conf, *words, option, folder = typed[typed.index("plan ") :].split()[1:]  # after distrain, or python -m distrain
    assert (conf, option, folder) == ("conf=quickstart", "--config-dir", str(two.folder))
    run = load_recipe("quickstart", words, two.folder)
    assert make_plan(run).fits
    assert (run.cluster.nodes, run.cluster.gpus) == (2, 2)
    assert run.cluster.between is not None
    assert run.cluster.between.rate == two.document["cluster"]["values"]["between"]["bandwidth"]
    slower = replace(run, cluster=replace(run.cluster, between=replace(run.cluster.between, bandwidth=run.cluster.between.bandwidth / 10)))
    times = [make_plan(each).time for each in (run, slower)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].step > times[0].step


@pytest.mark.skipif(shutil.which("tc", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None, reason="no tc here: apt-get install iproute2")
def test_a_host_with_a_slow_link_is_named_and_slows_what_is_measured(network: VirtualHosts, two: Calibrated, tmp_path: Path) -> None:
    shape = f"tc qdisc add dev eth0 root tbf rate {8 * SHAPED:.0f}bit burst 32k latency 500ms"
    if subprocess.run(network.hosts[2].command_line(shape.split()), capture_output=True).returncode:
        pytest.skip("this kernel shapes no link")
    try:
        done = calibrate(network, tmp_path, "--devices", "1", "--json")
    finally:
        network.hosts[2].run("tc", "qdisc", "del", "dev", "eth0", "root")
    assert done.status == 0, done.lines
    document = done.document
    between = document["cluster"]["values"]["between"]["bandwidth"]
    assert SHAPED / 4 < between < 2 * SHAPED
    assert between < link(two.document["between"]["alone"]).bandwidth / 3
    assert document["hosts"][2]["link"] < min(row["link"] for row in document["hosts"][:2]) / 3
    assert [row["host"] for row in document["slow"] if row["what"] == "link to its neighbours"] == ["host2"]
    assert "# host2 is slow: link to its neighbours at " in (done.folder / "cluster" / "measured.yaml").read_text()
    assert document["cluster"]["values"]["inside"] is None


# What prevents it


def test_a_host_that_cannot_be_reached_is_one_line(network: VirtualHosts, tmp_path: Path) -> None:
    network.hosts[0].run("ip", "route", "add", "unreachable", network.hosts[2].address)
    try:
        done = calibrate(network, tmp_path, "launch.include=host0@host2")
    finally:
        network.hosts[0].run("ip", "route", "del", "unreachable", network.hosts[2].address)
    assert done.status == 1
    (line,) = done.lines
    assert line.startswith("distrain: host2 can't be asked: ssh: connect to host host2 port 22: ")
    assert not done.folder.exists()


@pytest.mark.parametrize(
    ("folder", "lines"),
    [
        (Path(sys.executable).parent, ["host1 has no {python}: install distrain there at the same path"]),
        (
            Path(yaml.__file__).parents[1],
            ["host1 has no distrain: install distrain", "host1 has no torch: install torch", "host1 has no deepspeed"],
        ),
    ],
    ids=["Python", "distrain and torch"],
)
def test_what_a_host_lacks_is_named_with_what_to_do(network: VirtualHosts, tmp_path: Path, folder: Path, lines: list[str]) -> None:
    network.hosts[1].run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    try:
        done = calibrate(network, tmp_path, "launch.include=host0@host1")
    finally:
        network.hosts[1].run("umount", "-l", str(folder))
    assert done.status == 1
    assert [line.startswith(f"distrain: {says.format(python=sys.executable)}") for line, says in zip(done.lines, lines, strict=True)] == [
        True for _ in lines
    ], done.lines
    assert not done.folder.exists()


def programs(network: VirtualHosts, host: int) -> list[int]:
    """Return the processes of the program that measures a host."""
    return [pid for pid, line in network.hosts[host].processes().items() if PROGRAM in line]


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, ["distrain: stopped by SIGINT while the hosts were measured"]),
        (signal.SIGKILL, None, []),
    ],
)
def test_nothing_is_left_on_any_host_when_it_is_stopped(
    network: VirtualHosts, tmp_path: Path, number: int, status: int | None, said: list[str]
) -> None:
    """The fixture looks for processes that are left."""
    process = start(network, tmp_path, "launch.include=host0@host1", sizes=LONG)
    wait_for(lambda: all(len(programs(network, host)) >= 3 for host in (0, 1)))
    (controller,) = [pid for pid, line in network.hosts[0].processes().items() if "measuring.measure_hosts" in line]
    os.kill(controller, number)
    output, _ = process.communicate(timeout=DEADLINE)
    assert output.splitlines() == said
    assert status in (None, process.returncode)
    assert not (tmp_path / "out").exists()


def test_a_host_whose_program_dies_is_named_and_ends_the_others(network: VirtualHosts, tmp_path: Path) -> None:
    process = start(network, tmp_path, "launch.include=host0@host1", sizes=LONG)
    wait_for(lambda: all(programs(network, host) for host in (0, 1)))
    os.kill(min(programs(network, 1)), signal.SIGKILL)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert output.splitlines() == ["distrain: host1 could not be measured: its program ended without a message, ssh with status 255"]
    assert not (tmp_path / "out").exists()
