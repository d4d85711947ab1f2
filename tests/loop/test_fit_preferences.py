"""Preferences train the curve that plain torch has of one answer after another, in every layout; the reference is computed once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import plain_optimizer
from distrain.tests.fakes.overrides import without_repeats
from distrain.tests.fakes.rank_pool import choose_program
from distrain.tests.fakes.trained_runs import read_run
from distrain.trainer.launch.file_checks import prepare_files
from distrain.trainer.loop.data.prepare import cache_folder, prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.samples.corpus import Split
from distrain.trainer.loop.data.validation_sets import prepare_validation_sets
from distrain.trainer.loop.offline.export import export
from distrain.trainer.loop.offline.export_adapter import export_adapter
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run
from distrain.trainer.models.build import build_model, load_weights
from distrain.trainer.models.hf_format.weights import read_hf_weights
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.files import REFERENCE_FILE
from distrain.trainer.rundir.reference_header import has_whole_reference
from distrain.trainer.spec.run import Run
from distrain.trainer.spec.sections.lr_schedule import learning_rate

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

Words = tuple[str, ...]
Answers = list[tuple[tuple[int, int], list[int], int]]  # (source and pair, tokens, the first token of the answer), chosen before rejected

STOPPED, STEPS = 75, 6
BASE = (
    "quickstart", "model=tiny_llama", "model.layers=2", "data=preferences", "data.validation=0.15", f"train.steps={STEPS}", "train.batch=8",
    "train.seq=48", "train.evaluate={every: 3, batches: 2}", "log.every=1", "optim.warmup=2", "train.preference.beta=0.2",
    "optim.lr=5e-4", "log.ledger=true",
)  # fmt: skip
LAYOUTS: tuple[Words, ...] = (
    ("cluster.gpus=1", "train.microbatch=4"),
    ("cluster.gpus=2", "train.microbatch=1", "parallel.zero=2"),
    ("cluster.gpus=2", "train.microbatch=4", "parallel.zero=3"),
    ("cluster.gpus=2", "train.microbatch=2", "parallel.zero=3", "engine=native", "train.loss_chunks=2"),
    ("cluster.gpus=2", "train.microbatch=2", "parallel.tp=2", "parallel.sequence=true", "engine=native", "train.loss_chunks=2"),
    ("cluster.gpus=4", "train.microbatch=2", "parallel.pp=2", "parallel.tp=2"),
    ("cluster.gpus=2", "train.microbatch=1", "parallel.pp=2", "parallel.schedule=zb_h1"),
    ("cluster.gpus=2", "train.microbatch=2", "parallel.cp=2"),
    ("cluster.gpus=2", "train.microbatch=4", "parallel.cp=2", "parallel.cp_comm=all_to_all", "parallel.recompute=full"),
)
FIGURES = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
SETS = ("", "/other")  # what is held out, and a set of its own
KEYS = (*FIGURES, *(f"validation_{each}{of}" for of in SETS for each in FIGURES))


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The overrides for a file of pairs, of which some are cut, its cache, and a validation set; 15 windows validate, of 16 that are read,
    and of the set all 5."""
    draw, folder = Random(7), tmp_path_factory.mktemp("preferences")
    for name, many in (("a", 112), ("other", 13)):
        sizes = [(draw.choice([2, 8, 12]), draw.choice([1, 5, 14]), draw.choice([1, 5, 30])) for _ in range(many)]
        rows = [["".join(draw.choices("etaoin ", k=size)) + "!" * (place == 1) for place, size in enumerate(row)] for row in sizes]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(dict(zip(("prompt", "chosen", "rejected"), row, strict=True))) + "\n" for row in rows)
        )
    return f"data.path={folder / 'a.jsonl'}", f"data.cache={folder / 'cache'}", f"data.validate.other={folder / 'other.jsonl'}"


@pytest.fixture(scope="module")
def train_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, preferences: Words) -> Callable[[Words], PoolJob]:
    folder = tmp_path_factory.mktemp("jobs")

    @cache
    def of(layout: Words) -> PoolJob:
        return ranks.train(folder / f"row{LAYOUTS.index(layout)}", *BASE, *preferences, *layout)

    return of


