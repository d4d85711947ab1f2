"""Draws a plan as an SVG: the memory of a rank in every stage, by kind, and where the time of a step goes.

Run `distrain plan conf=NAME --json | python -m distrain.scripts.draw_plan > plan.svg`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from ..trainer.spec.format_numbers import seconds_range_text, seconds_text, size_range_text

WIDTH, MARGIN = 760, 24  # pixels, as all lengths here
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


def draw(plan: Mapping[str, Any]) -> str:
    """Return the SVG of a plan, as `distrain plan --json` prints it."""
    height = TIME[0] + TIME[1] + 60 if plan.get("time") else TIME[0] - 20
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_heading(plan),
        *_memory(plan["memory"], size_range_text(plan["memory"]["peak"], plan["memory_low"], plan["memory_high"])),
        *(_time(plan) if plan.get("time") else ()),
        "</svg>",
    ]
    return "\n".join(rows) + "\n"


def _heading(plan: Mapping[str, Any]) -> Iterator[str]:
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in plan["mesh"].items() if degree > 1) or "one device"
    verdict = "fits" if plan["fits"] else "does not fit"
    yield _text(MARGIN, 28, f"{plan['name']}: {verdict}", size=17, weight="bold")
    yield _text(MARGIN, 48, f"{mesh} = {plan['world']:,} ranks on {plan['nodes']:,} nodes x {plan['gpus']} {plan['device']}")


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
            yield _box(MARGIN + number * step, bottom, max(step - 1, 0.5), tall, colour)
    line = top + height - memory["capacity"] * per_byte
    yield f'<path d="M{MARGIN} {line:.1f}H{WIDTH - MARGIN}" stroke="#222" stroke-dasharray="5 4"/>'
    capacity, peak = (memory[key] / GIB for key in ("capacity", "peak"))
    yield _text(WIDTH - MARGIN, line - 5, f"a device has {capacity:.1f} GiB", anchor="end")
    said = f"memory of a rank in stage 0 to {len(stages) - 1}: at most {peak:.1f} GiB{bar}, in stage {memory['stage']}"
    yield _text(MARGIN, top + height + 16, said)
    yield from _legend(KINDS, top + height + 32)


def _time(plan: Mapping[str, Any]) -> Iterator[str]:
    """One bar a step, its parts side by side."""
    time, throughput = plan["time"], plan["throughput"]
    top, height = TIME
    left, per_second = float(MARGIN), (WIDTH - 2 * MARGIN) / time["step"]
    for part, _, colour in PARTS:
        yield _box(left, top, time[part] * per_second, height, colour)
        left += time[part] * per_second
    step = f"{seconds_text(time['step'])}{seconds_range_text(time['step'], plan['step_low'], plan['step_high'])}"
    said = f"a step takes {step}: {throughput['tokens_per_second']:,.0f} tokens/s, MFU {throughput['mfu']:.1%}"
    yield _text(MARGIN, top + height + 18, said)
    yield from _legend(PARTS, top + height + 36)


def _legend(rows: Sequence[tuple[str, str, str]], top: float) -> Iterator[str]:
    left = float(MARGIN)
    for _, name, colour in rows:
        yield _box(left, top - 9, 10, 10, colour)
        yield _text(left + 15, top, name)
        left += 33 + 6.2 * len(name)


def _box(left: float, top: float, wide: float, tall: float, colour: str) -> str:
    return f'<rect x="{left:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{tall:.2f}" fill="{colour}"/>'


def _text(left: float, top: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start") -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text {place} fill="#222">{escape(text)}</text>'


if __name__ == "__main__":
    sys.stdout.write(draw(json.load(sys.stdin)))
