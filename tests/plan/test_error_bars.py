"""Error bars: around every figure, wider where few runs were measured, and plain where the capacity lies inside one."""

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.plan_facts import verdict
from distrain.cli.pages.plan_page import plan_text
from distrain.cli.pages.report_page import drift_sentences
from distrain.cli.pages.text_layout import Style
from distrain.scripts.published import calibrate_error_bars
from distrain.scripts.published.case_runs import cluster_of
from distrain.scripts.published.fit_constants import DELTA, NAMES, Constants, held_out, log_ratios, slopes_of
from distrain.scripts.published.frameworks import framework_of
from distrain.scripts.published.measured import step_seconds
from distrain.scripts.published.predict import predict
from distrain.trainer.plan import error_bars
from distrain.trainer.plan.error_bars import MEMORY_BARS, STEP_BARS, BarRule, Planned, memory_bar, step_bar
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.search.search_result import find_layouts
from distrain.trainer.rundir.measured_run import read_measured_run
from distrain.trainer.spec.run import Run

SHARED = Path(__file__).resolve().parents[3] / "shared" / "published" / "cases.json"
RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def gpt(*overrides: str) -> Run:
    return load_recipe("gpt3_175b", ["engine=papers", "cluster=96x8", "parallel.dp=auto", *overrides])


def plan_case(run: Run, engine: str | None = None, peak: int = 40 * 2**30) -> Planned:
    return Planned(run, run.parallel, engine, peak)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_figure_of_a_recipe_lies_inside_its_bar(recipe: str) -> None:
    plan = make_plan(load_recipe(recipe, ["cluster.device.memory=16e9"] if "quickstart" in recipe or "tiny" in recipe else []))
    assert plan.memory
    assert (plan.memory_low or 0) < plan.memory.peak < (plan.memory_high or 0)
    assert set(plan.bars) == ({"step", "memory"} if plan.time else {"memory"})
    if plan.time:
        assert (plan.step_low or 0) < plan.time.step < (plan.step_high or 0)
        assert plan.step_high == pytest.approx(plan.time.step * plan.bars["step"].high)
    assert plan.memory_low == round(plan.memory.peak / plan.bars["memory"].low)


def test_a_plan_without_a_time_or_a_layout_has_no_bar_of_it() -> None:
    untimed = make_plan(load_recipe("llama3_8b_1node", ["cluster.inside=null"]))
    assert (untimed.step_low, untimed.step_high, set(untimed.bars)) == (None, None, {"memory"})
    broken = make_plan(gpt("parallel.tp=7"))
    assert (broken.memory_low, broken.memory_high, broken.bars) == (None, None, {})


WIDER = {  # an override -> the words of the rule that it brings
    "train.precision=fp8": "fp8 or fp4",
    "train.precision=fp32": "a device or number type that few or none measured",
    "train.seq=16384": "sequences of more than 8,192 tokens",
    "train.batch=96": "fewer than 2,048 tokens a device a step",
    "cluster=192x8": "more than 1,000 devices",
    "cluster.device.name=H800-80G": "a device or number type that few or none measured",
    "parallel.zero=3": "ZeRO-3 over more than 500 devices",
}


@pytest.mark.parametrize("override", WIDER)
def test_the_bar_of_a_step_is_wider_where_few_runs_are_near(override: str) -> None:
    plain, wider = step_bar(plan_case(gpt()), 1.0), step_bar(plan_case(gpt(override)), 1.0)
    assert plain.rule.says == "like most measured runs"
    assert wider.rule.says == WIDER[override]
    assert wider.low < plain.low < plain.high < wider.high


def test_experts_and_engines_of_ours_widen_the_bar_of_a_step() -> None:
    experts = load_recipe("mixtral_8x7b", ["engine=papers"])
    assert step_bar(plan_case(experts), 1.0).rule.says == "experts"
    assert step_bar(plan_case(gpt(), "native"), 1.0).rule.says == error_bars.OF_ENGINES
    assert step_bar(plan_case(gpt("train.precision=fp8"), "native"), 1.0).rule.says == "fp8 or fp4"


