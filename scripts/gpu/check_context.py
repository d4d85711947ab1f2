"""What a check is given: where it runs, and what earlier checks found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...trainer.machine.measure_machine import DEVICE_OPTIONS
from ...trainer.system.cpu import cpu_count

MACHINE = "machine"  # the check whose figures all others may read
CHECK_CORES, TRAINING_CORES = 4, 2  # that each of the checks, or of a check's trainings, gets that run side by side
MOST_CHECKS, MOST_TRAININGS = 4, 8  # side by side, however many cores there are: all processes share one GPU
TRAINING_BYTES = 2e9  # of a GPU's memory that the process of a tiny model takes: its CUDA context, kernels, and buffers of messages


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The folder for runs, the device, and what earlier checks of this program found, by name."""

    folder: Path
    on_gpu: bool  # else this machine's CPU: a rehearsal with tiny models, whose figures say nothing about a GPU
    gpu: str = ""  # CUDA's name of it
    memory: float | None = None  # bytes of it; None: not known
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # figures of checks

    @property
    def has_rates(self) -> bool:
        """Whether plans know the device's rates: of a GPU, those of its option in conf/device."""
        return not self.on_gpu or self.gpu in DEVICE_OPTIONS

    @property
    def checks_at_once(self) -> int:
        """How many checks that time nothing run side by side."""
        return min(MOST_CHECKS, max(1, cpu_count() // CHECK_CORES))

    @property
    def trainings_at_once(self) -> int:
        """How many trainings one of these checks runs side by side: the processes of all fit into the GPU's memory."""
        most = MOST_TRAININGS if self.memory is None else min(MOST_TRAININGS, int(self.memory / TRAINING_BYTES) // self.checks_at_once)
        return max(1, min(most, cpu_count() // TRAINING_CORES))

    def words(self, ranks: int = 1) -> tuple[str, ...]:
        """Overrides that choose this machine's device, for so many ranks."""
        device = DEVICE_OPTIONS.get(self.gpu, "local") if self.on_gpu else "cpu"
        return ("cluster.nodes=1", f"cluster.gpus={ranks}", f"device={device}")
