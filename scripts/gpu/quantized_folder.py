"""The check that a run begins with the quantized weights of a Hugging Face folder on a device as on the CPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...trainer.models.hf.quantization import KEY
from .check_context import CheckContext
from .finding import Finding
from .fit_runs import RECIPE, UNTIMED, FitRun, fit, fit_together
from .loss_checks import FIVE, FLOAT32_LOSS
from .loss_differences import most_apart
from .run_distrain import run_distrain

FOLDERS = ("plain_folder", "quantized_folder")
WORDS = (*FIVE, "model=tiny_llama", "train.precision=fp32")
FLOAT8 = torch.float8_e4m3fn
CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": None}


def train_from_quantized(context: CheckContext) -> Finding:
    """Train a model, export it, quantize the folder to 8-bit floats, and train on from it (`compare_starts`)."""
    before = fit(FitRun(name="exported", recipe=RECIPE, words=(*WORDS, "optim.lr=1e-2", "checkpoint=default")), context, UNTIMED)
    plain, quantized = (context.folder / name for name in FOLDERS)
    run_distrain("export", str(before.folder), str(plain))
    packed = quantize_folder(plain, quantized)
    found = compare_starts(context)
    return replace(found, figures={**found.figures, "matrices": packed})


def compare_starts(context: CheckContext) -> Finding:
    """Train from the quantized folder on the device and on the CPU in float32: losses must agree, and begin beside those of the plain
    folder. A rehearsal has the CPU alone, whose runs are one."""
    plain, quantized = (f"model.weights={context.folder / name}" for name in FOLDERS)
    runs = {"plain": (plain,), "quantized": (quantized,), **({"cpu": (quantized, "device=cpu")} if context.on_gpu else {})}
    trained = fit_together([FitRun(name=f"from.{name}", recipe=RECIPE, words=(*WORDS, *each)) for name, each in runs.items()], context)
    losses = {name: trained[f"from.{name}"].losses for name in runs}
    apart = most_apart(losses["quantized"], losses["cpu"]) if context.on_gpu else 0.0
    changed = abs(losses["quantized"][0] - losses["plain"][0])
    departures = [f"from quantized weights, losses are {apart:.1e} nats from the CPU's"] if not apart <= FLOAT32_LOSS else []
    if not 1e-6 < changed < 0.05:
        departures.append(f"the first loss from quantized weights is {changed:.1e} nats from that of plain ones")
    figures = {"losses": losses, "device - cpu, nats": apart, "quantized - plain, nats": changed}
    return Finding(figures=figures, departures=tuple(departures))


def quantize_folder(plain: Path, folder: Path) -> int:
    """Write a Hugging Face folder with its linear layers in 8-bit floats, each with one scale; return how many these are."""
    shutil.copytree(plain, folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, KEY: CONFIG}), encoding="utf-8")
    packed = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [each for each in tensors if each.endswith("_proj.weight")]:
            weight = tensors[name].float()
            scale = weight.abs().max() / torch.finfo(FLOAT8).max
            tensors[name], tensors[f"{name}_scale_inv"] = (weight / scale).to(FLOAT8), scale
            packed += 1
        save_file(tensors, file)
    return packed
