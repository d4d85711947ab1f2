"""A run that is stopped, killed or damaged resumes with the losses of an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.overrides import without_repeats
from distrain.trainer.rundir.metric_rows import read_step_rows
from distrain.trainer.system.child_process import end_child

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

STEPS = 8
STOPPED = 75
OVERRIDES = (
    "quickstart", "model=tiny", "model.layers=2", "model.dropout=0.1", "data=synthetic", "train.batch=8", "train.seq=16",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=3", f"train.steps={STEPS}",
)  # fmt: skip
LAYOUTS = ((1, 0), (2, 0), (2, 1), (4, 1), (2, 2), (2, 3), (1, 3))  # dp, zero


def layout(dp: int, zero: int) -> tuple[str, ...]:
    return f"cluster.gpus={dp}", f"parallel.zero={zero}", f"train.microbatch={4 if dp == 1 else 2}"


@pytest.fixture(scope="module")
def uninterrupted_losses(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    """The losses of a run that is not interrupted, by its overrides."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    @cache
    def losses(*overrides: str) -> list[float]:
        return ranks.train(folder / f"run{losses.cache_info().misses}", *OVERRIDES, *overrides).figures("loss")

    return losses


def stop_at_random_step(ranks: RankPool, folder: Path, seed: random.Random, world: int, *overrides: str, first: int = 1) -> PoolJob:
    """Run until a random rank receives SIGTERM at a random step from `first` on."""
    signal_at = (seed.randrange(first, STEPS - 4), seed.randrange(world), signal.SIGTERM)
    job = ranks.fit(folder, *OVERRIDES, *overrides, signals=[signal_at])
    assert set(job.codes) == {STOPPED}, (signal_at, job)
    return job


def test_a_run_in_bf16_that_goes_on_in_fp16_begins_with_fp16_s_loss_scale(ranks: RankPool, tmp_path: Path) -> None:
    """DeepSpeed has a constant scale of 1 in bf16, of which gradients in fp16 would underflow."""
    words = (*OVERRIDES, *layout(2, 1))
    ranks.train(tmp_path / "run", *words, "engine=zero", "train.precision=bf16", "train.steps=4")
    ranks.train(tmp_path / "run", *words, "engine=native", "train.precision=fp16", "train.steps=5")
    saved = [json.loads((tmp_path / "run" / "checkpoints" / f"step_{step}" / "manifest.json").read_text()) for step in (4, 5)]
    scales = [each["extra"]["engine"]["scale"] for each in saved]
    assert scales[0] == {}
    assert scales[1]["cur_scale"] > 1000


@pytest.mark.parametrize(
    ("dp", "zero", "precision"),
    [(1, 0, "bf16"), (2, 1, "bf16"), (2, 2, "fp32"), (2, 3, "bf16")],
)
def test_a_stopped_run_resumes_bit_for_bit(
    ranks: RankPool, tmp_path: Path, uninterrupted_losses, dp: int, zero: int, precision: str
) -> None:
    overrides = (*layout(dp, zero), f"train.precision={precision}")
    seed = random.Random(f"{dp} {zero} {precision}")
    stopped = stop_at_random_step(ranks, tmp_path / "run", seed, dp, *overrides)
    reached = stopped.rows[-1]["step"]
    assert 1 < reached < STEPS
    job = ranks.train(tmp_path / "run", *OVERRIDES, *overrides)
    assert f"resumes from step {reached}" in job.lines
    assert [row["step"] for row in job.rows] == list(range(1, STEPS + 1)), "no step is run twice"
    assert job.figures("loss") == uninterrupted_losses(*overrides)


