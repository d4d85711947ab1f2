"""The command and files for DeepSpeed's launcher, which starts a bootstrap process per slot on the hosts.

The launcher pastes its arguments and some environment variables, unquoted, into the command lines of remote shells, and logs them.
So everything that it gets is checked to be shell-safe, and the ranks' variables travel in the join token, a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...spec.problem import Problem, Unreadable
from ..hosts.hostfile import Host, hostfile_text, include_text
from ..hosts.shell_safe import SSH_OPTIONS, require_shell_safe
from ..hosts.slurm_nodes import SRUN_OPTIONS
from .command import RANK_ENVIRONMENT, Command, LaunchCommands, LaunchFile, LaunchRequest, check_request, forwarded_variables
from .mpirun_environment import mpirun_environment

# Prefixes of variables that DeepSpeed's launcher pastes into remote shells (EXPORT_ENVS, and NCCL for CUDA).
PASTED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
PYTHON_PATHS = ("PYTHONPATH", "PYTHONHOME")  # of these, the ones that the launcher's own processes may need to start

# Runs the launcher's programs, which then start in two thirds of the time.
PROGRAM_MODULE = "distrain.trainer.launch.agent.deepspeed_program"

# A pdsh that DeepSpeed's runner finds first. When the runner gets a stop signal, it runs `pkill -f` for launchers by name on every host,
# which would kill other runs' too. This run ends without that: each bootstrap (agent/bootstrap.py) ends with its connection.
PDSH_WRAPPER = f"""\
#!/bin/sh
for word; do
    shift
    case $word in
    "pkill "*) exit 0 ;;
    deepspeed.launcher.launch) set -- "$@" {PROGRAM_MODULE} ;;
    esac
    set -- "$@" "$word"
done
PATH=${{PATH#"${{0%/*}}":}}
exec pdsh "$@"
"""

SRUN_BOOTSTRAP = Path(__file__).parents[1] / "agent" / "bootstrap_srun.py"  # the launcher has srun start a file, not a module

# launch.runner -> the programs that it needs on this machine
RUNNER_PROGRAMS = {"pdsh": ("pdsh",), "openmpi": ("mpirun", "ompi_info"), "slurm": ("srun", "sinfo")}


def deepspeed_commands(
    request: LaunchRequest, hosts: Sequence[Host], environment: Mapping[str, str], further: Sequence[str], runner: str
) -> LaunchCommands:
    """Start a run with DeepSpeed's launcher over `runner` (pdsh, openmpi, slurm); `further` names variables to forward as well.

    Raises Unreadable where an argument or variable is not shell-safe.
    """
    check_request(request)
    folder = request.launch_folder
    # The launcher pastes the working folder as the system names it.
    require_shell_safe(
        os.path.realpath(folder), "the launcher's folder", "set log.dir to a folder of only these characters, links resolved"
    )
    options = ["--hostfile", str(folder / "hosts"), "--launcher", runner, "--force_multi", "--no_ssh_check", "--no_local_rank"]
    added, selection = _runner_settings(runner, hosts, environment)
    options += [*selection, "--master_addr", request.address, "--master_port", str(request.port)]
    options += [require_shell_safe(str(SRUN_BOOTSTRAP), "the path", "")] if runner == "slurm" else ["--module", request.module]
    exports = RANK_ENVIRONMENT | ({"MASTER_ADDR": request.address, "MASTER_PORT": str(request.port)} if runner != "pdsh" else {})
    forwarded = sorted(forwarded_variables(environment, further))
    return LaunchCommands(
        commands=(
            Command(
                argv=(request.python, "-m", PROGRAM_MODULE, "deepspeed.launcher.runner", *options, *request.arguments),
                folder=folder,  # the launcher puts its working folder on Python's path, here and on each host
                environment={"DS_ENV_FILE": str(folder / "exports"), **added},
                unset=(*_pasted_variables(environment), *_inherited_variables(environment, runner)),
                path_prefix="." if runner == "pdsh" else "",  # not the folder's path: it may contain a colon, which PATH can't
            ),
        ),
        files=(
            LaunchFile(path=folder / "hosts", text=hostfile_text(hosts)),
            LaunchFile(path=folder / "exports", text="".join(f"{key}={value}\n" for key, value in exports.items())),
            *([LaunchFile(path=folder / "pdsh", text=PDSH_WRAPPER, mode=0o700)] if runner == "pdsh" else []),
        ),
        remarks=(
            "fit also writes a join token on each host over ssh; without it these processes do not train",
            f"the token, a file of mode 0600, also carries these variables to the ranks: {', '.join(forwarded) or 'none'}",
        ),
    )


def _runner_settings(runner: str, hosts: Sequence[Host], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment variables and the launcher's options with which `runner` reaches the hosts."""
    if runner == "pdsh":
        ssh = " ".join([*environment.get("PDSH_SSH_ARGS_APPEND", "").split(), *SSH_OPTIONS])
        return {"PDSH_SSH_ARGS_APPEND": ssh}, [] if all(host.is_whole for host in hosts) else ["--include", include_text(hosts)]
    if not all(host.is_whole for host in hosts):
        says = f"launch.runner={runner} can only use each host's first slots, not {include_text(hosts)}"
        raise Unreadable([Problem(rule="runner", says=says, mend="set launch.runner=pdsh")])
    if runner == "openmpi":
        return mpirun_environment(environment, SSH_OPTIONS), []
    nodes = [f"--nodes={len(hosts)}", f"--ntasks-per-node={len(hosts[0].slots)}", f"--nodelist={','.join(host.name for host in hosts)}"]
    return {}, [f"--launcher_args={' '.join([*nodes, *SRUN_OPTIONS])}"]


def _inherited_variables(environment: Mapping[str, str], runner: str) -> tuple[str, ...]:
    """Forwarded variables that mpirun and srun must not inherit: both pass on their own environment, and the join token carries these."""
    if runner == "pdsh":
        return ()
    return tuple(sorted(key for key in forwarded_variables(environment) if not key.startswith(PASTED_PREFIXES)))


def _pasted_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that the launcher must not inherit; raises Unreadable where it needs one that is not shell-safe."""
    for key in PYTHON_PATHS:
        if environment.get(key):
            require_shell_safe(environment[key], key, f"unset {key}, or use paths of only these characters in it")
    return tuple(sorted(key for key in environment if key.startswith(PASTED_PREFIXES) and key not in PYTHON_PATHS))
