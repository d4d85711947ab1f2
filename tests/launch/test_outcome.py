"""Ranks on this machine: what they are told, how they end, and what the launching process makes of it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distrain.trainer.launch.rank.environment import Place
from distrain.trainer.launch.rank.log import Tail
from distrain.trainer.launch.single_host import launch
from distrain.trainer.launch.supervisor.local_rank import start
from distrain.trainer.launch.supervisor.outcome import Ended, RankEnd

DEADLINE = 60.0  # seconds, for what takes one on an idle machine
MARK = "LAUNCH_TEST"
BEGIN = """
import os, signal, subprocess, sys, time
from distrain.trainer.launch.rank.channel import Talk
talk, rank = Talk.from_environment(), int(os.environ["RANK"])
def meet():
    folder = os.environ["LAUNCH_TEST"]
    open(os.path.join(folder, f"met{rank}"), "w")
    while sum(name.startswith("met") for name in os.listdir(folder)) < int(os.environ["WORLD_SIZE"]): time.sleep(0.02)
"""
SLEEP = "time.sleep(1000)\n"
DONE = "talk.done()\n"
CHILDREN = "for own in (0, 1): subprocess.Popen(['sleep', '1000'], start_new_session=bool(own))\n"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No process that a test's ranks started outlives it."""
    yield
    until = time.monotonic() + DEADLINE
    while (left := marked(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def marked(folder: Path) -> list[str]:
    """The command lines of processes whose environment has the test's mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={folder}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


@dataclass
class Shown:
    """What the user sees."""

    lines: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)


def run(
    folder: Path, program: str, ranks: int = 2, grace: float = DEADLINE, shown: Shown | None = None, extra: dict[str, str] | None = None
) -> Ended:
    """Launch a program that begins with `talk` and `rank`."""
    shown = shown or Shown()
    return launch(
        [sys.executable, "-c", BEGIN + program],
        ranks=ranks,
        folder=folder,
        environment={**os.environ, MARK: str(folder), **(extra or {})},
        show=shown.lines.append,
        grace=grace,
        live=shown.live.append,
    )


def log(folder: Path, rank: int) -> list[str]:
    """A rank's log, a line each."""
    return (folder / "ranks" / f"{rank}.log").read_text().splitlines()


def test_a_run_whose_ranks_are_all_done_succeeds(tmp_path: Path) -> None:
    ended = run(tmp_path, "talk.beat(rank); talk.beat(7)\n" + DONE)
    assert (ended.status, ended.says) == (0, "")
    assert [(end.rank, end.code, end.done, end.step) for end in ended.ranks] == [(0, 0, True, 7), (1, 0, True, 7)]


def test_the_user_sees_what_rank_0_says_and_nothing_else(tmp_path: Path) -> None:
    shown = Shown()
    run(tmp_path, "print('noise'); talk.say(f'rank {rank}\\nin two lines'); talk.status(f'{rank}: 50 %')\n" + DONE, shown=shown)
    assert (shown.lines, shown.live) == (["rank 0\nin two lines"], ["0: 50 %"])
    assert log(tmp_path, 0)[1:] == ["noise"]


def test_a_rank_that_raises_ends_the_run_and_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path, "talk.beat(40)\nif rank == 1: raise ValueError('no such token')\n" + SLEEP, ranks=3)
    path = tmp_path / "ranks" / "1.log"
    assert ended.says == f"rank 1 exited with 1, at step 40: ValueError: no such token; its log is {path}"
    assert (ended.status, ended.rank, ended.log, ended.tail[-1]) == (1, 1, path, "ValueError: no such token")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "was killed by SIGKILL, perhaps by the kernel for want of memory"),
        (signal.SIGSEGV, "was killed by SIGSEGV, a crash in native code"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (signal.SIGRTMIN + 3, f"was killed by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_a_rank_that_a_signal_kills_is_named_with_the_signal(tmp_path: Path, number: int, words: str) -> None:
    ended = run(tmp_path, f"if rank == 0: os.kill(os.getpid(), {int(number)})\n" + SLEEP)
    assert ended.says.startswith(f"rank 0 {words}; its log")
    assert ended.ranks[0].code == -number


def test_a_command_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    ended = launch(["no such command"], ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=1.0)
    assert ended.status == 1
    assert "exited with 127: can't start no such command: No such file or directory" in ended.says


@pytest.mark.parametrize(("last", "words"), [("sys.exit(3)", "exited with 3"), ("os.abort()", "was killed by SIGABRT")])
def test_a_rank_that_ends_badly_after_it_was_done_fails_the_run(tmp_path: Path, last: str, words: str) -> None:
    ended = run(tmp_path, DONE + f"if rank == 1: {last}\n")
    assert ended.status == 1
    assert f"rank 1 {words}" in ended.says
    assert ", after it was done" in ended.says


def test_a_rank_that_exits_early_with_0_fails_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "if rank == 1: sys.exit(0)\n" + SLEEP)
    assert ended.status == 1
    assert ended.says.startswith("rank 1 exited with 0 before it was done; its log")


def test_a_rank_that_is_deaf_to_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); meet()\nif rank == 1: sys.exit(1)\n"
    ended = run(tmp_path, deaf + SLEEP, grace=0.3)
    assert ended.says.startswith("rank 1 exited with 1")
    assert (ended.ranks[0].code, ended.ranks[0].cut) == (-signal.SIGKILL, True)


