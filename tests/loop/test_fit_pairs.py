"""Prompts and completions train the same curve in every layout, and a stopped run goes on bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from distrain.tests.fakes.one_process import reference_curve
from distrain.tests.fakes.rank_pool import choose_program
from distrain.trainer.rundir.checkpoints import checkpoint_steps

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

STOPPED = 75
BASE = (
    "quickstart", "model=tiny_llama", "model.layers=2", "data=pairs", "data.validation=0.2", "train.steps=6", "train.batch=8",
    "train.seq=32", "train.evaluate={every: 3, batches: 2}", "log.every=1", "optim.warmup=2",
)  # fmt: skip
LAYOUTS: tuple[Words, ...] = (
    ("cluster.gpus=1", "train.microbatch=4"),
    ("cluster.gpus=2", "train.microbatch=1", "parallel.zero=2"),
    ("cluster.gpus=2", "train.microbatch=2", "parallel.pp=2"),
    ("cluster.gpus=2", "train.microbatch=2", "parallel.cp=2"),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The overrides for a file of pairs, whose windows have from 1 to 32 labels that count, and its cache."""
    draw, folder = Random(7), tmp_path_factory.mktemp("pairs")
    sizes = [(draw.choice([2, 10, 25]), draw.choice([1, 8, 30])) for _ in range(120)]
    rows = [["".join(draw.choices("etaoin ", k=size)) for size in pair] for pair in sizes]
    (folder / "a.jsonl").write_text("".join(json.dumps(dict(zip(("prompt", "completion"), row, strict=True))) + "\n" for row in rows))
    return f"data.path={folder / 'a.jsonl'}", f"data.cache={folder / 'cache'}"


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, pairs: Words) -> dict[str, list[float]]:
    """The losses of one rank that takes the batch in two micro-batches."""
    job = ranks.train(tmp_path_factory.mktemp("one") / "run", *BASE, *pairs, *LAYOUTS[0])
    return {key: job.figures(key) for key in ("loss", "validation_loss")}


def test_the_curve_is_that_of_one_process_without_deepspeed(one_rank: dict[str, list[float]], pairs: Words) -> None:
    losses, _ = reference_curve((*BASE, *pairs))
    assert one_rank["loss"] == pytest.approx(losses, abs=5e-6, rel=0)


def test_ranks_count_labels_while_a_checkpoint_is_written(
    ranks: RankPool, tmp_path: Path, one_rank: dict[str, list[float]], pairs: Words
) -> None:
    """Each in messages of its own, those of the checkpoint of step 3 under the next two steps."""
    choose_program(tmp_path, "spoiled", {"run": "late_writes"})
    saves = ("checkpoint.every=3", "checkpoint.final=false", "checkpoint.background=true", "train.steps=8")
    job = ranks.train(tmp_path / "run", *BASE, *pairs, *LAYOUTS[1], *saves, "optim.schedule=constant")
    assert job.figures("loss")[:3] == pytest.approx(one_rank["loss"][:3], abs=1e-3, rel=0)
    assert checkpoint_steps(job.folder / "checkpoints") == [6, 3]


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=" ".join)
def test_layouts_change_no_loss(ranks: RankPool, tmp_path: Path, one_rank: dict[str, list[float]], pairs: Words, layout: Words) -> None:
    job = ranks.train(tmp_path / "run", *BASE, *pairs, *layout)
    for key, losses in one_rank.items():
        assert job.figures(key) == pytest.approx(losses, abs=5e-6, rel=0), key


def test_a_stopped_run_resumes_bit_for_bit(ranks: RankPool, tmp_path: Path, one_rank: dict[str, list[float]], pairs: Words) -> None:
    stopped = ranks.fit(tmp_path / "run", *BASE, *pairs, *LAYOUTS[0], signals=[(2, 0, signal.SIGTERM)])
    assert set(stopped.codes) == {STOPPED}
    job = ranks.train(tmp_path / "run", *BASE, *pairs, *LAYOUTS[0])
    assert any(line.startswith("resumes from step ") for line in job.lines)
    assert job.figures("loss") == one_rank["loss"]
