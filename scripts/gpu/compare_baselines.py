"""Checks that time plain PyTorch at the sizes of a planned run, and compare it with `fit` there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...cli.config.load import load_recipe
from ...trainer.plan.plan import make_plan
from ...trainer.spec.run import Run
from .baselines.gpt_autocast import time_gpt
from .baselines.llama_fsdp import time_llama
from .baselines.timed_loop import Sizes, Timed
from .check_context import CheckContext
from .finding import CheckBroken, Finding
from .fit_runs import FitRun, fit_overrides
from .kernel_table import events_of, longest_kernels
from .planned_runs import KERNELS, PLANNED, skip_too_large


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A plain loop, and the planned run whose sizes it takes."""

    planned: str
    time: Callable[[Sizes, torch.device], Timed]


BASELINES = {
    "autocast gpt2_124m": Baseline(planned="gpt2_124m compiled", time=time_gpt),
    "fully_shard llama 16 layers": Baseline(planned="llama 16 layers compiled", time=time_llama),
    "autocast gpt2_1_5b": Baseline(planned="gpt2_1_5b compiled", time=time_gpt),
}


def compare_with_baseline(context: CheckContext, name: str) -> Finding:
    """Time a baseline; figures are its seconds, bytes and MFU, and how many of its tokens/s `fit` reached in this program."""
    baseline = BASELINES[name]
    planned = PLANNED[baseline.planned]
    sizes = FitRun(name=name, recipe=planned.recipe, words=planned.overrides(context))
    skip_too_large(sizes, context)
    run = load_recipe(planned.recipe, fit_overrides(sizes, context))
    timed = baseline.time(_sizes(run), torch.device("cuda" if context.on_gpu else "cpu"))
    if not all(loss == loss and abs(loss) < 1e4 for loss in timed.losses):
        raise CheckBroken(f"its losses are not finite: {timed.losses}")
    plan, peak = make_plan(run), run.cluster.device.peak.get("bf16")
    assert plan.model is not None
    rate = run.train.batch * run.train.seq / timed.step_seconds
    ours = context.earlier.get(f"plan {baseline.planned}")
    return Finding(
        figures={
            "step_seconds": timed.step_seconds,
            "memory_peak": timed.memory_peak,
            "losses": timed.losses,
            "tokens_per_second": rate,
            "mfu": rate * plan.model.flops_per_token / peak if peak else None,
            "fit's tokens/s of its": ours["tokens_per_second"] / rate if ours else None,
            "fit's bytes of its": ours["memory_peak"] / timed.memory_peak if ours and ours["memory_peak"] else None,
            "kernels: launches, seconds": longest_kernels(events_of(timed.trace), 1, KERNELS),
        }
    )


def _sizes(run: Run) -> Sizes:
    model, train = run.model, run.train
    return Sizes(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn or 4 * model.hidden,
        vocab=-(-model.vocab // model.vocab_multiple) * model.vocab_multiple,
        seq=train.seq,
        microbatch=train.microbatch,
        micros=train.batch // train.microbatch,
    )
