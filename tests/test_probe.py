"""What this machine has: the probe's JSON, and what the light half makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from distrain.cli import machine
from distrain.cli.load import load
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.run import Link, Run

CPU = {"cores": 4, "flops": {"fp32": 1e11, "bf16": 2e11}, "bandwidth": 1e10, "link": {"latency": 1e-4, "bandwidth": 1e9}}


def card(name: str, **facts: Any) -> dict[str, Any]:
    return {"name": name, "memory": 150_000_000_000, "units": 132, "bf16": True, **facts}


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keeps what a probe would have found of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def keep(**found: Any) -> None:
        machine.cache().parent.mkdir(exist_ok=True)
        machine.cache().write_text(json.dumps({"key": machine.key(), "found": {"cuda": [], "cpu": CPU} | found}))

    return keep


def quickstart(*words: str) -> Run:
    return load("quickstart", words)


def test_without_a_probe_a_local_plan_has_no_times_and_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = make_plan(quickstart())
    assert plan.time is None
    assert any("`distrain fit` measures this machine" in str(each) for each in plan.warnings)


def test_a_process_has_its_share_of_the_cores(remembered: Any) -> None:
    remembered()
    run = quickstart("train.precision=bf16")
    assert run.cluster.device.peak == {"fp32": 2e11, "bf16": 4e11}
    assert run.cluster.device.bandwidth == 2e10
    assert run.cluster.inside == Link(latency=1e-4, bandwidth=1e9, efficiency=1.0)
    assert make_plan(run).time is not None


def test_what_a_recipe_states_of_a_cpu_stays(remembered: Any) -> None:
    remembered()
    device = quickstart("cluster.device.bandwidth=1e9", "cluster.device.peak.fp32=5e9").cluster.device
    assert (device.bandwidth, device.peak) == (1e9, {"fp32": 5e9})


def test_a_known_gpu_is_the_one_of_conf_device(remembered: Any) -> None:
    remembered(cuda=[card("NVIDIA H200")])
    run = quickstart()
    known = load("quickstart", ["cluster=dgx_h200"]).cluster.device
    assert (run.cluster.device.kind, run.cluster.gpus, run.train.precision) == ("cuda", 1, "bf16")
    assert (run.cluster.device.peak, run.cluster.device.bandwidth) == (known.peak, known.bandwidth)
    assert run.cluster.device.memory == 150_000_000_000


def test_an_unknown_gpu_is_planned_without_times(remembered: Any) -> None:
    remembered(cuda=[card("Another GPU")] * 2)
    run = quickstart()
    assert (run.cluster.device.name, run.cluster.gpus, run.train.precision) == ("Another GPU", 2, "bf16")
    assert make_plan(run).time is None


def test_a_gpu_without_bf16_trains_in_fp16(remembered: Any) -> None:
    remembered(cuda=[card("Tesla V100-SXM2-32GB", bf16=False)])
    assert quickstart().train.precision == "fp16"
    remembered(cuda=[card("An old GPU", bf16=False)])
    assert quickstart().train.precision == "fp16"


def test_a_size_that_was_asked_for_is_kept(remembered: Any) -> None:
    remembered(cuda=[card("NVIDIA H200")] * 8)
    assert quickstart().cluster.gpus == 2
    assert quickstart("cluster=1x8").cluster.gpus == 8
    assert quickstart("cluster=1x4", "parallel.dp=auto").cluster.gpus == 4


def test_a_cpu_that_was_asked_for_is_not_a_gpu(remembered: Any) -> None:
    remembered(cuda=[card("NVIDIA H200")])
    run = quickstart("device=cpu")
    assert (run.cluster.device.kind, run.cluster.gpus, run.train.precision) == ("cpu", 2, "fp32")


@pytest.mark.parametrize("kept", ["", "[]", '{"key": {}, "found": {}}', '{"found": 1}'])
def test_a_cache_of_another_machine_or_of_nothing_is_none(kept: str, remembered: Any) -> None:
    remembered()
    assert machine.found() is not None
    machine.cache().write_text(kept)
    assert machine.found() is None


def test_this_machine_is_measured_in_a_child_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.probe() is None
    found = machine.found()
    assert found is not None
    assert found["cpu"]["cores"] == machine.cores()
    rates = [*found["cpu"]["flops"].values(), found["cpu"]["bandwidth"], *found["cpu"]["link"].values()]
    assert len(rates) == 5
    assert all(rate > 0 for rate in rates)


def test_a_cache_that_can_not_be_written_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "distrain").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = machine.probe()
    assert problem is not None
    assert "can't be written" in problem.says
