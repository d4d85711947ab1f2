"""Checks of this machine for `distrain doctor`: versions, a compiler, disk, memory, shared memory."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from ..spec.numbers.as_text import size_text
from ..system.memory import free_memory

State = Literal["ok", "warning", "problem"]

REQUIRED_PACKAGES = ("torch", "deepspeed")
OPTIONAL = {
    "transformers": "without it, `distrain export` checks with its own reader",
    "tokenizers": "without it, data.tokenizer can be bytes only",
}
COMPILERS = ("c++", "g++", "clang++")
DISK = 1 << 30  # bytes: below it, a warning; below a hundredth of it, nothing can be saved
LEAST_MEMORY = 2 << 30  # bytes: two ranks that have imported torch and DeepSpeed take half of it
SHARED_MEMORY = 1 << 30  # bytes of /dev/shm that NCCL needs on a node of GPUs, generously


@dataclass(frozen=True)
class MachineCheck:
    """The result of one check: its subject, its state, what was found, and the fix ("" for none)."""

    name: str
    state: State
    says: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.name}: {self.says}" + (f": {self.mend}" if self.mend else "")


def version_checks(distrain: str) -> Iterator[MachineCheck]:
    """Check Python and the packages that are required or optional; `distrain` is the version of distrain itself."""
    yield MachineCheck("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield MachineCheck("distrain", "ok", distrain)
    for name in REQUIRED_PACKAGES:
        installed = _installed_version(name)
        yield MachineCheck(name, "ok", installed) if installed else MachineCheck(name, "problem", "not installed", f"pip install {name}")
    for name, without in OPTIONAL.items():
        yield MachineCheck(name, "ok", _installed_version(name) or f"not installed (optional): {without}")


def _installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def compiler_check(environment: Mapping[str, str]) -> MachineCheck:
    """Look for a C++ compiler, which only torch.compile and DeepSpeed's own ops need."""
    named = environment.get("CXX", "")
    found = next((path for each in (named, *COMPILERS) if each and (path := shutil.which(each, path=environment.get("PATH", "")))), None)
    if found:
        return MachineCheck("compiler", "ok", found)
    return MachineCheck("compiler", "warning", "no C++ compiler: train.compile and offload need one", "install g++, or name one in CXX")


def space_checks(folder: Path) -> Iterator[MachineCheck]:
    """Check the free disk space of a folder, free memory and shared memory."""
    yield disk_check(folder, shutil.disk_usage(folder).free, writable=os.access(folder, os.W_OK))
    if free := free_memory():
        mend = "" if free >= LEAST_MEMORY else "end other programs, or set cluster=1x1"
        yield MachineCheck("memory", "ok" if free >= LEAST_MEMORY else "warning", f"{size_text(free)} free", mend)
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield shared_memory_check(shutil.disk_usage(shared).free)


def disk_check(folder: Path, free: int, *, writable: bool) -> MachineCheck:
    """Check that checkpoints can be saved below a folder with `free` bytes."""
    if not writable:
        return MachineCheck("disk", "problem", f"{folder} can't be written to", "work in another folder, or set log.dir")
    says = f"{size_text(free)} free in {folder}"
    if free >= DISK:
        return MachineCheck("disk", "ok", says)
    return MachineCheck("disk", "problem" if free < DISK // 100 else "warning", says, "make room, or set log.dir to another disk")


def shared_memory_check(free: int) -> MachineCheck:
    """Check that the GPUs of a node can communicate through the host: `free` bytes in /dev/shm."""
    if free >= SHARED_MEMORY:
        return MachineCheck("shared memory", "ok", f"{size_text(free)} free in /dev/shm")
    mend = "give the container more: --shm-size=8g, or --ipc=host"
    return MachineCheck(
        "shared memory", "warning", f"{size_text(free)} free in /dev/shm, through which the GPUs of a node communicate", mend
    )
