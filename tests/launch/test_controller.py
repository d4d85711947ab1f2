"""The controller survives hosts that hang, too few open files and Ctrl-C, and kills only its own processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distrain.tests.fakes.deadline import DEADLINE, wait_for
from distrain.tests.fakes.path_commands import SSH, FakeCommands
from distrain.tests.fakes.processes import children
from distrain.trainer.launch import multi_host
from distrain.trainer.launch.commands.command import Command, LaunchRequest
from distrain.trainer.launch.commands.deepspeed import PROGRAM_MODULE, deepspeed_commands
from distrain.trainer.launch.hosts import upload
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.hosts.upload import reachable_hosts
from distrain.trainer.launch.multi_host import launch_remote_ranks
from distrain.trainer.launch.supervisor.outcome import Outcome
from distrain.trainer.system import open_files
from distrain.trainer.system.child_process import end_child

# Hosts


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """An ssh that runs its command on this machine, whatever the host's name."""
    made = FakeCommands(tmp_path / "stand-ins")
    made.put("ssh", SSH)
    monkeypatch.setenv("PATH", made.path())
    return made


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that no ssh outlives a test."""
    before = children(os.getpid())
    yield
    assert children(os.getpid()) <= before


def were_called(commands: FakeCommands, times: int) -> bool:
    """Return whether they were called so often; a call may be half written."""
    try:
        return len(commands.calls) == times
    except ValueError:
        return False


def run_outcome(folder: Path, *names: str, launcher: tuple[str, ...] = ("true",)) -> Outcome:
    """Return the outcome of a run over hosts of these names, one slot each."""
    launch = multi_host.MultiHostLaunch(
        hosts=[Host(name=name, slots=(0,)) for name in names],
        folder=folder / "run",
        launcher=Command(argv=launcher, environment={"WORLD_SIZE": str(len(names))}),
        files=[],
        texts={"run.json": "{}"},
        command=["true"],
        environment=os.environ,
        forwarded={"NCCL_TOLD": "a"},
    )
    return launch_remote_ranks(launch, show=lambda line: None, grace=1.0)


HANGS = "import time; time.sleep(1000)"
LONGER = (2.0, 20.0, 200.0)  # seconds for a host that hangs, of which the first is enough unless the machine is busy


def test_a_host_that_accepts_ssh_and_hangs_is_not_reachable(ssh: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh.host("h1", HANGS)
    for seconds in LONGER:
        monkeypatch.setattr(upload, "HOST_SECONDS", seconds)
        if (found := reachable_hosts(("h0", "h1", "h2"))) == ("h0", "h2"):
            break
    assert found == ("h0", "h2")


def test_a_host_that_hangs_during_the_upload_is_named_and_the_others_roll_back(
    ssh: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh.host("h1", """command = 'echo \\\'{"connection": "127.0.0.1 1 127.0.0.1 22"}\\\'; exec sleep 1000'""")
    for seconds in LONGER:
        monkeypatch.setattr(upload, "HOST_SECONDS", seconds)
        outcome = run_outcome(folder := tmp_path / f"{seconds:.0f}", "h0", "h1")
        if outcome.hosts == ("h1",) and (folder / "run" / "launch").is_dir():
            break
    assert (outcome.status, outcome.says, outcome.hosts) == (1, f"h1 can't be used: no answer in {seconds:.0f} s", ("h1",))
    assert (folder / "run" / "launch").is_dir()
    assert not (folder / "run" / "launch" / "join_token").exists()


def test_an_ssh_that_is_killed_is_reported(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h1", "os.kill(os.getpid(), 15)")
    outcome = run_outcome(tmp_path, "h0", "h1")
    assert (outcome.status, outcome.says, outcome.hosts) == (1, "h1 can't be used: ssh was killed by SIGTERM", ("h1",))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_attempt_whose_host_hangs(number: signal.Signals, ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.host("h1", HANGS)

    def send() -> None:
        wait_for(lambda: were_called(ssh, 2))
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        outcome = run_outcome(tmp_path, "h0", "h1")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert (outcome.status, outcome.says) == (128 + number, f"stopped by {number.name} before the ranks had started")
    assert outcome.stop_requested


def test_ctrl_c_while_hosts_are_checked_is_not_lost(ssh: FakeCommands) -> None:
    ssh.host("h0", HANGS)

    def send() -> None:
        wait_for(lambda: were_called(ssh, 1))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            reachable_hosts(("h0",))
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_an_ssh_that_can_not_be_started_ends_the_others(ssh: FakeCommands) -> None:
    """No file is left for the second one's pipes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(1000)) - set(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[9], before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"), upload.connect_hosts(("h0", "h1")):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert reachable_hosts(()) == ()


