"""Messages from a rank to the process that launched it, its environment, and the exception in a log's last lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.launch.rank.environment import RankEnvironment
from distrain.trainer.launch.rank.log import RankLog, exception_line
from distrain.trainer.system.parent_watch import watch_parent_from_environment
from distrain.trainer.system.reserved_port import reserve_port

ENVIRONMENT = RankEnvironment(rank=1, ranks=8, local_rank=1, local_ranks=2, address="127.0.0.1", port=1234)


def messages(read: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in os.read(read, 1 << 16).splitlines()]


def test_a_rank_sends_one_json_object_a_line() -> None:
    read, write = os.pipe()
    channel = Channel.from_environment({"DISTRAIN_CONTROL_FD": str(write)})
    channel.say("two\nlines é\udce9")
    channel.report_status("50 %")
    channel.report_step(3)
    channel.report_problem("why")
    channel.report_done()
    assert messages(read) == [{"say": "two\nlines é\udce9"}, {"status": "50 %"}, {"step": 3}, {"problem": "why"}, {"done": True}]
    assert not os.get_inheritable(write)
    os.close(read)
    channel.say("nobody reads this")
    os.close(write)


def test_progress_that_nobody_reads_is_dropped() -> None:
    read, write = os.pipe()
    channel = Channel(write)
    for step in range(20_000):
        channel.report_step(step)
        channel.report_status("x" * 80)
    assert 0 < len(messages(read)) < 20_000
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("value", [None, "", "987654"])
def test_a_rank_started_by_hand_prints_to_stdout(capfd: pytest.CaptureFixture[str], value: str | None) -> None:
    channel = Channel.from_environment({} if value is None else {"DISTRAIN_CONTROL_FD": value})
    channel.say("hello")
    channel.report_status("50 %")
    channel.report_problem("why")
    channel.report_step(3)
    channel.report_done()
    assert capfd.readouterr().out == "hello\nwhy\n"


def test_a_file_with_the_number_of_the_pipe_is_not_written_to(tmp_path: Path) -> None:
    with (tmp_path / "other").open("wb") as other:
        Channel.from_environment({"DISTRAIN_CONTROL_FD": str(other.fileno())}).report_done()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_rank_started_by_hand_has_no_parent_watch() -> None:
    assert watch_parent_from_environment({}) is None


def test_the_parent_watch_works_with_a_socket() -> None:
    """The child inherits stdout, so communicate() returns only when both processes are gone."""
    program = """
import os, socket, subprocess, sys, time
from distrain.trainer.system.parent_watch import watch_parent
ours, theirs = socket.socketpair()
watch_parent(theirs.fileno())
subprocess.Popen(["sleep", "1000"])
theirs.setblocking(True)
print("watching", flush=True)
ours.send(b"not yet")
ours.close()
time.sleep(1000)
"""
    done = subprocess.run([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (-9, b"watching\n")


def test_a_rank_environment_keeps_the_threads_that_the_user_set_and_replaces_the_rank() -> None:
    assert ENVIRONMENT.variables({"OMP_NUM_THREADS": "7", "RANK": "99"})["OMP_NUM_THREADS"] == "7"
    assert ENVIRONMENT.variables({"OMP_NUM_THREADS": "7", "RANK": "99"})["RANK"] == "1"


def test_the_ranks_of_a_machine_share_its_cpus() -> None:
    assert int(ENVIRONMENT.variables({})["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_two_runs_get_two_ports() -> None:
    reserved = [reserve_port() for _ in range(50)]
    assert len({each.getsockname()[1] for each in reserved}) == 50
    for each in reserved:
        each.close()


def test_a_log_that_was_rotated_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    path.write_text("of an earlier attempt\n")
    log = RankLog(path, 0).from_here()
    path.write_text("ValueError: x\n")
    assert log.last_lines(9) == ("ValueError: x",)


TRACE = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()"]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], ""),
        (["all is well", "Error rates: 3"], ""),
        ([*TRACE, "ValueError: no such token", "[W123] a warning on the way out"], "ValueError: no such token"),
        ([*TRACE, "distrain.spec.Unreadable: two"], "distrain.spec.Unreadable: two"),
        ([*TRACE, "KeyError: 'a'", "", "During handling of ...", "", *TRACE, "Wrapped"], "Wrapped"),
        ([f"[rank3]: {line}" for line in (*TRACE, "torch.distributed.DistBackendError: NCCL")], "torch.distributed.DistBackendError: NCCL"),
        (["terminate called after throwing an instance of 'std::x'", "  what():  bad alloc", "stack"], "what():  bad alloc"),
        (["Fatal Python error: Segmentation fault", "", "Current thread"], "Fatal Python error: Segmentation fault"),
        (['  File "x.py", line 1', "    (", "SyntaxError: '(' was never closed"], "SyntaxError: '(' was never closed"),
        (["KeyboardInterrupt"], "KeyboardInterrupt"),
        (TRACE, ""),
    ],
)
def test_the_exception_that_ended_a_rank_is_found_in_its_log(lines: list[str], cause: str) -> None:
    assert exception_line(lines) == cause
