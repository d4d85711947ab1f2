"""The CPUs of this process."""

from __future__ import annotations

import os


def cpu_count() -> int:
    """Return the number of CPUs that this process may run on (its affinity mask, where the system has one)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
