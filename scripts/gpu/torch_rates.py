"""The check of the machine: versions, what the device reaches in torch alone, and the attention kernels that torch chooses."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ...cli.config.load import load_recipe
from ...trainer.machine.device_rates import context_bytes, copy_rate, launch_seconds, product_rate
from ...trainer.machine.device_seconds import mean_seconds, wait_for_device
from ...trainer.machine.measure_machine import measure_once
from .check_context import CheckContext
from .finding import CheckBroken, Finding

PACKAGES = ("torch", "deepspeed", "triton", "transformers", "hydra-core", "numpy")
SIDE = 8192  # of a square matrix product
COPIED = 4 << 30  # bytes
SECONDS = 0.5  # for which one rate of a GPU is measured
ATTENTION = {  # query heads, key heads, head size, tokens
    "gpt2": (12, 12, 64, 1024),
    "llama": (32, 8, 128, 4096),
}


def measure_ceilings(context: CheckContext) -> Finding:
    """Measure what torch alone reaches on the device, beside the rates that plans take; raises CheckBroken without a GPU."""
    if context.on_gpu and not torch.cuda.is_available():
        raise CheckBroken("torch finds no GPU: --cpu rehearses the checks on this machine's CPU")
    device = torch.device("cuda" if context.on_gpu else "cpu")
    shrink = 1 if context.on_gpu else 16
    _measure_machine(["cuda", "cpu"] if context.on_gpu else ["cpu"])
    mean = partial(mean_seconds, enough=SECONDS / shrink)
    figures: dict[str, Any] = {"versions": _versions(), "python": platform.python_version()}
    if context.on_gpu:
        figures["gpu"] = torch.cuda.get_device_name(0)
        figures["compute capability"] = list(torch.cuda.get_device_capability(0))
        figures["gpus"] = torch.cuda.device_count()
        figures["memory"] = torch.cuda.get_device_properties(0).total_memory
        figures["cuda"] = torch.version.cuda
    figures["matrix product, FLOP/s"] = {
        str(dtype).removeprefix("torch."): product_rate(device, dtype, SIDE // shrink, mean) for dtype in (torch.bfloat16, torch.float32)
    }
    figures["copy, bytes/s read and written"] = copy_rate(device, COPIED // shrink**2, mean)
    figures["kernel launch, seconds"] = launch_seconds(device, mean)
    figures["attention"] = dict(_attention_kernels(device, shrink))
    if context.on_gpu:
        figures["context, bytes"] = context_bytes()
        figures["planned with"] = _planned_rates(CheckContext(folder=context.folder, on_gpu=True, gpu=figures["gpu"]))
    return Finding(figures=figures)


def _measure_machine(kinds: Sequence[str]) -> None:
    """Have this machine's devices of these kinds measured as `fit` would, which here nothing else slows. Raises CheckBroken."""
    for kind in kinds:
        if problem := measure_once(partial(str, kind), lambda text: None):
            raise CheckBroken(str(problem))


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return {**found, "torch": str(torch.__version__)}


def _planned_rates(context: CheckContext) -> dict[str, Any]:
    device = load_recipe("gpt2_124m_1gpu", (*context.words(), "parallel.dp=1")).cluster.device
    return {
        "name": device.name,
        "memory": device.memory,
        "bf16 peak times sustained, FLOP/s": device.peak.get("bf16", 0.0) * device.product_share,
        "bandwidth times streaming, bytes/s": (device.bandwidth or 0.0) * device.streaming,
        "launch, seconds": device.launch,
        "dispatch, seconds": device.dispatch,
        "context, bytes": device.context,
    }


def _attention_kernels(device: torch.device, shrink: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the kernels that a causal attention launches forward and backward, for each shape in bf16 and float32."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    for name, (heads, key_heads, size, tokens) in ATTENTION.items():
        for dtype in (torch.bfloat16, torch.float32):
            shapes = ((1, each, tokens // shrink, size) for each in (heads, key_heads, key_heads))
            query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
            with profile(activities=activities) as profiled:
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)
                out.sum().backward()  # type: ignore[no-untyped-call]
                wait_for_device()
            yield f"{name}, {str(dtype).removeprefix('torch.')}", list(_names(profiled.events() or (), on_gpu=device.type == "cuda"))


def _names(events: Sequence[Any], *, on_gpu: bool) -> Iterator[str]:
    """Yield the names of attention's kernels, of its operators on a CPU, each once."""
    wanted = ("flash", "fmha", "attention", "cudnn", "softmax")
    names = dict.fromkeys(str(each.name) for each in events if not on_gpu or str(each.device_type).endswith("CUDA"))
    yield from (name[:100] for name in names if any(each in name.lower() for each in wanted))
