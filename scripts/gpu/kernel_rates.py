"""The check of kernels: seconds of matrix products, attention, sums, the optimizer and the loss, of sizes that models have, beside what a
plan takes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import exp, log
from statistics import mean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cli.config.load import load_recipe
from ...trainer.engines.native.adamw_kernel import adamw_kernel
from ...trainer.layers.loss_kernels import loss_gradient, loss_rows
from ...trainer.machine.device_seconds import mean_seconds
from ...trainer.plan.costs.op_seconds import attention_seconds
from ...trainer.plan.costs.roofline import DeviceRates, memory_seconds, product_seconds, rates
from .check_context import CheckContext
from .finding import CheckSkipped, Finding

SECONDS = 0.2  # for which one kernel is measured
PRODUCTS = (  # rows, inner, columns: of layers forward, of their weights' gradients, of heads; then one dim after another
    (12288, 768, 2304), (12288, 768, 768), (12288, 768, 3072), (12288, 3072, 768), (768, 12288, 3072), (12288, 768, 50304),
    (8192, 1600, 4800), (8192, 1600, 6400), (8192, 6400, 1600), (1600, 8192, 6400), (16384, 1600, 6400),
    (4096, 4096, 4096), (4096, 4096, 1024), (4096, 4096, 14336), (4096, 14336, 4096), (4096, 4096, 28672), (14336, 4096, 4096),
    (8192, 2048, 8192), (8192, 8192, 2048), (8192, 2048, 128256),
    (512, 4096, 4096), (1024, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096), (16384, 4096, 4096),
    (8192, 128, 8192), (8192, 256, 8192), (8192, 512, 8192), (8192, 1024, 8192), (8192, 16384, 8192),
)  # fmt: skip
ATTENTION = (  # sequences, query heads, key heads, head size, tokens
    (12, 12, 12, 64, 1024), (16, 25, 25, 64, 1024), (2, 32, 8, 64, 4096), (4, 32, 32, 128, 1024), (2, 32, 8, 128, 2048),
    (1, 32, 8, 128, 4096), (1, 32, 8, 128, 8192), (1, 8, 2, 128, 32768),
)  # fmt: skip
EXPERTS = ((8, 8192, 4096, 14336), (8, 8192, 14336, 4096), (64, 32768, 2048, 1408))  # experts, rows in all, inner, columns
SUMS = (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30)  # bytes of one tensor
# Elements of buckets of GPT-2 1.5B and of a layer of Llama 3 8B, whose sides are powers of two.
BUCKETS = (43_532_800, 61_443_200, 25_165_824, 58_720_256, 117_440_512)
LOGITS = ((12288, 50304, 50257), (8192, 32768, 32768))  # rows, columns, and those that are no padding
SMALL = 16  # by which a rehearsal divides dims


class KernelTime(NamedTuple):
    """A kernel's name and sizes, seconds as measured and as planned."""

    name: str
    measured: float
    planned: float


def compare_kernels(context: CheckContext) -> Finding:
    """Time kernels one after another; figures are [measured, planned] seconds by name, and the mean of measured / planned by kind."""
    device = torch.device("cuda" if context.on_gpu else "cpu")
    planned = planned_rates(context)
    shrink, found = 1 if context.on_gpu else SMALL, dict[str, list[KernelTime]]()
    with torch.device(device):
        kinds = (_products, _experts, _attention, _sums, _adamw, _loss) if context.on_gpu else (_products, _sums, _adamw, _loss)
        for time_kind in kinds:
            for each in time_kind(planned, shrink):
                found.setdefault(each.name.split()[0], []).append(each)
    return Finding(
        figures={
            "measured / planned": {kind: exp(mean(log(each.measured / each.planned) for each in some)) for kind, some in found.items()},
            "seconds, measured and planned": {each.name: [each.measured, each.planned] for some in found.values() for each in some},
        }
    )


def planned_rates(context: CheckContext) -> DeviceRates:
    """Return the rates that plans take; raises CheckSkipped where none are known."""
    run = load_recipe("gpt2_124m_1gpu", (*context.words(), "parallel.dp=1", f"train.precision={'bf16' if context.on_gpu else 'fp32'}"))
    planned = rates(run.cluster.device, run.train.precision, fused=True, own=True, alone=True)
    if planned is None:
        raise CheckSkipped(f"no rates of {run.cluster.device.name} are known: conf/device has no option of it")
    return planned


