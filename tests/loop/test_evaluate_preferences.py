"""`distrain evaluate` of runs on preferences and of LoRA, end to end: the figures are those of the runs' own evaluations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.rank_pool import RankPool
from distrain.trainer.loop.offline.evaluate_run import evaluate_run
from distrain.trainer.models.build import build_model
from distrain.trainer.models.hf_format.weights import write_hf_folder
from distrain.trainer.rundir.files import REFERENCE_FILE
from distrain.trainer.spec.problem import Unreadable

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob

Words = tuple[str, ...]
Capture = pytest.CaptureFixture[str]

FIGURES = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
SHAPE = ("quickstart", "model=tiny_llama", "model.layers=2", "train.seq=48", "train.batch=8", "train.microbatch=2", "log.every=1")
BASE = (*SHAPE, "train.steps=4", "train.evaluate={every: 4, batches: 2}", "optim.warmup=0", "optim.lr=5e-3", "checkpoint.keep=3")
TOLD = "the reference of pairs that the run did not read is computed with the weights that it began with"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of random letters, a and other, and weights in Hugging Face's form, base."""
    draw, folder = Random(7), tmp_path_factory.mktemp("preferences")
    for name, many in (("a", 80), ("other", 13)):
        sizes = [(draw.choice([2, 8, 12]), draw.choice([1, 5, 14]), draw.choice([1, 5, 30])) for _ in range(many)]
        rows = [["".join(draw.choices("etaoin ", k=size)) + "!" * (place == 1) for place, size in enumerate(row)] for row in sizes]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(dict(zip(("prompt", "chosen", "rejected"), row, strict=True))) + "\n" for row in rows)
        )
    run = load_recipe(SHAPE[0], [*SHAPE[1:], "data=synthetic", "train.steps=1"])
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=11)
    write_hf_folder(((name, each.detach()) for name, each in module.named_parameters()), run, folder / "base")
    return folder


def preferences(files: Path) -> Words:
    paths = (f"data.path={files / 'a.jsonl'}", f"data.cache={files / 'cache'}", f"data.validate.other={files / 'other.jsonl'}")
    return ("data=preferences", "data.validation=0.2", "train.preference.beta=0.2", *paths)


def lora(files: Path) -> Words:
    return (f"model.hf={files / 'base'}", f"model.weights={files / 'base'}", "model.lora={rank: 4, dropout: 0.1}", "optim.lr=2e-2")


@pytest.fixture(scope="module")
def drawn_run(ranks: RankPool, files: Path, tmp_path_factory: pytest.TempPathFactory) -> PoolJob:
    layout = ("cluster.gpus=2", "parallel.tp=2", "optim.ema=0.5", "engine=native")
    return ranks.train(tmp_path_factory.mktemp("drawn") / "run", *BASE, *preferences(files), *layout)


@pytest.fixture(scope="module")
def lora_run(ranks: RankPool, files: Path, tmp_path_factory: pytest.TempPathFactory) -> PoolJob:
    layout = ("cluster.gpus=2", "parallel.zero=2")
    return ranks.train(tmp_path_factory.mktemp("lora") / "run", *BASE, *preferences(files), *lora(files), *layout)


def evaluated(capsys: Capture, folder: Path, **given: Any) -> list[dict[str, Any]]:
    """The sets of the JSON document."""
    capsys.readouterr()
    evaluate_run(folder, **{"changes": {}, **given}, as_json=True)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["sets"]
    return found


def logged(job: PoolJob, of: str = "validation_", name: str = "") -> list[float]:
    """The figures of a run's last evaluation."""
    return [job.figures(f"{of}{figure}{name}")[-1] for figure in FIGURES]


def figures(found: dict[str, Any]) -> list[float]:
    assert list(found) == ["name", "pairs", "loss", "accuracy", "chosen_reward", "rejected_reward", "margin"]
    return [found[figure] for figure in FIGURES]


@pytest.mark.parametrize("run", ["drawn_run", "lora_run"])
def test_preferences_have_the_figures_of_the_runs_validations(run: str, request: pytest.FixtureRequest, capsys: Capture) -> None:
    job: PoolJob = request.getfixturevalue(run)
    held, other = evaluated(capsys, job.folder)
    assert (held["name"], other["name"], other["pairs"]) == ("validation", "other", 13)
    assert figures(held) == pytest.approx(logged(job), abs=1e-5)
    assert figures(other) == pytest.approx(logged(job, name="/other"), abs=1e-5)
    assert abs(held["margin"]) > 1e-3
    evaluate_run(job.folder, changes={})
    said = capsys.readouterr()
    assert TOLD not in said.err
    lines = [
        f"{name}: loss {row['loss']:.4f}, accuracy {row['accuracy']:.3f}, margin {row['margin']:.4f}, of {row['pairs']} pairs"
        for name, row in (("validation", held), ("other", other))
    ]
    assert said.out.splitlines() == ["step 4 of run, in float32", *lines]


