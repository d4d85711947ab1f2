"""Faults as a seed draws them: what goes wrong, when, and with which process."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal["kill", "term", "stop", "truncated", "flipped", "full", "poison", "cut"]

SIGNALS: Mapping[str, signal.Signals] = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
FILE_DAMAGES = ("truncated", "flipped")
# fmt: off
SHARES: Mapping[str, Mapping[Kind, int]] = {  # of a hundred faults on each ground
    "local": {"kill": 32, "term": 20, "stop": 14, "truncated": 8, "flipped": 8, "full": 8, "poison": 10},
    "hosts": {"kill": 40, "term": 20, "stop": 15, "cut": 25},
}
# fmt: on
AT_START = 0.25  # of the faults come before a start's first step


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`moment`, `jitter`, `whom` and `where` are uniform in [0, 1): what they say depends on the run that the fault comes to."""

    number: int
    kind: Kind
    at_start: bool  # before the first step: `moment` is a share of the seconds until then, else of the steps that are left
    moment: float
    jitter: float
    whom: float
    where: float
    restarts: int  # launch.restarts

    def pick(self, many: Sequence[str]) -> str:
        """The one of these that it hits."""
        return many[int(self.whom * len(many))]


def draw_faults(number: int, seed: int, ground: str, *, without: Sequence[Kind] = ()) -> list[Fault]:
    """So many faults of a ground, each kind as often as its share; the same for the same seed."""
    random = Random(f"{seed} {ground}")
    shares = {kind: share for kind, share in SHARES[ground].items() if kind not in without}
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
