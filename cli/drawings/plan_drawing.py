"""A plan as an SVG: the memory of a rank in every stage, by kind, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...trainer.spec.numbers.as_text import binary_unit, in_unit, seconds_range_text, seconds_text, size_range_text, size_text
from .svg import MARGIN, WIDTH, box, document, label, legend

MEMORY = (76, 176)  # top and height of the memory chart
TIME = (316, 26)  # top and height of the time bar
BAR = 30  # the height of a bar of memory, with the gap below it
MOST_BARS = 8  # stages that have a bar each

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
    ("host",      "the host, once a step",     "#b279a2"),
)
# fmt: on


def draw_plan(plan: Mapping[str, Any]) -> str:
    """Return the SVG of a plan, as `distrain plan --json` prints it."""
    height = TIME[0] + TIME[1] + 60 if plan.get("time") else TIME[0] - 20
    elements = [*_heading(plan), *_memory(plan), *(_time(plan) if plan.get("time") else ())]
    return document(elements, height)


def memory_drawing(plan: Mapping[str, Any]) -> str:
    """Return the SVG of a plan's memory alone, for a page with a legend: of few stages as bars, of many as columns."""
    stages = plan["memory"]["stages"]
    if len(stages) <= MOST_BARS:
        return document(_memory_bars(plan), 20 + BAR * len(stages), is_inner=True, title=_peak_text(plan))
    below = 22 + MEMORY[1] + 16
    ends = [label(MARGIN, below, f"stage {stages[0]['index']}"), label(WIDTH - MARGIN, below, f"stage {stages[-1]['index']}", anchor="end")]
    return document([*_columns(plan["memory"], 22), *ends], below + 6, is_inner=True, title=_peak_text(plan))


def time_drawing(plan: Mapping[str, Any]) -> str:
    """Return the SVG of the parts of a plan's step alone, for a page with a legend."""
    return document(_time_bar(plan["time"], 0), TIME[1], is_inner=True, title=_step_text(plan))


def _heading(plan: Mapping[str, Any]) -> Iterator[str]:
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in plan["mesh"].items() if degree > 1) or "one device"
    verdict = "fits" if plan["fits"] else "does not fit"
    yield label(MARGIN, 28, f"{plan['name']}: {verdict}", size=17, weight="bold")
    yield label(MARGIN, 48, f"{mesh} = {plan['world']:,} ranks on {plan['nodes']:,} nodes x {plan['gpus']} {plan['device']}")


def _memory(plan: Mapping[str, Any]) -> Iterator[str]:
    """The columns of the stages with what they show, and the legend."""
    top, height = MEMORY
    yield from _columns(plan["memory"], top)
    yield label(MARGIN, top + height + 16, _peak_text(plan))
    yield from legend(_kind_colours(plan["memory"]), top + height + 32)


def _columns(memory: Mapping[str, Any], top: float) -> Iterator[str]:
    """One column a stage, its kinds stacked, below a dashed line at the device's capacity."""
    height = MEMORY[1]
    stages: Sequence[Mapping[str, Any]] = memory["stages"]
    per_byte = height / max(memory["capacity"], memory["peak"])
    step = (WIDTH - 2 * MARGIN) / len(stages)
    for number, stage in enumerate(stages):
        bottom = float(top + height)
        for kind, _, colour in KINDS:
            tall = stage["bytes"][kind] * per_byte
            bottom -= tall
            yield box(MARGIN + number * step, bottom, max(step - 1, 0.5), tall, colour)
    line = top + height - memory["capacity"] * per_byte
    yield f'<path d="M{MARGIN} {line:.1f}H{WIDTH - MARGIN}" stroke="#222" stroke-dasharray="5 4"/>'
    yield label(WIDTH - MARGIN, line - 5, _capacity_text(memory), anchor="end")


