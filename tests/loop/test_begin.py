"""`model.weights`: a run starts from Hugging Face weights on disk, the same under every ZeRO stage and precision."""

from pathlib import Path

import pytest
import torch

from distrain.cli.config.load import load_recipe
from distrain.trainer.launch.file_checks import weight_problems
from distrain.trainer.loop.checkpoint import CheckpointReader, whole_slice
from distrain.trainer.loop.offline.export import export
from distrain.trainer.loop.offline.load_run import load_saved_run

SMALL = ("data=synthetic", "train.batch=4", "train.microbatch=2", "train.seq=32", "train.steps=1", "optim.warmup=0", "optim.min_lr=0")
STILL = (*SMALL, "train.evaluate.every=0", "log.every=1", "optim.lr=1e-30")  # a step that moves no weight but one that is 0, by 1e-30


@pytest.fixture(scope="module")
def source(ranks, tmp_path_factory):
    """A Hugging Face folder of trained weights, next to the run that trained them."""
    top = tmp_path_factory.mktemp("source")
    learning = ("model=tiny", "model.layers=2", "model.vocab=250", *SMALL, "train.steps=3", "optim.lr=1e-2", "train.evaluate.every=0")
    export(ranks.train(top / "run", "quickstart", *learning).folder, top / "hf", "fp32")
    return top / "hf"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 weights of a run's newest checkpoint."""
    found = load_saved_run(folder).checkpoint
    reader = CheckpointReader(found)
    rows = {row.name: row.shape for row in found.manifest.tensors if row.kind == "weight"}
    return {name: reader.read(whole_slice(name, "weight", shape)) for name, shape in rows.items()}


@pytest.mark.parametrize(
    "overrides",
    [
        *(pytest.param((f"parallel.zero={stage}", "train.precision=fp32"), id=f"zero {stage}") for stage in range(4)),
        *(pytest.param((f"parallel.zero={stage}", "train.precision=bf16"), id=f"zero {stage} bf16") for stage in range(4)),
        pytest.param(("model.vocab_multiple=96", "parallel.zero=2"), id="a padded vocabulary"),
        pytest.param(("parallel.tp=2", "parallel.zero=0", "model.vocab_multiple=96"), id="tp2"),
        pytest.param(("parallel.pp=2", "parallel.zero=1"), id="pp2"),
    ],
)
def test_a_run_starts_from_exactly_the_given_weights(ranks, source: Path, overrides: tuple[str, ...], tmp_path: Path) -> None:
    given = (f"model.hf={source}", f"model.weights={source}", "model.dropout=0")
    job = ranks.train(tmp_path / "run", "quickstart", *given, *STILL, *overrides)
    assert f"starts from the weights in {source}" in job.lines
    begun, there = weights(tmp_path / "run"), weights(source.with_name("run"))
    assert begun.keys() == there.keys()
    assert not [name for name in there if not torch.allclose(begun[name], there[name], rtol=0, atol=1e-29)]


def test_a_checkpoint_takes_precedence_over_the_weights(ranks, source: Path, tmp_path: Path) -> None:
    given = (f"model.hf={source}", f"model.weights={source}", "model.dropout=0")
    ranks.train(tmp_path / "run", "quickstart", *given, *SMALL, "train.evaluate.every=0", "optim.lr=1e-3")
    moved = weights(tmp_path / "run")
    job = ranks.train(tmp_path / "run", "quickstart", *given, *STILL, "train.steps=2")
    assert "resumes from step 1" in job.lines
    assert not any("begins from" in line for line in job.lines)
    after = weights(tmp_path / "run")
    assert not [name for name in moved if not torch.allclose(moved[name], after[name], rtol=0, atol=1e-29)]


def test_weights_of_another_size_are_refused_with_the_key(ranks, source: Path, tmp_path: Path) -> None:
    job = ranks.fit(tmp_path / "run", "quickstart", "model=tiny", "model.vocab=250", f"model.weights={source}", *STILL)
    assert set(job.codes) == {1}
    assert job.problems == (f"{source} has model.layers=2, this run 4: set model.layers=2",)


def test_the_first_mismatched_tensor_is_named(ranks, source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"] = tensors["transformer.h.1.mlp.c_fc.weight"][:, :100].contiguous()
    del tensors["transformer.ln_f.bias"]
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text((source / "config.json").read_text())
    given = (f"model.hf={tmp_path / 'hf'}", f"model.weights={tmp_path / 'hf'}")
    job = ranks.fit(tmp_path / "run", "quickstart", *given, *STILL)
    assert job.problems == (f"{tmp_path / 'hf'}: transformer.h.1.mlp.c_fc.weight is [64, 100], not [64, 256]",)


def test_a_folder_without_weights_is_refused_before_ranks_start(tmp_path: Path) -> None:
    run = load_recipe("quickstart", ["model.weights=/nothing", f"log.dir={tmp_path}"])
    (problem,) = weight_problems(run)
    assert problem.says == "model.weights=/nothing is not a folder"
    assert problem.mend.startswith("name a folder with config.json")
    (named,) = weight_problems(load_recipe("quickstart", ["model.weights=Org/Name", f"log.dir={tmp_path / 'b'}"]))
    assert named.mend == "run `hf download Org/Name --local-dir Name`, and set model.weights=Name"
    (tmp_path / run.name / "checkpoints" / "step_1").mkdir(parents=True)
    assert not [*weight_problems(run)], "a run that goes on from a checkpoint needs none"


def test_a_path_in_a_recipe_is_relative_to_the_recipe_and_an_override_to_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "recipes" / "hf").mkdir(parents=True)
    (tmp_path / "recipes" / "mine.yaml").write_text("defaults: [quickstart, _self_]\nmodel: {weights: hf}\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/mine.yaml").model.weights == str(tmp_path / "recipes" / "hf")
    assert load_recipe("recipes/mine.yaml", ["model.weights=hf"]).model.weights == str(tmp_path / "hf")
    assert load_recipe("quickstart").model.weights is None
