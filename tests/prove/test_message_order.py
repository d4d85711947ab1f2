"""Orders of collectives: all ranks of a group send the same, and none can deadlock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from distrain.trainer.prove.checks.message_order import order_difference

A, B = ([0, 1], "a", "all_reduce", 8), ([0, 1], "b", "all_gather", 16)
TP0, TP1, DP0, DP1 = (
    ([0, 1], "t", "all_reduce", 8),
    ([2, 3], "t", "all_reduce", 8),
    ([0, 2], "d", "all_reduce", 8),
    ([1, 3], "d", "all_reduce", 8),
)
EIGHT = "all_reduce of 8 B over ranks"
SENT, SENT_MORE = ([0, 1], "e", "all_to_all", 8), ([0, 1], "e", "all_to_all", 24)
CYCLE = "collectives of several groups can deadlock, as ranks send them in different orders: "


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        ([[A, B, A], [A, B, A]], ""),
        ([[TP0, DP0], [TP0, DP1], [TP1, DP0], [TP1, DP1]], ""),
        ([[SENT, A], [SENT_MORE, A]], ""),
        ([[A, B, A], [B, A, A]], f"{CYCLE}all_gather of 16 B over ranks 0, 1; all_reduce of 8 B over ranks 0, 1"),
        (
            [[TP0, DP0], [DP1, TP0], [DP0, TP1], [TP1, DP1]],
            f"{CYCLE}{EIGHT} 0, 2; {EIGHT} 2, 3; {EIGHT} 1, 3; {EIGHT} 0, 1",
        ),
        ([[A, A], [A]], "rank 0 sends all_reduce of 8 B over ranks 0, 1, and rank 1 does not"),
        (
            [[A], [([0, 1], "a", "all_reduce", 12)]],
            "rank 0 sends all_reduce of 8 B over ranks 0, 1 where rank 1 sends all_reduce of 12 B over ranks 0, 1",
        ),
        (
            [[A], [([0, 1], "a", "broadcast", 8)]],
            "rank 0 sends all_reduce of 8 B over ranks 0, 1 where rank 1 sends broadcast of 8 B over ranks 0, 1",
        ),
    ],
)
def test_an_order_that_can_deadlock_is_named(orders: Sequence[object], says: str, tmp_path: Path) -> None:
    (tmp_path / "message_order.json").write_text(json.dumps({"ranks": orders}))
    assert order_difference(tmp_path) == says


def test_a_run_of_many_ranks_has_no_orders(tmp_path: Path) -> None:
    assert order_difference(tmp_path) == ""
