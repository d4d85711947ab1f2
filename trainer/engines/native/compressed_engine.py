"""Engine `native` where gradients are compressed on the data axis: as two factors of low rank (parallel.compress)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..engine import ReadMicrobatch, ReadShard, StepResult
from ..held_bytes import ByteCounter
from ..rank_parameter import OptimizerShard
from .data_parallel.bucket_reducer import BucketReducer
from .data_parallel.gradient_compression import BucketCompression
from .data_parallel.weight_buckets import WeightBucket
from .engine import NativeEngine


class CompressedEngine(NativeEngine):
    """Trains with gradients of which each step's loss is added to the next step's (arXiv:1905.13727).

    A checkpoint keeps the mean of the ranks' errors, and not the right factors, whose form depends on the layout: after each save they are
    drawn again, in the run that goes on as in the one that resumes.
    """

    _steps = 0  # of the run, skipped ones included

    def step(
        self, read_microbatch: ReadMicrobatch, lr: float, label_count: int, byte_counter: ByteCounter | None = None
    ) -> StepResult | None:
        for each in self._compressions:
            each.is_on = self._steps >= self.run.parallel.compress.start
        result = super().step(read_microbatch, lr, label_count, byte_counter)
        self._steps += 1
        if result and result.skipped:
            for each in self._compressions:
                each.forget()
        return result

    def prepare_save(self) -> None:
        for each in self._compressions:
            each.share_errors()

    def optimizer_shards(self) -> Iterator[OptimizerShard]:
        errors = self._errors()
        for each in super().optimizer_shards():
            yield replace(each, error=errors.get(each.shard.name))

    def restore(self, read: ReadShard, counters: Mapping[str, Any], has: Callable[[str], bool]) -> None:
        super().restore(read, counters, has)
        self._steps = int(counters["steps"])

    def _errors(self) -> dict[str, Tensor]:
        """Return the errors of each compressed weight, flat, by its logical name."""
        return {each.shard.name: each.error.view(-1) for compression in self._compressions for each in compression.weights}

    @property
    def _compressions(self) -> list[BucketCompression]:
        rounds = (each.rounds for each in self.buckets if isinstance(each, WeightBucket))
        return [each for each in rounds if isinstance(each, BucketCompression)]

    def _fill_buckets(self) -> tuple[list[WeightBucket], BucketReducer]:
        made, reducer = super()._fill_buckets()
        for each in made:
            if each.kind.compressed:
                each.rounds = self._compression(each)
        return made, reducer

    def _compression(self, bucket: WeightBucket) -> BucketCompression:
        assert bucket.gradients is not None  # ZeRO 0
        assert bucket.copies is not None  # of several data-parallel ranks
        shards, rank = [row.shard for row in bucket.rows], self.run.parallel.compress.rank
        return BucketCompression(shards, bucket.bucket.starts, bucket.gradients, rank, self.run.train.seed, bucket.copies)
