"""The clocks of other machines, compared with rank 0's by real messages between processes."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import pytest

pytest.importorskip("torch")

from distrain.tests.rank_programs.forked_ranks import fork_ranks
from distrain.trainer.loop.measure.common_clock import common_clock, machine_name

AHEAD = (0.0, 7.0, 7.0, -3.0, 0.0)  # seconds of each rank's clock
MACHINES = ("a", "b", "b", "c", "a")


def test_clocks_of_other_machines_are_told_to_within_their_stated_error(tmp_path: Path) -> None:
    import torch.distributed as dist

    def run_rank(rank: int) -> None:
        def now() -> float:
            return perf_counter() + AHEAD[rank]

        assert dist.group.WORLD is not None
        clock = common_clock(dist.group.WORLD, rank, MACHINES[rank], now)
        before, at, after = perf_counter(), clock.seconds(now()) + clock.origin, perf_counter()  # which all processes of this test share
        (tmp_path / str(rank)).write_text(json.dumps([clock.offset, clock.error, at - before, after - at, clock.name]))

    assert fork_ranks(len(AHEAD), run_rank) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(len(AHEAD))]
    for (offset, error, early, late, _), ahead in zip(found, AHEAD, strict=True):
        assert abs(offset + ahead) <= error + 1e-9
        assert min(early, late) >= -error - 1e-9
    assert [error > 0 for _, error, *_ in found] == [False, True, True, True, False]
    assert len({name for *_, name in found}) == 1


def test_processes_of_one_machine_have_one_name() -> None:
    assert machine_name() == machine_name() != ""