def test_the_averages_of_the_weights_have_theirs(drawn_run: PoolJob, capsys: Capture) -> None:
    held, other = evaluated(capsys, drawn_run.folder, ema=True)
    assert figures(held) == pytest.approx(logged(drawn_run, "validation_ema_"), abs=1e-5)
    assert figures(other) == pytest.approx(logged(drawn_run, "validation_ema_", "/other"), abs=1e-5)
    assert figures(held)[0] != pytest.approx(logged(drawn_run)[0], abs=1e-5)


@pytest.mark.parametrize("run", ["drawn_run", "lora_run"])
def test_a_reference_that_is_not_there_is_computed_with_the_start_weights(
    run: str, request: pytest.FixtureRequest, files: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Of other pairs, and of all where RUN_DIR's file is gone."""
    job: PoolJob = request.getfixturevalue(run)
    shutil.copytree(job.folder, tmp_path / "run")
    (tmp_path / "run" / REFERENCE_FILE).unlink()
    held, other = evaluated(capsys, tmp_path / "run")
    assert figures(held) == pytest.approx(logged(job), abs=1e-5)
    assert figures(other) == pytest.approx(logged(job, name="/other"), abs=1e-5)
    evaluate_run(tmp_path / "run", changes={}, sequences=1)
    assert capsys.readouterr().err.count(TOLD) == 1
    (files / "new.jsonl").write_text((files / "other.jsonl").read_text())
    (new,) = evaluated(capsys, tmp_path / "run", changes={"data.path": str(files / "new.jsonl")})
    assert figures(new) == pytest.approx(figures(other), abs=1e-6)


def test_other_start_weights_are_refused(lora_run: PoolJob, files: Path, tmp_path: Path) -> None:
    shutil.copytree(lora_run.folder, tmp_path / "run")
    (tmp_path / "run" / REFERENCE_FILE).unlink()
    with changed_base(files), pytest.raises(Unreadable, match="the run began with other weights than those that are there now"):
        evaluate_run(tmp_path / "run", changes={})


def test_other_start_weights_do_not_matter_where_the_run_has_the_reference_of_all_pairs(
    ranks: RankPool, files: Path, tmp_path: Path, capsys: Capture
) -> None:
    """All weights are trained: the checkpoint has them, and RUN_DIR's file what they began with says of the pairs."""
    job = ranks.train(tmp_path / "run", *BASE, *preferences(files), *lora(files)[:2], "cluster.gpus=1")
    with changed_base(files):
        held, other = evaluated(capsys, job.folder)
    assert figures(held) == pytest.approx(logged(job), abs=1e-5)
    assert figures(other) == pytest.approx(logged(job, name="/other"), abs=1e-5)


@contextmanager
def changed_base(files: Path) -> Iterator[None]:
    """While the block runs, folder base has other weights."""
    kept = files / "base" / "model.safetensors"
    before = kept.read_bytes()
    try:
        save_file({name: each + 1 for name, each in load_file(kept).items()}, kept, metadata={"format": "pt"})
        yield
    finally:
        kept.write_bytes(before)


def test_a_loss_without_a_reference_needs_none(ranks: RankPool, files: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("train.preference={loss: simpo, margin: 1, beta: 2}", "cluster.gpus=1", "data.validate=null")
    job = ranks.train(tmp_path / "run", *BASE, *preferences(files)[:-1], *words[:-1])
    (held,) = evaluated(capsys, job.folder)
    assert figures(held) == pytest.approx(logged(job), abs=1e-5)


def test_lora_on_text_has_the_loss_of_the_runs_validation(ranks: RankPool, files: Path, tmp_path: Path, capsys: Capture) -> None:
    (files / "a.txt").write_text("a line of a text to train on\n" * 150)
    data = ("data=text", f"data.path={files / 'a.txt'}", "data.validation=0.2", f"data.cache={files / 'cache'}")
    job = ranks.train(tmp_path / "run", *BASE, *data, *lora(files), "cluster.gpus=2", "parallel.pp=2")
    (held,) = evaluated(capsys, job.folder)
    assert held["loss"] == pytest.approx(job.figures("validation_loss")[-1], abs=1e-5)
    assert held["tokens"] == 2 * 8 * 48
