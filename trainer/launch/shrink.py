"""What a run goes on with after a fault: the hosts that are left and well, with the layout that they can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...cli.pages.format import many
from ..plan.changed_run import changed
from ..plan.plan import make_plan
from ..plan.result import Plan
from ..spec.run import Run
from .hosts.hostfile import Host, included
from .supervisor.outcome import FAILED, Ended

TWICE = 2  # faults of a host, after which it is left out


@dataclass(kw_only=True)
class Faults:
    """How often each host was at fault in this `fit`."""

    of: Counter[str] = field(default_factory=Counter)

    def count(self, ended: Ended) -> None:
        """A start has failed. A rank that only lost its peer says nothing against its host; one stuck in the kernel holds its device."""
        end = ended.culprit
        if end is not None and end.host and not end.bereft:
            self.of[end.host] += TWICE if end.fate == "stuck" else 1

    def shunned(self, ended: Ended) -> dict[str, str]:
        """Hosts that are better left out, and why."""
        often = {host: f"at fault {faults} times" for host, faults in self.of.items() if faults >= TWICE}
        return often | dict.fromkeys(ended.hosts, "it could not be used")


class TooFew(Exception):
    """No layout of the run can be run on the hosts that are left."""


def may_go_on(ended: Ended) -> bool:
    """Whether it failed by what happens to machines, and nobody had asked it to stop."""
    end = ended.culprit
    return ended.status == FAILED and not ended.asked and (bool(ended.hosts) or (end is not None and end.blameless))


def refusal(run: Run, ended: Ended, *, restarts: int, stepped: bool, step: int | None) -> str | None:
    """Why a run is not started again after a start that has ended, and what would do; "" where that needs no word, None where it is.

    `restarts`: how often it was already; `stepped`: a start has come to a first step; `step`: the newest checkpoint's.
    """
    most, onward = run.launch.restarts, "from the beginning" if step is None else f"from step {step}"
    if ended.status != FAILED or ended.asked:
        return ""
    if not (stepped and may_go_on(ended)):
        if not most:
            return ""
        why = "the program failed, not the machine" if stepped else "it came to no first step"
        return f"{why}, and most likely would again: mend what is said of it, and the same command goes on {onward}"
    if not most:
        return f"launch.restarts=0; launch.restarts=3 would have started it again {onward}, and the same command goes on there"
    if restarts >= most:
        return f"launch.restarts={most} is used up; the same command goes on {onward}"
    return None


def on_what_is_left(
    run: Run, plan: Plan, shunned: Mapping[str, str], asked: list[tuple[int, float]] | None = None
) -> tuple[Run, Plan, str]:
    """The run for the hosts that can be reached, with their plan, and what became other, in words.

    Those to be `shunned` are taken all the same where it can't be run without them. Raises TooFew, also once it is `asked` to stop
    (launch.signals), and Unreadable where the hostfile has become wrong.
    """
    run = changed(run, [("checkpoint.resume", "auto")])
    if run.launch.name == "local":
        return run, plan, ""
    from .hosts.upload import reachable
    from .resolve import hosts

    before = hosts(run)
    there = reachable([host.name for host in before], asked)
    left = [host for host in before if host.name in there]
    well = [host for host in left if host.name not in shunned]
    for taken in (well, left):
        if len(taken) == len(before):
            return run, plan, ""
        if found := _smaller(run, plan, before[0], taken):
            out = [f"{host.name} ({shunned[host.name]})" for host in left if host not in taken]
            smaller, made, how = found
            return smaller, made, how + (f"; without {', '.join(out)}" if out else "")
    raise TooFew("too few hosts can be reached for any layout of this run")


def _smaller(run: Run, plan: Plan, first: Host, left: Sequence[Host]) -> tuple[Run, Plan, str] | None:
    """The run on as many of these hosts as it can use, with fewer replicas and the same global batch; `first` was its first host."""
    from ...cli.verbs.fit import refused
    from .resolve import listed

    each = run.parallel
    model = each.tp * each.pp * each.cp
    for nodes in range(len(left), 0, -1):
        replicas, over = divmod(nodes * run.cluster.gpus, model)
        if over or not replicas:
            continue
        taken = left[:nodes]
        fewer = changed(
            run,
            [
                ("cluster.nodes", nodes),
                ("parallel.dp", replicas),
                ("launch.include", included(taken, listed(run))),
                ("launch.exclude", None),
                ("launch.address", run.launch.address if taken[0].name == first.name else None),  # it was an address of the first
                ("reading", None),
            ],
        )
        made = make_plan(fewer)
        if not refused(fewer, made):
            names = ", ".join(host.name for host in taken)
            dp = (plan.mesh or {}).get("dp", each.dp)
            return fewer, made, f", on {names}: dp {dp} -> {replicas}, the same {many(run.train.batch, 'sequence')} a step"
    return None
