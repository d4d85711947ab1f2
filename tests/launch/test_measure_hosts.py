"""Several hosts are measured: the phases of the links, what stands for all hosts, who is slow, and hosts that hang or differ."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.app import command
from distrain.cli.pages.calibrate_page import between_rows, calibrate_text, measured_rows, spread_text
from distrain.cli.pages.text_layout import Style
from distrain.cli.recipe_files.calibrated_figures import cluster_figures, device_figures, figure_values, shortened_names
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.path_commands import SCONTROL, SSH, FakeCommands
from distrain.trainer.launch import measure_hosts as measuring
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.measure_hosts import HostProbes
from distrain.trainer.launch.preflight.checks import HostState, device_kind
from distrain.trainer.machine.all_reduce import SHORT_BYTES
from distrain.trainer.machine.cache import LayerRates
from distrain.trainer.machine.calibrate_host import MARK
from distrain.trainer.machine.cluster_measurement import ClusterMeasurement, cluster_measurement
from distrain.trainer.machine.link_probe import link_phases
from distrain.trainer.machine.measurement import AllReduceTimes, DeviceMeasurement, ProductRates
from distrain.trainer.spec.problem import Problem

# The phases of the links


@pytest.mark.parametrize("hosts", range(3, 10))
def test_each_pair_of_neighbours_is_measured_once_and_no_host_is_in_two_pairs_at_a_time(hosts: int) -> None:
    phases = [each for each in link_phases(hosts, 1) if each.name.startswith("pairs")]
    for phase in phases:
        members = [host for pair in phase.groups for host in pair]
        assert len(members) == len(set(members))
    pairs = sorted(tuple(sorted(pair)) for phase in phases for pair in phase.groups)
    assert pairs == sorted(tuple(sorted((host, (host + 1) % hosts))) for host in range(hosts))


@pytest.mark.parametrize(("hosts", "rails", "names"), [(2, 1, ["alone"]), (2, 8, ["alone", "together"])])
def test_all_devices_of_a_host_send_at_once_where_it_has_several(hosts: int, rails: int, names: list[str]) -> None:
    assert [each.name for each in link_phases(hosts, rails)] == names


# What stands for all hosts


def devices(**changes: Any) -> DeviceMeasurement:
    """Return a host with two GPUs."""
    link = AllReduceTimes(
        library="nccl", ranks=2, short_bytes=4, short_seconds=1e-5, long_bytes=1 << 28, long_seconds=1e-3, latency=5e-6, bandwidth=300e9
    )
    made = DeviceMeasurement(
        kind="cuda", name="NVIDIA H100 80GB HBM3", devices=2, threads=1, cores=8, memory=80 << 30, context=1 << 29, units=132,
        products=tuple(ProductRates(precision="bf16", side=side, rates=(6e14, 6.2e14)) for side in (4096, 8192)),
        copy_bytes=1 << 30, copies=(3e12, 3.1e12), launches=(3e-6, 3e-6), layer_rates=(), all_reduce=link, load=0.1, versions={},
        seconds=9.0, date="2026-11-26",
    )  # fmt: skip
    return replace(made, **changes)


def seconds(bandwidth: float, ranks: int, size: int = 1 << 28) -> list[float]:
    """Return the seconds of a short all-reduce and of a long one of `size` bytes, in a ring."""
    return [2e-5 * (ranks - 1), 2e-5 * (ranks - 1) + 2 * (ranks - 1) / ranks * size / bandwidth]


def cluster(*hosts: DeviceMeasurement, links: tuple[float, ...] = (40e9, 40e9, 40e9)) -> ClusterMeasurement:
    """Return three hosts, whose pairs of neighbours have these links; all devices of a host at once have half of the slowest one."""
    pairs = {"pairs 0": (0, 1), "pairs 1": (1, 2), "pairs 2": (2, 0)}
    rows = [
        [
            {
                **({"alone": seconds(min(links), 3)} if rail == 0 else {}),
                "together": seconds(min(links) / (2 + rail), 3),
                **{name: seconds(links[at], 2) for at, (name, pair) in enumerate(pairs.items()) if host in pair},
            }
            for rail in range(2)
        ]
        for host in range(3)
    ]
    return cluster_measurement(("a", "b", "c"), hosts or (devices(),) * 3, rows, 1 << 28)


def test_the_link_between_hosts_is_that_of_the_slowest_device_while_all_send() -> None:
    found = cluster()
    assert found.alone is not None
    assert found.together is not None
    assert [found.alone.bandwidth, found.together.bandwidth] == pytest.approx([40e9, 40e9 / 3])
    assert (found.together.ranks, found.together.short_bytes) == (3, SHORT_BYTES)
    assert found.together.latency == pytest.approx(1e-5)
    values = figure_values(cluster_figures(found.slowest, found))
    assert (values["nodes"], values["gpus"], values["between"]["bandwidth"]) == (3, 2, 13.33e9)


def test_the_slowest_host_stands_for_all() -> None:
    first, last = devices().products
    slow = devices(copies=(2e12, 2e12), memory=79 << 30, products=(first, replace(last, rates=(4e14, 6e14))))
    found = cluster(devices(), slow, devices(launches=(3e-6, 9e-6))).slowest
    assert (found.product("bf16"), found.copy, found.launch, found.memory) == (4e14, 2e12, 9e-6, 79 << 30)
    assert (found.hosts, found.devices, found.all_devices) == (3, 2, 6)
    assert figure_values(device_figures(found, None))["memory"] == 79 << 30
    layers = [(LayerRates(products=rate, attention=1e10),) * 2 for rate in (3e11, 1e11, 2e11)]
    assert cluster(*(devices(layer_rates=each) for each in layers)).slowest.layer_rates == layers[1]


@pytest.mark.parametrize(
    ("changes", "links", "slow"),
    [
        ({}, (40e9, 40e9, 40e9), []),
        ({"copies": (2.71e12, 3e12)}, (40e9, 40e9, 40e9), []),
        ({"copies": (2.69e12, 3e12)}, (40e9, 40e9, 40e9), [("c", "copy")]),
        (
            {"products": tuple(replace(each, rates=(5e14, 6e14)) for each in devices().products)},
            (40e9,) * 3,
            [("c", "product 4096 x 4096, bf16")],
        ),
        ({}, (40e9, 20e9, 20e9), [("c", "link to its neighbours")]),
        ({}, (40e9, 20e9, 40e9), []),
    ],
    ids=["none", "9.7 % below", "10.3 % below", "products of two sizes", "its links", "one cable"],
)
def test_a_host_that_is_more_than_a_tenth_below_the_median_is_named(
    changes: dict[str, Any], links: Any, slow: list[tuple[str, str]]
) -> None:
    found = cluster(devices(), devices(), devices(**changes), links=links)
    assert [(each.host, each.what) for each in found.slow_hosts] == slow


def test_the_page_names_the_slow_host_and_shows_the_spread() -> None:
    found = cluster(devices(), devices(), devices(copies=(1.5e12, 3e12)))
    page = calibrate_text(found.slowest, (*measured_rows(found.slowest, {}), *between_rows(found)), "", Style())
    assert page.startswith("NVIDIA H100 80GB HBM3: 3 hosts with 2 GPUs, measured together in 9.00 s")
    assert "all-reduce of 256 MiB, 3 hosts, one device of each" in page
    assert "all-reduce of 256 MiB, 3 hosts, all 2 at once" in page
    spread = spread_text(found, Style())
    assert "c is slow: copy at 1.50 TB/s, 50.0 % below the hosts' median of 3.00 TB/s" in spread
    assert "product 8192 x 8192, bf16" in spread
    assert "product 4096" not in spread


def test_the_page_of_hosts_with_one_device_each_has_the_link_between_them() -> None:
    found = cluster(*(devices(devices=1, all_reduce=None),) * 3)
    assert [each.what for each in between_rows(found)] == [
        "all-reduce of 4 B, 3 hosts, one device of each",
        "all-reduce of 256 MiB, 3 hosts, one device of each",
        "  as a ring: a device's link",
        "  as a ring: a hop",
    ]


def test_a_comment_names_the_first_of_many_hosts() -> None:
    assert shortened_names([f"n{each}" for each in range(11)]) == "n0, n1, n2, n3, n4, n5, n6, n7 and 3 more"


# The command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"a": (0, 1), "b": (0, 1)}),
        (["--devices", "1"], {"a": (0,), "b": (0,)}),
        (["launch.exclude=a:0@b:1"], {"a": (1,), "b": (0,)}),
        (["launch.include=b"], {"b": (0, 1)}),
    ],
)
def test_the_words_of_fit_choose_the_hosts_and_slots(
    words: list[str], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = dict[str, Any]()

    def measure(hosts: Any, kind: object, show: object) -> list[Problem]:
        asked.update({each.name: each.slots for each in hosts}, kind=kind)
        return [Problem(rule="probe", says="it failed")]

    monkeypatch.setattr("distrain.trainer.launch.measure_hosts.measure_hosts", measure)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    given = ["device=cpu", "launch=deepspeed", f"launch.hostfile={tmp_path / 'hosts'}", "-o", str(tmp_path / "out"), *words]
    assert command(["calibrate", *given]) == 1
    assert (asked.pop("kind"), asked, capsys.readouterr().err) == ("cpu", expected, "distrain: it failed\n")
    assert not (tmp_path / "out").exists()


def test_the_nodes_of_a_slurm_job_are_measured_with_as_many_devices_as_are_given(
    ssh: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh.put("scontrol", SCONTROL)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    asked = list[Any]()

    def measure(hosts: Any, kind: object, show: object) -> list[Problem]:
        asked.extend(hosts)
        return [Problem(rule="probe", says="it failed")]

    monkeypatch.setattr(measuring, "measure_hosts", measure)
    given = ["calibrate", "launch=deepspeed", "-o", str(tmp_path / "out")]
    assert command(given) == 2
    assert capsys.readouterr().err.startswith("distrain: Slurm's job 7 does not say how many devices of a node to measure: say it with")
    assert command([*given, "--devices", "4"]) == 1
    assert asked == [Host(name=name, slots=(0, 1, 2, 3)) for name in ("127.0.0.1", "127.0.0.2")]


# Hosts that fail


def states(count: int, cards: object = None, slots: tuple[int, ...] = (0, 1)) -> list[HostState]:
    return [
        HostState(host=Host(name=f"h{each}", slots=slots), facts={"cards": cards, "address": f"10.0.0.{each}"}) for each in range(count)
    ]


def ignore(text: str) -> None: ...


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """A fake ssh, which runs the program of a file that has the host's name."""
    made = FakeCommands(tmp_path / "stand-ins")
    made.put("ssh", SSH)
    monkeypatch.setenv("PATH", made.path())
    return made


