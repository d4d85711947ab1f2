"""The best interval between checkpoints, against figures computed by hand and published for real runs."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt
from random import Random
from typing import Any

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.pages.plan_page import plan_text
from distrain.cli.pages.text_layout import Style
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan, Saving
from distrain.trainer.plan.save_interval import best_interval, goodput, stop_seconds
from distrain.trainer.spec.keys.units import percent_text

HOUR, DAY = 3600.0, 86400.0
FORWARD = 1.7  # seconds of one micro-batch of llama3_405b: its 126 layers take 8192 tokens x 2 x 405e9 FLOP on 8 devices at 400 TFLOP/s


def llama(*words: str) -> Plan:
    return make_plan(load_recipe("llama3_405b", list(words)))


def saving(plan: Plan) -> Saving:
    assert plan.saving is not None
    return plan.saving


def saving_warnings(plan: Plan) -> list[str]:
    return [str(each) for each in plan.warnings if each.rule == "saving"]


def test_llama_3_was_interrupted_as_often_as_the_default_mtbf_says() -> None:
    """arXiv:2407.21783 table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs, one in 3.1 hours."""
    found = saving(llama("cluster.nodes=2048", "parallel.dp=128"))
    assert found.mtbf == pytest.approx(54 * DAY / 419)
    assert found.mtbf / HOUR == pytest.approx(3.09, abs=0.005)


@pytest.mark.parametrize(
    ("save", "between", "interval"),
    [
        # sqrt(2 x 60 x 10800) = 1138.420; d / 2M = 1 / 360, its root 0.0527046; x (1 + 0.0175682 + 0.0003086) = 1158.771; - 60
        (60.0, 10800.0, 1098.771),
        # sqrt(2 x 5 x 1000) = 100; d / 2M = 0.0025, its root 0.05; x (1 + 0.0166667 + 0.0002778) = 101.69444; - 5
        (5.0, 1000.0, 96.69444),
        (1000.0, 400.0, 400.0),  # a save that takes longer than twice the time between faults
    ],
)
def test_the_best_interval_is_dalys(save: float, between: float, interval: float) -> None:
    assert best_interval(save, between) == pytest.approx(interval, abs=5e-4)


def test_the_interval_of_a_short_save_is_youngs() -> None:
    assert best_interval(1e-6, 1e4) == pytest.approx(sqrt(2e-2), rel=1e-4)


def test_goodput_is_dalys() -> None:
    """100 / (1000 e^0.005 (e^0.105 - 1)): e^0.005 = 1.0050125, e^0.105 = 1.1107106; 100 / 111.26553 = 0.898751."""
    assert goodput(100.0, 5.0, 1000.0) == pytest.approx(0.898751, abs=1e-6)


@pytest.mark.parametrize(("save", "between"), [(1.0, 1e3), (30.0, 1e4), (300.0, 1e4), (60.0, 600.0)])
def test_no_interval_keeps_more_than_the_best(save: float, between: float) -> None:
    best = goodput(best_interval(save, between), save, between)
    assert all(goodput(factor * best_interval(save, between), save, between) <= best + 1e-4 for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert goodput(1e9, save, between) == 0.0


def test_a_plan_tells_the_best_interval() -> None:
    """4.43 TiB over 2e12 bytes/s and a forward; one fault in 54 days x 16384 / (419 x 8192); Daly's interval in steps."""
    plan = llama()
    found = saving(plan)
    assert plan.run is not None
    assert plan.time is not None
    assert plan.run.seconds is not None
    assert found.seconds is not None
    save, between = found.seconds, 108 * DAY / 419
    assert plan.run.checkpoint_bytes == pytest.approx(12 * 405.9e9, rel=1e-3)
    assert save == found.pause == pytest.approx(plan.run.checkpoint_bytes / 2e12 + FORWARD, rel=0.01)
    assert found.mtbf == pytest.approx(between)
    assert found.interruptions == pytest.approx(plan.run.seconds / between)
    assert found.interval == pytest.approx(sqrt(2 * save * between) - save, rel=0.005)
    assert found.interval is not None
    assert found.every == round(found.interval / plan.time.step)
    step = found.every * plan.time.step
    assert found.goodput == pytest.approx(step / (between * exp(save / between) * (exp((step + save) / between) - 1)))
    assert f"checkpoint.every={found.every})" in " ".join(plan_text(plan, Style()).split())