def test_the_upload_of_a_controller_that_dies_is_rolled_back(ssh: FakeCommands, tmp_path: Path) -> None:
    token, host = tmp_path / "run" / "launch" / "join_token", upload.Connection("h0")
    host.identify()
    host.upload(tmp_path / "run", {"launch/join_token": "secret"})
    assert token.read_text() == "secret"
    assert host.ssh.process.stdin is not None
    host.ssh.process.stdin.close()
    wait_for(lambda: not token.exists())
    host.ssh.close()


def test_a_controller_that_dies_before_all_ranks_have_registered_leaves_no_join_token(ssh: FakeCommands, tmp_path: Path) -> None:
    program = "import sys, pathlib; from distrain.tests.launch.test_controller import run_outcome\n"
    program += "run_outcome(pathlib.Path(sys.argv[1]), 'h0', 'h1', launcher=('sleep', '1000'))"
    controller = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    token, log = tmp_path / "run" / "launch" / "join_token", tmp_path / "run" / "ranks" / "launcher.log"
    try:
        wait_for(log.exists)
        assert token.stat().st_mode & 0o777 == 0o600
    finally:
        end_child(controller)
    wait_for(lambda: not token.exists())


def test_an_attempt_without_registrations_leaves_no_join_token(ssh: FakeCommands, tmp_path: Path) -> None:
    assert run_outcome(tmp_path, "h0", "h1").status == 1
    assert not list(tmp_path.rglob("join_token"))
    assert not list(tmp_path.rglob("run.json"))


BOOTSTRAP = """
import os, subprocess, sys
bootstrap = [sys.executable, "-m", "distrain.trainer.launch.agent.bootstrap", sys.argv[1] + "/run/run.json"]
subprocess.run(bootstrap, env={**os.environ, "RANK": "0", "LOCAL_RANK": "0"})
"""


