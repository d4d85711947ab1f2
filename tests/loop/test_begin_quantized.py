"""`model.weights` with quantized weights: a run begins as from the plain folder, to the last bit, and goes on and is exported as any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distrain.tests.fakes.quantized_folders import MXFP4, PER_ROW, dequantize_folder, fp8_config, quantize_folder, tensors_in
from distrain.tests.fakes.small_models import module_of, run_of
from distrain.trainer.loop.offline.export import export
from distrain.trainer.models.build import named_weights
from distrain.trainer.models.hf_format.weights import write_hf_folder

SMALL = ("data=synthetic", "train.batch=4", "train.microbatch=2", "train.seq=32", "train.steps=1", "optim.warmup=0", "log.every=1")
FEW = (*SMALL, "train.evaluate.every=0", "optim.lr=1e-2")
V3: dict[str, Any] = {"model__shared_experts": 1, "model__router__score": "sigmoid", "model__router__bias": True}
# fmt: off
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # at tp 2 no rank's part begins at a block
    "gpt-oss":     ("gpt-oss", {"model__hidden": 64, "model__expert_ffn": 96}, MXFP4),
    "deepseek v3": ("mla",     V3, fp8_config((16, 13))),
    "llama":       ("llama",   {}, PER_ROW),
}
LAYOUTS = {
    "tp2 ep2":          ("gpt-oss",     "cluster.gpus=4", "parallel.tp=2", "parallel.ep=2"),
    "zero 3 bf16":      ("gpt-oss",     "cluster.gpus=2", "parallel.zero=3", "train.precision=bf16"),
    "v3, tp2 ep2":      ("deepseek v3", "cluster.gpus=4", "parallel.tp=2", "parallel.ep=2"),
    "v3, pp2 native":   ("deepseek v3", "cluster.gpus=2", "parallel.pp=2", "engine=native"),
    "llama, lora tp4":  ("llama",       "cluster.gpus=4", "parallel.tp=4", "model.lora.rank=2"),
}
# fmt: on


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each model, of a quantized one and a plain one."""
    top = tmp_path_factory.mktemp("folders")
    for name, (model, changes, config) in MODELS.items():
        run = run_of(model, **changes)
        write_hf_folder(named_weights(module_of(run, torch.float32), run), run, top / name / "source")
        quantize_folder(top / name / "source", top / name / "packed", config)
        dequantize_folder(top / name / "packed", top / name / "plain")
    return {name: top / name for name in MODELS}


def words(folder: Path) -> tuple[str, ...]:
    return (f"model.hf={folder}", f"model.weights={folder}", *FEW)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_begins_and_steps_as_from_the_plain_folder(ranks, folders: dict[str, Path], layout: str, tmp_path: Path) -> None:
    model, *given = LAYOUTS[layout]
    jobs = [ranks.train(tmp_path / form, "quickstart", *words(folders[model] / form), *given) for form in ("packed", "plain")]
    for figure in ("loss", "grad_norm"):
        packed, plain = (job.figures(figure) for job in jobs)
        assert packed == plain
    for job in jobs:
        export(job.folder, tmp_path / f"{job.folder.name}_hf", "fp32")
    packed, plain = (tensors_in(tmp_path / f"{form}_hf") for form in ("packed", "plain"))
    assert packed.keys() == plain.keys()
    assert not [name for name in plain if not torch.equal(packed[name], plain[name])]
    assert "quantization_config" not in json.loads((tmp_path / "packed_hf" / "config.json").read_text())
    before = tensors_in(folders[model] / "plain")
    assert any(not torch.equal(plain[name].float(), before[name].float()) for name in plain), "the step moved weights"


def test_a_run_goes_on_without_the_folder(ranks, folders: dict[str, Path], tmp_path: Path) -> None:
    at = folders["gpt-oss"] / "packed"
    ranks.train(tmp_path / "run", "quickstart", *words(at))
    (tmp_path / "config.json").write_text((at / "config.json").read_text())
    job = ranks.train(tmp_path / "run", "quickstart", *words(tmp_path), "train.steps=2", "cluster.gpus=2", "parallel.tp=2")
    assert "resumes from step 1" in job.lines


def test_a_quantized_folder_of_another_model_is_refused_before_ranks_start(folders: dict[str, Path], tmp_path: Path) -> None:
    from distrain.cli.config.load import load_recipe
    from distrain.trainer.launch.file_checks import weight_problems

    packed, other = folders["gpt-oss"] / "packed", folders["deepseek v3"] / "packed"
    run = load_recipe("quickstart", [f"model.hf={packed}", f"model.weights={other}", f"log.dir={tmp_path}"])
    (problem,) = weight_problems(run)
    assert problem.says == f"{other} is a model of family mla, but model.family=moe"
