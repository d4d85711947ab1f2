"""A fork server of ranks: it imports torch and DeepSpeed once and forks the ranks of each job.

Run it as `python -m distrain.trainer.loop.forkserver`.

A request is a line of JSON on stdin; messages and at last the reply are lines of JSON on stdout. A job:

    {"run": RUN_DIR/run.json, "ranks": 2, "threads": 1, "seconds": 60}
    {"step": 3}  {"status": text}                                     messages of rank 0
    {"codes": [0, 0], "steps": [7, 7], "lines": [rank 0's lines for the user], "problems": [...], "timed_out": false, "says": why it failed}

A question, which one forked process answers by a function of `QUESTIONS`:

    {"ask": name, "arguments": {...}, "log": path}
    {"answer": what the function returned}  or  {"failed": why}

A rank is a real one: it joins the others over gloo or NCCL, has a control pipe and a parent-death watch, and logs to
RUN_DIR/ranks/N.log. The end of stdin ends everything, even in the middle of a job. The server itself never starts a thread or a CUDA
context, because neither survives a fork. With DISTRAIN_START_AFRESH=1, for ranks on GPUs, it imports neither engines nor models, and each
rank becomes a process that does.
"""

from __future__ import annotations

import gc
import importlib
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
from msgspec.json import Decoder

from ...engines.deepspeed.import_deepspeed import import_deepspeed
from ...launch.rank import channel
from ...launch.rank.environment import RankEnvironment
from ...launch.supervisor.outcome import run_outcome
from ...models.families import FAMILIES
from ...plan.engines import ENGINES
from ...plan.rules.unused_keys import defaults as key_defaults
from ...prove.fork_client import START_AFRESH
from ...spec.run import Run
from ...system import parent_watch
from ...system.reserved_port import reserve_port
from ..checkpoint import LoadFailed
from ..offline.weight_diff import weight_difference
from ..rank import run_rank
from ..reference_curves.compressed_gradients import compressed_gradients
from ..reference_curves.delayed_gradients import delayed_gradients
from ..reference_curves.local_steps import local_steps
from .forked_process import ForkedProcess, fork

ADDRESS = "127.0.0.1"
GRACE = 5.0  # seconds that the other ranks have to end after one has failed
TICK = 0.5  # seconds between two checks of the deadline

# Modules that the first step of a rank imports, of one version of torch and DeepSpeed or another: a tenth of a tiny rank's CPU time.
IMPORTED_LATE = (
    "distrain.trainer.engines.deepspeed.pipeline_module",
    "distrain.trainer.engines.native.data_parallel.fully_sharded",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compiler_bisector",
    "torch.profiler._cupti_monitor",
)

RankProgram = Callable[[Path, channel.Channel], int]  # what a rank does with RUN_DIR/run.json; returns its exit status
Question = Callable[..., Any]  # takes and returns JSON values

QUESTIONS: dict[str, Question] = {each.__name__: each for each in (weight_difference, delayed_gradients, compressed_gradients, local_steps)}


class ClientGone(Exception):
    """The client has closed its pipe, or died."""


def main() -> int:
    """Serve until stdin ends."""
    serve(run_rank, QUESTIONS, module="distrain.trainer.loop.rank")
    return 0


def serve(program: RankProgram, questions: Mapping[str, Question], *, module: str = "") -> None:
    """Serve jobs, whose ranks run `program`, and questions until stdin ends. Ranks that are started afresh run `module`, whose main takes
    RUN_DIR/run.json."""
    client = os.dup(1)
    os.dup2(2, 1)  # the client must not read what libraries print
    if os.environ.get(START_AFRESH) == "1":
        program = partial(_start_afresh, module)
    else:
        import_rank_modules()
        _evaluate_annotations()
    _assert_forkable()
    # Else garbage collection in a forked process would touch imported objects and so copy their memory pages. What the imports left
    # stays: forked processes would reuse what was freed in pages that they share, and so copy these, rather than take new pages.
    gc.freeze()
    gc.enable()  # modules were imported without it
    with suppress(ClientGone):
        for line in sys.stdin:
            request = json.loads(line)
            reply = _answer_question(request, questions, client) if "ask" in request else _run_job(request, program, client)
            _send(client, reply)


def import_rank_modules() -> None:
    """Import what every rank imports: its own modules, the engines and the models of our families."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for DeepSpeed, which compiles functions of its own where it is imported
    import_deepspeed()
    engines = [name for row in ENGINES.values() for name in row.classes]
    models = [family.module for family in FAMILIES.values() if not family.made_by_transformers]
    for name in ("distrain.trainer.loop.train_rank", *filter(None, (*engines, *models))):
        importlib.import_module(name.partition(":")[0])
    for name in IMPORTED_LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    del os.environ["TORCHDYNAMO_DISABLE"]


def _evaluate_annotations() -> None:
    """Evaluate the annotations of `Run`, as reading and planning a run does first: 7 ms of each rank's CPU time."""
    Decoder(Run)
    key_defaults()


def _assert_forkable() -> None:
    if os.path.isdir("/proc/self/task"):
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads: a forked process has only one of them, and would wait for the others' locks"
    assert not torch.cuda.is_initialized(), "a CUDA context does not survive a fork"  # type: ignore[no-untyped-call]


