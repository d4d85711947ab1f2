"""The plan of a run on preferences: its loss, the pass of its reference, what it keeps and sends."""

from __future__ import annotations

from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.whole_run_facts import preference_text
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan, PreferencePlan


def plan_of(*words: str, data: str = "preferences") -> Plan:
    plan = make_plan(load_recipe("llama3_70b_dpo", [f"data={data}", "data.path=a.jsonl", *words]))
    assert plan.ok, plan.problems
    return plan


def preferences_of(*words: str) -> PreferencePlan:
    whole = plan_of(*words).run
    assert whole is not None
    assert whole.preferences is not None
    return whole.preferences


ALONE = ("cluster=1x1", "model.layers=1", "parallel={dp: 1, tp: 1, pp: 1, zero: 0, sequence: false}", "train.evaluate.every=0")


def test_the_reference_takes_the_forwards_of_all_steps() -> None:
    found, steps = preferences_of(*ALONE).reference_seconds, plan_of(*ALONE).time
    assert found is not None
    assert steps is not None
    assert 0.3 * 500 * steps.compute < found < 0.36 * 500 * steps.compute  # a forward is a third of a step
    assert preferences_of(*ALONE, "train.steps=1000").reference_seconds == pytest.approx(2 * found)
    assert preferences_of(*ALONE, "train.evaluate={every: 50, batches: 50}").reference_seconds == pytest.approx(1.1 * found)
    one_more = ("train.evaluate={every: 50, batches: 50}", "data.validate.a=b.jsonl")
    assert preferences_of(*ALONE, *one_more).reference_seconds == pytest.approx(1.2 * found)
    assert preferences_of(*ALONE, *one_more, "data.validation=0").reference_seconds == pytest.approx(1.1 * found)


def test_stages_compute_one_micro_batch_behind_another() -> None:
    one, four = (preferences_of(f"parallel.pp={pp}", f"parallel.dp={8 // pp}").reference_seconds for pp in (1, 4))
    assert one is not None
    assert four is not None
    assert four == pytest.approx(one, rel=0.1)


def test_a_loss_without_reference_takes_no_pass() -> None:
    found = plan_of("train.preference={loss: simpo, beta: 2.5, margin: 1.5}")
    assert preference_text(found) == "the loss is SIMPO of pairs of answers, with beta 2.5, without a reference"


def test_the_page_names_loss_and_pass() -> None:
    plan = plan_of("train.preference.beta=0.3")
    loss, takes = preference_text(plan).split("; ")
    assert loss == "the loss is DPO of pairs of answers, with beta 0.3"
    assert takes.startswith("before the first step a forward pass over the pairs that the run reads takes at most ")
    assert preference_text(plan_of(data="pairs")) == ""


def test_no_second_model_is_held() -> None:
    """Beside prompts and completions, the rank with the head keeps four bytes a token more, and no rank holds more at its fullest."""
    with_pairs, plain = (plan_of(data=data).memory for data in ("preferences", "pairs"))
    assert with_pairs is not None
    assert plain is not None
    for index, (one, other) in enumerate(zip(with_pairs.stages, plain.stages, strict=True)):
        assert one.bytes.activations - other.bytes.activations == (4 * 8192 if index == 3 else 0)
        assert one.bytes.total == other.bytes.total


def messages(*words: str, data: str) -> set[Any]:
    return {(row.axis, row.verb, row.payload, row.count) for row in plan_of(*words, data=data).traffic}


def test_context_ranks_add_up_log_probabilities_once_a_micro_batch() -> None:
    words = ("parallel={dp: 1, cp: 2}", "train.microbatch=2")
    added = messages(*words, data="preferences") - messages(*words, data="pairs")
    assert added == {("cp", "all_reduce", 2 * 4096 * 8, 32)}  # [rows, the most answers of 8193 tokens], float64
