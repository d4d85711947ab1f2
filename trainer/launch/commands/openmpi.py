"""Open MPI's mpirun, which DeepSpeed's launcher starts for launch.runner=openmpi: what its environment says, and what it may not say.

mpirun starts a daemon on each host over ssh. The parameters of Open MPI that it finds in its environment it writes, between double
quotes, onto the command line of that ssh, which a shell of the host reads (Open MPI 4.1, orte/mca/plm/rsh); OPAL_PREFIX without quotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from ...spec.problem import Problem, Unreadable

READ = ("OMPI_", "OPAL_", "ORTE_", "PMIX_")  # what it reads of its environment, and hands to what it starts
SSH_ARGS = "OMPI_MCA_plm_rsh_args"
SETTINGS = {
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",  # this machine calls every host, as it did before
    "OMPI_MCA_rmaps_base_mapping_policy": "slot",  # a host's slots one after another
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # what a host gives each rank is for the rank to say
}
ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")  # without both, mpirun refuses root
_ODD = re.compile(r"[^A-Za-z0-9._/=:,^@%+-]")


def left(environment: Mapping[str, str]) -> list[str]:
    """The variables of a process that mpirun and DeepSpeed's launcher gave it, none of which is for its children."""
    found = [name for name in environment if name.startswith(READ)]
    return [*found, "UCX_TLS"] if found and "UCX_TLS" in environment else found


def surroundings(environment: Mapping[str, str], ssh: Sequence[str]) -> dict[str, str]:
    """What is added to mpirun's environment, `ssh` being options of ssh. Raises Unreadable where a shell would read more in it."""
    problems = list(_pasted(environment))
    if problems:
        raise Unreadable(problems)
    root = dict.fromkeys(ROOT, "1") if os.geteuid() == 0 else {}
    return {**SETTINGS, **root, SSH_ARGS: " ".join([*environment.get(SSH_ARGS, "").split(), *ssh])}


def _pasted(environment: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in sorted(environment.items()):
        odd = _ODD.search(f"{name}{''.join(value.split()) if name == SSH_ARGS else value}")
        if name.startswith(READ) and odd:
            says = f"mpirun has a shell of each host read {name}, and it holds {odd[0]!r}"
            yield Problem(rule="words", says=says, mend="unset it, or give it letters, digits and . _ / = : , ^ @ % + - alone")
