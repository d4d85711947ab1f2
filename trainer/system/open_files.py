"""How many files the controller keeps open, and the limit on them.

The limit is raised to what is needed and no further: children inherit it, and for each host pdsh closes every file descriptor that the
limit allows.
"""

from __future__ import annotations

import resource
from contextlib import suppress

from ..spec.problem import Problem

MOST_MAPS = 1 << 16  # files of tokens and of the rest of a rank: about as many as Linux lets a process map (vm.max_map_count)
SPARE = 256  # files of the interpreter, logs, and connections that have not registered as ranks


def needed_files(ranks: int, hosts: int) -> int:
    """Return how many files are open at once: two pipes a local rank; with hosts, a socket a rank and three pipes of each host's ssh."""
    return SPARE + (ranks + 3 * hosts if hosts else 2 * ranks)


def raise_limit_of_maps() -> None:
    """Raise this process's limit on open files as far as it goes: each file of tokens that a rank maps into its memory stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, MOST_MAPS) if hard != resource.RLIM_INFINITY else MOST_MAPS
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def raise_limit(files: int) -> Problem | None:
    """Raise this process's limit to `files` open files; return the problem where it can't be raised so far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    except (OSError, ValueError):
        says = f"a run of this size needs {files:,} open files where it is launched, and the limit there is {hard if hard >= 0 else soft:,}"
        return Problem(rule="files", says=says, mend=f"raise the limit: `ulimit -n {files}`, as root or in /etc/security/limits.conf")
    return None
