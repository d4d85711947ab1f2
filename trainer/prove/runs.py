"""The runs of `distrain prove`: each trained on the fork server, and its curve and weights held against those of one process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from ..machine import facts as machine
from ..plan.divisors import divisors
from ..plan.plan import make_plan
from .fork_client import Crew, Server
from .locate import cleared, departure
from .messages import messages
from .trials import Proof, Trial, written

PATIENCE = 60.0  # seconds that a layout has for its start and its end
SLOWER = 10.0  # times what the steps of one process took, that each rank of a layout has for its own
TRACED = 5.0  # times as long as that, where every module is traced

# How far sums in another order take a run, and some: 5e-6, 2e-4 and a thousandth were seen in float32 over 20 steps; in half
# precision 3e-4 and 2e-3, and weights whose gradient is small against its rounding go anywhere that Adam's steps take them.
FULL = (1e-5, 1e-3, 0.01)  # nats of a loss, a share of the gradient norm, a share of the learning rates added up
HALF = (3e-3, 2e-2, float("inf"))
SLIGHT = 100.0  # times rounding: what departs by less may be a recipe in which rounding grows, which a control run shows
AMONG = 10.0  # times as far from one process as its control, at the most

Verdict = Literal["same", "departs", "failed", "hangs"]
Show = Callable[[str], None]
Serving = Callable[[Path, Mapping[str, str]], AbstractContextManager[Server]]  # a fork server: where its noise goes, its environment


@dataclass(frozen=True, kw_only=True)
class Close:
    """How far a layout may be from one process: nats of a loss, a share of a gradient norm, a weight's own units."""

    loss: float
    norm: float
    weights: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Loss (nats a token), gradient norm and learning rate of each step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a layout: its largest differences from one process, None where it did not get so far."""

    trial: Trial
    verdict: Verdict
    says: str = ""  # why it is not the same
    seconds: float = 0.0  # from its first step to its end
    curve: Curve | None = None
    loss: float | None = None
    norm: float | None = None
    weights: float | None = None
    weight: str = ""  # the one that is furthest
    left_out: tuple[str, ...] = ()  # weights that are not compared
    messages: Mapping[str, Any] | None = None  # counted against planned; None: not counted
    departure: str = ""  # where it departs first, in words


@dataclass(frozen=True, kw_only=True)
class Proved:
    """A proof, done."""

    alone: Outcome
    others: tuple[Outcome, ...]
    close: Close
    control: Outcome | None = None  # one process again, its batch added up in other micro-batches

    @property
    def ok(self) -> bool:
        """Whether all train the same curve."""
        return all(each.verdict == "same" for each in (self.alone, *self.others))


class Prover:
    """Trains the runs of a proof one after another on a fork server, and judges each."""

    def __init__(self, proof: Proof, server: Server, live: Show) -> None:
        self.proof = proof
        self._server = server
        self._live = live

    def proved(self, each: Callable[[Outcome], None]) -> Proved:
        """One process first, then each layout, `each` being told of it; ends after the first where that fails. Raises ServerGone."""
        alone = self._trained(self.proof.alone, "one process", None)
        done = Proved(alone=alone, others=(), close=tolerance(alone))
        each(alone)
        for at, trial in enumerate(self.proof.trials if alone.verdict == "same" else (), 1):
            limit = PATIENCE + SLOWER * trial.plan.world * alone.seconds
            outcome = self._trained(trial, f"{at}/{len(self.proof.trials)} {trial.layout.word}", limit)
            if outcome.verdict == "same":
                outcome, done = self._judged(outcome, done)
            done = replace(done, others=(*done.others, outcome))
            each(outcome)
        cleared(self.proof.alone)
        return done

    def _trained(self, trial: Trial, where: str, limit: float | None) -> Outcome:
        """A run to its end; one whose ranks all end well is the same until it is judged."""
        written(trial)
        beats = list[float]()
        self._live(f"{where}: starts")

        def hear(word: Mapping[str, Any]) -> None:
            if "beat" in word:
                beats.append(monotonic())
                self._live(f"{where}: step {word['beat'] + 1} of {self.proof.steps}")
            else:
                self._live(f"{where}: {word['status']}")

        crew = self._server.trained(trial.folder / "run.json", trial.plan.world, threads=threads(trial), seconds=limit, hear=hear)
        verdict, says = ended(crew, limit)
        return Outcome(trial=trial, verdict=verdict, says=says, seconds=monotonic() - min(beats, default=monotonic()), curve=curve(trial))

    def _judged(self, outcome: Outcome, done: Proved) -> tuple[Outcome, Proved]:
        """A run that ended well, held against one process; where it departs slightly, against a control first."""
        outcome = self._compared(outcome, done.alone)
        if outcome.verdict == "same" and slight(outcome, done) and (trial := control(self.proof.alone)):
            again = self._compared(self._trained(trial, "one process, in other micro-batches", None), done.alone)
            done = replace(done, control=again, close=widened(done.close, again))
        if outcome.verdict == "same" and (says := departs(done.alone, outcome, done.close)):
            outcome = replace(outcome, verdict="departs", says=says, departure=self._traced(outcome, done))
        if outcome.verdict == "same":
            shutil.rmtree(outcome.trial.folder / "checkpoints", ignore_errors=True)  # a dozen of a large model fill a disk
        return outcome, done

    def _traced(self, outcome: Outcome, done: Proved) -> str:
        """In which module, on which rank, a layout departs first, in words; "" where no tensor shows it."""
        self._live(f"{outcome.trial.layout.word}: looks where it departs")
        limit = PATIENCE + TRACED * SLOWER * outcome.trial.plan.world * done.alone.seconds

        def trained(trial: Trial) -> Crew:
            return self._server.trained(trial.folder / "run.json", trial.plan.world, threads=threads(trial), seconds=limit)

        return departure(done.alone.trial, outcome.trial, parted(done.alone, outcome, done.close), trained)

    def _compared(self, outcome: Outcome, alone: Outcome) -> Outcome:
        """A run with its differences from one process."""
        if outcome.curve is None or alone.curve is None:
            return replace(outcome, verdict="failed", says="it wrote no losses")
        said = self._server.asked("compared", reference=str(alone.trial.folder), layout=str(outcome.trial.folder))
        if "failed" in said:
            return replace(outcome, verdict="failed", says=said["failed"])
        found = said["answer"]
        return replace(
            outcome,
            loss=furthest(_apart(alone.curve.losses, outcome.curve.losses)),
            norm=furthest(_apart(alone.curve.norms, outcome.curve.norms, relative=True)),
            weights=found["weights"],
            weight=found["weight"],
            left_out=tuple(found["left_out"]),
            messages=messages(outcome.trial),
        )


def control(alone: Trial) -> Trial | None:
    """One process that adds a batch up in other micro-batches: as far as it comes out, rounding grows in this recipe. None: it can't."""
    run = alone.run
    sizes = [size for size in divisors(run.train.batch) if size != run.train.microbatch]
    size = max((each for each in sizes if each < run.train.microbatch), default=min(sizes, default=0))
    if not size:
        return None
    run = replace(run, name="dp1.again", train=replace(run.train, microbatch=size))
    return Trial(layout=alone.layout, run=run, plan=make_plan(run))


