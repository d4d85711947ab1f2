"""Whether a run's layers are compiled."""

from __future__ import annotations

from ..run import Parallel, Train


def has_compiled_layers(train: Train, parallel: Parallel) -> bool:
    """Return whether layers are compiled: not under ZeRO-3, which gathers weights between the ops of a layer, where graphs would break."""
    return train.compile and parallel.zero < 3
