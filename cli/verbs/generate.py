"""`distrain generate`: generates text from a run's newest checkpoint."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from ..pages.printing import print_problems


def generate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help='The beginning of the text; "" begins a new document.')],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="The number of new tokens, at most.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", min=0, help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", min=1, help="Sample from the K most likely tokens only.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a question, in the tokenizer's chat template.")] = False,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="The step of the checkpoint, not the newest.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (optim.ema).")] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, max=2**63 - 1, help="The same seed gives the same text.")] = 0,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json, instead of the run's.")] = None,
) -> int:
    """Print a prompt and its continuation by a run's newest checkpoint.

    \b
    distrain generate runs/quickstart --prompt "def main("
    distrain generate runs/quickstart --prompt "import " --tokens 400 --top-k 20
    distrain generate runs/finetune_llama --chat --prompt "Who are you?"
    """
    from ...trainer.rundir.files import find_run_folder
    from ...trainer.spec.problem import Problem, Unreadable
    from ...trainer.system.run_child import run_child

    if not isfinite(temperature):
        says = f"--temperature {temperature} is not a finite number"
        raise Unreadable([Problem(rule="option", says=says, mend="1 samples from the learnt distribution")])
    if not temperature:
        unused = [("--top-k", top_k), ("--seed", seed or None)]
        print_problems([f"{name} {value} does nothing with --temperature 0" for name, value in unused if value is not None])
    options = {
        "prompt": prompt,
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "step": step,
        "ema": ema,
        "tokenizer": tokenizer,
        "chat": chat,
    }
    return run_child("distrain.trainer.loop.offline.generate", [str(find_run_folder(run_dir)), "-"], json.dumps(options))
