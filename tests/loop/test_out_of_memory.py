"""Where a device has no memory left, one line says what it holds beside what is planned, and the smallest change that needs less."""

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.valid_run import BASE, HF
from distrain.trainer.loop.failures.out_of_memory import FullDevice, full_device, out_of_memory_text
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Run

GIB = 2**30
# As torch 2.13's allocators say it.
ALONE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.19 GiB is free. Including "
    "non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 75.30 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
SHARED = ALONE.replace("Including", "Process 4711 has 30.00 GiB memory in use. Process 12 has 512.00 MiB memory in use. Including")
IN_PIECES = ALONE.replace("75.30 GiB is allocated", "40.00 GiB is allocated").replace("512.00 MiB is reserved", "35.80 GiB is reserved")
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."


def llama(*words: str) -> Run:
    return load_recipe("llama3_8b", words)


def says(message: str, run: Run, rank: int = 0) -> str:
    device = full_device(RuntimeError(message))
    assert device
    return out_of_memory_text(device, run, make_plan(run), rank)


def test_what_torch_says_is_read() -> None:
    mib = 2**20
    assert full_device(RuntimeError(ALONE)) == FullDevice(
        asked=2560 * mib, total=round(79.19 * GIB), free=round(1.19 * GIB), tensors=round(75.3 * GIB), cached=512 * mib,
        setting="PYTORCH_ALLOC_CONF=expandable_segments:True",
    )  # fmt: skip
    shared = full_device(RuntimeError(SHARED))
    assert shared
    assert shared.others == 30 * GIB + 512 * mib
    assert full_device(RuntimeError(CPU)) == FullDevice(asked=8 * GIB)
    assert full_device(ValueError("no such token")) is None


def test_an_error_that_follows_from_want_of_memory_is_one() -> None:
    error = ValueError("the compiler gave up")
    error.__cause__ = RuntimeError(ALONE)
    assert full_device(error) == full_device(RuntimeError(ALONE))
    error.__cause__.__cause__ = error  # no error of torch's
    error.__cause__.args = ("no such token",)
    assert full_device(error) is None


def test_tensors_beyond_the_plan_are_said_with_a_change_that_needs_as_much_less() -> None:
    run = llama()
    plan = make_plan(run)
    assert plan.memory
    stage = plan.memory.stages[0].bytes
    line = says(ALONE, run)
    tensors = f"{(stage.total - stage.overhead) / GIB:.1f} GiB planned at most"
    start = (
        f"out of GPU memory: asked for 2.50 GiB; of 79.2 GiB tensors hold 75.3 GiB ({tensors}), torch's free blocks 512 MiB, the rest 2.20"
    )
    assert line.startswith(start), line
    assert len(line) <= 400
    _, _, changes = line.partition("; less is needed with ")
    assert changes
    lacked = 75.3 * GIB + 2.5 * GIB  # tensors of which the device had 79.19 - 2.2 GiB
    for change in changes.split(" or "):
        smaller = make_plan(llama(*change.split())).memory
        assert smaller
        held = smaller.peak - smaller.stages[smaller.stage].bytes.overhead
        assert held * lacked / (stage.total - stage.overhead) <= 79.19 * GIB - 2.2 * GIB


SMALL = SHARED.replace("75.30 GiB is allocated", "40.00 GiB is allocated")


def test_memory_that_other_processes_hold_is_said() -> None:
    assert says(SMALL, llama()).endswith("other processes 30.5 GiB: see nvidia-smi")


def test_a_small_process_beside_tensors_beyond_the_plan_is_not_the_advice() -> None:
    line = says(
        ALONE.replace("2.50 GiB.", "128.00 MiB.").replace("Including", "Process 12 has 500.00 MiB memory in use. Including"), llama()
    )
    assert "other processes 500 MiB; less is needed with " in line


def test_in_a_container_the_process_itself_is_none_of_the_others() -> None:
    """There torch names it by the host's number."""
    alone = ALONE.replace("Including non-PyTorch memory, this process has 78.00 GiB memory", "Process 101462 has 78.00 GiB memory")
    assert says(alone, llama()) == says(ALONE, llama())
    shared = alone.replace("Process 101462", "Process 7 has 30.00 GiB memory in use. Process 101462")
    device = full_device(RuntimeError(shared))
    assert device
    assert device.others == 30 * GIB


@pytest.mark.parametrize("words", [("cluster.device.memory=51.5e9",), ()], ids=["before the planned peak", "a smaller device"])
def test_changes_fit_into_the_room_that_the_device_has(words: tuple[str, ...]) -> None:
    """Whether it failed before the most that is planned, or has less memory than its recipe says."""
    message = (
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 47.96 GiB of which 0.50 GiB is free. Including "
        "non-PyTorch memory, this process has 47.46 GiB memory in use. Of the allocated memory 42.00 GiB is allocated by PyTorch, and "
        "512.00 MiB is reserved by PyTorch but unallocated."
    )
    run = llama(*words)
    device = full_device(RuntimeError(message))
    assert device
    assert device.rest
    changes = says(message, run).partition("; less is needed with ")[2].split(" or ")
    for change in changes:
        smaller = make_plan(llama(*words, *change.split())).memory
        assert smaller
        assert smaller.peak - smaller.stages[smaller.stage].bytes.overhead <= 47.96 * GIB - device.rest, change


def test_a_rank_of_a_stage_that_is_not_the_fullest_is_offered_what_takes_less_there() -> None:
    run = load_recipe("megatron_1t_6x8x64", ())
    plan = make_plan(run)
    assert plan.memory
    message = ALONE.replace("2.50 GiB.", "0.50 GiB.").replace("79.19 GiB of", "15.90 GiB of").replace("75.30 GiB", "13.90 GiB")
    device = full_device(RuntimeError(message.replace("1.19 GiB is free", "0.10 GiB is free")))
    assert device
    line = out_of_memory_text(device, run, plan, plan.world - 1)
    first = line.partition("; less is needed with ")[2].split(" or ")[0]
    smaller = make_plan(load_recipe("megatron_1t_6x8x64", first.split())).memory
    assert smaller
    assert smaller.stages[63].bytes.total < plan.memory.stages[63].bytes.total


def test_free_blocks_in_pieces_are_said() -> None:
    assert says(IN_PIECES, llama()).endswith(
        "torch's free blocks 35.8 GiB, the rest 2.20 GiB (1.30 GiB planned): its free blocks are in pieces: "
        "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
    )


def test_a_model_whose_activations_are_not_planned_has_no_planned_figure() -> None:
    line = says(ALONE, with_changes(BASE, HF.items()))
    assert "planned" not in line
    assert "less is needed" not in line


def test_each_rank_is_told_the_plan_of_its_stage() -> None:
    run = load_recipe("megatron_1t_6x8x64", ())
    plan = make_plan(run)
    assert plan.memory
    device = full_device(RuntimeError(ALONE))
    assert device
    first, last = (out_of_memory_text(device, run, plan, rank) for rank in (0, plan.world - 1))
    for line, stage in ((first, 0), (last, 63)):
        held = plan.memory.stages[stage].bytes
        assert f"({(held.total - held.overhead) / GIB:.1f} GiB planned at most)" in line
