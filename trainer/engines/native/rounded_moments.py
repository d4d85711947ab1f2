"""Moments that engine `native` keeps in bfloat16 or in 8 bits (optim.moments): a step widens a part of them, steps in float32, and rounds
them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ...layers.block_quantization import code_numbers
from ...layers.stochastic_rounding import column_words, random_words, round_at_random
from ...plan.costs.precision import MOMENT_BLOCK
from ...spec.run import Run
from ..quantized_moment import QuantizedMoment, equal_blocks
from .data_parallel.sharded_weights import ShardedWeight
from .data_parallel.weight_buckets import MASTER_DTYPE, WeightBucket
from .shard_rows import ShardRows

MOMENT_DTYPE = torch.bfloat16
SQUARES = "exp_avg_sq"  # the kind of second moments in checkpoints
MOMENTUM = "momentum_buffer"  # the kind of momenta in checkpoints
TAKEN = "step"  # of an optimizer's state: how many steps it has taken, a number on the weights' device

# R rows, C columns


class BlockWords(NamedTuple):
    """The random words of a block's rows and columns at one step."""

    rows: Tensor  # [R, 2] int32
    columns: Tensor  # [C] int32


class MomentPart(NamedTuple):
    """Elements of a rank's shard of a bucket whose moments are rounded at once; without `words` to nearest. Of moments in 8 bits they are
    `blocks` of equal length."""

    place: slice
    words: BlockWords | None
    blocks: slice = slice(0)

    def widen(self, held: Tensor | QuantizedMoment) -> Tensor:
        """Return the part of a moment in float32."""
        return held.widen(self.place, self.blocks) if isinstance(held, QuantizedMoment) else held[self.place].to(MASTER_DTYPE)

    def keep(self, *moments: tuple[Tensor | QuantizedMoment, Tensor]) -> None:
        """Round float32 moments, given with what keeps those of the whole shard: at most two, each by other bits."""
        bits = random_words(*self.words) if self.words else None
        for half, (held, value) in enumerate(moments):
            if isinstance(held, QuantizedMoment):
                held.keep(self.place, self.blocks, value)
            else:
                held[self.place].copy_(value if bits is None else round_at_random(value.view(bits.shape), bits, half).view(-1))


class MomentRounding:
    """How a run rounds the moments that it keeps in bfloat16: to nearest, or up or down at random (optim.rounding); or in 8 bits, to
    nearest in blocks of each weight's part of a shard."""

    def __init__(self, run: Run) -> None:
        self._seed, self._optim = run.train.seed, run.optim
        self.quantizes = run.optim.moments == "int8"
        self.is_random = run.optim.rounding == "stochastic" and not self.quantizes
        self._rows: dict[WeightBucket | ShardedWeight, ShardRows] = {}
        self._columns = torch.empty(0, dtype=torch.int32)

    def make_states(self, optimizer: torch.optim.Optimizer, buckets: Sequence[WeightBucket | ShardedWeight]) -> None:
        """Make the states of buckets' weights, before torch's optimizer would in float32."""
        kinds = (MOMENTUM,) if self._optim.name == "sgd" or any(each.kind.matrices for each in buckets) else ("exp_avg", "exp_avg_sq")
        for bucket in buckets:
            state, weight = optimizer.state[bucket.master], bucket.master.data
            state[TAKEN] = torch.zeros((), device=weight.device)
            make = partial(_quantized_zeros, bucket) if self.quantizes else lambda _: torch.zeros_like(weight, dtype=MOMENT_DTYPE)  # noqa: B023
            state.update((kind, make(kind)) for kind in kinds)

    def parts(
        self, bucket: WeightBucket | ShardedWeight, taken: Tensor, most: int, first: int = 0, stop: int | None = None
    ) -> Iterator[MomentPart]:
        """Yield elements [first, stop) of this rank's shard of a bucket in parts of at most `most` elements; the step is number `taken`,
        from 1. Padding, which stays zero, may be in none."""
        stop = bucket.master.numel() if stop is None else stop
        if self.quantizes:
            for offset, length, number in _first_blocks(bucket):
                yield from (MomentPart(place, None, blocks) for place, blocks in equal_blocks(offset, length, number, most))
            return
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


def _first_blocks(bucket: WeightBucket | ShardedWeight) -> Iterator[tuple[int, int, int]]:
    """Yield of each weight's part of a shard (its first element, its elements, the number of its first block)."""
    block = 0
    for piece in bucket.pieces:
        yield piece.offset, piece.length, block
        block += -(-piece.length // MOMENT_BLOCK)


def _quantized_zeros(bucket: WeightBucket | ShardedWeight, kind: str) -> QuantizedMoment:
    """Return a moment of zeros of a bucket's shard."""
    rows, weight = list(_first_blocks(bucket)), bucket.master.data
    blocks = sum(-(-length // MOMENT_BLOCK) for _, length, _ in rows)
    signed = kind != SQUARES
    codes = torch.full_like(weight, code_numbers(signed=signed).index(0.0), dtype=torch.uint8)
    return QuantizedMoment(codes, torch.zeros(blocks, device=weight.device), {offset: first for offset, _, first in rows}, signed)


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
    moments = [(state[kind], part.widen(state[kind])) for kind in ("exp_avg", "exp_avg_sq")]
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
    momentum = part.widen(state[MOMENTUM]).mul_(group["momentum"]).add_(change)
    here.add_(momentum, alpha=-group["lr"])
    part.keep((state[MOMENTUM], momentum))