@pytest.fixture(scope="module")
def one_rank(train_ranks: Callable[[Words], PoolJob]) -> dict[str, list[float]]:
    """The figures of one rank that takes the batch in two micro-batches."""
    return {key: train_ranks(LAYOUTS[0]).figures(key) for key in KEYS}


@pytest.fixture(scope="module")
def reference(train_ranks: Callable[[Words], PoolJob]) -> Any:
    return reference_of(train_ranks(LAYOUTS[0]).folder)


def reference_of(folder: Path) -> Any:
    """The reference [pairs, 2] of the training corpus, then of the set: each of one source."""
    held = load_file(folder / REFERENCE_FILE)
    return np.concatenate(sorted(held.values(), key=len, reverse=True))


# Plain torch


def answers_of(run: Run, split: Split, samples: range, of: str = "") -> Answers:
    """Read the answers of samples, of a validation set all of them, each with its prompt, as the windows cut them."""
    where: dict[str, Any] = {"vocab": run.model.vocab, "seq": run.train.seq, "cache": cache_folder(run.data), "progress": lambda *_: None}
    corpus = prepare_validation_sets(run.data, **where)[of] if of else prepare_corpus(run.data, **where)
    batches, tokens = Batches(corpus, seed=run.train.seed, seq=run.train.seq, split=split), corpus.examples[0]
    found: Answers = []
    samples = range(sum(batches.windows)) if of else samples
    for source, window in zip(*(each.tolist() for each in batches.locate(np.array(samples))), strict=True):
        for document, begin, place in batches.packed_windows[source].documents(window):
            held = np.empty(place.stop - place.start, np.int64)
            tokens.copy(begin, held)
            found.append(((source, document // 2), held.tolist(), int(tokens.completions[document]) - begin))
    return found


def log_probability(module: Any, tokens: list[int], first: int) -> Tensor:
    """Return the log probability of an answer that begins at `first`, in float64 from the logits on: alone in its batch."""
    logits = module.logits(torch.tensor([tokens[:-1]]))[0].double()
    of_tokens = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    return of_tokens[max(first - 1, 0) :].sum()


def log_probabilities(module: nn.Module, answers: Answers) -> Tensor:
    return torch.stack([log_probability(module, tokens, first) for _, tokens, first in answers]).view(-1, 2)


def figures_of(log_p: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, list[float]]:
    """(mean loss, FIGURES) of pairs [pairs, 2]: arXiv:2305.18290 eq. 7."""
    rewards = beta * (log_p - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    loss = -logsigmoid(margins).mean()
    means = [loss, (margins > 0).double().mean(), margins.mean(), *rewards.mean(0)]
    return loss, [each.item() for each in means]


def plain_curve(words: Words) -> tuple[list[list[float]], list[list[float]], dict[int, list[float]]]:
    """(FIGURES of each step, those of SETS at the end, the reference by pair) of one process of plain torch, with two models, which
    computes one answer after another."""
    run = load_recipe(words[0], words[1:])
    module, frozen = (build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed) for _ in range(2))
    optimizer, batch, beta = plain_optimizer(run, module), run.train.batch, run.train.preference.beta
    curve, held = list[list[float]](), dict[int, list[float]]()

    def fixed(answers: Answers) -> Tensor:
        with torch.no_grad():
            found = log_probabilities(frozen, answers)
        held.update({number: row for ((_, number), *_), row in zip(answers[::2], found.tolist(), strict=True)})
        return found

    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, STEPS)
        answers = answers_of(run, "train", range(step * batch, (step + 1) * batch))
        loss, figures = figures_of(log_probabilities(module, answers), fixed(answers), beta)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), run.train.clip)
        optimizer.step()
        curve.append(figures)
    with torch.no_grad():
        answers = answers_of(run, "validation", range(run.train.evaluate.batches * batch))
        found = [figures_of(log_probabilities(module, answers), fixed(answers), beta)[1]]
        others = answers_of(run, "validation", range(0), "other")
        found.append(figures_of(log_probabilities(module, others), log_probabilities(frozen, others), beta)[1])
    return curve, found, held


