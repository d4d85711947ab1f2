"""Smaller batches at the beginning of a run (`train.rampup`)."""

from __future__ import annotations

from dataclasses import dataclass

from ..numbers.bounded import Count, Positive


@dataclass(frozen=True, kw_only=True)
class Rampup:
    """The batch of the first steps, until so many tokens are trained on; then train.batch.

    Of several, each is the batch until its own number of tokens (Llama 3: arXiv:2407.21783 section 3.4.1). With `by` the batch grows from
    each to the next in increments, over equal numbers of tokens (Megatron-LM's --rampup-batch-size).
    """

    batch: Count | tuple[Count, ...] | None = None
    until: Positive | tuple[Positive, ...] | None = None
    by: Count | None = None

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches that are written, in sequences."""
        return () if self.batch is None else self.batch if isinstance(self.batch, tuple) else (self.batch,)

    @property
    def ends(self) -> tuple[float, ...]:
        """The tokens that end them."""
        return () if self.until is None else self.until if isinstance(self.until, tuple) else (self.until,)
