"""Runs whose data change in stages, and that validate with sets of their own: the same figures in every layout, and after a resume."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import reference_curve
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.validation_sets import prepare_validation_sets
from distrain.trainer.models.build import build_model
from distrain.trainer.rundir.measured_run import read_measured_run

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

Words = tuple[str, ...]

SEQ, BATCH, STEPS = 32, 8, 8
BASE = (
    "quickstart", "model=tiny", "data=text", f"train.steps={STEPS}", f"train.batch={BATCH}", f"train.seq={SEQ}", "log.every=1",
    "optim.warmup=2", "optim.schedule=constant", "optim.min_lr=0", "train.microbatch=2", "train.evaluate.every=0",
    "data.validation=0.05",
)  # fmt: skip
FIRST = "{weights:[3,1]"
UNTIL = f",until:{4 * BATCH * SEQ}"
CHANGING = f"data.stages=[{FIRST}{UNTIL}}},{{weights:[0,1],until:{6 * BATCH * SEQ + 5}}},{{weights:[1,1]}}]"
LAYOUTS: dict[str, Words] = {
    "one rank": ("cluster.gpus=1", "train.microbatch=4"),
    "zero 2": ("cluster.gpus=2", "parallel.zero=2"),
    "tp 2": ("cluster.gpus=2", "parallel.tp=2"),
    "pipe": ("cluster.gpus=2", "parallel.pp=2"),
    "native pp 2": ("cluster.gpus=2", "parallel.pp=2", "engine=native"),
    "cp 2": ("cluster.gpus=2", "parallel.cp=2"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of different letters: two to train on, two to validate with."""
    folder = tmp_path_factory.mktemp("texts")
    for name, letters, size in (
        ("web", "etaoin ", 9000),
        ("code", "(){}=;xy", 1500),
        ("wiki", "etaoin shrdlu", 3 * SEQ + 11),
        ("forum", "etaoin.,", 900),
    ):
        (folder / f"{name}.txt").write_text("".join(Random(name).choices(letters, k=size)))
    return folder


@pytest.fixture(scope="module")
def data(files: Path) -> Words:
    return f"data.path=[{files}/web.txt,{files}/code.txt]", f"data.cache={files}/cache"


def words_of_sets(files: Path) -> Words:
    return f"data.validate={{wiki:{files}/wiki.txt,forum:{files}/forum.txt}}", "train.evaluate={every: 2, batches: 2}"


@pytest.mark.parametrize("layout", ["one rank", "native pp 2"])
def test_stages_train_the_curve_of_one_process(ranks: RankPool, tmp_path: Path, data: Words, layout: str) -> None:
    job = ranks.train(tmp_path / "run", *BASE, *data, CHANGING, *LAYOUTS[layout])
    losses, _ = reference_curve((*BASE, *data, CHANGING))
    assert job.figures("loss") == pytest.approx(losses, abs=5e-6, rel=0)
    constant, _ = reference_curve((*BASE, *data, "data.weights=[3,1]"))
    assert losses[:4] == constant[:4]
    assert abs(losses[4] - constant[4]) > 0.1, "the stage that follows reads other text"


def test_a_run_goes_on_in_stages_that_are_added_to_it(ranks: RankPool, tmp_path: Path, data: Words) -> None:
    """It has read 4 steps by constant weights, and goes on in another layout; then on to a stage that is changed again."""
    folder = tmp_path / "run"
    ranks.train(folder, *BASE, *data, "data.weights=[3,1]", *LAYOUTS["zero 2"], "train.steps=4")
    job = ranks.train(folder, *BASE, *data, CHANGING, *LAYOUTS["tp 2"], "train.steps=6")
    assert any(
        line.startswith("changed since step 4: train.steps 4 -> 6, data.weights [3.0,1.0] -> null, data.stages null -> [")
        for line in job.lines
    )
    last = CHANGING.replace("[1,1]", "[1,2]")
    job = ranks.train(folder, *BASE, *data, last, *LAYOUTS["pipe"])
    assert "resumes from step 6" in job.lines
    losses, _ = reference_curve((*BASE, *data, last))
    assert job.figures("loss") == pytest.approx(losses, abs=5e-6, rel=0)