def test_curve_validation_and_reference_are_those_of_plain_torch(
    one_rank: dict[str, list[float]], reference: Any, preferences: Words
) -> None:
    curve, validations, held = plain_curve((*BASE, *preferences))
    for key, wanted in zip(FIGURES, zip(*curve, strict=True), strict=True):
        assert one_rank[key] == pytest.approx(wanted, abs=2e-5, rel=0), key
    for name, figures in zip(SETS, validations, strict=True):
        assert [one_rank[f"validation_{key}{name}"][-1] for key in FIGURES] == pytest.approx(figures, abs=2e-5, rel=0), name
    known = {number: row for number, row in enumerate(reference.tolist()) if not np.isnan(row).any()}
    assert held.keys() <= known.keys()
    assert max(abs(np.array(known[number]) - held[number]).max() for number in held) < 1e-4


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=" ".join)
def test_layouts_change_no_figure(
    train_ranks: Callable[[Words], PoolJob], one_rank: dict[str, list[float]], reference: Any, layout: Words
) -> None:
    job = train_ranks(layout)
    for key, figures in one_rank.items():
        assert job.figures(key) == pytest.approx(figures, abs=5e-6, rel=0), key
    np.testing.assert_allclose(reference_of(job.folder), reference, rtol=0, atol=5e-5)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=" ".join)
def test_ranks_send_the_planned_messages(train_ranks: Callable[[Words], PoolJob], preferences: Words, layout: Words) -> None:
    words = (*BASE, *preferences, *layout)
    run = load_recipe(words[0], words[1:])
    counted = json.loads((train_ranks(layout).folder / "ledger.json").read_text())["ranks"]
    lines = [line for rank, rows in enumerate(counted) for line in compare_rank_messages(run, rank, rows)]
    assert [line for line in lines if line.verdict == "differs"] == []


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if not {"parallel.pp=2", "parallel.recompute=full"} & {*each}], ids=" ".join)
def test_ranks_hold_the_planned_bytes(train_ranks: Callable[[Words], PoolJob], preferences: Words, layout: Words) -> None:
    words = (*BASE, *preferences, *layout)
    run = load_recipe(words[0], words[1:])
    memory = make_plan(run).memory
    assert memory is not None
    for held in json.loads((train_ranks(layout).folder / "measured.json").read_text())["ranks"]:
        planned = memory.stages[0].bytes
        assert held["activations"] == planned.activations + planned.logits


def test_the_first_loss_is_that_of_no_preference(one_rank: dict[str, list[float]]) -> None:
    assert one_rank["loss"][0] == pytest.approx(np.log(2), abs=1e-6)
    assert one_rank["margin"][0] == pytest.approx(0, abs=1e-6)


# Resuming


def is_computed(job: PoolJob) -> bool:
    return any(line.startswith("reference: log probabilities") for line in job.lines)


@pytest.fixture
def stopped(ranks: RankPool, tmp_path: Path, preferences: Words) -> Path:
    """The folder of a run that was stopped after two steps."""
    job = ranks.fit(tmp_path / "run", *BASE, *preferences, *LAYOUTS[0], signals=[(2, 0, signal.SIGTERM)])
    assert set(job.codes) == {STOPPED}
    return job.folder


def test_a_stopped_run_resumes_bit_for_bit_with_the_reference_that_it_has(
    ranks: RankPool, stopped: Path, one_rank: dict[str, list[float]], preferences: Words
) -> None:
    job = ranks.train(stopped, *BASE, *preferences, *LAYOUTS[0])
    assert any(line.startswith("resumes from step ") for line in job.lines)
    assert not is_computed(job)
    for key in FIGURES:
        assert job.figures(key) == one_rank[key]
        for name in SETS:
            assert job.figures(f"validation_{key}{name}")[-1] == one_rank[f"validation_{key}{name}"][-1]


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_a_reference_that_is_damaged_or_missing_is_computed_again_from_the_weights_that_the_run_began_with(
    ranks: RankPool, stopped: Path, one_rank: dict[str, list[float]], reference: Any, preferences: Words, what: str
) -> None:
    file = stopped / REFERENCE_FILE
    if what == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    job = ranks.train(stopped, *BASE, *preferences, *LAYOUTS[3 if what == "missing" else 4])  # 3 gathers weights, and then loads others
    assert is_computed(job)
    assert (f"{REFERENCE_FILE} is damaged: the reference is computed again" in job.lines) == (what == "damaged")
    assert job.figures("loss") == pytest.approx(one_rank["loss"], abs=1e-5, rel=0)
    held, wanted = reference_of(stopped), reference
    both = ~np.isnan(held) & ~np.isnan(wanted)
    assert both.any()
    np.testing.assert_allclose(held[both], wanted[both], rtol=0, atol=1e-4)


