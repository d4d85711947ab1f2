"""Where a run that resumes stands in its data: which sample comes next, and how many tokens were trained on."""

from __future__ import annotations

from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.loop.position import resumed_position

BEFORE = ("train.batch=8", "train.seq=16", "train.microbatch=2")
SAVED = {"samples": 24, "tokens": 384}  # after three steps


@pytest.mark.parametrize(
    ("saved", "changes", "sample"),
    [
        (SAVED, (), 24),
        (SAVED, ("train.seq=32",), 12),
        (SAVED, ("train.seq=64",), 6),
        (SAVED, ("train.seq=12",), 32),
        (SAVED, ("train.batch=4",), 24),
        ({}, (), 24),  # of an earlier version, which recorded neither
        ({}, ("train.batch=4", "train.seq=32"), 12),
        ({"samples": 20, "tokens": 320}, (), 20),
    ],
)
def test_as_many_tokens_precede_the_next_sample_as_before(saved: dict[str, Any], changes: tuple[str, ...], sample: int) -> None:
    before, now = (load_recipe("quickstart", [*BEFORE, *more]) for more in ((), changes))
    position = resumed_position(3, saved, before, now, other_data=False)
    assert (position.step, position.sample, position.tokens) == (3, sample, saved.get("tokens", 384))


def test_other_data_begin_at_their_first_sample() -> None:
    run = load_recipe("quickstart", BEFORE)
    position = resumed_position(3, SAVED, run, run, other_data=True)
    assert (position.sample, position.tokens) == (0, 384)
