"""Ranks of engine native with weights on the host, whose gradients go there through small buffers, as those of large models do.

Each writes RUN_DIR/rows.RANK: the bytes that the last step copied to the host and to the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distrain.trainer.engines.native.data_parallel import host_gradients
from distrain.trainer.engines.native.data_parallel.host_rows import HostRows
from distrain.trainer.engines.native.engine import NativeEngine
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.plan.costs.offload import TO_DEVICE, TO_HOST

ELEMENTS = 5000  # of gradients that go through one buffer


def run_rank_with_host_rows(path: Path, channel: Channel) -> int:
    """Run a rank of RUN_DIR/run.json."""
    module: Any = host_gradients
    module.GRADIENTS_AT_ONCE = ELEMENTS
    engine: Any = NativeEngine
    rows: Any = HostRows
    step, inputs, copied = engine.step, rows.all_gather_inputs.fget, [0]

    def count_inputs(self: Any) -> Any:
        found = inputs(self)
        copied[0] += sum(each.nbytes for each in found)
        return found

    def count_step(self: Any, *given: Any) -> Any:
        host, copied[0] = self.reducer.host, 0
        before = host.to_host.bytes
        result = step(self, *given)
        found = {TO_HOST: host.to_host.bytes - before, TO_DEVICE: copied[0]}
        (path.parent / f"rows.{dist.get_rank()}").write_text(json.dumps(found))
        return result

    rows.all_gather_inputs = property(count_inputs)
    engine.step = count_step
    return run_rank(path, channel)
