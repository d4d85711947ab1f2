"""Checkpoints that are written while training goes on: the state of their step, whatever steps change meanwhile."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.rank_pool import choose_program
from distrain.tests.fakes.rank_threads import run_on_ranks
from distrain.trainer.engines.quantized_moment import QuantizedMoment
from distrain.trainer.engines.rank_parameter import OptimizerShard
from distrain.trainer.launch.rank.channel import STOPPED, ignore_text
from distrain.trainer.loop.checkpoint import BackgroundWriter, Gather, SaveFailed, Shard, find_newest, whole_slice
from distrain.trainer.loop.checkpoint.host_copy import HostCopy
from distrain.trainer.loop.state.save_pauses import SavePauses
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.checkpoints import MANIFEST, checkpoint_steps
from distrain.trainer.rundir.files import write_launch_files
from distrain.trainer.rundir.measured_run import read_measured_run

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool


def shard(name: str, tensor: torch.Tensor, kind: str = "weight") -> Shard:
    return Shard(slice=whole_slice(name, kind, tuple(tensor.shape)), tensor=tensor)


# The copy


def test_a_copy_keeps_what_the_shards_were() -> None:
    """Of every type, without elements, of one element with odd strides, and of a part of a tensor."""
    whole = torch.arange(24.0).view(4, 6)
    tensors = [
        *(torch.arange(5).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)),
        torch.empty(0),
        torch.empty(0, 3),
        torch.tensor(7.0),
        torch.arange(6.0)[::6],
        whole[:, 2:4],
        whole.t(),
        torch.nn.Parameter(torch.ones(3)),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    copies = HostCopy().take(shard(f"w{at}", tensor) for at, tensor in enumerate(tensors))
    for tensor in tensors:
        tensor.data.zero_()
    for each, was, at in zip(copies, before, range(len(before)), strict=True):
        assert (each.slice.name, each.tensor.dtype, each.tensor.shape) == (f"w{at}", was.dtype, was.shape)
        assert torch.equal(each.tensor, was)
        assert not each.tensor.requires_grad


def test_the_memory_of_a_copy_is_used_again() -> None:
    copy, sources = HostCopy(), [shard("a", torch.ones(100)), shard("b", torch.ones(3, dtype=torch.float64))]
    places = [each.tensor.data_ptr() for each in copy.take(sources)]
    assert copy.bytes == 448 + 64  # each from a multiple of 64
    assert [each.tensor.data_ptr() for each in copy.take(sources)] == places
    assert copy.bytes == 448 + 64
    copy.take([shard("a", torch.ones(1000))])
    assert copy.bytes == 4032


def test_what_was_made_for_a_save_is_not_copied_again() -> None:
    """Moments in 8 bits are widened for a save; beside them the host holds a copy of the weights alone."""
    moment, made = QuantizedMoment(torch.full((8,), 3, dtype=torch.uint8), torch.ones(1), {0: 0}, signed=True), torch.arange(8.0)
    part = OptimizerShard(
        shard=None,  # type: ignore[arg-type]
        tied=False,
        start=0,
        length=8,
        weight=made,
        state={"exp_avg": moment, "exp_avg_sq": made},
        offset=0,
        copies="data",
    )
    rows = {kind: replace(shard("w", held, kind), is_copy=part.is_widened(kind)) for kind, held in (("weight", made), *part.states())}
    assert [kind for kind, each in rows.items() if each.is_copy] == ["exp_avg"]
    copy = HostCopy()
    taken = {each.slice.kind: each.tensor for each in copy.take(rows.values())}
    assert copy.bytes == 2 * 64
    assert taken.keys() == rows.keys()
    assert [kind for kind in rows if taken[kind].data_ptr() == rows[kind].tensor.data_ptr()] == ["exp_avg"]


# The thread


def test_a_checkpoint_holds_what_the_shards_were_when_it_was_begun(tmp_path: Path) -> None:
    """The ranks' threads are held up in their first message until the shards have changed."""
    changed = threading.Event()

    def work(rank: int, gather: Gather) -> tuple[bool, bool, int, set[str]]:
        def held_up(line: str) -> Sequence[str]:
            assert changed.wait(DEADLINE)
            return gather(line)

        tensor, progress, writer = torch.full((40, 2), 1.0 + rank), set[str](), BackgroundWriter()
        writer.start(tmp_path, 3, [shard(f"w{rank}", tensor)], extra={}, keep=2, rank=rank, world=2, gather=held_up)
        was_done = writer.is_done
        tensor.zero_()
        gather("")  # both have changed theirs
        changed.set()
        saved = writer.result(progress.add)
        return was_done, writer.is_busy, saved.step, progress

    assert [each[:3] for each in run_on_ranks(2, work)] == [(False, False, 3)] * 2
    found = find_newest(tmp_path).checkpoint
    assert found is not None
    for rank in range(2):
        (file,) = (tmp_path / "step_3").glob(f"weight.{rank}.*")
        assert file.read_bytes()[-320:] == torch.full((80,), 1.0 + rank).numpy().tobytes()


