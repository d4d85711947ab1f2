"""A plan as an SVG: the memory of a rank in every stage, by kind, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...trainer.spec.format_numbers import seconds_range_text, seconds_text, size_range_text
from .svg import MARGIN, WIDTH, box, document, label, legend

MEMORY = (76, 176)  # top and height of the memory chart
TIME = (316, 26)  # top and height of the time bar
GIB = 1 << 30

# fmt: off
KINDS = (  # keys of a stage's bytes in `plan --json`, what the legend calls them, colour
    ("weights",     "weights",      "#4c78a8"),
    ("gradients",   "gradients",    "#72b7b2"),
    ("optimizer",   "optimizer",    "#54a24b"),
    ("activations", "activations",  "#eeca3b"),
    ("logits",      "logits",       "#f58518"),
    ("buffers",     "buffers",      "#b279a2"),
    ("temporary",   "temporary",    "#ff9da6"),
    ("overhead",    "other",        "#9d9da0"),
)
PARTS = (  # keys of `time`, what the legend calls them, colour
    ("compute",   "computing",                 "#4c78a8"),
    ("exposed",   "waiting for messages",      "#f58518"),
    ("bubble",    "waiting in the pipeline",   "#9d9da0"),
    ("optimizer", "optimizer step",            "#54a24b"),
)
# fmt: on


def draw_plan(plan: Mapping[str, Any]) -> str:
    """Return the SVG of a plan, as `distrain plan --json` prints it."""
    height = TIME[0] + TIME[1] + 60 if plan.get("time") else TIME[0] - 20
    elements = [
        *_heading(plan),
        *_memory(plan["memory"], size_range_text(plan["memory"]["peak"], plan["memory_low"], plan["memory_high"])),
        *(_time(plan) if plan.get("time") else ()),
    ]
    return document(elements, height)


def _heading(plan: Mapping[str, Any]) -> Iterator[str]:
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in plan["mesh"].items() if degree > 1) or "one device"
    verdict = "fits" if plan["fits"] else "does not fit"
    yield label(MARGIN, 28, f"{plan['name']}: {verdict}", size=17, weight="bold")
    yield label(MARGIN, 48, f"{mesh} = {plan['world']:,} ranks on {plan['nodes']:,} nodes x {plan['gpus']} {plan['device']}")


def _memory(memory: Mapping[str, Any], bar: str) -> Iterator[str]:
    """One column a stage, its kinds stacked, below a dashed line at the device's capacity; `bar` has the ends of the peak's error bar."""
    top, height = MEMORY
    stages: Sequence[Mapping[str, Any]] = memory["stages"]
    highest = max(memory["capacity"], memory["peak"])
    per_byte = height / highest
    step = (WIDTH - 2 * MARGIN) / len(stages)
    for number, stage in enumerate(stages):
        bottom = float(top + height)
        for kind, _, colour in KINDS:
            tall = stage["bytes"][kind] * per_byte
            bottom -= tall
            yield box(MARGIN + number * step, bottom, max(step - 1, 0.5), tall, colour)
    line = top + height - memory["capacity"] * per_byte
    yield f'<path d="M{MARGIN} {line:.1f}H{WIDTH - MARGIN}" stroke="#222" stroke-dasharray="5 4"/>'
    capacity, peak = (memory[key] / GIB for key in ("capacity", "peak"))
    yield label(WIDTH - MARGIN, line - 5, f"a device has {capacity:.1f} GiB", anchor="end")
    said = f"memory of a rank in stage 0 to {len(stages) - 1}: at most {peak:.1f} GiB{bar}, in stage {memory['stage']}"
    yield label(MARGIN, top + height + 16, said)
    yield from legend(_colours(KINDS), top + height + 32)


def _time(plan: Mapping[str, Any]) -> Iterator[str]:
    """One bar a step, its parts side by side."""
    time, throughput = plan["time"], plan["throughput"]
    top, height = TIME
    left, per_second = float(MARGIN), (WIDTH - 2 * MARGIN) / time["step"]
    for part, _, colour in PARTS:
        yield box(left, top, time[part] * per_second, height, colour)
        left += time[part] * per_second
    step = f"{seconds_text(time['step'])}{seconds_range_text(time['step'], plan['step_low'], plan['step_high'])}"
    said = f"a step takes {step}: {throughput['tokens_per_second']:,.0f} tokens/s, MFU {throughput['mfu']:.1%}"
    yield label(MARGIN, top + height + 18, said)
    yield from legend(_colours(PARTS), top + height + 36)


def _colours(rows: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """The names of a legend with their colours."""
    return ((name, colour) for _, name, colour in rows)