@pytest.mark.parametrize(("chain", "precision"), [(0, "fp32"), (2, "bf16")])
def test_a_run_that_changes_its_layout_continues_with_the_same_losses(
    ranks: RankPool, tmp_path: Path, uninterrupted_losses, chain: int, precision: str
) -> None:
    seed = random.Random(chain)
    *before, (dp, zero) = seed.sample(LAYOUTS, 4)
    first = 1
    for each in before:
        job = stop_at_random_step(ranks, tmp_path / "run", seed, each[0], *layout(*each), f"train.precision={precision}", first=first)
        first = job.rows[-1]["step"] + 1
        if first >= STEPS - 5:
            break
    losses = ranks.train(tmp_path / "run", *OVERRIDES, *layout(dp, zero), f"train.precision={precision}").figures("loss")
    apart = 2e-6 if precision == "fp32" else 1e-3  # 5e-7, one rounding, and 3e-4 were seen
    assert losses == pytest.approx(uninterrupted_losses(*layout(1, 0), f"train.precision={precision}"), abs=apart, rel=0)


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_run_resumes_from_its_last_checkpoint(ranks: RankPool, tmp_path: Path, uninterrupted_losses, seed: int) -> None:
    dp, zero = random.Random(seed).choice(LAYOUTS)
    overrides = (*layout(dp, zero), "checkpoint.every=2")
    step = random.Random(seed).randrange(3, STEPS - 2)
    killed = ranks.fit(tmp_path / "run", *OVERRIDES, *overrides, signals=[(step, rank, signal.SIGKILL) for rank in range(dp)])
    assert set(killed.codes) == {-signal.SIGKILL}
    job = ranks.train(tmp_path / "run", *OVERRIDES, *overrides)
    saved = next(int(line.rpartition(" ")[2]) for line in job.lines if line.startswith("resumes from step "))
    assert saved % 2 == 0
    assert saved > step - 2
    assert job.figures("loss") == uninterrupted_losses(*layout(dp, zero))


def test_a_damaged_checkpoint_is_passed_over_with_a_message(ranks: RankPool, tmp_path: Path, uninterrupted_losses) -> None:
    overrides = (*layout(2, 2), "checkpoint.every=4", "checkpoint.keep=3")
    whole = ranks.train(tmp_path / "run", *OVERRIDES, *overrides).figures("loss")
    newest = max((tmp_path / "run" / "checkpoints" / f"step_{STEPS}").glob("*.safetensors"))
    held = bytearray(newest.read_bytes())
    held[-1] ^= 1
    newest.write_bytes(held)
    job = ranks.train(tmp_path / "run", *OVERRIDES, *overrides)
    assert f"passed over step_{STEPS}: {newest.name} is not as it was written (its hash differs)" in job.lines
    assert f"resumes from step {STEPS - 4}" in job.lines
    assert [row["step"] for row in job.rows] == [*range(1, STEPS + 1), *range(STEPS - 3, STEPS + 1)]
    assert job.figures("loss") == whole == uninterrupted_losses(*layout(2, 2))


def test_resume_must_requires_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    job = ranks.fit(tmp_path / "run", *OVERRIDES, *layout(2, 1), "checkpoint.resume=must")
    assert job.codes[0] == 1
    (problem,) = job.problems
    assert problem == (
        f"checkpoint.resume=must, but no checkpoint in {tmp_path}/run/checkpoints verifies: "
        "name a run that has saved one, or set checkpoint.resume=auto"
    )


SHORT = (*OVERRIDES, "train.steps=4", "optim.warmup=0", *layout(2, 1))


@pytest.fixture(scope="module")
def short_run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> PoolJob:
    """A finished run of four steps."""
    return ranks.train(tmp_path_factory.mktemp("short") / "run", *SHORT, "checkpoint.resume=never")


@pytest.fixture
def finished(short_run: PoolJob, tmp_path: Path) -> Path:
    """A copy of its folder."""
    return Path(shutil.copytree(short_run.folder, tmp_path / "run"))


def test_resume_never_refuses_an_existing_checkpoint(ranks: RankPool, finished: Path, tmp_path: Path) -> None:
    job = ranks.fit(finished, *SHORT, "checkpoint.resume=never")
    assert job.codes[0] == 1
    (problem,) = job.problems
    assert problem == (
        f"checkpoint.resume=never, but {tmp_path}/run/checkpoints/step_4 exists: "
        "set checkpoint.resume=auto to go on from it, or log.dir to another folder"
    )


def test_a_checkpoint_of_another_model_is_refused(ranks: RankPool, finished: Path) -> None:
    job = ranks.fit(finished, *SHORT, "model.ffn=128")
    assert job.codes[0] == 1
    (problem,) = job.problems
    assert problem == (
        "model.ffn was 256 when step 4 was saved, and is 128 now: set model.ffn=256 to go on, or name=NEW to train another run"
    )


BEYOND = "the newest checkpoint is of step 4, and the run ends at step 3: nothing to train; set train.steps=8 to train longer"
# fmt: off
DONE = (  # the requested length once step 4 is saved, and the message
    ("train.steps=4",    "step 4 of 4 is done: nothing to train; set train.steps=8 to train longer"),
    ("train.steps=3",    BEYOND),
    ("train.tokens=512", "step 4 of 4 is done: nothing to train; set train.tokens=1024 to train longer"),
)
# fmt: on