def answer(ssh: FakeCommands, host: str, *messages: dict[str, Any], then: str = "") -> None:
    """Have a host print these messages."""
    lines = "".join(f"print({MARK + json.dumps(each)!r}, flush=True)\n" for each in messages)
    ssh.host(host, f"import time\nprint('a login shell', flush=True)\n{lines}{then or 'time.sleep(1000)'}\n")


def test_a_host_that_hangs_is_named_at_the_deadline(ssh: FakeCommands) -> None:
    answer(ssh, "h0", {"stage": "devices"}, {"stage": "links", "port": 1})
    answer(ssh, "h1", {"stage": "devices"})
    answer(ssh, "h2", {"stage": "devices"}, {"stage": "links", "port": 1})
    for seconds in (3, 30, 240):  # the first is enough for the other two unless the machine is busy
        found = HostProbes(states(3), "cpu", {}, ignore).run(seconds, [])
        if len(found) == 1:
            break
    assert [str(each) for each in found] == [f"h1 could not be measured: no answer in {seconds} s"]


def test_a_host_that_fails_ends_the_others_and_gives_its_reason(ssh: FakeCommands) -> None:
    answer(ssh, "h0", {"stage": "devices"})
    answer(ssh, "h1", {"problem": "torch finds no GPU on this machine", "mend": "device=cpu measures its CPU"})
    found = HostProbes(states(2), "cuda", {}, ignore).run(DEADLINE, [])
    assert [str(each) for each in found] == ["h1 could not be measured: torch finds no GPU on this machine: device=cpu measures its CPU"]


