"""The preflight asks all hosts before anything starts: each problem of a host is named with its fix, and sound hosts pass."""

from __future__ import annotations

import copy
import importlib.metadata
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.hosts_page import preflight_lines
from distrain.tests.fakes.deadline import DEADLINE, wait_for
from distrain.tests.fakes.path_commands import SSH, FakeCommands
from distrain.tests.fakes.processes import alive, children, until
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.hosts.needed_packages import needed_packages
from distrain.trainer.launch.preflight import preflight as rounds
from distrain.trainer.launch.preflight import preflight_host
from distrain.trainer.launch.preflight.checks import HostRequirements, HostState, host_notes, host_problems
from distrain.trainer.launch.preflight.preflight import host_requirements, run_preflight
from distrain.trainer.launch.preflight.spares import choose_hosts
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.system.child_process import end_child

NAMES = ("h0", "h1", "h2")
GIB = 1 << 30
# The command with the signal handlers of a terminal, whatever those of the tests are.
COMMAND = """
import signal
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
from distrain.cli.app import main
main()
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """A fake ssh that runs its command on this machine."""
    made = FakeCommands(tmp_path / "stand-ins")
    made.put("ssh", SSH)
    monkeypatch.setenv("PATH", made.path())
    monkeypatch.setattr(rounds, "FACTS_SECONDS", 20.0)
    monkeypatch.setattr(rounds, "LINKS_SECONDS", 6.0)
    return made


def requirements(folder: Path, **more: Any) -> HostRequirements:
    return HostRequirements(**{"python": sys.executable, "folder": folder / "run", "kind": "cpu", "save": 1000, "keep": 2, **more})


# Answers of hosts, and the problems in them


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of a host without problems: this machine, with 8 GPUs."""
    said = preflight_host.host_facts(
        {"kind": "cpu", "folder": str(tmp_path_factory.mktemp("run")), "note": "note", "packages": ["transformers"]}
    )
    return said | {"cards": [[index, 0, 80 * GIB] for index in range(8)], "folder": {"free": 100 * GIB}, "cores": 4}


def host_states(answer: dict[str, Any], *changes: Callable[[dict[str, Any]], object], slots: int = 8) -> list[HostState]:
    """Three hosts with this answer; `changes` are applied to the first of them, one each."""
    made = []
    for number in range(3):
        facts = copy.deepcopy(answer) | {"home": [f"h{number}", "boot"]}
        for change in changes[number : number + 1]:
            change(facts)
        links = {"reached": {name: 0.001 for name in NAMES if name != f"h{number}"}, "failed": {}, "unseen": []}
        made.append(HostState(host=Host(name=f"h{number}", slots=tuple(range(slots))), facts=facts, links=links))
    return made


def problem_texts(hosts: list[HostState], **more: Any) -> list[str]:
    return [str(each) for each in host_problems(hosts, requirements(Path("/runs"), **more))]


def test_hosts_without_problems_pass(answer: dict[str, Any]) -> None:
    assert problem_texts(host_states(answer)) == []
    assert problem_texts(host_states(answer), kind="cuda") == []


