"""A run that hangs is ended and the hung rank is named; a run continues after a fault, and its goodput counts the cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.held_step import FailingSteps
from distrain.tests.fakes.idle_rank import IdleRank, written_stack
from distrain.tests.fakes.one_process import reference_curve
from distrain.trainer.launch.goodput import GoodputMeter
from distrain.trainer.launch.rank.log import RankLog, RemoteLog
from distrain.trainer.launch.single_host import launch_local_ranks
from distrain.trainer.launch.supervisor import supervisor
from distrain.trainer.launch.supervisor.outcome import Outcome, RankOutcome, failure_text
from distrain.trainer.launch.supervisor.rank_record import RankRecord
from distrain.trainer.launch.supervisor.watchdog import STACKS_WAIT, Watchdog, hung_rank, stack_location
from distrain.trainer.launch.watchdog_times import load_watchdog, save_phase_times

LOG = RankLog(Path("rank.log"), 0)
BEGIN = """
import msgspec, os, signal, sys, time
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.launch.rank.group_record import GroupRecord, Recorded
from distrain.trainer.launch.rank.hang_answer import HangAnswer
channel, rank = Channel.from_environment(), int(os.environ["RANK"])
answer = HangAnswer(channel)
def read():
    begun = 4 if rank == 1 else 5
    recent = tuple(Recorded(number, "all_reduce", 2**22, number < 5) for number in range(3, begun + 1))
    return [GroupRecord(name="1", label="data", ranges=((0, 2, 1),), begun=begun, recent=recent)]
def wait():
    time.sleep(1000)
def evaluate():
    time.sleep(1000)
