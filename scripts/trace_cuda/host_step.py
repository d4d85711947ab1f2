"""What a rank of engine `native` holds on its device where its host steps, traced on fake CUDA tensors: its own engine, rows and pieces.

Run `python -m distrain.scripts.trace_cuda.host_step RECIPE [k=v ...]`, of a recipe at ZeRO 3 with an offloaded optimizer; it prints a line
of JSON for rank 0: the bytes that are traced, and those that are planned.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ...cli.config.load import load_recipe
from ...trainer.plan.costs.offload import TO_DEVICE, TO_HOST
from ...trainer.plan.plan import make_plan
from ...trainer.plan.plan_data import MemoryBytes
from ...trainer.spec.run import Run
from .device_guard import load_device_guard


@dataclass(frozen=True, kw_only=True)
class HostStepBytes:
    """Bytes of a rank: `weights` and `gradients` that its device holds between backward and step, what the step holds there in addition,
    and what it copies to the host and back."""

    weights: int
    gradients: int
    step: int
    to_host: int
    to_device: int


def trace_host_step(run: Run) -> HostStepBytes:
    """Trace the step of rank 0. Call it once `load_device_guard` has run."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ...trainer.loop.build import build_engine
    from .live_bytes import LiveBytes
    from .rank_trace import CUDA, fake_grid, no_values

    with ExitStack() as stack:
        grid = stack.enter_context(fake_grid(run, 0))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(no_streams())
        stack.enter_context(no_values())
        live = stack.enter_context(LiveBytes("cuda", block=1))
        engine: Any = build_engine(run, grid, "native")
        weights, host = live.now, engine.bucket_optimizer.host
        for bucket in engine.buckets:
            for row in bucket.rows:
                row.parameter.grad = torch.empty_like(row.parameter, dtype=torch.float32)
        held, divisor = live.now, torch.ones((), device=CUDA)
        live.restart_peak()
        host.step(divisor)
        return HostStepBytes(
            weights=weights,
            gradients=held - weights,
            step=live.peak - held - divisor.nbytes,
            to_host=host.to_host.bytes,
            to_device=host.to_device.bytes,
        )


def planned_host_step(run: Run) -> HostStepBytes:
    """Plan the same."""
    held, copied = planned_bytes(run)
    return HostStepBytes(
        weights=round(held.weights), gradients=round(held.gradients), step=0, to_host=copied[TO_HOST], to_device=copied[TO_DEVICE]
    )


def planned_bytes(run: Run) -> tuple[MemoryBytes, dict[str, int]]:
    """Return what is planned of the first stage's ranks: the device's memory, and bytes of copies by direction. Raises ValueError."""
    plan = make_plan(run)
    if plan.memory is None:
        raise ValueError(plan.problems[0].says)
    copied = dict.fromkeys((TO_HOST, TO_DEVICE), 0)
    for each in plan.traffic:
        if each.axis == "host":
            copied[each.verb] += round(each.sent)
    return plan.memory.stages[0].bytes, copied


class _IdleStream:
    """A stream on which nothing waits. fully_shard has keys of streams."""

    def __init__(self, event: SimpleNamespace) -> None:
        self._event = event

    def record_event(self, *_: Any) -> SimpleNamespace:
        """Return the event of all."""
        return self._event

    def wait_event(self, _: Any) -> None:
        """Wait for nothing."""

    def wait_stream(self, _: Any) -> None:
        """Wait for nothing."""


@contextmanager
def no_streams() -> Iterator[None]:
    """Have CUDA's streams and events be there, and order nothing: fake tensors have no data."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from ...trainer.engines.native.data_parallel import fully_sharded

    make_mesh = fully_sharded._device_mesh

    def real_mesh(*given: Any) -> Any:
        with unset_fake_temporarily():
            return make_mesh(*given)

    event = SimpleNamespace(synchronize=lambda: None, record=lambda *_: None)
    stream = _IdleStream(event)
    empty = torch.empty

    def pageable(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        return empty(*size, **options)

    with (
        patch.object(torch.cuda, "Stream", lambda *_, **__: stream),
        patch.object(torch.cuda, "Event", lambda *_, **__: event),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "current_stream", lambda *_: stream),
        patch.object(torch.cuda, "stream", lambda _: nullcontext()),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
        patch.object(torch, "empty", pageable),
        patch.object(fully_sharded, "_device_mesh", real_mesh),
    ):
        yield


def traced_host_step(run: Run) -> dict[str, dict[str, int]]:
    """Trace and plan."""
    return {"traced": asdict(trace_host_step(run)), "planned": asdict(planned_host_step(run))}


def main() -> None:
    """Trace and plan the run that the words name."""
    load_device_guard()
    run = load_recipe(sys.argv[1], sys.argv[2:])
    print(json.dumps(traced_host_step(run)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
