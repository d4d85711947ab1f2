"""The check that a run which fills a GPU's memory ends with a line that explains it."""

from __future__ import annotations

import re

from ...cli.config.load import load_recipe
from ...trainer.loop.failures.out_of_memory import UNITS
from ...trainer.plan.plan import make_plan
from .check_context import CheckContext
from .finding import CheckSkipped, Finding
from .fit_runs import FitRun, fit_overrides, started_fit

RECIPE = "gpt2_124m_1gpu"
TIMES = 1.25  # of the device's memory that the run takes at least
LINE = re.compile(
    r"out of GPU memory: asked for [^;]*; of [^;]* tensors hold ([\d.]+) (MiB|GiB) \([\d.]+ GiB planned at most\)[^;]*; less is"
)


def fill_device(context: CheckContext) -> Finding:
    """Train with sequences that take more memory than the GPU has, on which the plan is told that there is enough. Raises CheckSkipped
    without a GPU: the kernel would end any process of the machine."""
    if not context.on_gpu or context.memory is None:
        raise CheckSkipped("it needs a GPU, whose memory it fills")
    run = _too_large(context, context.memory)
    with started_fit(run, context) as process:
        said, _ = process.communicate()
    line = next((each for each in said.splitlines() if "out of GPU memory" in each), "")
    found = LINE.search(line)
    held = float(found[1]) * UNITS[found[2]] if found else None
    departures = ["it ended well"] if process.returncode == 0 else []
    if held is None:
        departures.append(f"no line explains it: {' | '.join(said.strip().splitlines()[-3:])}")
    elif not context.memory / 2 < held < context.memory:
        departures.append(f"tensors are said to hold {held / context.memory:.2f} of the device's memory")
    return Finding(figures={"line": line, "share held by tensors": held and held / context.memory}, departures=tuple(departures))


def _too_large(context: CheckContext, memory: float) -> FitRun:
    sequences, peak = 8, 0
    while peak < TIMES * memory:
        sequences *= 2
        sizes = (f"train.microbatch={sequences}", f"train.batch={sequences}")
        words = ("data=synthetic", "train.steps=3", "train.tokens=null", "optim.warmup=0", f"cluster.device.memory={100 * memory}", *sizes)
        run = FitRun(name="too_large", recipe=RECIPE, words=words)
        planned = make_plan(load_recipe(RECIPE, fit_overrides(run, context))).memory
        peak = planned.peak if planned else 0
    return run
