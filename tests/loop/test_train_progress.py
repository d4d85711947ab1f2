"""Where a run that resumes stands in its data: which sample comes next, and how many tokens were trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distrain.cli.config.load import load_recipe
from distrain.trainer.loop.measure import instrumentation
from distrain.trainer.loop.measure.instrumentation import ProgressLine
from distrain.trainer.loop.metrics.throughput import ThroughputMeter
from distrain.trainer.loop.step.train_progress import TrainProgress, resumed_progress
from distrain.trainer.loop.train import no_steps_message
from distrain.trainer.parallel.world import World
from distrain.trainer.plan.plan import make_plan

BEFORE = ("train.batch=8", "train.seq=16", "train.microbatch=2")
SAVED = {"samples": 24, "tokens": 384}  # after three steps


@pytest.mark.parametrize(
    ("saved", "changes", "sample"),
    [
        (SAVED, (), 24),
        (SAVED, ("train.seq=32",), 12),
        (SAVED, ("train.seq=64",), 6),
        (SAVED, ("train.seq=12",), 32),
        (SAVED, ("train.batch=4",), 24),
        ({}, (), 24),  # of an earlier version, which recorded neither
        ({}, ("train.batch=4", "train.seq=32"), 12),
        ({"samples": 20, "tokens": 320}, (), 20),
    ],
)
def test_as_many_tokens_precede_the_next_sample_as_before(saved: dict[str, Any], changes: tuple[str, ...], sample: int) -> None:
    before, now = (load_recipe("quickstart", [*BEFORE, *more]) for more in ((), changes))
    progress = resumed_progress(3, saved, before, now, other_data=False)
    assert (progress.step, progress.sample, progress.tokens) == (3, sample, saved.get("tokens", 384))


def test_other_data_begin_at_their_first_sample() -> None:
    run = load_recipe("quickstart", BEFORE)
    progress = resumed_progress(3, SAVED, run, run, other_data=True)
    assert (progress.sample, progress.tokens) == (0, 384)


@pytest.mark.parametrize(
    ("tokens", "progress", "last"),
    [
        (1280, TrainProgress(), 10),
        (1281, TrainProgress(), 11),  # a step is whole
        (1280, TrainProgress(step=4, tokens=512), 10),
        (1280, TrainProgress(step=4, tokens=1024), 6),  # earlier steps were twice as large
        (1280, TrainProgress(step=4, tokens=1280), 4),
        (1280, TrainProgress(step=4, tokens=2000), 4),
    ],
)
def test_a_run_ends_with_the_step_that_reaches_its_tokens(tokens: int, progress: TrainProgress, last: int) -> None:
    run = load_recipe("quickstart", [*BEFORE, "train.steps=null", f"train.tokens={tokens}"])
    assert progress.last_step(run) == last


def test_the_batch_of_a_step_follows_from_the_tokens_before_it() -> None:
    """Whatever the steps and the samples before it were: a run that resumes with other data, or that had another batch, goes on."""
    ramp = ("train.rampup.batch=2", "train.rampup.by=2", "train.rampup.until=480", "train.microbatch=1")  # 2, 4, 6 until 160, 320, 480
    run = load_recipe("quickstart", [*BEFORE, *ramp, "train.steps=null", "train.tokens=1000"])
    progress = TrainProgress(step=100, sample=7, tokens=300)
    assert [progress.batch(run, step) for step in range(100, 105)] == [4, 6, 6, 8, 8]
    assert progress.after(run, 103) == TrainProgress(step=103, sample=7 + 16, tokens=300 + 16 * 16)
    assert progress.whole_batch_step(run) == 103
    assert progress.last_step(run) == 107
    assert TrainProgress(step=9, tokens=480).batch(run, 9) == 8
    assert TrainProgress(step=9, tokens=480).whole_batch_step(run) == 9
    assert TrainProgress(step=9, tokens=1000).last_step(run) == 9


def test_a_run_of_so_many_steps_ends_with_the_last_of_them() -> None:
    assert TrainProgress(step=4, tokens=9999).last_step(load_recipe("quickstart", [*BEFORE, "train.steps=7"])) == 7


def test_a_position_moves_on_by_whole_batches() -> None:
    run = load_recipe("quickstart", BEFORE)
    assert TrainProgress(step=3, sample=24, tokens=384).after(run, 5) == TrainProgress(step=5, sample=40, tokens=640)


def test_the_time_left_goes_by_tokens_where_the_batch_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps of 2 sequences and two of 8 are as many tokens: half of the time is left after the first eight."""
    ramp = ("train.rampup.batch=2", f"train.rampup.until={8 * 2 * 16}", "train.steps=10")
    run, now = load_recipe("quickstart", [*BEFORE, *ramp]), [0.0]
    monkeypatch.setattr(instrumentation, "perf_counter", lambda: now[0])
    line = ProgressLine(run, TrainProgress(), 10)
    now[0] = 32.0
    assert line.line(8, 1.5) == "step 8/10  loss 1.5000  8 tokens/s  0:32 left"
    now[0] = 48.0
    assert line.line(9, None) == "step 9/10  8 tokens/s  0:16 left"


def test_a_run_that_is_done_names_twice_its_tokens() -> None:
    run = load_recipe("quickstart", [*BEFORE, "train.rampup.batch=2", "train.rampup.until=64", "train.steps=null", "train.tokens=320"])
    assert no_steps_message(run, 4, 4).endswith("set train.tokens=640 to train longer")


def test_a_row_averages_steps_of_one_batch() -> None:
    run = load_recipe("quickstart", [*BEFORE, "train.rampup.batch=2", "train.rampup.until=64", "cluster.gpus=1", "train.microbatch=1"])
    meter = ThroughputMeter(run, make_plan(run), World(rank=0, size=1, device=torch.device("cpu")))
    for seconds, batch in ((9.0, 2), (1.0, 2), (3.0, 8), (5.0, 8)):
        meter.add_step(seconds, {"forward": seconds / 2}, batch)
    row = meter.take_row()
    assert (row["batch"], row["seconds"], row["tokens_per_second"], row["seconds_forward"]) == (8, 4.0, 8 * 16 / 4.0, 2.0)
    meter.add_step(1.0, {}, 8)
    assert meter.take_row()["seconds"] == 1.0
