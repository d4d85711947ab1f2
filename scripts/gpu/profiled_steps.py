"""The check of a profiler's trace: the kernels of a step, and how often the host waits for the device."""

from __future__ import annotations

from collections import Counter

from .check_context import CheckContext
from .finding import Finding
from .fit_runs import UNTIMED, FitRun, fit
from .kernel_table import busy_seconds, longest_kernels, read_events
from .planned_runs import PLANNED

# What the host calls to wait for the device; reading a number from it calls the first.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
MOST_WAITS = 1  # a step; the profiler's end is one more
TRACED = (6, 8)  # first and last step


def trace_steps(context: CheckContext) -> Finding:
    """Profile three steps of GPT-2 124M: the trace must hold the device's kernels, and at most one wait for the device a step and one at
    its end."""
    planned = PLANNED["gpt2_124m"]
    words = (*planned.overrides(context), f"log.profile=[{TRACED[0]},{TRACED[1]}]")
    trained = fit(FitRun(name="traced", recipe=planned.recipe, words=words), context, UNTIMED)
    events = read_events(trained.folder)
    steps = TRACED[1] - TRACED[0] + 1
    kinds = Counter(str(event.get("cat")) for event in events if event.get("ph") == "X")
    names = Counter(str(event.get("name")) for event in events if event.get("ph") == "X")
    waits = [names[each] for each in WAITS]
    kernels = kinds["kernel" if context.on_gpu else "cpu_op"] / steps
    departures = [] if kernels else ["the trace holds no kernels"]
    departures += wait_departures(sum(waits), steps)
    return Finding(
        figures={
            "kernels a step": kernels,
            "busy seconds a step": busy_seconds(events) / steps,
            "waits a step": sum(waits) / steps,
            "waits by call": {name: each / steps for name, each in zip(WAITS, waits, strict=True)},
            "longest kernels: launches, seconds": longest_kernels(events, steps, 10),
        },
        departures=tuple(departures),
    )


def wait_departures(waits: int, steps: int) -> list[str]:
    """Return, of a trace of so many steps, whether the host waited too often; the end of the profiler is no step's wait."""
    each = (waits - 1) / steps
    return [f"{each:.1f} waits for the device a step"] if each > MOST_WAITS else []