def test_without_cluster_storage_no_interval_is_planned() -> None:
    plan = llama("cluster.storage=null")
    found = saving(plan)
    assert (found.seconds, found.interval, found.every, found.goodput) == (None, None, None, None)
    assert "set cluster.storage (bytes/s) to see how often to save" in " ".join(plan_text(plan, Style()).split())


def test_a_run_too_short_to_be_interrupted_is_not_warned() -> None:
    plan = make_plan(load_recipe("gpt2_124m", ["cluster.storage=1e9"]))
    assert saving(plan).interruptions is not None
    assert "interrupt" not in plan_text(plan, Style())
    assert saving_warnings(plan) == []


def test_a_run_of_days_that_saves_only_at_its_end_is_warned_of_a_chance() -> None:
    plan = make_plan(load_recipe("llama3_8b", ["cluster=4x8", "train.tokens=4e11", "checkpoint.every=0"]))
    assert plan.run
    assert plan.run.days is not None
    chance = 1 - exp(-plan.run.days * DAY / saving(plan).mtbf)
    assert 0.1 < chance < 0.5
    (line,) = saving_warnings(plan)
    assert line.startswith(f"checkpoint.every=0 saves only at the end, and the chance of an interruption is {percent_text(chance)}: ")


def test_an_interval_far_from_the_best_is_warned_of_and_its_fix_works() -> None:
    (line,) = saving_warnings(llama("checkpoint.every=1000"))
    assert line == (
        "about 663 interruptions are expected: checkpoint.every=1000 keeps 69 % of the time, the best interval 98 %: "
        "set checkpoint.every=27"
    )
    assert saving_warnings(llama()) == []
    assert saving_warnings(llama("checkpoint.every=30")) == []  # flat near the best


def test_a_long_run_that_saves_only_at_its_end_is_warned() -> None:
    (line,) = saving_warnings(llama("checkpoint.every=0", "cluster.storage=null"))
    assert line == (
        "checkpoint.every=0 saves only at the end, and about 663 interruptions are expected: "
        "set checkpoint.every; cluster.storage (bytes/s) tells the best interval"
    )
    (line,) = saving_warnings(llama("checkpoint.every=0"))
    assert "saving only at the end keeps 0 % of the time" in line
    (line,) = saving_warnings(llama("checkpoint.every=0", "checkpoint.final=false"))
    assert "saving never keeps 0 % of the time" in line


SLURM = "Slurm kills a stopped run after 30 s, which then resumes from an earlier checkpoint: raise KillWait in slurm.conf"
GRACES = (
    ("slurm", "pdsh", SLURM),
    (
        "torchrun",
        "pdsh",
        "torchrun kills a stopped run after 30 s, which then resumes from an earlier checkpoint: give torchrun --shutdown-timeout",
    ),
    ("local", "slurm", None),
    ("deepspeed", "pdsh", None),  # its ranks' keepers are not the launcher's
    ("deepspeed", "slurm", SLURM),  # all that a job began is its job's
)


@pytest.mark.parametrize(("launch", "runner", "line"), GRACES)
def test_a_stop_longer_than_the_grace_period_is_warned_of(launch: Any, runner: Any, line: str | None) -> None:
    """A step of 15.9 s and a save of 48.7 s after a forward, each twice."""
    run = load_recipe("llama3_405b", ["cluster.storage=1e11", "checkpoint.every=100"])
    plan = make_plan(replace(run, launch=replace(run.launch, name=launch, runner=runner)))
    says = f"stopping and saving may take 133 s (a step of 15.9 s, a save of 50.4 s), but {line}, or write faster"
    assert [each for each in saving_warnings(plan) if each.startswith("stopping")] == ([says] if line else [])