def test_each_end_of_a_bar_is_that_of_the_widest_rule() -> None:
    small, ours = memory_bar(plan_case(gpt(), peak=2**30)), memory_bar(plan_case(gpt(), "native"))
    assert (small.low, small.high) == (2**30 / MEMORY_BARS[1].low, 2**30 * MEMORY_BARS[1].high)
    assert ours.low > memory_bar(plan_case(gpt())).low  # the tensors of our modules are traced
    assert ours.high > memory_bar(plan_case(gpt())).high  # and their allocator's cached pieces are not planned


def test_the_page_says_probably_where_the_capacity_lies_inside_the_bar() -> None:
    plan = make_plan(gpt())
    assert plan.memory

    def first_words(capacity: float) -> str:
        assert plan.memory
        memory = replace(plan.memory, capacity=round(capacity))
        return verdict(replace(plan, memory=memory, fits=memory.peak <= memory.capacity)).partition(":")[0]

    assert plan.memory_low
    assert plan.memory_high
    assert first_words(plan.memory_high + 1) == "gpt3_175b fits"
    assert first_words(plan.memory_high - 1) == "gpt3_175b probably fits"
    assert first_words(plan.memory.peak - 1) == "gpt3_175b probably does not fit"
    assert first_words(plan.memory_low - 1) == "gpt3_175b does not fit"


def test_the_page_shows_both_bars_and_what_they_rest_on() -> None:
    plan = make_plan(load_recipe("llama3_8b_1node", []))
    page = " ".join(plan_text(plan, Style()).split())
    assert "62.4 of 79.2 GiB (59 to 90); 14.8 s (11 to 21) a step" in page
    assert "Time of a step: 14.8 s (11 to 21)" in page
    assert f"In brackets: where nine runs in ten lie. Step and memory: {error_bars.OF_ENGINES}" in page


def test_memory_whose_activations_are_not_known_has_no_upper_end() -> None:
    run = load_recipe("gpt2_124m", [])
    plan = make_plan(replace(run, model=replace(run.model, family="hf", parameters={"embedding.weight": (256, 4096)})))
    assert plan.memory
    assert plan.memory.unknown
    assert plan.memory_low is not None
    assert plan.memory_high is None


def test_layouts_that_a_search_finds_have_the_bars_of_their_plans() -> None:
    run = load_recipe("llama3_8b_1node", ["parallel.pp=1", "parallel.tp=1", "search.rows=2"])
    best = find_layouts(run, frozenset({"parallel.pp", "parallel.tp"})).rows[0]
    plan = make_plan(load_recipe("llama3_8b_1node", [*best.overrides]))
    assert (best.memory_low, best.memory_high) == (plan.memory_low, plan.memory_high)
    assert [best.step_low, best.step_high] == pytest.approx([plan.step_low, plan.step_high])


# How the widths are chosen


def evidence(ratios: list[float], sources: list[str]) -> calibrate_error_bars.Calibration:
    values = np.array(ratios)
    return calibrate_error_bars.Calibration([plan_case(gpt())] * len(ratios), sources, values, values, values)


def any_rule(runs: int, low: float = 1.5, high: float = 1.5) -> BarRule:
    return BarRule("any", low, high, runs, 1, lambda _: True)


def test_a_rule_asks_for_what_holds_nine_runs_in_ten() -> None:
    data = evidence([at / 100 for at in range(-9, 1)], ["one"] * 10)
    every = np.ones(10, dtype=bool)
    assert calibrate_error_bars.asked_factors(any_rule(10), every, data, both=True) == (exp(0.08), exp(0.08))
    low, high = calibrate_error_bars.asked_factors(any_rule(10), every, data, both=False)
    assert (low, high) == (1.0, exp(0.09))


def test_of_a_kind_without_runs_each_source_counts_the_same() -> None:
    data = evidence([0.5, *[0.1] * 99], ["one", *["other"] * 99])
    every = np.ones(100, dtype=bool)
    assert calibrate_error_bars.asked_factors(any_rule(100), every, data, both=True)[0] == exp(0.1)
    assert calibrate_error_bars.asked_factors(any_rule(0), every, data, both=True)[0] == exp(0.5)