def test_progress_of_the_thread_reaches_who_waits(tmp_path: Path) -> None:
    """It has written its files when it gathers for the second time, and goes on once that was heard."""
    heard, calls = threading.Event(), list[str]()

    def gather(line: str) -> Sequence[str]:
        calls.append(line)
        assert len(calls) != 2 or heard.wait(DEADLINE)
        return [line]

    writer = BackgroundWriter()
    writer.start(tmp_path, 1, [shard("w", torch.ones(2))], extra={}, keep=2, gather=gather)
    writer.result(lambda name: heard.set() if name == "write" else None)


def test_what_the_thread_raises_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    for _ in range(2):  # it can be used again
        writer.start(tmp_path, 1, [shard("w", torch.ones(2, dtype=torch.bfloat16))], extra={}, keep=2)
        with pytest.raises(SaveFailed, match=r"step 1 was not saved: w is torch\.bfloat16"):
            writer.result(ignore_text)
        assert not writer.is_busy


def test_a_rank_without_memory_for_the_copy_fails_the_save_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's copy fails; the save fails on both, and the next one works."""
    take = HostCopy.take

    def failing_take(self: HostCopy, shards: Any) -> list[Shard]:
        found = list(shards)
        if found[0].slice.name == "w1" and not self.bytes:
            self._memory = torch.empty(1, dtype=torch.uint8)
            raise RuntimeError("can't allocate memory")
        return take(self, found)

    monkeypatch.setattr(HostCopy, "take", failing_take)

    def work(rank: int, gather: Gather) -> tuple[str, int]:
        writer, ranks = BackgroundWriter(), {"extra": {}, "keep": 2, "rank": rank, "world": 2, "gather": gather}
        writer.start(tmp_path, 1, [shard(f"w{rank}", torch.ones(2))], **ranks)
        with pytest.raises(SaveFailed) as failed:
            writer.result(ignore_text)
        writer.start(tmp_path, 2, [shard(f"w{rank}", torch.ones(2))], **ranks)
        return str(failed.value), writer.result(ignore_text).step

    says = "step 1 was not saved: no copy in the host's memory: can't allocate memory (rank 1)"
    assert run_on_ranks(2, work) == [(says, 2)] * 2


# What is recorded


def test_each_save_has_its_own_pauses() -> None:
    pauses = SavePauses(100.0)
    pauses.add(1.0)
    pauses.add(2.0)
    assert pauses.end(110.0) == {"save_pause": 3.0, "save_interval": 10.0}
    pauses.add(0.5)
    assert pauses.end(114.0) == {"save_pause": 0.5, "save_interval": 4.0}
    pauses.add(2.5)
    assert pauses.end(120.0, 2.0) == {"save_pause": 2.5, "save_interval": 6.0, "save_end_wait": 2.0}


# Runs

SMALL = (
    *("quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.steps=8", "train.evaluate.every=0", "optim.warmup=0"),
    *("train.seq=16", "train.batch=4", "train.microbatch=1", "cluster.gpus=2", "checkpoint.keep=9", "log.every=1", "checkpoint.every=2"),
)
BACKGROUND = "checkpoint.background=true"
LAYOUTS = (
    ("engine=zero", "parallel.zero=2"),
    ("engine=native", "parallel.zero=1", "parallel.offload.optimizer=true", "train.precision=bf16"),
    ("engine=native", "parallel.zero=3"),
    ("engine=native", "parallel.pp=2", "parallel.schedule=pipedream_2bw", "model.tied=false"),
    ("engine=native", "parallel.sync={every: 2, outer: {momentum: 0.9}}"),
    ("engine=pipe", "parallel.pp=2"),
)


def contents(job: PoolJob) -> dict[int, Any]:
    """The hashes of each checkpoint's files, and what else it records."""
    manifests = {step: json.loads((job.folder / f"checkpoints/step_{step}" / MANIFEST).read_text()) for step in saved_steps(job)}
    return {step: (each["files"], each["extra"]["first"], each["extra"]["engine"]) for step, each in manifests.items()}


def on_host(*words: str) -> int:
    """The planned bytes of a node's host."""
    memory = make_plan(load_recipe(words[0], words[1:])).memory
    assert memory
    return memory.host.node if memory.host else 0


def saved_steps(job: PoolJob) -> list[int]:
    return checkpoint_steps(job.folder / "checkpoints")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout))
