"""What every layer reads besides the hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .context_parallel import ContextParallel
from .document_bounds import DocumentBounds

# B batch, S sequence, D head_dim; under context parallelism S are this rank's tokens


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """The inputs of every layer in one micro-batch, besides the hidden states.

    `dropout_states` key the dropout of attention, `sharded_dropout_states` that of the hidden states: under sequence parallelism
    those of this rank's part of the sequence, and `own_dropout_states` those of all its tokens. S of `mask` and `dropout_states` are the
    queries that this rank attends with.
    """

    angles: Tensor | None  # [2, S, D/2] rotary angles
    local_angles: Tensor | None  # of the layers that have the window, where those are other ones
    mask: Tensor | None  # [B, 1, S, all keys] of attention
    starts: Tensor | None  # [B, S] where each token's document starts
    dropout_states: Tensor | None  # [B, S]
    sharded_dropout_states: Tensor | None  # [B, S or this rank's part of it]
    own_dropout_states: Tensor | None  # [B, S]
    cp: ContextParallel | None
    band: Tensor | None = None  # [W, 2W] mask of a block of the window W, where it does not cover the sequence
    bounds: DocumentBounds | None = None  # of documents, where attention's kernel takes them in place of a mask
    document_starts: Tensor | None = None  # [B, all keys] int32, as `starts`, or as kernels of fla read them: for linear attention
