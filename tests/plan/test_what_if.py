"""What if: the quick length of a step is the simulated one, and each answer is that of the run which it describes."""

from dataclasses import replace
from pathlib import Path

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.plan.test_timeline import EVERY_SCHEDULE, HIDDEN, PIPELINE, costs_of, pipeline, run_of
from distrain.trainer.plan.layout.action_csv import write_action_csv
from distrain.trainer.plan.layout.schedules import SCHEDULES
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.timeline.make_timeline import make_timeline
from distrain.trainer.plan.timeline.simulated_seconds import simulated_seconds, varied_seconds
from distrain.trainer.plan.timeline.step_costs import step_costs
from distrain.trainer.plan.timeline.what_if import what_ifs

SLOW = {1: 1.3, 2: 0.8}


@EVERY_SCHEDULE
@pytest.mark.parametrize("zero", [0, 3])
def test_the_quick_length_of_a_step_is_the_simulated_one(name: str, chunks: int, zero: int) -> None:
    costs = pipeline(name, chunks, f"parallel.zero={zero}")
    assert simulated_seconds(costs) == pytest.approx(make_timeline(costs).seconds, rel=1e-12)
    assert simulated_seconds(costs, SLOW) == pytest.approx(make_timeline(costs, SLOW).seconds, rel=1e-12)


def test_passes_that_vary_by_nothing_take_the_simulated_step_and_others_lengthen_it() -> None:
    costs = pipeline("1f1b", 1)
    assert varied_seconds(costs, 0.0, 2)[0] == pytest.approx(simulated_seconds(costs), rel=1e-12)
    mean, error = varied_seconds(costs, 0.2, 20)
    assert mean - simulated_seconds(costs) > max(0.02 * simulated_seconds(costs), 3 * error)
    assert varied_seconds(costs, 0.2, 20) == (mean, error) != varied_seconds(costs, 0.2, 22)


@pytest.fixture(scope="module")
def answers() -> dict[str, float]:
    run = load_recipe("gpt3_175b", ())
    return {each.says: each.seconds for each in what_ifs(run, costs_of(run), 15)}


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("links between nodes were twice as fast", ("cluster.between.bandwidth=50e9",)),
        ("links inside nodes were twice as fast", ("cluster.inside.bandwidth=600e9",)),
        (
            "devices computed twice as fast",
            ("cluster.device.peak.bf16=624e12", "cluster.device.peak.fp16=624e12", "cluster.device.peak.fp32=39e12"),
        ),
        ("devices had twice the memory bandwidth", ("cluster.device.bandwidth=4078e9",)),
        (
            "no message took time",
            tuple(f"cluster.{side}.{key}" for side in ("inside", "between") for key in ("latency=0", "bandwidth=1e20")),
        ),
        ("kernels were launched in no time", ("cluster.device.launch=0", "cluster.device.dispatch=0")),
    ],
)
def test_an_answer_about_the_cluster_is_that_of_a_run_on_it(says: str, words: tuple[str, ...], answers: dict[str, float]) -> None:
    run, changed = load_recipe("gpt3_175b", ()), load_recipe("gpt3_175b", words)
    cluster = changed.cluster
    assert cluster != run.cluster
    if says.startswith("links"):
        side = "between" if "between" in says else "inside"
        assert getattr(cluster, side).bandwidth == 2 * getattr(run.cluster, side).bandwidth
    assert answers[says] == pytest.approx(simulated_seconds(costs_of(changed)), rel=1e-3 if says.startswith("devices") else 1e-6)


