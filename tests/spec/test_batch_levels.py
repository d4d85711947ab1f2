"""The batch of each step of a run that ramps it up: as Megatron-LM and the papers say, from any step on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from distrain.trainer.spec.derived.batch_levels import (
    Level,
    LevelOfRun,
    common_divisor,
    level_of_step,
    levels,
    levels_of_run,
    run_steps,
    samples_before,
    steps_until,
)
from distrain.trainer.spec.run import Train
from distrain.trainer.spec.sections.rampup import Rampup

BLOOM = Train(
    batch=2048, seq=2048, tokens=366e9, rampup=Rampup(batch=192, by=16, until=2048 * 9_765_625)
)  # --rampup-batch-size 192 16 9_765_625
LLAMA = Train(batch=2048, seq=8192, tokens=15.6e12, rampup=Rampup(batch=(512, 1024), until=(252e6, 2.87e12)))


def megatron_batch(consumed: int, start: int, increment: int, ramp_samples: int, batch: int) -> int:
    """Megatron-LM's num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator.update, in whole numbers."""
    if consumed > ramp_samples:
        return batch
    return start + consumed * ((batch - start) // increment) // ramp_samples * increment


def test_bloom_grows_as_megatron_lm_has_it() -> None:
    assert [each.batch for each in levels(BLOOM)] == list(range(192, 2049, 16))
    consumed = 0
    for step in range(13_000):
        batch = level_of_step(BLOOM, step).batch
        assert (batch, samples_before(BLOOM, step)) == (megatron_batch(consumed, 192, 16, 9_765_625, 2048), consumed)
        consumed += batch
    assert batch == 2048


def test_llama_3_doubles_its_batch_where_the_paper_does() -> None:
    """arXiv:2407.21783 section 3.4.1: after 252e6 and 2.87e12 tokens."""
    assert levels(LLAMA) == (Level(512, 252_000_000), Level(1024, 2_870_000_000_000), Level(2048, None))
    first, second, last = levels_of_run(LLAMA)
    assert first == LevelOfRun(512, -(-252_000_000 // (512 * 8192)))
    assert level_of_step(LLAMA, first.steps - 1).batch == 512
    assert level_of_step(LLAMA, first.steps).batch == 1024
    assert level_of_step(LLAMA, first.steps + second.steps - 1).batch == 1024
    trained = sum(each.batch * each.steps for each in (first, second, last)) * 8192
    assert 0 <= trained - 15.6e12 < 2048 * 8192


@draw.composite
def ramps(draw_from: draw.DrawFn) -> Train:
    """A run of several levels, listed, grown by increments, or both."""
    by = draw_from(draw.integers(1, 4))
    batches = [by * each for each in sorted(draw_from(draw.sets(draw.integers(1, 20), min_size=2, max_size=4)))]
    ends = sorted(draw_from(draw.sets(draw.integers(1, 3000), min_size=len(batches) - 1, max_size=len(batches) - 1)))
    rampup = Rampup(batch=tuple(batches[:-1]), until=tuple(map(float, ends)), by=draw_from(draw.sampled_from([None, by])))
    return Train(batch=batches[-1], seq=draw_from(draw.integers(1, 9)), steps=draw_from(draw.integers(1, 60)), rampup=rampup)


@given(ramps(), draw.integers(0, 60))
def test_a_run_that_resumes_has_the_batches_that_were_left(train: Train, resumed: int) -> None:
    """The batch follows from the tokens trained on alone: from any step on it is that of the run which was not interrupted."""
    steps = train.steps or 0
    whole = [level_of_step(train, step).batch for step in range(steps)]
    assert whole == sorted(whole)
    assert all(batch % common_divisor(train) == 0 for batch in whole)
    assert [samples_before(train, step) for step in range(steps + 1)] == [sum(whole[:step]) for step in range(steps + 1)]
    assert [each.batch for each in levels_of_run(train) for _ in range(each.steps)] == whole
    tokens = samples_before(train, resumed) * train.seq
    assert [level_of_step(train, step, tokens).batch for step in range(steps - resumed)] == whole[resumed:]


@given(ramps(), draw.integers(0, 9000))
def test_a_length_in_tokens_is_reached_by_its_last_step(train: Train, wanted: int) -> None:
    steps = steps_until(train, wanted)
    assert samples_before(train, steps) * train.seq >= wanted
    assert steps == 0 or samples_before(train, steps - 1) * train.seq < wanted


@pytest.mark.parametrize(("consumed", "batch"), [(0, 4), (9, 4), (10, 8), (19, 8), (20, 12), (21, 12)])
def test_a_level_ends_with_its_last_token(consumed: int, batch: int) -> None:
    train = Train(batch=12, seq=5, steps=9, rampup=Rampup(batch=4, by=4, until=100.0))
    assert level_of_step(train, 0, 5 * consumed).batch == batch


@pytest.mark.parametrize(("consumed", "batch"), [(3, 1), (4, 2), (6, 2), (7, 3), (9, 3), (10, 4)])
def test_levels_that_end_inside_a_token_are_those_of_megatron_lm(consumed: int, batch: int) -> None:
    assert batch == megatron_batch(consumed, 1, 1, 10, 4)
    assert level_of_step(Train(batch=4, seq=1, steps=9, rampup=Rampup(batch=1, by=1, until=10.0)), 0, consumed).batch == batch


def test_a_level_that_no_step_begins_in_is_left_out() -> None:
    train = Train(batch=12, seq=5, steps=9, rampup=Rampup(batch=(4, 8), until=(30.0, 40.0)))
    assert levels_of_run(train) == (LevelOfRun(4, 2), LevelOfRun(12, 7))


def test_without_a_ramp_up_every_step_has_the_batch_of_the_run() -> None:
    train = Train(batch=12, seq=5, tokens=601)
    assert (levels(train), run_steps(train), samples_before(train, 7)) == ((Level(12, None),), 11, 84)
