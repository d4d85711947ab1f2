"""The library that lets torch have fake tensors on device "cuda" where there is no GPU: compiled once for each torch that is installed.

This module imports no torch: the library must be loaded before torch is.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device_guard.cpp")


class NoGuard(Exception):
    """The library can't be made, for the reason given in one sentence."""


def load_device_guard() -> None:
    """Load the library, then import torch, whose build may be one for GPUs. Raises NoGuard.

    Threads of torch's autograd abort when such a process exits: end it with os._exit.
    """
    if "torch" in sys.modules:
        raise NoGuard("torch has been imported already")
    library = ctypes.CDLL(str(device_guard()), mode=ctypes.RTLD_GLOBAL)
    with _silent_stderr():  # a CUDA build of torch says that its hooks are passed over
        import_module("torch")
    library.register_device_guard()


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Send what this process writes to stderr to /dev/null."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def device_guard() -> Path:
    """Compile the library if this machine has none for its torch, and return its path. Raises NoGuard."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distrain" / "trace_cuda"
    linked = f"{version('torch')} {_torch_folder()}"  # the library looks for torch's own there
    state = hashlib.sha256(SOURCE.read_bytes() + linked.encode()).hexdigest()[:16]
    library = cache / f"device_guard.{state}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        _compile(made)
        made.replace(library)
    return library


def _compile(target: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoGuard("no C++ compiler (g++) is on this machine")
    torch = _torch_folder()
    include, lib = torch / "include", torch / "lib"
    command: list[str | Path] = [compiler, "-shared", "-fPIC", "-O0", "-std=c++20", SOURCE, "-o", target, "-I", include]
    command += ["-I", include / "torch" / "csrc" / "api" / "include", "-L", lib, "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        says = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise NoGuard(f"{compiler} can't compile {SOURCE.name}: {says}")


def _torch_folder() -> Path:
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise NoGuard("torch is not installed")
    return Path(found.submodule_search_locations[0])
