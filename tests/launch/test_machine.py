"""What this machine has: the probe's JSON, and what the light half makes of it."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.launch import doctor_smoke_test
from distrain.trainer.machine import measure_machine as machine
from distrain.trainer.machine import measurement, probe
from distrain.trainer.machine.cache import MOST_FILES, OLD_FILE, CacheEntry, cache_file, write_entry
from distrain.trainer.machine.layer_rates import HEAD_DIM, dispatch_seconds, layer_rates
from distrain.trainer.plan.costs.op_seconds import attention_seconds
from distrain.trainer.plan.costs.roofline import rates
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.run import Link, NodeHost, Run
from distrain.trainer.system.cpu import cpu_count

CPU = {
    "cores": 4,
    "flops": {"fp32": 1e11, "bf16": 2e11},
    "bandwidth": 1e10,
    "dispatch": 1e-5,
    "layer": {"fp32": {"products": 7e10, "attention": 2e10}, "bf16": {"products": 9e10, "attention": 1e10}},
    "link": {"latency": 1e-4, "bandwidth": 1e9},
}


def card(name: str, **facts: Any) -> dict[str, Any]:
    return {"name": name, "memory": 150_000_000_000, "units": 132, "bf16": True, **facts}


@pytest.fixture
def remember_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keeps what a probe would have found of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def keep(load: float = 0.0, **found: Any) -> Path:
        write_entry(CacheEntry(key=machine.measurement_key(), load=load, found={"cuda": [], "cpu": CPU} | found))  # type: ignore[typeddict-item]
        return cache_file(machine.measurement_key())

    return keep


def quickstart(*words: str) -> Run:
    return load_recipe("quickstart", words)


def test_a_local_plan_on_an_unmeasured_machine_has_no_times_and_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = make_plan(quickstart())
    assert plan.time is None
    assert any("`distrain fit` measures this machine" in str(each) for each in plan.warnings)


def test_a_process_has_its_share_of_the_cores(remember_facts: Any) -> None:
    remember_facts()
    run = quickstart("train.precision=bf16")
    assert run.cluster.device.peak == {"fp32": 2e11, "bf16": 4e11}
    assert run.cluster.device.bandwidth == 2e10
    assert run.cluster.inside == Link(latency=1e-4, bandwidth=1e9, efficiency=1.0)
    assert run.cluster.device.dispatch == 1e-5
    assert make_plan(run).time is not None


def test_processes_that_share_a_core_take_turns_in_python_and_in_messages(remember_facts: Any) -> None:
    """16 on 4 cores; what a recipe states is kept."""
    remember_facts()
    cluster = quickstart("cluster.gpus=16").cluster
    assert cluster.device.dispatch == 4e-5
    assert cluster.inside == Link(latency=4e-4, bandwidth=2.5e8, efficiency=1.0)
    assert quickstart("cluster.gpus=16", "cluster.device.dispatch=3e-6").cluster.device.dispatch == 3e-6


def test_a_plan_takes_the_rates_of_a_layer_s_training(remember_facts: Any) -> None:
    """Two cores a process, and heads of the size that was measured."""
    remember_facts()
    run = quickstart("model.heads=4")
    assert run.model.hidden == 4 * HEAD_DIM
    found = rates(run.cluster.device, run.train.precision, fused=False)
    assert found is not None
    assert found.linear == pytest.approx(2 * 7e10)
    forward, backward = attention_seconds(1e9, HEAD_DIM, 256, 2.5, found)
    assert (forward, backward) == pytest.approx((1e9 / 4e10, 2.5e9 / 4e10), rel=2e-3)  # shares have three decimals
    half = quickstart("train.precision=bf16").cluster.device
    assert half.sustained == pytest.approx(9e10 / 2e11, abs=1e-3)
    stated = quickstart("cluster.device.peak.fp32=5e9").cluster.device
    assert (stated.sustained, stated.flash) == (None, None)
    found = rates(stated, "fp32", fused=False)
    assert found is not None
    assert (found.linear, found.flash) == (5e9, 5e9), "a stated peak is what training reaches"
    assert quickstart("cluster.device.flash=0.1").cluster.device.flash == 0.1


@pytest.mark.usefixtures("one_thread")
def test_the_rates_of_a_layer_are_its_flops_over_the_median_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves on by a second at each look: a linear layer and the attention take a second each."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("distrain.trainer.machine.layer_rates.perf_counter", count().__next__)
    found = layer_rates(torch.float32, enough=100)
    heads, seq, tokens = 4, 256, 1024
    assert found["products"] == 2 * 3 * 256 * 1024 * tokens
    assert found["attention"] == 3.5 * (2 * 2 * heads * HEAD_DIM * seq * tokens) / 2


@pytest.mark.usefixtures("one_thread")
def test_the_host_s_seconds_of_an_operator_are_those_of_16_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same clock: six calls take a second each."""
    pytest.importorskip("torch")
    monkeypatch.setattr("distrain.trainer.machine.layer_rates.perf_counter", count().__next__)
    assert dispatch_seconds(enough=100) == 6 / 16


