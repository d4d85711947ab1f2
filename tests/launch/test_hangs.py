"""A run that hangs is ended, and whom it waits for is named; a run goes on after a fault, and how much that cost is counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distrain.tests.fakes.one_process import reference
from distrain.trainer.launch.goodput import Tally
from distrain.trainer.launch.rank.log import Log
from distrain.trainer.launch.single_host import launch
from distrain.trainer.launch.supervisor.outcome import Ended, RankEnd
from distrain.trainer.launch.supervisor.watchdog import Watchdog, blamed, place
from distrain.trainer.system.end_child import end_child

DEADLINE = 120.0  # seconds, for what takes ten on an idle machine
NOWHERE = Log(Path("rank.log"), 0)
BEGIN = """
import faulthandler, os, signal, sys, time
from distrain.trainer.launch.rank.channel import Talk
talk, rank = Talk.from_environment(), int(os.environ["RANK"])
faulthandler.register(signal.SIGUSR2)
def waits():
    time.sleep(1000)
def evaluates():
    time.sleep(1000)
talk.beat(6); talk.beat(7)
"""


@dataclass
class Silent:
    """A rank of which nothing was heard for a while; `written` is its stack."""

    rank: int
    step: int | None = None
    phase: str = "start"
    since: float = field(default_factory=lambda: time.monotonic() - 100.0)
    longest: dict[str, float] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def stack(self) -> tuple[str, ...]:
        return self.written


def stack(function: str) -> tuple[str, ...]:
    """What faulthandler writes of a thread that waits, and of the main one, which is in this function of the package."""
    return (
        "Thread 0x00007f (most recent call first):",
        '  File "/lib/threading.py", line 320 in wait',
        "",
        "Current thread 0x00007e (most recent call first):",
        '  File "/lib/torch/distributed_c10d.py", line 2800 in all_reduce',
        f'  File "/lib/distrain/trainer/loop/train.py", line 90 in {function}',
        '  File "/lib/distrain/trainer/loop/rank.py", line 145 in <module>',
    )


def test_a_stack_says_where_the_main_thread_is_in_this_package() -> None:
    assert place(stack("agreed")) == "agreed (train.py line 90)"
    assert place(()) == ""


# fmt: off
BLAMED = (
    ([{"step": 7}, {"step": 6}, {"step": 7}],                   1, "nothing for 100 s, while others are at step 7"),
    ([{"step": 0}, {"step": None}],                             1, "nothing for 100 s, while others are at step 0"),
    ([{"step": 7, "written": stack("a")}, {"step": 7}],         1, "nothing for 100 s, and it does not answer"),
    ([{"step": 7, "written": stack("a")}, {"step": 7, "written": stack("b")}, {"step": 7, "written": stack("a")}],
                                                                1, ("nothing for 100 s; it is in b (train.py line 90), "
                                                                    "others are in a (train.py line 90)")),
    ([{"step": 7, "written": stack("a")}] * 2,                  0, ("nothing for 100 s, and no other rank is further; "
                                                                    "all are in a (train.py line 90)")),
    ([{"step": 7}, {"step": 7}],                                0, "nothing for 100 s, and no other rank is further; none answers"),
    ([{"step": 7, "written": ("?",)}, {"step": 7, "written": stack("a")}, {"step": 7, "written": ("?",)}],
                                                                0, ("nothing for 100 s, and no other rank is further; "
                                                                    "1 of 3 are in a (train.py line 90)")),
    ([{"step": 7, "written": ("?",)}] * 2,                      0, "nothing for 100 s, and no other rank is further"),
)
# fmt: on


@pytest.mark.parametrize(("states", "rank", "why"), BLAMED)
def test_the_rank_that_holds_the_others_up_is_named(states: list[dict[str, Any]], rank: int, why: str) -> None:
    member, said = blamed([Silent(number, **state) for number, state in enumerate(states)], 100.0)
    assert (member.rank, said) == (rank, why)


# fmt: off
# phase, what the ranks were through, what earlier starts were, seconds
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
def test_how_long_is_waited_is_learned(phase: str, longest: dict[str, float], seen: dict[str, float], seconds: float) -> None:
    ranks = [Silent(0, phase=phase, longest=longest)]
    assert Watchdog(patience=20.0, seen=seen).limit(ranks, ranks) == seconds


def test_what_was_learned_stays_learned_when_a_run_starts_again(tmp_path: Path) -> None:
    watchdog = Watchdog(patience=100.0)
    program = "talk.phase('save'); time.sleep(0.3); talk.beat(8); talk.phase('end'); time.sleep(0.2); talk.done()"
    for _ in range(2):
        assert run(tmp_path, program, watchdog).status == 0
    assert set(watchdog.seen) == {"start", "first", "step", "save", "end"}
    assert watchdog.seen["save"] >= 0.3
    assert watchdog.seen["end"] >= 0.2, "a rank's end is the end of what it was at last"


# fmt: off
HUNG: tuple[tuple[str, int | None, float], ...] = (  # phase, step, seconds after a start that was taken to hang at step 7 for 30 s
    ("step",  None, 60.0),
    ("step",  7,    60.0),
    ("step",  8,    20.0),   # past it
    ("save",  7,    20.0),
    ("first", None, 10.0 * 20.0),
)
# fmt: on


@pytest.mark.parametrize(("phase", "step", "seconds"), HUNG)
def test_what_was_taken_to_hang_is_waited_for_longer_until_the_run_is_past_it(phase: str, step: int | None, seconds: float) -> None:
    watchdog = Watchdog(patience=20.0, seen={"step": 1.0, "save": 1.0})
    before = [Silent(rank, phase="step", step=7) for rank in range(2)]
    watchdog.hangs(before, before, 30.0)
    watchdog.learn(before[0])
    ranks = [Silent(0, phase=phase, step=step)]
    assert watchdog.limit(ranks, ranks) == seconds
    watchdog.learn(ranks[0])
    assert ("step" in watchdog.hung) == (step != 8)


class Counted(dict[str, float]):
    """Counts how often it is looked into."""

    looks = 0

    def get(self, key: str, default: float = 0.0) -> float:  # type: ignore[override]
        Counted.looks += 1
        return super().get(key, default)


def test_a_look_at_many_ranks_looks_once_at_each_for_each_thing_that_they_are_at() -> None:
    ranks = [Silent(rank, phase="save" if rank % 2 else "step", step=3, longest=Counted(step=1.0)) for rank in range(500)]
    assert Watchdog(patience=20.0).overdue(ranks, ranks) is None
    assert 0 < Counted.looks <= 2 * len(ranks)


def test_a_run_hangs_when_no_rank_comes_further() -> None:
    at: dict[str, Any] = {"phase": "step", "step": 3, "longest": {"first": 1.0}}
    slow, quick = Silent(0, **at), Silent(1, **at, since=time.monotonic())
    assert Watchdog(patience=20.0).overdue([slow, quick], [slow, quick]) is None
    assert Watchdog(patience=20.0).overdue([slow], [slow]) == pytest.approx(100.0, abs=5.0)
    assert Watchdog(patience=20.0).overdue([], [slow]) is None


def run(folder: Path, program: str, watchdog: Watchdog | None = None) -> Ended:
    words = [sys.executable, "-c", BEGIN + program]
    watchdog = watchdog or Watchdog(patience=1.0)
    return launch(words, ranks=3, folder=folder, environment=os.environ, show=print, grace=DEADLINE, watchdog=watchdog)


def test_a_rank_that_is_stopped_is_named_and_the_others_write_their_stacks(tmp_path: Path) -> None:
    watchdog = Watchdog(patience=1.0)
    ended = run(tmp_path, "rank == 1 and os.kill(os.getpid(), signal.SIGSTOP)\nwaits()", watchdog)
    assert ended.says.startswith("rank 1 hung, at step 7: nothing for ")
    assert ended.says.endswith(f"s, and it does not answer; its log is {tmp_path / 'ranks' / '1.log'}")
    assert "in waits" in (tmp_path / "ranks" / "2.log").read_text()
    assert {phase: step for phase, (step, _) in watchdog.hung.items()} == {"step": 7}


def test_a_rank_that_waits_for_something_else_than_the_others_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path, "evaluates() if rank == 2 else waits()")
    assert ended.says.startswith("rank 2 hung, at step 7: nothing for ")
    assert "; it is in evaluates (<string> line " in ended.says


def test_a_rank_that_is_at_something_long_does_not_hang_yet(tmp_path: Path) -> None:
    ended = run(tmp_path, "talk.phase('save'); time.sleep(4); talk.beat(8); talk.done()")
    assert ended.status == 0


def ended(step: int, beat: float, *, status: int = 1) -> Ended:
    end = RankEnd(rank=0, code=-9, log=NOWHERE, first=0, step=step, beat=beat)
    return Ended(status=status, ranks=(end,), rank=0, says="rank 0 was killed by SIGKILL")


def test_goodput_counts_the_seconds_of_steps_that_are_kept(tmp_path: Path) -> None:
    tally, now = Tally(folder=tmp_path), time.monotonic()
    tally._since = now - 200.0
    tally.begins(0)
    tally._began = (0, now - 180.0)
    tally.ends(ended(step=50, beat=now - 80.0))  # 100 s for 50 steps
    tally.starts_again(ended(step=50, beat=now - 80.0))
    tally.begins(40)  # 20 s of them are lost
    tally._began = (40, now - 60.0)
    tally.ends(ended(step=99, beat=now, status=0))
    assert tally.said() == "goodput 70.0 %: 140 s of 200 s in steps that count; 1 restart, 10 steps done again"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == {"restart": 1, "step": 40, "lost_steps": 10, "says": "rank 0 was killed by SIGKILL"}
    assert rows[1]["goodput"] == pytest.approx(0.7, abs=1e-3)


WORDS = (
    "quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=2",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=3", "train.steps=100",
)  # fmt: skip


def test_a_run_of_which_a_rank_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    words = [f"conf={WORDS[0]}", *WORDS[1:], "cluster=1x2", "checkpoint.every=5", "launch.restarts=1", f"log.dir={tmp_path}", "name=run"]
    pipe = subprocess.PIPE
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HANGS_TEST": str(tmp_path)}
    fit = subprocess.Popen([sys.executable, "-m", "distrain", "fit", *words], stdout=pipe, stderr=subprocess.STDOUT, env=quiet, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + DEADLINE
    try:
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 12):
            assert fit.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(rank_of(tmp_path, 1), signal.SIGKILL)
        said, _ = fit.communicate(timeout=DEADLINE)
    finally:
        end_child(fit)
    assert fit.returncode == 0, said
    assert "rank 1 was killed by SIGKILL" in said
    assert "restart 1 of 1, from the newest checkpoint" in said
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = list({row["step"]: row["loss"] for row in rows if "loss" in row}.values())
    assert losses == pytest.approx(reference(WORDS)[0], abs=2e-6, rel=0)
    (restart,) = (row for row in rows if "restart" in row)
    assert restart["step"] % 5 == 0
    assert restart["lost_steps"] < 10
    shown = subprocess.run([sys.executable, "-m", "distrain", "report", str(tmp_path / "run")], capture_output=True, text=True, check=True)
    assert "1 restart after faults; from step " in shown.stdout


def rank_of(folder: Path, rank: int) -> int:
    """The process of a rank of the run that this test started."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            known = (process / "environ").read_bytes().split(b"\0")
            if {f"HANGS_TEST={folder}".encode(), f"RANK={rank}".encode()} <= {*known} and b"keeper" not in (
                process / "cmdline"
            ).read_bytes():
                return int(process.name)
        except OSError:
            continue
    raise AssertionError("no such rank")
