"""What a plan's table of memory says: ranges of similar stages, the bytes of each kind, shares of the capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...trainer.plan.plan_data import Memory, MemoryBytes, StageMemory
from ...trainer.spec.numbers.as_text import binary_unit, count_text, digits, in_unit

MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary", "overhead")
ACTIVATION_FORMS = {"torch": "of our modules", "compiled": "of our compiled layers", "megatron": "as the papers count them"}
MAX_STAGES = 12  # rows of stages; of more, the middle is left out
MAX_RANGES = 3  # ranges of layers that one row shows


@dataclass(frozen=True, kw_only=True)
class StageRange:
    """Neighbouring stages that hold equally many layers and parameters: first and last stage, layers in words, bytes of the fullest."""

    first: int
    last: int
    layers: str
    bytes: MemoryBytes

    @property
    def stages(self) -> str:
        """The stages in words."""
        return _range_text(self.first, self.last)


def memory_title(memory: Memory) -> str:
    """What the table of memory shows, and in which unit."""
    unit = binary_unit(memory.peak)
    note = "; a range of stages shows its fullest" if any(each.first < each.last for each in stage_ranges(memory)) else ""
    return f"Memory of a rank in {unit}, capacity {in_unit(memory.capacity, unit)}; activations {ACTIVATION_FORMS[memory.form]}{note}"


def memory_kinds(memory: Memory) -> list[str]:
    """The kinds of memory that any stage holds, or that are not known."""
    unknown = memory.unknown[:1]  # the first stands for all: logits are activations too
    return [kind for kind in MEMORY_KINDS if kind in unknown or any(getattr(stage.bytes, kind) for stage in memory.stages)]


def memory_rows(memory: Memory, kinds: Sequence[str], headings: Mapping[str, str]) -> list[list[str]]:
    """A heading and a row for each range of stages, with a column a kind; `other` is the sum of the kinds without a column."""
    columns, unit = [kind for kind in kinds if kind != "overhead"], binary_unit(memory.peak)
    fullest = [each.bytes for each in stage_ranges(memory)]
    others = [each.total - sum(getattr(each, kind) for kind in columns) for each in fullest]
    rows = [["stage", "layers", *(headings.get(kind, kind) for kind in columns), *(["other"] if any(others) else []), "total"]]
    for each, held, other in zip(stage_ranges(memory), fullest, others, strict=True):
        figures = ["?" if kind in memory.unknown[:1] else in_unit(getattr(held, kind), unit) for kind in columns]
        sums = [in_unit(size, unit) for size in ([other, held.total] if any(others) else [held.total])]
        rows.append([each.stages, each.layers, *figures, *sums])
    return rows


def capacity_shares(memory: Memory) -> list[float]:
    """The share of the capacity that each range of stages takes."""
    return [each.bytes.total / memory.capacity for each in stage_ranges(memory)]


def capacity_share_text(share: float) -> str:
    """A share of the capacity as a percentage, without digits that do not count: 0.4 %, 47 %, 1,200 %."""
    return f"{digits(100 * share, 1) if share < 10 else count_text(100 * share)} %"


def stage_ranges(memory: Memory) -> list[StageRange]:
    """Ranges of neighbouring stages that hold equally many layers and parameters."""
    grouped = groupby(memory.stages, key=lambda each: (each.layers[1] - each.layers[0], each.parameters))
    return [_stage_range(list(stages)) for _, stages in grouped]


def _stage_range(stages: Sequence[StageMemory]) -> StageRange:
    fullest = max(stages, key=lambda stage: stage.bytes.total)
    return StageRange(first=stages[0].index, last=stages[-1].index, layers=_layer_range(stages), bytes=fullest.bytes)


def shown_ranges(memory: Memory) -> list[int]:
    """The indices of the ranges of stages that a table shows: of many, the first two, the one with the fullest stage, the last two."""
    ranges = stage_ranges(memory)
    if len(ranges) <= MAX_STAGES:
        return list(range(len(ranges)))
    fullest = next(at for at, each in enumerate(ranges) if each.first <= memory.stage <= each.last)
    return sorted({0, 1, fullest, len(ranges) - 2, len(ranges) - 1})


def _layer_range(stages: Sequence[StageMemory]) -> str:
    """The layers of a range of stages, for each of the parts of the model that every stage holds."""
    first, last = stages[0], stages[-1]
    ranges = [(min(one[0], other[0]), max(one[1], other[1])) for one, other in zip(first.parts, last.parts, strict=True)]
    shown = [_range_text(start, end - 1) for start, end in ranges if end > start]
    if len(shown) > MAX_RANGES:
        shown = [shown[0], "..", shown[-1]]
    return ", ".join(shown) or "-"


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