def test_checkpoints_are_those_of_a_run_that_waits_for_each(ranks: RankPool, tmp_path: Path, layout: tuple[str, ...]) -> None:
    """To the bit, though each is written under the next two steps."""
    choose_program(tmp_path, "spoiled", {"late": "late_writes"})
    words = (*SMALL, *layout, "checkpoint.every=4", "checkpoint.final=false", "train.steps=10")
    waiting, late = ranks.train(tmp_path / "waiting", *words), ranks.train(tmp_path / "late", *words, BACKGROUND)
    assert late.figures("loss") == waiting.figures("loss")
    assert saved_steps(late) == [8, 4]
    assert contents(late) == contents(waiting)
    snapshots = on_host(*words, BACKGROUND) - on_host(*words)
    assert sum(file["bytes"] for file in contents(late)[8][0].values()) == pytest.approx(snapshots, rel=0.03)  # with headers
    write_launch_files(run := load_recipe(words[0], [*words[1:], BACKGROUND]), make_plan(run), late.folder)
    offloads = any("offload" in word for word in layout)
    assert ("on the host" in [each.name for each in read_measured_run(late.folder).memory]) == offloads, "no step holds a copy"
    saves = [
        at for at, line in enumerate(late.lines) if re.fullmatch(r"saved step [48] in .* MiB\); training waited [0-9.]+ s(, .*)?", line)
    ]
    steps = [next(at for at, line in enumerate(late.lines) if re.match(rf"step +{step}/10 ", line)) for step in (6, 10)]
    assert len(saves) == 2
    assert steps[0] - 3 <= saves[0] < steps[1] - 1, late.lines  # after the step that it was written under; two late ones are logged later
    size = sum(file["bytes"] for file in contents(late)[4][0].values())
    for job in (waiting, late):
        assert [(row["step"], row["save_bytes"]) for row in job.saves] == [(4, size), (8, size)]
        assert all(0 < row["save_pause"] <= row["save_interval"] for row in job.saves)
    assert all(row["save_pause"] >= row["save_seconds"] for row in waiting.saves)
    assert not any("save_end_wait" in row for row in waiting.saves), "all of their pauses are before steps"
    assert [row["step"] for row in late.saves if "save_end_wait" in row] in ([], [8]), "the last may be waited for after the last step"


def test_an_attempt_that_is_stopped_notes_what_it_waits_for_its_last_save(ranks: RankPool, tmp_path: Path) -> None:
    job = ranks.fit(tmp_path / "run", *SMALL, BACKGROUND, signals=[(3, 0, signal.SIGTERM)])
    assert set(job.codes) == {STOPPED}
    *before, last = job.saves
    assert not any("save_end_wait" in row for row in before)
    assert 0 < last["save_end_wait"] < last["save_pause"]
    assert read_measured_run(job.folder).saves.pause == pytest.approx(sum(row["save_pause"] for row in job.saves) - last["save_end_wait"])


def test_a_save_that_fails_is_a_warning_and_the_next_one_works(ranks: RankPool, tmp_path: Path) -> None:
    """Those of steps 4 and 8, the last; the run has trained to its end, and says what it resumes from."""
    choose_program(tmp_path, "spoiled", {"run": "failed_writes slow_copies"})
    job = ranks.fit(tmp_path / "run", *SMALL, BACKGROUND)
    assert set(job.codes) == {1}
    assert saved_steps(job) == [6, 2]
    assert len(job.figures("loss")) == 8
    reason = "the disk can only be read (rank 1)"
    assert [line for line in job.lines if "was not saved" in line] == [
        f"warning: step 4 was not saved: {reason}; training continues",
        f"warning: step 8 was not saved: {reason}",
    ]
    assert [(row["step"], "save_failed" in row, "save_seconds" in row) for row in job.saves] == [
        (step, step in (4, 8), step in (2, 6)) for step in (2, 4, 6, 8)
    ]
    assert all(0.2 <= row["save_pause"] <= row["save_interval"] for row in job.saves), "training waits for the copy"
    assert any("trained to step 8, which could not be saved: make room and start it again, and it resumes from step 6" in each
               for each in job.problems)  # fmt: skip


def test_a_stopped_run_ends_with_its_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """A stop request comes while the save of step 4 is under way: both are complete when the run ends, and it resumes."""
    choose_program(tmp_path, "spoiled", {"run": "slow_writes"})
    job = ranks.fit(tmp_path / "run", *SMALL, "checkpoint.every=4", BACKGROUND, signals=[(4, 0, signal.SIGTERM)])
    assert set(job.codes) == {STOPPED}
    last, *before = saved_steps(job)
    assert last > 4
    assert before == [4]
    first, second = job.saves
    assert (first["step"], second["step"]) == (4, last)
    assert second["save_pause"] > 0.5 * second["save_seconds"], "the run waits for it at its end"
    assert f"resumes from step {last}" in ranks.train(tmp_path / "run", *SMALL, BACKGROUND).lines


def test_a_run_that_all_ranks_give_up_completes_the_save_under_way(ranks: RankPool, tmp_path: Path) -> None:
    """Gradients are nan from the third step on; the save of step 2 takes longer."""
    choose_program(tmp_path, "spoiled", {"run": "slow_writes poisons_ever"})
    job = ranks.fit(tmp_path / "run", *SMALL, BACKGROUND, "train.skip=1")
    assert set(job.codes) == {1}
    assert saved_steps(job)[-1] == 2
    assert job.saves[0]["step"] == 2, "sinks are open until then"
