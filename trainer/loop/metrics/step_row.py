"""The metrics of a logged step: its row in metrics.jsonl and its line on the console."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ...engines.engine import StepResult
from ...engines.step_figures import PreferenceFigures
from ...rundir.metric_rows import ACCURACY_KEY, AVERAGED_KEY, VALIDATION_KEY, figures_of_sets, key_of_set
from ..step.train_progress import TrainProgress
from .throughput import ThroughputMeter

Row = Mapping[str, Any]  # the metrics of a step by name; `step` is always there
# fmt: off
SHOWN_FIGURES = (  # on the console: a word, the key in the row, its format
    ("loss",     "loss",     ".4f"),
    ("mtp",      "mtp_loss", ".4f"),
    ("busiest expert", "expert_load", ".2f"),
    ("accuracy", "accuracy", ".3f"),
    ("margin",   "margin",   ".4f"),
)
SHOWN_SETS = (  # the same of validation sets, each with its name
    ("validation", VALIDATION_KEY, ".4f"),
    ("averaged",   AVERAGED_KEY,   ".4f"),
    ("accuracy",   ACCURACY_KEY,   ".3f"),
)
# fmt: on


def step_row(progress: TrainProgress, result: StepResult, lr: float, meter: ThroughputMeter) -> dict[str, Any]:
    """Return the metrics of the step that led to this progress, and the throughput since the last row."""
    row = {
        "step": progress.step,
        "loss": finite_or_none(result.loss),
        "grad_norm": finite_or_none(result.grad_norm),
        "lr": lr,
        "tokens": progress.tokens,
    }
    if result.routing is not None:
        row |= result.routing.figures()
    for name, loss in (("router_loss", result.router_loss), ("mtp_loss", result.mtp_loss)):
        if loss is not None:
            row[name] = finite_or_none(loss)
    if result.preferences is not None:
        row |= preference_row(result.preferences)
    return row | meter.take_row()


def preference_row(figures: PreferenceFigures, *, of: str = "", name: str = "") -> dict[str, Any]:
    """Return the metrics of pairs of answers; `of` stands before their names, and the name of a validation set behind them."""
    margin = figures.chosen_reward - figures.rejected_reward
    named = figures._asdict() | {"margin": margin}
    return {key_of_set(f"{of}{figure}", name): finite_or_none(each) for figure, each in named.items()}


def finite_or_none(value: float | None) -> float | None:
    """Return a number that JSON can hold: None for NaN and infinities."""
    return value if value is not None and isfinite(value) else None


def console_line(row: Row, last: int) -> str:
    """Return a logged step as a line; `last` is the run's last step."""
    parts = [f"step {row['step']:>{len(str(last))}}/{last}"]
    parts += [f"{word} {row[key]:{form}}" for word, key, form in SHOWN_FIGURES if row.get(key) is not None]
    for word, key, form in SHOWN_SETS:
        if of_sets := [f"{name} {figure:{form}}".lstrip() for name, figure in figures_of_sets(row, key).items() if figure is not None]:
            parts.append(f"{word} {', '.join(of_sets)}")
    if row.get("grad_norm") is not None:
        parts.append(f"norm {row['grad_norm']:.3f}")
    if "batch" in row:
        parts.append(f"batch {row['batch']}")
    if "lr" in row:
        parts += [f"lr {row['lr']:.2e}", f"{row['tokens_per_second']:,.0f} tokens/s"]
    spikes = [f"{row[name]} deviations above recent {what}" for name, what in (("spike", "losses"), ("norm_spike", "norms")) if name in row]
    if "skipped" in row:
        why = f"a spike, {' and '.join(spikes)}," if spikes else "the loss or a gradient is not finite"
        parts.append(f"skipped, weights unchanged: {why} on samples {row['samples'][0]} to {row['samples'][1]}")
    elif spikes:
        parts.append(f"loss spike: {spikes[0]}")
    return "  ".join(parts)
