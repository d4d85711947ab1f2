"""`distrain doctor`: what this machine has and lacks for `distrain fit`, a line each."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..pages.console import say
from ..pages.format import one_line, wrapped

State = Literal["ok", "warning", "problem"]

NEEDED = ("torch", "deepspeed")
OPTIONAL = {
    "transformers": "`distrain export` then checks with its own reader",
    "tokenizers": "data.tokenizer can then be bytes alone",
}
COMPILERS = ("c++", "g++", "clang++")
DISK = 1 << 30  # bytes: below it, a warning; below a hundredth of it, nothing can be saved
MEMORY = 2 << 30  # bytes: two ranks that have imported torch and DeepSpeed take half of it
HOST_PROBLEM = "problem: "  # how a line begins that says why a host can't be used
SHARED = 1 << 30  # bytes that NCCL asks of /dev/shm on a node of GPUs, generously


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how it is, and what would mend it."""

    name: str
    state: State
    says: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.name}: {self.says}" + (f": {self.mend}" if self.mend else "")


def doctor(
    words: Annotated[list[str] | None, typer.Argument(metavar="[conf=NAME KEY=VALUE ...]", show_default=False)] = None,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", metavar="DIR", help="Your own groups and recipes, which win over built-in ones.")
    ] = None,
) -> int:
    """Look at what `distrain fit` needs, down to three steps of two ranks beside one process; a line each.

    With a recipe: look at what its run needs here: data, tokenizer, weights, devices, memory, disk. With hosts too: ask each of
    them first, as fit does before it starts anything there.

    Exit status: 0 a run can start; 1 something would stop it; 2 the words are wrong.

    \b
    distrain doctor
    distrain doctor conf=mine data.path=corpus
    distrain doctor conf=llama3_8b launch=deepspeed launch.hostfile=FILE
    """
    return _told(of_run(words, config_dir) if words else findings())


def _told(found: Iterable[Finding | str]) -> int:
    """Print findings as they come, and lines about hosts as they are; 1 where one of them is a problem."""

    stops = False
    for each in found:
        about_hosts = isinstance(each, str) and not each.startswith(HOST_PROBLEM)  # broken into lines already
        say(str(each) if about_hosts else "\n".join(wrapped(one_line(str(each)), hang=" " * 9)))
        stops |= each.startswith(HOST_PROBLEM) if isinstance(each, str) else each.state == "problem"
    return 1 if stops else 0


def of_run(words: Sequence[str], config_dir: Path | None) -> Iterator[Finding | str]:
    """What a recipe's run needs: its hosts, asked, then all that is to be there before ranks start. Raises Unreadable."""
    from ...trainer.launch.resolve import hosts
    from ...trainer.machine.facts import measure
    from ...trainer.plan.plan import make_plan
    from ...trainer.spec.problem import Unreadable
    from ..config.arguments import read_words
    from ..config.load import load
    from ..pages.console import tell
    from ..pages.hosts_page import looked
    from .doctor_run import run_findings

    read = read_words(words, "doctor", config_dir)
    if read.problems:
        raise Unreadable(read.problems)
    run = load(read.conf, read.overrides, config_dir)
    found = hosts(run)
    if found:
        lines: list[str] = []
        problems = looked(found, run, make_plan(run), lines.append)
        yield from (*lines, *(f"{HOST_PROBLEM}{problem}" for problem in problems))
    elif measure(tell) is None:
        run = load(read.conf, read.overrides, config_dir)
    yield from versions()
    yield from run_findings(run, make_plan(run), hosted=bool(found))


def findings() -> Iterator[Finding]:
    """All of them, the quick ones first."""
    from .engine_check import checked

    packages = [*versions()]
    yield from packages
    yield compiler(os.environ)
    yield from room(Path.cwd())
    if not any(each.state == "problem" for each in packages):
        yield from checked()


def versions() -> Iterator[Finding]:
    """Python, what is needed and what may be there."""
    from ..config.library import own_version

    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("distrain", "ok", own_version())
    for name in NEEDED:
        found = _installed(name)
        yield Finding(name, "ok", found) if found else Finding(name, "problem", "not installed", f"pip install {name}")
    for name, without in OPTIONAL.items():
        yield Finding(name, "ok", _installed(name) or f"not installed (optional): {without}")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def compiler(environment: dict[str, str] | os._Environ[str]) -> Finding:
    """A C++ compiler, which only torch.compile and DeepSpeed's own ops ask for."""
    named = environment.get("CXX", "")
    found = next((path for each in (named, *COMPILERS) if each and (path := shutil.which(each, path=environment.get("PATH", "")))), None)
    if found:
        return Finding("compiler", "ok", found)
    return Finding("compiler", "warning", "no C++ compiler: train.compile and offload want one", "install g++, or name one in CXX")


def room(folder: Path) -> Iterator[Finding]:
    """Disk, memory and shared memory."""
    yield disk(folder, shutil.disk_usage(folder).free, writable=os.access(folder, os.W_OK))
    if free := memory_free():
        mend = "" if free >= MEMORY else "end something else, or set cluster=1x1"
        yield Finding("memory", "ok" if free >= MEMORY else "warning", f"{_size(free)} free", mend)
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield shared_memory(shutil.disk_usage(shared).free)


def disk(folder: Path, free: int, *, writable: bool) -> Finding:
    """Whether checkpoints can be saved below a folder."""
    if not writable:
        return Finding("disk", "problem", f"{folder} can't be written to", "work in another folder, or set log.dir")
    says = f"{_size(free)} free in {folder}"
    if free >= DISK:
        return Finding("disk", "ok", says)
    return Finding("disk", "problem" if free < DISK // 100 else "warning", says, "make room, or set log.dir to another disk")


def shared_memory(free: int) -> Finding:
    """Whether GPUs of one node can talk through the host."""
    if free >= SHARED:
        return Finding("shared memory", "ok", f"{_size(free)} free in /dev/shm")
    mend = "give the container more: --shm-size=8g, or --ipc=host"
    return Finding("shared memory", "warning", f"{_size(free)} free in /dev/shm, which GPUs of one node talk through", mend)


def memory_free() -> int:
    """Bytes that a new process can have, the container's limit included; 0 where this system doesn't say."""
    found = []
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(rows["MemAvailable"].split()[0]) * 1024)
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit != "max":
            found.append(int(limit) - int(used))
    except (OSError, KeyError, ValueError):
        pass
    return max(0, min(found, default=0))


def _size(count: int) -> str:
    from ..pages.format import size

    return size(count)
