"""Hosts are asked before anything starts: what one lacks is named with its mend, and hosts that lack nothing pass."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.pages.hosts_page import preflight_lines
from distrain.scripts import virtual_hosts
from distrain.scripts.virtual_hosts import VirtualHosts
from distrain.tests.fakes.path_commands import SSH, FakeCommands
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.preflight import host_probe
from distrain.trainer.launch.preflight import preflight as rounds
from distrain.trainer.launch.preflight.checks import HostRequirements, HostState, host_notes, host_problems
from distrain.trainer.launch.preflight.preflight import run_preflight
from distrain.trainer.system.child_process import end_child

NAMES = ("h0", "h1", "h2")
GIB = 1 << 30
DEADLINE = 60.0  # seconds
# The command, with Ctrl-C as at a terminal, whatever the tests were started with.
HEARS = """
import signal
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
from distrain.cli.app import main
main()
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """An ssh that runs its command here, whatever the host's name."""
    made = FakeCommands(tmp_path / "stand-ins")
    made.put("ssh", SSH)
    monkeypatch.setenv("PATH", made.path())
    monkeypatch.setattr(rounds, "FACTS_SECONDS", 20.0)
    monkeypatch.setattr(rounds, "LINKS_SECONDS", 6.0)
    return made


def asked(folder: Path, **more: Any) -> HostRequirements:
    return HostRequirements(**{"python": sys.executable, "folder": folder / "run", "kind": "cpu", "save": 1000, "keep": 2, **more})


