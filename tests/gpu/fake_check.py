"""A check for test_acceptance.py, which ends in every way that a check can."""

from __future__ import annotations

import subprocess

from distrain.scripts.gpu.finding import CheckBroken, Finding
from distrain.scripts.gpu.place import Place


def act(place: Place, *, what: str) -> Finding:
    """Do what is asked; raises CheckBroken, and KeyError for a crash."""
    match what:
        case "sleeps":
            subprocess.run(["sleep", "600"], check=True)
        case "is broken":
            raise CheckBroken("for a reason")
        case "crashes":
            raise KeyError("x")
        case "departs":
            return Finding(figures={"a": 1}, departures=("a is not 2",))
    return Finding(figures={"earlier": sorted(place.earlier)})
