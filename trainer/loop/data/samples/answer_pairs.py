"""The pairs of answers in a batch of preferences, and the log probabilities of answers under the weights that a run begins with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .order import Indices
from .packing import PackedWindows

# P pairs of a batch; of the two answers of a pair the chosen comes first

References = Sequence[NDArray[np.float64]]  # of each source: [pairs, 2]; nan where not known


@dataclass(frozen=True, kw_only=True)
class AnswerPairs:
    """The pairs of a batch [samples, seq], in its order, the documents of which lie behind each other.

    `starts` [2 P + 1], int64: the place of each document's first token in the flat batch, and where the last one ends. `source` and
    `number` [P], int64: which pairs these are. `labels` [P, 2], int64: the labels of each answer. `reference` [P, 2], float64: the log
    probability of each answer under the reference, 0 without one.
    """

    starts: Tensor
    source: Tensor
    number: Tensor
    labels: Tensor
    reference: Tensor

    @property
    def count(self) -> int:
        """Number of pairs."""
        return len(self.number)

    def first(self, count: int) -> AnswerPairs:
        """Return the first pairs."""
        return AnswerPairs(
            starts=self.starts[: 2 * count + 1],
            source=self.source[:count],
            number=self.number[:count],
            labels=self.labels[:count],
            reference=self.reference[:count],
        )


def answer_pairs(windows: Iterable[tuple[int, PackedWindows, int]], seq: int, references: References | None) -> AnswerPairs:
    """Return the pairs of a batch whose rows are these (source, the windows of that source, window)."""
    starts, source, number, labels = list[int](), list[int](), list[Indices](), list[int]()
    rows = 0
    for of, packed, window in windows:
        found = packed.examples(window)
        source += [of] * len(found)
        number.append(found)
        for document, begin, place in packed.documents(window):
            starts.append(rows * seq + place.start)
            labels.append(begin + place.stop - place.start - max(int(packed.tokens.completions[document]), begin + 1))
        rows += 1
    numbers = np.concatenate(number)
    known = [references[of][each] for of, each in zip(source, numbers, strict=True)] if references else np.zeros((len(numbers), 2))
    return AnswerPairs(
        starts=torch.tensor([*starts, rows * seq]),
        source=torch.tensor(source),
        number=torch.from_numpy(numbers),
        labels=torch.tensor(labels).view(-1, 2),
        reference=torch.from_numpy(np.array(known)),
    )