channel.report_step(6); channel.report_step(7)
"""


def test_a_stack_has_the_location_of_the_main_thread_in_this_package() -> None:
    assert stack_location(written_stack("agreed")) == "agreed (train.py line 90)"
    assert stack_location(()) == ""


# fmt: off
HUNG_RANKS = (
    ([{"step": 7}, {"step": 6}, {"step": 7}],                   1, "no progress for 100 s, while others are at step 7"),
    ([{"step": 0}, {"step": None}],                             1, "no progress for 100 s, while others are at step 0"),
    ([{"step": 7, "stack": written_stack("a")}, {"step": 7}],         1, "no progress for 100 s, and it does not answer"),
    ([{"step": 7, "stack": written_stack("a")}, {"step": 7, "stack": written_stack("b")}, {"step": 7, "stack": written_stack("a")}],
                                                                1, ("no progress for 100 s; it is in b (train.py line 90), "
                                                                    "others are in a (train.py line 90)")),
    ([{"step": 7, "stack": written_stack("a")}] * 2,                  0, ("no progress for 100 s, and no other rank is further; "
                                                                    "all are in a (train.py line 90)")),
    ([{"step": 7}, {"step": 7}],                                0, "no progress for 100 s, and no other rank is further; none answers"),
    ([{"step": 7, "stack": ("?",)}, {"step": 7, "stack": written_stack("a")}, {"step": 7, "stack": ("?",)}],
                                                                0, ("no progress for 100 s, and no other rank is further; "
                                                                    "1 of 3 are in a (train.py line 90)")),
    ([{"step": 7, "stack": ("?",)}] * 2,                      0, "no progress for 100 s, and no other rank is further"),
)
# fmt: on


@pytest.mark.parametrize(("states", "rank", "why"), HUNG_RANKS)
def test_the_rank_that_holds_the_others_up_is_named(states: list[dict[str, Any]], rank: int, why: str) -> None:
    hang = hung_rank([IdleRank(number, **state) for number, state in enumerate(states)], 100.0)
    assert (hang.rank.rank, hang.why) == (rank, why)


# fmt: off
STANDING_OUT = (
    ([{"step": 6}, {"step": 7}],                                            True),
    ([{"step": 6}, {"step": 6}, {"step": 7}, {"step": 7}, {"step": 7}],     True),
    ([{"step": 6}] * 2 + [{"step": 7}],                                     False),
    ([{"step": 7}, {"step": 7, "stack": written_stack("a")}],               True),
    ([{"step": 7}] * 2 + [{"step": 7, "stack": written_stack("a")}],        False),
    ([{"step": 7, "stack": written_stack(name)} for name in "aba"],         True),
    ([{"step": 7, "stack": written_stack(name)} for name in "ab"],          False),
    ([{"step": 7, "stack": written_stack(name)} for name in "abcd"],        False),
    ([{"step": 7, "stack": written_stack("a")}] * 3,                        False),
    ([{"step": 7}] * 3,                                                     False),
    ([{"step": 7}],                                                         True),
)
# fmt: on


@pytest.mark.parametrize(("states", "stands_out"), STANDING_OUT)
def test_a_rank_stands_out_where_few_are_as_it_is(states: list[dict[str, Any]], stands_out: bool) -> None:
    assert hung_rank([IdleRank(number, **state) for number, state in enumerate(states)], 100.0).stands_out == stands_out


@pytest.mark.parametrize(("fates", "stands_out"), [(("hung", ""), True), (("hung with others", ""), False)])
def test_a_hang_is_recorded_with_whether_its_rank_stands_out(fates: tuple[str, str], stands_out: bool, tmp_path: Path) -> None:
    rank = RankRecord(0, RemoteLog(tmp_path), "a (device 0)")
    rank.record_hang("no progress", stands_out=stands_out)
    rank.record_end(-9)
    assert rank.outcome is not None
    assert (rank.outcome.fate, rank.outcome.fault) == fates
    assert failure_text(rank.outcome).startswith("rank 0 on a (device 0) hung")


# fmt: off
# phase, longest seconds of phases in this attempt, and in earlier attempts, limit in seconds
LIMITS: tuple[tuple[str, dict[str, float], dict[str, float], float], ...] = (
    ("start", {},                           {},              200.0),
    ("start", {},                           {"start": 4.0},   40.0),
    ("first", {"start": 4.0},               {},              200.0),
    ("step",  {"first": 1.0},               {},               20.0),
    ("step",  {"first": 30.0},              {},              300.0),
    ("step",  {"first": 30.0, "step": 5.0}, {},               50.0),
    ("step",  {"first": 30.0},              {"step": 1.0},    20.0),
    ("save",  {"step": 5.0},                {},              200.0),
    ("save",  {"save": 0.1},                {},               20.0),
    ("save",  {"save": 0.1},                {"save": 60.0},  600.0),
)
# fmt: on


@pytest.mark.parametrize(("phase", "longest", "seen", "seconds"), LIMITS)
def test_the_limit_is_learned_from_completed_phases(phase: str, longest: dict[str, float], seen: dict[str, float], seconds: float) -> None:
    ranks = [IdleRank(0, phase=phase, longest=longest)]
    assert Watchdog(patience=20.0, seen=seen).limit(ranks, ranks) == seconds


def test_steps_of_a_batch_that_grows_may_take_as_much_longer(tmp_path: Path) -> None:
    run = load_recipe("quickstart", ["train.batch=32", "train.rampup.batch=[2,16]", "train.rampup.until=[1e4,2e4]", "launch.patience=20"])
    watchdog = load_watchdog(run, tmp_path)
    assert watchdog.growth == 8
    for phase, seconds in (("step", 8 * 10 * 5.0), ("save", 200.0)):
        ranks = [IdleRank(0, phase=phase, longest={"step": 5.0})]
        assert watchdog.limit(ranks, ranks) == seconds
    save_phase_times(run, tmp_path, Watchdog(seen={"step": 7.0}), resumed=False)
    ranks = [IdleRank(0, phase="step", longest={})]
    assert load_watchdog(run, tmp_path).limit(ranks, ranks) == 8 * 10 * 7.0
    assert load_watchdog(load_recipe("quickstart", []), tmp_path).growth == 1


def test_learned_durations_are_kept_for_the_next_attempt(tmp_path: Path) -> None:
    watchdog = Watchdog(patience=100.0)
    program = "channel.report_phase('save'); time.sleep(0.3); channel.report_step(8); "
    program += "channel.report_phase('end'); time.sleep(0.2); channel.report_done()"
    for _ in range(2):
        assert run(tmp_path, program, watchdog).status == 0
    assert set(watchdog.seen) == {"start", "first", "step", "save", "end"}
    assert watchdog.seen["save"] >= 0.3
    assert watchdog.seen["end"] >= 0.2, "a rank's end completes its last phase"


# fmt: off
# phase, step, limit in seconds; an attempt before was killed as hung at step 7 after 30 s
AFTER_TIMEOUT: tuple[tuple[str, int | None, float], ...] = (
    ("step",  None, 60.0),
    ("step",  7,    60.0),
    ("step",  8,    20.0),   # past that step
    ("save",  7,    20.0),
    ("first", None, 10.0 * 20.0),
)
# fmt: on


@pytest.mark.parametrize(("phase", "step", "seconds"), AFTER_TIMEOUT)
def test_a_phase_that_timed_out_gets_a_longer_limit_until_the_run_is_past_its_step(phase: str, step: int | None, seconds: float) -> None:
    watchdog = Watchdog(patience=20.0, seen={"step": 1.0, "save": 1.0})
    before = [IdleRank(rank, phase="step", step=7) for rank in range(2)]
    watchdog.note_timeout(before, before, 30.0)
    watchdog.learn(before[0])
    ranks = [IdleRank(0, phase=phase, step=step)]
    assert watchdog.limit(ranks, ranks) == seconds
    watchdog.learn(ranks[0])
    assert ("step" in watchdog.timed_out) == (step != 8)


class CountedDict(dict[str, float]):
    """Counts its lookups."""

    lookups = 0

    def get(self, key: str, default: float = 0.0) -> float:  # type: ignore[override]
        CountedDict.lookups += 1
        return super().get(key, default)


def test_a_check_of_many_ranks_reads_each_rank_once_for_each_phase() -> None:
    ranks = [IdleRank(rank, phase="save" if rank % 2 else "step", step=3, longest=CountedDict(step=1.0)) for rank in range(500)]
    assert Watchdog(patience=20.0).overdue_seconds(ranks, ranks) is None
    assert 0 < CountedDict.lookups <= 2 * len(ranks)


def test_a_run_is_overdue_when_no_rank_makes_progress() -> None:
    at: dict[str, Any] = {"phase": "step", "step": 3, "longest": {"first": 1.0}}
    began, watchdog = time.monotonic(), Watchdog(patience=DEADLINE)
    slow, quick = IdleRank(0, **at, since=began - 2 * DEADLINE), IdleRank(1, **at, since=began)
    assert watchdog.overdue_seconds([slow, quick], [slow, quick]) is None
    assert 0 <= (watchdog.overdue_seconds([slow], [slow]) or 0) - 2 * DEADLINE <= time.monotonic() - began
    assert watchdog.overdue_seconds([], [slow]) is None


def run(folder: Path, program: str, watchdog: Watchdog | None = None) -> Outcome:
    command = [sys.executable, "-c", BEGIN + program]
    watchdog = watchdog or Watchdog(patience=1.0)
    return launch_local_ranks(command, ranks=3, folder=folder, environment=os.environ, show=print, grace=DEADLINE, watchdog=watchdog)


def test_a_rank_that_is_stopped_is_named_and_the_others_write_their_stacks(tmp_path: Path) -> None:
    watchdog = Watchdog(patience=1.0)
    unasked = "channel.report_collectives(msgspec.to_builtins(read()))\n"
    outcome = run(tmp_path, unasked + "rank == 1 and os.kill(os.getpid(), signal.SIGSTOP)\nwait()", watchdog)
    assert outcome.says.startswith("rank 1 hung, at step 7: no progress for ")
    assert outcome.says.endswith(f"s, and it does not answer; its log is {tmp_path / 'ranks' / '1.log'}")
    assert "in wait" in (tmp_path / "ranks" / "2.log").read_text()
    assert {phase: step for phase, (step, _) in watchdog.timed_out.items()} == {"step": 7}


BEHIND = "; data group of ranks 0 to 2: ranks 0, 2 have not finished all_reduce 5 of 4.00 MiB, which rank 1 has not begun (its last is 4)"


def test_a_rank_that_waits_for_something_else_than_the_others_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RECORDS_WAIT", DEADLINE)
    outcome = run(tmp_path, "answer.read = read\nevaluate() if rank == 2 else wait()")
    assert outcome.says.startswith("rank 2 hung, at step 7: no progress for ")
    assert "; it is in evaluate (<string> line " in outcome.says
    assert BEHIND in outcome.says, "its collectives don't make another rank the culprit"


def test_where_all_ranks_are_at_one_line_the_one_that_is_behind_in_their_collectives_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 takes longer than stacks take."""
    monkeypatch.setattr(supervisor, "RECORDS_WAIT", DEADLINE)
    outcome = run(tmp_path, f"answer.read = lambda: (rank == 2 and time.sleep({STACKS_WAIT + 0.5})) or read()\nwait()")
    assert outcome.says.startswith("rank 1 hung, at step 7: no progress for ")
    assert BEHIND in outcome.says
    assert outcome.root_cause is not None
    assert outcome.root_cause.fate == "hung"
    assert '\ncollectives: [{"name": "1", "label": "data", ' in (tmp_path / "ranks" / "2.log").read_text()


