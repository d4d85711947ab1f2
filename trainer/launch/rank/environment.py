"""Where one rank stands among all, and the environment that tells it so."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's number in the run and on its machine, and where the ranks meet."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`environment` with this place in it, in torch's names."""
        return {
            "OMP_NUM_THREADS": str(max(1, _cores() // self.local_ranks)),
            **environment,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "PYTHONSAFEPATH": "1",  # else `python -m` puts the working folder first, and a user's own timeit.py breaks torch
            "PYTHONUNBUFFERED": "1",  # the last words before a crash are in the log
        }


def reserve_port() -> socket.socket:
    """A socket that keeps a free port until it is closed, and lets rank 0 listen there all the same.

    Linux hands a port that is bound to nobody who asks for any; a listener that sets SO_REUSEADDR, as torch's store
    does, may still have it, because this socket doesn't listen. So only someone who wants this very number takes it.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
