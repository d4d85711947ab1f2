"""The memory of this machine that a program can have, within the limit of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# The files of a container's limit and of what it uses, in bytes: cgroups of version 2, of version 1.
CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def program_memory() -> int:
    """Return the bytes of this machine's memory that a program can use: all of it, or the container's limit."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(limit for limit, _ in _container_limits())])


def free_memory() -> int:
    """Return the bytes that a new process can have, within the container's limit; 0 where the system does not report them."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
    return max(0, min([available, *(limit - used for limit, used in _container_limits())]))


def _container_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of each limit that this container has; `used` is 0 where it is not known."""
    for limit, used in CGROUP_FILES:
        if (most := _number_in(CGROUPS / limit)) is not None:
            yield most, _number_in(CGROUPS / used) or 0


def _number_in(file: Path) -> int | None:
    """Return the number in a file; None where there is none, as in a limit of "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
