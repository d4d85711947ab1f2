"""Faults drawn from a seed: what goes wrong, when, and in which process."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal["kill", "term", "stop", "truncated", "flipped", "full", "nan", "slow", "deleted", "cut"]

SIGNALS: Mapping[str, signal.Signals] = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
FILE_DAMAGES = ("truncated", "flipped")
# fmt: off
SHARES: Mapping[str, Mapping[Kind, int]] = {  # of a hundred faults, for local runs and runs over hosts
    "local": {"kill": 26, "term": 18, "stop": 14, "truncated": 8, "flipped": 8, "full": 8, "nan": 8, "slow": 5, "deleted": 5},
    "hosts": {"kill": 40, "term": 20, "stop": 15, "cut": 25},
}
# fmt: on
AT_START = 0.25  # share of the signals that come before the first step


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`moment`, `jitter`, `whom` and `where` are uniform in [0, 1); what they select depends on the run."""

    number: int
    kind: Kind
    at_start: bool  # before the first step: `moment` is then a share of the seconds until it, else of the steps left
    moment: float
    jitter: float
    whom: float
    where: float
    restarts: int  # launch.restarts

    def pick(self, choices: Sequence[str]) -> str:
        """Return the one of `choices` that the fault hits."""
        return choices[int(self.whom * len(choices))]


def draw_faults(number: int, seed: int, runs: str, *, without: Sequence[Kind] = ()) -> list[Fault]:
    """Return `number` faults for `runs` (local, hosts), each kind as often as its share; the same for the same seed."""
    random = Random(f"{seed} {runs}")
    shares = {kind: share for kind, share in SHARES[runs].items() if kind not in without}
    whole = sum(shares.values())
    due = [(turn * whole / share, kind) for kind, share in shares.items() for turn in range(1, number + 1)]
    kinds = [kind for _, kind in sorted(due)[:number]]
    random.shuffle(kinds)
    return [_draw_fault(random, each, kind) for each, kind in enumerate(kinds)]


def _draw_fault(random: Random, number: int, kind: Kind) -> Fault:
    return Fault(
        number=number,
        kind=kind,
        at_start=kind in SIGNALS and random.random() < AT_START,
        moment=random.random(),
        jitter=random.random(),
        whom=random.random(),
        where=random.random(),
        restarts=random.randrange(2),
    )