def slight(outcome: Outcome, done: Proved) -> bool:
    """Whether a layout departs, but by so little that a control is worth its time; one is trained once."""
    wide = Close(loss=SLIGHT * done.close.loss, norm=SLIGHT * done.close.norm, weights=SLIGHT * done.close.weights)
    return not done.control and bool(departs(done.alone, outcome, done.close)) and not departs(done.alone, outcome, wide)


def widened(close: Close, again: Outcome) -> Close:
    """What rounding may make of a recipe whose control is so far from itself."""
    return Close(
        loss=max(close.loss, AMONG * (again.loss or 0.0)),
        norm=max(close.norm, AMONG * (again.norm or 0.0)),
        weights=max(close.weights, AMONG * (again.weights or 0.0)),
    )


def departs(alone: Outcome, outcome: Outcome, close: Close) -> str:
    """In which respect a layout is further from one process than rounding takes it; "" where in none."""
    assert alone.curve is not None
    assert outcome.curve is not None
    for noun, far, most in (
        ("loss", _apart(alone.curve.losses, outcome.curve.losses), close.loss),
        ("gradient norm", _apart(alone.curve.norms, outcome.curve.norms, relative=True), close.norm),
    ):
        step = next((step for step, each in enumerate(far, 1) if not each <= most), None)
        if step is not None:
            return f"{noun} departs at step {step}: by {furthest(far[:step]):.1e}, where {most:.1e} is rounding"
    if not (outcome.weights or 0.0) <= close.weights:
        return f"{outcome.weight} departs by {outcome.weights:.1e}, where {close.weights:.1e} is rounding"
    return ""


