"""The check that `distrain calibrate` measures this machine, and that plans read what it writes."""

from __future__ import annotations

import json
from typing import Any

from .check_context import MACHINE, CheckContext
from .finding import Finding
from .run_distrain import run_distrain

SIDE = 8192  # of the products that are compared, which the check of the machine measures too
RATE = 0.15  # by which two measurements of one rate may differ


def calibrate_machine(context: CheckContext) -> Finding:
    """Measure the machine as `distrain calibrate` does, and plan a run with what it writes: its rates must be those of the check of the
    machine, where it found a GPU's."""
    folder = context.folder / "calibrated"
    device = () if context.on_gpu else ("device=cpu",)
    found = json.loads(run_distrain("calibrate", *device, "--devices", "1", "--output", str(folder), "--name", "here", "--json"))
    planned = json.loads(
        run_distrain("plan", "conf=gpt2_124m_1gpu", "device=here", "cluster=here", "parallel.dp=1", "--config-dir", str(folder), "--json")
    )
    measured = found["measured"]
    figures = {
        "measured": measured,
        "device": found["device"]["values"],
        "to type": found["to_type"],
        "step, seconds": planned["time"]["step"],
    }
    return Finding(figures=figures, departures=tuple(rate_departures(context, measured)))


def rate_departures(context: CheckContext, measured: dict[str, Any]) -> list[str]:
    """Return where rates differ from those of the check of the machine."""
    known = context.earlier.get(MACHINE)
    if not context.on_gpu or known is None:
        return []
    ours = {f"a product in {each['precision']}": min(each["rates"]) for each in measured["products"] if each["side"] == SIDE}
    theirs = {f"a product in {short}": known["matrix product, FLOP/s"][name] for short, name in (("bf16", "bfloat16"), ("fp32", "float32"))}
    pairs = {
        **{name: (ours.get(name), rate) for name, rate in theirs.items()},
        "a copy": (min(measured["copies"]), known["copy, bytes/s read and written"]),
    }
    return [
        f"{name}: calibrate measured {one or 0:.3g}, the check of the machine {other:.3g}"
        for name, (one, other) in pairs.items()
        if not one or abs(one / other - 1) > RATE
    ]
