"""The verdict on a layout: from how its ranks ended, from its differences, and from a control run where rounding grows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.verbs.prove_run import RecipeForRanks
from distrain.trainer.prove.checks.compare_trial_messages import compare_trial_messages, message_differences
from distrain.trainer.prove.checks.curve import Curve
from distrain.trainer.prove.checks.excluded_weights import zero_gradient_pattern
from distrain.trainer.prove.fork_client import JobResult
from distrain.trainer.prove.judge import (
    LayoutResult,
    ProofResult,
    Tolerance,
    departure_reason,
    departure_step,
    figure_departures,
    is_slight,
    rounding_grows,
    tolerance,
    widened_tolerance,
)
from distrain.trainer.prove.judge_exits import exit_verdict, rank_positions
from distrain.trainer.prove.run_trials import start_seconds
from distrain.trainer.prove.trials.control_and_resume_trials import control_trial
from distrain.trainer.prove.trials.layouts import ProveLayout
from distrain.trainer.prove.trials.plan_proof import ProveRequest, plan_proof
from distrain.trainer.prove.trials.trial import Trial

TINY = ("model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=4")


def reference_trial() -> Trial:
    recipe = RecipeForRanks("quickstart", TINY, None)
    return plan_proof(ProveRequest(chosen="named", layouts=(ProveLayout(dp=2),)), recipe.run(), recipe.run_on).reference


def result_with(trial: Trial, loss: float = 0.0, norm: float = 0.0, weights: float = 0.0) -> LayoutResult:
    """A result that differs from one process by so much in its second step, and in its weights."""
    curve = Curve(losses=(5.0, 4.0 + loss), norms=(1.0, 1.0 + norm), rates=(1e-3, 1e-3))
    return LayoutResult(trial=trial, verdict="same", curve=curve, loss=loss, weights=weights, furthest_weight="head.weight")


TOLERANCE = Tolerance(loss=1e-5, norm=1e-3, first_norm=5e-5, weights=1e-5)


def job(**given: Any) -> JobResult:
    return JobResult(**{"codes": (0, 0), "steps": (7, 7), "lines": (), "problems": (), "timed_out": False, "says": "", **given})


@pytest.mark.parametrize(("one_process", "seconds"), [(0.0, 60.0), (20.0, 60.0), (50.0, 150.0)])
def test_a_layout_may_start_three_times_as_long_as_one_process_takes(one_process: float, seconds: float) -> None:
    """Where layers are compiled, ranks that do it side by side take longer than a minute before their first step."""
    assert start_seconds(one_process) == seconds


def test_how_ranks_end_decides_the_verdict() -> None:
    assert exit_verdict(job(), None) == ("same", "")
    assert exit_verdict(job(codes=(1, 0), says="rank 0 exited with 1"), None) == ("failed", "rank 0 exited with 1")
    verdict, reason = exit_verdict(job(codes=(-9, -9, -9), steps=(3, 3, None), timed_out=True), 90.0)
    assert verdict == "hangs"
    assert reason == "it was killed as hung after 90 s: ranks 0, 1 in step 4; rank 2 before the first step"
    assert rank_positions((0,)) == "rank 0 in step 1"


def test_the_first_figure_out_of_tolerance_is_the_reason() -> None:
    trial = reference_trial()
    reference = result_with(trial)
    rows = (
        (result_with(trial, loss=9e-6), ""),
        (result_with(trial, loss=2e-5, norm=1.0), "loss departs at step 2 by 2.0e-05; rounding explains 1.0e-05; the gradient norm too"),
        (result_with(trial, norm=2e-3), "gradient norm departs at step 2 by 2.0e-03; rounding explains 1.0e-03"),
        (result_with(trial, weights=2e-5), "after the last step head.weight departs by 2.0e-05; rounding explains 1.0e-05"),
        (replace(reference, evaluation=2e-5), "evaluation departs by 2.0e-05, though training agrees; rounding explains 1.0e-05"),
        (replace(reference, samples="step 1: samples 3 are read never"), "samples: step 1: samples 3 are read never"),
        (result_with(trial, loss=float("nan")), "loss departs at step 2 by inf; rounding explains 1.0e-05"),
    )
    for result, reason in rows:
        assert departure_reason(reference, result, TOLERANCE) == reason
        assert departure_step(reference, result, TOLERANCE) == 2
    shorter = replace(reference, curve=Curve(losses=(5.0,), norms=(1.0,), rates=(1e-3,)))
    assert departure_reason(reference, shorter, TOLERANCE).startswith("loss departs at step 2 by inf")


def test_the_figure_that_departs_first_comes_first() -> None:
    trial = reference_trial()
    reference = replace(result_with(trial), curve=Curve(losses=(5.0, 4.0), norms=(1.0, 1.0), rates=(1e-3, 1e-3)))
    result = replace(reference, curve=Curve(losses=(5.0, 4.1), norms=(1.5, 1.0), rates=(1e-3, 1e-3)))
    assert [(each.noun, each.step) for each in figure_departures(reference, result, TOLERANCE)] == [("gradient norm", 1), ("loss", 2)]
    says = "gradient norm departs at step 1 by 5.0e-01; rounding explains 5.0e-05; the loss from step 2"
    assert departure_reason(reference, result, TOLERANCE) == says
    assert departure_step(reference, result, TOLERANCE) == 1


def test_the_gradient_norm_of_the_first_step_has_a_tolerance_of_its_own() -> None:
    trial = reference_trial()
    reference = result_with(trial)
    says = [
        departure_reason(reference, replace(reference, curve=Curve(losses=(5.0, 4.0), norms=norms, rates=(1e-3, 1e-3))), TOLERANCE)
        for norms in ((1.0 + 4e-5, 1.0 + 9e-4), (1.0 + 6e-5, 1.0))
    ]
    assert says == ["", "gradient norm departs at step 1 by 6.0e-05; rounding explains 5.0e-05"]


def test_rounding_grows_only_where_the_first_step_agrees_and_the_departure_is_slight() -> None:
    trial = reference_trial()
    proof = ProofResult(reference=result_with(trial), layouts=(), tolerance=TOLERANCE)
    control = result_with(trial, loss=3e-5)
    assert control.curve is not None
    assert rounding_grows(control, proof)
    assert not rounding_grows(replace(control, curve=replace(control.curve, losses=(5.00003, 4.00003))), proof)
    assert not rounding_grows(result_with(trial, loss=3e-3), proof)
    assert not rounding_grows(result_with(trial), proof)


def test_moments_in_8_bits_may_differ_after_the_first_step() -> None:
    """Its norm is that of equal weights. In half precision rounding is larger already."""
    trial = reference_trial()
    eight = replace(trial.run, optim=replace(trial.run.optim, moments="int8"))
    half = replace(eight, train=replace(eight.train, precision="bf16"))
    wide, narrow, rounded = (tolerance(result_with(replace(trial, run=run))) for run in (trial.run, eight, half))
    assert (narrow.loss, narrow.first_norm) == (1e-3, wide.first_norm)
    assert wide.loss < narrow.loss < rounded.loss
    assert narrow.weights == float("inf")


def test_a_slight_departure_is_judged_against_a_control_run() -> None:
    """Rounding grows where SGD's steps are large: one process departs from itself when its micro-batches are others."""
    trial = reference_trial()
    slight = result_with(trial, loss=3e-5)
    proof = ProofResult(reference=result_with(trial), layouts=(), tolerance=TOLERANCE)
    assert is_slight(slight, proof)
    assert not is_slight(result_with(trial, loss=3e-6), proof)
    assert not is_slight(result_with(trial, loss=3e-3), proof)
    assert widened_tolerance(TOLERANCE, result_with(trial, loss=2e-5)) == Tolerance(loss=2e-4, norm=1e-3, first_norm=5e-5, weights=1e-5)


