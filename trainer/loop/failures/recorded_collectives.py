"""This rank's newest collectives, from torch's flight recorder: the last 2,000 messages of a process, unless TORCH_FR_BUFFER_SIZE is set.

gloo's have no events of a device: they are retired when they are done. Its sends and receives are counted, but not recorded. NCCL's are
completed when the device has done them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ...launch.rank.group_record import GroupRecord, Recorded, ranges_of

DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, where torch was built with it; of the other backends
FINISHED, UNFINISHED = 4, 4  # most collectives of a group that are reported
UNNAMED = ("default_pg", "undefined")
# What the recorder calls collectives of several kinds of tensors: our name.
VERBS = {
    "_all_gather_base": "all_gather",
    "ALLGATHER": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "REDUCE_SCATTER": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "all_to_allv": "all_to_all",
}
COALESCED = "coalesced"  # the end of several that a device does as one, and whose state it has


class KnownGroup(NamedTuple):
    """A group of this process: its name, its label, its ranks, and how many messages (over NCCL: collectives) this rank has sent in it."""

    name: str
    label: str
    ranks: tuple[int, ...]
    sent: int


def recorded_collectives() -> tuple[GroupRecord, ...]:
    """Return this rank's newest collectives in each group; none where nothing is recorded. It waits for no device and no other rank."""
    dumps = [json.loads(getattr(torch._C._distributed_c10d, name)()) for name in DUMPS if hasattr(torch._C._distributed_c10d, name)]
    return tuple(make_records([each for each in dumps if each.get("entries")], list(_known_groups())))


def _known_groups() -> Iterator[KnownGroup]:
    """Yield the groups of several ranks of which this process is a member."""
    for group in list(c10d._world.pg_map):
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            sent: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            yield KnownGroup(group.group_name, "" if group.group_desc in UNNAMED else group.group_desc, ranks, sent)


def make_records(dumps: Iterable[Mapping[str, Any]], groups: Iterable[KnownGroup]) -> Iterator[GroupRecord]:
    """Yield the record of each group, from what the recorder wrote."""
    entries: dict[str, list[dict[str, Any]]] = defaultdict(list)
    old: Counter[int] = Counter()  # numbers of the newest collectives of groups whose entries were overwritten, which have no names
    for dump in dumps:
        named = {str(each["pg_id"]) for each in dump["entries"]}
        old.update(int(status["last_enqueued_collective"]) for pg, status in dump.get("pg_status", {}).items() if pg not in named)
        for each in dump["entries"]:
            entries[each["process_group"][0]].append(each)
    if entries:
        known = list(groups)
        without = Counter(group.sent for group in known if not entries[group.name])
        done = {number for number, many in without.items() if many <= old[number]}  # each is one of those that were overwritten
        for group in known:
            yield _record(group, entries[group.name], done)


def _record(group: KnownGroup, entries: list[dict[str, Any]], old: set[int]) -> GroupRecord:
    shared: dict[str, Any] = {"name": group.name, "label": group.label.replace("_", " "), "ranges": ranges_of(group.ranks)}
    sends = [each for each in entries if each["is_p2p"]]
    if sends:  # NCCL numbers batches of sends as it numbers collectives, and each rank has its own: the numbers can't be compared
        return GroupRecord(**shared, begun=None, may_wait=not all(each.finished for each in _collectives(sends)))
    collectives = list(_collectives(entries))
    done = 1 + max((at for at, each in enumerate(collectives) if each.finished), default=-1)  # a device does them in order
    recent = [Recorded(each.number, each.verb, each.payload, at < done) for at, each in enumerate(collectives)]
    newest = max((each.number for each in recent), default=0)
    is_gloo = any(each["profiling_name"].startswith("gloo:") for each in entries)
    if entries:  # what is counted and not recorded may be a receive, or a first message that still connects the ranks
        may_wait = group.sent > (max(each["op_id"] for each in entries) if is_gloo else newest)
    else:
        may_wait = group.sent > 0 and group.sent not in old
    return GroupRecord(
        **shared,
        begun=newest if is_gloo else max(newest, group.sent),
        recent=tuple(recent[max(0, done - FINISHED) : done + UNFINISHED]),
        may_wait=may_wait,
    )


def _collectives(entries: Iterable[dict[str, Any]]) -> Iterator[Recorded]:
    """Yield those of one group in their order; coalesced ones, which have one number, as one."""
    parts: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for each in entries:
        parts[each["p2p_seq_id" if each["is_p2p"] else "collective_seq_id"]].append(each)
    for number, of_one in sorted(parts.items()):
        last = of_one[-1]
        finished = _is_finished(last) if _verb(last) == COALESCED else all(map(_is_finished, of_one))
        yield Recorded(number, _verb(of_one[0]), sum(map(_payload, of_one)), finished)


def _is_finished(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _verb(entry: Mapping[str, Any]) -> str:
    name: str = entry["profiling_name"].partition(":")[2].partition(" ")[0]
    plain = name.removesuffix("_coalesced")
    return VERBS.get(plain, plain)


def _payload(entry: Mapping[str, Any]) -> int:
    """Bytes of what a collective takes, or of what it gives, if that is more."""
    return max(_bytes(entry["input_sizes"], entry["input_dtypes"]), _bytes(entry["output_sizes"], entry["output_dtypes"]))


def _bytes(sizes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> int:
    return sum(prod(shape) * ITEM_BYTES.get(dtype, 1) for shape, dtype in zip(sizes, dtypes, strict=False))


# The names of ATen's types in the recorder.
ITEM_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
    "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
