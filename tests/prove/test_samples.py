"""The samples of all ranks make up each batch exactly once, and are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distrain.cli.verbs.prove_run import RecipeForRanks
from distrain.trainer.prove.checks.samples import sample_problem
from distrain.trainer.prove.trials.layouts import ProveLayout
from distrain.trainer.prove.trials.plan_proof import ProveRequest, plan_proof
from distrain.trainer.prove.trials.trial import Trial

Row = list[int]
TINY = ("model=tiny", "data=synthetic", "train.batch=4", "train.seq=16", "train.microbatch=2")


@pytest.fixture
def trials(tmp_path: Path) -> tuple[Trial, Trial]:
    """One process, and two replicas of two tensor-parallel ranks; their run folders are empty."""
    recipe = RecipeForRanks("quickstart", [*TINY, f"log.dir={tmp_path}"], None)
    request = ProveRequest(chosen="named", layouts=(ProveLayout(dp=2, tp=2),))
    proof = plan_proof(request, recipe.run(), recipe.run_on)
    for each in (proof.reference, *proof.trials):
        each.folder.mkdir(parents=True)
    return proof.reference, proof.trials[0]


def rows(*samples: int) -> list[Row]:
    return [[sample, 0, 90 - sample, 1000 + sample] for sample in samples]


def write(trial: Trial, *ranks: list[list[Row]]) -> None:
    (trial.folder / "samples.json").write_text(json.dumps({"first": 0, "windows": [50], "ranks": ranks}))


HALVES = ([rows(0, 1), rows(4, 5)], [rows(2, 3), rows(6, 7)])


def problem(trials: tuple[Trial, Trial], *ranks: list[list[Row]]) -> str:
    reference, trial = trials
    write(reference, [rows(0, 1, 2, 3), rows(4, 5, 6, 7)])
    write(trial, *ranks)
    return sample_problem(trial, reference)


def test_ranks_that_share_out_each_batch_are_right(trials: tuple[Trial, Trial]) -> None:
    first, second = HALVES
    assert problem(trials, first, first, second, second) == ""


def test_a_sample_that_two_replicas_read_is_named(trials: tuple[Trial, Trial]) -> None:
    first, _ = HALVES
    second = [rows(2, 3), rows(5, 9)]
    assert problem(trials, first, first, second, second) == (
        "step 2: samples 5 are read more than once; samples 6, 7 are read never; samples 9 are read from another batch"
    )


def test_ranks_of_one_replica_read_the_same(trials: tuple[Trial, Trial]) -> None:
    first, second = HALVES
    assert problem(trials, first, second, second, second).startswith("step 1: rank 1 reads others than the ranks with which it shares")


def test_a_sample_with_other_tokens_is_named(trials: tuple[Trial, Trial]) -> None:
    first, second = HALVES
    other = [rows(2, 3), [*rows(6), [7, 0, 83, 5]]]
    assert problem(trials, first, first, second, second) == ""
    assert problem(trials, first, first, other, other) == "sample 7 on rank 2 holds other tokens than in one process"


def test_a_window_that_comes_twice_in_an_epoch_is_named(trials: tuple[Trial, Trial]) -> None:
    reference, _ = trials
    write(reference, [[[0, 0, 7, 1], [1, 0, 8, 2], [2, 0, 7, 1], [3, 0, 9, 3]]])
    assert sample_problem(reference, reference) == "windows 7 of source 0 come more than once in its first epoch"


def test_ranks_that_record_nothing_are_a_problem(trials: tuple[Trial, Trial]) -> None:
    assert sample_problem(trials[1], trials[0]) == "its ranks recorded no samples"


def test_ranks_that_recorded_no_step_have_proved_nothing(trials: tuple[Trial, Trial]) -> None:
    first, second = HALVES
    assert problem(trials, [], [], [], []) == "its ranks recorded no samples"
    write(trials[0], [])
    write(trials[1], first, first, second, second)
    assert sample_problem(trials[1], trials[0]) == "its ranks recorded no samples"