def test_other_stages_that_were_read_are_refused(ranks: RankPool, tmp_path: Path, data: Words) -> None:
    folder = tmp_path / "run"
    ranks.train(folder, *BASE, *data, CHANGING, *LAYOUTS["one rank"], "train.steps=5")
    job = ranks.fit(folder, *BASE, *data, CHANGING.replace("[3,1]", "[2,1]"), *LAYOUTS["one rank"])
    assert set(job.codes) == {1}
    assert any("data.stages was [{weights:[3,1],until:1024}" in problem for problem in job.problems)


def plain_loss(files: Path, words: Words, name: str) -> float:
    """The mean loss of the model before it trains over all tokens of a text, in windows of SEQ tokens of which the last is shorter."""
    run = load_recipe(BASE[0], [*BASE[1:], *words])
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed).eval()
    tokens = torch.tensor([*(files / f"{name}.txt").read_bytes(), 0])
    total, labels = 0.0, 0
    for first in range(0, len(tokens) - 1, SEQ):
        window = tokens[first : first + SEQ + 1][None]
        with torch.no_grad():
            loss, many = module(window[:, :-1], window[:, 1:], documents=None, keys=None)
        total, labels = total + float(loss), labels + int(many)
    assert labels == len(tokens) - 1
    return total / labels


def losses_of(job: PoolJob, name: str) -> list[float]:
    return job.figures(f"validation_loss/{name}" if name else "validation_loss")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_set_is_evaluated_to_its_last_token(ranks: RankPool, tmp_path: Path, files: Path, data: Words, layout: str) -> None:
    """In as many sequences as no number of ranks divides; the model stays as it begins."""
    still = ("optim.lr=1e-25", "optim.warmup=0", "train.steps=2", "train.evaluate={every: 1, batches: 4}")
    words = (*data, *words_of_sets(files)[:1], *still)
    job = ranks.train(tmp_path / "run", *BASE, *words, *LAYOUTS[layout])
    for name in ("wiki", "forum"):
        assert losses_of(job, name) == pytest.approx([plain_loss(files, words, name)] * 2, abs=2e-6, rel=0), name
    assert len(losses_of(job, "")) == 2
    assert f"validation set wiki: {3 * SEQ + 12} tokens in 1 document, all 4 sequences each time" in job.lines


def test_a_large_set_is_evaluated_in_part_and_what_is_held_out_as_without_sets(
    ranks: RankPool, tmp_path: Path, files: Path, data: Words
) -> None:
    words = (*data, *words_of_sets(files))
    job = ranks.train(tmp_path / "run", *BASE, *words, *LAYOUTS["zero 2"])
    assert "validation set forum: 901 tokens in 1 document, 16 of 29 sequences each time" in job.lines
    plain = ranks.train(tmp_path / "plain", *BASE, *data, words_of_sets(files)[1], *LAYOUTS["zero 2"])
    assert losses_of(job, "") == losses_of(plain, "")
    assert len(losses_of(job, "forum")) == len(losses_of(job, "wiki")) == 4
    assert [key for row in plain.rows for key in row if key.startswith("validation_loss")] == ["validation_loss"] * 4
    assert job.figures("loss") == plain.figures("loss"), "evaluating changes no step"
    found = read_measured_run(job.folder)
    assert [(name, [step for step, _ in curve]) for name, curve in found.validations] == [
        (name, [2, 4, 6, 8]) for name in ("", "wiki", "forum")
    ]


def test_the_part_of_a_large_set_is_the_same_in_another_layout(ranks: RankPool, tmp_path: Path, files: Path, data: Words) -> None:
    words = (*data, *words_of_sets(files), "optim.lr=1e-25", "optim.warmup=0", "train.steps=2", "data.validation=0")
    jobs = [ranks.train(tmp_path / name.replace(" ", "_"), *BASE, *words, *LAYOUTS[name]) for name in ("one rank", "cp 2")]
    run = load_recipe(BASE[0], [*BASE[1:], *words])
    corpus = prepare_validation_sets(run.data, vocab=run.model.vocab, seq=SEQ, cache=files / "cache", progress=lambda *_: None)["forum"]
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed).eval()
    batch = Batches(corpus, seed=1, seq=SEQ, split="validation").batch(0, 2 * BATCH)
    with torch.no_grad():
        loss, many = module(batch.tokens, batch.labels, documents=None, keys=None)
    for job in jobs:
        assert losses_of(job, "forum") == pytest.approx([float(loss / many)], abs=2e-6, rel=0)
        assert losses_of(job, "") == [], "nothing is held out"
