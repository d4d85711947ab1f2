"""What a GPU's kernels ask of their tensors, checked at every operator of a trace: fake tensors pass where a GPU would refuse them.

The conditions are those of torch 2.11 to 2.13: aten/src/ATen/native/GroupedMMUtils.h, cuda/ScaledBlas.cpp and
transformers/cuda/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 16  # bytes: of addresses and strides of matrices
SCALED_MULTIPLE = 16  # of the sides of a product in 8-bit floats
HEAD_MULTIPLE, MOST_HEAD_DIM = 8, 256  # elements of a head of FlashAttention-2
HALF = (torch.bfloat16, torch.float16)


class RefusedKernel(Exception):
    """A kernel that a GPU would refuse, and why."""


class CheckedKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises RefusedKernel at an operator of its body that a GPU would refuse, or whose result the host would wait for; `checked` counts
    the others in CHECKS by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.checked = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._overloadpacket.__name__
        if check := CHECKS.get(name):
            try:
                check(*args, **(kwargs or {}))
            except RefusedKernel as refused:
                raise RefusedKernel(f"{name}: {refused}") from None
            self.checked[name] += 1
        return func(*args, **(kwargs or {}))


def _ask(condition: bool, says: str) -> None:
    if not condition:
        raise RefusedKernel(says)


def check_matrix(x: Tensor, name: str) -> None:
    """Check that the last two dims of a tensor are a matrix by rows or by columns, whose address and stride are aligned."""
    size = x.element_size()
    _ask(x.storage_offset() * size % ALIGNMENT == 0, f"{name} begins {x.storage_offset()} elements into its memory")
    inner, outer = (-2, -1) if x.stride(-2) == 1 and x.stride(-1) >= max(1, x.shape[-2]) else (-1, -2)
    _ask(x.stride(inner) == 1 and x.stride(outer) >= max(1, x.shape[inner]), f"{name} {tuple(x.shape)} has strides {x.stride()}")
    _ask(x.stride(outer) * size % ALIGNMENT == 0, f"{name} {tuple(x.shape)} has strides {x.stride()}")


def check_grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **options: Any) -> None:
    """Check a product of a stack of matrices."""
    check_matrix(a, "its first tensor")
    check_matrix(b, "its second tensor")
    _ask(a.dtype == b.dtype == torch.bfloat16, f"it multiplies {a.dtype} and {b.dtype}")
    _ask(offs is None or (offs.dtype == torch.int32 and offs.dim() == 1), "the ends of groups are no int32 [E]")


def check_scaled(a: Tensor, b: Tensor, one: Tensor | Sequence[Tensor], *others: Any, **options: Any) -> None:
    """Check a product in 8-bit floats with a scale for each tensor."""
    scales = [each for each in (one, *others) for each in (each if isinstance(each, list | tuple) else [each]) if isinstance(each, Tensor)]
    _ask(a.stride(-1) == 1 and b.stride(-2) == 1, f"strides are {a.stride()} and {b.stride()}, where rows and columns are asked for")
    sides = (a.shape[0], *b.shape)  # cuBLAS asks for the first where its transposed matrix is multiplied in backward
    _ask(not any(side % SCALED_MULTIPLE for side in sides), f"its sides are {sides}")
    _ask(torch.float8_e4m3fn in (a.dtype, b.dtype), f"it multiplies {a.dtype} and {b.dtype}")
    _ask(len(scales) == 2 and all(each.numel() == 1 and each.dtype == torch.float32 for each in scales), "a scale is no float32 number")


def check_flash(query: Tensor, key: Tensor, value: Tensor, *others: Any, heads: int = -2, **options: Any) -> None:
    """Check the inputs of FlashAttention-2; `heads` is the dim of heads."""
    given = (query, key, value)
    _ask(query.dtype in HALF and all(each.dtype == query.dtype for each in given), f"its inputs are {query.dtype} and {key.dtype}")
    _ask(all(each.stride(-1) == 1 for each in given), "elements of a head are not side by side")
    dims = {each.shape[-1] for each in given}
    _ask(len(dims) == 1 and max(dims) % HEAD_MULTIPLE == 0 and max(dims) <= MOST_HEAD_DIM, f"heads have {sorted(dims)} elements")
    _ask(query.shape[heads] % key.shape[heads] == 0, f"{key.shape[heads]} key heads do not divide {query.shape[heads]}")
    for each in others:
        if isinstance(each, Tensor) and each.dim() == 1 and each.numel() > 1:
            _ask(each.dtype == torch.int32 and each.is_contiguous(), f"bounds of sequences are {each.dtype}")


def check_flash_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *others: Any, **options: Any
) -> None:
    """Check the inputs of FlashAttention-2's backward, where heads are the last dim but one."""
    check_flash(query, key, value, *others)
    _ask(grad.stride(-1) == out.stride(-1) == 1, "elements of a head are not side by side")
    _ask(sums.dtype == torch.float32 and sums.is_contiguous(), "log-sum-exps are not in order, or no float32")


def check_copy(x: Tensor, *_: Any, device: torch.device | None = None, **options: Any) -> None:
    """Check that a copy to the host is none of a GPU's tensor, which the host would wait for."""
    _ask(not (x.device.type == "cuda" and device is not None and device.type == "cpu"), f"a copy of {tuple(x.shape)} to the host")


def refuse_number(x: Tensor) -> None:
    """Refuse to read a number, for which the host would wait."""
    _ask(x.device.type != "cuda", "the host reads a number")


# fmt: off
CHECKS: dict[str, Callable[..., None]] = {
    "_grouped_mm":                                  check_grouped,
    "_scaled_mm":                                   check_scaled,
    "_flash_attention_forward":                     check_flash,
    "_flash_attention_backward":                    check_flash_gradients,
    "_scaled_dot_product_flash_attention":          lambda *given, **options: check_flash(*given, heads=1, **options),
    "_to_copy":                                     check_copy,
    "_local_scalar_dense":                          refuse_number,
}
# fmt: on