def test_a_run_that_goes_on_longer_computes_what_it_reads_more(ranks: RankPool, stopped: Path, preferences: Words) -> None:
    before, run = np.isnan(reference_of(stopped)).any(1), read_run(stopped)
    longer = replace(run, train=replace(run.train, steps=30))
    assert (has_whole_reference(run, stopped), has_whole_reference(longer, stopped)) == (True, False)
    job = ranks.train(stopped, *BASE, *preferences, *LAYOUTS[0], "train.steps=30")
    after = np.isnan(reference_of(stopped)).any(1)
    assert before.sum() > after.sum()
    line = next(line for line in job.lines if line.startswith("reference: "))
    assert f"{before.sum() - after.sum():,} pairs" in line
    assert np.isfinite(job.figures("loss")).all()
    assert has_whole_reference(longer, stopped)


def test_a_set_that_is_new_when_a_run_resumes_is_relative_to_the_weights_that_it_began_with(
    ranks: RankPool, tmp_path: Path, one_rank: dict[str, list[float]], preferences: Words
) -> None:
    without = (*BASE, *preferences[:2], *LAYOUTS[0])
    folder = ranks.fit(tmp_path / "run", *without, signals=[(2, 0, signal.SIGTERM)]).folder
    many = len(reference_of(folder))
    job = ranks.train(folder, *without, preferences[2])
    assert is_computed(job)
    assert len(reference_of(folder)) == many + 13
    for key in (f"validation_{each}{of}" for of in SETS for each in FIGURES):
        assert job.figures(key)[-1] == one_rank[key][-1]


# A pass that ends early


def test_a_stop_request_ends_the_pass_which_goes_on_from_there_in_another_layout(
    ranks: RankPool, tmp_path: Path, one_rank: dict[str, list[float]], reference: Any, preferences: Words
) -> None:
    """The request comes in the third round, of four sequences each."""
    choose_program(tmp_path / "run", "fit")
    (tmp_path / "run" / "spoiler").write_text(json.dumps({"how": "stop_in_reference", "rank": 1}))
    words = (*BASE, *preferences)
    job = ranks.fit(tmp_path / "run", *words, *LAYOUTS[2][:1], "train.microbatch=2", "parallel.zero=3")
    assert set(job.codes) == {STOPPED}, job.problems
    assert not (job.folder / "checkpoints").exists() or not list((job.folder / "checkpoints").iterdir())
    held = ~np.isnan(reference_of(job.folder)).any(1)
    whole = (~np.isnan(reference)).all(1).sum()
    assert 0 < held.sum() < whole
    assert any(line.startswith(f"reference: stopped after {held.sum()} of {whole} pairs") for line in job.lines), job.lines
    assert not has_whole_reference(read_run(job.folder), job.folder)

    (tmp_path / "run" / "spoiler").unlink()
    again = ranks.train(job.folder, *words, *LAYOUTS[5])
    assert any(line.startswith(f"reference: log probabilities of the answers of {whole - held.sum()} pairs") for line in again.lines)
    assert has_whole_reference(read_run(job.folder), job.folder)
    for key, figures in one_rank.items():
        assert again.figures(key) == pytest.approx(figures, abs=5e-6, rel=0), key


