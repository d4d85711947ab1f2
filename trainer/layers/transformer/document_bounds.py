"""Where the documents of a micro-batch start, as a kernel of attention reads it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# B batch, S sequence, s those of its tokens that have queries on this rank, T = B S tokens, L tokens of a chunk


@dataclass(frozen=True, kw_only=True)
class DocumentBounds:
    """Where the documents of a micro-batch [B, S] start: the place of each document's first token in the flat micro-batch, then T in every
    place left. Each row ends a document. The size depends on B and S alone."""

    starts: Tensor  # [T + 1] int32, on the device
    host: Tensor  # the same, in host memory

    def to(self, device: torch.device) -> DocumentBounds:
        """Return the bounds as a kernel of `device` reads them."""
        return DocumentBounds(starts=self.starts.to(device, non_blocking=True), host=self.host)

    def pin(self) -> DocumentBounds:
        """Return the bounds in pinned memory, from which copies to a GPU run beside its kernels."""
        pinned = self.host.pin_memory()
        return DocumentBounds(starts=pinned, host=pinned)


def document_bounds(documents: Tensor) -> DocumentBounds:
    """Return the bounds of documents [B, S], in host memory, which are marked by any number that changes from one to the next."""
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    tokens = documents.numel()
    starts = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    places = torch.arange(tokens, dtype=torch.int32)
    starts[:-1] = torch.where(is_first.flatten(), places, tokens).sort().values
    return DocumentBounds(starts=starts, host=starts)


class DocumentChunk(NamedTuple):
    """Neighbouring queries of one row, or those of all rows as one sequence, and the documents that they belong to.

    `starts` are where these documents start among the keys, and where the queries end: of document i the keys from starts[i] to
    starts[i + 1], the last of which are its queries' own.
    """

    row: int | None  # None: all rows as one sequence
    queries: slice  # of that row or sequence
    sums: slice  # the same among the queries of all rows
    place: int  # of the first query among the keys
    starts: list[int]
    documents: slice  # where these documents, and the end of the last, are in the bounds
    offset: int  # of the row's first key in the bounds

    @property
    def keys(self) -> slice:
        """The keys of these documents up to the last query's own."""
        return slice(self.starts[0], self.starts[-1])

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a document."""
        ends = self.starts[1:]
        return (
            max(end - max(start, self.place) for start, end in zip(self.starts, ends, strict=False)),
            max(end - start for start, end in zip(self.starts, ends, strict=False)),
        )


def document_chunks(
    host: Tensor, batch: int, queries: int, keys: int, spans: Sequence[int], most: int | None = None
) -> Iterator[DocumentChunk]:
    """Yield the chunks of queries [B, s] for keys [B, S], in the order of the queries; a chunk of more documents than `most` in parts.

    A row's queries are chunks of one length, the first tokens of which are at `spans` in the sequence. Without any, each query has its own
    key, and all rows are one sequence.
    """
    count = int(torch.searchsorted(host, batch * keys))
    starts: list[int] = host[: count + 1].tolist()
    if not spans:
        yield from _parts(
            DocumentChunk(None, slice(0, batch * queries), slice(0, batch * queries), 0, starts, slice(0, count + 1), 0), most
        )
        return
    length = queries // len(spans)
    for row in range(batch):
        for index, place in enumerate(spans):
            offset, begin = row * keys, row * queries + index * length
            first, last = bisect_right(starts, offset + place) - 1, bisect_left(starts, offset + place + length)
            own = [*(start - offset for start in starts[first:last]), place + length]
            rows, sums = slice(index * length, (index + 1) * length), slice(begin, begin + length)
            yield from _parts(DocumentChunk(row, rows, sums, place, own, slice(first, last + 1), offset), most)


def _parts(chunk: DocumentChunk, most: int | None) -> Iterator[DocumentChunk]:
    """Yield a chunk in parts of at most so many documents."""
    count = len(chunk.starts) - 1
    for first in range(0, count, most or count):
        starts = chunk.starts[first : min(first + (most or count), count) + 1]
        place = max(starts[0], chunk.place)
        begin, size = place - chunk.place, starts[-1] - place
        yield chunk._replace(
            queries=slice(chunk.queries.start + begin, chunk.queries.start + begin + size),
            sums=slice(chunk.sums.start + begin, chunk.sums.start + begin + size),
            place=place,
            starts=starts,
            documents=slice(chunk.documents.start + first, chunk.documents.start + first + len(starts)),
        )