def test_the_host_whose_rank_does_not_register_is_named(ssh: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expire() -> None:
        wait_for((tmp_path / "run" / "ranks" / "0.log").exists)  # the agent opens it, after the controller has accepted its registration
        monkeypatch.setattr(multi_host, "REGISTER_TIMEOUT", 0.0)

    thread = threading.Thread(target=expire)
    thread.start()
    outcome = run_outcome(tmp_path, "h0", "h1", launcher=(sys.executable, "-c", BOOTSTRAP, str(tmp_path)))
    thread.join()
    assert outcome.says.startswith("rank 1 on h1 (device 0) did not register within 0 s")
    assert (outcome.status, outcome.rank, outcome.hosts) == (1, 1, ("h1",))


def test_a_launcher_that_starts_no_bootstrap_is_no_fault_of_a_host(ssh: FakeCommands, tmp_path: Path) -> None:
    outcome = run_outcome(tmp_path, "h0", "h1")
    assert outcome.says.startswith("rank 0 on h0 (device 0), 1 on h1 (device 0) did not register before DeepSpeed's launcher ended")
    assert (outcome.status, outcome.hosts) == (1, ())


# Open files


def limited_output(soft: int, hard: int, program: str) -> str:
    """Return what a program prints under these limits on open files."""
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    return subprocess.run([sys.executable, "-c", limit + program], check=True, capture_output=True, text=True).stdout.strip()


def test_the_limit_is_raised_to_what_is_needed_and_no_further() -> None:
    program = (
        "from distrain.trainer.system.open_files import raise_limit\nprint(raise_limit(700), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert limited_output(300, 1000, program) == "None (700, 1000)"
    assert limited_output(800, 1000, program) == "None (800, 1000)"


def test_a_run_that_needs_more_open_files_than_allowed_is_refused_in_a_line(ssh: FakeCommands, tmp_path: Path) -> None:
    ssh.put("pdsh", SSH)
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    arguments = [
        "fit",
        "conf=quickstart",
        "cluster=2x1",
        "launch=deepspeed",
        f"launch.hostfile={tmp_path / 'hosts'}",
        f"log.dir={tmp_path}",
    ]
    program = f"import sys\nfrom distrain.cli.app import command\nsys.stderr = sys.stdout\nprint(command({arguments!r}))"
    *_, line, status = limited_output(200, 200, program).splitlines()
    needed = open_files.needed_files(2, 2)
    assert line.startswith(f"distrain: a run of this size needs {needed} open files where it is launched, and the limit there is 200: ")
    assert (status, {path.name for path in tmp_path.iterdir()}) == ("1", {"hosts", "stand-ins"})
    assert ssh.calls == []


def test_hosts_that_need_too_many_ssh_connections_are_not_asked(ssh: FakeCommands) -> None:
    program = """
from pathlib import Path
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.preflight.preflight import run_preflight
from distrain.trainer.launch.preflight.checks import HostRequirements
hosts = [Host(name=f"h{number}", slots=(0,)) for number in range(100)]
print(*run_preflight(hosts, HostRequirements(python="python", folder=Path("run"), kind="cpu", save=0, keep=1)).problems)
"""
    assert limited_output(200, 200, program).startswith(
        f"a run of this size needs {open_files.needed_files(0, 100)} open files where it is launched"
    )
    assert ssh.calls == []


# DeepSpeed's launcher


def test_a_program_of_deepspeeds_launcher_gets_its_arguments_and_collects_no_garbage(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import gc, sys\nprint(gc.isenabled(), __name__, sys.argv[1:])\n")
    command = [sys.executable, "-m", PROGRAM_MODULE, "program", "--hostfile", "a b"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False __main__ ['--hostfile', 'a b']\n", "")


def test_deepspeeds_runner_kills_no_process_by_name_on_the_hosts(tmp_path: Path) -> None:
    """Unchanged, it would run `pkill -f` on every host when it is stopped, which ends the launchers of all runs."""
    stand_ins = FakeCommands(tmp_path / "stand-ins")
    stand_ins.put("pdsh", "import time; 'deepspeed.launcher.launch' in sys.argv and time.sleep(1000)\n")
    folder = tmp_path / "a:run"
    request = LaunchRequest(
        module="distrain.trainer.launch.agent.bootstrap",
        arguments=(f"{folder}/run.json",),
        python=sys.executable,
        folder=folder,
        address="h0",
        port=2,
    )
    made = deepspeed_commands(request, [Host(name=name, slots=(0,)) for name in ("h0", "pkill")], os.environ, (), "pdsh")
    for file in made.files:
        multi_host._write(file)
    (command,) = made.commands
    environment = command.full_environment({**os.environ, "PATH": stand_ins.path(), "DS_ACCELERATOR": "cpu"})
    runner = subprocess.Popen(command.argv, cwd=command.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: were_called(stand_ins, 1))
        runner.send_signal(signal.SIGTERM)
        runner.communicate(timeout=DEADLINE)
    finally:
        end_child(runner)
    (call,) = stand_ins.calls
    assert call["argv"][1:6] == ["-S", "-f", "1024", "-w", "h0,pkill"]
    assert call["environment"]["PATH"] == stand_ins.path()
