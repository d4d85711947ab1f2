"""The attempt after a machine fault: on the hosts that are left, with spares for those that are lost, or with fewer replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..plan.plan import make_plan
from ..plan.plan_data import Plan
from ..spec.changed_run import with_changes
from ..spec.numbers.as_text import plural
from ..spec.run import Run
from ..system.stop_requests import StopRequests
from .hosts.hostfile import Host, include_text
from .supervisor.outcome import Outcome

MOST_FAULTS = 2  # faults of a host after which it is avoided
LISTED = 8  # hosts that a line names


@dataclass(kw_only=True)
class HostFaults:
    """How often each host was at fault in this `fit`."""

    count_by_host: Counter[str] = field(default_factory=Counter)
    wrong: set[str] = field(default_factory=set)  # hosts of a device that computes wrong

    def count(self, outcome: Outcome) -> None:
        """Count the fault of a failed attempt: as many as make a host avoided where a rank is stuck in the kernel, which holds its device,
        or a device computes wrong. A rank that only lost its peer does not count, nor one whose device need not be the one at fault, nor
        one that hung and does not stand out."""
        cause = outcome.root_cause
        if cause is not None and cause.host and not cause.has_lost_peer and cause.fault != "machine" and cause.fate != "hung with others":
            self.count_by_host[cause.host] += MOST_FAULTS if cause.fate == "stuck" or cause.fault == "device" else 1
            if cause.fault == "device":
                self.wrong.add(cause.host)

    def hosts_to_avoid(self, outcome: Outcome) -> dict[str, str]:
        """Return the hosts that the attempt after `outcome` should not use, and why."""
        often = {host: f"at fault {faults} times" for host, faults in self.count_by_host.items() if faults >= MOST_FAULTS}
        wrong = dict.fromkeys(self.wrong, "its device computes wrong")
        return often | wrong | dict.fromkeys(outcome.hosts, "it could not be used")


@dataclass(frozen=True, kw_only=True)
class HostedRun:
    """What an attempt runs, and on which hosts; `change` says in words how it differs from the attempt before."""

    run: Run
    plan: Plan
    hosts: tuple[Host, ...]
    change: str = ""


class TooFewHosts(Exception):
    """The hosts that are left are too few for any layout of the run."""


def next_attempt(whole: HostedRun, last: HostedRun, avoid: Mapping[str, str], stop_requests: StopRequests | None = None) -> HostedRun:
    """Return the attempt after `last`: of the size of `whole` if enough hosts and spares can be used now, else smaller.

    The hostfile is read again. Hosts to `avoid` are used all the same where the run does not fit on the others. Raises TooFewHosts,
    also once a stop was requested, and Unreadable where the hostfile has become wrong.
    """
    run = with_changes(whole.run, [("checkpoint.resume", "auto")])
    if run.launch.name == "local":
        return HostedRun(run=run, plan=whole.plan, hosts=())
    from .hosts_and_commands import resolve_hosts

    found = resolve_hosts(run)
    pool, used = (*found.hosts, *found.spares), {host.name for host in last.hosts}
    unusable = _unreachable([host for host in pool if host.name in used], stop_requests)
    if sum(host.name in used and host.name not in {*unusable, *avoid} for host in pool) >= run.cluster.nodes:
        pool = tuple(host for host in pool if host.name in used)  # no other needs to be asked
    unusable |= _unreachable([host for host in pool if host.name not in used], stop_requests)
    while True:
        left = [host for host in pool if host.name not in unusable]
        well = [host for host in left if host.name not in avoid]
        attempt = _largest_attempt(run, whole, well, used) or _largest_attempt(run, whole, left, used)
        if attempt is None or stop_requests:
            raise TooFewHosts("too few hosts can be reached for any layout of this run")
        problems = _joining_problems(attempt, used, stop_requests)
        if not problems:
            change = describe_change(last, attempt, {**avoid, **unusable}, {host.name for host in found.spares})
            return replace(attempt, change=change)
        unusable |= problems


def _unreachable(hosts: Sequence[Host], stop_requests: StopRequests | None) -> dict[str, str]:
    """Return those of the hosts that do not answer over ssh, with that as the reason not to use them."""
    from .hosts.upload import reachable_hosts

    reached = reachable_hosts([host.name for host in hosts], stop_requests)
    return {host.name: "it can't be reached" for host in hosts if host.name not in reached}


def _joining_problems(attempt: HostedRun, used: Collection[str], stop_requests: StopRequests | None) -> dict[str, str]:
    """Return why hosts that were not `used` in the last attempt can't join, as the preflight finds; none with launch.preflight=false."""
    joining = [host for host in attempt.hosts if host.name not in used]
    if not joining or not attempt.run.launch.preflight:
        return {}
    from .preflight.preflight import host_requirements, joining_problems

    kept = [host for host in attempt.hosts if host.name in used]
    return joining_problems(kept, joining, host_requirements(attempt.run, attempt.plan), [] if stop_requests is None else stop_requests)


