"""The hosts of a run and the commands that launch it, as its launch section says."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..rundir.files import run_folder, start_file
from ..spec.numbers.as_text import plural
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from .commands.command import LaunchCommands, LaunchRequest, run_port
from .commands.deepspeed import deepspeed_commands
from .commands.sbatch import sbatch_commands
from .commands.shell_loop import local_commands
from .commands.torchrun import torchrun_commands, torchrun_in_pods_commands
from .hosts.hostfile import Host, filter_hosts, first_slots, read_hostfile, select_hosts
from .hosts.slurm_nodes import allocated_hosts, slurm_job

RANK_MODULE = "distrain.trainer.loop.rank"  # what every rank runs, whichever launcher starts it
BOOTSTRAP_MODULE = "distrain.trainer.launch.agent.bootstrap"  # what DeepSpeed's launcher starts for each slot
SPARES_KEY = "spares"
HOST_KEYS = ("hostfile", "include", "exclude", "address", SPARES_KEY)
HOST_KEYS_BY_LAUNCH = {"local": (), "slurm": (), "torchrun": HOST_KEYS[:-1], "deepspeed": HOST_KEYS}  # torchrun replaces no host


@dataclass(frozen=True, kw_only=True)
class RunHosts:
    """A run's hosts, one per node, and its spares, both in the order of the hostfile; none for launch=local and slurm."""

    hosts: tuple[Host, ...] = ()
    spares: tuple[Host, ...] = ()


def resolve_hosts(run: Run) -> RunHosts:
    """Return the hosts of a run with their slots; raises Unreadable with all that is wrong."""
    launch, cluster = run.launch, run.cluster
    _refuse_unread_keys(run)
    if not HOST_KEYS_BY_LAUNCH[launch.name] or _reads_environment(run):
        return RunHosts()
    found = select_hosts(
        available_hosts(run),
        launch.hostfile or slurm_job(os.environ),
        nodes=cluster.nodes,
        gpus=cluster.gpus,
        spares=launch.spares if SPARES_KEY in HOST_KEYS_BY_LAUNCH[launch.name] else None,
        include=launch.include,
        exclude=launch.exclude,
        reading=run.reading,
    )
    return RunHosts(hosts=found[: cluster.nodes], spares=found[cluster.nodes :])


def _reads_environment(run: Run) -> bool:
    """Whether torchrun is to find its hosts in the environment of each, as in Kubernetes: nothing here names them."""
    launch = run.launch
    return launch.name == "torchrun" and not any(getattr(launch, key) for key in HOST_KEYS) and not slurm_job(os.environ)


def hosts_to_measure(run: Run, devices: int | None) -> tuple[Host, ...]:
    """Return the hosts that launch=deepspeed names, with the slots that are left, or with the first `devices` of them; () for launch=local.

    The cluster of the run does not matter, since it is to be measured. Raises Unreadable with all that is wrong.
    """
    launch = run.launch
    _refuse_unread_keys(run)
    if launch.name == "local":
        return ()
    if launch.name != "deepspeed":
        says = f"launch={launch.name} leaves hosts to another program"
        raise Unreadable([Problem(rule="launch", says=says, mend="set launch=deepspeed, which reaches them by ssh")])
    if launch.hostfile is None and slurm_job(os.environ) and devices is None:
        says = f"{slurm_job(os.environ)} does not say how many devices of a node to measure"
        raise Unreadable([Problem(rule="hostfile", says=says, mend="say it with --devices, or give launch.hostfile")])
    path = launch.hostfile or slurm_job(os.environ)
    available = available_hosts(replace(run, cluster=replace(run.cluster, gpus=devices or run.cluster.gpus)))
    hosts, problems = filter_hosts(available, path, launch.include, launch.exclude)
    counts = [len(each.slots) for each in hosts]
    if problems:
        raise Unreadable(problems)
    if devices is None and len(set(counts)) > 1:
        says = f"the hosts have {min(counts)} to {max(counts)} slots, and a cluster as many devices in each node"
        raise Unreadable([Problem(rule="hostfile", says=says, mend=f"measure the first of each with --devices={min(counts)}")])
    if devices is not None and devices > min(counts):
        short = next(each for each in hosts if len(each.slots) < devices)
        says = f"--devices={devices}: {short.name} has {plural(len(short.slots), 'slot')}"
        raise Unreadable([Problem(rule="hostfile", says=says, mend=f"--devices={min(counts)} or fewer")])
    return tuple(first_slots(each, devices or len(each.slots)) for each in hosts)