# What hosts say, and what is made of it


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a host says that lacks nothing: this machine, with 8 GPUs."""
    said = host_probe.host_facts({"kind": "cpu", "folder": str(tmp_path_factory.mktemp("run")), "note": "note"})
    return said | {"cards": [[index, 0, 80 * GIB] for index in range(8)], "folder": {"free": 100 * GIB}, "cores": 4}


def seen(answer: dict[str, Any], *changes: Callable[[dict[str, Any]], object], slots: int = 8) -> list[HostState]:
    """Hosts that answered so, one after another changed."""
    made = []
    for number in range(3):
        facts = copy.deepcopy(answer) | {"home": [f"h{number}", "boot"]}
        for change in changes[number : number + 1]:
            change(facts)
        links = {"reached": {name: 0.001 for name in NAMES if name != f"h{number}"}, "failed": {}, "unseen": []}
        made.append(HostState(host=Host(name=f"h{number}", slots=tuple(range(slots))), facts=facts, links=links))
    return made


def told(hosts: list[HostState], **more: Any) -> list[str]:
    return [str(each) for each in host_problems(hosts, asked(Path("/runs"), **more))]


def test_hosts_that_lack_nothing_pass(answer: dict[str, Any]) -> None:
    assert told(seen(answer)) == []
    assert told(seen(answer), kind="cuda") == []


# fmt: off
LACKS: dict[str, tuple[Callable[[dict[str, Any]], object], str, dict[str, Any]]] = {
    "a package": (lambda facts: facts["versions"].update(deepspeed=""),
                  f"h0 has no deepspeed: install deepspeed {host_probe.package_versions()['deepspeed']} there", {}),
    "distrain": (lambda facts: facts["versions"].update(distrain="", code=""), "h0 has no distrain: install ", {}),
    "another torch": (lambda facts: facts["versions"].update(torch="2.0.0"),
                      f"h0 has torch 2.0.0, this machine {host_probe.package_versions()['torch']}: install the same on all hosts", {}),
    "another Python": (lambda facts: facts["versions"].update(python="3.8.1"),
                       f"h0 has python 3.8, this machine {'.'.join(host_probe.package_versions()['python'].split('.')[:2])}: install the same", {}),
    "other files": (lambda facts: facts["versions"].update(code="00000000"),
                    "h0 and this machine have different files of distrain: install the same on all hosts", {}),
    "a folder": (lambda facts: facts.update(folder={"problem": "Read-only file system"}),
                 "h0 can't write to /runs/run: Read-only file system: set log.dir to a folder that all hosts can write to", {}),
    "room": (lambda facts: facts.update(folder={"free": 5 * GIB}),
             "h0 has 5.00 GiB free in /runs/run, and a checkpoint is 6.00 GiB: free some space, or set log.dir to another disk",
             {"save": 6 * GIB}),
    "cores": (lambda facts: facts.update(cores=0), "h0 has 0 cores, which can't serve 8 ranks: give it at most slots=0", {}),
    "nvidia-smi": (lambda facts: facts.update(cards=None), "h0 shows no GPU: make `nvidia-smi` work there", {"kind": "cuda"}),
    "GPUs": (lambda facts: facts["cards"].pop(),
             "h0 has 7 GPUs and no GPU 7: write the number of its GPUs as slots in the hostfile", {"kind": "cuda"}),
    "a free GPU": (lambda facts: facts["cards"].__setitem__(3, [3, 40 * GIB, 80 * GIB]),
                   "GPU 3 of h0 has 40.0 GiB of 80.0 GiB in use: end what runs there, or set launch.exclude=h0:3", {"kind": "cuda"}),
    "a machine of its own": (lambda facts: facts.update(home=["h1", "boot"]),
                             "h0 and h1 are the same machine: take one of them out of the hostfile", {}),
}
# fmt: on


@pytest.mark.parametrize("name", LACKS)
def test_what_a_host_lacks_is_told_with_its_mend(name: str, answer: dict[str, Any]) -> None:
    change, line, more = LACKS[name]
    (found,) = told(seen(answer, change), **more)
    assert found.startswith(line)


def test_hosts_that_do_not_reach_each_other_are_named_once(answer: dict[str, Any]) -> None:
    one = seen(answer)
    one[0].links = {"reached": {"h1": 0.1}, "failed": {"h2": "timed out"}, "unseen": []}
    assert told(one) == ["h0 does not reach h2: timed out: open the firewall between the hosts, all ports"]
    none = seen(answer)
    for each in none[:2]:
        each.links = {"reached": {}, "failed": {"h2": "timed out"}, "unseen": []}
    assert told(none) == ["h2 is reached by no other host: open its firewall to the other hosts, all ports"]


def test_a_run_folder_that_is_not_shared_is_told(answer: dict[str, Any]) -> None:
    hosts = seen(answer)
    hosts[1].links = {"reached": {"h0": 0.1, "h2": 0.1}, "failed": {}, "unseen": ["h0"]}
    assert told(hosts) == ["h1 does not see what h0 writes to /runs/run: set log.dir to a folder that all hosts share"]


def test_what_does_not_stop_a_run_is_a_note(answer: dict[str, Any]) -> None:
    hosts = seen(answer, lambda facts: facts.update(folder={"free": 2500}))
    hosts[1].drift, hosts[2].drift = 7.0, -90.0
    assert list(host_notes(hosts, asked(Path("/runs"), rate=50e9), 20e9)) == [
        "h0 has room for 2 checkpoints, and the run needs 3 while it saves one",
        "the clock of h1 is 7 s ahead of this machine's",
        "the clock of h2 is 90 s behind this machine's",
        "an all-reduce of 16.0 MiB between hosts runs at 20 GB/s, and cluster.between declares 50 GB/s a device",
    ]


# The rounds, over an ssh that stays here


def hosts(count: int) -> list[Host]:
    return [Host(name=name, slots=(0, 1)) for name in NAMES[:count]]


def test_a_host_says_all_in_programs_that_are_sent_to_it(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h0", "print('Welcome to h0', flush=True)")
    found = run_preflight(hosts(1), asked(tmp_path))
    assert (found.problems, found.notes) == ((), ())
    assert list((tmp_path / "run").iterdir()) == []
    (call,) = ssh.calls
    assert call["argv"][-3:] == ["--", "h0", f"{sys.executable} -"]
    assert "BatchMode=yes" in call["argv"]
    head, row = preflight_lines(found)
    assert head.split()[:2] == ["host", "answers"]
    assert row.split()[0] == "h0"


ASK = "make `ssh h1 true` work without asking for anything"
# fmt: off
SILENT = (
    ("sys.exit('Permission denied (publickey).')",  f"h1 can't be asked: Permission denied (publickey).: {ASK}"),
    ("sys.exit(7)",                                 f"h1 can't be asked: ended with 7 and no message: {ASK}"),
    ("command = '/none/python -'",                  f"h1 can't be asked: sh: 1: /none/python: not found: {ASK}"),
    ("import time; time.sleep(60)",                 f"h1 can't be asked: no answer in 3 s: {ASK}"),
)
# fmt: on


@pytest.mark.parametrize(("does", "line"), SILENT, ids=["refused", "silent", "no Python", "hangs"])
def test_a_host_that_does_not_answer_is_told_while_the_others_are_asked(
    does: str, line: str, ssh: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in does:
        monkeypatch.setattr(rounds, "FACTS_SECONDS", 2.0)
        monkeypatch.setattr(rounds, "SSH_SECONDS", 1.0)
    ssh.host("h1", does)
    found = run_preflight(hosts(2), asked(tmp_path))
    assert line in [str(each) for each in found.problems]
    assert found.seen[1].facts is None


def test_a_python_that_is_not_there_is_told_by_its_path(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h0", "os.execvp('bash', ['bash', '-c', '/none/python -'])")
    (found,) = run_preflight(hosts(1), asked(tmp_path, python="/none/python")).problems
    assert str(found) == "h0 has no /none/python: install distrain there at the same path"


def test_a_host_that_connects_to_nobody_is_told(ssh: FakeCommands, tmp_path: Path) -> None:
    """Two names of this machine: what each listens at is its own, but the second one's is told wrong."""
    ssh.host("h1", "os.environ['SSH_CONNECTION'] = '127.0.0.1 1 192.0.2.1 22'")  # an address that is nobody's (RFC 5737)
    found = run_preflight(hosts(2), asked(tmp_path))
    says = [str(each) for each in found.problems]
    assert "h0 and h1 are the same machine: take one of them out of the hostfile" in says
    assert any(each.startswith("h0 does not reach h1: ") for each in says)
    assert [each.name for each in (tmp_path / "run").iterdir()] == []


