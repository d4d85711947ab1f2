"""The process that launches a run outlives its terminal, hosts that hang, too few files and a Ctrl-C at any time; and ends only its own."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distrain.tests.fakes.path_commands import SSH, StandIns
from distrain.trainer.launch import multi_host as over_hosts
from distrain.trainer.launch.commands.deepspeed import Command, Start, deepspeed
from distrain.trainer.launch.hosts import upload
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.hosts.upload import reachable
from distrain.trainer.launch.multi_host import launch_hosts
from distrain.trainer.launch.supervisor.outcome import Ended
from distrain.trainer.system import open_files
from distrain.trainer.system.end_child import end_child

DEADLINE = 60.0  # seconds, for what takes one on an idle machine


def wait_for(met: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE
    while not met():
        assert time.monotonic() < until, "the deadline passed"
        time.sleep(0.02)


# Where it prints

# Two ranks of ten lines, which save when they are told to; the verb shows them as `fit` does.
TALKS = """
import os, sys
from pathlib import Path
from distrain.cli.pages.console import live, show, tell
from distrain.trainer.launch.single_host import launch
rank = '''
import os, signal, sys, time
from distrain.trainer.launch.rank.channel import Talk
talk, rank = Talk.from_environment(), os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: (open(f"saved{rank}", "w"), os._exit(75)))
open(f"begun{rank}", "w")
while not os.path.exists("begun0") or not os.path.exists("begun1"): time.sleep(0.02)
for step in range(10):
    talk.beat(step)
    talk.status(f"step {step}")
    talk.say(f"step {step}")
    while step == 5 and os.path.exists("wait"): time.sleep(0.02)
talk.done()
'''
ended = launch([sys.executable, "-c", rank], ranks=2, folder=Path(), environment=os.environ, show=show, live=live, grace=2.0)
tell(ended.says or "trained")
sys.exit(ended.status)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr", "both", "closed"])
def test_a_run_whose_lines_can_not_be_written_trains(stream: str, tmp_path: Path) -> None:
    """A full disk is /dev/full here."""
    redirect = {"stdout": ">/dev/full", "stderr": "2>/dev/full", "both": ">/dev/full 2>&1", "closed": ">&- 2>&-"}[stream]
    words = ["bash", "-c", f'exec "$@" {redirect}', "bash", sys.executable, "-c", TALKS]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0
    if stream == "stdout":
        assert done.stderr == "distrain: can't write to stdout: No space left on device; what it would say is dropped\ntrained\n"


def test_a_run_whose_reader_has_gone_trains(tmp_path: Path) -> None:
    words = ["bash", "-c", '"$@" | head -n 2; exit ${PIPESTATUS[0]}', "bash", sys.executable, "-c", TALKS]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "step 0\nstep 1\n", "trained\n")


def test_a_run_whose_terminal_hangs_up_saves(tmp_path: Path) -> None:
    """As when the ssh in which it was typed ends: SIGHUP, and from then on nothing can be written."""
    (tmp_path / "wait").touch()
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.chdir(tmp_path)
            os.execv(sys.executable, [sys.executable, "-c", TALKS])
        finally:
            os._exit(1)
    said = b""
    while b"step 5" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_fit_itself_trains_where_its_lines_can_not_be_written(tmp_path: Path) -> None:
    words = ["conf=quickstart", "model=tiny", "model.layers=1", "data=synthetic", "cluster=1x1", "parallel.dp=auto", "train.batch=2"]
    words += ["train.microbatch=2", "train.seq=8", "train.steps=1", "optim.warmup=0", "train.evaluate.every=0", f"log.dir={tmp_path}"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "distrain", "fit", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        0,
        "distrain: can't write to stdout: No space left on device; what it would say is dropped\n",
    )
    assert list(tmp_path.glob("quickstart/checkpoints/step_*"))