def test_a_failure_of_the_links_gives_the_interface_to_set_unless_a_host_failed_by_itself(ssh: FakeCommands) -> None:
    links: tuple[dict[str, Any], ...] = ({"stage": "links", "port": 1}, {"problem": "Connection refused", "mend": ""})
    answer(ssh, "h0", *links)
    answer(ssh, "h1", *links)
    found = HostProbes(states(2), "cpu", {}, ignore).run(DEADLINE, [])
    assert [str(each) for each in found] == [
        "h0 fails in an all-reduce with the others over gloo: Connection refused: set GLOO_SOCKET_IFNAME to the interface between the hosts"
    ]
    answer(ssh, "h1", links[0], then="sys.exit('Killed')")
    found = HostProbes(states(2), "cpu", {}, ignore).run(DEADLINE, [])
    assert [str(each) for each in found] == ["h1 could not be measured: Killed"]


def test_hosts_with_different_gpus_are_not_one_cluster(monkeypatch: pytest.MonkeyPatch, ssh: FakeCommands) -> None:
    from msgspec import to_builtins

    for host, name in (("h0", "A"), ("h1", "B")):
        answer(ssh, host, {"found": to_builtins(devices(name=name))}, {"links": [{}, {}], "bytes": 8}, then="sys.exit()")
    probes = HostProbes(states(2), "cuda", {}, ignore)
    assert probes.run(DEADLINE, []) == []
    found = probes.measurement()
    assert not isinstance(found, ClusterMeasurement)
    assert [str(each) for each in found] == ["the hosts' GPUs differ: h0 has A, h1 has B: choose hosts of one kind with launch.include"]


