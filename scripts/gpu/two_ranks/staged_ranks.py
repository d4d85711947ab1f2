"""A fork server whose ranks share this machine's first GPU, or its CPU in a rehearsal, and stage their messages.

Run it as `python -m distrain.scripts.gpu.two_ranks.staged_ranks`; the protocol is that of trainer/loop/forkserver/server.py. With
RUN_DIR/run.json as its argument it is one of these ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from ....trainer.launch.rank.channel import Channel
from ....trainer.loop.forkserver.server import QUESTIONS, serve
from ....trainer.loop.rank import run_rank
from ....trainer.parallel import world
from ....trainer.spec.run import Run
from .staged_messages import stage_messages


def run_staged_rank(path: Path, channel: Channel) -> int:
    """Train RUN_DIR/run.json as the rank that the environment names, on the first GPU; return its exit status."""
    kind = msgspec.json.decode(path.read_bytes(), type=Run).cluster.device.kind
    os.environ["LOCAL_RANK"] = "0"
    world.BACKENDS["cuda"] = "gloo"
    stage_messages(kind)
    return run_rank(path, channel)


def main() -> int:
    """Serve until stdin ends; with an argument, train as a rank, and return its exit status."""
    if path := next(map(Path, sys.argv[1:]), None):
        return run_staged_rank(path, Channel.from_environment())
    serve(run_staged_rank, QUESTIONS, module="distrain.scripts.gpu.two_ranks.staged_ranks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
