"""A check for test_acceptance.py, which ends in every way that a check can."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from distrain.scripts.gpu.check_context import CheckContext
from distrain.scripts.gpu.finding import CheckBroken, CheckSkipped, Finding


def act(context: CheckContext, *, what: str) -> Finding:
    """Do what is asked; raises CheckBroken, CheckSkipped, and KeyError for a crash."""
    match what:
        case "sleeps":
            (context.folder / "asleep").write_text(str(os.getpid()))
            subprocess.run(["sleep", "600"], check=True)
        case "waits for one that sleeps":
            while not (context.folder / "asleep").exists():
                time.sleep(0.01)
        case "looks for one that sleeps":
            sleeper = (context.folder / "asleep").read_text()
            return Finding(figures={"alive": Path(f"/proc/{sleeper}").exists()})
        case "is broken":
            raise CheckBroken("for a reason")
        case "needs another machine":
            raise CheckSkipped("it needs two")
        case "crashes":
            raise KeyError("x")
        case "departs":
            return Finding(figures={"a": 1}, departures=("a is not 2",))
    return Finding(figures={"earlier": sorted(context.earlier)})
