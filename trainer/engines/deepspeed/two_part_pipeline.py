"""DeepSpeed's DualPipeV around a rank's two parts of the model.

This module imports what DeepSpeed has since release 0.19.8: import it for schedule dualpipev alone, after `import_deepspeed()`.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine, DualPipeVModule

from .instructions import FoldedForwardOnly
from .pipeline_module import OnePartPipeline, OwnForward


class TwoParts(OwnForward, DualPipeVModule):  # type: ignore[misc]
    """Parts r and 2 pp - 1 - r on rank r."""


class TwoPartPipeline(DualPipeVEngine, OnePartPipeline):  # type: ignore[misc]
    """Two parts a rank: each micro-batch goes through the first parts in rank order and back through the second."""

    chunks = 2

    @property
    def chunk(self) -> int:
        return int(self._active_phase)

    def _forward_only(self) -> Any:
        return FoldedForwardOnly(self.num_stages, self.stage_id, self._phase1_buffer(0))