@pytest.mark.parametrize("package", ["typer", "msgspec", "distrain.cli.config.load"])
def test_ctrl_c_while_a_command_is_imported_is_no_traceback(package: str) -> None:
    program = f"""
import runpy, sys
class Interrupted:
    def find_spec(name, *_):
        if name == {package!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted)
sys.argv = ["distrain", "plan", "conf=quickstart"]
runpy.run_module("distrain", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# Hosts


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """An ssh that runs its command here, whatever the host's name."""
    made = StandIns(tmp_path / "stand-ins")
    made.put("ssh", SSH)
    monkeypatch.setenv("PATH", made.path())
    return made


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No ssh outlives a test."""
    before = children()
    yield
    assert set(children()) <= set(before)


def children() -> list[int]:
    return [int(child) for file in Path("/proc/self/task").glob("*/children") for child in file.read_text().split()]


def called(commands: StandIns, times: int) -> bool:
    """Whether they were called so often; a call may be half written."""
    try:
        return len(commands.calls) == times
    except ValueError:
        return False


def started(folder: Path, *names: str, launcher: tuple[str, ...] = ("true",)) -> Ended:
    """How a run over such hosts, one slot each, ends."""
    start = over_hosts.Start(
        hosts=[Host(name=name, slots=(0,)) for name in names],
        folder=folder / "run",
        launcher=Command(words=launcher, environment={"WORLD_SIZE": str(len(names))}),
        files=[],
        texts={"run.json": "{}"},
        command=["true"],
        environment=os.environ,
        handed={"NCCL_TOLD": "a"},
    )
    return launch_hosts(start, show=lambda line: None, grace=1.0)


HANGS = "import time; time.sleep(1000)"


def test_a_host_that_takes_an_ssh_and_hangs_is_not_reachable(ssh: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE", 2.0)
    ssh.host("h1", HANGS)
    assert reachable(("h0", "h1", "h2")) == ("h0", "h2")


def test_a_host_that_hangs_as_it_writes_is_named_and_the_others_keep_nothing(
    ssh: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PATIENCE", 2.0)
    ssh.host("h1", """command = 'echo \\\'{"connection": "127.0.0.1 1 127.0.0.1 22"}\\\'; exec sleep 1000'""")
    ended = started(tmp_path, "h0", "h1")
    assert (ended.status, ended.says, ended.hosts) == (1, "h1 can't be used: no answer in 2 s", ("h1",))
    assert (tmp_path / "run" / "launch").is_dir()
    assert not (tmp_path / "run" / "launch" / "ticket").exists()


def test_an_ssh_that_is_killed_is_told(ssh: StandIns, tmp_path: Path) -> None:
    ssh.host("h1", "os.kill(os.getpid(), 15)")
    ended = started(tmp_path, "h0", "h1")
    assert (ended.status, ended.says, ended.hosts) == (1, "h1 can't be used: ssh was killed by SIGTERM", ("h1",))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start_whose_host_hangs(number: signal.Signals, ssh: StandIns, tmp_path: Path) -> None:
    ssh.host("h1", HANGS)

    def send() -> None:
        wait_for(lambda: called(ssh, 2))
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        ended = started(tmp_path, "h0", "h1")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert (ended.status, ended.says) == (128 + number, f"stopped by {number.name} before the ranks had started")
    assert ended.asked


def test_ctrl_c_while_it_is_asked_which_hosts_are_left_is_not_lost(ssh: StandIns) -> None:
    ssh.host("h0", HANGS)

    def send() -> None:
        wait_for(lambda: called(ssh, 1))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            reachable(("h0",))
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_an_ssh_that_can_not_be_started_leaves_none_that_was(ssh: StandIns) -> None:
    """No file is left for the second one's pipes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(1000)) - set(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[9], before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"), upload.land(("h0", "h1")):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert reachable(()) == ()


def test_what_a_head_that_has_died_wrote_on_a_host_is_removed_there(ssh: StandIns, tmp_path: Path) -> None:
    there, host = tmp_path / "run" / "launch" / "ticket", upload.Landed("h0")
    host.meet()
    host.lay(tmp_path / "run", {"launch/ticket": "secret"})
    assert there.read_text() == "secret"
    assert host.ssh.process.stdin is not None
    host.ssh.process.stdin.close()
    wait_for(lambda: not there.exists())
    host.ssh.close()


def test_a_head_that_dies_before_all_ranks_have_come_leaves_no_ticket(ssh: StandIns, tmp_path: Path) -> None:
    words = "import sys, pathlib; from distrain.tests.launch.test_controller import started\n"
    words += "started(pathlib.Path(sys.argv[1]), 'h0', 'h1', launcher=('sleep', '1000'))"
    head = subprocess.Popen([sys.executable, "-c", words, str(tmp_path)])
    ticket, log = tmp_path / "run" / "launch" / "ticket", tmp_path / "run" / "ranks" / "launcher.log"
    try:
        wait_for(log.exists)
        assert ticket.stat().st_mode & 0o777 == 0o600
    finally:
        end_child(head)
    wait_for(lambda: not ticket.exists())


def test_a_start_to_which_nobody_comes_leaves_no_ticket(ssh: StandIns, tmp_path: Path) -> None:
    assert started(tmp_path, "h0", "h1").status == 1
    assert not list(tmp_path.rglob("ticket"))
    assert not list(tmp_path.rglob("run.json"))