def test_a_crash_in_the_pass_loses_what_was_not_written(ranks: RankPool, tmp_path: Path, reference: Any, preferences: Words) -> None:
    """The rank is killed in its sixth round, and writes after each."""
    choose_program(tmp_path / "run", "fit")
    (tmp_path / "run" / "spoiler").write_text(json.dumps({"how": "killed_in_reference", "rank": 0}))
    words = (*BASE, *preferences, *LAYOUTS[0])
    job = ranks.fit(tmp_path / "run", *words)
    assert set(job.codes) == {-signal.SIGKILL}
    held = ~np.isnan(reference_of(job.folder)).any(1)
    assert 0 < held.sum() < (~np.isnan(reference)).all(1).sum()
    assert any(line.startswith("reference: ") and " % of " in line for line in job.lines), job.lines
    np.testing.assert_array_equal(reference_of(job.folder)[held], reference[held])
    assert not [each for each in job.folder.iterdir() if each.name.startswith((".", REFERENCE_FILE)) and each.name != REFERENCE_FILE]


def test_a_pass_that_is_stopped_and_can_not_be_written_is_not_called_saved(ranks: RankPool, tmp_path: Path, preferences: Words) -> None:
    choose_program(tmp_path / "run", "fit")
    (tmp_path / "run" / "spoiler").write_text(json.dumps({"how": "stop_in_reference", "rank": 0}))
    (tmp_path / "run" / REFERENCE_FILE).mkdir()
    job = ranks.fit(tmp_path / "run", *BASE, *preferences, *LAYOUTS[2])
    assert set(job.codes) == {143}
    assert any(line.startswith("warning: the reference could not be written") for line in job.lines), job.lines


# Without a reference, and with weights of a folder


