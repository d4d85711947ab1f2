"""The environment of Open MPI's mpirun, which DeepSpeed's launcher starts for launch.runner=openmpi.

mpirun starts a daemon on each host over ssh. It copies the Open MPI parameters of its environment, between double quotes, onto that
ssh's command line, which a shell on the host reads (Open MPI 4.1, orte/mca/plm/rsh); OPAL_PREFIX goes there without quotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from ...spec.problem import Problem, Unreadable

PREFIXES = ("OMPI_", "OPAL_", "ORTE_", "PMIX_")  # of variables that mpirun reads and passes on to what it starts
SSH_ARGS = "OMPI_MCA_plm_rsh_args"
SETTINGS = {
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",  # this machine calls every host, as it did before
    "OMPI_MCA_rmaps_base_mapping_policy": "slot",  # fill a host's slots before those of the next
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # the ranks choose their own cores
}
ALLOW_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")  # mpirun refuses to run as root without both
_UNSAFE = re.compile(r"[^A-Za-z0-9._/=:,^@%+-]")


def launcher_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that mpirun and DeepSpeed's launcher gave to this process; its children must not inherit them."""
    found = [name for name in environment if name.startswith(PREFIXES)]
    return [*found, "UCX_TLS"] if found and "UCX_TLS" in environment else found


def mpirun_environment(environment: Mapping[str, str], ssh: Sequence[str]) -> dict[str, str]:
    """The variables to add for mpirun; `ssh` are options for its ssh. Raises Unreadable where a remote shell would misread one."""
    problems = list(_unsafe_variables(environment))
    if problems:
        raise Unreadable(problems)
    root = dict.fromkeys(ALLOW_ROOT, "1") if os.geteuid() == 0 else {}
    return {**SETTINGS, **root, SSH_ARGS: " ".join([*environment.get(SSH_ARGS, "").split(), *ssh])}


def _unsafe_variables(environment: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in sorted(environment.items()):
        odd = _UNSAFE.search(f"{name}{''.join(value.split()) if name == SSH_ARGS else value}")
        if name.startswith(PREFIXES) and odd:
            says = f"mpirun passes {name} to a shell on each host, and it contains {odd[0]!r}"
            yield Problem(rule="words", says=says, mend="unset it, or use only letters, digits and . _ / = : , ^ @ % + - in it")