def _run_job(job: Mapping[str, Any], program: RankProgram, client: int) -> dict[str, Any]:
    """Run a job's ranks to their end, or to its deadline; return the reply."""
    run, ranks = Path(job["run"]), job["ranks"]
    (run.parent / "ranks").mkdir(exist_ok=True)
    processes, ended, lines = list[ForkedProcess](), list[ForkedProcess](), list[str]()
    with _parent_death_pipe() as (read_end, write_end), reserve_port() as socket, _kill_at_exit(processes):
        port = socket.getsockname()[1]
        for rank in range(ranks):
            environment = RankEnvironment(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, address=ADDRESS, port=port)
            act = partial(_run_rank, partial(program, run), environment, read_end, job["threads"])
            log = run.parent / "ranks" / f"{rank}.log"
            processes.append(fork(act, log, rank=rank, close=(write_end, client, *(each.pipe for each in processes))))
        deadline = time.monotonic() + job["seconds"] if job["seconds"] else float("inf")
        timed_out = _wait_for_all(processes, ended, deadline, partial(_on_message, client, lines))
    return {
        "codes": [each.code for each in processes],
        "steps": [each.step for each in processes],
        "lines": lines,
        "problems": [each.problem for each in processes if each.problem],
        "timed_out": timed_out,
        "says": run_outcome([each.outcome for each in ended if each.outcome], None).says,
    }


def _run_rank(
    program: Callable[[channel.Channel], int], environment: RankEnvironment, parent_pipe: int, threads: int, control_pipe: int
) -> int:
    """Run a rank in this forked process, with the environment of one that was started on its own."""
    pipes = {
        channel.CHANNEL_VARIABLE: str(control_pipe),
        parent_watch.PARENT_WATCH_VARIABLE: str(parent_pipe),
        "OMP_NUM_THREADS": str(threads),
    }
    os.environ.update({**environment.variables(os.environ), **pipes})
    torch.set_num_threads(threads)
    return program(channel.Channel.from_environment())


def _start_afresh(module: str, path: Path, control: channel.Channel) -> int:
    """Make this forked process one that runs a module, with the pipes and the environment of its rank."""
    for variable in (channel.CHANNEL_VARIABLE, parent_watch.PARENT_WATCH_VARIABLE):
        os.set_inheritable(int(os.environ[variable]), True)
    os.execv(sys.executable, [sys.executable, "-m", module, str(path)])


def _on_message(client: int, lines: list[str], process: ForkedProcess, kind: str, content: Any) -> None:
    """Keep rank 0's lines for the user, and pass its progress on to the client."""
    if process.rank == 0 and kind == "say":
        lines.append(content)
    if process.rank == 0 and kind in ("step", "status"):
        _send(client, {kind: content})


def _answer_question(request: Mapping[str, Any], questions: Mapping[str, Question], client: int) -> dict[str, Any]:
    """Answer a question in a forked process; return its reply."""
    log = Path(request["log"])
    process = fork(partial(_reply, questions[request["ask"]], request["arguments"]), log, close=(client,))
    replies = list[dict[str, Any]]()
    with _kill_at_exit([process]):
        _wait_for_all([process], [], float("inf"), lambda _, kind, content: replies.append({kind: content}))
    failed: dict[str, Any] = {"failed": f"the process that was asked ended with {process.code}; its log is {log}"}
    return replies[-1] if replies else failed


def _reply(question: Question, arguments: Mapping[str, Any], control_pipe: int) -> int:
    try:
        _send(control_pipe, {"answer": question(**arguments)})
    except (LoadFailed, OSError) as error:
        _send(control_pipe, {"failed": str(error).splitlines()[0]})
    return 0


def _wait_for_all(
    processes: Sequence[ForkedProcess],
    ended: list[ForkedProcess],
    deadline: float,
    on_message: Callable[[ForkedProcess, str, Any], None],
) -> bool:
    """Wait until all have ended, and add them to `ended` in that order; return whether the deadline came first. Raises ClientGone.

    Ranks that outlive a failed one by GRACE are killed, and so are all at the deadline.
    """
    timed_out = failed = False
    while running := {each.pipe: each for each in processes if each.code is None}:
        for pipe in _readable_pipes(running):
            for kind, content in running[pipe].read_messages():
                on_message(running[pipe], kind, content)
            if running[pipe].code is not None:
                ended.append(running[pipe])
        if not failed and any(each.code not in (None, 0, channel.STOPPED) for each in processes):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            timed_out |= not failed
            for each in processes:
                each.kill()
    return timed_out


def _readable_pipes(pipes: Mapping[int, ForkedProcess]) -> list[int]:
    """Wait up to TICK for pipes with something to read; raises ClientGone if stdin has no writer any more."""
    poll = select.poll()
    poll.register(0, 0)  # only for its end: the next request may wait there already
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(TICK * 1000)]
    if 0 in ready:
        raise ClientGone
    return ready


@contextmanager
def _kill_at_exit(processes: Sequence[ForkedProcess]) -> Iterator[None]:
    """Kill the processes that still run when the block ends."""
    try:
        yield
    finally:
        for each in processes:
            each.kill_and_wait()


@contextmanager
def _parent_death_pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end) of a pipe whose read end ranks watch; only this process holds the write end, until the block ends."""
    read_end, write_end = os.pipe()
    try:
        yield read_end, write_end
    finally:
        os.close(write_end)
        os.close(read_end)


def _send(fd: int, message: Mapping[str, Any]) -> None:
    data = f"{json.dumps(message)}\n".encode()
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        raise ClientGone from None
