"""`distrain export`: a run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    dest: Annotated[Path, typer.Argument(metavar="DEST", show_default=False)],
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option("--dtype", help="What the weights are written as.")] = "fp32",
) -> int:
    """Write a run's newest checkpoint as a Hugging Face folder: safetensors, config.json, generation_config.json, its tokenizer.

    The folder is loaded again, by transformers where it is installed, and has its name only where its logits equal ours.

    \b
    distrain export runs/quickstart quickstart-hf
    distrain export runs/quickstart quickstart-bf16 --dtype bf16
    """
    from ...trainer.spec.plain_file import expanded
    from ...trainer.system.torch_child import run_child, run_folder

    folder, destination = run_folder(run_dir), expanded(dest).absolute()
    _is_free(dest, destination)
    return run_child("export", [str(folder), str(destination), dtype])


def _is_free(said: Path, destination: Path) -> None:
    """Raises Unreadable where DEST is a file, or a folder that holds something."""
    from ...trainer.spec.problem import Problem, Unreadable

    if destination.is_dir() and any(destination.iterdir()):
        raise Unreadable([Problem(rule="folder", says=f"{said} is there and not empty", mend="name a folder that is not there yet")])
    if os.path.lexists(destination) and not destination.is_dir():
        what = "a file" if destination.exists() else "a link that leads nowhere"
        raise Unreadable([Problem(rule="folder", says=f"{said} is {what}", mend="name a folder that is not there yet")])
