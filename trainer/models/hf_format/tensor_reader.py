"""Parts of a folder's tensors, read from memory-mapped files; of quantized ones only the part is dequantized."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from ..hf.quantization import WHOLE_DIM
from .stored_tensors import MXFP4_BLOCK, StoredTensor, grid_of

# The 16 values of a 4-bit float, e2m1: OCP Microscaling Formats v1.0, table 5; the upper half is negative.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127  # of a block's exponent

Edges = tuple[slice, ...]  # of a part, along each dim; steps are above 0


class TensorReader:
    """The tensors of opened safetensors files. It is a context: no part can be read after its end."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stack = ExitStack()
        opened = [self._stack.enter_context(safe_open(path, framework="pt")) for path in files]
        self._file_of: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def dtype(self, stored: StoredTensor) -> torch.dtype:
        """Return the type that parts of a tensor are read in: that of a plain one, float32 or that of the scales of a quantized one."""
        if not stored.scales:
            return self._mapped(stored.values).dtype
        return self._mapped(stored.scales).dtype if stored.in_scale_dtype else torch.float32

    def read(self, stored: StoredTensor, edges: Edges) -> Tensor:
        """Return a part of a tensor without a problem: a view of the mapped file where it is plain, else its dequantized values."""
        values = self._mapped(stored.values)
        if not stored.scales:
            return values[edges]
        scales = self._mapped(stored.scales)
        if stored.is_mxfp4:
            return dequantize_mxfp4(values, scales, edges)
        scales = scales.view(grid_of(stored.shape, stored.block))
        return dequantize_float8(values, scales if stored.in_scale_dtype else scales.float(), stored.block, edges)

    def _mapped(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def dequantize_mxfp4(blocks: Tensor, exponents: Tensor, edges: Edges) -> Tensor:
    """Return a part of the tensor [..., inner, outer], float32, whose blocks are [..., outer, inner / 32, 16] bytes.

    A value is e2m1 x 2^(exponent - 127) (OCP Microscaling Formats v1.0, section 5.1); the low half of a byte comes first. Only blocks that
    the part meets are read.
    """
    *rest, inner, outer = edges
    first, stop, step = inner.indices(blocks.shape[-2] * MXFP4_BLOCK)
    start = first // MXFP4_BLOCK
    met = (*rest, outer, slice(start, -(-stop // MXFP4_BLOCK)))
    packed = blocks[met]
    halves = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)  # [..., outer, blocks, 32]
    values = torch.tensor(E2M1)[halves.int()]
    values = torch.ldexp(values, (exponents[met].int() - E8M0_BIAS).unsqueeze(-1)).flatten(-2)
    return values[..., first - start * MXFP4_BLOCK : stop - start * MXFP4_BLOCK : step].transpose(-1, -2)


def dequantize_float8(values: Tensor, scales: Tensor, block: tuple[int, int], edges: Edges) -> Tensor:
    """Return a part of a matrix, value x scale in the type of the scales, which are of blocks of (rows, columns) of the whole matrix.

    Blocks begin at the matrix's first element, whatever the part; the last ones may be cut (arXiv:2412.19437 section 3.3.2).
    """
    part = values[edges].to(scales.dtype)
    for dim, (edge, size) in enumerate(zip(edges, block, strict=True)):
        if size != WHOLE_DIM:
            scales = scales.index_select(dim, torch.arange(values.shape[dim])[edge] // size)
    return part.mul_(scales)
