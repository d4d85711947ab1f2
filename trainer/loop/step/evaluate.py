"""The loss of a range of samples: forward only, the same in every layout."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...engines.engine import Engine
from ...launch.rank.channel import OnProgress, ignore_text
from ...layers.cross_entropy import IGNORED
from ...parallel.process_groups import Grid
from ...spec.run import Run
from ..data.samples.batches import Batches
from .model_inputs import model_inputs


def evaluate(run: Run, engine: Engine, grid: Grid, batches: Batches, samples: range, on_progress: OnProgress = ignore_text) -> float:
    """Return the mean loss (nats a token) of samples. All ranks call this together; each data-parallel rank computes its share.

    A round is dp x microbatch samples, always in full micro-batches: samples of the last round beyond the range are not counted.
    """
    size, dp = run.train.microbatch, grid.size("dp")
    sums = torch.zeros(2, dtype=torch.float64, device=grid.world.device)  # of losses, of counted labels
    for first in range(samples.start, samples.stop, dp * size):
        batch = batches.batch(first + grid.coordinate("dp") * size, size)
        batch.labels[batch.samples >= samples.stop] = IGNORED
        tokens, labels, further = model_inputs(run, batch, grid, None)
        loss, counted = engine.evaluate(tokens, labels, **further)
        sums += torch.stack([loss.double(), counted.double()])
        on_progress("evaluate")
    # Ranks of one replica either all add the same sums or, on a pipeline, all but the head's stage add 0: the quotient is the mean.
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])
