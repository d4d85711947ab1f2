"""The orthogonal matrix that Muon steps along, by the iteration of Newton and Schulz (https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

import torch
from torch import Tensor

# Of a X + b (X X^T) X + c (X X^T)^2 X: they bring singular values near 1 in few steps, to between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


def orthogonalise_update(update: Tensor, steps: int) -> Tensor:
    """Return U V^T, nearly, of an update U S V^T [N, M], in its type, which the products are computed in too; another tensor."""
    made: Tensor = update / torch.linalg.vector_norm(update).clamp_min(EPS)
    if is_tall := made.shape[0] > made.shape[1]:
        made = made.mT
    for _ in range(steps):
        gram = made @ made.mT
        made = torch.addmm(made, torch.addmm(gram, gram, gram, beta=B, alpha=C), made, beta=A)
    return made.mT if is_tall else made


def rate_factor(rows: int, columns: int, adjust: str) -> float:
    """Return the factor of the learning rate of a matrix with so many inputs (rows) and outputs (columns), as torch.optim.Muon has it for
    its transposed one."""
    if adjust == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)  # arXiv:2502.16982 section 2.2
    return float(max(1.0, columns / rows) ** 0.5)
