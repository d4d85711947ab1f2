"""The tensors of a Hugging Face folder as plain ones: which stored tensors hold the values of each, and which the scales.

Two forms are quantized. MXFP4 (OCP Microscaling Formats v1.0, section 5): NAME_blocks [..., outer, inner / 32, 16] hold two 4-bit floats
a byte, the first in the low half, and NAME_scales [..., outer, inner / 32] the exponent of each 32 of them; NAME itself is [..., inner,
outer], as transformers' gpt-oss has it. 8-bit floats: NAME [outer, inner] is stored under its own name, and NAME_scale_inv or
NAME_scale has the factor of each block of it (arXiv:2412.19437 section 3.3.2), of each row, or of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from ..hf.quantization import KEY, WHOLE_DIM, Quantization
from .weight_files import TensorHeader

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
FLOAT8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
MXFP4_BLOCK: Final = 32  # values of one exponent
BLOCKS, EXPONENTS = "_blocks", "_scales"
SCALE_SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a folder as if it were plain: its name, its shape, and the stored tensors with its values and its scales ("": it is
    plain).

    `is_mxfp4`: both are bytes. Otherwise a scale is of a `block` of (rows, columns), 0 for all of them, and `in_scale_dtype` says how the
    product is rounded. `problem`: why it is not read, "" where it is.
    """

    name: str
    shape: tuple[int, ...]
    values: str
    scales: str = ""
    is_mxfp4: bool = False
    block: tuple[int, int] = (WHOLE_DIM, WHOLE_DIM)
    in_scale_dtype: bool = False
    problem: str = ""

    @property
    def is_quantized(self) -> bool:
        """Whether its stored values are those of the weight only with scales."""
        return bool(self.scales)


def stored_tensors(headers: Mapping[str, TensorHeader], quantization: Quantization) -> dict[str, StoredTensor]:
    """Return every tensor of files with these headers by its plain name; scales are part of the tensors that they belong to."""
    found: dict[str, StoredTensor] = {}
    for name, header in headers.items():
        base = name.removesuffix(BLOCKS)
        if base != name and header.dtype == "U8":
            found[base] = _mxfp4_tensor(base, headers)
        else:
            scales = next((name + suffix for suffix in SCALE_SUFFIXES if name.endswith("weight") and name + suffix in headers), "")
            found[name] = _scaled_tensor(name, scales, headers, quantization) if scales else _plain_tensor(name, header)
    return found


def grid_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks of (rows, columns) along both dims of a matrix; the last ones may be smaller."""
    rows, columns = (-(-length // size) if size else 1 for length, size in zip(shape, block, strict=True))
    return rows, columns


def _plain_tensor(name: str, header: TensorHeader) -> StoredTensor:
    problem = "" if header.dtype in PLAIN_DTYPES else f"{name} is {header.dtype}, which is not read"
    if header.dtype in FLOAT8_DTYPES:
        problem = f"{name} is {header.dtype}, and the folder has neither {' nor '.join(name + suffix for suffix in SCALE_SUFFIXES)}"
    scales = name + SCALE_SUFFIXES[0] if header.dtype in FLOAT8_DTYPES else ""
    return StoredTensor(name=name, shape=header.shape, values=name, scales=scales, problem=problem)


def _mxfp4_tensor(name: str, headers: Mapping[str, TensorHeader]) -> StoredTensor:
    blocks, exponents = headers[name + BLOCKS], headers.get(name + EXPONENTS)
    problem = ""
    if len(blocks.shape) < 3 or blocks.shape[-1] != MXFP4_BLOCK // 2:
        problem = f"{name}{BLOCKS} is {list(blocks.shape)}, not blocks of {MXFP4_BLOCK // 2} bytes"
    elif exponents is None:
        problem = f"the folder has {name}{BLOCKS}, and no {name}{EXPONENTS}"
    elif exponents != TensorHeader("U8", blocks.shape[:-1]):
        problem = f"{name}{EXPONENTS} is {exponents.dtype} {list(exponents.shape)}, not U8 {list(blocks.shape[:-1])}"
    *outer, count, _ = blocks.shape if len(blocks.shape) >= 3 else (0, 0, 0)
    shape = (*outer[:-1], count * MXFP4_BLOCK, outer[-1])
    return StoredTensor(name=name, shape=shape, values=name + BLOCKS, scales=name + EXPONENTS, is_mxfp4=True, problem=problem)


def _scaled_tensor(name: str, scales: str, headers: Mapping[str, TensorHeader], quantization: Quantization) -> StoredTensor:
    values, factors = headers[name], headers[scales]
    fitting = (block for block in quantization.blocks if len(values.shape) == 2 and _fits(factors.shape, values.shape, block))
    block = next(fitting, None)
    problem = ""
    if values.dtype not in FLOAT8_DTYPES:
        problem = f"{name} is {values.dtype}, and has {scales}: of scaled weights, {' and '.join(FLOAT8_DTYPES)} are read"
    elif not quantization.blocks:
        problem = f"{name} is {values.dtype}, and config.json has no {KEY} that says of what blocks its scales are"
    elif factors.dtype not in SCALE_DTYPES:
        problem = f"{scales} is {factors.dtype}, which is not read"
    elif block is None:
        grids = [str(list(grid_of(values.shape, each))) for each in quantization.blocks if len(values.shape) == 2]
        problem = f"{scales} is {list(factors.shape)}, not {' or '.join(grids) or 'of a matrix'}, where {name} is {list(values.shape)}"
    return StoredTensor(
        name=name,
        shape=values.shape,
        values=name,
        scales=scales,
        block=block or (WHOLE_DIM, WHOLE_DIM),
        in_scale_dtype=quantization.in_scale_dtype and factors.dtype in PLAIN_DTYPES,
        problem=problem,
    )


def _fits(shape: tuple[int, ...], values: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether scales of a shape are those of each block; of whole rows, and of all, they may have fewer dims."""
    grid = grid_of(values, block)
    return shape == grid or (block[1] == WHOLE_DIM and len(shape) < 2 and prod(shape) == prod(grid))
