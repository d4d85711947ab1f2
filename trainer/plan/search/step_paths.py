"""A pipeline's step as the longest path through its actions, whose seconds are linear in the layers of each part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..costs.block_costs import BlockCosts
from ..layout.layout import Layout, layer_partition
from ..layout.step_order import NOTHING, StepOrder, step_order
from ..layout_cost import hop_seconds
from ..part_seconds import part_seconds


class Path(NamedTuple):
    """Actions that run one after the other: no step takes less than `fixed` + the sum of `layer` x layers over the parts."""

    fixed: float
    layer: tuple[float, ...]  # seconds for each layer of each part

    def seconds(self, layers: Sequence[float]) -> float:
        """The seconds of the path where the parts have these layers."""
        return self.fixed + sum([each * many for each, many in zip(self.layer, layers, strict=True)])


class StepPaths:
    """The paths of a layout's step that are known: the longest of each partition that was timed."""

    def __init__(self, layout: Layout, blocks: BlockCosts) -> None:
        schedule, self.parts = layout.schedule, len(layout.partition.parts)
        self._paths: list[Path] = []
        self._send = hop_seconds(layout, blocks) / (2 * layout.chunks)
        self._order = step_order(schedule, layout.mesh.pp, layout.micros, layout.parallel.chunks) if schedule.flushes else None
        kinds = self._order.durations if self._order else tuple((kind, part) for part in range(self.parts) for kind in "FB")
        one, two = (part_seconds(_with_equal_parts(layout, many), blocks) for many in (1, 2))
        self._layer = [two(*each) - one(*each) for each in kinds]  # seconds for each layer
        self._fixed = [one(*each) - layer for each, layer in zip(kinds, self._layer, strict=True)]  # of the embedding and the head
        self._part = [part for _, part in kinds]
        self._stages = [layout.parts(stage) for stage in range(layout.mesh.pp)]
        self._micros = layout.micros

    def found_paths(self) -> list[Path]:
        """The paths found so far; the list grows."""
        return self._paths

    def step_seconds(self, layers: Sequence[float]) -> float:
        """The seconds in which the stages run a step's actions where the parts have these layers; its longest path becomes known."""
        seconds = [fixed + layer * layers[part] for fixed, layer, part in zip(self._fixed, self._layer, self._part, strict=True)]
        counts, sends = longest_path(self._order, seconds, self._send) if self._order else self._busiest_stage(seconds)
        layer = [0.0] * self.parts
        fixed = sends * self._send
        for many, each, per_layer, part in zip(counts, self._fixed, self._layer, self._part, strict=True):
            layer[part] += many * per_layer
            fixed += many * each
        path = Path(fixed, tuple(layer))
        if path not in self._paths:
            self._paths.append(path)
        return path.seconds(layers)

    def _busiest_stage(self, seconds: list[float]) -> tuple[list[int], int]:
        """Without a flush no stage waits: a step takes as long as its busiest stage computes."""
        loads = [sum(each for each, part in zip(seconds, self._part, strict=True) if part in parts) for parts in self._stages]
        parts = self._stages[loads.index(max(loads))]
        return [self._micros if part in parts else 0 for part in self._part], 0


def longest_path(order: StepOrder, seconds: Sequence[float], send: float) -> tuple[list[int], int]:
    """(actions of each duration on the longest path of a step, messages between stages on it)."""
    ends = order.ends(seconds, send)
    counts, sends = [0] * len(order.durations), 0
    at = max(range(len(order.steps)), key=ends.__getitem__)
    while at != NOTHING:
        duration, before, needs, is_sent = order.steps[at]
        counts[duration] += 1
        waits = is_sent and ends[needs] + send > ends[before]
        sends += waits
        at = needs if waits else before
    return counts, sends


def _with_equal_parts(layout: Layout, layers: int) -> Layout:
    parts = (layers,) * len(layout.partition.parts)
    return layout._replace(partition=layer_partition(parts, chunks=layout.chunks, folded=layout.is_folded))
