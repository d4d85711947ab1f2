"""When CUDA loads the kernels of a pipeline's stages."""

from __future__ import annotations

import os

# Schedules whose steps end though the first action of each kind, on every stage, waits for all that its GPU has begun; tests simulate them.
LOADS_LATE = ("1f1b", "gpipe", "interleaved", "zb_h1", "pipedream", "pipedream_2bw", "dualpipev")


def load_kernels_before_messages(stages: int, schedule: str) -> None:
    """Have CUDA load all kernels before the first message of a schedule whose stages could else wait for each other without end.

    CUDA loads a kernel when it first runs, and may wait for all other kernels then, also for a send or a receive that waits for another
    stage ("Lazy Loading" in the CUDA programming guide). Called before CUDA begins; a value that the user has set stays.
    """
    if stages > 1 and schedule not in LOADS_LATE:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