def test_a_run_is_inside_between_its_plan_divided_and_multiplied() -> None:
    rules = [any_rule(4, low=1.2, high=2.0)]
    data = evidence([log(1.19), log(1.21), -log(1.99), -log(2.01)], ["one"] * 4)
    assert list(calibrate_error_bars.inside_bars(rules, data, data.fitted)) == [True, False, True, False]


def test_widths_chosen_without_a_source_are_held_against_its_runs() -> None:
    data = evidence([0.1, 0.1, 0.9], ["one", "other", "far"])
    assert list(calibrate_error_bars.inside_held_out_bars([any_rule(3)], data, both=True)) == [True, True, False]


def test_the_share_of_cached_pieces_is_that_of_the_other_sources() -> None:
    """One source sees no cached pieces (slope 0); the others' ratios ask for a change of 0.1 and of 0.2 of what is reserved."""
    ratios, slopes = np.array([-0.1, -0.2, 0.0]), np.array([1.0, 1.0, 0.0])
    found = calibrate_error_bars.without_reserved_of_source(ratios, slopes, ["one", "other", "third"])
    assert list(found) == pytest.approx([0.1, -0.1, 0.0])


@pytest.mark.skipif(not SHARED.exists(), reason="the published cases are not here")
def test_the_widths_hold_nine_published_runs_in_ten_whose_source_was_left_out() -> None:
    cases = json.loads(SHARED.read_text())
    for rules, figures in ((STEP_BARS, calibrate_error_bars.of_steps), (MEMORY_BARS, calibrate_error_bars.of_memory)):
        data = figures(cases)
        assert calibrate_error_bars.inside_bars(rules, data, data.without_source).mean() >= 0.9
        for rule in rules:
            inside = calibrate_error_bars.of_rule(rule, rules, data)
            if rule.runs and rule.says != error_bars.OF_ENGINES:  # whose runs are in tests/gpu/
                assert (int(inside.sum()), len(set(np.array(data.sources)[inside]))) == (rule.runs, rule.sources)


@pytest.mark.skipif(not SHARED.exists(), reason="the published cases are not here")
def test_a_constant_changes_the_plans_that_read_it_alone() -> None:
    """Of a case of each device and of each framework."""
    cases = [case for case in json.loads(SHARED.read_text()) if step_seconds(case)]
    kinds = {cluster_of(case["cluster"]).device.name: case for case in cases} | {
        framework_of(case["framework"] or "").name: case for case in cases
    }
    some = list({case["id"]: case for case in kinds.values()}.values())
    constants = Constants()
    ratios = log_ratios(some, constants, {})
    planned = [exp(ratio) * (step_seconds(case) or 0.0) for ratio, case in zip(ratios, some, strict=True)]
    assert planned == pytest.approx([predict(case).step_seconds for case in some])
    found = slopes_of(some, constants, ratios)
    every = np.stack([(log_ratios(some, constants, {name: DELTA}) - ratios) / DELTA for name in NAMES], axis=1)
    constants.scale({})
    assert [name for name, one, other in zip(NAMES, found.T, every.T, strict=True) if not np.array_equal(one, other)] == []
    assert every.any(axis=0).all()


@pytest.mark.parametrize(("seconds", "where"), [(1.1, "inside"), (1.6, "outside"), (0.7, "outside")])
def test_a_report_says_whether_the_measured_step_lies_in_the_bar(tmp_path: Path, seconds: float, where: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"time": {"step": 1.0}, "step_low": 0.8, "step_high": 1.5}))
    rows = [json.dumps({"step": step, "loss": 1.0, "seconds": seconds}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    (sentence,) = drift_sentences(read_measured_run(tmp_path))
    assert sentence.endswith(f"; {where} what the plan expects of nine runs in ten (0.8 to 1.5).")


def test_a_held_out_source_does_not_shape_its_own_prediction() -> None:
    """Two sources ask for opposite changes of one constant: each is predicted by the other's."""
    ratios = np.array([0.3, 0.3, -0.3, -0.3])
    slopes = np.zeros((4, len(NAMES)))
    slopes[:, NAMES.index("tail")] = 1.0
    assert list(held_out(ratios, slopes, ["one", "one", "other", "other"])) == pytest.approx([0.6, 0.6, -0.6, -0.6], abs=0.03)
