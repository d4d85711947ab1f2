"""The hosts of a run, asked before anything starts, as a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

import typer

from ...trainer.launch.hosts.hostfile import Host
from ...trainer.launch.hosts.ssh import Stopped
from ...trainer.launch.preflight.checks import Asked, Seen
from ...trainer.launch.preflight.preflight import Report, preflight
from ...trainer.plan.result import Plan
from ...trainer.spec.problem import Problem
from ...trainer.spec.run import Run
from ..verbs.fit import folder_of
from .console import tell
from .format import many, narrow_table, rate, seconds, size, width, wrapped

CARRIED = ("NCCL_", "GLOO_")  # variables that say over which links ranks talk


def asked_of(run: Run, plan: Plan) -> Asked:
    """What a run wants of its hosts."""
    between = run.cluster.between
    return Asked(
        python=sys.executable,
        folder=folder_of(run),
        kind=run.cluster.device.kind,
        save=plan.run.checkpoint_bytes if plan.run else 0,
        keep=run.checkpoint.keep,
        rate=between.rate if between else None,
        environment={key: value for key, value in os.environ.items() if key.startswith(CARRIED)},
    )


def looked(hosts: Sequence[Host], run: Run, plan: Plan, show: Callable[[str], object]) -> tuple[Problem, ...]:
    """Ask all hosts and show what they say; the problems that stop the run. A signal meanwhile ends the command, in a line."""
    try:
        report = preflight(hosts, asked_of(run, plan))
    except Stopped as stopped:
        tell(f"distrain: {stopped} while the hosts were asked")
        raise typer.Exit(128 + stopped.number) from None
    for line in lines(report):
        show(line)
    return report.problems


def lines(report: Report) -> Iterator[str]:
    """A line a host, then what is worth a word."""
    heads = ["host", "answers in", "python", "torch", "slots", "has", "free disk", "clock", "reaches"]
    yield from narrow_table([heads, *(_row(each, len(report.seen)) for each in report.seen)], room=width())
    for note in report.notes:
        yield from wrapped(f"note: {note}", hang="  ")
    if report.rate is not None:
        yield f"an all-reduce between the hosts goes at {rate(report.rate, 'B/s')}"


def _row(each: Seen, hosts: int) -> list[str]:
    slots = str(len(each.host.slots))
    if each.facts is None:
        return [each.name, "-", "-", "-", slots, "-", "-", "-", "-"]
    facts = each.facts
    cards, free = facts["cards"], facts["folder"].get("free")
    drift = f"{each.drift:+.0f} s" if abs(each.drift) >= 1 else "same"
    reaches = f"{len(each.links['reached'])} of {hosts - 1}" if each.links else "-"
    return [
        each.name,
        seconds(each.seconds),
        facts["versions"]["python"],
        facts["versions"]["torch"] or "-",
        slots,
        many(len(cards), "GPU") if cards else many(facts["cores"], "core"),
        size(free) if free is not None else "-",
        drift,
        reaches if hosts > 1 else "",
    ]
