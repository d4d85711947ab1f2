"""Moments that engine `native` keeps in bfloat16 (optim.moments): a step widens a part of them, steps in float32, and rounds them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ...layers.stochastic_rounding import column_words, random_words, round_at_random
from ...spec.run import Run
from .data_parallel.sharded_weights import ShardedWeight
from .data_parallel.weight_buckets import MASTER_DTYPE, WeightBucket
from .shard_rows import ShardRows

MOMENT_DTYPE = torch.bfloat16
MOMENTUM = "momentum_buffer"  # the kind of momenta in checkpoints
TAKEN = "step"  # of an optimizer's state: how many steps it has taken, a number on the weights' device

# R rows, C columns


class BlockWords(NamedTuple):
    """The random words of a block's rows and columns at one step."""

    rows: Tensor  # [R, 2] int32
    columns: Tensor  # [C] int32


class MomentPart(NamedTuple):
    """Elements of a rank's shard of a bucket whose moments are rounded at once; without `words` to nearest."""

    place: slice
    words: BlockWords | None

    def keep(self, *moments: tuple[Tensor, Tensor]) -> None:
        """Round float32 moments, given with the bfloat16 tensors of the whole shard that keep them: at most two, each by other bits."""
        bits = random_words(*self.words) if self.words else None
        for half, (held, value) in enumerate(moments):
            kept = held[self.place]
            kept.copy_(value if bits is None else round_at_random(value.view(bits.shape), bits, half).view(-1))


class MomentRounding:
    """How a run rounds the moments that it keeps in bfloat16: to nearest, or up or down at random (optim.rounding)."""

    def __init__(self, run: Run) -> None:
        self._seed, self._optim = run.train.seed, run.optim
        self.is_random = run.optim.rounding == "stochastic"
        self._rows: dict[WeightBucket | ShardedWeight, ShardRows] = {}
        self._columns = torch.empty(0, dtype=torch.int32)

    def make_states(self, optimizer: torch.optim.Optimizer, buckets: Sequence[WeightBucket | ShardedWeight]) -> None:
        """Make the states of buckets' weights, before torch's optimizer would in float32."""
        kinds = (MOMENTUM,) if self._optim.name == "sgd" or any(each.kind.matrices for each in buckets) else ("exp_avg", "exp_avg_sq")
        for bucket in buckets:
            state, weight = optimizer.state[bucket.master], bucket.master.data
            state[TAKEN] = torch.zeros((), device=weight.device)
            state.update((kind, torch.zeros_like(weight, dtype=MOMENT_DTYPE)) for kind in kinds)

    def parts(
        self, bucket: WeightBucket | ShardedWeight, taken: Tensor, most: int, first: int = 0, stop: int | None = None
    ) -> Iterator[MomentPart]:
        """Yield elements [first, stop) of this rank's shard of a bucket in parts of at most `most` elements; the step is number `taken`,
        from 1. Padding, which stays zero, may be in none."""
        stop = bucket.master.numel() if stop is None else stop
        if not self.is_random:
            for start in range(first, stop, max(1, most)):
                yield MomentPart(slice(start, min(start + most, stop)), None)
            return
        if bucket not in self._rows:
            self._rows[bucket] = ShardRows(bucket.pieces, self._seed, taken.device)
        rows = self._rows[bucket]
        words, columns = rows.words(taken), self._column_words(rows.width, taken.device)
        for block in rows.cut(first, stop, most):
            of_rows = words[block.row : block.row + block.rows]
            yield MomentPart(block.place, BlockWords(of_rows, columns[block.column : block.column + block.columns]))

    def _column_words(self, width: int, device: torch.device) -> Tensor:
        """Return the words of at least so many columns, which no step changes."""
        if len(self._columns) < width:
            self._columns = column_words(torch.arange(width, device=device))
        return self._columns


def step_adamw(
    part: MomentPart,
    weights: Tensor,
    gradients: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    *,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Step a part of a shard's float32 weights by torch's fused AdamW. `gradients` are the part's alone, float32, and may be written;
    they are divided by `divisor`; nothing changes where `skip` is 1."""
    moments = [(state[kind], state[kind][part.place].to(MASTER_DTYPE)) for kind in ("exp_avg", "exp_avg_sq")]
    (_, mean), (_, square) = moments
    adamw_of_part(weights[part.place], gradients, mean, square, state[TAKEN], group, divisor=divisor, skip=skip)
    part.keep(*moments)


def adamw_of_part(
    weights: Tensor,
    gradients: Tensor,
    mean: Tensor,
    square: Tensor,
    taken: Tensor,
    group: dict[str, Any],
    *,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Step a part of a tensor, all float32, by torch's fused AdamW, after `taken` steps; each part's call would count one more."""
    beta1, beta2 = group["betas"]
    adamw(
        [weights],
        [gradients],
        [mean],
        [square],
        [],
        [taken.clone()],
        foreach=False,
        fused=True,
        grad_scale=divisor,
        found_inf=skip,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def step_sgd(part: MomentPart, weights: Tensor, gradients: Tensor, state: dict[str, Any], group: dict[str, Any], divisor: Tensor) -> None:
    """Step a part of a shard's float32 weights by SGD with momentum, as torch.optim.SGD does. `gradients` are the part's alone, float32,
    and may be written; they are divided by `divisor`."""
    here = weights[part.place]
    change = gradients.div_(divisor).add_(here, alpha=group["weight_decay"])
    momentum = state[MOMENTUM][part.place].to(MASTER_DTYPE).mul_(group["momentum"]).add_(change)
    here.add_(momentum, alpha=-group["lr"])
    part.keep((state[MOMENTUM], momentum))
