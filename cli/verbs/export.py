"""`distrain export`: writes a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    dest: Annotated[Path, typer.Argument(metavar="DEST", show_default=False)],
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option("--dtype", help="The data type of the written weights.")] = "fp32",
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="The step of the checkpoint, not the newest.")] = None,
    average: Annotated[int, typer.Option("--average", metavar="N", min=1, help="The mean over N checkpoints, up to that one.")] = 1,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (optim.ema).")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write LoRA's additions alone, as PEFT's files.")] = False,
) -> int:
    """Write a run's newest checkpoint, another one or the mean of several, as a Hugging Face folder.

    It holds safetensors, config.json, generation_config.json and the run's tokenizer. One file is in memory at a time. The folder is
    kept only if every weight reads back equal, and the logits of transformers, where it is installed, equal ours: of all layers, or of
    as many as fit into memory. With --adapter it holds LoRA's additions alone, adapter_config.json and adapter_model.safetensors, which
    PEFT loads beside model.weights.

    \b
    distrain export runs/quickstart quickstart-hf
    distrain export runs/quickstart quickstart-bf16 --dtype bf16
    distrain export runs/quickstart quickstart-mean --average 2
    distrain export runs/finetune_llama my-adapter --adapter
    """
    from ...trainer.rundir.files import find_run_folder
    from ...trainer.system.regular_file import expand_home
    from ...trainer.system.run_child import run_child

    folder, destination = find_run_folder(run_dir), expand_home(dest).absolute()
    _check_destination(dest, destination)
    options = {"dtype": dtype, "step": step, "average": average, "ema": ema}
    module = "export_adapter" if adapter else "export"
    return run_child(f"distrain.trainer.loop.offline.{module}", [str(folder), str(destination), json.dumps(options)])


def _check_destination(given: Path, destination: Path) -> None:
    """Raise Unreadable where DEST is a file or a folder that is not empty, or can't be created."""
    from ...trainer.spec.problem import Problem, Unreadable

    if destination.is_dir() and any(destination.iterdir()):
        raise Unreadable([Problem(rule="folder", says=f"{given} exists and is not empty", mend="choose a new folder")])
    if os.path.lexists(destination) and not destination.is_dir():
        kind = "a file" if destination.exists() else "a dangling link"
        raise Unreadable([Problem(rule="folder", says=f"{given} is {kind}", mend="choose a new folder")])
    parent = next(each for each in destination.parents if each.exists())
    if not os.access(parent, os.W_OK):
        raise Unreadable([Problem(rule="folder", says=f"{given}: nothing can be created in {parent}", mend="choose another folder")])
