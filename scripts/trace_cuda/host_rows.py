"""What a rank of engine `native` holds on its device where its weights are on its host, traced on fake CUDA tensors: its own engine, under
torch's fully_shard.

Run `python -m distrain.scripts.trace_cuda.host_rows RECIPE [k=v ...]`, of a recipe at ZeRO 3 with offloaded parameters and without stages;
it prints a line of JSON for rank 0: the bytes that are traced, and those that are planned.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from ...cli.config.load import load_recipe
from ...trainer.plan.costs.offload import TO_DEVICE, TO_HOST
from ...trainer.spec.run import Run
from ..show_help import show_help
from .device_guard import load_device_guard
from .host_step import no_streams, planned_bytes


@dataclass(frozen=True, kw_only=True)
class HostRowBytes:
    """Bytes of a rank: the most that its device held while the engine was `built`, and holds between steps (`held`), the `peak` of a step's
    passes, and what a step copies to the host and back."""

    held: int
    peak: int
    to_host: int
    to_device: int
    built: int | None = None


def trace_host_rows(run: Run) -> HostRowBytes:
    """Trace the passes and the step of rank 0. Call it once `load_device_guard` has run."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ...trainer.engines.native.data_parallel.host_rows import HostRows
    from ...trainer.loop.build import build_engine
    from ...trainer.loop.data.samples.batches import Batch
    from ...trainer.loop.step.model_inputs import model_inputs
    from .live_bytes import LiveBytes
    from .patch_gpu_kernels import gpu_kernels
    from .rank_trace import CUDA, fake_grid

    inputs: Any = HostRows.all_gather_inputs
    copied, rows = [0], inputs.fget

    def count_copies(weight: Any) -> Any:
        found = rows(weight)
        copied[0] += sum(each.nbytes for each in found)
        return found

    with ExitStack() as stack:
        grid = stack.enter_context(fake_grid(run, 0))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(no_streams())
        stack.enter_context(gpu_kernels(run.train.microbatch * run.train.seq * run.model.top_k))
        live = stack.enter_context(LiveBytes("cuda", block=1))
        stack.enter_context(_resizes(live))
        stack.enter_context(patch.object(HostRows, "all_gather_inputs", property(count_copies)))
        engine: Any = build_engine(run, grid, "native")
        built = live.peak
        live.restart_peak()
        size = (run.train.microbatch, run.train.seq)
        tokens, labels = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
        batch = Batch(tokens=tokens, labels=labels, samples=torch.zeros(size[0], dtype=torch.long), documents=None, pairs=None)
        engine._run_passes(lambda _: model_inputs(run, batch, grid, 0), run.train.batch * run.train.seq, None)
        peak, passed, to_host = live.peak, copied[0], engine.reducer.host.to_host.bytes
        engine.bucket_optimizer.host.step(torch.ones((), device=CUDA))
        assert copied[0] == passed
        host = engine.bucket_optimizer.host
        assert not host.to_host.bytes + host.to_device.bytes
        return HostRowBytes(built=built, held=live.now, peak=peak, to_host=to_host, to_device=passed)


@contextmanager
def _resizes(live: Any) -> Iterator[None]:
    """Have storages counted anew that are given memory or give it back, as those of fully_shard's gathered weights."""
    import torch

    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: Any, size: int) -> Any:
        resize(storage, size)
        live.count_again(storage)
        return storage

    with patch.object(torch.UntypedStorage, "resize_", resize_and_count):
        yield


def planned_host_rows(run: Run) -> HostRowBytes:
    """Plan the same."""
    held, copied = planned_bytes(run)
    between = held.weights + held.gradients + held.optimizer
    peak = between + held.buffers + held.activations + held.logits + held.temporary
    return HostRowBytes(held=round(between), peak=round(peak), to_host=copied[TO_HOST], to_device=copied[TO_DEVICE])


def traced_host_rows(run: Run) -> dict[str, dict[str, int]]:
    """Trace and plan."""
    return {"traced": asdict(trace_host_rows(run)), "planned": asdict(planned_host_rows(run))}


def main() -> None:
    """Trace and plan the run that the words name."""
    load_device_guard()
    run = load_recipe(sys.argv[1], sys.argv[2:])
    print(json.dumps(traced_host_rows(run)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    show_help(__doc__)
    main()
