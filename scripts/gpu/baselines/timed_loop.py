"""The loop in which a baseline is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

WARM_UP, TIMED = 3, 5  # steps


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and its batch, as a recipe names them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    microbatch: int
    micros: int


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Median seconds of a step, bytes of torch's allocator at most, losses by step; a profiler's trace of one more step, JSON."""

    step_seconds: float
    memory_peak: int
    losses: tuple[float, ...]
    trace: str


def random_batch(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [microbatch, seq] drawn uniformly: time does not depend on them."""
    tokens = torch.randint(sizes.vocab, (sizes.microbatch, sizes.seq + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_step(optimizer: torch.optim.Optimizer, micros: int, loss_of_micro: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a step that accumulates gradients over micro-batches, clips them, and returns the mean loss."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def step() -> Tensor:
        losses = list[Tensor]()
        for _ in range(micros):
            loss = loss_of_micro() / micros
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return step


def time_steps(step: Callable[[], Tensor], device: torch.device) -> Timed:
    """Take steps, each of which returns its loss, time those after WARM_UP, and profile one more."""
    seconds, losses = list[float](), list[float]()
    for number in range(WARM_UP + TIMED):
        if number == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = perf_counter()
        losses.append(float(step()))  # waits for the device
        seconds.append(perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Timed(step_seconds=median(seconds[WARM_UP:]), memory_peak=peak, losses=tuple(losses), trace=_profile(step, device))


def _profile(step: Callable[[], Tensor], device: torch.device) -> str:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with TemporaryDirectory() as folder:
        with profile(activities=activities) as profiled:
            float(step())
        file = Path(folder) / "step.json"
        profiled.export_chrome_trace(str(file))
        return file.read_text(encoding="utf-8")
