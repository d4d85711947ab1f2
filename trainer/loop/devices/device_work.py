"""The fixed work by which devices are compared: matrix products, pointwise kernels, reductions and copies, the same on every device.

On one kind of GPU one build of cuBLAS gives the same bits each time, while no other stream runs (cuBLAS guide, "Results reproducibility").
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ...machine.measure_machine import cpu_model
from .checksum import checksum, combined
from .device_reading import DeviceReading

SEED = 1234  # of the inputs: the same in every run
REPEATS = 4  # of the work, of which the fastest counts; the first warms up


@dataclass(frozen=True, kw_only=True)
class WorkSize:
    """The sizes of the work: matrices of `side` x `side` elements, copies of `copied` bytes."""

    side: int
    products: int
    copied: int
    copies: int


# Of an H100 about 15 ms by its data sheet in half precision and in float32, and 0.3 GiB of memory; of a CPU's core 1 to 10 ms.
GPU_HALF_PRECISION = WorkSize(side=4096, products=40, copied=64 << 20, copies=20)
GPU_FLOAT32 = WorkSize(side=4096, products=4, copied=64 << 20, copies=20)
CPU = WorkSize(side=192, products=2, copied=2 << 20, copies=2)


def read_device(rank: int, device: torch.device, dtype: torch.dtype, before: int | None = None) -> DeviceReading:
    """Run the work on a device in the run's type. Return its seconds, its bits, and whether all repeats have the same, and the same as
    `before`, those of an earlier check."""
    size = CPU if device.type == "cpu" else GPU_HALF_PRECISION if dtype.itemsize == 2 else GPU_FLOAT32
    unread = DeviceReading(rank=rank, host=socket.gethostname(), device=device_name(device), kind=device_kind(device, dtype))
    try:
        with one_thread():  # the seconds of several on busy cores are those of waiting for each other, forty times as many
            seconds, bits = run_work(device, dtype, size)
    except torch.OutOfMemoryError:
        return unread
    repeats = len({*bits, bits[0] if before is None else before}) == 1
    return replace(unread, seconds=min(seconds), bits=bits[0], repeats=repeats)


@torch.no_grad()
def run_work(device: torch.device, dtype: torch.dtype, size: WorkSize) -> tuple[list[float], list[int]]:
    """Return the seconds and the checksum of each repeat."""
    generator = torch.Generator(device).manual_seed(SEED)
    start, weight = (torch.rand(size.side, size.side, generator=generator, device=device, dtype=dtype).sub_(0.5) for _ in range(2))
    source = torch.randint(-(1 << 31), 1 << 31, (size.copied // 4,), generator=generator, device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    timed, sums = list[Callable[[], float]](), list[Tensor]()
    for _ in range(REPEATS):
        with measure(device, timed):
            results = work_once(start, weight, source, target, size)
        sums.append(combined(torch.stack([checksum(each) for each in results])))
    bits = torch.stack(sums).tolist()  # waits for the device
    return [seconds() for seconds in timed], bits


def work_once(start: Tensor, weight: Tensor, source: Tensor, target: Tensor, size: WorkSize) -> tuple[Tensor, Tensor]:
    """Run the work once and return its results. Each product reads the result of the one before, so that an error reaches the end."""
    x = start  # [side, side]
    for _ in range(size.products):
        x = functional.layer_norm(functional.gelu(x @ weight), (size.side,))
    for _ in range(size.copies):
        target.copy_(source)
        source.copy_(target)
    return x, target


@contextmanager
def measure(device: torch.device, timed: list[Callable[[], float]]) -> Iterator[None]:
    """Add to `timed` what returns the seconds of the block, once the device is done.

    On a CPU they are this thread's CPU time: what other processes take of a core is not a fault of the device.
    """
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        yield
        ended.record()
        timed.append(lambda: began.elapsed_time(ended) / 1e3)
    else:
        start = time.thread_time()
        yield
        seconds = time.thread_time() - start
        timed.append(lambda: seconds)


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread of the CPU in the block."""
    if (before := torch.get_num_threads()) == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """Return how people name a device of a host."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def device_kind(device: torch.device, dtype: torch.dtype) -> str:
    """Return what decides the bits and the time of the work: devices for which it is the same are compared."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        kind = f"{facts.name}, {facts.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
    else:
        kind = f"{cpu_model() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind}, torch {torch.__version__}, {dtype}"