def _memory_bars(plan: Mapping[str, Any]) -> Iterator[str]:
    """One bar a stage, its kinds side by side, beside a dashed line at the device's capacity; the fullest has an error bar."""
    memory, top = plan["memory"], 22.0
    left = float(MARGIN if len(memory["stages"]) == 1 else MARGIN + 56)
    per_byte = (WIDTH - MARGIN - left) / max(memory["capacity"], memory["peak"], plan["memory_high"] or 0)
    for number, stage in enumerate(memory["stages"]):
        at, place = top + number * BAR, left
        if len(memory["stages"]) > 1:
            yield label(MARGIN, at + 15, f"stage {stage['index']}")
        for kind, name, colour in KINDS:
            wide = stage["bytes"][kind] * per_byte
            if wide:
                yield box(place, at, wide, BAR - 8, colour, title=f"{name}: {size_text(stage['bytes'][kind])}")
            place += wide
        if stage["index"] == memory["stage"] and plan["memory_low"] is not None and plan["memory_high"] is not None:
            low, high, middle = left + plan["memory_low"] * per_byte, left + plan["memory_high"] * per_byte, at + BAR / 2 - 4
            ends = f"M{low:.1f} {middle - 4:.1f}v8M{high:.1f} {middle - 4:.1f}v8"
            yield f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}{ends}" stroke="#222" stroke-width="1.5"/>'
    line, bottom = left + memory["capacity"] * per_byte, top + BAR * len(memory["stages"])
    yield f'<path d="M{line:.1f} {top - 6:.1f}V{bottom - 2:.1f}" stroke="#222" stroke-dasharray="5 4"/>'
    yield label(line, top - 12, _capacity_text(memory), anchor="end" if line > WIDTH / 2 else "start")


def _capacity_text(memory: Mapping[str, Any]) -> str:
    return f"a device has {_size_text(memory['capacity'], memory['peak'])}"


def _size_text(size: int, peak: int) -> str:
    """Bytes in the unit that suits the peak, as the table beside the drawing has them."""
    return f"{in_unit(size, binary_unit(peak))} {binary_unit(peak)}"


def _peak_text(plan: Mapping[str, Any]) -> str:
    """The memory of the fullest rank, with the ends of its error bar."""
    memory = plan["memory"]
    stages = len(memory["stages"])
    ends = size_range_text(memory["peak"], plan["memory_low"], plan["memory_high"])
    size = f"{_size_text(memory['peak'], memory['peak'])}{ends}"
    return f"memory of a rank in stage 0 to {stages - 1}: at most {size}, in stage {memory['stage']}" if stages > 1 else f"memory: {size}"


def _time(plan: Mapping[str, Any]) -> Iterator[str]:
    """The bar of a step with its seconds, and the legend."""
    top, height = TIME
    time = plan["time"]
    yield from _time_bar(time, top)
    yield label(MARGIN, top + height + 18, _step_text(plan))
    yield from legend([(name, colour) for part, name, colour in PARTS if time[part]], top + height + 36)


def _time_bar(time: Mapping[str, float], top: float) -> Iterator[str]:
    """One bar a step, its parts side by side."""
    left, per_second = float(MARGIN), (WIDTH - 2 * MARGIN) / time["step"]
    for part, _, colour in PARTS:
        yield box(left, top, time[part] * per_second, TIME[1], colour)
        left += time[part] * per_second


def _step_text(plan: Mapping[str, Any]) -> str:
    """The seconds of a step with the ends of its error bar, and the throughput."""
    time, throughput = plan["time"], plan["throughput"]
    step = f"{seconds_text(time['step'])}{seconds_range_text(time['step'], plan['step_low'], plan['step_high'])}"
    return f"a step takes {step}: {throughput['tokens_per_second']:,.0f} tokens/s, MFU {throughput['mfu']:.1%}"


def _kind_colours(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The names and colours of the kinds that any stage holds."""
    return [(name, colour) for kind, name, colour in KINDS if any(stage["bytes"][kind] for stage in memory["stages"])]
