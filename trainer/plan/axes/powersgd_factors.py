"""Sizes of the two factors that stand for a matrix of gradients on the data axis (PowerSGD, arXiv:1905.13727)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class MatrixStack(NamedTuple):
    """Equal matrices of one weight, each compressed for itself: one, or one for each expert."""

    matrices: int
    rows: int
    columns: int


class FactorElements(NamedTuple):
    """Elements of compressed gradients, of their left factors P [rows, rank] and of their right factors Q [columns, rank]."""

    matrices: int = 0
    left: int = 0
    right: int = 0

    def times(self, many: int) -> FactorElements:
        """Those of so many equal weights."""
        return FactorElements(self.matrices * many, self.left * many, self.right * many)

    def plus(self, other: FactorElements) -> FactorElements:
        """Those of both."""
        return FactorElements(self.matrices + other.matrices, self.left + other.left, self.right + other.right)


def compressed_stack(size: tuple[int, ...], rank: int) -> MatrixStack | None:
    """Return the matrices of a weight of this size on a rank, if their factors have fewer elements than they; None: it travels whole.

    The last two dims are a matrix's; vectors have none.
    """
    if len(size) < 2:
        return None
    rows, columns = size[-2:]
    return MatrixStack(prod(size[:-2]), rows, columns) if rank and (rows + columns) * rank < rows * columns else None


def factor_elements(stack: MatrixStack, rank: int) -> FactorElements:
    """The elements of a weight's matrices and of their factors."""
    matrices, rows, columns = stack
    return FactorElements(matrices * rows * columns, matrices * rows * rank, matrices * columns * rank)
