"""A smaller run after a machine fault: on the hosts without faults, with fewer replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..plan.plan import make_plan
from ..plan.result import Plan
from ..spec.changed_run import with_changes
from ..spec.format_numbers import plural
from ..spec.run import Run
from ..system.stop_requests import StopRequests
from .hosts.hostfile import Host, include_text
from .supervisor.outcome import Outcome

MOST_FAULTS = 2  # faults of a host after which it is avoided


@dataclass(kw_only=True)
class HostFaults:
    """How often each host was at fault in this `fit`."""

    count_by_host: Counter[str] = field(default_factory=Counter)

    def count(self, outcome: Outcome) -> None:
        """Count the fault of a failed attempt. A rank that only lost its peer, or whose device need not be the one at fault, does not
        count; one stuck in the kernel holds its device, and a device that computes wrong spoils all weights."""
        cause = outcome.root_cause
        if cause is not None and cause.host and not cause.has_lost_peer and cause.fault != "machine":
            self.count_by_host[cause.host] += MOST_FAULTS if cause.fate == "stuck" or cause.fault == "device" else 1

    def hosts_to_avoid(self, outcome: Outcome) -> dict[str, str]:
        """Return the hosts that the attempt after `outcome` should not use, and why."""
        often = {host: f"at fault {faults} times" for host, faults in self.count_by_host.items() if faults >= MOST_FAULTS}
        return often | dict.fromkeys(outcome.hosts, "it could not be used")


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """What the next attempt runs; `change` says in words how it differs from the last one."""

    run: Run
    plan: Plan
    hosts: tuple[Host, ...]
    change: str = ""


class TooFewHosts(Exception):
    """The hosts that are left are too few for any layout of the run."""


def shrink_run(run: Run, plan: Plan, avoid: Mapping[str, str], stop_requests: StopRequests | None = None) -> NextAttempt:
    """Return the run for the hosts that can be reached now, whole or smaller; the hostfile is read again.

    Hosts to `avoid` are used all the same where the run does not fit on the others. Raises TooFewHosts, also once a stop was
    requested, and Unreadable where the hostfile has become wrong.
    """
    run = with_changes(run, [("checkpoint.resume", "auto")])
    if run.launch.name == "local":
        return NextAttempt(run=run, plan=plan, hosts=())
    from .hosts.upload import reachable_hosts
    from .hosts_and_commands import available_hosts, resolve_hosts

    before = resolve_hosts(run)
    reached = reachable_hosts([host.name for host in before], stop_requests)
    left = [host for host in before if host.name in reached]
    well = [host for host in left if host.name not in avoid]
    available = available_hosts(run)
    for usable in (well, left):
        if len(usable) == len(before):
            return NextAttempt(run=run, plan=plan, hosts=before)
        if smaller := _smaller_run(run, plan, before[0], usable, available):
            out = [f"{host.name} ({avoid[host.name]})" for host in left if host not in usable]
            without = f"; without {', '.join(out)}" if out else ""
            return NextAttempt(run=smaller.run, plan=smaller.plan, hosts=smaller.hosts, change=smaller.change + without)
    raise TooFewHosts("too few hosts can be reached for any layout of this run")


def _smaller_run(run: Run, plan: Plan, first: Host, usable: Sequence[Host], available: Sequence[Host]) -> NextAttempt | None:
    """Return the run on as many of the `usable` hosts as possible, with the same global batch; `first` was its first host."""
    from .admission import check_start

    ranks_per_replica = run.parallel.tp * run.parallel.pp * run.parallel.cp
    for nodes in range(len(usable), 0, -1):
        replicas, rest = divmod(nodes * run.cluster.gpus, ranks_per_replica)
        if rest or not replicas:
            continue
        chosen = usable[:nodes]
        smaller = with_changes(
            run,
            [
                ("cluster.nodes", nodes),
                ("parallel.dp", replicas),
                ("launch.include", include_text(chosen, available)),
                ("launch.exclude", None),
                ("launch.address", run.launch.address if chosen[0].name == first.name else None),  # it belonged to the first host
                ("reading", None),
            ],
        )
        smaller_plan = make_plan(smaller)
        check = check_start(smaller, smaller_plan)
        if not check.problems:
            names = ", ".join(host.name for host in chosen)
            dp = (plan.mesh or {}).get("dp", run.parallel.dp)
            change = f", on {names}: dp {dp} -> {replicas}, the same {plural(run.train.batch, 'sequence')} a step"
            return NextAttempt(run=smaller, plan=smaller_plan, hosts=check.hosts, change=change)
    return None
