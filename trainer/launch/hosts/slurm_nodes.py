"""A job of Slurm as the hosts of a run: what launch=deepspeed takes inside one where no hostfile is given."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import cache

from ...spec.problem import Problem, Unreadable
from .hostfile import Host, read_text

JOB, NODES = "SLURM_JOB_ID", "SLURM_JOB_NODELIST"  # in the environment of whatever runs in a job
PATIENCE = 60.0  # seconds for scontrol, which reads a list and asks nobody

# Of srun, in a step beside the one that this process may be in. Ranks share a host's cores as they see fit, and a rank that ends
# badly ends nothing else: the run's head sees to that.
SRUN = ("--distribution=block", "--overlap", "--overcommit", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0")


def job(environment: Mapping[str, str]) -> str:
    """What to call the job that this process runs in; "" outside of one."""
    return f"Slurm's job {environment[JOB]}" if environment.get(JOB) and environment.get(NODES) else ""


def allocated(environment: Mapping[str, str], slots: int) -> tuple[Host, ...]:
    """The hosts of the job that this process runs in, with so many slots each; raises Unreadable where Slurm can't name them."""
    names = _names(environment[NODES])
    return read_text("".join(f"{name} slots={slots}\n" for name in names), job(environment))


@cache
def _names(listed: str) -> tuple[str, ...]:
    """The nodes of a list in Slurm's form, node[01-04,7]."""
    try:
        asked = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, errors="replace", timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "no answer"
    else:
        if asked.returncode == 0:
            return tuple(asked.stdout.split())
        why = " ".join(asked.stderr.split())
    says = f"scontrol can't name the nodes of {listed}: {why}"
    raise Unreadable([Problem(rule="hostfile", says=says, mend="give launch.hostfile")])