def test_the_control_run_is_one_process_with_other_micro_batches() -> None:
    trial = reference_trial()
    control = control_trial(trial, check=False)
    assert control is not None
    assert (control.run.train.microbatch, control.plan.microbatches, control.run.parallel) == (2, 4, trial.run.parallel)
    assert control.folder != trial.folder


def test_key_biases_are_not_compared_unless_positions_rotate_the_keys() -> None:
    pattern = zero_gradient_pattern(load_recipe("quickstart"))
    assert re.search(pattern, "layers.11.attention.key.bias")
    assert not re.search(pattern, "layers.11.attention.query.bias")
    assert not re.search(pattern, "layers.11.attention.key.weight")
    assert zero_gradient_pattern(load_recipe("quickstart", ["model=tiny_llama"])) == ""


@pytest.mark.parametrize(("qk_norm", "compared"), [(False, False), (True, True)])
def test_key_biases_are_not_compared_where_positions_rotate_a_part_of_keys_without_norms(qk_norm: bool, compared: bool) -> None:
    words = ["model=tiny_llama", "model.qkv_bias=true", "model.rope_share=0.5", f"model.qk_norm={qk_norm}"]
    assert bool(zero_gradient_pattern(load_recipe("quickstart", words))) != compared


@pytest.mark.parametrize(("zero", "before", "verdict"), [(3, 0, None), (3, 1, None), (3, 2, "differs"), (2, 1, "differs")])
def test_messages_of_steps_in_which_deepspeed_traces_weights_are_no_error(
    zero: int, before: int, verdict: str | None, tmp_path: Path
) -> None:
    """The ledger is of a step of a start that goes on from a checkpoint, and has so many `before` it."""
    words = (*TINY, f"log.dir={tmp_path}")
    recipe = RecipeForRanks("quickstart", words, None)
    request = ProveRequest(steps=5, chosen="named", layouts=(ProveLayout(dp=2, zero=zero),), checks=False)
    (trial,) = plan_proof(request, recipe.run(), recipe.run_on).trials
    trial.folder.mkdir(parents=True)
    row = {"axis": "dp", "verb": "all_reduce", "payload": 123, "count": 9}
    (trial.folder / "ledger.json").write_text(json.dumps({"step": 4, "first": 3 - before, "averages": True, "ranks": [[row], [row]]}))
    found = compare_trial_messages(trial)
    assert (found and found["verdict"]) == verdict


