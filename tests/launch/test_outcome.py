"""Ranks on this machine: what they are given, how they end, and the outcome that the controller reports."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.processes import marked_processes
from distrain.trainer.launch.next_attempt import HostFaults
from distrain.trainer.launch.rank.environment import RankEnvironment
from distrain.trainer.launch.rank.log import RemoteLog
from distrain.trainer.launch.single_host import launch_local_ranks
from distrain.trainer.launch.supervisor.local_rank import start_local_rank
from distrain.trainer.launch.supervisor.outcome import Outcome, RankOutcome, run_outcome

MARK = "LAUNCH_TEST"
BEGIN = """
import os, signal, subprocess, sys, time
from distrain.trainer.launch.rank.channel import Channel
channel, rank = Channel.from_environment(), int(os.environ["RANK"])
def wait_for_all():
    folder = os.environ["LAUNCH_TEST"]
    open(os.path.join(folder, f"ready{rank}"), "w")
    while sum(name.startswith("ready") for name in os.listdir(folder)) < int(os.environ["WORLD_SIZE"]): time.sleep(0.02)
"""
SLEEP = "time.sleep(1000)\n"
DONE = "channel.report_done()\n"
CHILDREN = "for own in (0, 1): subprocess.Popen(['sleep', '1000'], start_new_session=bool(own))\n"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Check that no process that a test's ranks started outlives it."""
    yield
    deadline = time.monotonic() + DEADLINE
    while (left := marked_processes(MARK, tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@dataclass
class Shown:
    """The lines that the user sees."""

    lines: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)


def run(
    folder: Path, program: str, ranks: int = 2, grace: float = DEADLINE, shown: Shown | None = None, extra: dict[str, str] | None = None
) -> Outcome:
    """Launch a program that begins with `channel` and `rank`."""
    shown = shown or Shown()
    return launch_local_ranks(
        [sys.executable, "-c", BEGIN + program],
        ranks=ranks,
        folder=folder,
        environment={**os.environ, MARK: str(folder), **(extra or {})},
        show=shown.lines.append,
        grace=grace,
        live=shown.live.append,
    )


def log(folder: Path, rank: int) -> list[str]:
    """Return the lines of a rank's log."""
    return (folder / "ranks" / f"{rank}.log").read_text().splitlines()


def test_a_run_whose_ranks_are_all_done_succeeds(tmp_path: Path) -> None:
    outcome = run(tmp_path, "channel.report_step(rank); channel.report_step(7)\n" + DONE)
    assert (outcome.status, outcome.says) == (0, "")
    assert [(each.rank, each.code, each.done, each.step) for each in outcome.ranks] == [(0, 0, True, 7), (1, 0, True, 7)]


def test_the_user_sees_the_lines_of_rank_0_and_no_others(tmp_path: Path) -> None:
    shown = Shown()
    run(
        tmp_path, "print('noise'); channel.say(f'rank {rank}\\nin two lines'); channel.report_status(f'{rank}: 50 %')\n" + DONE, shown=shown
    )
    assert (shown.lines, shown.live) == (["rank 0\nin two lines"], ["0: 50 %"])
    assert log(tmp_path, 0)[1:] == ["noise"]


def test_a_rank_that_raises_ends_the_run_and_is_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, "channel.report_step(40)\nif rank == 1: raise ValueError('no such token')\n" + SLEEP, ranks=3)
    path = tmp_path / "ranks" / "1.log"
    assert outcome.says == f"rank 1 exited with 1, at step 40: ValueError: no such token; its log is {path}"
    assert (outcome.status, outcome.rank, outcome.log, outcome.tail[-1]) == (1, 1, path, "ValueError: no such token")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "was killed by SIGKILL, perhaps by the kernel for want of memory"),
        (signal.SIGSEGV, "was killed by SIGSEGV, a crash in native code"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (signal.SIGRTMIN + 3, f"was killed by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_a_rank_that_a_signal_kills_is_named_with_the_signal(tmp_path: Path, number: int, text: str) -> None:
    outcome = run(tmp_path, f"if rank == 0: os.kill(os.getpid(), {int(number)})\n" + SLEEP)
    assert outcome.says.startswith(f"rank 0 {text}; its log")
    assert outcome.ranks[0].code == -number


def test_a_command_that_does_not_exist_is_reported_in_one_line(tmp_path: Path) -> None:
    outcome = launch_local_ranks(["no such command"], ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=1.0)
    assert outcome.status == 1
    assert "exited with 127: can't start no such command: No such file or directory" in outcome.says


@pytest.mark.parametrize(("last", "text"), [("sys.exit(3)", "exited with 3"), ("os.abort()", "was killed by SIGABRT")])
def test_a_rank_that_ends_badly_after_it_was_done_fails_the_run(tmp_path: Path, last: str, text: str) -> None:
    outcome = run(tmp_path, DONE + f"if rank == 1: {last}\n")
    assert outcome.status == 1
    assert f"rank 1 {text}" in outcome.says
    assert ", after it was done" in outcome.says


def test_a_rank_that_exits_early_with_0_fails_the_run(tmp_path: Path) -> None:
    outcome = run(tmp_path, "if rank == 1: sys.exit(0)\n" + SLEEP)
    assert outcome.status == 1
    assert outcome.says.startswith("rank 1 exited with 0 before it was done; its log")


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); wait_for_all()\nif rank == 1: sys.exit(1)\n"
    outcome = run(tmp_path, ignoring + SLEEP, grace=0.3)
    assert outcome.says.startswith("rank 1 exited with 1")
    assert (outcome.ranks[0].code, outcome.ranks[0].killed) == (-signal.SIGKILL, True)


def test_the_others_may_save_within_the_grace(tmp_path: Path) -> None:
    saving = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); wait_for_all()\nif rank == 1: sys.exit(1)\n"
    outcome = run(tmp_path, saving + SLEEP)
    assert (outcome.status, [each.code for each in outcome.ranks]) == (1, [75, 1])