def children(pid: int) -> list[int]:
    """Processes that a process has started, in any of its threads."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def wait_for(met: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE
    while not met():
        assert time.monotonic() < until, "the deadline passed"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_asking_in_a_line_and_nothing_stays_behind(number: signal.Signals, ssh: FakeCommands, tmp_path: Path) -> None:
    """h0 has answered, and left its note for h1, which hangs."""
    ssh.host("h1", "import time; time.sleep(1000)")
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    words = ["conf=quickstart", "cluster=2x1", "launch=deepspeed", f"launch.hostfile={tmp_path / 'hosts'}", f"log.dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS, "doctor", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: list(tmp_path.glob("quickstart/.preflight.*")) and len(children(process.pid)) == 1)
        (hung,) = children(process.pid)
        process.send_signal(number)
        said = process.communicate(timeout=DEADLINE)
    finally:
        end_child(process)
    assert (process.returncode, *said) == (128 + number, "", f"distrain: stopped by {number.name} while the hosts were asked\n")
    assert not Path(f"/proc/{hung}").exists()
    assert list((tmp_path / "quickstart").iterdir()) == []


def test_a_round_whose_ssh_has_gone_ends_and_removes_its_note(tmp_path: Path) -> None:
    """It would wait for a host that nobody has (RFC 5737)."""
    order = {"folder": str(tmp_path), "note": "note", "word": "w", "port": 0, "others": {"h9": ["192.0.2.1", 9, "none"]}}
    (tmp_path / "note").touch()
    process = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(rounds._program({"round": "links", "seconds": 1000, **order}).encode())
        process.stdin.close()
        time.sleep(0.2)
        assert process.poll() is None
        process.stdout.close()
        assert process.wait(DEADLINE) == 1
    finally:
        end_child(process)
    assert list(tmp_path.iterdir()) == []


def test_a_python_that_may_not_cross_is_refused_before_any_ssh(ssh: FakeCommands, tmp_path: Path) -> None:
    from distrain.trainer.spec.problem import Unreadable

    with pytest.raises(Unreadable, match="the Python /opt/my env/python holds ' '"):
        run_preflight(hosts(1), asked(tmp_path, python="/opt/my env/python"))
    assert ssh.calls == []


# On hosts that are namespaces


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHosts]:
    """Three hosts on one switch."""
    if why := virtual_hosts.missing_tools():
        pytest.skip(why)
    with VirtualHosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def doctor(network: VirtualHosts, runs: Path, *words: str) -> tuple[int | None, list[str]]:
    """What `distrain doctor` says on host0 of a run on all three: its status and lines."""
    file = network.hostfile(2)
    given = ["conf=quickstart", "cluster=3x2", "train.batch=48", "launch=deepspeed", f"launch.hostfile={file}", f"log.dir={runs}", *words]
    # on a temporary file system of its own, which others may cover
    process = network.hosts[0].start([sys.executable, "-m", "distrain", "doctor", *given], os.environ)
    said, _ = process.communicate()
    return process.returncode, re.sub(r"\n {2,9}", " ", said).splitlines()  # a line that goes on in the next is one


def test_hosts_reach_each_other_and_add_up(network: VirtualHosts, tmp_path: Path) -> None:
    status, said = doctor(network, tmp_path, "cluster.between={bandwidth: 1e15, latency: 1e-6}")
    assert status == 0, said
    assert [line.split()[0] for line in said[1:4]] == ["host0", "host1", "host2"]
    assert all(line.endswith("2 of 2") for line in said[1:4])
    assert said[4].startswith("note: an all-reduce of 16 MiB goes at ")
    assert said[5].startswith("an all-reduce between the hosts goes at ")
    assert list((tmp_path / "quickstart").iterdir()) == []
    assert [host.processes() for host in network.hosts] == [{}, {}, {}]


def test_a_cable_that_is_out_is_told(network: VirtualHosts, tmp_path: Path) -> None:
    network.link(2, "down")
    try:
        status, said = doctor(network, tmp_path)
    finally:
        network.link(2, "up")
    assert status == 1
    (line,) = [line for line in said if line.startswith("problem: ")]
    assert line.startswith("problem: host2 can't be asked: ssh: connect to host host2 port 22: ")


@pytest.mark.parametrize(
    ("number", "before", "after", "line"),
    [
        (
            1,
            "ip route add unreachable 10.77.0.12/32",
            "ip route del unreachable 10.77.0.12/32",
            "problem: host1 does not reach host2: No route to host: open the firewall between the hosts, all ports",
        ),
        (
            2,
            "mount -t tmpfs tmpfs {runs}",
            "umount {runs}",
            "does not see what host2 writes to {runs}/quickstart: set log.dir to a folder that all hosts share",
        ),
        (
            2,
            "mount -t tmpfs -o size=1m tmpfs {runs}",
            "umount {runs}",
            "problem: host2 has 1 MiB free in {runs}/quickstart, and a checkpoint is 37.3 MiB: make room, or set log.dir to another disk",
        ),
        (
            2,
            "mount -t tmpfs -o ro tmpfs {runs}",
            "umount {runs}",
            "problem: host2 can't write to {runs}/quickstart: Read-only file system: set log.dir to a folder that all hosts can write to",
        ),
    ],
    ids=["no way", "another disk", "a full disk", "a disk that can't be written"],
)
def test_a_host_that_differs_is_told(network: VirtualHosts, tmp_path: Path, number: int, before: str, after: str, line: str) -> None:
    network.hosts[number].run(*before.format(runs=tmp_path).split())
    try:
        status, said = doctor(network, tmp_path)
    finally:
        network.hosts[number].run(*after.format(runs=tmp_path).split())
    assert status == 1
    assert any(line.format(runs=tmp_path) in each for each in said), said


def test_a_run_that_does_not_want_to_ask_does_not(ssh: FakeCommands, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h0 slots=2\n")
    words = ["conf=quickstart", "launch=torchrun", f"launch.hostfile={tmp_path / 'hosts'}", "launch.preflight=false", "--launch"]
    done = subprocess.run([sys.executable, "-m", "distrain", "show", *words], capture_output=True, text=True)
    assert (done.returncode, ssh.calls) == (0, [])
