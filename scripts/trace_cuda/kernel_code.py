"""Reads the code of the optimizer's and the loss's kernels for an H100 or H200, on a machine without a GPU: for each kernel that torch's
compiler makes, the bytes that a thread reads and writes at once, and its instructions for an element.

Run `pip install --no-deps triton==3.7.1` once, and `python -m distrain.scripts.trace_cuda.kernel_code`, with a C++ compiler. Such a GPU
reads fast 8 or 16 bytes at once; it takes as long for 14 instructions of an element as for a read of its two bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ..show_help import show_help
from .device_guard import NoGuard, load_device_guard
from .machine_code import WARP, KernelCode, read_code

# Of an H200, as torch describes it; of these the compiler reads the capability and the number of multiprocessors.
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150109880320,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=62914560,
    gcnArchName="",
)
CAPABILITY = 90
FIRST, FURTHER = 1 << 20, (117_440_512, 50_331_648)  # elements of buckets; the compiler sees the first one when a run begins
COLUMNS = 1024  # of a weight's rows, where moments are rounded at random
ROWS, VOCABULARIES = 12_288, ((50_304, 50_257), (32_768, 32_768))  # of logits: with padding, and without


def kernel_codes(run: Callable[[], object]) -> list[KernelCode]:
    """Return the kernels that torch's compiler makes where `run` calls compiled functions on fake CUDA tensors, in the order of calls."""
    import torch

    found = list[KernelCode]()
    with compiler_of_a_gpu(found):
        real, backend = torch.compile, _backend_without_calls()
        with patch.object(torch, "compile", lambda passes, **options: real(passes, **{**options, "backend": backend})):
            run()
    return found


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each kernel and what calls it, for the optimizer with buckets of more than one length. Within FakeTensorMode."""
    import torch

    bf16, fp32 = torch.bfloat16, torch.float32
    yield "AdamW in bf16", lambda: _adamw(bf16, fp32)
    yield "AdamW in float32", lambda: _adamw(fp32, fp32)
    yield "AdamW, moments in bf16", lambda: _adamw(bf16, bf16)
    yield "AdamW, moments in bf16, at random", lambda: _adamw(bf16, bf16, at_random=True)
    yield "AdamW, moments in 8 bits", _adamw_in_blocks
    for logits, width in VOCABULARIES:
        yield f"loss forward, {logits:,} logits", lambda logits=logits, width=width: _loss(logits, width, forward=True)  # type: ignore[misc]
        yield f"loss backward, {logits:,} logits", lambda logits=logits, width=width: _loss(logits, width, forward=False)  # type: ignore[misc]


def _adamw(weights: Any, moments: Any, *, at_random: bool = False) -> None:
    import torch

    from ...trainer.engines.native.adamw_kernel import compiled_adamw, in_kernel_shape

    compiled_adamw.cache_clear()
    one, step = torch.ones((), device="cuda"), compiled_adamw(0.9, 0.95, 1e-8)
    for elements in (FIRST, *FURTHER):
        weight, mean, square = (torch.empty(elements, dtype=each, device="cuda") for each in (torch.float32, moments, moments))
        gradient = torch.empty(elements, dtype=weights, device="cuda")
        copy = None if weights == torch.float32 else torch.empty_like(gradient)
        rows, columns = (torch.empty(*shape, dtype=torch.int32, device="cuda") for shape in ((elements // COLUMNS, 2), (COLUMNS,)))
        tensors, words = in_kernel_shape((weight, copy, gradient, mean, square), *((rows, columns) if at_random else ()))
        step(*tensors, one, one, one, one, one, *words)


def _adamw_in_blocks() -> None:
    import torch

    from ...trainer.engines.native.adamw_kernel import compiled_adamw, in_block_rows
    from ...trainer.layers.block_quantization import code_tables
    from ...trainer.plan.costs.precision import MOMENT_BLOCK

    compiled_adamw.cache_clear()
    one, step = torch.ones((), device="cuda"), compiled_adamw(0.9, 0.95, 1e-8, in_blocks=True)
    tables = [code_tables(one.device, signed=signed) for signed in (True, False)]
    for elements in (FIRST, *FURTHER):
        kinds = (torch.float32, torch.bfloat16, torch.bfloat16, torch.uint8, torch.uint8)
        tensors = tuple(torch.empty(elements, dtype=kind, device="cuda") for kind in kinds)
        scales = tuple(torch.empty(elements // MOMENT_BLOCK, device="cuda") for _ in range(2))
        step(*in_block_rows(tensors, scales), *tables, one, one, one, one, one)


def _loss(logits: int, width: int, *, forward: bool) -> None:
    import torch

    from ...trainer.layers.loss_kernels import compile_once, row_statistics_by_parts, run_compiled, write_gradient

    compile_once.cache_clear()
    for rows in (ROWS, ROWS // 4):
        given = torch.empty(rows, logits, dtype=torch.bfloat16, device="cuda")
        labels, number = torch.empty(rows, dtype=torch.int64, device="cuda"), torch.empty(rows, device="cuda")
        if forward:
            run_compiled(row_statistics_by_parts, given, labels, width)
        else:
            run_compiled(write_gradient, given, labels, number, number, width, 0.0)


class _GpuDriver:
    """Triton's driver, of which the compiler asks the GPU's kind alone."""

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", CAPABILITY, WARP)

    def get_current_device(self) -> int:
        return 0


class _UncalledKernel:
    """A kernel whose code is read."""

    def run(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a kernel was called")


@contextmanager
def compiler_of_a_gpu(found: list[KernelCode]) -> Iterator[None]:
    """Have torch's compiler make code for the GPU above in the block, and read it into `found` instead of a call of the kernel."""
    import torch
    from torch._inductor import async_compile

    compiler: Any = async_compile

    def record(_: Any, name: str, source: str, device_str: str = "cuda") -> _UncalledKernel:
        kernel = compiler._load_triton_kernel_from_source(name, source)
        kernel.configs = kernel.configs[:1]
        kernel.precompile(warm_cache_only=True)
        found.append(read_code(name, source, kernel.compile_results[0]))
        return _UncalledKernel()

    torch._dynamo.reset()
    import_module("triton").runtime.driver.set_active(_GpuDriver())
    with ExitStack() as stack:
        for owner, name, value in _answers_of_a_gpu():
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(async_compile.AsyncCompile, "triton", record))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True))
        stack.enter_context(patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"))
        stack.enter_context(patch.object(torch._dynamo.config, "disable", False))
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False, bundled_autograd_cache=False))
        yield