def test_the_others_may_save_within_the_grace(tmp_path: Path) -> None:
    saving = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); meet()\nif rank == 1: sys.exit(1)\n"
    ended = run(tmp_path, saving + SLEEP)
    assert (ended.status, [end.code for end in ended.ranks]) == (1, [75, 1])


def test_a_rank_that_lost_its_peer_is_not_blamed_for_it(tmp_path: Path) -> None:
    program = """
signal.signal(signal.SIGTERM, lambda *_: None)
meet()
if rank == 1:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
time.sleep(0.5)
raise ValueError("the first cause")
"""
    assert run(tmp_path, program).says.startswith("rank 0 exited with 1: ValueError: the first cause")


def test_a_rank_that_gives_no_reason_is_not_blamed_before_one_that_does(tmp_path: Path) -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: None); meet()\nif rank: sys.exit(1)\n"
    first = "time.sleep(0.5); talk.problem('data.path is empty'); sys.exit(1)"
    assert run(tmp_path, program + first, ranks=3).says.startswith("rank 0 exited with 1: data.path is empty; its log")


def test_a_rank_that_hangs_after_its_problem_is_killed(tmp_path: Path) -> None:
    ended = run(tmp_path, "if rank == 1: talk.problem('two\\nlines')\n" + SLEEP, grace=0.3)
    assert ended.says.startswith("rank 1 failed and had to be killed: two lines; its log")


def test_what_a_rank_started_goes_with_it(tmp_path: Path) -> None:
    """The fixture looks for it; one child is in a session of its own."""
    assert run(tmp_path, CHILDREN + DONE).status == 0


def test_a_rank_whose_keeper_dies_is_ended_with_what_it_started(tmp_path: Path) -> None:
    program = CHILDREN + "meet()\nif rank == 1: os.kill(os.getppid(), signal.SIGKILL)\n"
    ended = run(tmp_path, program + SLEEP)
    assert ended.says.startswith("rank 1 lost the process that kept it, which was killed by SIGKILL")


def test_a_keeper_that_is_stopped_goes_on_and_the_verdict_is_its_rank_s(tmp_path: Path) -> None:
    shown = Shown()
    program = "if rank == 1: os.kill(os.getppid(), signal.SIGSTOP)\n" + DONE
    assert run(tmp_path, program, shown=shown).status == 0
    assert [line.partition(" for ")[0] for line in shown.lines] == ["the process that keeps rank 1 was stopped"]


def test_a_keeper_that_is_stopped_ends_its_rank_all_the_same(tmp_path: Path) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); meet()\nif rank == 0: sys.exit(1)\nos.kill(os.getppid(), signal.SIGSTOP)\n"
    ended = run(tmp_path, program + SLEEP, grace=0.2)
    assert [(end.code, end.fate) for end in ended.ranks] == [(1, "ended"), (-signal.SIGKILL, "ended")]


def test_what_a_rank_started_goes_with_a_keeper_that_takes_too_long_to_end_it(tmp_path: Path) -> None:
    """The fixture looks for it."""
    place = Place(rank=0, ranks=1, local_rank=0, local_ranks=1, address="127.0.0.1", port=1)
    (tmp_path / "ranks").mkdir()
    words = [sys.executable, "-c", BEGIN + CHILDREN + "meet()\n" + SLEEP]
    member = start(words, place, tmp_path / "ranks", {**os.environ, MARK: str(tmp_path)})
    until = time.monotonic() + DEADLINE
    while not (tmp_path / "met0").exists() and time.monotonic() < until:
        time.sleep(0.02)
    member.close(0.0)


