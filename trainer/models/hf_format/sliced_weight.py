"""One of our weights in a Hugging Face folder, of which any part is read by our own dims."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from .check_folder import FolderWeight
from .stored_tensors import StoredTensor
from .tensor_reader import Edges, TensorReader


@dataclass(frozen=True, kw_only=True)
class SlicedWeight:
    """A weight of a folder whose files are open. Indexed with a slice for each of its dims, without steps, it is that part: other elements
    are neither read nor dequantized, but for the rest of a block of MXFP4, and columns of other weights between those of the part."""

    weight: FolderWeight
    reader: TensorReader

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.weight.shape

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of its parts."""
        return reduce(torch.promote_types, {self.reader.dtype(each) for each in self.weight.stored})

    def whole(self) -> Tensor:
        """Return all of it."""
        return self[tuple(map(slice, self.shape))]

    def __getitem__(self, edges: Edges) -> Tensor:
        has_experts = "@" in self.weight.tensor.name
        if not has_experts and not (len(edges) > 2 and self.weight.stored[0].is_quantized):
            return self._part(self.weight.stored[0], edges)
        parts = (
            self._part(self.weight.stored[expert], edges[1:])
            if has_experts
            else self._part(self.weight.stored[0], (slice(expert, expert + 1), *edges[1:]))[0]
            for expert in range(*edges[0].indices(self.shape[0]))
        )
        size = [len(range(*edge.indices(length))) for edge, length in zip(edges, self.shape, strict=True)]
        if size[0] == 1:
            return next(parts).unsqueeze(0)
        every = torch.empty(size, dtype=self.dtype)
        for place, part in enumerate(parts):  # one is dequantized at a time
            every[place] = part
        return every

    def _part(self, stored: StoredTensor, edges: Edges) -> Tensor:
        """Return a part of one tensor, by the dims of our weight, or of one of its experts."""
        columns, tensor = self.weight.columns, self.weight.tensor
        if columns is None:
            return self._read(stored, edges)
        width, (first, last, _) = columns.stop - columns.start, edges[-1].indices(self.shape[-1])
        if columns.runs == 1:
            return self._read(stored, (*edges[:-1], slice(columns.start + first, columns.start + last)))
        if tensor.interleaved:  # a column of each run
            span = slice(columns.start + first * columns.width, columns.start + (last - 1) * columns.width + 1, columns.width)
            return self._read(stored, (*edges[:-1], span))
        begin, end = first // width, -(-last // width)  # runs
        runs = self._read(stored, (*edges[:-1], slice(begin * columns.width, end * columns.width)))
        mine = torch.unflatten(runs, -1, (end - begin, columns.width))[..., columns.start : columns.stop].flatten(-2)
        return mine[..., first - begin * width : last - begin * width]

    def _read(self, stored: StoredTensor, edges: Edges) -> Tensor:
        tensor = self.weight.tensor
        if tensor.depthwise:
            taps, channels = edges
            return self.reader.read(stored, (channels, slice(0, 1), taps)).squeeze(1).t()
        return self.reader.read(stored, edges[::-1]).t() if tensor.transposed else self.reader.read(stored, edges)