def test_a_save_of_an_unknown_time_is_assumed_to_be_slow_and_the_warning_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of 405.8e9 parameters has 14 bytes each: 5,680 s at 1 GB/s, twice."""
    words = ["cluster.storage=null", "launch=slurm", "log.dir=/runs"]
    plan = make_plan(load_recipe("llama3_405b", words))
    (line,) = [each for each in saving_warnings(plan) if each.startswith("stopping")]
    assert plan.run is not None
    assert plan.time is not None
    assert plan.time.step is not None
    save = plan.run.checkpoint_bytes / 1e9
    assert save > 1000
    assert f"a save of {save:.1f} s at an assumed 1 GB/s, as cluster.storage is not set), but Slurm kills" in line
    assert line.startswith(f"stopping and saving may take {2 * save + 2 * plan.time.step:.0f} s")
    assert command(["show", "conf=llama3_405b", *words, "--launch"]) == 0
    assert f"#SBATCH --signal=TERM@{2 * save + 2 * plan.time.step:.0f}\n" in capsys.readouterr().out


def test_a_stop_waits_for_the_running_step_evaluation_and_save() -> None:
    """The forward passes of twelve batches take four steps: 2 x 10 + 4 x 10 + 2 x 50."""
    run = load_recipe("llama3_405b", ["train.evaluate={every: 100, batches: 12}"])
    assert stop_seconds(run, 10.0, 50.0) == pytest.approx(160.0)
    assert stop_seconds(run, 10.0, None) == pytest.approx(60.0)
    assert stop_seconds(run, None, 50.0) == pytest.approx(100.0)
    assert stop_seconds(load_recipe("llama3_405b"), 10.0, 50.0) == pytest.approx(120.0)


def test_slurm_is_asked_to_signal_a_run_as_long_before_its_end_as_a_stop_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster.storage=1e11", "launch=slurm", "log.dir=/runs", "train.evaluate={every: 100, batches: 3}"]
    assert command(["show", "conf=llama3_405b", *words, "--launch"]) == 0
    assert "#SBATCH --signal=TERM@148\n" in capsys.readouterr().out  # 133 s and a step's time
    assert command(["show", "conf=quickstart", "launch=slurm", "log.dir=/runs", "--launch"]) == 0
    assert "#SBATCH --signal=TERM@60\n" in capsys.readouterr().out  # the least


# Saves in the background

SAVES = "checkpoint.every=20"
BACKGROUND = "checkpoint.background=true"


def simulated_goodput(interval: float, pause: float, save: float, between: float, *, faults: int) -> float:
    """The share of the time that is kept work, where each save ends `save` seconds after it began, of which work pauses for some, and a
    fault takes a load as long as a save and the work since the newest save that has ended."""
    rng, spent, kept = Random(1), 0.0, 0.0
    for _ in range(faults):
        left, loading = rng.expovariate(1 / between), save
        spent += left
        while left < loading:  # a fault while it loads
            left = rng.expovariate(1 / between)
            spent += left
        saves = int((left - loading - interval - save) // (interval + pause)) + 1  # that have ended
        kept += interval * max(0, saves)
    return kept / spent


@pytest.mark.parametrize(
    ("interval", "pause", "save", "between"), [(600.0, 3.0, 50.0, 1e4), (100.0, 0.5, 60.0, 3000.0), (300.0, 30.0, 30.0, 3000.0)]
)
def test_goodput_with_saves_in_the_background_is_that_of_simulated_faults(
    interval: float, pause: float, save: float, between: float
) -> None:
    simulated = simulated_goodput(interval, pause, save, between, faults=200_000)
    assert goodput(interval, pause, between, save=save) == pytest.approx(simulated, abs=2e-3)


def test_training_waits_for_a_forward_and_a_copy_to_the_host() -> None:
    """Of 405.9e9 x 12 bytes on 8192 devices, over a link of 55e9 bytes/s (conf/cluster)."""
    plan, waiting = llama(BACKGROUND, SAVES), llama(SAVES)
    found, before = saving(plan), saving(waiting)
    link = load_recipe("llama3_405b").cluster.host.link
    assert link is not None
    assert found.seconds == before.seconds
    assert found.pause == pytest.approx(FORWARD + 12 * 405.9e9 / 8192 / link, rel=0.02)
    assert found.pause is not None
    assert found.interval == best_interval(found.pause, found.mtbf)
    assert found.goodput is not None
    assert before.goodput is not None
    assert before.background_goodput == pytest.approx(found.goodput, abs=1e-4)
    assert found.background_goodput is None
    assert found.goodput > before.goodput
    pages = [" ".join(plan_text(each, Style()).split()) for each in (plan, waiting)]
    assert "a save takes 4.11 s, of which training waits 1.69 s: saving every" in pages[0]
    assert "checkpoint.background" not in pages[1], "it gains less than a hundredth"


def test_a_plan_says_what_saves_in_the_background_would_gain() -> None:
    page = " ".join(plan_text(make_plan(load_recipe("megatron_1t_6x8x64")), Style()).split())
    assert "gives the best goodput, 96.0 %; checkpoint.background=true: 98.9 %" in page


def test_the_next_save_waits_for_the_last_one() -> None:
    """At 1e10 bytes/s a save takes 487 s: longer than the best interval of a short pause."""
    found = saving(llama(BACKGROUND, SAVES, "cluster.storage=1e10"))
    assert found.seconds is not None
    assert found.pause is not None
    assert best_interval(found.pause, found.mtbf) < found.seconds
    assert found.interval == found.seconds - found.pause


def test_saves_that_take_longer_than_their_interval_hold_training_up() -> None:
    """A save of 47 s after each 25 s of work: the next one waits for the rest, and a step in two is kept."""
    assert goodput(25.0, 0.13, 1e9, save=47.0) == pytest.approx(25 / 47, rel=1e-4)
    (line,) = saving_warnings(llama(BACKGROUND, "checkpoint.every=1", "cluster.storage=1e10"))
    assert "checkpoint.every=1 keeps 3 % of the time" in line


def test_a_stop_may_wait_for_three_saves_in_the_background() -> None:
    run = load_recipe("llama3_405b", [BACKGROUND, SAVES])
    assert stop_seconds(run, 10.0, 50.0) == pytest.approx(170.0)


def test_without_a_rate_of_the_hosts_link_no_interval_is_planned() -> None:
    found = saving(llama(BACKGROUND, SAVES, "cluster.host.link=null"))
    assert (found.pause, found.interval, found.goodput) == (None, None, None)
    page = " ".join(plan_text(llama(BACKGROUND, SAVES, "cluster.host.link=null"), Style()).split())
    assert "set cluster.host.link (bytes/s) to see how often to save" in page
    assert saving(llama(SAVES, "cluster.host.link=null")).background_goodput is None


def snapshot(*words: str, recipe: str = "llama3_8b_1node") -> tuple[int, int]:
    """The bytes of all snapshots of a run on one node, and of its checkpoint."""
    plan = make_plan(load_recipe(recipe, [SAVES, BACKGROUND, *words]))
    assert plan.memory
    assert plan.memory.host
    assert plan.run
    assert plan.memory.host.rank.snapshot
    return plan.memory.host.node, plan.run.checkpoint_bytes


@pytest.mark.parametrize(
    "words",
    [
        "parallel.zero=3 parallel.tp=1 parallel.dp=8",
        "parallel.zero=1 parallel.tp=2 parallel.dp=4",
        "parallel.zero=0 parallel.tp=8 parallel.dp=1",
        "parallel.zero=1 parallel.tp=1 parallel.cp=4 parallel.dp=2",
        "parallel.zero=1 parallel.tp=1 parallel.pp=4 parallel.dp=2",
        "parallel.zero=3 parallel.tp=1 parallel.dp=8 parallel.shard=4 engine=native",
        "parallel.zero=1 parallel.tp=1 parallel.dp=8 optim=muon",
        "parallel.zero=1 parallel.tp=1 parallel.dp=8 optim.name=sgd",
        "parallel.zero=0 parallel.tp=1 parallel.dp=8 model.lora.rank=16 train.compile=false",
    ],
)
def test_all_snapshots_are_a_checkpoint(words: str) -> None:
    """But for a few small weights, which each of several tensor-parallel ranks counts, and rounding."""
    node, checkpoint = snapshot(*words.split())
    assert node == pytest.approx(checkpoint, rel=1e-3)


def test_experts_are_saved_once_too() -> None:
    node, checkpoint = snapshot(
        "cluster.nodes=1", "parallel.ep=8", "parallel.tp=1", "parallel.dp=auto", "parallel.pp=1", recipe="mixtral_8x7b"
    )
    assert node == pytest.approx(checkpoint, rel=1e-3)


def test_hosts_without_room_for_the_snapshot_do_not_fit() -> None:
    plan = llama(SAVES, BACKGROUND, "cluster.host.memory=1e9")
    assert not plan.fits
    (problem,) = plan.problems
    assert "GiB of 0.931 on each node's host: of a rank snapshot 0.557: fits with checkpoint.background=false" in str(problem)
    assert llama(SAVES, "cluster.host.memory=1e9").fits


def test_a_cpu_has_the_snapshot_in_its_own_memory() -> None:
    peaks = [make_plan(load_recipe("quickstart", [SAVES, *more])).memory for more in ((), (BACKGROUND,))]
    assert peaks[0]
    assert peaks[1]
    assert peaks[1].host
    assert peaks[1].peak - peaks[0].peak == peaks[1].host.rank.snapshot > 0
    assert peaks[0].host is None


def test_without_an_interval_there_is_no_snapshot() -> None:
    plan = make_plan(load_recipe("quickstart", [BACKGROUND]))
    assert plan.memory
    assert plan.memory.host is None
