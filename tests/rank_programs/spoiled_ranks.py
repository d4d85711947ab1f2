"""The fork server of the product, run by path: `spoiled_ranks.py RUN=SPOILER ...` has the ranks of the runs that it names go wrong."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distrain.trainer.launch.rank.channel import Talk
from distrain.trainer.loop import train as loop
from distrain.trainer.loop.forkserver.server import QUESTIONS, serve
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.prove.locate import TRACED

train: Any = loop  # whose names are spoiled here


def same_samples() -> None:
    """Every replica reads what the first should."""
    right = train.shard
    train.shard = lambda start, **place: right(start, **{**place, "dp_rank": 0})


def faster() -> None:
    """Learning rates are 1 % too high, so that the first step still has the right loss."""
    right = train.rate
    train.rate = lambda *of: 1.01 * right(*of)


def dies() -> None:
    """Rank 1 raises in its third step."""
    right = train.rate

    def rate(optim, step, steps):
        if step == 2 and os.environ["RANK"] == "1":
            raise ArithmeticError("what a rank may raise")
        return right(optim, step, steps)

    train.rate = rate


def poisons(first: int = 2, last: int = 2) -> None:
    """A gradient of the last rank is no number in the third step."""
    right = train._step

    def step(run, course, micros, at, *rest):
        if not (first <= at <= last and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)):
            return right(run, course, micros, at, *rest)
        parameter = next(course.engine.stages[-1].module.parameters())
        hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
        stepped = right(run, course, micros, at, *rest)
        hook.remove()
        return stepped

    train._step = step


def poisons_ever() -> None:
    """So it is in each step from the third on."""
    poisons(2, 1 << 30)


def spikes() -> None:
    """The loss of step 21 is told as five nats higher than it is."""
    right = train._step

    def step(run, course, micros, at, *rest):
        stepped = right(run, course, micros, at, *rest)
        return replace(stepped, loss=stepped.loss + 5.0) if at == 20 else stepped

    train._step = step


SPOILERS = {each.__name__: each for each in (same_samples, faster, dies, poisons, poisons_ever, spikes)}


def spoiled(spoilers: dict[str, str], path: Path, talk: Talk) -> int:
    """What a rank does; what those of some runs do is spoiled first."""
    if how := spoilers.get(path.parent.name.removesuffix(TRACED)):
        SPOILERS[how]()
    return run_rank(path, talk)


if __name__ == "__main__":
    serve(partial(spoiled, dict(word.split("=") for word in sys.argv[1:])), QUESTIONS)
