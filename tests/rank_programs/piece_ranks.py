"""Ranks of engine native whose hosts step small pieces, as those of large models do: theirs would be one.

Each writes RUN_DIR/pieces.RANK: how many pieces a step has, how many of them hold parts of several weights, and the bytes that the last
step copied to the host and back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distrain.trainer.engines.native import host_optimizer
from distrain.trainer.engines.native.host_optimizer import HostOptimizer
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop.rank import run_rank

PIECE, PART = 5000, 704  # elements that are copied at once, and stepped at once


def run_rank_in_pieces(path: Path, channel: Channel) -> int:
    """Run a rank of RUN_DIR/run.json."""
    module: Any = host_optimizer
    module.PIECE, module.PART = PIECE, PART
    host: Any = HostOptimizer
    step = host.step

    def count_step(optimizer: Any, *given: Any) -> None:
        before = optimizer.to_host.bytes, optimizer.to_device.bytes
        step(optimizer, *given)
        found = {
            "pieces": len(optimizer._pieces),
            "mixed": sum(len(piece) > 1 for piece in optimizer._pieces),
            "to_host": optimizer.to_host.bytes - before[0],
            "to_device": optimizer.to_device.bytes - before[1],
        }
        (path.parent / f"pieces.{dist.get_rank()}").write_text(json.dumps(found))

    host.step = count_step
    return run_rank(path, channel)
