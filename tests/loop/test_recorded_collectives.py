"""What torch's flight recorder holds becomes a rank's record: gloo's entries as torch 2.13 wrote them, those of NCCL as its source says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distrain.trainer.launch.rank.group_record import GroupRecord
from distrain.trainer.loop.failures.recorded_collectives import KnownGroup, make_records


def entry(number: int, name: str = "gloo:all_reduce", *, done: bool = True, **more: Any) -> dict[str, Any]:
    """An entry of the recorder: collective `number` of group 1, of 1,024 floats; gloo's are retired when done, NCCL's completed too."""
    is_nccl = name.startswith("nccl:")
    fields = {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "pg_id": 1,
        "process_group": ["1", "worker_data"],
        "profiling_name": name,
        "input_sizes": [[32, 32]],
        "input_dtypes": ["Float"],
        "output_sizes": [[32, 32]],
        "output_dtypes": ["Float"],
        "retired": done,
        "state": "completed" if done and is_nccl else "scheduled",
    }
    return {**fields, **more}


def records_of(entries: list[dict[str, Any]], sent: int, **statuses: int) -> GroupRecord:
    """The record of group 1, in which the rank has sent so many messages; `statuses` are the newest numbers of groups by pg_id."""
    other = entry(3, pg_id=0, process_group=["0", "default_pg"])
    dump = {"entries": [other, *entries], "pg_status": {name[2:]: {"last_enqueued_collective": str(at)} for name, at in statuses.items()}}
    groups = [KnownGroup("0", "", (0, 1, 2, 3), 3), KnownGroup("1", "worker_data", (0, 2), sent)]
    _, found = make_records([dump], groups)
    return found


def seen(found: GroupRecord) -> tuple[list[tuple[int, str, int, bool]], int | None, bool]:
    recent = [(each.number, each.verb, each.payload, each.finished) for each in found.recent]
    return recent, found.begun, found.may_wait


def test_a_group_has_its_label_and_its_ranks() -> None:
    found = records_of([entry(7)], 7)
    assert (found.name, found.label, found.ranks) == ("1", "worker data", (0, 2))


def test_a_group_has_its_newest_finished_and_its_first_unfinished_collectives() -> None:
    found = records_of([entry(number, done=number < 12) for number in range(1, 20)], 19)
    assert [(each.number, each.finished) for each in found.recent] == [(number, number < 12) for number in range(8, 16)]
    assert found.first_unfinished == found.collective(12)
    assert (found.begun, found.may_wait) == (19, False)


BFLOATS: dict[str, Any] = {
    "input_sizes": [[8, 4], [2]],
    "input_dtypes": ["BFloat16", "Long"],
    "output_sizes": [[2, 8, 4]],
    "output_dtypes": ["BFloat16"],
}
SENT: dict[str, Any] = {"is_p2p": True, "profiling_name": "nccl:send 0->1", "p2p_seq_id": 5}
# Entries of a group, messages that are counted in it, and of its record: collectives, the newest begun, whether it may wait
RECORDS: dict[str, tuple[list[dict[str, Any]], int, tuple[list[tuple[int, str, int, bool]], int | None, bool]]] = {
    "gloo": ([entry(7), entry(8, done=False)], 8, ([(7, "all_reduce", 4096, True), (8, "all_reduce", 4096, False)], 8, False)),
    "gloo, with a receive under way": ([entry(7, op_id=9)], 10, ([(7, "all_reduce", 4096, True)], 7, True)),
    "gloo, with receives before": ([entry(7, op_id=9)], 9, ([(7, "all_reduce", 4096, True)], 7, False)),
    "NCCL": ([entry(7, "nccl:all_reduce", done=False)], 7, ([(7, "all_reduce", 4096, False)], 7, False)),
    "NCCL, completed and not retired yet": (
        [entry(7, "nccl:_all_gather_base", retired=False, **BFLOATS)],
        7,
        ([(7, "all_gather", 128, True)], 7, False),
    ),
    "NCCL, in a first message that connects the ranks": (
        [entry(7, "nccl:_reduce_scatter_base")],
        8,
        ([(7, "reduce_scatter", 4096, True)], 8, True),
    ),
    "NCCL, collectives that are one on the device": (
        [
            entry(7, "nccl:all_reduce", done=False),
            entry(7, "nccl:all_reduce", done=False, op_id=8),
            entry(7, "nccl:coalesced", input_sizes=[], output_sizes=[]),
            entry(8, "nccl:reduce_scatter_tensor_coalesced", done=False),
        ],
        8,
        ([(7, "all_reduce", 8192, True), (8, "reduce_scatter", 4096, False)], 8, False),
    ),
    "NCCL, an earlier one whose end is not known": (
        [entry(7, "nccl:all_reduce", done=False), entry(8, "nccl:all_reduce")],
        8,
        ([(7, "all_reduce", 4096, True), (8, "all_reduce", 4096, True)], 8, False),
    ),
    "NCCL, with a send": ([entry(7, "nccl:all_reduce", done=False), entry(8, **SENT)], 9, ([], None, False)),
    "NCCL, in a send": ([entry(7, "nccl:all_reduce"), entry(8, done=False, **SENT)], 9, ([], None, True)),
    "older than all entries": ([], 5, ([], 5, False)),
    "messages that the recorder has never had": ([], 6, ([], 6, True)),
    "no message": ([], 0, ([], 0, False)),
}


@pytest.mark.parametrize("case", RECORDS)
def test_the_entries_of_a_group_become_its_record(case: str) -> None:
    entries, sent, expected = RECORDS[case]
    assert seen(records_of(entries, sent, of1=5)) == expected


WHOLE = (torch.uint8, torch.int8, torch.bool, torch.int16, torch.int32, torch.int64)
DTYPES = (*WHOLE, torch.half, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_payloads_are_the_bytes_that_torch_says(dtype: torch.dtype) -> None:
    tensor = torch.empty(3, 5, dtype=dtype)
    name = tensor.type().removeprefix("torch.").removesuffix("Tensor")
    (found,) = records_of([entry(7, input_sizes=[[3, 5]], input_dtypes=[name], output_sizes=[])], 7).recent
    assert found.payload == tensor.nbytes


@pytest.mark.parametrize(("numbers", "may_wait"), [((1,), True), ((1, 1), False)])
def test_a_first_message_is_not_taken_for_an_old_one_of_another_group(numbers: tuple[int, ...], may_wait: bool) -> None:
    """Two groups have sent one message each and have no entries; the recorder had so many such messages, and keeps no names of them."""
    statuses = {str(5 + at): {"last_enqueued_collective": str(number)} for at, number in enumerate(numbers)}
    dump = {"entries": [entry(3, pg_id=0, process_group=["0", "default_pg"])], "pg_status": statuses}
    groups = [KnownGroup("0", "", (0, 1, 2, 3), 3), KnownGroup("1", "ends", (0, 2), 1), KnownGroup("2", "copies", (0, 1), 1)]
    _, *found = make_records([dump], groups)
    assert [each.may_wait for each in found] == [may_wait] * 2


def test_without_entries_there_are_no_records() -> None:
    assert list(make_records([], [KnownGroup("1", "dp", (0, 1), 4)])) == []