def _products(planned: DeviceRates, shrink: int) -> Iterator[KernelTime]:
    dtype = torch.bfloat16 if shrink == 1 else torch.float32
    for sizes in PRODUCTS:
        rows, inner, columns = (max(16, each // shrink) for each in sizes)
        one, other = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype).t()
        yield KernelTime(
            f"product {rows} x {inner} x {columns}",
            mean_seconds(partial(torch.mm, one, other), SECONDS),
            product_seconds(rows, columns, inner, 1, one.element_size(), planned.linear, planned),
        )


def _experts(planned: DeviceRates, shrink: int) -> Iterator[KernelTime]:
    """Products of experts that get equally many rows."""
    for experts, rows, inner, columns in EXPERTS:
        one = torch.randn(rows, inner, dtype=torch.bfloat16)
        other = torch.randn(experts, columns, inner, dtype=torch.bfloat16).transpose(1, 2)
        ends = torch.arange(1, experts + 1, dtype=torch.int32) * (rows // experts)
        grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm
        yield KernelTime(
            f"experts {experts} x {rows // experts} x {inner} x {columns}",
            mean_seconds(partial(grouped, one, other, offs=ends), SECONDS),
            product_seconds(rows // experts, columns, inner, experts, 2, planned.linear, planned),
        )


def _attention(planned: DeviceRates, shrink: int) -> Iterator[KernelTime]:
    """Causal attention forward, and forward with backward."""
    for batch, heads, key_heads, size, tokens in ATTENTION:
        shapes = ((batch, tokens, each, size) for each in (heads, key_heads, key_heads))
        query, key, value = (torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes)
        gradient = torch.randn(batch, tokens, heads, size, dtype=torch.bfloat16).transpose(1, 2)
        forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=heads != key_heads)
        pairs = batch * heads * tokens**2 // 2
        says = f"{batch} x {heads}/{key_heads} x {size} x {tokens}"
        ahead_planned, back_planned = attention_seconds(4.0 * pairs * size, size, tokens, 2.5, planned)
        with torch.no_grad():
            ahead = mean_seconds(forward, SECONDS)
        yield KernelTime(f"attention {says}", ahead, ahead_planned)
        yield KernelTime(
            f"attention-backward {says}",
            mean_seconds(partial(_differentiate, forward, (query, key, value), gradient), SECONDS) - ahead,
            back_planned,
        )


def _differentiate(forward: Callable[[], Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> None:
    torch.autograd.grad(forward(), inputs, gradient)


def _sums(planned: DeviceRates, shrink: int) -> Iterator[KernelTime]:
    """The sum of two tensors: three are moved."""
    for size in SUMS:
        one, other = (torch.zeros(size // shrink**2 // 2, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(one)
        yield KernelTime(
            f"sum of {2 * one.numel()} bytes",
            mean_seconds(partial(torch.add, one, other, out=out), SECONDS),
            memory_seconds(6.0 * one.numel(), 1, planned),
        )


def _adamw(planned: DeviceRates, shrink: int) -> Iterator[KernelTime]:
    """AdamW's step of a bucket in bf16, one kernel: 28 bytes an element."""
    one = torch.ones(())
    for size in BUCKETS:
        elements = size // shrink**2
        weight, mean, square = (torch.zeros(elements) for _ in range(3))
        gradient, copy = (torch.zeros(elements, dtype=torch.bfloat16) for _ in range(2))
        step = partial(adamw_kernel, weight, copy, gradient, mean, square, one, one, one, one, one, None, None, 0.9, 0.95, 1e-8)
        yield KernelTime(f"adamw of {elements} elements", mean_seconds(step, SECONDS), memory_seconds(28.0 * elements, 1, planned))


def _loss(planned: DeviceRates, shrink: int) -> Iterator[KernelTime]:
    """The two passes of the loss: forward reads the logits, backward writes them too."""
    for rows, columns, width in LOGITS:
        rows //= shrink**2
        logits = torch.zeros(rows, columns, dtype=torch.bfloat16)
        labels, number = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        moved = 2.0 * rows * columns
        forward = partial(loss_rows, logits, labels, width)
        yield KernelTime(f"loss-forward {rows} x {columns}", mean_seconds(forward, SECONDS), memory_seconds(moved, 1, planned))
        backward = partial(loss_gradient, logits, labels, number, number, width, 0.0)
        yield KernelTime(f"loss-backward {rows} x {columns}", mean_seconds(backward, SECONDS), memory_seconds(2 * moved, 1, planned))