def test_a_rank_that_lost_its_peer_is_not_named_as_the_cause(tmp_path: Path) -> None:
    program = """
signal.signal(signal.SIGTERM, lambda *_: None)
wait_for_all()
if rank == 1:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
time.sleep(0.5)
raise ValueError("the first cause")
"""
    assert run(tmp_path, program).says.startswith("rank 0 exited with 1: ValueError: the first cause")


def test_a_rank_with_a_reason_is_named_before_one_without(tmp_path: Path) -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: None); wait_for_all()\nif rank: sys.exit(1)\n"
    first = "time.sleep(0.5); channel.report_problem('data.path is empty'); sys.exit(1)"
    assert run(tmp_path, program + first, ranks=3).says.startswith("rank 0 exited with 1: data.path is empty; its log")


def test_a_rank_that_hangs_after_its_problem_is_killed(tmp_path: Path) -> None:
    outcome = run(tmp_path, "if rank == 1: channel.report_problem('two\\nlines')\n" + SLEEP, grace=0.3)
    assert outcome.says.startswith("rank 1 failed and had to be killed: two lines; its log")


def test_processes_that_a_rank_started_end_with_it(tmp_path: Path) -> None:
    """The fixture looks for them; one child is in a session of its own."""
    assert run(tmp_path, CHILDREN + DONE).status == 0


def test_a_rank_whose_agent_dies_is_killed_with_the_processes_that_it_started(tmp_path: Path) -> None:
    program = CHILDREN + "wait_for_all()\nif rank == 1: os.kill(os.getppid(), signal.SIGKILL)\n"
    outcome = run(tmp_path, program + SLEEP)
    assert outcome.says.startswith("rank 1 lost its agent process, which was killed by SIGKILL")


def test_a_stopped_agent_is_continued_and_its_rank_succeeds(tmp_path: Path) -> None:
    shown = Shown()
    program = "if rank == 1: os.kill(os.getppid(), signal.SIGSTOP)\n" + DONE
    assert run(tmp_path, program, shown=shown).status == 0
    assert [line.partition(" for ")[0] for line in shown.lines] == ["the agent of rank 1 was stopped"]


