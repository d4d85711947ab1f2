"""The learning-rate schedules match tables worked out by hand."""

from __future__ import annotations

import pytest

from distrain.trainer.spec.sections.lr_schedule import learning_rate
from distrain.trainer.spec.sections.optimizer import Optim

# Of 12 steps, 4 warm up to 2 and 8 go down to 0.2. The cosines of the eighths of pi are 1, 0.92388, 0.70711, 0.38268, 0 ...
WARMUP = [0.5, 1.0, 1.5, 2.0]
# fmt: off
RATES = {
    "constant": [2.0, 2.0,      2.0,      2.0,      2.0, 2.0,      2.0,      2.0],
    "linear":   [2.0, 1.775,    1.55,     1.325,    1.1, 0.875,    0.65,     0.425],
    "cosine":   [2.0, 1.931492, 1.736396, 1.444415, 1.1, 0.755585, 0.463604, 0.268508],
    "wsd":      [2.0, 2.0,      2.0,      2.0,      2.0, 2.0,      2.0,      1.325],
}
# fmt: on


@pytest.mark.parametrize("schedule", RATES)
def test_rates_match_a_table(schedule: str) -> None:
    optim = Optim(lr=2.0, min_lr=0.2, warmup=4, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(optim, step, 12) for step in range(12)] == pytest.approx([*WARMUP, *RATES[schedule]], abs=1e-6)


@pytest.mark.parametrize("schedule", RATES)
def test_without_warm_up_the_first_step_has_the_peak_rate(schedule: str) -> None:
    optim = Optim(lr=2.0, min_lr=0.2, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(optim, step, 8) for step in range(8)] == pytest.approx(RATES[schedule], abs=1e-6)


def test_a_run_of_which_all_but_one_step_warm_up_ends_at_the_peak() -> None:
    assert [learning_rate(Optim(lr=2.0, warmup=3), step, 4) for step in range(4)] == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0])


def test_a_schedule_that_is_not_written_is_not_taken_for_a_constant_rate() -> None:
    with pytest.raises(AssertionError, match="mine"):
        learning_rate(Optim(schedule="mine"), step=1, steps=2)  # type: ignore[arg-type]