@pytest.mark.parametrize(("devices", "words"), [((), "rank 1 exited"), (("4", "GPU-8f"), "rank 1 (device GPU-8f) exited")])
def test_a_rank_is_named_with_its_device_where_that_has_a_name(tmp_path: Path, devices: tuple[str, ...], words: str) -> None:
    program = [sys.executable, "-c", "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(1000)"]
    ended = launch(program, ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=1.0, devices=devices)
    assert ended.says.startswith(words)
    assert {end.host for end in ended.ranks} == {""}


def test_logs_that_can_not_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("")
    ended = launch(["true"], ranks=2, folder=tmp_path, environment=os.environ, show=print, grace=1.0)
    assert (ended.status, ended.says.partition(":")[0]) == (1, "no log can be written")


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


@pytest.mark.parametrize(("line", "blameless"), CAUSES)
def test_a_rank_is_blameless_where_what_it_raised_is_a_machine_s_fault(line: str, blameless: bool) -> None:
    assert RankEnd(rank=0, code=1, log=Tail(Path("0.log"), ("all was well", line))).blameless == blameless
    assert RankEnd(rank=0, code=1, log=Tail(Path("0.log")), problem=line).blameless == blameless


def test_a_log_holds_both_streams_in_order_and_every_start(tmp_path: Path) -> None:
    program = "for at in range(200): print(f'out {at}'); print(f'err {at}', file=sys.stderr)\n" + DONE
    run(tmp_path, program)
    run(tmp_path, program)
    for rank in (0, 1):
        lines = log(tmp_path, rank)
        once = [f"{stream} {at}" for at in range(200) for stream in ("out", "err")]
        assert [line for line in lines if not line.startswith("==")] == once + once
        assert [at for at, line in enumerate(lines) if line.startswith(f"== rank {rank} of 2 starts")] == [0, 401]


def test_an_end_tells_of_this_start_only(tmp_path: Path) -> None:
    run(tmp_path, "raise ValueError('the first time')\n")
    ended = run(tmp_path, "os.write(2, b'half a line'); sys.exit(4)\n", ranks=1)
    assert ended.says.startswith("rank 0 exited with 4: half a line; its log")
    assert ended.tail == ("half a line",)


def test_megabytes_of_output_and_words_block_nobody(tmp_path: Path) -> None:
    shown = Shown()
    program = "for _ in range(64): os.write(1, b'x' * 65535 + b'\\n'); talk.beat(1)\ntalk.say('y' * 3_000_000)\n"
    assert run(tmp_path, program + DONE, shown=shown).status == 0
    assert (tmp_path / "ranks" / "1.log").stat().st_size > 64 * 65536
    assert [len(line) for line in shown.lines] == [3_000_000]


def test_the_environment_arrives_verbatim(tmp_path: Path) -> None:
    values = {"SPACES": "a  b ", "LINES": "a\nb\r\n", "SHELL_WORDS": "$(touch x) `y` ; ' \" \\ *", "EMPTY": "", "LETTERS": "é日"}
    program = f"assert {values!r} == {{name: os.environ[name] for name in {list(values)!r}}}, os.environ\n"
    assert run(tmp_path, program + DONE, extra=values).status == 0


def test_sixteen_ranks_know_their_places(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"]
    program = f"print(*(os.environ[name] for name in {names}), os.getpgrp() == os.getsid(0) == os.getpid())\n"
    assert run(tmp_path, program + DONE, ranks=16).status == 0
    assert [log(tmp_path, rank)[1:] for rank in range(16)] == [[f"{rank} {rank} 16 16 127.0.0.1 1 1 True"] for rank in range(16)]


def test_rank_0_can_listen_at_the_port_which_is_the_same_for_all(tmp_path: Path) -> None:
    listen = "import socket; print(os.environ['MASTER_PORT'])\nif rank == 0: socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
    assert run(tmp_path, listen + DONE).status == 0
    assert log(tmp_path, 0)[1] == log(tmp_path, 1)[1]


def test_a_port_that_was_taken_meanwhile_is_changed_for_another(tmp_path: Path) -> None:
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


def test_a_port_that_is_always_taken_is_given_up(tmp_path: Path) -> None:
    ended = run(tmp_path, "if rank == 0: raise OSError(98, 'Address already in use')\n" + SLEEP)
    assert ended.status == 1
    assert sum(line.startswith("==") for line in log(tmp_path, 0)) == 3
