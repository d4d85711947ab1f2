"""How a run is started, as its launch= says: the hosts, the command and the files, for `fit` to use and for `show --launch` to print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join, quote

from ..trainer.launch.allocation import allocated, job
from ..trainer.launch.by_hand import slurm, torchrun
from ..trainer.launch.hostfile import Host, hosts_of, read_hosts
from ..trainer.launch.place import Place
from ..trainer.launch.words import Command, Launching, Start, deepspeed, port_of
from ..trainer.spec.problem import Problem, Unreadable
from ..trainer.spec.run import Run
from .fit import folder_of, typed
from .text import many, one_line

RANK = "distrain.trainer.loop.rank"  # what every rank runs, by whomever it was started
GUEST = "distrain.trainer.launch.guest"  # beside DeepSpeed's launcher: a rank's keeper, which tells the launching process of it
KEYS = ("hostfile", "include", "exclude", "address")  # that only some ways of launching read
READ = {"local": (), "slurm": (), "torchrun": KEYS, "deepspeed": KEYS}
SHOWN = 16  # ranks of launch=local that are spelt out


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
            return _local(run)
        case "deepspeed":
            return deepspeed(start_of(run, GUEST, found), found, environment, launch.environment, launch.runner)
        case "torchrun":
            return torchrun(start_of(run, RANK, found), found, cuda=cuda)
        case "slurm":
            start = replace(start_of(run, RANK, ()), address="0.0.0.0")  # the file finds it out
            return slurm(start, name=run.name, nodes=cluster.nodes, gpus=cluster.gpus, cuda=cuda, notice=notice)


def _local(run: Run) -> Launching:
    start, ranks = start_of(run, RANK, ()), run.cluster.nodes * run.cluster.gpus
    places = [
        Place(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, address="127.0.0.1", port=start.port)
        for rank in range(min(ranks, SHOWN))
    ]
    more = (f"and so on to rank {ranks - 1}",) if ranks > SHOWN else ()
    return Launching(
        commands=tuple(
            Command(words=(start.python, "-m", start.module, *start.arguments), environment=place.environment({})) for place in places
        ),
        remarks=("fit starts them together, each beside a process that ends it, at a port that is free", *more),
    )


def shown(run: Run, words: Sequence[str], *, launch: bool, engine: bool) -> Iterator[str]:
    """The launch of a run, what its engine is told, or both; raises Unreadable where it can't be laid out."""
    from msgspec import json

    from ..trainer.plan.plan import make_plan
    from ..trainer.plan.saving import stopping
    from ..trainer.plan.told import config

    plan = make_plan(run)
    if plan.mesh is None:
        raise Unreadable(plan.problems)
    if launch:
        notice = stopping(run, plan.time.step if plan.time else None, plan.saving.seconds if plan.saving else None)
        yield from script(run, launching(run, notice=notice), words)
    if engine:
        yield json.format(json.encode(config(run, plan.mesh["dp"]))).decode()


def script(run: Run, made: Launching, words: Sequence[str]) -> Iterator[str]:
    """A launch as a shell script: its files, then its commands; `words` are those of the command line that gave the run."""
    from msgspec import json

    folder, cluster = folder_of(run), run.cluster
    yield _remark(f"{run.name}, launch={run.launch.name}: {many(cluster.nodes, 'node')} x {cluster.gpus}")
    for remark in made.remarks:
        yield _remark(remark)
    yield f"mkdir -p {quote(str(folder / 'launch'))}"
    yield from _file(folder / "run.json", json.encode(run).decode())
    yield f"{typed()} {join(['plan', *words, '--json'])} > {quote(str(folder / 'plan.json'))}"
    for file in made.files:
        yield from _file(file.path, file.text.rstrip("\n"))
        if file.mode & 0o100:
            yield f"chmod {file.mode:o} {quote(str(file.path))}"
    for each in made.commands:
        yield ""
        if each.where:
            yield _remark(f"on {each.where}")
        yield str(each)


def _file(path: Path, text: str) -> Iterator[str]:
    yield f"cat > {quote(str(path))} <<'END'"
    yield text
    yield "END"


def _remark(words: str) -> str:
    return f"# {one_line(words)}"
