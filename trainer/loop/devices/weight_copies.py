"""Copies of the weights that must have the same bits: which layouts promise that, their checksums, the copy that has departed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ...engines.engine import Engine
from ...layers.counter_rng import hash64
from ...layers.rank_group import GroupName
from ...plan.layout.schedule_of_run import delay_of
from ...spec.run import Run
from .checksum import checksum

# Of the ranks with the same weights, by whether these are experts
GROUPS: Mapping[bool, GroupName] = {False: "worker_data", True: "expert_worker_data"}

Ranks = tuple[int, ...]
GroupRows = Mapping[Ranks, Sequence[tuple[str, int]]]  # (name, checksum) of each weight of which these ranks have copies


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Two ranks whose copies of a weight differ. `is_known`: most copies agree with that of `other`, so that `rank` has departed."""

    name: str
    rank: int
    other: int
    is_known: bool

    @property
    def text(self) -> str:
        """The first weight that differs, and on which ranks."""
        return f"{self.name} on rank {self.rank} differs from its copy on rank {self.other}"


def promises_equal_copies(run: Run) -> bool:
    """Whether replicas that step together have weights of the same bits between two steps.

    They step with the same sums of gradients. At ZeRO 3 there are no copies; weights and sums that are used late are left out.
    """
    return run.parallel.zero < 3 and not run.parallel.staleness and delay_of(run.parallel) is None


def steps_alone(run: Run) -> bool:
    """Whether some replicas compute the same optimizer step each by itself: on devices of two kinds it may round otherwise."""
    return run.parallel.zero == 0 or run.parallel.shard != "all"


@torch.no_grad()
def weight_checksums(engine: Engine) -> GroupRows:
    """Return the checksum of each weight that this rank computes with and of which other ranks have copies."""
    found: dict[Ranks, list[tuple[str, Tensor]]] = {}
    weights = ((GROUPS[row.shard.expert], row.name, row.parameter) for row in engine.parameters)
    constants = ((GROUPS[False], name, tensor) for name, tensor in engine.constants())
    for name_of_group, name, tensor in chain(weights, constants):
        if group := engine.grid.group(name_of_group):
            found.setdefault(group.ranks, []).append((name, checksum(tensor.contiguous())))
    return {ranks: _on_host(rows) for ranks, rows in found.items()}


def _on_host(rows: Sequence[tuple[str, Tensor]]) -> list[tuple[str, int]]:
    """Wait for the device once."""
    return list(zip((name for name, _ in rows), torch.stack([each for _, each in rows]).tolist(), strict=True))


def totals(rows: GroupRows) -> dict[Ranks, int]:
    """Return one checksum for all weights of each group."""
    return {ranks: hash64(*(total for _, total in each)) for ranks, each in rows.items()}


def all_agree(everyone: Sequence[Mapping[Ranks, int]]) -> bool:
    """Whether the totals of all ranks, in rank order, agree within each group."""
    return all(everyone[other][ranks] == total for each in everyone for ranks, total in each.items() for other in ranks[:1])


def first_departure(everyone: Sequence[GroupRows]) -> Departure | None:
    """Return the first weight, of all ranks' rows in rank order, whose copies differ; None where all agree."""
    for ranks in dict.fromkeys(group for rows in everyone for group in rows):
        copies = [everyone[rank][ranks] for rank in ranks]
        for rows in zip(*copies, strict=True):  # (name, checksum) of one weight on each rank
            (most, agree), *_ = Counter(rows).most_common(1)
            if agree < len(rows):
                is_known = 2 * agree > len(rows)
                usual = most if is_known else rows[0]
                odd = next(at for at, each in enumerate(rows) if each != usual)
                return Departure(name=usual[0], rank=ranks[odd], other=ranks[rows.index(usual)], is_known=is_known)
    return None
