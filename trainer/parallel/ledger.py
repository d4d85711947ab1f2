"""A ledger of what this rank sends: each collective and each send that torch is asked for, by axis, verb and payload.

Whoever asks, our layers, DeepSpeed or torch itself, forward, backward or recomputation: every message of torch.distributed passes
its dispatcher as an operator of `c10d`, where a dispatch mode sees it. The mode costs some 3 microseconds an operator while it is
open, changes no number, and makes a compiled module run as it is written; so it is open for a step, not for a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.deepspeed.messages import CONTROL, Row
from .process_groups import Grid

SMALL = 8  # elements of a message that is control, unless a layer of ours sends it
LAYERS = ("tp", "cp", "copies")  # groups in which only our layers speak
# What the plan calls an axis: the ranks that gradients add up over, however many of them share a sequence or hold the same experts.
SAID = {"data": "dp", "expert_copies": "dp"}

# As trainer/plan/collectives.py counts: what an all-reduce adds up, an all-gather ends with, a reduce-scatter begins with, all that
# a rank hands to an all-to-all. Each row: operator of c10d, verb, which of its arguments holds the payload.
VERBS: dict[str, tuple[str, int]] = {
    "allreduce_":                         ("all_reduce",     0),
    "allreduce_coalesced_":               ("all_reduce",     0),
    "_allgather_base_":                   ("all_gather",     0),
    "allgather_":                         ("all_gather",     0),
    "allgather_coalesced_":               ("all_gather",     0),
    "allgather_into_tensor_coalesced_":   ("all_gather",     0),
    "_reduce_scatter_base_":              ("reduce_scatter", 1),
    "reduce_scatter_":                    ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_":   ("reduce_scatter", 1),
    "alltoall_base_":                     ("all_to_all",     1),
    "alltoall_":                          ("all_to_all",     1),
    "send":                               ("send",           0),
    "broadcast_":                         ("broadcast",      0),
    "reduce_":                            ("reduce",         0),
    "gather_":                            ("gather",         1),
    "scatter_":                           ("scatter",        1),
    "barrier":                            ("barrier",        0),
}  # fmt: skip


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is open, `with ledger:`, as often as it is opened. A receive is not counted: its send is."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = Axes(grid)
        self._counts: Counter[tuple[str, str, int]] = Counter()

    @property
    def rows(self) -> list[Row]:
        """What was counted, by axis, verb and payload."""
        return sorted(Row(axis=axis, verb=verb, payload=payload, count=count) for (axis, verb, payload), count in self._counts.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "namespace", "") == "c10d":
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        verb, at = VERBS.get(func._overloadpacket.__name__, (None, 0))
        if verb is None:
            return
        group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
        if group.size() > 1:
            payload = list(_tensors(args[at]))
            size = 0 if verb == "barrier" else sum(each.numel() * each.element_size() for each in payload)
            self._counts[self._axes.of(group, verb, payload), verb, size] += 1


class Axes:
    """Names the axis of a process group: one of the grid's own, or one of as many ranks that somebody else has made."""

    def __init__(self, grid: Grid) -> None:
        groups = {axis: group for axis, group in grid.groups.items() if axis != "dp"}  # in `data`; alone it says nothing
        self._own = {group.handle.group_name: SAID.get(axis, axis) for axis, group in groups.items()}
        others = ("tp", "data", "ends", "pp", "copies", "model")  # whose groups others make too
        self._ranks = [(SAID.get(axis, axis), groups[axis].ranks) for axis in others if axis in groups]

    def of(self, group: dist.ProcessGroup, verb: str, payload: list[Tensor]) -> str:
        """The axis of a message. A send lies along the pipeline, whatever its group; what is small is control."""
        own = self._own.get(group.group_name)
        if own not in LAYERS and (verb == "barrier" or _small(payload)):
            return CONTROL
        if verb == "send":
            return "pp"
        if own is not None:
            return own
        ranks = tuple(dist.get_process_group_ranks(group))
        return next((axis for axis, members in self._ranks if members == ranks), "world")


def _small(payload: list[Tensor]) -> bool:
    """Whether a message is a few numbers, or of integers: shapes, objects, traces that ranks compare."""
    return sum(map(Tensor.numel, payload)) <= SMALL or not payload[0].is_floating_point()


def _tensors(held: Any) -> Iterator[Tensor]:
    """Every tensor of an argument, however deep its lists."""
    if isinstance(held, Tensor):
        yield held
    else:
        for each in held:
            yield from _tensors(each)
