"""Which of a run's hosts and spares it uses: spares take the place of hosts that the preflight found unusable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..hosts.hostfile import Host
from . import preflight_host
from .checks import HostRequirements, HostState, broken_pairs, own_problems


@dataclass(frozen=True, kw_only=True)
class HostChoice:
    """The hosts that a run uses, in the order of the hostfile; fewer than it has nodes if there are too few spares.

    `left_out` are hosts that it must do without, and `useless` spares, each with the reason.
    """

    used: tuple[Host, ...]
    left_out: Mapping[str, str]
    useless: Mapping[str, str]


def choose_hosts(hosts: Sequence[HostState], spares: Sequence[HostState], needs: HostRequirements) -> HostChoice:
    """Choose from what the hosts and spares of a run answered: all hosts that are usable together, and for each other the next spare."""
    own = preflight_host.package_versions(needs.packages)
    left_out = _left_out(hosts, spares, needs, own)
    used, useless = [each for each in hosts if each.name not in left_out], dict[str, str]()
    for spare in spares:
        if why := next(reasons_against(spare, used, needs, own), ""):
            useless[spare.name] = why
        elif len(used) < len(hosts):
            used.append(spare)
    chosen = {each.name for each in used}
    return HostChoice(used=tuple(each.host for each in (*hosts, *spares) if each.name in chosen), left_out=left_out, useless=useless)


def _left_out(hosts: Sequence[HostState], spares: Sequence[HostState], needs: HostRequirements, own: Mapping[str, str]) -> dict[str, str]:
    """Return the hosts that are unusable by themselves or together with the others, and why.

    Of two that can't be together, the one goes that is in more such pairs, also with spares; of equal ones the later.
    """
    left_out = {each.name: problem.says for each in hosts if (problem := next(own_problems(each, needs, own), None))}
    while True:
        kept = [each for each in hosts if each.name not in left_out]
        pairs = dict(broken_pairs(kept, needs))
        if not pairs:
            return left_out
        among_all = {pair for pair, _ in broken_pairs([*kept, *spares], needs)}
        counts = Counter(name for pair in among_all for name in pair)
        in_pairs = {name for pair in pairs for name in pair}
        worst = max((each.name for each in reversed(kept) if each.name in in_pairs), key=lambda name: counts[name])
        left_out[worst] = next(why for pair, why in pairs.items() if worst in pair)


def reasons_against(spare: HostState, used: Sequence[HostState], needs: HostRequirements, own: Mapping[str, str]) -> Iterator[str]:
    """Yield why a host can't join those that are used; `own` are this machine's versions."""
    yield from (problem.says for problem in own_problems(spare, needs, own))
    yield from (why for pair, why in broken_pairs([*used, spare], needs) if spare.name in pair)
