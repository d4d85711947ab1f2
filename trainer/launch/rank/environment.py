"""A rank's number among all, the address at which the ranks meet, and the environment variables that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...system.cpu import cpu_count


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """A rank's number in the run and on its machine, and the address at which the ranks meet."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return `environment` with this rank's variables, named as torch expects. The ranks of a machine share its CPUs."""
        return {
            "OMP_NUM_THREADS": str(max(1, cpu_count() // self.local_ranks)),
            **environment,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "PYTHONSAFEPATH": "1",  # otherwise `python -m` puts the working folder first, and a user's own timeit.py breaks torch
            "PYTHONUNBUFFERED": "1",  # so that the last lines before a crash are in the log
        }
