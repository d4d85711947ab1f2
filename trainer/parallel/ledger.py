"""The ledger of this rank's messages: every collective and send that torch runs, by axis, verb and payload.

Every message of torch.distributed passes its dispatcher as an operator of `c10d`, whether our layers, DeepSpeed or torch itself
send it, in forward, backward or recomputation; a dispatch mode counts it there. The mode costs about 3 microseconds an operator while
it is open, changes no number, and makes a compiled module run uncompiled, so it is open for a step, not for a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.axes import AXES
from ..plan.compare_rank_messages import CONTROL, MessageRow
from .process_groups import FIGURES_GROUP, Grid

FEW_FIGURES = 8  # float64 elements up to which a sum or a broadcast is control, unless one of our layers sends it
AGREEMENTS = ("all_reduce", "broadcast", "reduce")  # verbs of small messages by which ranks agree on a number
# Groups over which gradients are summed and weights are sharded: the plan counts their messages to the data axis.
PLANNED_AS = dict.fromkeys(
    (
        *("data", "worker_data", "workers", "shard", "shard_copies", "inside", "across"),
        *("expert_copies", "expert_worker_data", "expert_workers", "expert_shard", "expert_shard_copies"),
    ),
    "dp",
)

# Each row: operator of c10d, verb, which of its arguments holds the payload. The payload is that of trainer/plan/axes/collectives.py: the
# tensor that an all-reduce sums, an all-gather produces, a reduce-scatter takes, and all that a rank gives to an all-to-all.
C10D_VERBS: dict[str, tuple[str, int]] = {
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
    """Counts messages while it is open (`with ledger:`); it may be opened again. A receive is not counted, its send is.

    `collectives` are those of this rank in their order: the ranks of the group, its name, the verb, the payload's bytes.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = GroupAxes(grid)
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self.collectives: list[tuple[list[int], str, str, int]] = []

    @property
    def rows(self) -> list[MessageRow]:
        """The counts by axis, verb and payload."""
        return sorted(
            MessageRow(axis=axis, verb=verb, payload=payload, count=count) for (axis, verb, payload), count in self._counts.items()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "namespace", "") == "c10d":
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        verb, at = C10D_VERBS.get(func._overloadpacket.__name__, (None, 0))
        if verb is None:
            return
        group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
        if group.size() > 1:
            payload = list(_tensors(args[at]))
            size = 0 if verb == "barrier" else sum(each.numel() * each.element_size() for each in payload)
            self._counts[self._axes.axis_of(group, verb, payload), verb, size] += 1
            if verb != "send":
                self.collectives.append((dist.get_process_group_ranks(group), group.group_name, verb, size))


class GroupAxes:
    """Names the axis of a process group: one of the grid's own, or another library's group of the same ranks."""

    def __init__(self, grid: Grid) -> None:
        groups = {axis: group for axis, group in grid.groups.items() if axis != "dp"}  # its messages are those of `data`
        self._all_ranks = dist.group.WORLD.group_name if dist.group.WORLD else None
        self._own = {group.handle.group_name: PLANNED_AS.get(axis, axis) for axis, group in groups.items()}
        others = ("tp", "data", "ends", "pp", "copies", "model")  # DeepSpeed makes groups of the same ranks
        self._ranks = [(PLANNED_AS.get(axis, axis), groups[axis].ranks) for axis in others if axis in groups]

    def axis_of(self, group: dist.ProcessGroup, verb: str, payload: list[Tensor]) -> str:
        """The axis of a message. A send is the pipeline's, unless it is to or from a parameter server; integers are control, and so are
        small messages, except those of layers, and float64 sums over the group of all ranks: the figures of a step."""
        own = self._own.get(group.group_name)
        sums_figures = group.group_name == self._all_ranks or group.group_desc == FIGURES_GROUP
        if sums_figures and verb == "all_reduce" and payload[0].dtype == torch.float64:
            return CONTROL
        layers_only = own == "copies" or (own in AXES and AXES[own].layers_only)
        if verb == "barrier" or _holds_integers(payload) or (not layers_only and verb in AGREEMENTS and _is_small(payload)):
            return CONTROL
        if verb == "send" and own != "dp":
            return "pp"
        if own is not None:
            return own
        ranks = tuple(dist.get_process_group_ranks(group))
        return next((axis for axis, members in self._ranks if members == ranks), "world")


def _is_small(payload: list[Tensor]) -> bool:
    """Whether a message is a norm, a flag, or the losses of a step, which are sent in float64: gradients may have few elements too."""
    elements = sum(map(Tensor.numel, payload))
    return elements <= 1 or (elements <= FEW_FIGURES and payload[0].dtype == torch.float64)


def _holds_integers(payload: list[Tensor]) -> bool:
    """Whether a message has integers: counts, shapes, objects, traces that ranks compare."""
    return not payload[0].is_floating_point()


def _tensors(held: Any) -> Iterator[Tensor]:
    """Every tensor of an argument, in nested lists too."""
    if isinstance(held, Tensor):
        yield held
    else:
        for each in held:
            yield from _tensors(each)