def test_a_rank_in_a_long_phase_is_not_killed_yet(tmp_path: Path) -> None:
    """A save that was not seen before may take ten times the patience; at the patience the rank would be killed after 5 s."""
    program = "channel.report_phase('save'); time.sleep(6); channel.report_step(8); channel.report_done()"
    outcome = run(tmp_path, program, Watchdog(patience=2.0))
    assert outcome.status == 0


def outcome_at(step: int, last_step_at: float, *, status: int = 1) -> Outcome:
    rank = RankOutcome(rank=0, code=-9, log=LOG, first_step=0, step=step, last_step_at=last_step_at)
    return Outcome(status=status, ranks=(rank,), rank=0, says="rank 0 was killed by SIGKILL")


def meter_at(folder: Path, now: float) -> GoodputMeter:
    """A meter that began at 0 s, by a clock that stays at a moment."""
    return GoodputMeter(folder=folder, clock=lambda: now, _since=0.0)


def test_goodput_counts_the_seconds_of_steps_that_are_kept(tmp_path: Path) -> None:
    tally, now = meter_at(tmp_path, 200.0), 200.0
    tally.note_first_step(0)
    tally._began = (0, now - 180.0)
    tally.note_end(outcome_at(step=50, last_step_at=now - 80.0))  # 100 s for 50 steps
    tally.note_restart(outcome_at(step=50, last_step_at=now - 80.0))
    tally.note_first_step(40)  # 20 s of them are lost
    tally._began = (40, now - 60.0)
    tally.note_end(outcome_at(step=99, last_step_at=now, status=0))
    assert tally.write_summary() == "goodput 70.0 %: 140 s of 200 s in steps that count; 1 restart, 10 steps done again"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == {"restart": 1, "step": 40, "lost_steps": 10, "says": "rank 0 was killed by SIGKILL"}
    assert rows[1]["goodput"] == pytest.approx(0.7, abs=1e-3)


