"""Finds the best learning rate of models of several widths, with muP (optim.mup) and without.

Run `python -m distrain.scripts.bench_mup [STEPS]`; 200 steps take some ten minutes on one core. Each width trains with each rate on the
source of Python's standard library, in one process of torch, and a table shows the mean loss of the last tenth of the steps: with muP the
best rate of the narrowest model should be that of the others too.
"""

from __future__ import annotations

import sys
from math import isfinite

import torch
from torch import nn

from ..cli.config.load import load_recipe
from ..trainer.loop.data.prepare import cache_folder, prepare_corpus
from ..trainer.loop.data.samples.batches import Batches
from ..trainer.models.build import build_model
from ..trainer.spec.derived.width_scaling import is_rate_divided, width_factor
from ..trainer.spec.run import Run
from ..trainer.spec.sections.lr_schedule import learning_rate
from .show_help import show_help

WIDTHS, HEAD = (32, 64, 128, 256), 16
RATES = tuple(2.0**power for power in range(-11, -3))
WORDS = (
    *("model=tiny_llama", "model.layers=2", "model.kv_heads=null", "model.tied=false", f"model.head_dim={HEAD}", "model.vocab=256"),
    *("data=stdlib", "train.seq=64", "train.batch=16", "train.microbatch=16", "train.precision=fp32", "train.clip=1.0"),
    *("optim.weight_decay=0", "optim.schedule=linear", "cluster.gpus=1", "parallel.zero=0", "engine=native"),
)


def main() -> None:
    """Train all and print a table for each way."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    torch.set_num_threads(1)
    for mup in (False, True):
        print(f"\n{'muP, lr of width ' + str(WIDTHS[0]) if mup else 'the same lr for all weights'}: loss after {steps} steps")
        print("  width " + "".join(f"{f'2^{round(torch.tensor(rate).log2().item())}':>8}" for rate in RATES) + "    best")
        for width in WIDTHS:
            losses = [train(run_of(width, rate, steps, mup=mup), steps) for rate in RATES]
            best = RATES[losses.index(min(losses))]
            cells = "".join(f"{each:>8.3f}" if isfinite(each) else f"{'-':>8}" for each in losses)
            print(f"  {width:>5} {cells}  {best:.2g}", flush=True)


def run_of(width: int, rate: float, steps: int, *, mup: bool) -> Run:
    """Return the run of a width and a rate."""
    sizes = (f"model.hidden={width}", f"model.heads={width // HEAD}", f"model.ffn={3 * width}")
    length = (f"optim.lr={rate}", f"train.steps={steps}", f"optim.warmup={steps // 10}")
    return load_recipe("quickstart", (*WORDS, *sizes, *length, *((f"optim.mup={WIDTHS[0]}",) if mup else ())))


def train(run: Run, steps: int) -> float:
    """Train a run; return the mean loss of its last tenth of steps, infinity where it is not finite."""
    corpus = prepare_corpus(run.data, vocab=run.model.vocab, seq=run.train.seq, cache=cache_folder(run.data), progress=lambda *_: None)
    batches = Batches(corpus, seed=run.train.seed, seq=run.train.seq)
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed)
    divisors = [width_factor(run) if is_rate_divided(run, name, each.dim()) else 1.0 for name, each in module.named_parameters()]
    groups = [{"params": [each], "divisor": divisor} for each, divisor in zip(module.parameters(), divisors, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=run.optim.lr, betas=run.optim.betas, weight_decay=0.0)
    losses = []
    for step in range(steps):
        batch = batches.batch(step * run.train.batch, run.train.batch)
        total, labels = module(batch.tokens, batch.labels)
        optimizer.zero_grad()
        (total / labels).backward()
        nn.utils.clip_grad_norm_(module.parameters(), run.train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, steps) / group["divisor"]
        optimizer.step()
        losses.append((total / labels).item())
    last = losses[-max(1, steps // 10) :]
    mean = sum(last) / len(last)
    return mean if isfinite(mean) else float("inf")


if __name__ == "__main__":
    show_help(__doc__)
    main()