# fmt: off
LACKS: dict[str, tuple[Callable[[dict[str, Any]], object], str, dict[str, Any]]] = {
    "a package": (lambda facts: facts["versions"].update(deepspeed=""),
                  f"h0 has no deepspeed: install deepspeed {preflight_host.package_versions()['deepspeed']} there", {}),
    "a package of this run": (lambda facts: facts["versions"].update(transformers=""),
                              f"h0 has no transformers: install transformers {importlib.metadata.version('transformers')} there",
                              {"packages": ("transformers",)}),
    "distrain": (lambda facts: facts["versions"].update(distrain="", code=""), "h0 has no distrain: install ", {}),
    "another torch": (lambda facts: facts["versions"].update(torch="2.0.0"),
                      f"h0 has torch 2.0.0, this machine {preflight_host.package_versions()['torch']}: install the same on all hosts", {}),
    "another Python": (lambda facts: facts["versions"].update(python="3.8.1"),
                       f"h0 has python 3.8, this machine {sys.version_info[0]}.{sys.version_info[1]}: install the same", {}),
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
def test_a_problem_of_a_host_is_named_with_its_fix(name: str, answer: dict[str, Any]) -> None:
    change, line, more = LACKS[name]
    (found,) = problem_texts(host_states(answer, change), **more)
    assert found.startswith(line)


def test_hosts_that_do_not_reach_each_other_are_named_once(answer: dict[str, Any]) -> None:
    one = host_states(answer)
    one[0].links = {"reached": {"h1": 0.1}, "failed": {"h2": "timed out"}, "unseen": []}
    assert problem_texts(one) == ["h0 does not reach h2: timed out: open the firewall between the hosts, all ports"]
    none = host_states(answer)
    for each in none[:2]:
        each.links = {"reached": {}, "failed": {"h2": "timed out"}, "unseen": []}
    assert problem_texts(none) == ["h2 is reached by no other host: open its firewall to the other hosts, all ports"]


def test_a_run_folder_that_is_not_shared_is_reported(answer: dict[str, Any]) -> None:
    hosts = host_states(answer)
    hosts[1].links = {"reached": {"h0": 0.1, "h2": 0.1}, "failed": {}, "unseen": ["h0"]}
    assert problem_texts(hosts) == ["h1 does not see what h0 writes to /runs/run: set log.dir to a folder that all hosts share"]


def test_minor_findings_are_notes(answer: dict[str, Any]) -> None:
    hosts = host_states(answer, lambda facts: facts.update(folder={"free": 2500}))
    hosts[1].drift, hosts[2].drift = 7.0, -90.0
    assert list(host_notes(hosts, requirements(Path("/runs"), rate=50e9), 20e9)) == [
        "h0 has room for 2 checkpoints, and the run needs 3 while it saves one",
        "the clock of h1 is 7 s ahead of this machine's",
        "the clock of h2 is 90 s behind this machine's",
        "an all-reduce of 16.0 MiB between hosts runs at 20 GB/s, and cluster.between declares 50 GB/s a device",
    ]


# Spares: h0 and h1 are a run's hosts, h2 is its spare

TORCH = f"has torch 2.0.0, this machine {preflight_host.package_versions()['torch']}"
# fmt: off
CHOICES: dict[str, tuple[str, str, str, dict[str, str], dict[str, str]]] = {
    # hosts with another torch; pairs without a link; pairs without a shared folder; who is left out, and which spare is useless, and why
    "nothing is wrong":                       ("",      "",      "",      {},                    {}),
    "a host has other versions":              ("h1",    "",      "",      {"h1": TORCH},         {}),
    "the first host has other versions":      ("h0",    "",      "",      {"h0": TORCH},         {}),
    "a spare has other versions":             ("h2",    "",      "",      {},                    {"h2": TORCH}),
    "a host and the spare have":              ("h1 h2", "",      "",      {"h1": TORCH},         {"h2": TORCH}),
    "of two hosts that don't reach each other the later goes": ("", "01", "", {"h1": "h0 does not reach h1"}, {}),
    "the one that reaches no spare either goes": ("", "01 02",   "",      {"h0": "h0 does not reach h1"}, {}),
    "a spare does not reach a host":          ("",      "12",    "",      {},                    {"h2": "h1 does not reach h2"}),
    "a host that is left out needs no link":  ("h1",    "12 21", "",      {"h1": TORCH},         {}),
    "a spare that a needed host can't reach": ("h1",    "02",    "",      {"h1": TORCH},         {"h2": "h0 does not reach h2"}),
    "a host has a disk of its own":           ("",      "",      "01 12", {"h1": "h0 does not see what h1 writes to /runs"}, {}),
    "a spare has a disk of its own":          ("",      "",      "02 12", {},                    {"h2": "h0 does not see what h2"}),
}
# fmt: on


@pytest.mark.parametrize("name", CHOICES)
def test_spares_take_the_place_of_hosts_that_are_unusable(name: str, answer: dict[str, Any]) -> None:
    other, unlinked, unshared, left_out, useless = CHOICES[name]
    states = host_states(answer)
    for each in states:
        assert each.facts
        assert each.links
        if each.name in other:
            each.facts["versions"] = each.facts["versions"] | {"torch": "2.0.0"}
        for pair in unlinked.split():
            if each.name == f"h{pair[0]}":
                each.links["failed"][f"h{pair[1]}"] = "timed out"
        for pair in unshared.split():
            if each.name == f"h{pair[0]}":
                each.links["unseen"].append(f"h{pair[1]}")
    choice = choose_hosts(states[:2], states[2:], requirements(Path("/runs")))
    sound = [host for host in NAMES if host not in {**left_out, **useless}]
    assert [host.name for host in choice.used] == sound[:2]
    for found, expected in ((choice.left_out, left_out), (choice.useless, useless)):
        assert found.keys() == expected.keys()
        assert all(why in found[host] for host, why in expected.items())


def test_two_names_of_one_machine_are_not_used_together(answer: dict[str, Any]) -> None:
    states = host_states(answer, lambda facts: facts.update(home=["h2", "boot"]))
    choice = choose_hosts(states[:2], states[2:], requirements(Path("/runs")))
    assert ([host.name for host in choice.used], choice.useless) == (["h0", "h1"], {"h2": "h0 and h2 are the same machine"})


# The rounds, over the fake ssh


def hosts(count: int) -> list[Host]:
    return [Host(name=name, slots=(0, 1)) for name in NAMES[:count]]


def test_the_probe_is_sent_to_the_host_and_leaves_nothing_there(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h0", "print('Welcome to h0', flush=True)")
    found = run_preflight(hosts(1), requirements(tmp_path, packages=("transformers",)))
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
def test_a_host_that_does_not_answer_is_reported_and_the_others_are_asked(
    does: str, line: str, ssh: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in does:
        monkeypatch.setattr(rounds, "FACTS_SECONDS", 2.0)
        monkeypatch.setattr(rounds, "SSH_SECONDS", 1.0)
    ssh.host("h1", does)
    found = run_preflight(hosts(2), requirements(tmp_path))
    assert line in [str(each) for each in found.problems]
    assert found.seen[1].facts is None


def test_a_run_needs_the_packages_that_its_ranks_import() -> None:
    hybrid = load_recipe("qwen3_next_80b", ["train.linear_attention=fla"])
    assert host_requirements(hybrid, make_plan(hybrid)).packages == ("fla-core", "triton", "einops")
    plain = load_recipe("quickstart")
    assert needed_packages(plain) == ()
    assert needed_packages(replace(plain, model=replace(plain.model, family="hf"))) == ("transformers",)


def test_a_missing_python_is_named_by_its_path(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h0", "os.execvp('bash', ['bash', '-c', '/none/python -'])")
    (found,) = run_preflight(hosts(1), requirements(tmp_path, python="/none/python")).problems
    assert str(found) == "h0 has no /none/python: install distrain there at the same path"


def test_a_host_that_is_not_reached_is_named(ssh: FakeCommands, tmp_path: Path) -> None:
    """Two names of this machine; the address that the second one reports is wrong."""
    ssh.host("h1", "os.environ['SSH_CONNECTION'] = '127.0.0.1 1 192.0.2.1 22'")  # an address of no host (RFC 5737)
    found = run_preflight(hosts(2), requirements(tmp_path))
    says = [str(each) for each in found.problems]
    assert "h0 and h1 are the same machine: take one of them out of the hostfile" in says
    assert any(each.startswith("h0 does not reach h1: ") for each in says)
    assert [each.name for each in (tmp_path / "run").iterdir()] == []


REFUSES = "sys.exit('No route to host')"


def test_a_spare_takes_the_place_of_a_host_that_does_not_answer(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h0", REFUSES)
    found = run_preflight(hosts(1), requirements(tmp_path), hosts(2)[1:])
    assert (found.problems, [host.name for host in found.hosts]) == ((), ["h1"])
    assert found.notes == ("h0 is left out (h0 can't be asked: No route to host): spare h1 takes its place",)
    lines = list(preflight_lines(found, {"h1"}))
    assert [line.split("  ")[0] for line in lines[1:3]] == ["h0", "h1 (spare)"]
    assert " ".join(" ".join(lines[3:]).split()) == f"note: {found.notes[0]}"


def test_a_spare_that_can_not_be_used_is_a_note(ssh: FakeCommands, tmp_path: Path) -> None:
    """Both names are this machine."""
    found = run_preflight(hosts(1), requirements(tmp_path), hosts(2)[1:])
    assert (found.problems, [host.name for host in found.hosts]) == ((), ["h0"])
    assert found.notes == ("spare h1 can't be used: h0 and h1 are the same machine",)


def test_without_a_usable_spare_the_problems_of_the_hosts_alone_refuse_the_run(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h0", REFUSES)
    ssh.host("h1", REFUSES)
    found = run_preflight(hosts(1), requirements(tmp_path), hosts(2)[1:])
    assert [each.says for each in found.problems] == ["h0 can't be asked: No route to host"]
    assert found.notes == ("spare h1 can't be used: h1 can't be asked: No route to host",)
    assert [host.name for host in found.hosts] == ["h0"]


LIMITED = """
import sys
from pathlib import Path
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.preflight.checks import HostRequirements
from distrain.trainer.launch.preflight.preflight import run_preflight
needs = HostRequirements(python=sys.executable, folder=None, kind="cpu", save=0, keep=1)
found = run_preflight([Host(name="h0", slots=(0,))], needs, [Host(name="h1", slots=(0,))])
print(*[each.rule for each in found.problems], *[host.name for host in found.hosts], *found.notes)
"""


def test_a_limit_on_open_files_is_a_problem_with_spares_too(ssh: FakeCommands) -> None:
    limited = subprocess.run(["bash", "-c", 'ulimit -n 100; exec "$@"', "-", sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert (limited.stdout, ssh.calls) == ("files h0\n", []), limited.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_preflight_with_one_line_and_leaves_nothing(number: signal.Signals, ssh: FakeCommands, tmp_path: Path) -> None:
    """h0 has answered and left its note for h1, which hangs."""
    ssh.host("h1", "import time; time.sleep(1000)")
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    words = ["conf=quickstart", "cluster=2x1", "launch=deepspeed", f"launch.hostfile={tmp_path / 'hosts'}", f"log.dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "doctor", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: len(ssh.calls) == 2 and list(tmp_path.glob("quickstart/.preflight.*")))
        (hung,) = until(lambda: len(left := alive(children(process.pid))) == 1 and left)
        process.send_signal(number)
        said = process.communicate(timeout=DEADLINE)
    finally:
        end_child(process)
    assert (process.returncode, *said) == (128 + number, "", f"distrain: stopped by {number.name} while the hosts were asked\n")
    assert not Path(f"/proc/{hung}").exists()
    wait_for(lambda: not list((tmp_path / "quickstart").iterdir()))  # a host removes its note itself, once it sees that ssh has ended


def test_a_round_whose_ssh_has_ended_exits_and_removes_its_note(tmp_path: Path) -> None:
    """It waits for the address of no host (RFC 5737)."""
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


def test_a_python_path_that_is_not_shell_safe_is_refused_before_any_ssh(ssh: FakeCommands, tmp_path: Path) -> None:
    from distrain.trainer.spec.problem import Unreadable

    with pytest.raises(Unreadable, match="the Python /opt/my env/python contains ' '"):
        run_preflight(hosts(1), requirements(tmp_path, python="/opt/my env/python"))
    assert ssh.calls == []


def test_no_host_is_asked_with_preflight_false(ssh: FakeCommands, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h0 slots=2\n")
    words = ["conf=quickstart", "launch=torchrun", f"launch.hostfile={tmp_path / 'hosts'}", "launch.preflight=false", "--launch"]
    done = subprocess.run([sys.executable, "-m", "distrain", "show", *words], capture_output=True, text=True)
    assert (done.returncode, ssh.calls) == (0, [])
