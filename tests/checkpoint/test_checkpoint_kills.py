"""Checkpoints, kills: a saving run of real processes is killed at any moment, and what is found afterwards is old or new, never broken.

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

from distrain.trainer.loop.checkpoint import Gather, Shard, Slice, alone, latest, load, newest, resume, save, whole
from distrain.trainer.rundir.checkpoints import steps
from distrain.trainer.system.end_child import end_child

SHAPE = (64, 100)
KILLS = 60
MOVES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate"}  # audit events


def part(rank: int) -> Slice:
    """The half that one of two ranks owns."""
    return whole("w", "weight", SHAPE).part(rank * 3200, 3200)


def held(step: int, rank: int) -> torch.Tensor:
    """What a rank holds after a step."""
    return torch.arange(3200, dtype=torch.float32) + 10_000 * rank + step


# --- the saving run


def save_on(folder: Path, first: int, tell: int, rank: int, world: int, gather: Gather) -> None:
    """Save one step after another for ever; rank 0 tells when each begins and ends. One rank of one owns both halves."""
    resume(folder, "auto", {"w": SHAPE}, rank=rank, world=world, gather=gather)
    for step in range(first, first + 10_000):
        if rank == 0:
            os.write(tell, b"b%d " % step)
        owned = [Shard(slice=part(half), tensor=held(step, half)) for half in range(rank, 2, world)]
        save(folder, step, owned, extra={"step": step}, keep=2, rank=rank, world=world, gather=gather)
        if rank == 0:
            os.write(tell, b"d%d " % step)


def through(pipe: Connection, rank: int, line: str) -> Sequence[str]:
    """Both ranks' lines: the gather of two ranks over a pipe."""
    pipe.send_bytes(line.encode())
    other = pipe.recv_bytes().decode()
    return [line, other] if rank == 0 else [other, line]


def die_at(move: int) -> None:
    """Kill this process at its so-many-th move in the file system."""
    moves = 0

    def count(event: str, _: object) -> None:
        nonlocal moves
        moves += event in MOVES
        if moves == move and event in MOVES:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def fork(work: Callable[[], None], close: Sequence[Connection] = ()) -> int:
    """A process that does this and nothing else."""
    child = os.fork()
    if child:
        return child
    for pipe in close:
        pipe.close()
    with suppress(Exception):
        work()
    os._exit(0)


def ranks(folder: Path, first: int, tell: int, world: int, move: int) -> list[int]:
    """Start the ranks of a run that saves."""
    if world == 1:

        def single() -> None:
            die_at(move)
            save_on(folder, first, tell, 0, 1, alone)

        return [fork(single)]
    ends = Pipe()
    pids = [fork(partial(save_on, folder, first, tell, rank, 2, partial(through, ends[rank], rank)), [ends[1 - rank]]) for rank in range(2)]
    for end in ends:
        end.close()
    return pids


def attempt(folder: str, first: int, world: int, victims: Sequence[int], words: int, seconds: float, move: int) -> dict[str, Any]:
    """One run: killed (the ranks `victims`) some seconds after it told so many words, or by itself at a move."""
    hear, tell = os.pipe()
    pids = ranks(Path(folder), first, tell, world, move)
    os.close(tell)
    said = b""
    while said.count(b" ") < words and (word := os.read(hear, 100)):
        said += word
    time.sleep(seconds)
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    with open(hear, "rb") as rest:
        said += rest.read()
    return {"said": said.decode().split(), "killed": [os.WIFSIGNALED(status) for status in statuses]}


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
    words, answers = process.stdin, process.stdout
    assert words
    assert answers

    def ask(**said: Any) -> Any:
        print(json.dumps(said), file=words, flush=True)
        return json.loads(answers.readline())

    try:
        yield ask
        words.close()
        assert process.wait(timeout=60) == 0
    finally:
        end_child(process)


def check(folder: Path, before: int, said: Sequence[str]) -> int:
    """What is there after a kill is the last step that was done, or the one that was begun, whole; returns it."""
    begun = max((int(word[1:]) for word in said if word[0] == "b"), default=before)
    done = max((int(word[1:]) for word in said if word[0] == "d"), default=before)
    found = newest(folder)
    assert found.passed == ()
    step = found.checkpoint.step if found.checkpoint else 0
    assert done <= step <= begun
    pointed = latest(folder)
    assert pointed is None or (pointed.is_dir() and int(pointed.name[5:]) <= step)
    assert pointed or step <= 1
    if found.checkpoint:
        for half, (_, tensor) in enumerate(load(found.checkpoint, [part(0), part(1)])):
            assert torch.equal(tensor, held(step, half))
        assert found.checkpoint.extra == {"step": step}
    return step


def test_two_ranks_killed_at_any_moment_leave_the_old_state_or_the_new(server, tmp_path: Path) -> None:
    chance = random.Random(20)
    step = 0
    for _ in range(KILLS):
        victims = chance.choice([[0, 1], [1, 0], [0], [1]])
        words = chance.choice([1, 3, 5])  # in its first save, or its second or third
        answer = server(
            folder=str(tmp_path), first=step + 1, world=2, victims=victims, words=words, seconds=chance.uniform(0, 0.01), move=0
        )
        assert [answer["killed"][rank] for rank in victims] == [True] * len(victims)
        step = check(tmp_path, step, answer["said"])
    assert step > KILLS // 2
    resume(tmp_path, "must", {"w": SHAPE})
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_run_killed_at_each_move_in_the_file_system_leaves_the_old_state_or_the_new(server, tmp_path: Path) -> None:
    step = 0
    reached = set()
    for move in range(1, 300):
        answer = server(folder=str(tmp_path), first=step + 1, world=1, victims=[], words=0, seconds=0, move=move)
        assert answer["killed"] == [True]
        reached.add(len(answer["said"]))
        step = check(tmp_path, step, answer["said"])
        if len(answer["said"]) == 7:  # three saves were done: the removal of an old checkpoint was met too
            break
    assert reached == {0, 1, 3, 5, 7}, "killed before the first save, in the first, the second and the third"
    assert len(steps(tmp_path)) <= 4


if __name__ == "__main__":
    serve()