def test_collectives_that_can_deadlock_are_messages_that_differ(tmp_path: Path) -> None:
    """Of ranks that have counted what is planned."""
    recipe = RecipeForRanks("quickstart", (*TINY, f"log.dir={tmp_path}"), None)
    request = ProveRequest(steps=5, chosen="named", layouts=(ProveLayout(dp=2),), checks=False)
    (trial,) = plan_proof(request, recipe.run(), recipe.run_on).trials
    trial.folder.mkdir(parents=True)
    ledger: dict[str, Any] = {"step": 4, "first": 0, "averages": True, "ranks": [[], []]}
    (trial.folder / "ledger.json").write_text(json.dumps(ledger))
    planned = compare_trial_messages(trial)
    assert planned
    for rank, lines in enumerate(planned["ranks"]):
        sums = [line for line in lines if line["payload"] is None]
        ledger["ranks"][rank] = [{"axis": "dp", "verb": line["verb"], "payload": line["planned_bytes"], "count": 1} for line in sums]
        each = [line for line in lines if line["payload"] is not None]
        ledger["ranks"][rank] += [{**line, "count": line["planned_count"]} for line in each]
    (trial.folder / "ledger.json").write_text(json.dumps(ledger))
    assert message_differences(compare_trial_messages(trial)) == ""
    collectives = [[[0, 1], group, "all_reduce", 4] for group in ("a", "b")]
    (trial.folder / "message_order.json").write_text(json.dumps({"ranks": [collectives, collectives[::-1]]}))
    assert message_differences(compare_trial_messages(trial)).startswith("collectives of several groups can deadlock")