def tolerance(alone: Outcome) -> Close:
    """What rounding may make of a run in this precision."""
    loss, norm, share = FULL if alone.trial.run.train.precision == "fp32" else HALF
    return Close(loss=loss, norm=norm, weights=share * moved(alone))


def moved(alone: Outcome) -> float:
    """How far Adam can take a weight in a run: the learning rates added up."""
    return sum(alone.curve.rates) if alone.curve else 0.0


def parted(alone: Outcome, outcome: Outcome, close: Close) -> int:
    """The step, from 1, at which a layout's curve is first further from one process's than rounding takes it; the last where none is."""
    assert alone.curve is not None
    assert outcome.curve is not None
    losses = _apart(alone.curve.losses, outcome.curve.losses)
    norms = _apart(alone.curve.norms, outcome.curve.norms, relative=True)
    far = (step for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1) if not (loss <= close.loss and norm <= close.norm))
    return next(far, min(len(alone.curve.losses), len(outcome.curve.losses)))


def _apart(one: Sequence[float], other: Sequence[float], *, relative: bool = False) -> list[float]:
    """How far two curves are from each other at each step; a step that one of them lacks is infinitely far."""
    pairs = zip_longest(one, other, fillvalue=float("inf"))
    return [abs(a - b) / (abs(a) or 1.0 if relative else 1.0) for a, b in pairs]


def furthest(apart: Sequence[float]) -> float:
    """The largest of differences; one that is no number is larger than any."""
    return max((each if isfinite(each) else float("inf") for each in apart), default=0.0)


def ended(crew: Crew, limit: float | None) -> tuple[Verdict, str]:
    """What the end of its ranks makes of a layout, and why."""
    if crew.late:
        return "hangs", f"had not ended after {limit:.0f} s, and was killed: {at_steps(crew.steps)}"
    return ("failed", crew.says or f"its ranks ended with {crew.codes}") if any(crew.codes) else ("same", "")


def at_steps(steps: Sequence[int | None]) -> str:
    """Where ranks were: `ranks 0-1 at step 3, rank 2 before its first`."""
    by: dict[int | None, list[int]] = {}
    for rank, step in enumerate(steps):
        by.setdefault(step, []).append(rank)
    told = []
    for step, ranks in by.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        told.append(f"{who} {'before the first step' if step is None else f'in step {step + 1}'}")
    return "; ".join(told)


def curve(trial: Trial) -> Curve | None:
    """What a run has logged of itself; None where it has nothing."""
    with suppress(OSError, ValueError, KeyError):
        rows = [json.loads(line) for line in (trial.folder / "metrics.jsonl").read_text().splitlines()]
        return Curve(
            losses=tuple(row["loss"] if row["loss"] is not None else float("nan") for row in rows),
            norms=tuple(row["grad_norm"] if row["grad_norm"] is not None else float("nan") for row in rows),
            rates=tuple(row["lr"] for row in rows),
        )
    return None


def threads(trial: Trial) -> int:
    """Threads of each rank: what `distrain fit` would give it."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() and int(said) else max(1, machine.cores() // trial.plan.world)


def proved(proof: Proof, each: Callable[[Outcome], None], live: Show, serving: Serving = Server) -> Proved:
    """Train and judge everything, `each` being told as soon as it is known; raises ServerGone."""
    proof.folder.mkdir(parents=True, exist_ok=True)
    for stale in proof.folder.glob("*/run.json"):  # of the last proof of this recipe
        shutil.rmtree(stale.parent, ignore_errors=True)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if proof.alone.run.cluster.device.kind == "cpu" else {}  # else DeepSpeed takes what is there
    with serving(proof.folder / "server.log", {**os.environ, **hidden}) as server:
        done = Prover(proof, server, live).proved(each)
    for outcome in (done.alone, done.control) if done.ok else ():
        if outcome:
            shutil.rmtree(outcome.trial.folder / "checkpoints", ignore_errors=True)
    return done
