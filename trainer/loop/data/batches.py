"""Batches: a function of the seed and of the samples consumed, whatever the layout, before and after a resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .corpus import Corpus, Split, windows
from .order import Indices, blended, keyed, permuted

IGNORED = -100  # a label that no loss counts, as torch.nn.functional.cross_entropy's ignore_index


@dataclass(frozen=True, kw_only=True)
class Batch:
    """int64: tokens, labels (the next tokens) and, where kept apart, documents, each [samples, seq]; samples [samples]."""

    tokens: Tensor
    labels: Tensor
    samples: Tensor  # their numbers in the run
    documents: Tensor | None  # equal inside a document, different in two documents of one row


def shard(first_sample: int, *, micro: int, dp_rank: int, dp: int, microbatch: int, batch: int) -> range:
    """The samples of one rank's micro-batch, of the global batch that starts at first_sample (step x batch).

    A global batch is samples first_sample .. + batch. Micro-batch m is the m-th run of dp x microbatch of them, and rank r has
    the r-th microbatch of that run; so the micro-batches of all ranks, in that order, are the batch.
    """
    if not (0 <= dp_rank < dp and micro >= 0 and (micro + 1) * dp * microbatch <= batch):
        raise ValueError(f"no micro-batch {micro} of rank {dp_rank}: a batch of {batch} is {dp} ranks of {microbatch} at a time")
    first = first_sample + (micro * dp + dp_rank) * microbatch
    return range(first, first + microbatch)


class Batches:
    """The samples of a split, each a window of `seq` tokens and the next token of each.

    The windows of a source lie end to end. Training takes all of them in an order of their own for every (seed, source,
    epoch), so none twice in an epoch. Validation takes them in one order that depends on the corpus alone, so that a few are a
    fair choice, and starts again at the end. Of several sources each has its epochs, and its share by weight.
    """

    def __init__(self, corpus: Corpus, *, seed: int, seq: int, split: Split = "train") -> None:
        """Raises Unreadable where a source has less than one window."""
        self.corpus, self.seq, self.split = corpus, seq, split
        self.windows = windows(corpus, seq, split)  # of each source: the samples of its epoch
        self._seed = seed if split == "train" else int(corpus.key[:15], 16)

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples first_sample .. + count of the run, counted from 0 across epochs."""
        samples = np.arange(first_sample, first_sample + count)
        source, window = self.located(samples)
        tokens = np.empty((count, self.seq + 1), np.int64)
        documents = np.empty_like(tokens) if self.corpus.documents else None
        for row in range(count):
            self._fill(int(source[row]), int(window[row]), tokens[row], None if documents is None else documents[row])
        labels = tokens[:, 1:].copy()
        if documents is not None:
            labels[documents[:, 1:] != documents[:, :-1]] = IGNORED
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            labels=torch.from_numpy(labels),
            samples=torch.from_numpy(samples),
            documents=None if documents is None else torch.from_numpy(documents[:, :-1].copy()),
        )

    def located(self, samples: Indices) -> tuple[Indices, Indices]:
        """(source [n], its window [n]) of each sample [n]."""
        source, nth = blended(samples, [each.weight for each in self.corpus.sources])
        window = np.empty_like(nth)
        for index, size in enumerate(self.windows):
            mine = source == index
            epoch, place = np.divmod(nth[mine], size)
            key = keyed(self._seed, index, epoch if self.split == "train" else 0 * epoch)
            window[mine] = permuted(place, size, key)
        return source, window

    def _fill(self, source: int, window: int, tokens: Indices, documents: Indices | None) -> None:
        read, filled = self.corpus.sources[source], 0
        for start, length in read.runs(self.split).pieces(window * self.seq, self.seq + 1):
            read.tokens.copy(start, tokens[filled : filled + length])
            if documents is not None:
                documents[filled : filled + length] = read.tokens.documents(start, length)
            filled += length


def ahead(batches: Batches, shards: Iterable[range]) -> Iterator[Batch]:
    """The batch of each shard in order, the next one made by a thread while this one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        waiting: Future[Batch] | None = None
        for samples in shards:
            coming = thread.submit(batches.batch, samples.start, len(samples))
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()