def _backend_without_calls() -> Any:
    """Return a backend that has a graph's code made, and runs the graph operator by operator."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def compile_graph(module: Any, inputs: Any) -> Any:
        with patch.object(torch.cuda, "is_available", lambda: True):
            compile_fx_inner(module, inputs)
        return module.forward

    return aot_autograd(
        fw_compiler=compile_graph,
        inference_compiler=compile_graph,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


def _answers_of_a_gpu() -> Iterator[tuple[Any, str, Any]]:
    """Yield what torch's compiler asks of CUDA, by owner and name, and the answer of the GPU above."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch._subclasses import fake_tensor

    yield torch.cuda, "get_device_properties", lambda *_: H200
    yield torch.cuda, "get_device_capability", lambda *_: (H200.major, H200.minor)
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "device_count", lambda: 1
    yield torch.cuda, "synchronize", lambda *_: None
    yield torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)
    yield torch.cuda, "set_rng_state", lambda *_: None
    yield torch.cuda, "_lazy_init", lambda: None
    yield torch.cuda, "_exchange_device", lambda _: 0
    yield torch.cuda, "_maybe_exchange_device", lambda _: 0
    yield CudaInterface, "is_triton_capable", staticmethod(lambda *_: True)
    yield CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda *_: None)
    yield CudaInterface, "get_device_properties", staticmethod(lambda *_: H200)
    yield CudaInterface, "get_compute_capability", staticmethod(lambda *_: CAPABILITY)
    yield CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: H200)
    yield CudaInterface.Worker, "current_device", staticmethod(lambda: 0)
    yield fake_tensor, "init_gpu_context", lambda *_: None
    yield triton_heuristics.StaticTritonCompileResult, "can_statically_launch", staticmethod(lambda *_, **__: None)
    yield triton_helpers, "set_driver_to_gpu", lambda: None
    yield scheduler, "has_triton", lambda *_: True


def main() -> None:
    """Print a row for each kernel."""
    if find_spec("triton") is None:
        sys.exit("triton is missing: pip install --no-deps triton==3.7.1")
    try:
        load_device_guard()
    except NoGuard as error:
        sys.exit(f"fake CUDA tensors: {error}")
    from torch._subclasses.fake_tensor import FakeTensorMode

    print(f"{'':<36}{'load':>8}{'store':>8}{'accesses':>10}{'instructions':>14}  kernel")
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, run in cases():
            for each in kernel_codes(run):
                print(
                    f"{name:<36}{each.load:>6} B{each.store:>6} B{each.accesses:>10}{each.instructions:>14.1f}  {each.name[:50]}",
                    flush=True,
                )
                name = ""
    sys.stdout.flush()
    os._exit(0)  # threads of autograd abort where fake tensors were on a GPU


if __name__ == "__main__":
    show_help(__doc__)
    main()
