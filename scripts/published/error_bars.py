"""Error bars of predictions: factors by which a figure may be off, so wide that they hold for nine measured runs in ten."""

from __future__ import annotations

from ...trainer.spec.run import Run

STEP, MEMORY = 1.22, 1.5  # of runs like most that were measured
# Kinds of runs that few measurements are near to, or whose measurements scatter more: by how much the bar is wider, on a log scale.
WIDER = {"experts": 1.7, "fp8": 1.25, "many": 1.3, "blackwell": 1.4, "gathered": 1.6}
MANY = 1000  # GPUs
BLACKWELL = ("B", "GB")


def step_width(run: Run) -> float:
    """Return the factor by which a step's seconds may be off."""
    return float(STEP ** _wider(run))


def memory_width(run: Run) -> float:
    """Return the factor by which a peak of memory may be off."""
    return float(MEMORY ** (WIDER["blackwell"] if run.cluster.device.name.startswith(BLACKWELL) else 1.0))


def _wider(run: Run) -> float:
    """Return the product of the factors of the kinds that a run is of; ZeRO 3 on many GPUs is one kind."""
    many = run.cluster.nodes * run.cluster.gpus > MANY
    kinds = {
        "experts": run.model.experts > 0,
        "fp8": run.train.precision in ("fp8", "fp4"),
        "many": many,
        "blackwell": run.cluster.device.name.startswith(BLACKWELL),
        "gathered": many and run.parallel.zero == 3,
    }
    wider = 1.0
    for kind, is_one in kinds.items():
        wider *= WIDER[kind] if is_one else 1.0
    return wider
