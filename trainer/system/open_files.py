"""How many files the launching process holds open, and whether it may.

The limit is raised to what is needed and no further: children inherit it, and pdsh closes, for each host that it calls, every file
that it could have open.
"""

from __future__ import annotations

import resource

from ..spec.problem import Problem

SPARE = 256  # files beside: of the interpreter, logs, who stands at the door without being a rank


def held(ranks: int, hosts: int) -> int:
    """Files that are open at once: of each rank here two pipes; with hosts a socket of each rank, and three pipes of each host's ssh."""
    return SPARE + (ranks + 3 * hosts if hosts else 2 * ranks)


def allowed(files: int) -> Problem | None:
    """Have so many files allowed to this process; why not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    except (OSError, ValueError):
        says = f"a run of this size holds {files:,} files open where it is launched, and {hard if hard >= 0 else soft:,} are allowed there"
        return Problem(rule="files", says=says, mend=f"raise the limit: `ulimit -n {files}`, as root or in /etc/security/limits.conf")
    return None
