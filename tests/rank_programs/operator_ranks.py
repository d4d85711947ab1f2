"""Ranks whose compiled layers run operator by operator: the graphs of torch's compiler, of which no kernels are made, for that takes a
minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop import build
from distrain.trainer.loop.rank import run_rank

BACKEND = "aot_eager_decomp_partition"  # backward keeps what it keeps under the compiler's own backend


def run_rank_by_operators(path: Path, channel: Channel) -> int:
    """Run a rank of RUN_DIR/run.json."""
    compile_layers, module = build.compile_layers, vars(build)

    def compile_to_operators(layers: Any, **_: Any) -> None:
        compile_layers(layers, BACKEND)

    module["compile_layers"] = compile_to_operators
    return run_rank(path, channel)
