"""Records which samples a rank trains on, for `distrain prove`: it checks that the ranks' samples make up each batch exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

from .batches import Batch, Batches

MOST_STEPS = 100  # that are recorded

SampleRow = tuple[int, int, int, int]  # a sample's number, its source, its window in the source, the CRC-32 of its tokens and labels


class SampleLog:
    """The samples of each step of this rank, in the order in which it reads them."""

    def __init__(self, batches: Batches, micros: Callable[[int], int]) -> None:
        """`micros` returns how many micro-batches of this rank a step has, from 0."""
        self._batches, self._micros = batches, micros
        self.steps: list[list[SampleRow]] = []

    def record(self, micro_batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches, and record the samples of each that is taken."""
        step, left = -1, 0  # micro-batches that the step has left
        for batch in micro_batches:
            if not left:
                step, left = step + 1, self._micros(step + 1)
            left -= 1
            if step < MOST_STEPS:
                self.steps += [[]] if step == len(self.steps) else []
                self.steps[step] += self._rows(batch)
            yield batch

    def _rows(self, batch: Batch) -> Iterator[SampleRow]:
        sources, windows = self._batches.locate(batch.samples.numpy())
        for row, (source, window) in enumerate(zip(sources, windows, strict=True)):
            contents = crc32(batch.labels[row].numpy().tobytes(), crc32(batch.tokens[row].numpy().tobytes()))
            yield int(batch.samples[row]), int(source), int(window), contents
