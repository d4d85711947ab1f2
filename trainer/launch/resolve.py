"""How a run is started, as its launch= says: the hosts, the command and the files, for `fit` to use and for `show --launch` to print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from ...cli.pages.format import WOULD_REFUSE, many, one_line
from ...cli.verbs.fit import folder_of
from ..plan.result import Plan
from ..rundir.paths import whole_paths
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from .commands.by_hand import local, slurm, torchrun
from .commands.deepspeed import Launching, Start, deepspeed, port_of
from .hosts.hostfile import Host, hosts_of, read_hosts
from .hosts.slurm_nodes import allocated, job

RANK = "distrain.trainer.loop.rank"  # what every rank runs, by whomever it was started
GUEST = "distrain.trainer.launch.agent.bootstrap"  # beside DeepSpeed's launcher: a rank's keeper, which tells the launching process of it
KEYS = ("hostfile", "include", "exclude", "address")  # that only some ways of launching read
READ = {"local": (), "slurm": (), "torchrun": KEYS, "deepspeed": KEYS}


def hosts(run: Run) -> tuple[Host, ...]:
    """The hosts of a run with their slots, none for launch=local and slurm; raises Unreadable with all that is wrong."""
    launch, cluster = run.launch, run.cluster
    unread = [key for key in KEYS if getattr(launch, key) and key not in READ[launch.name]]
    if unread:
        raise Unreadable([_unread(run, key) for key in unread])
    if not READ[launch.name]:
        return ()
    return hosts_of(
        listed(run),
        launch.hostfile or job(os.environ),
        nodes=cluster.nodes,
        gpus=cluster.gpus,
        include=launch.include,
        exclude=launch.exclude,
        reading=run.reading,
    )


def listed(run: Run) -> tuple[Host, ...]:
    """All hosts that a run could take: those of its hostfile, or of the job of Slurm that this is run in. Raises Unreadable."""
    if run.launch.hostfile is not None:
        return read_hosts(run.launch.hostfile)
    if job(os.environ):
        return allocated(os.environ, run.cluster.gpus)
    mend = "name a file, a line a host: host1 slots=8; or set launch=local for this machine alone"
    raise Unreadable([Problem(rule="hostfile", says=f"launch={run.launch.name} wants launch.hostfile", mend=mend)])


def _unread(run: Run, key: str) -> Problem:
    launch = run.launch
    mend = "name hosts on sbatch's command line: --nodelist, --exclude" if launch.name == "slurm" else "set launch=deepspeed"
    return Problem(rule="launch", says=f"launch.{key}={getattr(launch, key)} is not read by launch={launch.name}", mend=mend)


def start_of(run: Run, module: str, found: Sequence[Host]) -> Start:
    """What every way of starting is told."""
    folder = folder_of(run)
    return Start(
        module=module,
        arguments=(str(folder / "run.json"),),
        python=sys.executable,
        folder=folder,
        address=run.launch.address or (found[0].name if found else ""),
        port=run.launch.port or port_of(folder),
    )


def launching(run: Run, environment: Mapping[str, str] = os.environ, *, notice: float = 0.0) -> Launching:
    """The commands and files that start a run; raises Unreadable with all that is wrong.

    `notice`: seconds in which a run can stop and save, for what tells it beforehand that it will be stopped.
    """
    launch, cluster, found = run.launch, run.cluster, hosts(run)
    cuda = cluster.device.kind == "cuda"
    match launch.name:
        case "local":
            return local(start_of(run, RANK, ()), cluster.nodes * cluster.gpus)
        case "deepspeed":
            return deepspeed(start_of(run, GUEST, found), found, environment, launch.environment, launch.runner)
        case "torchrun":
            return torchrun(start_of(run, RANK, found), found, cuda=cuda)
        case "slurm":
            start = replace(start_of(run, RANK, ()), address="0.0.0.0")  # the file finds it out
            return slurm(start, name=run.name, nodes=cluster.nodes, gpus=cluster.gpus, cuda=cuda, notice=notice)


def shown(run: Run, *, launch: bool, engine: bool) -> Iterator[str]:
    """The launch of a run, what its engine is told, or both; raises Unreadable where it can't be laid out."""
    from msgspec import json

    from ..plan.deepspeed.config import config
    from ..plan.plan import make_plan
    from ..plan.save_interval import stopping

    plan = make_plan(run)
    if plan.mesh is None:
        raise Unreadable(plan.problems)
    if launch:
        notice = stopping(run, plan.time.step if plan.time else None, plan.saving.seconds if plan.saving else None)
        yield from script(run, plan, launching(run, notice=notice))
    if engine:
        yield json.format(json.encode(config(run, plan.mesh["dp"]))).decode()


def would_refuse(run: Run) -> Iterator[str]:
    """What ranks of a run would refuse of its folder, as it is here: a script overwrites its run.json before it starts them."""
    from ..rundir.resume import check_resume

    for problem in check_resume(run, folder_of(run)).problems:
        yield f"warning: {WOULD_REFUSE}: {problem}"


def script(run: Run, plan: Plan, made: Launching) -> Iterator[str]:
    """A launch as a script for bash that does the same in whatever folder it is run: its files, then its commands.

    Where hosts have a command each, the script is run on each of them, with its number.
    """
    from msgspec import json

    folder, cluster = folder_of(run), run.cluster
    yield _remark(f"{run.name}, launch={run.launch.name}: {many(cluster.nodes, 'node')} x {cluster.gpus}")
    for remark in made.remarks:
        yield _remark(remark)
    yield "set -euo pipefail"
    yield f"mkdir -p {quote(str(folder / 'launch'))}"
    yield from _file(folder / "run.json", json.encode(whole_paths(run)).decode())
    yield from _file(folder / "plan.json", json.encode(plan).decode())
    for file in made.files:
        yield from _file(file.path, file.text.rstrip("\n"))
        if file.mode & 0o100:
            yield f"chmod {file.mode:o} {quote(str(file.path))}"
    yield ""
    yield from made.lines
    if len(made.commands) > 1:
        yield from _by_host(made)
    else:
        yield from (line for each in made.commands for line in (*([_remark(f"on {each.where}")] if each.where else []), str(each)))


def _by_host(made: Launching) -> Iterator[str]:
    """The command of the host whose number the script is given."""
    usage = f"give the number of this host: {', '.join(f'{number} on {each.where}' for number, each in enumerate(made.commands))}"
    yield _remark(usage)
    yield "case ${1-} in"
    for number, each in enumerate(made.commands):
        yield f"{number}) {each} ;;"
    yield f"*) echo {quote(usage)} >&2; exit 2 ;;"
    yield "esac"


def _file(path: Path, text: str) -> Iterator[str]:
    yield f"cat > {quote(str(path))} <<'END'"
    yield text
    yield "END"


def _remark(words: str) -> str:
    return f"# {one_line(words)}"