def test_a_stopped_agent_still_ends_its_rank(tmp_path: Path) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); wait_for_all()\nif rank == 0: sys.exit(1)\n"
    program += "os.kill(os.getppid(), signal.SIGSTOP)\n"
    outcome = run(tmp_path, program + SLEEP, grace=0.2)
    assert [(each.code, each.fate) for each in outcome.ranks] == [(1, "ended"), (-signal.SIGKILL, "ended")]


def test_processes_of_a_rank_end_with_an_agent_that_takes_too_long_to_end_them(tmp_path: Path) -> None:
    """The fixture looks for them."""
    environment = RankEnvironment(rank=0, ranks=1, local_rank=0, local_ranks=1, address="127.0.0.1", port=1)
    (tmp_path / "ranks").mkdir()
    command = [sys.executable, "-c", BEGIN + CHILDREN + "wait_for_all()\n" + SLEEP]
    rank = start_local_rank(command, environment, tmp_path / "ranks", {**os.environ, MARK: str(tmp_path)})
    deadline = time.monotonic() + DEADLINE
    while not (tmp_path / "ready0").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    rank.close(0.0)


@pytest.mark.parametrize(("devices", "text"), [((), "rank 1 exited"), (("4", "GPU-8f"), "rank 1 (device GPU-8f) exited")])
def test_a_rank_is_named_with_the_name_of_its_device(tmp_path: Path, devices: tuple[str, ...], text: str) -> None:
    program = [sys.executable, "-c", "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(1000)"]
    outcome = launch_local_ranks(program, ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=1.0, devices=devices)
    assert outcome.says.startswith(text)
    assert {each.host for each in outcome.ranks} == {""}


def test_logs_that_can_not_be_written_are_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("")
    outcome = launch_local_ranks(["true"], ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=1.0)
    assert (outcome.status, outcome.says.partition(":")[0]) == (1, "no log can be written")


CAUSES = (
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
    ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", True),
    ("RuntimeError: CUDA error: unspecified launch failure", True),
    ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:94, unhandled system error (run with NCCL_DEBUG=INFO)", True),
    ("torch.distributed.DistBackendError: NCCL error in: X.cpp:3, remote process exited or there was a network error, NCCL 2.21", True),
    ("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234", True),
    ("RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", True),
    ("OSError: [Errno 5] Input/output error: 'tokens.bin'", True),
    ("OSError: [Errno 116] Stale file handle", True),
    ("TimeoutError: [Errno 110] Connection timed out", True),
    ("OSError: [Errno 28] No space left on device", False),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ("RuntimeError: CUDA error: device-side assert triggered", False),
    ("torch.distributed.DistBackendError: NCCL error in: X.cpp:3, invalid usage (run with NCCL_WARN for details)", False),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ("AssertionError: no such token", False),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'a'", False),
)


@pytest.mark.parametrize(("line", "machine_fault"), CAUSES)
def test_an_exception_that_a_machine_caused_is_a_machine_fault(line: str, machine_fault: bool) -> None:
    assert RankOutcome(rank=0, code=1, log=RemoteLog(Path("0.log"), ("all was well", line))).is_machine_fault == machine_fault
    assert RankOutcome(rank=0, code=1, log=RemoteLog(Path("0.log")), problem=line).is_machine_fault == machine_fault


def test_a_rank_whose_collective_timed_out_waited_for_another() -> None:
    """As NCCL's watchdog thread ends a process. The rank that failed by itself is named, though it is noticed later; alone, none is."""
    says = (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 1800005 milliseconds before timing out."
    )
    lines = (
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        f"  what():  [PG ID 0 Rank 1] {says}",
        "frame #0: ...",
    )
    waiting = [
        RankOutcome(rank=rank, code=-signal.SIGABRT, log=RemoteLog(Path("0.log"), lines), where=f"host{rank} (device 0)") for rank in (0, 1)
    ]
    failed = RankOutcome(rank=2, code=1, log=RemoteLog(Path("2.log"), ("ValueError: odd",)), where="host2 (device 0)")
    assert all(each.has_lost_peer and each.is_machine_fault for each in waiting)
    faults = HostFaults()
    for ended, named in (([*waiting, failed], 2), (waiting, 0)):
        outcome = run_outcome(ended, None)
        assert outcome.rank == named
        faults.count(outcome)
    assert faults.count_by_host == {"host2": 1}