def test_an_answer_about_hosts_is_that_of_a_run_on_them() -> None:
    words = ("parallel.zero=2", "parallel.offload.optimizer=true", "engine=zero")
    run = load_recipe("llama3_8b_1node", words)
    found = {each.says: each.seconds for each in what_ifs(run, costs_of(run), 0)}
    host = run.cluster.host
    assert host.bandwidth
    assert host.link
    changed = load_recipe("llama3_8b_1node", (*words, f"cluster.host.bandwidth={2 * host.bandwidth}", f"cluster.host.link={2 * host.link}"))
    assert found["hosts and their links were twice as fast"] == pytest.approx(simulated_seconds(costs_of(changed)), rel=1e-9)
    assert simulated_seconds(costs_of(changed)) < 0.95 * simulated_seconds(costs_of(run))


def test_answers_about_the_pipeline_are_those_of_runs_that_have_it(answers: dict[str, float]) -> None:
    hidden = costs_of(load_recipe("gpt3_175b", (HIDDEN,)))
    assert answers["sends between stages took no time"] == pytest.approx(simulated_seconds(hidden), rel=1e-9)
    run = load_recipe("gpt3_175b", ())
    twice = costs_of(replace(run, train=replace(run.train, batch=2 * run.train.batch)))
    assert answers["the batch were twice as large (half of its step)"] == pytest.approx(make_timeline(twice).seconds / 2, rel=1e-9)
    slow = make_timeline(costs_of(run), {15: 1.1}).seconds
    assert answers["a device of stage 15 took 10 % longer to compute"] == pytest.approx(slow, rel=1e-9)


def test_even_stages_take_the_step_of_their_mean() -> None:
    run = run_of("gpt3_175b")
    costs = costs_of(run)
    even = {each.says: each.seconds for each in what_ifs(run, costs, 0)}["all stages took equally long"]
    mean = sum(each.total for (kind, _), each in costs.passes.items() if kind in "FB") / costs.layout.mesh.pp
    filled = (costs.layout.micros + costs.layout.mesh.pp - 1) * mean  # of 1F1B, without its sends and its end
    assert filled < even < 1.05 * filled


def test_answers_are_in_order_and_change_the_step() -> None:
    run = run_of("llama3_8b")
    costs = costs_of(run)
    rows, now = what_ifs(run, costs, 0), simulated_seconds(costs)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert all(abs(row.seconds / now - 1) >= 5e-4 for row in rows)
    assert not any("stage" in row.says for row in rows)


def test_one_device_has_no_links_to_ask_about() -> None:
    run = run_of("gpt2_124m_1gpu")
    assert not any("message" in row.says or "link" in row.says for row in what_ifs(run, costs_of(run), 0))


def test_a_run_without_times_has_no_costs_of_a_step() -> None:
    run = run_of("llama3_8b", "parallel.offload.optimizer=true", "parallel.zero=1", "cluster.host.link=null")
    assert make_plan(run).ok
    assert step_costs(run) is None


def test_a_list_of_actions_is_not_asked_about_more_micro_batches(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(write_action_csv([SCHEDULES["1f1b"].actions(stage, 4, 16, 1) for stage in range(4)], folded=False))
    run = run_of(*PIPELINE, f"parallel.schedule={file}")
    says = [each.says for each in what_ifs(run, costs_of(run), 0)]
    assert "devices computed twice as fast" in says
    assert not any("batch" in each for each in says)


def test_variation_that_can_not_be_told_from_noise_is_left_out() -> None:
    run = run_of(*PIPELINE, "train.batch=2", "parallel.schedule=gpipe")  # one micro-batch: no pass waits for another stage's slow one
    assert not any("varied" in each.says for each in what_ifs(run, costs_of(run), 0))
    run = run_of("gpt3_175b")
    assert any("varied" in each.says for each in what_ifs(run, costs_of(run), 0))


def test_a_batch_that_grows_is_asked_about_at_its_largest(answers: dict[str, float]) -> None:
    run = load_recipe("gpt3_175b", ("train.rampup.batch=512", "train.rampup.by=1024", "train.rampup.until=10e9"))
    assert make_plan(run).ok
    assert {each.says: each.seconds for each in what_ifs(run, costs_of(run), 15)} == answers
