"""The nodes of a Slurm job as the hosts of a run, for launch=deepspeed without a hostfile."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import cache

from ...spec.problem import Problem, Unreadable
from .hostfile import Host, parse_hostfile

JOB_ID_VARIABLE, NODE_LIST_VARIABLE = "SLURM_JOB_ID", "SLURM_JOB_NODELIST"  # set in every process of a job
PATIENCE = 60.0  # seconds for scontrol, which only expands the list

# For srun, in a step beside the one that this process may run in. The ranks share a host's cores as they like, and srun ends no other
# rank when one fails: the controller does that.
SRUN_OPTIONS = ("--distribution=block", "--overlap", "--overcommit", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0")


def slurm_job(environment: Mapping[str, str]) -> str:
    """Return the name of the job that this process runs in, for messages; "" outside of one."""
    return f"Slurm's job {environment[JOB_ID_VARIABLE]}" if environment.get(JOB_ID_VARIABLE) and environment.get(NODE_LIST_VARIABLE) else ""


def allocated_hosts(environment: Mapping[str, str], slots: int) -> tuple[Host, ...]:
    """Return the hosts of the job that this process runs in, with `slots` slots each; raises Unreadable where scontrol fails."""
    names = _node_names(environment[NODE_LIST_VARIABLE])
    return parse_hostfile("".join(f"{name} slots={slots}\n" for name in names), slurm_job(environment))


@cache
def _node_names(node_list: str) -> tuple[str, ...]:
    """Expand a node list in Slurm's format, node[01-04,7]."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, errors="replace", timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "no answer"
    else:
        if done.returncode == 0:
            return tuple(done.stdout.split())
        why = " ".join(done.stderr.split())
    says = f"scontrol can't expand the node list {node_list}: {why}"
    raise Unreadable([Problem(rule="hostfile", says=says, mend="give launch.hostfile")])