def test_a_host_sees_the_gpus_of_its_slots_and_the_variables_of_the_network_alone(
    ssh: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("SECRET_CANARY", "a canary")
    answer(ssh, "h0", then="sys.stderr.write(sys.stdin.readline())\nsys.exit(1)")
    (found,) = HostProbes(states(1, slots=(2, 5)), "cuda", {}, ignore).run(DEADLINE, [])
    order = json.loads(found.says.removeprefix("h0 could not be measured: "))
    assert order["environment"] == {"NCCL_SOCKET_IFNAME": "eth7", "CUDA_VISIBLE_DEVICES": "2,5"}
    assert (order["kind"], order["devices"], order["host"], order["hosts"]) == ("cuda", 2, 0, 1)


@pytest.mark.parametrize(("cards", "kind"), [(None, "cpu"), ([], "cpu"), ([[0, 0, 80]], "cuda")])
def test_gpus_are_measured_where_hosts_show_them(cards: object, kind: str) -> None:
    assert device_kind([*states(1), *states(1, cards)]) == kind


@pytest.mark.parametrize("ends", ["stdin", "time"])
def test_the_program_of_a_host_ends_with_its_ssh_and_at_its_deadline(ends: str) -> None:
    """Its first stage is never answered."""
    order = {"kind": "cpu", "devices": 1, "host": 0, "hosts": 1, "seconds": 1 if ends == "time" else 1000, "environment": {}, "sizes": {}}
    argv = [sys.executable, "-P", "-m", measuring.MODULE]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as program:
        assert program.stdin is not None
        program.stdin.write(f"{json.dumps(order)}\n".encode())
        program.stdin.flush()
        if ends == "stdin":
            program.stdin.close()
        assert program.wait(DEADLINE) == -(signal.SIGKILL if ends == "stdin" else signal.SIGALRM)
