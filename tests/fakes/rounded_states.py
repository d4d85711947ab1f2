"""The reference of moments in bfloat16 and in 8 bits: AdamW and SGD in a few lines of plain torch, and in numpy random bits, which wrap as
C does, and codes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distrain.trainer.spec.run import Run

GOLDEN = 0x9E3779B97F4A7C15


def _finalize(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, doi:10.1145/2714064.2660195 figure 16."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _streams(begin: int, count: int) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _finalize(np.uint64(begin) + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))


def random_bits(seed: int, name: str, step: int, rows: int, columns: int) -> NDArray[np.uint32]:
    """32 bits of each element of a logical tensor at a step, from 1; all dims but its last are one."""
    name_hash = int.from_bytes(blake2b(repr((seed, "rounding", name)).encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        begin = _finalize(np.array([(name_hash + step * GOLDEN) % 2**64], dtype=np.uint64))[0]
    of_rows, of_columns = _streams(int(begin), rows), _streams(0, columns).astype(np.uint32)
    x: NDArray[np.uint32] = of_rows.astype(np.uint32)[:, None] ^ of_columns[None]
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD) + (of_rows >> np.uint64(32)).astype(np.uint32)[:, None]
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def dynamic_numbers(*, signed: bool) -> NDArray[np.float32]:
    """The 256 numbers of the dynamic data type (arXiv:2110.02861 section 1.3): 0, 1 and the centres of parts of each decade."""
    parts = [(10.0 ** (decade - 6), 2 ** (decade + (not signed))) for decade in range(7)]
    centres = np.concatenate([size * (edges[1:] + edges[:-1]) / 2 for size, many in parts for edges in [np.linspace(0.1, 1, many + 1)]])
    return np.sort(np.concatenate([centres, -centres if signed else [], [0, 1]])).astype(np.float32)


def quantize_moment(value: Tensor, *, signed: bool) -> Tensor:
    """A tensor as 8 bits keep it: in blocks of 256 the number that is nearest to an element's share of the one furthest from 0. A number
    above 0 without a sign never becomes 0."""
    numbers, found = dynamic_numbers(signed=signed), []
    for block in value.detach().flatten().split(256):
        scale = block[block.abs().argmax()]
        shares = (block / scale if scale.abs() >= 2.0**-100 else torch.zeros_like(block)).numpy()
        nearest = np.abs(shares[:, None] - numbers[None]).argmin(1)
        kept = nearest if signed else np.where(shares > 0, np.maximum(nearest, 1), 0)
        found.append(torch.from_numpy(numbers[kept]) * scale)
    return torch.cat(found).view(value.shape)


def round_moment(run: Run, name: str, value: Tensor, step: int, half: int) -> Tensor:
    """A whole tensor's moment as it is kept, in float32. In bfloat16 it is between two neighbours the upper one, in absolute value, where
    16 random bits, as a share of 2^16, are at least what is missing to it. Of AdamW's moments the second is number 1."""
    if run.optim.moments == "int8":
        return quantize_moment(value, signed=half == 0)
    if run.optim.rounding == "nearest":
        return value.bfloat16().float()
    bits = random_bits(run.train.seed, name, step, value.numel() // value.shape[-1], value.shape[-1])
    draws = ((bits >> np.uint32(16 * half)) & np.uint32(0xFFFF)).astype(np.uint32)
    exact = value.detach().reshape(bits.shape).contiguous().numpy().view(np.uint32)
    lower, share = exact & np.uint32(0xFFFF0000), exact & np.uint32(0xFFFF)
    kept = lower + np.where(draws + share >= 2**16, np.uint32(0x10000), np.uint32(0)).astype(np.uint32)
    return torch.from_numpy(kept.astype(np.uint32).view(np.float32)).view_as(value)


class RoundedOptimizer:
    """AdamW (arXiv:1711.05101 algorithm 2), or SGD with momentum, of a whole model whose moments are rounded after each step."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        self.run, self.weights, self.taken = run, dict(module.named_parameters()), 0
        self.param_groups: list[dict[str, Any]] = [{"lr": run.optim.lr}]
        self.first, self.second = ({name: torch.zeros_like(each) for name, each in self.weights.items()} for _ in range(2))

    def zero_grad(self) -> None:
        for each in self.weights.values():
            each.grad = None

    def moments(self) -> dict[tuple[str, str], Tensor]:
        """The moments, by their kind in checkpoints and the weight's name."""
        if self.run.optim.name == "sgd":
            return {("momentum_buffer", name): each for name, each in self.first.items()}
        both = (("exp_avg", self.first), ("exp_avg_sq", self.second))
        return {(kind, name): each for kind, some in both for name, each in some.items()}

    @torch.no_grad()
    def step(self) -> None:
        self.taken += 1
        optim, lr = self.run.optim, self.param_groups[0]["lr"]
        for name, weight in self.weights.items():
            assert weight.grad is not None
            decay = optim.weight_decay if weight.dim() > 1 and not name.endswith("bias") else 0.0
            if optim.name == "sgd":
                moment = optim.momentum * self.first[name] + weight.grad + decay * weight
                weight.sub_(lr * moment)
                self.first[name] = round_moment(self.run, name, moment, self.taken, 0)
                continue
            b1, b2 = optim.betas
            mean = b1 * self.first[name] + (1 - b1) * weight.grad
            square = b2 * self.second[name] + (1 - b2) * weight.grad**2
            change = mean / (1 - b1**self.taken) / ((square / (1 - b2**self.taken)).sqrt() + optim.eps)
            weight.sub_(lr * (change + decay * weight))
            self.first[name] = round_moment(self.run, name, mean, self.taken, 0)
            self.second[name] = round_moment(self.run, name, square, self.taken, 1)