def test_each_restart_has_a_row_with_its_reason_and_its_hosts(tmp_path: Path) -> None:
    """The second attempt reached no step, so the work of the first is lost once; the fourth and last did not either."""
    tally, now = meter_at(tmp_path, 200.0), 200.0
    failed = outcome_at(step=50, last_step_at=now)
    tally.note_first_step(0)
    tally.note_end(failed)
    tally.note_restart(failed, ", on a, c: spare c for b (it can't be reached)")
    tally.note_end(failed)
    tally.note_restart(replace(failed, says="c did not register"), ", on a, d: spare d for c (it could not be used)")
    tally.note_first_step(40)
    tally.note_end(failed)
    tally.note_restart(failed)
    tally.write_summary()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[:3] == [
        {"restart": 1, "step": 40, "lost_steps": 10, "says": failed.says, "hosts": "on a, c: spare c for b (it can't be reached)"},
        {"restart": 2, "step": 40, "lost_steps": 0, "says": "c did not register", "hosts": "on a, d: spare d for c (it could not be used)"},
        {"restart": 3, "says": failed.says},
    ]
    assert (rows[3]["restarts"], rows[3]["lost_steps"], len(rows)) == (3, 10, 4)


ARGUMENTS = (
    "quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=2",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=3", "train.steps=40",
)  # fmt: skip


def test_a_run_whose_rank_hangs_and_is_killed_names_it_and_continues_with_the_same_losses(tmp_path: Path) -> None:
    """Rank 1 stops in step 12, and rank 0 waits for it in a message; the limit of a start is ten times the patience. In step 22 it dies."""
    arguments = [
        f"conf={ARGUMENTS[0]}",
        *ARGUMENTS[1:],
        "cluster=1x2",
        "checkpoint.every=5",
        "launch.restarts=2",
        "launch.patience=20",
        f"log.dir={tmp_path}",
        "name=run",
    ]
    failing = FailingSteps(tmp_path / "failing", 1, hung=12, killed=22)
    quiet = {**os.environ, **failing.environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    fit = subprocess.run(
        [sys.executable, "-m", "distrain", "fit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=quiet,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    said = fit.stdout
    assert fit.returncode == 0, said
    line = r"rank 1 hung, at step 12: no progress for \d+ s(; it is in .*)?; (\w+ )?group of ranks 0, 1: "
    found = re.search(
        line + r"rank 0 has not finished \w+ (\d+) of [^,]*, which rank 1 has not begun \(its last is (\d+)\); its log is ", said
    )
    assert found, said
    assert int(found[3]) == int(found[4]) + 1
    assert '"label": "dp"' in (tmp_path / "run" / "ranks" / "0.log").read_text()
    assert "restart 1 of 2, from the newest checkpoint" in said
    assert "rank 1 was killed by SIGKILL" in said
    assert "restart 2 of 2, from the newest checkpoint" in said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = list({row["step"]: row["loss"] for row in rows if "loss" in row}.values())
    assert losses == pytest.approx(reference_curve(ARGUMENTS)[0], abs=2e-6, rel=0)
    restarts = [row for row in rows if "restart" in row]
    assert [(each["step"], each["lost_steps"]) for each in restarts] == [(10, 2), (20, 2)]
    shown = subprocess.run([sys.executable, "-m", "distrain", "report", str(tmp_path / "run")], capture_output=True, text=True, check=True)
    page = " ".join(shown.stdout.split())
    assert "2 restarts after faults; goodput " in page
    for step, why in ((10, "rank 1 hung, at step 12: "), (20, "rank 1 was killed by SIGKILL")):
        assert f"restart from step {step}, 2 steps lost: {why}" in page
