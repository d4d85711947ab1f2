"""Stands in for a GPU: runs the kernels of package fla in Triton's interpreter, beside our own rule in torch, and prints what it finds as
JSON. Call it as `TRITON_INTERPRET=1 python -m distrain.tests.fakes.fla_in_interpreter` where triton, fla and einops are installed.

Of Triton 3.7.1's interpreter it mends what these kernels meet: loops count in plain numbers, which have no types; 16-bit floats are
multiplied as integers; the fastest configuration is chosen on a GPU. Here the one with the largest tiles is taken, as for 228 KB of shared
memory.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from time import process_time
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from distrain.scripts.trace_cuda.live_bytes import LiveBytes
from distrain.tests.fakes.moved_bytes import MovedBytes
from distrain.tests.fakes.small_models import gradients, module_of, run_of
from distrain.trainer.layers.delta_inputs import DeltaInputs, tensors_of
from distrain.trainer.layers.fused_delta import fused_gated_delta, packed_bounds
from distrain.trainer.layers.gated_delta import gated_delta
from distrain.trainer.layers.rank_group import Group

SHARED_MEMORY, STATE_TILE = 232448, 64  # bytes of an H100's multiprocessor; elements of a value that a program has of the states there
TAPS = 4
WIDE = {"batch": 1, "seq": 128, "keys": 1, "values": 2, "key_dim": 128, "value_dim": 128}  # Qwen3-Next's widths
ODD = {"batch": 1, "seq": 70, "keys": 1, "values": 3, "key_dim": 10, "value_dim": 6}
STARTS = ((*(0,) * 3, *(3,) * 66, 69), (0,) * 70)  # of the documents of two sequences


class Counts:
    """What the kernels of a pass do: bytes that a program reads or writes, each element once, and FLOPs of products, by kernel."""

    def __init__(self) -> None:
        self.kernel, self.bytes, self.flops, self.calls = "", defaultdict[str, int](int), defaultdict[str, int](int), 0
        self.idle = False  # kernels are left out
        self._of_program: dict[tuple[str, int], list[Any]] = {}

    def begin_program(self) -> None:
        numpy = import_module("numpy")
        for (_, width), addresses in self._of_program.items():
            self.bytes[self.kernel] += width * len(numpy.unique(numpy.concatenate(addresses)))
        self._of_program = {}

    def move(self, way: str, width: int, addresses: Any) -> None:
        self._of_program.setdefault((way, width), []).append(addresses)


counts = Counts()


def begin_counts() -> Counts:
    """Begin to count anew; the counts so far are returned."""
    global counts
    ended, counts = counts, Counts()
    return ended


def mend_interpreter() -> None:
    """Have Triton's interpreter run fla's kernels; before anything imports them."""
    interpreter, autotuner = import_module("triton.runtime.interpreter"), import_module("triton.runtime.autotuner")
    begin = autotuner.Autotuner.__init__

    def with_one_configuration(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **more: Any) -> None:
        chosen = max(configs, key=_tile)
        if chosen.kwargs.keys() == {"BV"}:  # of the kernels that run through the chunks
            chosen.kwargs["BV"] = STATE_TILE
        begin(self, fn, arg_names, [chosen], *rest, **more)

    autotuner.Autotuner.__init__ = with_one_configuration
    hardware: Any = import_module("fla.utils.hardware")
    hardware.get_all_max_shared_mem = lambda: defaultdict(lambda: SHARED_MEMORY)
    hardware.check_shared_mem.cache_clear()
    chunks: Any = import_module("fla.ops.common.chunk_delta_h")
    chunks.range = lambda *bounds: map(interpreter._implicit_cvt, range(*map(int, bounds)))
    _mend_floats(interpreter)
    _count_kernels(interpreter)


def _tile(configuration: Any) -> int:
    return sum(each for each in configuration.kwargs.values() if isinstance(each, int))


def _mend_floats(interpreter: Any) -> None:
    builder, language = interpreter.InterpreterBuilder, import_module("triton.language")
    multiply, combine = builder.create_dot, builder.binary_op

    def wide(each: Any) -> Any:
        return builder.cast_impl(None, each, language.float32) if each.dtype.scalar == language.bfloat16 else each

    def product(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        counts.flops[counts.kernel] += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return multiply(self, wide(a), wide(b), d, *rest)

    def binary(self: Any, one: Any, other: Any, op: Any) -> Any:
        if one.dtype.scalar != language.bfloat16:
            return combine(self, one, other, op)
        return builder.cast_impl(None, combine(self, wide(one), wide(other), op), language.bfloat16)

    builder.create_dot, builder.binary_op = product, binary


def _count_kernels(interpreter: Any) -> None:
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, place, call = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx, executor.__call__

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        counts.move("read", ptrs.get_element_ty().primitive_bitwidth // 8, ptrs.data[mask.data].ravel())
        return load(self, ptrs, mask, *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counts.move("written", ptrs.get_element_ty().primitive_bitwidth // 8, ptrs.data[mask.data].ravel())
        return store(self, ptrs, value, mask, *rest)

    def set_place(self: Any, *at: int) -> None:
        counts.begin_program()
        place(self, *at)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        counts.kernel, counts.calls = self.fn.__name__, counts.calls + 1
        if counts.idle:
            return
        with _disable_current_modes():
            call(self, *args, **kwargs)
        counts.begin_program()

    builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx = masked_load, masked_store, set_place
    executor.__call__ = run_kernel


def inputs_of(sizes: dict[str, int], dtype: torch.dtype, heads: int = 1) -> DeltaInputs:
    """Return inputs of a rule whose weights are of `heads` times as many heads."""
    drawn, keys = torch.Generator().manual_seed(3), sizes["keys"] * sizes["key_dim"]
    many = sizes["keys"] * sizes["values"]
    values, tokens = many * sizes["value_dim"], (sizes["batch"], sizes["seq"])
    shapes: dict[str, tuple[int, ...]] = {
        "query": (*tokens, keys),
        "key": (*tokens, keys),
        "value": (*tokens, values),
        "beta": (*tokens, many),
        "decay": (*tokens, many),
    }
    shapes |= {"query_conv": (TAPS, heads * keys), "key_conv": (TAPS, heads * keys), "value_conv": (TAPS, heads * values)}
    shapes |= {"a_log": (heads * many,), "dt_bias": (heads * many,)}
    return DeltaInputs(**{name: torch.randn(shape, generator=drawn).to(dtype).requires_grad_() for name, shape in shapes.items()})


def passes(inputs: DeltaInputs, rule: Callable[[DeltaInputs], Tensor]) -> tuple[Tensor, ...]:
    """Return what a rule reads, and the gradients of its inputs."""
    read = rule(inputs)
    grad = torch.randn(read.shape, generator=torch.Generator().manual_seed(1)).to(read.dtype)
    return read.detach(), *torch.autograd.grad(read, tensors_of(inputs), grad)


def apart(
    sizes: dict[str, int], dtype: torch.dtype = torch.float32, *, starts: Tensor | None = None, rank: int | None = None
) -> dict[str, float]:
    """Return how far what fla reads and its gradients are from those of our own rule in float64, of the largest of each."""
    group = None if rank is None else Group(name="cp", ranks=(0, 1), rank=rank, handle=cast(Any, None))
    inputs, key_dim = inputs_of(sizes, dtype, heads=1 if rank is None else 2), sizes["key_dim"]
    wide = DeltaInputs(**{name: each.detach().double().requires_grad_() for name, each in zip(NAMES, tensors_of(inputs), strict=True)})
    bounds = None if starts is None else packed_bounds(starts)
    found = passes(inputs, lambda each: fused_gated_delta(each, key_dim, bounds=bounds, sharing=group))
    expected = passes(wide, lambda each: gated_delta(each, key_dim, starts=starts, sharing=group))
    assert all(one.dtype == dtype and one.shape == other.shape for one, other in zip(found, expected, strict=True))
    pairs = zip(("read", *NAMES), found, expected, strict=True)
    return {name: float((one.double() - other).abs().max() / other.abs().max()) for name, one, other in pairs}


NAMES = tuple(DeltaInputs.__dataclass_fields__)


def counted() -> dict[str, Any]:
    """Return what forward and backward in bf16 do at WIDE: FLOPs and bytes by kernel, bytes and kernels of torch, bytes saved and held."""
    inputs, saved = inputs_of(WIDE, torch.bfloat16), list[Tensor]()
    found: dict[str, Any] = {}

    def keep(each: Tensor) -> Tensor:
        saved.append(each)
        return each

    begin_counts()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each), MovedBytes() as moved:
        read = fused_gated_delta(inputs, WIDE["key_dim"])
    found["forward"] = _of_pass(begin_counts(), moved)
    found["saved"] = sum(each.nbytes for each in saved)
    grad = torch.ones_like(read)
    with MovedBytes() as moved:
        torch.autograd.grad(read, tensors_of(inputs), grad, retain_graph=True)
    found["backward"] = _of_pass(begin_counts(), moved)
    live = LiveBytes("cpu", block=1)
    live.add((*tensors_of(inputs), grad))
    begun, counts.idle = live.now, True  # the interpreter holds tensors of its own
    with live:
        torch.autograd.grad(read, tensors_of(inputs), grad)
    return found | {"held": live.peak - begun}


def _of_pass(ended: Counts, moved: MovedBytes) -> dict[str, Any]:
    return {"bytes": ended.bytes, "flops": ended.flops, "kernels": ended.calls, "torch": [moved.bytes, moved.kernels]}


def model_apart() -> dict[str, float]:
    """Return how far the gradients of a small hybrid are from those in float64, of the largest of each weight: by fla, and by our own rule
    in float32. It reads documents."""
    tokens, labels = torch.randint(64, (2, 1, 24), generator=torch.Generator().manual_seed(3))
    documents = (torch.arange(24) // 13).unsqueeze(0)
    keys = {"model__layers": 2, "model__full_attention_interval": 2}

    def of(rule: str, dtype: torch.dtype) -> dict[str, Any]:
        module = module_of(run_of("hybrid", **keys, train__linear_attention=rule), dtype)
        return gradients(module, tokens, labels, documents=documents)[1]

    expected, found = of("torch", torch.float64), {"fla": of("fla", torch.float32), "torch": of("torch", torch.float32)}
    return {
        rule: max(float((each[name] - one).abs().max() / one.abs().max()) for name, one in expected.items()) for rule, each in found.items()
    }


def main() -> None:
    """Print all of it."""
    mend_interpreter()
    cases: dict[str, Callable[[], Any]] = {
        "float32": lambda: apart(ODD),
        "documents": lambda: apart(ODD | {"batch": 2}, starts=torch.tensor(STARTS)),
        "a rank's heads": lambda: apart(ODD, rank=1),
        "bf16": lambda: apart(ODD, torch.bfloat16),
        "whole model": model_apart,
        "counted": counted,
    }
    found = dict[str, Any]()
    for name, case in cases.items():
        found[name] = case()
        print(f"{name}: {process_time():.0f} s", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
