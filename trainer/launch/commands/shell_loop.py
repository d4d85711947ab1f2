"""A shell loop that starts a run's ranks on this machine, for people who start them without `fit`."""

from __future__ import annotations

from shlex import join, quote

from ..rank.environment import RankEnvironment
from .command import LaunchCommands, LaunchRequest


def local_commands(request: LaunchRequest, ranks: int) -> LaunchCommands:
    """Start all ranks from one shell; when one fails, or the shell gets a stop signal, the others get one too."""
    first = RankEnvironment(rank=0, ranks=ranks, local_rank=0, local_ranks=ranks, address="127.0.0.1", port=request.port)
    per_rank = ("RANK", "LOCAL_RANK")
    shared = {key: value for key, value in first.variables({}).items() if key not in per_rank}
    threads = shared.pop("OMP_NUM_THREADS")
    lines = (
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}} {' '.join(f'{key}={quote(value)}' for key, value in shared.items())}",
        "trap 'kill $(jobs -p) 2> /dev/null || :; wait' EXIT",
        f"for rank in $(seq 0 {ranks - 1}); do",
        f"    {' '.join(f'{key}=$rank' for key in per_rank)} {join((request.python, '-m', request.module, *request.arguments))} &",
        "done",
        'for rank in $(jobs -p); do wait "$rank"; done',
    )
    remarks = ("fit starts each rank beside an agent that ends it with fit, and picks a free port",)
    return LaunchCommands(commands=(), lines=lines, remarks=remarks)
