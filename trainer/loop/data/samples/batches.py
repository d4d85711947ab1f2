"""Batches as a function of the seed and the samples consumed: the same in every layout and after a resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....layers.cross_entropy import IGNORED
from ....layers.transformer.document_bounds import DocumentBounds, document_bounds
from ....spec.derived.data_blends import Blend, sample_blends
from .answer_pairs import AnswerPairs, References, answer_pairs
from .blend_stages import source_order
from .corpus import Corpus, Split, windows
from .order import Indices, permuted_index, random_key
from .packing import PADDING, PADDING_DOCUMENT, PackedWindows


@dataclass(frozen=True, kw_only=True)
class Batch:
    """int64 tensors: tokens, labels (the next tokens, or IGNORED), documents (if kept apart), each [samples, seq]; samples [samples]."""

    tokens: Tensor
    labels: Tensor
    samples: Tensor  # sample numbers, counted over the run
    documents: Tensor | None  # equal inside a document; different for two documents of one row
    bounds: DocumentBounds | None = None  # of the documents
    pairs: AnswerPairs | None = None  # of preferences

    def pin(self) -> Batch:
        """Return the batch in pinned memory, from which copies to a GPU run beside its kernels."""
        return Batch(
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            samples=self.samples.pin_memory(),
            documents=None if self.documents is None else self.documents.pin_memory(),
            bounds=None if self.bounds is None else self.bounds.pin(),
            pairs=self.pairs,
        )

    def before(self, sample: int) -> Batch:
        """Return the batch without the labels and pairs of this sample and later ones."""
        kept = int((self.samples < sample).sum())
        labels = self.labels.clone()
        labels[kept:] = IGNORED
        pairs = self.pairs
        if pairs is not None:
            pairs = pairs.first(int((pairs.starts[:-1:2] < kept * labels.shape[1]).sum()))
        return replace(self, labels=labels, pairs=pairs)


def microbatch_samples(first_sample: int, *, micro: int, dp_rank: int, dp: int, microbatch: int, batch: int) -> range:
    """Return the samples of one rank's micro-batch of the global batch that starts at first_sample (step x batch).

    A global batch is the samples first_sample .. + batch. Micro-batch m is the m-th run of dp x microbatch of them, and rank r
    takes the r-th piece of that run. The micro-batches of all ranks, in that order, are the batch.
    """
    if not (0 <= dp_rank < dp and micro >= 0 and (micro + 1) * dp * microbatch <= batch):
        raise ValueError(f"no micro-batch {micro} of rank {dp_rank}: a batch of {batch} is {dp} ranks of {microbatch} at a time")
    first = first_sample + (micro * dp + dp_rank) * microbatch
    return range(first, first + microbatch)


class Batches:
    """The samples of a split, each a window of `seq` tokens and the next token of each.

    The windows of a text lie end to end, and what is left at its end is not read, unless the corpus pads it; those of examples hold whole
    ones, then padding. Training takes each once an epoch, in an
    order that depends on (seed, source, epoch). Validation takes them in an order that depends only on the corpus, so that the
    first few are a fair sample, and starts again at the end. Each of several sources has its own epochs, and a share by weight, which
    stages of the run change; validation keeps that of the first stage.
    """

    def __init__(self, corpus: Corpus, *, seed: int, seq: int, split: Split = "train") -> None:
        """Raises Unreadable if a source has less than one window."""
        self.corpus, self.seq, self.split = corpus, seq, split
        self._order = source_order(sample_blends(corpus.blends if split == "train" else corpus.blends[:1], seq))
        self.windows = windows(corpus, seq, split)  # of each source: samples in an epoch
        self._packed = [source.pack(split, seq) for source in corpus.sources]
        self.references: References | None = None  # of preferences, once they are known
        self.reference_identity: Mapping[str, Any] = {}  # what they depend on
        self._seed = seed if split == "train" else int(corpus.key[:15], 16)

    def with_blends(self, blends: Sequence[Blend]) -> Batches:
        """Return the batches of the same corpus that other blends of its sources make."""
        other = copy(self)
        other._order = source_order(sample_blends(blends, self.seq))
        return other

    def batch(self, first_sample: int, count: int) -> Batch:
        """Return samples first_sample .. + count of the run, counted from 0 across epochs."""
        samples = np.arange(first_sample, first_sample + count)
        return self.read(samples, *self.locate(samples))

    def read(self, samples: Indices, source: Indices, window: Indices) -> Batch:
        """Return these windows [n] of these sources [n] as samples [n]."""
        count = len(samples)
        tokens = np.empty((count, self.seq + 1), np.int64)
        documents = np.empty_like(tokens) if self.corpus.ignores_labels else None
        is_label = np.ones(tokens.shape, bool)
        for row in range(count):
            packed = self._packed[source[row]]
            if packed is not None:
                assert documents is not None  # the corpus ignores labels
                packed.fill(int(window[row]), tokens[row], documents[row], is_label[row])
            else:
                self._fill(int(source[row]), int(window[row]), tokens[row], None if documents is None else documents[row], is_label[row])
        if documents is not None:
            is_label[:, 1:] &= documents[:, 1:] == documents[:, :-1]
        labels = np.where(is_label[:, 1:], tokens[:, 1:], IGNORED)
        marks = None if documents is None else torch.from_numpy(documents[:, :-1].copy())
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            labels=torch.from_numpy(labels),
            samples=torch.from_numpy(samples),
            documents=marks,
            bounds=None if marks is None else document_bounds(marks),
            pairs=self._pairs(source, window) if self.corpus.has_pairs else None,
        )

    def _pairs(self, source: Indices, window: Indices) -> AnswerPairs:
        packed = self.packed_windows
        rows = ((int(of), packed[of], int(place)) for of, place in zip(source, window, strict=True))
        return answer_pairs(rows, self.seq, self.references)

    @property
    def packed_windows(self) -> list[PackedWindows]:
        """The windows of each source, all of which are examples."""
        return [each for each in self._packed if each is not None]

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return (source [n], window [n]) of each sample [n]."""
        source, nth = self._order.locate(samples)
        window = np.empty_like(nth)
        for index, size in enumerate(self.windows):
            mine = source == index
            epoch, place = np.divmod(nth[mine], size)
            key = random_key(self._seed, index, epoch if self.split == "train" else 0 * epoch)
            window[mine] = permuted_index(place, size, key)
        return source, window

    def _fill(self, source: int, window: int, tokens: Indices, documents: Indices | None, is_label: NDArray[np.bool_]) -> None:
        """Fill in a window of a text; padding fills the rest of a last one that is shorter."""
        read, filled = self.corpus.sources[source], 0
        ranges = read.ranges(self.split)
        for start, length in ranges.pieces(window * self.seq, min(self.seq + 1, ranges.size - window * self.seq)):
            read.tokens.copy(start, tokens[filled : filled + length])
            if documents is not None:
                documents[filled : filled + length] = read.tokens.documents(start, length)
            filled += length
        tokens[filled:], is_label[filled:] = PADDING, False
        if documents is not None:
            documents[filled:] = PADDING_DOCUMENT


def prefetch(batches: Batches, shards: Iterable[range], device: torch.device) -> Iterator[Batch]:
    """Yield the batch of each shard in order; a thread makes the next one while this one is used, for a GPU in pinned memory."""

    def make(samples: range) -> Batch:
        batch = batches.batch(samples.start, len(samples))
        if device.type != "cuda":
            return batch
        torch.cuda.set_device(device)  # each thread has its own: without it memory is pinned by the first GPU
        return batch.pin()

    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        waiting: Future[Batch] | None = None
        for samples in shards:
            coming = thread.submit(make, samples)
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()
