"""Checkpoints and kills: a run that saves is killed at any moment, and afterwards the old or the new checkpoint verifies.

Run as a script, this file is the server that forks the ranks: it has torch imported and no thread started.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.loop.checkpoint import (
    Gather,
    Shard,
    Slice,
    choose_checkpoint,
    find_newest,
    gather_alone,
    latest_checkpoint,
    read_slices,
    save_shards,
    whole_slice,
)
from distrain.trainer.rundir.checkpoints import checkpoint_steps
from distrain.trainer.system.child_process import end_child

SHAPE = (64, 100)
KILLS = 60
FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate"}  # audit events


def part(rank: int) -> Slice:
    """The half of the tensor that one of two ranks saves."""
    return whole_slice("w", "weight", SHAPE).part(rank * 3200, 3200)


def values(step: int, rank: int) -> torch.Tensor:
    """The values that a rank holds after a step."""
    return torch.arange(3200, dtype=torch.float32) + 10_000 * rank + step


# --- the saving run


def save_steps(folder: Path, first: int, writer: int, rank: int, world: int, gather: Gather) -> None:
    """Save one step after another without end; rank 0 reports when each starts and ends. A single rank saves both halves."""
    choose_checkpoint(folder, "auto", {"w": SHAPE}, rank=rank, world=world, gather=gather)
    for step in range(first, first + 10_000):
        if rank == 0:
            os.write(writer, b"s%d " % step)
        owned = [Shard(slice=part(half), tensor=values(step, half)) for half in range(rank, 2, world)]
        save_shards(folder, step, owned, extra={"step": step}, keep=2, rank=rank, world=world, gather=gather)
        if rank == 0:
            os.write(writer, b"d%d " % step)


def gather_two(pipe: Connection, rank: int, line: str) -> Sequence[str]:
    """The gather of two ranks over a pipe."""
    pipe.send_bytes(line.encode())
    other = pipe.recv_bytes().decode()
    return [line, other] if rank == 0 else [other, line]


def die_at(operation: int) -> None:
    """Kill this process at file operation number `operation`."""
    operations = 0

    def count(event: str, _: object) -> None:
        nonlocal operations
        operations += event in FILE_OPERATIONS
        if operations == operation and event in FILE_OPERATIONS:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def fork(work: Callable[[], None], close: Sequence[Connection] = ()) -> int:
    """Fork a process that does the work and exits."""
    child = os.fork()
    if child:
        return child
    for pipe in close:
        pipe.close()
    with suppress(Exception):
        work()
    os._exit(0)


def start_ranks(folder: Path, first: int, writer: int, world: int, operation: int) -> list[int]:
    """Start the ranks of a run that saves."""
    if world == 1:

        def single() -> None:
            die_at(operation)
            save_steps(folder, first, writer, 0, 1, gather_alone)

        return [fork(single)]
    ends = Pipe()
    pids = [
        fork(partial(save_steps, folder, first, writer, rank, 2, partial(gather_two, ends[rank], rank)), [ends[1 - rank]])
        for rank in range(2)
    ]
    for end in ends:
        end.close()
    return pids


def attempt(folder: str, first: int, world: int, victims: Sequence[int], reports: int, seconds: float, operation: int) -> dict[str, Any]:
    """Run until the ranks `victims` are killed some seconds after so many reports, or one kills itself at a file operation."""
    reader, writer = os.pipe()
    pids = start_ranks(Path(folder), first, writer, world, operation)
    os.close(writer)
    reported = b""
    while reported.count(b" ") < reports and (more := os.read(reader, 100)):
        reported += more
    time.sleep(seconds)
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    with open(reader, "rb") as rest:
        reported += rest.read()
    return {"reports": reported.decode().split(), "killed": [os.WIFSIGNALED(status) for status in statuses]}


def serve() -> NoReturn:
    """Read attempts from standard input, a JSON object a line, and answer each."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(attempt(**json.loads(line))), flush=True)
    sys.exit()


# --- the tests


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[..., Any]]:
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    requests, answers = process.stdin, process.stdout
    assert requests
    assert answers

    def ask(**request: Any) -> Any:
        print(json.dumps(request), file=requests, flush=True)
        return json.loads(answers.readline())

    try:
        yield ask
        requests.close()
        assert process.wait(timeout=DEADLINE) == 0
    finally:
        end_child(process)


def check(folder: Path, before: int, reports: Sequence[str]) -> int:
    """Check that the newest checkpoint after a kill is of the last step that was done or the one that was started. Return that step."""
    started = max((int(each[1:]) for each in reports if each[0] == "s"), default=before)
    done = max((int(each[1:]) for each in reports if each[0] == "d"), default=before)
    found = find_newest(folder)
    assert found.passed == ()
    step = found.checkpoint.step if found.checkpoint else 0
    assert done <= step <= started
    pointed = latest_checkpoint(folder)
    assert pointed is None or (pointed.is_dir() and int(pointed.name[5:]) <= step)
    assert pointed or step <= 1
    if found.checkpoint:
        for half, (_, tensor) in enumerate(read_slices(found.checkpoint, [part(0), part(1)])):
            assert torch.equal(tensor, values(step, half))
        assert found.checkpoint.extra == {"step": step}
    return step


def test_two_ranks_killed_at_any_moment_leave_the_old_checkpoint_or_the_new(server, tmp_path: Path) -> None:
    chance = random.Random(20)
    step = 0
    for _ in range(KILLS):
        victims = chance.choice([[0, 1], [1, 0], [0], [1]])
        reports = chance.choice([1, 3, 5])  # killed in its first save, its second or its third
        answer = server(
            folder=str(tmp_path), first=step + 1, world=2, victims=victims, reports=reports, seconds=chance.uniform(0, 0.01), operation=0
        )
        assert answer["killed"][victims[0]]  # a second victim may have ended by itself before: its peer is gone
        step = check(tmp_path, step, answer["reports"])
    assert step > KILLS // 2
    choose_checkpoint(tmp_path, "must", {"w": SHAPE})
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_run_killed_at_each_file_operation_leaves_the_old_checkpoint_or_the_new(server, tmp_path: Path) -> None:
    step = 0
    reached = set()
    for operation in range(1, 300):
        answer = server(folder=str(tmp_path), first=step + 1, world=1, victims=[], reports=0, seconds=0, operation=operation)
        assert answer["killed"] == [True]
        reached.add(len(answer["reports"]))
        step = check(tmp_path, step, answer["reports"])
        if len(answer["reports"]) == 7:  # three saves were done: the removal of an old checkpoint was met too
            break
    assert reached == {0, 1, 3, 5, 7}, "killed before the first save, in the first, the second and the third"
    assert len(checkpoint_steps(tmp_path)) <= 4


if __name__ == "__main__":
    serve()
