"""Measures what starting `distrain` costs: processor time of its commands, held against their budgets.

Run `python -m distrain.scripts.bench_startup [REPEATS]`; it ends with status 1 where a budget is passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

from ..trainer.system.end_child import end_child

PYTHON = (sys.executable, "-c", "pass")
# fmt: off
COMMANDS = (  # the words after `distrain`, the budget in seconds of processor time
    ("--help",                             0.150),
    ("ls",                                 0.500),
    ("plan conf=quickstart",               0.500),
    ("plan conf=megatron_1t_6x8x64",       0.500),
)
# fmt: on


def processor_seconds(command: tuple[str, ...]) -> float:
    """User and system seconds of one run of a command and its children; raises where it fails."""
    with TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            end_child(process)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(command)} ended with exit status {process.returncode}: {said.read().decode(errors='replace').strip()}")
    return used.ru_utime + used.ru_stime


def measured(command: tuple[str, ...], repeats: int) -> float:
    """The median of several runs, after one that fills the caches, in seconds."""
    processor_seconds(command)
    return median(processor_seconds(command) for _ in range(repeats))


def distrain() -> tuple[str, ...]:
    """The installed command beside this Python, else the module."""
    script = Path(sys.executable).with_name("distrain")
    return (str(script),) if script.exists() else (sys.executable, "-m", "distrain")


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    bare = measured(PYTHON, repeats)
    over = False
    print(f"{'processor time, median of ' + str(repeats):<42}{'ms':>8}{'budget':>8}{'x python -c pass':>18}")
    print(f"{'python -c pass':<42}{bare * 1e3:>8.0f}{'':>8}{1:>18.1f}")
    for words, budget in COMMANDS:
        seconds = measured((*distrain(), *words.split()), repeats)
        over |= seconds > budget
        mark = "  over" if seconds > budget else ""
        print(f"{'distrain ' + words:<42}{seconds * 1e3:>8.0f}{budget * 1e3:>8.0f}{seconds / bare:>18.1f}{mark}")
    sys.exit(over)


if __name__ == "__main__":
    main()
