"""What a check is given: where it runs, and what earlier checks found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...trainer.machine.measure_machine import DEVICE_OPTIONS


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The folder for runs, the device, and what earlier checks of this program found, by name."""

    folder: Path
    on_gpu: bool  # else this machine's CPU: a rehearsal with tiny models, whose figures say nothing about a GPU
    gpu: str = ""  # CUDA's name of it
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # figures of checks

    def words(self, ranks: int = 1) -> tuple[str, ...]:
        """Overrides that choose this machine's device, for so many ranks."""
        device = DEVICE_OPTIONS.get(self.gpu, "local") if self.on_gpu else "cpu"
        return ("cluster.nodes=1", f"cluster.gpus={ranks}", f"device={device}")