def test_a_log_holds_both_streams_in_order_and_every_attempt(tmp_path: Path) -> None:
    program = "for at in range(200): print(f'out {at}'); print(f'err {at}', file=sys.stderr)\n" + DONE
    run(tmp_path, program)
    run(tmp_path, program)
    for rank in (0, 1):
        lines = log(tmp_path, rank)
        attempt = [f"{stream} {at}" for at in range(200) for stream in ("out", "err")]
        assert [line for line in lines if not line.startswith("==")] == attempt + attempt
        assert [at for at, line in enumerate(lines) if line.startswith(f"== rank {rank} of 2 starts")] == [0, 401]


def test_an_outcome_quotes_this_attempt_only(tmp_path: Path) -> None:
    run(tmp_path, "raise ValueError('the first time')\n")
    outcome = run(tmp_path, "os.write(2, b'half a line'); sys.exit(4)\n", ranks=1)
    assert outcome.says.startswith("rank 0 exited with 4: half a line; its log")
    assert outcome.tail == ("half a line",)


def test_megabytes_of_output_and_messages_block_no_rank(tmp_path: Path) -> None:
    shown = Shown()
    program = "for _ in range(64): os.write(1, b'x' * 65535 + b'\\n'); channel.report_step(1)\nchannel.say('y' * 3_000_000)\n"
    assert run(tmp_path, program + DONE, shown=shown).status == 0
    assert (tmp_path / "ranks" / "1.log").stat().st_size > 64 * 65536
    assert [len(line) for line in shown.lines] == [3_000_000]


def test_ranks_get_the_environment_verbatim(tmp_path: Path) -> None:
    values = {"SPACES": "a  b ", "LINES": "a\nb\r\n", "SHELL_WORDS": "$(touch x) `y` ; ' \" \\ *", "EMPTY": "", "LETTERS": "é日"}
    program = f"assert {values!r} == {{name: os.environ[name] for name in {list(values)!r}}}, os.environ\n"
    assert run(tmp_path, program + DONE, extra=values).status == 0


def test_each_of_sixteen_ranks_gets_its_own_number(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"]
    program = f"print(*(os.environ[name] for name in {names}), os.getpgrp() == os.getsid(0) == os.getpid())\n"
    assert run(tmp_path, program + DONE, ranks=16).status == 0
    assert [log(tmp_path, rank)[1:] for rank in range(16)] == [[f"{rank} {rank} 16 16 127.0.0.1 1 1 True"] for rank in range(16)]


def test_all_ranks_get_the_same_port_and_rank_0_can_listen_there(tmp_path: Path) -> None:
    listen = "import socket; print(os.environ['MASTER_PORT'])\nif rank == 0: socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
    assert run(tmp_path, listen + DONE).status == 0
    assert log(tmp_path, 0)[1] == log(tmp_path, 1)[1]


def test_a_port_that_another_process_takes_is_replaced(tmp_path: Path) -> None:
    program = """
import socket
if rank == 0:
    port = int(os.environ["MASTER_PORT"])
    first = not os.path.exists("taken")
    if first:
        open("taken", "w").write(str(port)); other = socket.create_server(("", port))
    print("port", port, int(open("taken").read()) != port)
    socket.create_server(("", port))
"""
    shown = Shown()
    assert run(tmp_path, f"os.chdir({str(tmp_path)!r})\n" + program + DONE, shown=shown).status == 0
    assert [line.split()[2] for line in log(tmp_path, 0) if line.startswith("port")] == ["False", "True"]
    assert "Address already in use" in shown.lines[0]


def test_a_run_fails_after_three_ports_are_taken(tmp_path: Path) -> None:
    outcome = run(tmp_path, "if rank == 0: raise OSError(98, 'Address already in use')\n" + SLEEP)
    assert outcome.status == 1
    assert sum(line.startswith("==") for line in log(tmp_path, 0)) == 3
