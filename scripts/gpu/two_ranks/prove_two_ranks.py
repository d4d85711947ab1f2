"""Proves layouts of two ranks that share one GPU: `prove`'s own comparison with one process, at its own tolerance."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ....trainer.prove.fork_client import ForkServer
from ....trainer.prove.trials.layouts import ProveLayout
from ..check_context import CheckContext
from ..finding import Finding
from ..fit_runs import UNTIMED
from ..proved_layouts import prove_layouts
from .staged_messages import STAGED

SERVER = (sys.executable, "-m", "distrain.scripts.gpu.two_ranks.staged_ranks")
LAYOUTS = (
    ProveLayout(tp=2),
    ProveLayout(tp=2, sequence=True),
    ProveLayout(cp=2),
    ProveLayout(dp=2, zero=1),
    ProveLayout(dp=2, zero=3),
    ProveLayout(pp=2),
)
HALF_PRECISION_LAYOUTS = (
    ProveLayout(cp=2),
    ProveLayout(cp=2, all_to_all=True),
    ProveLayout(tp=2, sequence=True),
)  # attention across ranks calls another kernel than in float32
COMPILED_LAYOUTS = (
    ProveLayout(cp=2, engine="native"),  # it attends outside the graphs, and its products are joined
    ProveLayout(cp=2, all_to_all=True),
    ProveLayout(tp=2, sequence=True),
)
WINDOWED_LAYOUTS = (
    ProveLayout(cp=2, engine="native"),  # each rank's windows are FlashAttention-2's own
    ProveLayout(cp=2, all_to_all=True, engine="native"),
    ProveLayout(dp=2, zero=3, offload="optimizer", engine="native"),  # its rows travel to the host and back
    ProveLayout(dp=2, zero=3, offload="all", engine="native"),  # its weights are there too
    ProveLayout(dp=2, zero=2, engine="native"),
)
WORDS = ("model=tiny_llama", "data=synthetic", "train.seq=64", "train.batch=8", "train.microbatch=2")


@dataclass(frozen=True, kw_only=True)
class LayersProof:
    """Overrides of how layers compute, and the layouts that are proved so; a rehearsal has others, which need not be among them."""

    words: tuple[str, ...]
    layouts: tuple[ProveLayout, ...]
    rehearsed: tuple[ProveLayout, ...]


OFFLOADED = WINDOWED_LAYOUTS[2]
PROOFS = {
    "fp32": LayersProof(words=("train.precision=fp32",), layouts=LAYOUTS, rehearsed=(LAYOUTS[0], LAYOUTS[4], OFFLOADED)),
    "bf16": LayersProof(words=("train.precision=bf16",), layouts=HALF_PRECISION_LAYOUTS, rehearsed=HALF_PRECISION_LAYOUTS[:1]),
    "compiled": LayersProof(  # on a CPU attention across context ranks is in the graphs, which takes minutes to compile
        words=("train.precision=bf16", "train.compile=true"), layouts=COMPILED_LAYOUTS, rehearsed=COMPILED_LAYOUTS[2:]
    ),
    "windows": LayersProof(words=("train.precision=bf16", "model.window=16"), layouts=WINDOWED_LAYOUTS, rehearsed=(OFFLOADED,)),
}


def prove_two_ranks(context: CheckContext, layers: str = "fp32") -> Finding:
    """Train one process and two ranks in each layout, with layers of a row of PROOFS; figures are the largest differences by layout."""
    proved = PROOFS[layers]
    layouts = proved.layouts if context.on_gpu else proved.rehearsed
    found = prove_layouts(context, f"two_ranks.{layers}", (*WORDS, *proved.words), layouts, _start_server)
    return replace(found, figures={**found.figures, "staged through host memory": list(STAGED)})


def _start_server(log: Path, environment: Mapping[str, str]) -> ForkServer:
    return ForkServer(log, {**environment, **UNTIMED}, command=SERVER)
