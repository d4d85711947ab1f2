"""The fork server of the tests' ranks: RUN_DIR/program, or that file one or two folders above, names what the ranks do.

The file holds {"name": a key of PROGRAMS, "given": its arguments}; without it they train the run, as those of `distrain prove` do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from distrain.tests.rank_programs import (
    added_rows_ranks,
    device_ranks,
    fit_ranks,
    host_row_ranks,
    operator_ranks,
    piece_ranks,
    pipe_ranks,
    spoiled_ranks,
    together_ranks,
    trace_ranks,
)
from distrain.tests.rank_programs.signalled_ranks import with_signals
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop.forkserver import server
from distrain.trainer.loop.rank import run_rank

PROGRAMS: dict[str, Callable[..., int]] = {
    "added": added_rows_ranks.run_added_rank,
    "device": device_ranks.run_faulty_rank,
    "fit": fit_ranks.run_faulty_rank,
    "host rows": host_row_ranks.run_rank_with_host_rows,
    "operators": operator_ranks.run_rank_by_operators,
    "pieces": piece_ranks.run_rank_in_pieces,
    "pipe": pipe_ranks.work,
    "spoiled": spoiled_ranks.run_faulty_rank,
    "together": together_ranks.run_rank_together,
    "trace": trace_ranks.run_faulty_rank,
}


def run_pool_rank(path: Path, channel: Channel) -> int:
    """Run a rank of RUN_DIR/run.json by the program that the file names."""
    file = next((folder / "program" for folder in path.parents[:3] if (folder / "program").is_file()), None)
    if file is None:
        return run_rank(path, channel)
    program = json.loads(file.read_text())
    return PROGRAMS[program["name"]](*program["given"], path, channel)


def main() -> int:
    """Serve until stdin ends. The ranks of a busy machine may take long to notice that one of them has failed."""
    server.GRACE = 60.0
    server.serve(with_signals(run_pool_rank), server.QUESTIONS)
    return 0
