"""Benchmark of starting `distrain`: processor time of its commands, against their budgets.

Run `python -m distrain.scripts.bench_startup [REPEATS]`; it exits with 1 above a budget.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

from ..trainer.system.child_process import end_child
from .show_help import show_help

PYTHON = (sys.executable, "-c", "pass")
# fmt: off
COMMANDS = (  # arguments of `distrain`, budget in seconds of processor time
    ("--help",                             0.150),
    ("ls",                                 0.500),
    ("plan conf=quickstart",               0.500),
    ("plan conf=megatron_1t_6x8x64",       0.500),
)
# fmt: on


def processor_seconds(command: tuple[str, ...]) -> float:
    """Run a command and return its user and system seconds, children included; exits where it fails."""
    with TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            end_child(process)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)} exited with {process.returncode}: {output.read().decode(errors='replace').strip()}")
    return usage.ru_utime + usage.ru_stime


def median_seconds(command: tuple[str, ...], repeats: int) -> float:
    """Return the median processor seconds of several runs, after one that fills the caches."""
    processor_seconds(command)
    return median(processor_seconds(command) for _ in range(repeats))


def distrain_command() -> tuple[str, ...]:
    """Return the installed command next to this Python, else the module."""
    script = Path(sys.executable).with_name("distrain")
    return (str(script),) if script.exists() else (sys.executable, "-m", "distrain")


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    bare = median_seconds(PYTHON, repeats)
    exceeded = False
    print(f"{'processor time, median of ' + str(repeats):<42}{'ms':>8}{'budget':>8}{'x python -c pass':>18}")
    print(f"{'python -c pass':<42}{bare * 1e3:>8.0f}{'':>8}{1:>18.1f}")
    for arguments, budget in COMMANDS:
        seconds = median_seconds((*distrain_command(), *arguments.split()), repeats)
        exceeded |= seconds > budget
        mark = "  over" if seconds > budget else ""
        print(f"{'distrain ' + arguments:<42}{seconds * 1e3:>8.0f}{budget * 1e3:>8.0f}{seconds / bare:>18.1f}{mark}")
    sys.exit(exceeded)


if __name__ == "__main__":
    show_help(__doc__)
    main()