def _largest_attempt(run: Run, whole: HostedRun, usable: Sequence[Host], used: Collection[str]) -> HostedRun | None:
    """Return the attempt on as many of the `usable` hosts as possible, with the same global batch."""
    from .admission import check_start
    from .hosts_and_commands import available_hosts, for_first_host

    ranks_per_replica = run.parallel.tp * run.parallel.pp * run.parallel.cp
    for nodes in range(min(len(usable), run.cluster.nodes), 0, -1):
        chosen = preferred_hosts(usable, used, nodes)
        if nodes == run.cluster.nodes:
            return HostedRun(run=for_first_host(run, whole.hosts[0], chosen[0]), plan=whole.plan, hosts=chosen)
        replicas, rest = divmod(nodes * run.cluster.gpus, ranks_per_replica)
        if rest or not replicas:
            continue
        smaller = with_changes(
            for_first_host(run, whole.hosts[0], chosen[0]),
            [
                ("cluster.nodes", nodes),
                ("parallel.dp", replicas),
                ("launch.include", include_text(chosen, available_hosts(run))),
                ("launch.exclude", None),
                ("launch.spares", 0),
                ("reading", None),
            ],
        )
        plan = make_plan(smaller)
        if not check_start(smaller, plan).problems:
            return HostedRun(run=smaller, plan=plan, hosts=chosen)
    return None


def preferred_hosts(usable: Sequence[Host], used: Collection[str], nodes: int) -> tuple[Host, ...]:
    """Return `nodes` of the usable hosts, in their order: those `used` in the last attempt before others."""
    chosen = {host.name for host in sorted(usable, key=lambda host: host.name not in used)[:nodes]}
    return tuple(host for host in usable if host.name in chosen)


def describe_change(last: HostedRun, attempt: HostedRun, reasons: Mapping[str, str], spares: Collection[str]) -> str:
    """Return how an attempt differs from the last one in hosts and replicas, for the line that announces it; "" if it does not.

    `reasons` says why hosts are not used.
    """
    before, now = [host.name for host in last.hosts], [host.name for host in attempt.hosts]
    if before == now:
        return ""
    gone = [f"{name} ({reasons.get(name, 'not needed')})" for name in before if name not in now]
    come = [f"spare {name}" if name in spares else f"{name} (back)" for name in now if name not in before]
    both = min(len(gone), len(come))
    refused = [f"spare {name} ({why})" for name, why in reasons.items() if name in spares and name not in (*before, *now)]
    pieces = [
        _list_text([f"{new} for {old}" for new, old in zip(come, gone, strict=False)]),
        f"with {_list_text(come[both:])}" if come[both:] else "",
        f"without {_list_text([*gone[both:], *refused])}" if gone[both:] or refused else "",
    ]
    hosts = "; ".join(piece for piece in pieces if piece)
    dp = [(each.plan.mesh or {}).get("dp", each.run.parallel.dp) for each in (last, attempt)]
    if dp[0] == dp[1]:
        return f", on {_list_text(now)}: {hosts}"
    train = attempt.run.train
    batch = "batches" if train.rampup.batches else f"{plural(train.batch, 'sequence')} a step"
    size = f"dp {dp[0]} -> {dp[1]}, the same {batch}"
    return f", on {_list_text(now)}: {size}; {hosts}"


def _list_text(words: Sequence[str]) -> str:
    """The words with commas; of many, the first."""
    more = len(words) - LISTED
    return f"{', '.join(words[:LISTED])} and {more} more" if more > 1 else ", ".join(words)
