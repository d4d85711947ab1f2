"""The loss of a range of samples: forward only, the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...engines.engine import Engine
from ...engines.step_figures import PreferenceFigures
from ...launch.rank.channel import OnProgress, ignore_text
from ...layers.preference_loss import FIGURES
from ...parallel.process_groups import Grid
from ...parallel.world import StopVote
from ...spec.run import Run
from ...system.stop_requests import StopFlag
from ..data.samples.batches import Batches
from ..data.samples.corpus import Corpus
from ..data.validation_sets import evaluates_held_out
from .model_inputs import model_inputs


class Evaluation(NamedTuple):
    """The mean loss (nats a token, or of preferences of a pair), and the figures of pairs of preferences."""

    loss: float
    preferences: PreferenceFigures | None


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What an evaluation reads: the name of a validation set, "" of what is held out, and samples, none twice of a set of its own."""

    name: str
    batches: Batches
    samples: range


def validations_of(run: Run, corpus: Corpus, sets: Mapping[str, Corpus]) -> tuple[Validation, ...]:
    """Return what each evaluation of a run reads: train.evaluate.batches batches of the text that is held out, and as many of each
    validation set, or all of a smaller one."""
    if not run.train.evaluate.every:
        return ()
    many, found = run.train.evaluate.batches * run.train.batch, list[Validation]()
    if evaluates_held_out(run.data, corpus):
        found.append(Validation(name="", batches=_read(run, corpus), samples=range(many)))
    for name, each in sets.items():
        batches = _read(run, each)
        found.append(Validation(name=name, batches=batches, samples=range(min(many, sum(batches.windows)))))
    return tuple(found)


def _read(run: Run, corpus: Corpus) -> Batches:
    return Batches(corpus, seed=run.train.seed, seq=run.train.seq, split="validation")


def evaluate(run: Run, engine: Engine, grid: Grid, batches: Batches, samples: range, on_progress: OnProgress = ignore_text) -> Evaluation:
    """Evaluate samples. All ranks call this together; each data-parallel rank computes its share.

    A round is dp x microbatch samples, always in full micro-batches: samples of the last round beyond the range are not counted.
    """
    found = evaluate_unless_stopped(run, engine, grid, batches, samples, on_progress)
    assert found is not None, "nothing stops it"
    return found


def evaluate_unless_stopped(
    run: Run,
    engine: Engine,
    grid: Grid,
    batches: Batches,
    samples: range,
    on_progress: OnProgress = ignore_text,
    stop: StopFlag | None = None,
) -> Evaluation | None:
    """Evaluate samples as `evaluate` does, but return None on all ranks within a few rounds of a stop request to any.

    Stages of a pipeline may be ahead of others by as many rounds as there are stages.
    """
    size, dp = run.train.microbatch, grid.size("dp")
    figures = FIGURES if run.data.has_preferences else 0
    sums = torch.zeros(2 + figures, dtype=torch.float64, device=grid.world.device)  # of losses, of what is counted, of pairs' figures
    votes = StopVote(grid.world.device, late=grid.size("pp"))
    for first in range(samples.start, samples.stop, dp * size):
        batch = batches.batch(first + grid.coordinate("dp") * size, size)
        tokens, labels, further = model_inputs(run, batch.before(samples.stop), grid, None)
        loss, counted = engine.evaluate(tokens, labels, **further)
        sums[:2] += torch.stack([loss.double(), counted.double()])
        if figures:
            sums[2:] += engine.figures.take_pair_sums()
        on_progress("evaluate")
        if stop and first + dp * size < samples.stop and votes.vote(requested=stop.requested):
            votes.end()
            return None
    votes.end()
    # Of one replica some ranks add the same sums, and the others 0: the quotients are the means.
    dist.all_reduce(sums)
    loss, *means = (sums[[0, *range(2, len(sums))]] / sums[1]).tolist()
    return Evaluation(loss, PreferenceFigures(*means) if figures else None)