def test_a_stage_begins_where_a_run_resumes_without_its_reference(ranks: RankPool, tmp_path: Path, preferences: Words) -> None:
    """The pairs with which the checkpoint is checked are those that the stage before read."""
    lines = Path(preferences[0].removeprefix("data.path=")).read_text().splitlines(keepends=True)
    for name, part in (("b", lines[:60]), ("c", lines[60:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    words = (*BASE, f"data.path=[{tmp_path / 'b.jsonl'},{tmp_path / 'c.jsonl'}]", f"data.cache={tmp_path / 'cache'}", *LAYOUTS[0])
    ranks.fit(tmp_path / "run", *words, "data.weights=[3,1]", signals=[(2, 0, signal.SIGTERM)])
    (tmp_path / "run" / REFERENCE_FILE).unlink()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    read = int(saved.name.removeprefix("step_")) * 8 * 48  # tokens
    job = ranks.train(tmp_path / "run", *words, f"data.stages=[{{weights: [3, 1], until: {read}}}, {{weights: [0, 1]}}]")
    assert is_computed(job)
    assert f"resumes from {saved.name.replace('_', ' ')}" in job.lines
    assert len(job.figures("loss")) == STEPS
    assert np.isfinite(job.figures("loss")).all()


def test_simpo_has_no_reference(ranks: RankPool, tmp_path: Path, preferences: Words) -> None:
    job = ranks.train(tmp_path / "run", *BASE, *preferences, *LAYOUTS[0], "train.preference={loss: simpo, beta: 2, margin: 1}")
    assert not is_computed(job)
    assert not (job.folder / REFERENCE_FILE).exists()
    assert job.figures("loss")[-1] < job.figures("loss")[0]


def test_the_reference_is_of_the_weights_in_model_weights_also_where_a_checkpoint_is_there(
    train_ranks: Callable[[Words], PoolJob], ranks: RankPool, tmp_path: Path, preferences: Words
) -> None:
    """A run that resumes without its file reads the weights that it began with once more, and then the checkpoint."""
    export(train_ranks(LAYOUTS[0]).folder, tmp_path / "hf", "fp32")
    words = (*BASE, *preferences, *LAYOUTS[0], f"model.weights={tmp_path / 'hf'}")
    whole = ranks.train(tmp_path / "whole", *words)
    ranks.fit(tmp_path / "run", *words, signals=[(2, 0, signal.SIGTERM)])
    (tmp_path / "run" / REFERENCE_FILE).unlink()
    job = ranks.train(tmp_path / "run", *words)
    assert [line for line in job.lines if line.startswith("starts from")] == []
    assert is_computed(job)
    assert job.figures("loss") == whole.figures("loss")
    assert whole.figures("loss")[0] == pytest.approx(np.log(2), abs=1e-6)

    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    same = (*words[1:], f"log.dir={tmp_path}", "name=run")
    pairs = dict(word.split("=", 1) for word in preferences)
    other = (*same, f"data.path={pairs['data.validate.other']}", "train.steps=1", "checkpoint.accept=[data.path]")
    for given, expected in ((same, []), (other, [f"model.weights={tmp_path / 'hf'} is not a folder"])):
        assert [each.says for each in prepare_files(load_recipe("quickstart", without_repeats(*given)), print).problems] == expected
    (tmp_path / "elsewhere").rename(tmp_path / "hf")

    file = tmp_path / "hf" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    refused = ranks.fit(tmp_path / "run", *words, f"train.steps={STEPS + 1}")
    assert set(refused.codes) == {1}
    says = "the run began with other weights than it names now, and its preferences are relative to those"
    assert any(problem.startswith(says) for problem in refused.problems), refused.problems


# LoRA


LORA = ("model.lora={rank: 2, alpha: 4, targets: [query, value, down]}", "optim.lr=3e-2")


@pytest.fixture(scope="module")
def published(train_ranks: Callable[[Words], PoolJob], tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The override for a folder of weights, those that a run has trained to."""
    folder = tmp_path_factory.mktemp("published") / "hf"
    export(train_ranks(LAYOUTS[0]).folder, folder, "fp32")
    return (f"model.weights={folder}",)


def reference_with(module: Any, words: Words) -> dict[int, list[float]]:
    """The log probabilities of the training pairs of a run's steps under a module, by pair."""
    run = load_recipe(words[0], words[1:])
    answers = answers_of(run, "train", range(STEPS * run.train.batch))
    with torch.no_grad():
        found = log_probabilities(module, answers)
    return {number: row for ((_, number), *_), row in zip(answers[::2], found.tolist(), strict=True)}


def distance_to(folder: Path, wanted: dict[int, list[float]]) -> float:
    held = reference_of(folder)
    return max(float(abs(held[number] - row).max()) for number, row in wanted.items())


def test_the_reference_of_lora_is_the_base_and_of_an_adapter_the_base_with_it(
    ranks: RankPool, tmp_path: Path, preferences: Words, published: Words
) -> None:
    """B begins at 0: then a run begins with its frozen weights. Of one that begins with an adapter the reference has the adapter, and a
    resume without the file computes it with the adapter again, not with what the checkpoint holds."""
    words = (*BASE, *preferences, *published, *LORA)
    base = ranks.train(tmp_path / "base", *words, *LAYOUTS[0])
    assert base.figures("loss")[0] == pytest.approx(np.log(2), abs=1e-6)
    frozen = load_recipe(BASE[0], [*words[1:], "model.lora.rank=0"])
    module = build_model(frozen, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    load_weights(module, read_hf_weights(str(frozen.model.weights), frozen))
    assert distance_to(base.folder, reference_with(module, (*words, "model.lora.rank=0"))) < 1e-4

    export_adapter(base.folder, tmp_path / "adapter", "fp32")
    begins = (*words, f"model.lora.weights={tmp_path / 'adapter'}")
    tuned = load_model(load_saved_run(base.folder), torch.device("cpu"))
    wanted = reference_with(tuned, words)
    whole = ranks.train(tmp_path / "whole", *begins, *LAYOUTS[2])
    assert whole.figures("loss")[0] == pytest.approx(np.log(2), abs=1e-6)
    assert distance_to(whole.folder, wanted) < 1e-4
    assert distance_to(base.folder, wanted) > 0.1

    ranks.fit(tmp_path / "run", *begins, *LAYOUTS[2], signals=[(2, 0, signal.SIGTERM)])
    (tmp_path / "run" / REFERENCE_FILE).unlink()
    job = ranks.train(tmp_path / "run", *begins, *LAYOUTS[2])
    assert is_computed(job)
    assert job.figures("loss") == whole.figures("loss")