def for_first_host(run: Run, named: Host, first: Host) -> Run:
    """Return the run for attempts whose first host is `first`: launch.address belongs to `named`, the first one of the hostfile."""
    return run if first.name == named.name else replace(run, launch=replace(run.launch, address=None))


def _refuse_unread_keys(run: Run) -> None:
    launch = run.launch
    unread = [key for key in HOST_KEYS if getattr(launch, key) and key not in HOST_KEYS_BY_LAUNCH[launch.name]]
    if unread:
        raise Unreadable([_unread_key_problem(run, key) for key in unread])


def available_hosts(run: Run) -> tuple[Host, ...]:
    """Return all hosts that a run could use: those of its hostfile, or of the Slurm job that this process runs in. Raises Unreadable."""
    if run.launch.hostfile is not None:
        return read_hostfile(run.launch.hostfile)
    if slurm_job(os.environ):
        return allocated_hosts(os.environ, run.cluster.gpus)
    alone = "run it in a Slurm job with launch.runner=slurm" if run.cluster.nodes > 1 else "set launch=local to use this machine only"
    if run.launch.name == "torchrun":
        alone = "leave out launch.include, launch.exclude and launch.address, and run it where the environment of each host says them"
    mend = f"name a file with a line per host: host1 slots={run.cluster.gpus}; or {alone}"
    raise Unreadable([Problem(rule="hostfile", says=f"launch={run.launch.name} needs launch.hostfile", mend=mend)])


def nodes_problem(run: Run) -> Problem | None:
    """Return the problem of launch=local for GPUs in several nodes; None for any other run. CPU nodes may be processes here."""
    cluster = run.cluster
    if run.launch.name != "local" or cluster.nodes == 1 or cluster.device.kind != "cuda":
        return None
    says = f"launch=local starts every rank on one machine, and the cluster has {cluster.nodes:,} nodes of {plural(cluster.gpus, 'GPU')}"
    mend = "set launch=deepspeed launch.hostfile=FILE, or launch=deepspeed launch.runner=slurm in a Slurm job"
    return Problem(rule="launch", says=says, mend=mend)


def _unread_key_problem(run: Run, key: str) -> Problem:
    launch = run.launch
    by_sbatch = launch.name == "slurm" and key != SPARES_KEY
    mend = "name hosts on sbatch's command line: --nodelist, --exclude" if by_sbatch else "set launch=deepspeed"
    return Problem(rule="launch", says=f"launch.{key}={getattr(launch, key)} is not read by launch={launch.name}", mend=mend)


def launch_commands(run: Run, hosts: Sequence[Host], environment: Mapping[str, str] = os.environ, *, notice: float = 0.0) -> LaunchCommands:
    """Return the commands and files that start a run on `hosts`; raises Unreadable with all that is wrong.

    `notice` is how many seconds before a time limit the ranks must be asked to stop, so that they can save.
    """
    launch, cluster = run.launch, run.cluster
    cuda = cluster.device.kind == "cuda"
    match launch.name:
        case "local":
            if problem := nodes_problem(run):
                by_hand = "; or launch=slurm or launch=torchrun, to start it by hand"
                raise Unreadable([replace(problem, mend=f"{problem.mend}{by_hand}")])
            return local_commands(_launch_request(run, RANK_MODULE, ()), cluster.nodes * cluster.gpus)
        case "deepspeed":
            request = _launch_request(run, BOOTSTRAP_MODULE, hosts)
            return deepspeed_commands(request, hosts, environment, launch.environment, launch.runner)
        case "torchrun" if not hosts:
            request = replace(_launch_request(run, RANK_MODULE, ()), address="127.0.0.1")  # the script reads the address itself
            return torchrun_in_pods_commands(request, nodes=cluster.nodes, gpus=cluster.gpus, fixed_port=run.launch.port is not None)
        case "torchrun":
            return torchrun_commands(_launch_request(run, RANK_MODULE, hosts), hosts, cuda=cuda)
        case "slurm":
            request = replace(_launch_request(run, RANK_MODULE, ()), address="0.0.0.0")  # the batch file finds the address itself
            return sbatch_commands(request, name=run.name, nodes=cluster.nodes, gpus=cluster.gpus, cuda=cuda, notice=notice)


def _launch_request(run: Run, module: str, hosts: Sequence[Host]) -> LaunchRequest:
    folder = run_folder(run)
    return LaunchRequest(
        module=module,
        arguments=(str(folder / "run.json"), *([str(start_file(run)[0])] if module == RANK_MODULE else [])),
        python=sys.executable,
        folder=folder,
        address=run.launch.address or (hosts[0].name if hosts else ""),
        port=run.launch.port or run_port(folder),
    )
