"""A fork server of ranks: it imports torch and DeepSpeed once and forks the ranks of each job.

Run it as `python -m distrain.trainer.loop.forkserver.server`.

A job is a line of JSON on stdin. How far it is, and at last how it ended, are lines on stdout:

    {"run": RUN_DIR/run.json, "ranks": 2, "threads": 1, "seconds": 60, "signals": [[step, rank, signal], ...]}
    {"beat": 3}  {"status": text}                         of rank 0, on the way
    {"codes": [0, 0], "steps": [7, 7], "said": [rank 0's lines], "problems": [...], "late": false, "says": what ended it, in a line}

    {"ask": name, "words": {...}, "log": path}            a function of `QUESTIONS`, in one forked process
    {"answer": what it returned}  or  {"failed": why}

A rank is a real one: it meets the others over gloo or NCCL, has a control pipe and a lifeline, and logs to RUN_DIR/ranks/N.log.
A signal is sent to its rank when that rank says that it is at that step. The end of stdin, also in the middle of a job, ends
everything. The server itself never starts a thread or a CUDA context, neither of which lives through a fork.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it

from ...engines.deepspeed.settings import deepspeed
from ...launch.rank import channel
from ...launch.rank.environment import Place, reserve_port
from ...system import parent_watch
from ..checkpoint import LoadFailed
from ..rank import run_rank
from .process import Forked, fork, how
from .weight_diff import compared

ADDRESS = "127.0.0.1"
GRACE = 5.0  # seconds that ranks have after one has failed
TICK = 0.5  # seconds between two looks at the clock

Work = Callable[[Path, channel.Talk], int]  # what a rank does with RUN_DIR/run.json: its exit status
Question = Callable[..., Any]  # of words, and answered in JSON

QUESTIONS: dict[str, Question] = {"compared": compared}


class AskerGone(Exception):
    """Whoever writes the jobs has closed the pipe, or died."""


def main() -> int:
    """Serve until stdin ends."""
    serve(run_rank, QUESTIONS)
    return 0


def serve(work: Work, questions: Mapping[str, Question]) -> None:
    """Serve jobs, whose ranks do `work`, until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    deepspeed()
    _assert_forkable()
    with suppress(AskerGone):
        for line in sys.stdin:
            job = json.loads(line)
            _tell(answers, _asked(job, questions, answers) if "ask" in job else _trained(job, work, answers))


def _assert_forkable() -> None:
    if os.path.isdir("/proc/self/task"):
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads: a fork has one of them, and waits for the others' locks"
    assert not torch.cuda.is_initialized(), "a CUDA context does not live through a fork"  # type: ignore[no-untyped-call]


def _trained(job: Mapping[str, Any], work: Work, answers: int) -> dict[str, Any]:
    """Run a job's ranks to their end, or to its deadline."""
    run, ranks = Path(job["run"]), job["ranks"]
    (run.parent / "ranks").mkdir(exist_ok=True)
    crew, ended, late = list[Forked](), list[Forked](), False
    with _lifeline() as (held, cut), reserve_port() as port, _ended(crew):
        for rank in range(ranks):
            place = Place(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, address=ADDRESS, port=port.getsockname()[1])
            act = partial(_rank, partial(work, run), place, held, job["threads"])
            log = run.parent / "ranks" / f"{rank}.log"
            crew.append(fork(act, log, rank=rank, closed=(cut, answers, *(each.pipe for each in crew))))
        until = time.monotonic() + job["seconds"] if job["seconds"] else float("inf")
        late = _watched(crew, ended, until, partial(_heard, crew, job["signals"], answers))
    return {
        "codes": [each.code for each in crew],
        "steps": [each.step for each in crew],
        "said": crew[0].said,
        "problems": [problem for each in crew for problem in each.problems],
        "late": late,
        "says": how(ended),
    }


def _rank(work: Callable[[channel.Talk], int], place: Place, held: int, threads: int, speak: int) -> int:
    """Be a rank: the environment says which, as it does to one that was started on its own."""
    handed = {channel.VARIABLE: str(speak), parent_watch.VARIABLE: str(held), "OMP_NUM_THREADS": str(threads)}
    os.environ.update({**place.environment(os.environ), **handed})
    torch.set_num_threads(threads)
    return work(channel.Talk.from_environment())


def _heard(crew: Sequence[Forked], signals: Sequence[Sequence[int]], answers: int, rank: Forked, word: dict[str, Any]) -> None:
    """Send the signals that are due, and hand on how far rank 0 is."""
    for step, whom, number in signals:
        if crew[whom] is rank and word.get("beat") == step:
            rank.send(number)
    if rank.rank == 0 and word.keys() & {"beat", "status"}:
        _tell(answers, word)


def _asked(job: Mapping[str, Any], questions: Mapping[str, Question], answers: int) -> dict[str, Any]:
    """The answer to a question."""
    log = Path(job["log"])
    crew = [fork(partial(_answer, questions[job["ask"]], job["words"]), log, closed=(answers,))]
    with _ended(crew):
        _watched(crew, [], float("inf"), lambda *_: None)
    answer: dict[str, Any] = {"failed": f"the process that was asked ended with {crew[0].code}; its log is {log}"}
    return crew[0].answers[-1] if crew[0].answers else answer


def _answer(question: Question, words: Mapping[str, Any], speak: int) -> int:
    try:
        _tell(speak, {"answer": question(**words)})
    except (LoadFailed, OSError) as error:
        _tell(speak, {"failed": str(error).splitlines()[0]})
    return 0


def _watched(crew: Sequence[Forked], ended: list[Forked], until: float, heard: Callable[[Forked, dict[str, Any]], None]) -> bool:
    """Stay until all have ended, in the order `ended`; whether the deadline came first. Raises AskerGone.

    Those that outlive a failed one by GRACE are killed, and so are all at the deadline.
    """
    late = failed = False
    while left := {each.pipe: each for each in crew if each.code is None}:
        for pipe in _ready(left):
            for word in left[pipe].hear():
                heard(left[pipe], word)
            if left[pipe].code is not None:
                ended.append(left[pipe])
        if not failed and any(each.code not in (None, 0, channel.STOPPED) for each in crew):
            failed, until = True, min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            late |= not failed
            for each in crew:
                each.kill()
    return late


def _ready(pipes: Mapping[int, Forked]) -> list[int]:
    """The pipes that have something to be read, after a moment at the most; raises AskerGone where stdin has no writer any more."""
    poll = select.poll()
    poll.register(0, 0)  # of it only that it has ended: the next job may wait there already
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(TICK * 1000)]
    if 0 in ready:
        raise AskerGone
    return ready


@contextmanager
def _ended(crew: Sequence[Forked]) -> Iterator[None]:
    """Nothing of these processes is left after the block, however it ends."""
    try:
        yield
    finally:
        for each in crew:
            each.end()


@contextmanager
def _lifeline() -> Iterator[tuple[int, int]]:
    """A pipe for as long as the block runs, and this process: (what ranks hold, what ends when this process does)."""
    held, cut = os.pipe()
    try:
        yield held, cut
    finally:
        os.close(cut)
        os.close(held)


def _tell(fd: int, words: Mapping[str, Any]) -> None:
    line = f"{json.dumps(words)}\n".encode()
    try:
        while line:
            line = line[os.write(fd, line) :]
    except BrokenPipeError:
        raise AskerGone from None


if __name__ == "__main__":
    raise SystemExit(main())