GUEST = """
import os, subprocess, sys
guest = [sys.executable, "-m", "distrain.trainer.launch.agent.bootstrap", sys.argv[1] + "/run/run.json"]
subprocess.run(guest, env={**os.environ, "RANK": "0", "LOCAL_RANK": "0"})
"""


def test_the_host_that_does_not_bring_its_rank_is_named(ssh: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hurry() -> None:
        wait_for((tmp_path / "run" / "ranks" / "0.log").exists)  # its keeper's, who comes when the head knows this rank
        monkeypatch.setattr(over_hosts, "COME", 0.0)

    thread = threading.Thread(target=hurry)
    thread.start()
    ended = started(tmp_path, "h0", "h1", launcher=(sys.executable, "-c", GUEST, str(tmp_path)))
    thread.join()
    assert ended.says.startswith("DeepSpeed's launcher did not bring rank 1 on h1 (device 0) within 0 s")
    assert (ended.status, ended.rank, ended.hosts) == (1, 1, ("h1",))


def test_a_launcher_that_brings_nobody_is_no_host_s_fault(ssh: StandIns, tmp_path: Path) -> None:
    ended = started(tmp_path, "h0", "h1")
    assert ended.says.startswith("DeepSpeed's launcher did not bring rank 0 on h0 (device 0), 1 on h1 (device 0) before it ended")
    assert (ended.status, ended.hosts) == (1, ())


# Files


def limited(soft: int, hard: int, program: str) -> str:
    """What a program prints of which so many files are allowed."""
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    return subprocess.run([sys.executable, "-c", limit + program], check=True, capture_output=True, text=True).stdout.strip()


def test_a_head_has_as_many_files_as_it_needs_allowed_and_no_more() -> None:
    said = "from distrain.trainer.system.open_files import allowed\nprint(allowed(700), resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert limited(300, 1000, said) == "None (700, 1000)"
    assert limited(800, 1000, said) == "None (800, 1000)"


def test_a_run_that_wants_more_files_than_are_allowed_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    words = ["fit", "conf=quickstart", "cluster=2x1", "launch=deepspeed", f"launch.hostfile={tmp_path / 'hosts'}", f"log.dir={tmp_path}"]
    program = f"import sys\nfrom distrain.cli.app import command\nsys.stderr = sys.stdout\nprint(command({words!r}))"
    *_, line, status = limited(200, 200, program).splitlines()
    wanted = open_files.held(2, 2)
    assert line.startswith(f"distrain: a run of this size holds {wanted} files open where it is launched, and 200 are allowed there: ")
    assert (status, [path.name for path in tmp_path.iterdir()]) == ("1", ["hosts"])


def test_hosts_to_which_too_many_ssh_would_be_open_are_not_asked(ssh: StandIns) -> None:
    program = """
from pathlib import Path
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.preflight.preflight import preflight
from distrain.trainer.launch.preflight.checks import Asked
hosts = [Host(name=f"h{number}", slots=(0,)) for number in range(100)]
print(*preflight(hosts, Asked(python="python", folder=Path("run"), kind="cpu", save=0, keep=1)).problems)
"""
    assert limited(200, 200, program).startswith(f"a run of this size holds {open_files.held(0, 100)} files open where it is launched")
    assert ssh.calls == []


# What it ends


def test_deepspeeds_runner_ends_nothing_by_name_on_the_hosts(tmp_path: Path) -> None:
    """Stopped, it would have every host `pkill -f` the launchers of all runs."""
    stand_ins = StandIns(tmp_path / "stand-ins")
    stand_ins.put("pdsh", "import time; 'deepspeed.launcher.launch' in sys.argv and time.sleep(1000)\n")
    folder = tmp_path / "a:run"
    told = Start(module="distrain.trainer.launch.agent.bootstrap", arguments=(f"{folder}/run.json",), python=sys.executable, folder=folder,
                 address="h0", port=2)  # fmt: skip
    made = deepspeed(told, [Host(name=name, slots=(0,)) for name in ("h0", "pkill")], os.environ, (), "pdsh")
    for file in made.files:
        over_hosts._write(file)
    (command,) = made.commands
    environment = command.surroundings({**os.environ, "PATH": stand_ins.path(), "DS_ACCELERATOR": "cpu"})
    runner = subprocess.Popen(command.words, cwd=command.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: called(stand_ins, 1))
        runner.send_signal(signal.SIGTERM)
        runner.communicate(timeout=DEADLINE)
    finally:
        end_child(runner)
    (call,) = stand_ins.calls
    assert call["argv"][1:6] == ["-S", "-f", "1024", "-w", "h0,pkill"]
    assert call["environment"]["PATH"] == stand_ins.path()
