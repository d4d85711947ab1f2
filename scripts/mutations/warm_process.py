"""A warm process: it has imported torch, DeepSpeed and pytest, and forks a process for each request, which imports `distrain` anew.

Run it as `python -m distrain.scripts.mutations.warm_process` in a copy of the checkout. A request and a reply are a line of JSON each:

    {"action": name, "arguments": {...}, "seconds": limit}
    {...}, what the action answered, or {"ended": how it ended, "tail": last lines of its log, after the test or layout before them}

A request that runs out of time, or whose processes all wait for each other, is killed, with every process that it started.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ...trainer.system.forked_exit import exit_with_status_of
from ...trainer.system.parent_watch import PDEATHSIG, die_with_parent
from .executed_lines import RUNNING, TOO_LONG, TRAINED

SUBREAPER = 36  # prctl(2)
QUIET_SECONDS = 12.0  # without any processor time: all wait for each other
QUIET_SHARE = 0.004  # of a core, which threads that only wake up may use
TAIL = 12  # lines
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Answer requests until stdin ends."""
    replies = os.dup(1)
    os.dup2(2, 1)
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, ctypes.c_ulong(1))  # processes that outlive their parents become ours
    libc.prctl(PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    signal.signal(signal.SIGTERM, _end)
    _import_packages()
    for line in sys.stdin:
        reply = _answer(json.loads(line), replies)
        os.write(replies, f"{json.dumps(reply)}\n".encode())
    _kill_descendants()
    return 0


def _end(*_: object) -> None:
    _kill_descendants()
    os._exit(1)


def _import_packages() -> None:
    """Import what every request needs of other packages, and forget `distrain`, in which errors are planted later."""
    gc.disable()  # what is imported stays
    from ...trainer.loop.forkserver.server import import_rank_modules

    import_rank_modules()
    for name in (
        "torch._dynamo",
        "pytest",
        "_pytest.assertion.rewrite",
        "hypothesis",
        "hydra",
        "omegaconf",
        "typer",
        "rich",
        "transformers",
    ):
        with suppress(ImportError):
            importlib.import_module(name)
    from ...cli.verbs import prove_run  # and all that it imports

    del prove_run
    forget_distrain()
    gc.collect()
    gc.freeze()
    gc.enable()


def forget_distrain() -> None:
    """Have the next import of any module of `distrain` read its file."""
    for name in [name for name in sys.modules if name == "distrain" or name.startswith("distrain.")]:
        del sys.modules[name]


def _answer(request: Mapping[str, Any], replies: int) -> dict[str, Any]:
    """Run an action in a forked process; return its answer, or how it ended."""
    log = Path("request.log")
    log.write_bytes(b"")
    read_end, write_end = os.pipe()
    warm = os.getpid()
    if os.fork() == 0:
        os.close(read_end)
        os.close(replies)  # whoever reads them must see their end when this process has ended
        _act(request, write_end, log, warm)
    os.close(write_end)
    answer, how = _wait(read_end, time.monotonic() + request["seconds"])
    os.close(read_end)
    _kill_descendants()
    _unmount_below(Path.cwd())
    if answer:
        return dict(json.loads(answer))
    lines = log.read_text(errors="replace").splitlines()
    begun = [line for line in lines[:-TAIL] if line.startswith((RUNNING, TRAINED))][-1:]  # a crash writes many lines after it
    return {"ended": how or "without an answer", "tail": [*begun, *lines[-TAIL:]]}


def _act(request: Mapping[str, Any], answer: int, log: Path, parent: int) -> NoReturn:
    """Run an action in this forked process and exit."""

    def run() -> int:
        os.setsid()
        die_with_parent(parent)
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        for fd in (1, 2):
            os.dup2(file, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        runs = importlib.import_module("distrain.scripts.mutations.mutant_runs")
        reply = runs.ACTIONS[request["action"]](**request["arguments"])
        os.write(answer, json.dumps(reply).encode())
        return 0

    exit_with_status_of(run)


def _wait(pipe: int, deadline: float) -> tuple[bytes, str]:
    """(the answer, why there is none): wait until the answer's pipe ends, the deadline, or all processes wait for each other."""
    data, used, since = b"", -1.0, time.monotonic()
    while True:
        ready, _, _ = select.select([pipe], [], [], 1.0)
        if ready:
            part = os.read(pipe, 1 << 16)
            if not part:
                return data, ""
            data += part
            continue
        now, cpu = time.monotonic(), sum(map(_cpu_seconds, descendants(os.getpid())))
        if cpu > used + QUIET_SHARE * (now - since) or cpu < used:
            used, since = cpu, now
        elif now - since > QUIET_SECONDS:
            return b"", "its processes wait for each other"
        if now > deadline:
            return b"", TOO_LONG


def descendants(pid: int) -> Iterator[int]:
    """Yield every process below one."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def _unmount_below(folder: Path) -> None:
    """Unmount what a killed test has left mounted in a folder: the next one could not remove it."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[1].startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", line.split()[1]], check=False)


def _kill_descendants() -> None:
    """Kill every process below this one, until none is left."""
    while found := list(descendants(os.getpid())):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    raise SystemExit(main())