def test_rates_stated_in_a_recipe_are_kept(remember_facts: Any) -> None:
    remember_facts()
    device = quickstart("cluster.device.bandwidth=1e9", "cluster.device.peak.fp32=5e9").cluster.device
    assert (device.bandwidth, device.peak) == (1e9, {"fp32": 5e9})


def test_a_known_gpu_gets_its_option_of_conf_device(remember_facts: Any) -> None:
    remember_facts(cuda=[card("NVIDIA H200")])
    run = quickstart()
    known = load_recipe("quickstart", ["cluster=dgx_h200"]).cluster.device
    assert (run.cluster.device.kind, run.cluster.gpus, run.train.precision) == ("cuda", 1, "bf16")
    assert run.cluster.host == NodeHost(memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    assert (run.cluster.device.peak, run.cluster.device.bandwidth) == (known.peak, known.bandwidth)
    assert run.cluster.device.memory == 150_000_000_000


def test_an_unknown_gpu_has_no_times_in_the_plan(remember_facts: Any) -> None:
    remember_facts(cuda=[card("Another GPU")] * 2)
    run = quickstart()
    assert (run.cluster.device.name, run.cluster.gpus, run.train.precision) == ("Another GPU", 2, "bf16")
    assert make_plan(run).time is None


def test_a_gpu_without_bf16_trains_in_fp16(remember_facts: Any) -> None:
    remember_facts(cuda=[card("Tesla V100-SXM2-32GB", bf16=False)])
    assert quickstart().train.precision == "fp16"
    remember_facts(cuda=[card("An old GPU", bf16=False)])
    assert quickstart().train.precision == "fp16"


def test_a_given_cluster_size_is_kept(remember_facts: Any) -> None:
    remember_facts(cuda=[card("NVIDIA H200")] * 8)
    assert quickstart().cluster.gpus == 2
    assert quickstart("cluster=1x8").cluster.gpus == 8
    assert quickstart("cluster=1x4", "parallel.dp=auto").cluster.gpus == 4


def test_a_given_cpu_is_not_replaced_by_a_gpu(remember_facts: Any) -> None:
    remember_facts(cuda=[card("NVIDIA H200")])
    run = quickstart("device=cpu")
    assert (run.cluster.device.kind, run.cluster.gpus, run.train.precision) == ("cpu", 2, "fp32")


FACTS: Any = {"cuda": [], "cpu": CPU}
ENTRY: dict[str, Any] = {"key": {}, "load": 0.0, "found": FACTS}
NO_FACTS: tuple[dict[str, Any], ...] = (
    {}, {"cuda": []}, {"cuda": [], "cpu": {}}, {"cuda": [{}], "cpu": CPU}, {"cuda": [], "cpu": CPU | {"cores": 0}},
    {"cuda": [], "cpu": CPU | {"bandwidth": -1.0}}, {"cuda": [], "cpu": CPU | {"flops": {"fp32": "fast"}}},
    {"cuda": [], "cpu": CPU | {"flops": {"fp32": float("inf")}}},
)  # fmt: skip
DAMAGED = (  # entries of another key, and, where the key is null, of this machine's
    *(b"", b"[]", b"\xff\xfe", b'{"key": {}', b"null", json.dumps(ENTRY).encode()),
    *(json.dumps(ENTRY | {"key": None, "found": found}).encode() for found in NO_FACTS),
)


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_cache_entry_is_ignored(damaged: bytes, remember_facts: Any) -> None:
    file = remember_facts()
    assert machine.cached_facts() is not None
    file.write_bytes(damaged.replace(b'"key": null', b'"key": ' + json.dumps(machine.measurement_key()).encode()))
    assert machine.cached_facts() is None
    assert not machine.is_measured("cpu")
    file.unlink()
    file.mkdir()
    assert machine.cached_facts() is None


def test_an_intact_cache_entry_is_read(remember_facts: Any) -> None:
    """What the damaged ones were made of."""
    remember_facts().write_text(json.dumps(ENTRY | {"key": machine.measurement_key()}))
    assert machine.cached_facts() == FACTS


def test_machines_with_a_shared_home_have_their_own_entries(remember_facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, containers with other cores, other devices that may be seen: neither takes the other's place."""
    keys = [
        machine.measurement_key() | change
        for change in ({}, {"cpu": "another"}, {"cores": 77}, {"visible": "2,3"}, {"gpus": 8}, {"torch": "9"})
    ]
    for number, key in enumerate(keys, 1):
        monkeypatch.setattr(machine, "measurement_key", lambda key=key: key)
        remember_facts(cpu=CPU | {"cores": number})
    for number, key in enumerate(keys, 1):
        monkeypatch.setattr(machine, "measurement_key", lambda key=key: key)
        facts = machine.cached_facts()
        assert facts is not None
        assert facts["cpu"] is not None
        assert facts["cpu"]["cores"] == number
        assert json.loads(cache_file(key).read_text())["key"] == key, "it says what it is of"


def test_entries_of_earlier_probes_are_removed_and_of_later_ones_kept(remember_facts: Any, tmp_path: Path) -> None:
    folder = tmp_path / "distrain" / "machines"
    folder.mkdir(parents=True)
    names = ["1-aa.json", f"{machine.PROBE - 1}-bb.json", f"{machine.PROBE}-cc.json", f"{machine.PROBE + 1}-dd.json"]
    for path in (tmp_path / "distrain" / OLD_FILE, *(folder / name for name in names)):
        path.write_text("{}")
    own = remember_facts()
    assert {each.name for each in folder.iterdir()} == {own.name, *names[2:]}
    assert not (tmp_path / "distrain" / OLD_FILE).exists()


def test_the_oldest_entries_are_removed(remember_facts: Any, tmp_path: Path) -> None:
    folder = tmp_path / "distrain" / "machines"
    folder.mkdir(parents=True)
    for number in range(2 * MOST_FILES):
        path = folder / f"{machine.PROBE}-{number}.json"
        path.touch()
        os.utime(path, (number, number))
    own = remember_facts()
    left = {each.name for each in folder.iterdir()}
    assert left == {own.name, *(f"{machine.PROBE}-{number}.json" for number in range(MOST_FILES + 1, 2 * MOST_FILES))}


WRITER = """
import sys
from distrain.trainer.machine import measure_machine as machine
from distrain.trainer.machine.cache import CacheEntry, write_entry
for turn in range(60):
    write_entry(CacheEntry(key=machine.measurement_key(), load=0.0, found=machine.cached_facts()))
    assert machine.cached_facts() is not None
"""


def test_concurrent_writers_leave_an_intact_entry(remember_facts: Any) -> None:
    remember_facts()
    started = [subprocess.Popen([sys.executable, "-c", WRITER]) for _ in range(3)]
    assert [each.wait(timeout=DEADLINE) for each in started] == [0, 0, 0]
    assert machine.cached_facts() == FACTS
    assert len(list(cache_file(machine.measurement_key()).parent.iterdir())) == 1


FAST, SLOW = (
    CPU,
    {
        "cores": 4,
        "flops": {"fp32": 5e10, "bf16": 3e11},
        "bandwidth": 5e9,
        "dispatch": 2e-5,
        "layer": {"fp32": {"products": 4e10, "attention": 1e10}, "bf16": {"products": 5e10, "attention": 5e9}},
        "link": {"latency": 2e-4, "bandwidth": 5e8},
    },
)


# fmt: off
LOADS = (  # of a core: when it was measured, and now; whether it is measured again
    (0.0,  0.0, False),
    (0.0,  9.0, False),
    (0.49, 0.0, False),
    (4.0,  4.0, False),
    (4.0,  2.1, False),
    (4.0,  1.9, True),
    (0.6,  0.0, True),
)
# fmt: on


@pytest.mark.parametrize(("before", "now", "again"), LOADS)
def test_a_busy_machine_is_measured_again_once_it_is_idle(
    remember_facts: Any, monkeypatch: pytest.MonkeyPatch, before: float, now: float, again: bool
) -> None:
    monkeypatch.setattr(machine, "load_per_core", lambda: now)
    remember_facts(load=before)
    assert machine.is_measured("cpu") == (not again)


def test_the_better_rates_of_two_measurements_are_kept() -> None:
    faster = {"cuda": [card("NVIDIA H200")], "cpu": FAST | {"flops": {"fp32": 1e11, "bf16": 3e11}}}
    one: Any = {"cuda": [], "cpu": SLOW}
    other: Any = {"cuda": [card("NVIDIA H200")], "cpu": FAST}
    assert machine.better_of(one, other) == faster
    assert machine.better_of(other, one)["cpu"] == faster["cpu"]
    assert machine.better_of(one, one) == one


def test_this_machine_is_measured_in_a_child_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.measure_now() is None
    found = machine.cached_facts()
    assert found is not None
    assert found["cpu"] is not None
    assert found["cpu"]["cores"] == cpu_count()
    assert len(found["cpu"]["flops"]) == 2
    layer = found["cpu"]["layer"]["fp32"]
    assert layer["attention"] < layer["products"] < found["cpu"]["flops"]["fp32"]
    slow = machine.better_of(found, found)
    assert slow["cpu"] is not None
    slow["cpu"]["bandwidth"] /= 1000
    write_entry(CacheEntry(key=machine.measurement_key(), load=99.0, found=slow))
    said: list[object] = []
    assert machine.measure_once(lambda: "cpu", said.append) is None
    assert machine.measure_once(lambda: "cpu", said.append) is None
    assert said == ["measuring this machine again for a few seconds: it was busy the last time"]
    again = machine.cached_facts()
    assert again is not None
    assert again["cpu"] is not None
    assert again["cpu"]["bandwidth"] > slow["cpu"]["bandwidth"]


def test_a_busy_machine_has_longer_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 14 processes per core, importing torch alone takes more than two minutes."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for processes, limit in ((0.0, 120.0), (2.0, 120.0), (28.0, 1680.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=processes: (load, 0.0, 0.0))
        assert machine.time_limit(120.0) == limit


@pytest.mark.parametrize(("load", "seconds"), [(1.0, 0), (6.0, 1)])
def test_the_children_that_measure_and_check_have_longer_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, seconds: int
) -> None:
    """With a tenth of a second for an idle machine; none of them imports torch in 0.6 s."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    for module, name in ((machine, "PATIENCE"), (measurement, "PATIENCE"), (doctor_smoke_test, "TIMEOUT")):
        monkeypatch.setattr(module, name, 0.1)
    (check,) = doctor_smoke_test.engine_checks(load_recipe("quickstart", (f"log.dir={tmp_path}",)))
    assert f"did not answer in {seconds} s" in str(check)
    assert f"could not be measured in {seconds} s" in str(machine.measure_now())
    assert f"it did not end in {seconds} s" in str(measurement.measure_devices("cpu", 1, lambda _: None))


def test_a_measurement_that_does_not_end_in_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "PATIENCE", 0.0)
    assert str(machine.measure_now()) == (
        "this machine could not be measured in 0 s: try again when it is less busy, or python -m distrain.trainer.machine.probe says why"
    )


def test_a_cache_that_can_not_be_written_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "distrain").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = machine.measure_now()
    assert problem is not None
    assert "can't be written" in problem.says


def test_a_cpu_beside_gpus_is_measured_for_a_run_on_it_only(remember_facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first probe finds the GPUs; a run that asked for `auto` is on one then, and a run on the CPU has it measured."""
    gpu = card("NVIDIA H200")
    probes: list[bool] = []

    def measure(*, always_cpu: bool = False) -> None:
        probes.append(always_cpu)
        remember_facts(cuda=[gpu], cpu=CPU if always_cpu else None)

    monkeypatch.setattr(machine, "measure_now", measure)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # never measured
    for kind, expected in ((lambda: "cuda" if machine.cached_facts() else "cpu", [False]), (lambda: "cpu", [False, True])):
        assert machine.measure_once(kind, lambda text: None) is None
        assert probes == expected
        assert machine.is_measured("cuda")
    assert machine.is_measured("cpu")
    with_cpu: Any = {"cuda": [gpu], "cpu": CPU}
    without: Any = {"cuda": [gpu], "cpu": None}
    assert machine.better_of(without, with_cpu) == machine.better_of(with_cpu, without) == with_cpu


@pytest.mark.parametrize(
    ("gpus", "always_cpu", "measured"), [([], False, True), ([], True, True), ([{}], False, False), ([{}], True, True)]
)
def test_a_probe_measures_the_cpu_where_there_is_no_gpu(
    gpus: list[Any], always_cpu: bool, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forked processes, or beside GPUs in spawned ones."""
    starts: list[str] = []
    monkeypatch.setattr(probe, "list_gpus", lambda: gpus)

    def measure_cpu(start: str) -> Any:
        starts.append(start)
        return CPU

    monkeypatch.setattr(probe, "_measure_cpu", measure_cpu)
    assert probe.measure_machine(always_cpu=always_cpu) == {"cuda": gpus, "cpu": CPU if measured else None}
    assert starts == ["fork" if sys.platform == "linux" and not gpus else "spawn"] * measured