@pytest.mark.parametrize(("length", "said"), DONE)
def test_a_finished_run_names_the_override_that_trains_longer(
    ranks: RankPool, short_run: PoolJob, finished: Path, length: str, said: str
) -> None:
    overrides = [*SHORT, *(["train.steps=null"] if "tokens" in length else []), length]
    job = ranks.train(finished, *overrides)
    assert job.rows == short_run.rows
    assert job.lines[-1] == said
    further = said.partition("; set ")[2].removesuffix(" to train longer")
    assert ranks.train(finished, *overrides[:-1], further).rows[-1]["step"] == 8


def test_a_run_past_its_end_says_what_it_has_read(ranks: RankPool, tmp_path: Path) -> None:
    """Not what the length asks for that was set since."""
    words = ("quickstart", *without_repeats(*OVERRIDES[1:], "data=stdlib", *layout(1, 0), "optim.warmup=1", "train.steps=2"))
    first = ranks.train(tmp_path / "run", *words)
    again = ranks.train(tmp_path / "run", *without_repeats(*words, "train.steps=1", "optim.warmup=0"))
    found = [next(line for line in job.lines if line.startswith("data: ")) for job in (first, again)]
    assert "; the run reads 256, " in found[0]
    assert "; the run has read 256, " in found[1]
    assert "nothing to train" in again.lines[-1]


# Through `distrain fit` itself, in another process
LONG = (*OVERRIDES[1:], "optim.schedule=constant", *layout(2, 1), "train.steps=5000")  # it can't end before it is stopped


@pytest.fixture
def start_fit(tmp_path: Path):
    """Start `distrain fit` of the long run."""
    left = []

    def start() -> subprocess.Popen[str]:
        arguments = without_repeats("conf=quickstart", *LONG, f"log.dir={tmp_path}", "name=run")
        process = subprocess.Popen(
            [sys.executable, "-m", "distrain", "fit", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        left.append(process)
        return process

    yield start
    for process in left:
        end_child(process)


def until_a_step(process: subprocess.Popen[str]) -> None:
    """Read the run's output up to its first step."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            return
    pytest.fail("it ended before a step")


def processes(folder: Path) -> dict[int, str]:
    """The processes whose command line names the folder: RANK of a rank, "" of any other."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (
                (each / "cmdline").read_text(errors="replace"),
                (each / "environ").read_text(errors="replace").split("\0"),
            )
        except OSError:
            continue
        if str(folder) in command:
            place = next((word.removeprefix("RANK=") for word in environment if word.startswith("RANK=")), "")
            found[int(each.name)] = "" if "pipe_agent.py" in command else place
    return found


def test_sigterm_to_fit_saves_and_the_next_attempt_resumes(start_fit, ranks: RankPool, tmp_path: Path) -> None:
    process = start_fit()
    until_a_step(process)
    process.send_signal(signal.SIGTERM)
    said, wrong = process.communicate(timeout=DEADLINE)
    assert (process.returncode, wrong) == (STOPPED, "distrain: stopped; a checkpoint is saved: the same command continues\n")
    assert re.search("SIGTERM: finishing the (first )?step and saving; Ctrl-C stops at once", said)
    assert not processes(tmp_path)
    reached = read_step_rows(tmp_path / "run")[-1]["step"]
    again = ranks.train(tmp_path / "run", "quickstart", *LONG, f"train.steps={reached + 3}")
    assert f"resumes from step {reached}" in again.lines
    job = ranks.train(tmp_path / "whole", "quickstart", *LONG, f"train.steps={reached + 3}")
    assert job.figures("loss") == again.figures("loss")


def test_a_killed_rank_ends_the_run_and_is_named(start_fit, tmp_path: Path) -> None:
    """Rank 0, which writes the metrics; tests/launch/test_hangs.py kills another one."""
    process = start_fit()
    until_a_step(process)
    (pid,) = (pid for pid, place in processes(tmp_path).items() if place == "0")
    os.kill(pid, signal.SIGKILL)
    _, wrong = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    (line,) = wrong.splitlines()
    assert line.startswith("distrain: rank 0 was killed by SIGKILL, perhaps by the kernel for want of memory, at step ")
    assert line.endswith(f"; its log is {tmp_path}/run/ranks/0.log")
    assert not processes(tmp_path)
