"""`distrain generate`: text from a run's newest checkpoint."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer


def generate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help='What the text begins with; "" begins a new one.')],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="How many tokens follow, at most.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", min=1, help="Draw from that many likeliest tokens only.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, max=2**63 - 1, help="The same seed draws the same text.")] = 0,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json, where not the run's.")] = None,
) -> int:
    """Print a prompt and what a run's newest checkpoint has follow it.

    \b
    distrain generate runs/quickstart --prompt "def main("
    distrain generate runs/quickstart --prompt "import " --tokens 400 --top-k 20
    """
    from ...trainer.spec.problem import Problem, Unreadable
    from ...trainer.system.torch_child import run_child, run_folder
    from ..pages.console import tell_problems as tell

    if not isfinite(temperature):
        raise Unreadable([Problem(rule="option", says=f"--temperature {temperature} is no number", mend="1 leaves the shares as learnt")])
    if not temperature:
        idle = [("--top-k", top_k), ("--seed", seed or None)]
        tell([f"{name} {value} does nothing with --temperature 0" for name, value in idle if value is not None])
    said = {"prompt": prompt, "tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed, "tokenizer": tokenizer}
    return run_child("generate", [str(run_folder(run_dir)), "-"], json.dumps(said))
