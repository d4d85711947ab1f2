"""The blends that a run reads one after another, in tokens and in samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distrain.trainer.spec.derived.data_blends import (
    Blend,
    SampleBlend,
    blends,
    blends_before,
    has_sources,
    sample_blends,
    tokens_of_sources,
    tokens_of_stages,
)
from distrain.trainer.spec.run import Data, DataStage

STAGES = (DataStage(weights=(3.0, 1.0), until=100.0), DataStage(weights=(0.0, 1.0), until=130.0), DataStage(weights=(1.0, 1.0)))
DATA = Data(name="text", path=("a", "b"), stages=STAGES)


def test_weights_are_one_blend_and_stages_several() -> None:
    assert blends(Data()) == (Blend((1.0,), None),)
    assert blends(replace(DATA, stages=None, weights=(2.0, 1.0))) == (Blend((2.0, 1.0), None),)
    assert blends(DATA) == (Blend((3.0, 1.0), 100.0), Blend((0.0, 1.0), 130.0), Blend((1.0, 1.0), None))
    assert [has_sources(each) for each in (Data(), replace(DATA, stages=None, weights=(2.0, 1.0)), DATA)] == [False, True, True]


@pytest.mark.parametrize(("seq", "firsts"), [(1, [0, 100, 130]), (8, [0, 13, 17]), (10, [0, 10, 13]), (1000, [0, 1, 1])])
def test_a_stage_begins_with_the_first_sample_of_which_no_token_lies_before_it(seq: int, firsts: list[int]) -> None:
    found = sample_blends(blends(DATA), seq)
    assert found == tuple(SampleBlend(first, each.weights) for first, each in zip(firsts, STAGES, strict=True))


def test_a_boundary_is_exact_where_floats_are_not() -> None:
    until = float(2**53 + 2)  # / 3 is no float, and rounds to a sample too few
    assert sample_blends((Blend((1.0,), until), Blend((1.0,), None)), 3)[1].first == (2**53 + 2 + 2) // 3


@pytest.mark.parametrize(
    ("tokens", "of_stages", "of_sources"),
    [(40, [40], [30, 10]), (100, [100], [75, 25]), (110, [100, 10], [75, 35]), (150, [100, 30, 20], [85, 65]), (0, [], [0, 0])],
)
def test_the_tokens_of_a_run_add_up(tokens: int, of_stages: list[int], of_sources: list[int]) -> None:
    assert [many for many, _ in tokens_of_stages(DATA, tokens)] == of_stages
    assert tokens_of_sources(DATA, tokens) == of_sources


def test_what_was_read_tells_runs_apart_and_what_is_to_come_does_not() -> None:
    later = replace(DATA, stages=(STAGES[0], replace(STAGES[1], until=120.0), STAGES[2]))
    other = replace(DATA, stages=(STAGES[0], DataStage(weights=(5.0, 1.0))))
    plain = replace(DATA, stages=None, weights=STAGES[0].weights)
    for samples, same in ((10, (True, True, True)), (11, (True, False, False)), (12, (True, False, False)), (13, (False, False, False))):
        read = blends_before(DATA, 10, samples)
        assert tuple(blends_before(each, 10, samples) == read for each in (later, other, plain)) == same, samples
