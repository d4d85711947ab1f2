"""subprocess.Popen that starts Python modules of ours by a fork of this process, which has imported torch, instead of a new one."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ...trainer.system.forked_exit import exit_with_status_of
from .executed_lines import RECORD_FD
from .warm_process import forget_distrain

_Popen = subprocess.Popen


class ForkedPopen(_Popen):  # type: ignore[type-arg]
    """As subprocess.Popen; `python -m distrain...` and `python FILE.py` run in a fork."""

    def __init__(self, args: Any, *further: Any, **options: Any) -> None:
        words = list(map(str, args)) if isinstance(args, list | tuple) else []
        if not further and _is_ours(words) and threading.current_thread() is threading.main_thread():
            kept = tuple(options.get("pass_fds", ()))
            options["preexec_fn"] = partial(_run, words[1:], options.get("env"), kept)
        super().__init__(args, *further, **options)


def install() -> None:
    """Have this process start ours by forks."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


def _is_ours(words: Sequence[str]) -> bool:
    if len(words) < 2 or words[0] != sys.executable:
        return False
    return words[1].endswith(".py") or (words[1] == "-m" and len(words) > 2 and words[2].startswith("distrain."))


def _run(words: Sequence[str], environment: Mapping[str, str] | None, kept: Sequence[int]) -> None:
    """Become the program: this is called between fork and exec, and never returns. Streams and session are set already."""

    def run() -> int:
        _close_all_but({0, 1, 2, RECORD_FD, *kept})  # also the pipe by which Popen waits for exec
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, "r"), os.fdopen(1, "w"), os.fdopen(2, "w")
        subprocess.Popen = _Popen  # type: ignore[misc]
        forget_distrain()
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        return 0

    exit_with_status_of(run)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
