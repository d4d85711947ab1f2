"""What passes between a rank and the process that launched it, and what a log's last lines say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.trainer.launch.rank.channel import Talk
from distrain.trainer.launch.rank.environment import Place, reserve_port
from distrain.trainer.launch.rank.log import raised
from distrain.trainer.system.parent_watch import hold_from_environment

PLACE = Place(rank=1, ranks=8, local_rank=1, local_ranks=2, address="127.0.0.1", port=1234)


def said(read: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in os.read(read, 1 << 16).splitlines()]


def test_a_rank_says_one_json_object_a_line() -> None:
    read, write = os.pipe()
    talk = Talk.from_environment({"DISTRAIN_CONTROL_FD": str(write)})
    talk.say("two\nlines é\udce9")
    talk.status("50 %")
    talk.beat(3)
    talk.problem("why")
    talk.done()
    assert said(read) == [{"say": "two\nlines é\udce9"}, {"status": "50 %"}, {"beat": 3}, {"problem": "why"}, {"done": True}]
    assert not os.get_inheritable(write)
    os.close(read)
    talk.say("to nobody")
    os.close(write)


def test_what_nobody_reads_is_dropped_rather_than_waited_for() -> None:
    read, write = os.pipe()
    talk = Talk(write)
    for step in range(20_000):
        talk.beat(step)
        talk.status("x" * 80)
    assert 0 < len(said(read)) < 20_000
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("value", [None, "", "987654"])
def test_a_rank_that_is_run_by_hand_speaks_to_stdout(capfd: pytest.CaptureFixture[str], value: str | None) -> None:
    talk = Talk.from_environment({} if value is None else {"DISTRAIN_CONTROL_FD": value})
    talk.say("hello")
    talk.status("50 %")
    talk.problem("why")
    talk.beat(3)
    talk.done()
    assert capfd.readouterr().out == "hello\nwhy\n"


def test_a_file_that_has_the_number_of_the_pipe_is_not_written_to(tmp_path: Path) -> None:
    with (tmp_path / "other").open("wb") as other:
        Talk.from_environment({"DISTRAIN_CONTROL_FD": str(other.fileno())}).done()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_rank_that_is_run_by_hand_has_no_lifeline() -> None:
    assert hold_from_environment({}) is None


def test_a_lifeline_may_be_a_socket() -> None:
    """What the process started holds its stdout: this ends when both are gone."""
    program = """
import os, socket, subprocess, sys, time
from distrain.trainer.system.parent_watch import hold
ours, theirs = socket.socketpair()
hold(theirs.fileno())
subprocess.Popen(["sleep", "1000"])
theirs.setblocking(True)
print("held", flush=True)
ours.send(b"not yet")
ours.close()
time.sleep(1000)
"""
    done = subprocess.run([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (-9, b"held\n")


def test_a_place_leaves_what_the_user_set() -> None:
    assert PLACE.environment({"OMP_NUM_THREADS": "7", "RANK": "99"})["OMP_NUM_THREADS"] == "7"
    assert PLACE.environment({"OMP_NUM_THREADS": "7", "RANK": "99"})["RANK"] == "1"


def test_the_ranks_of_a_machine_share_its_cores() -> None:
    assert int(PLACE.environment({})["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_two_runs_get_two_ports() -> None:
    held = [reserve_port() for _ in range(50)]
    assert len({each.getsockname()[1] for each in held}) == 50
    for each in held:
        each.close()


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
def test_a_log_tells_the_exception_that_ended_a_rank(lines: list[str], cause: str) -> None:
    assert raised(lines) == cause
