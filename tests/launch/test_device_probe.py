"""Processes that measure together: a GPU's measurement carried out on this CPU; one that fails does not hang the others."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import pytest

from distrain.trainer.machine import device_probe
from distrain.trainer.machine.device_probe import CUDA, NoSuchDevices, measure, measure_device
from distrain.trainer.machine.link_probe import HostPlace, measure_links
from distrain.trainer.machine.measurement import measure_devices
from distrain.trainer.machine.process_pool import PoolProcess, run_processes
from distrain.trainer.spec.problem import Problem

pytest.importorskip("torch")

SMALL = CUDA._replace(device="cpu", library="gloo", sides=(32, 64), copied=1 << 16, reduced=1 << 16, seconds=0.02)


def test_a_gpus_measurement_runs_in_spawned_processes() -> None:
    shown = list[str]()
    precisions = ("bf16", "fp16", "tf32", "fp32")
    rows = run_processes(partial(measure_device, sizes=SMALL, precisions=precisions), 2, "spawn", shown.append)
    for row in rows:
        assert [(each["precision"], each["side"]) for each in row["products"]] == [(name, side) for name in precisions for side in (32, 64)]
        assert min(each["rate"] for each in row["products"]) > 0
        assert min(row["copy"], row["launch"], row["all_reduce"].short, row["all_reduce"].long) > 0
    assert shown == [f"a product of {side} x {side} in {name}" for name in precisions for side in (32, 64)] + [
        "a copy", "launches", "a layer's kernels in turn", "gloo's all-reduce",
    ]  # fmt: skip


def measure_as_hosts(process: PoolProcess) -> dict[str, Any]:
    """Measure the links as if every two processes were a host."""
    place = HostPlace(process.rank // 2, process.ranks // 2, "127.0.0.1", process.port)
    return measure_links(process._replace(rank=process.rank % 2, ranks=2), place, SMALL)


def test_one_device_of_each_host_then_all_at_once_measure_the_links() -> None:
    rows = run_processes(measure_as_hosts, 4, "fork")
    assert [list(row) for row in rows] == [["alone", "together"], ["together"]] * 2
    assert all(min(found) > 0 for row in rows for found in row.values())


def is_port_reserved(process: PoolProcess) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("", process.port))
        except OSError:
            return True
    return False


def test_no_other_process_gets_the_port_of_a_measurement() -> None:
    assert run_processes(is_port_reserved, 1, "fork") == [True]


def fail_in_one(process: PoolProcess) -> None:
    if process.rank == 1:
        raise ValueError("rank 1 fails")
    process.barrier.wait()


def test_a_process_that_fails_ends_the_measurement() -> None:
    with pytest.raises(ValueError, match="rank 1 fails"):
        run_processes(fail_in_one, 3, "fork")


def card(name: str) -> dict[str, Any]:
    return {"name": name, "memory": 150_000_000_000, "units": 132, "bf16": True}


@pytest.mark.parametrize(
    ("names", "kind", "devices", "says"),
    [
        ([], "cuda", None, "torch finds no GPU on this machine"),
        (["A", "B", "A"], None, None, "this machine's GPUs differ: 2 x A, 1 x B"),
        (["A", "A"], None, 3, "--devices=3: this machine has 2 GPUs"),
    ],
)
def test_devices_that_cannot_be_measured_are_refused(
    names: list[str], kind: str | None, devices: int | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_probe, "list_gpus", lambda: [card(name) for name in names])
    with pytest.raises(NoSuchDevices, match=says):
        measure(kind, devices, lambda text: None)


def test_gpus_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver's answers faked, and tensors on the CPU."""
    monkeypatch.setattr(device_probe, "list_gpus", lambda: [card("A"), card("A")])
    monkeypatch.setattr(device_probe, "CUDA", SMALL)
    monkeypatch.setattr(device_probe, "start_method", lambda has_gpus: "spawn" if has_gpus else "fork")
    found = measure(None, None, lambda text: None)
    assert (found["name"], found["devices"], found["memory"], found["units"]) == ("A", 2, 150_000_000_000, 132)
    assert {each["precision"] for each in found["products"]} == {"bf16", "fp16", "tf32", "fp32"}
    assert all(len(each["rates"]) == 2 for each in found["products"])
    assert found["all_reduce"]["ranks"] == 2
    assert "CUDA" in found["versions"]


def test_a_child_that_cannot_measure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrain.trainer.machine.measurement.MODULE", "distrain.no_such_module")
    problem = measure_devices(None, None, lambda text: None)
    assert isinstance(problem, Problem)
    assert problem.says == "this machine could not be measured: ModuleNotFoundError: No module named 'distrain.no_such_module'"
