"""The loss scale of fp16 in engine `native` beside DeepSpeed's, whose numbers its checkpoints exchange."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
loss_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from distrain.trainer.engines.native.loss_scale import FIRST_SCALE, GROWTH_INTERVAL, LEAST_SCALE, PATIENCE, LossScale  # noqa: E402

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
STEPS = [0, 1, 2, GROWTH_INTERVAL - 1, GROWTH_INTERVAL, GROWTH_INTERVAL + 1, 2 * GROWTH_INTERVAL + 1]
RUNS = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2)), max_size=6)


@given(RUNS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_scale_changes_as_deepspeeds(monkeypatch: pytest.MonkeyPatch, runs: list[tuple[int, int]]) -> None:
    """After so many steps without an overflow, and then so many with one."""
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it logs on rank 0
    theirs = loss_scaler.DynamicLossScaler(FIRST_SCALE, GROWTH_INTERVAL, LEAST_SCALE, PATIENCE, consecutive_hysteresis=False)
    ours = LossScale()
    for finite, overflows in runs:
        for overflow in [False] * finite + [True] * overflows:
            theirs.update_scale(overflow)
            ours.update(overflow=overflow)
        assert [getattr(ours, name) for name in FIELDS] == [getattr(theirs, name) for name in FIELDS]


def test_the_scale_is_never_below_one() -> None:
    scale = LossScale()
    for _ in range(40):
        scale.update(overflow=True)
    assert scale.cur_scale == LEAST_SCALE
