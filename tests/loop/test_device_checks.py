"""The checks of all devices in real runs: a device that computes wrong, a slow one and a copy that has departed are named."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
from msgspec import json as encoder

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.rank_pool import PoolJob, RankPool, choose_program
from distrain.tests.rank_programs import device_ranks
from distrain.trainer.launch.restart import run_attempts
from distrain.trainer.loop.devices.checksum import checksum, combined
from distrain.trainer.loop.devices.device_work import CPU, one_thread, read_device, run_work
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.measured_run import read_measured_run

ARGUMENTS = (
    "quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.batch=12", "train.seq=16", "train.microbatch=1",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=0", "optim.schedule=constant", "train.steps=4", "checkpoint.final=false",
    "parallel.dp=auto", "parallel.zero=1",
)  # fmt: skip
THREE, TWO, ONE = ("cluster=1x3", "engine=native"), ("cluster=1x2", "engine=native"), ("cluster=1x1", "engine=native")
HOST = socket.gethostname()
OTHERS = "its bits differ from those of 2 of 3 devices of its kind for the same work"
ITSELF = "it gives other bits than before for the same work"


def fit(ranks: RankPool, folder: Path, *words: str, check: int | str = 2, **faults: tuple[int, int]) -> PoolJob:
    """Train a run that checks its devices; `faults` are those of device_ranks.py, each with its rank and the step or check of it."""
    choose_program(folder, "device")
    (folder / "faults").write_text(json.dumps(faults))
    return ranks.fit(folder, *ARGUMENTS, *words, f"launch.device_check={check}")


# fmt: off
LAYOUTS = (
    "cluster=1x3 engine=native parallel.zero=0", "cluster=1x2 engine=native parallel.zero=3",
    "cluster=1x2 engine=zero parallel.zero=0", "cluster=1x4 engine=pipe parallel.pp=2",
    "cluster=1x4 engine=native parallel.tp=2 parallel.cp=2 parallel.zero=0", "cluster=1x4 engine=native model=tiny_moe parallel.ep=2",
    "cluster=2x2 engine=native parallel.zero=0 parallel.reduce=hierarchical",
    "cluster=2x2 engine=native parallel.sync.every=3 parallel.sync.across=node",
    "cluster=1x2 engine=native parallel.zero=0 parallel.pp=2 parallel.schedule=pipedream model.tied=false",
)
# fmt: on


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_said_of_sound_devices(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    job = ranks.train(
        tmp_path / "run",
        *ARGUMENTS,
        "launch.device_check=1",
        *layout.split(),
        "train.batch=12" if "1x3" in layout else "train.batch=4",
        "train.steps=3",
    )
    assert [line for line in job.lines if "rank " in line] == []
    assert [set(row) & {"loss", "slow_devices"} for row in job.rows] == [{"loss"}] * 3


def test_a_check_changes_no_bit_of_the_training_and_0_is_none(ranks: RankPool, tmp_path: Path) -> None:
    checked = fit(ranks, tmp_path / "checked", *THREE, check=1)
    without = fit(ranks, tmp_path / "without", *THREE, check=0, other_bits=(1, 0), slow=(2, 0))
    assert checked.figures("loss") == without.figures("loss")
    assert checked.figures("grad_norm") == without.figures("grad_norm")
    assert [row.keys() for row in without.rows] == [row.keys() for row in checked.rows]


# A device that computes wrong

OFF = "; launch.device_check=0 trains with it all the same"


def test_a_device_that_departs_from_the_majority_ends_the_run_before_its_first_step(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", *THREE, check="start", other_bits=(1, 0))
    when = "(in the check at step 0, before this start's first step)"
    assert (job.codes, job.problems) == ((1, 1, 1), (f"rank 1 ({HOST}, cpu) computes wrong: {OTHERS} {when}{OFF}",))
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_device_that_no_longer_repeats_itself_ends_the_run_and_the_suspect_checkpoints_are_named(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", *TWO, "checkpoint.every=1", "checkpoint.keep=9", other_bits=(1, 2))  # the third, after step 4
    since = "(in the check after step 4; the last good check was after step 2; checkpoints saved since are suspect: step 3)"
    assert (job.codes, job.problems) == ((1, 1), (f"rank 1 ({HOST}, cpu) computes wrong: {ITSELF} {since}{OFF}",))
    assert job.rows[-1]["step"] == 4
    assert not (tmp_path / "run" / "checkpoints" / "step_4").exists(), "what a wrong device computed is not saved"


def test_a_device_that_gives_two_results_in_one_check_is_wrong(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", *ONE, check="start", one_other_repeat=(0, 0))
    assert job.problems[0].startswith(f"rank 0 ({HOST}, cpu) computes wrong: {ITSELF} ")


def test_of_two_devices_that_differ_neither_is_blamed(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", *TWO, other_bits=(1, 0))
    assert (job.codes, len(job.rows)) == ((0, 0), 4)
    (line,) = (line for line in job.lines if "different bits" in line)
    assert line.startswith(
        f"warning: rank 0 ({HOST}, cpu) and rank 1 ({HOST}, cpu) give different bits for the same work, though they are of"
    )


def test_devices_are_checked_at_the_start_alone_by_default(ranks: RankPool, tmp_path: Path) -> None:
    """And not where no step is left."""
    assert load_recipe("quickstart", []).launch.device_check == "start"
    assert fit(ranks, tmp_path / "run", *TWO, "checkpoint.every=4", check="start", other_bits=(1, 1)).codes == (0, 0)
    job = fit(ranks, tmp_path / "run", *TWO, "checkpoint.every=4", check="start", other_bits=(1, 0))
    assert "nothing to train" in job.lines[-1]
    assert not any("different bits" in line for line in job.lines)


def test_a_device_without_room_for_the_work_is_left_out(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", *THREE, no_room=(0, 0))
    assert (job.codes, [line for line in job.lines if "rank " in line]) == ((0, 0, 0), [])


# A slow device


def test_a_slow_device_is_named_once_and_the_report_shows_it(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = fit(ranks, tmp_path / "run", *THREE, slow=(2, 1))  # from the second check on, after step 2
    assert set(job.codes) == {0}
    (line,) = (line for line in job.lines if "slow" in line)
    found = re.fullmatch(
        rf"warning: rank 2 \({HOST}, cpu\) is slow: it takes ([\d.]+) times as long as the median device of its kind for the same work, "
        r"which may cost up to [\d.]+ % of each step; training continues",
        line,
    )
    assert found
    assert float(found[1]) > device_ranks.SLOWER / 3
    slow = [(row["step"], *row["slow_devices"]) for row in job.rows if "slow_devices" in row]
    assert [(step, row["rank"], row["host"], row["device"]) for step, row in slow] == [(2, 2, HOST, "cpu"), (4, 2, HOST, "cpu")]
    assert all(0 < row["step_share"] < 1 < row["factor"] for _, row in slow)
    run = read_measured_run(tmp_path / "run")
    assert [step for step, _ in run.losses] == [1, 2, 3, 4]
    factor = max(row["factor"] for _, row in slow)
    assert command(["report", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"slow device from step 2 to 4: rank 2 ({HOST}, cpu), {factor:.2f} times the median: up to " in shown


def test_a_device_that_is_slow_in_one_check_and_not_in_the_next_is_not_named(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", *THREE, check="start", slow_once=(2, 0))
    assert ([line for line in job.lines if "slow" in line], len(job.rows)) == ([], 4)


# Copies of the weights


@pytest.mark.parametrize("layout", ["engine=native parallel.zero=0 train.precision=bf16", "engine=zero parallel.zero=2"])
def test_one_bit_of_a_copy_is_found_and_the_weight_and_its_rank_are_named(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    job = fit(ranks, tmp_path / "run", "cluster=1x3", *layout.split(), flipped_weight=(1, 2))
    where = re.fullmatch(r"copies of the weights have departed: (\S+) on rank 1 differs from its copy on rank 0 (.*)", job.problems[0])
    assert (job.codes, len(job.problems)) == ((1, 1, 1), 1)
    assert where
    assert where[2] == "(in the check after step 2; the last good check was after step 0)"


def test_of_two_copies_that_differ_both_ranks_are_named(ranks: RankPool, tmp_path: Path) -> None:
    job = fit(ranks, tmp_path / "run", *TWO, check=1, flipped_weight=(0, 3))
    assert " on rank 1 differs from its copy on rank 0 (in the check after step 3; " in job.problems[0]


# The machine's fault


def test_a_run_restarts_after_a_wrong_device_from_the_checkpoint_of_the_last_good_check(tmp_path: Path) -> None:
    folder, lines = tmp_path / "run", list[str]()
    words = (
        *ONE,
        "launch.device_check=2",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "launch.restarts=1",
        f"log.dir={tmp_path}",
        "name=run",
    )
    run = load_recipe(ARGUMENTS[0], [*ARGUMENTS[1:], *words])
    folder.mkdir()
    (folder / "run.json").write_bytes(encoder.encode(run))
    (folder / "faults").write_text(json.dumps({"other_bits": [0, 2]}))
    program = [sys.executable, device_ranks.__file__, str(folder / "run.json")]
    outcome = run_attempts(run, make_plan(run), (), folder, lines.append, lambda line: None, command=program)
    said = "\n".join(lines)
    assert (outcome.status, [rank.checked for rank in outcome.ranks]) == (0, [4]), said
    assert f"rank 0 exited with 1, at step 3: rank 0 ({HOST}, cpu) computes wrong: {ITSELF} (in the check after step 4; " in said
    assert "restart 1 of 1, from the newest checkpoint" in said
    assert "set aside as suspect_step_N the checkpoints of step 3: " in said
    assert "resumes from step 2" in lines
    assert (folder / "checkpoints" / "suspect_step_3").is_dir()
    losses = {row["step"]: row["loss"] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in row}
    assert sorted(losses) == [1, 2, 3, 4]


# The work and its checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_work_has_the_same_bits_each_time_on_any_number_of_threads(dtype: torch.dtype) -> None:
    cpu, before = torch.device("cpu"), torch.get_num_threads()
    one, two = read_device(0, cpu, dtype), read_device(1, cpu, dtype)
    assert one.bits == two.bits
    assert one.repeats
    assert torch.get_num_threads() == before
    with one_thread():
        assert set(run_work(cpu, dtype, CPU)[1]) == {one.bits}
    assert not read_device(0, cpu, dtype, before=(one.bits or 0) + 1).repeats


def test_the_work_leaves_torch_s_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    read_device(0, torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("count", [2, 1023, 1025, 5000])
def test_a_checksum_changes_with_each_bit_and_with_the_places_of_elements(dtype: torch.dtype, count: int) -> None:
    tensor = torch.arange(count).to(dtype)
    whole = int(checksum(tensor))
    words = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for element in {0, count // 2, count - 1}:
        for bit in range(8 * tensor.element_size()):
            flipped = words.clone()
            flipped[element] ^= torch.tensor(1).to(words.dtype) << bit
            assert int(checksum(flipped)) != whole
    swapped = words.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert int(checksum(swapped)) != whole
    assert int(combined(torch.tensor([1, 2]))) != int(combined(torch.tensor([2, 1])))
