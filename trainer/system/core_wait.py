"""How long this process has waited for a core, by the kernel's own count."""

from __future__ import annotations


def seconds_without_core() -> float | None:
    """Return the seconds in which the main thread of this process was ready to run and another thread had its core, since it began; None
    where the system does not count them (Linux does: Documentation/scheduler/sched-stats.rst)."""
    try:
        with open("/proc/self/schedstat", encoding="ascii") as file:
            ran, waited, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return waited / 1e9 if ran else None
