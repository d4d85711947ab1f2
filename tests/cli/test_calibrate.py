"""`distrain calibrate`: what it measures here, the files that it writes, the plans that read them, and what it refuses.

A GPU's files are written from figures that an H200 had (tests/gpu/h200.json).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.pages.calibrate_page import calibrate_text, measured_rows
from distrain.cli.pages.text_layout import Style
from distrain.cli.recipe_files.calibrated_figures import cluster_figures, device_figures, figure_values, four_digits, si_number
from distrain.cli.recipe_files.calibrated_files import CalibratedFiles, calibrated_files, write_files, yaml_text
from distrain.cli.recipe_files.data_sheet import figures_to_type, known_figures, sheet_of_gpu
from distrain.tests.fakes.calibrated_yaml import calibrated_values
from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.machine.measurement import AllReduceTimes, DeviceMeasurement, ProductRates
from distrain.trainer.plan.costs.roofline import DeviceRates, product_seconds, rates
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.problem import Problem
from distrain.trainer.spec.run import Device, Run

ROOT = Path(__file__).parents[2]


def run_process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does, with an empty cache."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    argv = [sys.executable, "-m", "distrain", *words]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which two processes of this CPU were measured, with the files in `calibrated` and the document in `out.json`."""
    folder = tmp_path_factory.mktemp("calibrate")
    done = run_process(folder, "calibrate", "device=cpu", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "out.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def document(folder: Path) -> Any:
    """Return the JSON document of that measurement."""
    return json.loads((folder / "out.json").read_text())


def measured_here(document: Any) -> DeviceMeasurement:
    return convert(document["measured"], DeviceMeasurement)


# This machine's CPU


def test_every_rate_of_a_cpu_is_measured_in_every_process(document: Any) -> None:
    measured = measured_here(document)
    assert (measured.kind, measured.devices) == ("cpu", 2)
    assert {(each.precision, each.side) for each in measured.products} == {
        (precision, side) for precision in ("fp32", "bf16") for side in (256, 512, 1024)
    }
    layers = ([each["products"] for each in measured.layer_rates], [each["attention"] for each in measured.layer_rates])
    every = [*(each.rates for each in measured.products), measured.copies, measured.launches, measured.dispatches, *layers]
    assert all(len(each) == 2 and min(each) > 0 for each in every)
    assert measured.all_reduce is not None
    assert measured.all_reduce.library == "gloo"
    assert measured.all_reduce.short_seconds < measured.all_reduce.long_seconds


def test_the_link_and_the_hop_give_the_measured_all_reduces_as_a_ring(document: Any) -> None:
    found = measured_here(document).all_reduce
    assert found is not None
    sent = 2 * (found.ranks - 1) / found.ranks * found.long_bytes
    assert 2 * (found.ranks - 1) * found.latency == pytest.approx(found.short_seconds)
    assert sent / found.bandwidth + found.short_seconds == pytest.approx(found.long_seconds)


def test_the_written_figures_are_those_of_the_json_document(folder: Path, document: Any) -> None:
    for group in ("device", "cluster"):
        file = folder / document[group]["file"]
        assert file == folder / "calibrated" / group / "measured.yaml"
        text = file.read_text()
        assert calibrated_values(file) == document[group]["values"]
        assert all("#" in line for line in text.splitlines() if line.strip()[:5] in ("peak:", "bf16:", "fp32:", "laten", "bandw", "memor"))
    assert "torch" in text
    assert measured_here(document).date in text


def test_the_figures_are_the_measured_ones(document: Any) -> None:
    measured, device, cluster = measured_here(document), document["device"]["values"], document["cluster"]["values"]
    assert device["peak"] == {each: four_digits(measured.product(each, 512) or 0) for each in ("fp32", "bf16")}
    assert device["bandwidth"] == four_digits(max(measured.copies) * min(1, measured.cores / 2))  # two processes may have one core
    assert measured.all_reduce is not None
    assert cluster["inside"] == {
        "bandwidth": four_digits(measured.all_reduce.bandwidth),
        "latency": four_digits(measured.all_reduce.latency),
        "efficiency": 1.0,
    }
    assert (cluster["nodes"], cluster["gpus"], cluster["between"]) == (1, 2, None)


def test_a_plan_reads_the_files_and_takes_their_rates(folder: Path, document: Any) -> None:
    run = load_recipe("quickstart", ["cluster=measured"], folder / "calibrated")
    values = document["device"]["values"]
    assert (run.cluster.device.peak, run.cluster.device.bandwidth) == (values["peak"], values["bandwidth"])
    assert load_recipe("quickstart", ["device=measured"], folder / "calibrated").cluster.device == run.cluster.device
    found = rates(run.cluster.device, "fp32", fused=False)
    assert found is not None
    assert found.linear == values["sustained"] * values["peak"]["fp32"]
    assert (found.memory, found.launch, found.dispatch) == (values["bandwidth"], 0, values["dispatch"])
    assert found.dispatch == four_digits(measured_here(document).dispatch or 0) > 0
    plan = make_plan(run)
    assert plan.fits
    assert plan.time is not None


def test_the_same_rates_give_the_same_plan_as_an_automatic_device(folder: Path, document: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibrated CPU is planned as device=cpu is with the rates that `fit` measures: no share is taken twice."""
    values = document["device"]["values"]
    link = {key: document["cluster"]["values"]["inside"][key] for key in ("latency", "bandwidth")}
    layer = measured_here(document).layer
    assert layer is not None
    cpu = {
        "cores": 2,
        "flops": values["peak"],
        "bandwidth": values["bandwidth"],
        "dispatch": values["dispatch"],
        "layer": {"fp32": layer},
        "link": link,
    }
    monkeypatch.setattr("distrain.trainer.machine.measure_machine.cached_facts", lambda: {"cuda": [], "cpu": cpu})
    automatic, calibrated = (
        make_plan(load_recipe("quickstart")),
        make_plan(load_recipe("quickstart", ["cluster=measured"], folder / "calibrated")),
    )
    assert automatic.time is not None
    assert calibrated.time == automatic.time


def test_the_next_command_plans_with_the_files(folder: Path, document: Any) -> None:
    words = document["next"].split()
    done = run_process(folder, *words[words.index("plan") :])
    assert (done.returncode, done.stderr) == (0, "")
    assert " a step" in done.stdout


def test_files_that_exist_are_replaced_with_force_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(folder / "calibrated")
    before = (folder / "calibrated" / "device" / "measured.yaml").read_text()
    assert command(["calibrate", "-o", output]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.endswith("already exists: --force replaces it, or choose another --name") for line in lines] == [True, True]
    assert (folder / "calibrated" / "device" / "measured.yaml").read_text() == before


def test_force_replaces_both_files(document: Any, tmp_path: Path) -> None:
    measured, old = measured_here(document), tmp_path / "device" / "mine.yaml"
    old.parent.mkdir()
    old.write_text("mine")
    files = calibrated_files(str(tmp_path), "mine", force=True)
    write_files(files, measured, device_figures(measured, None), cluster_figures(measured))
    assert files.device == old
    assert load_recipe("quickstart", ["cluster=mine"], tmp_path).cluster.device.peak == document["device"]["values"]["peak"]


# What is refused before anything is measured

REFUSED = (
    (["--name", "8x8"], "--name=8x8 is not the name of an option"),
    (["--name", "../up"], "--name=../up is not the name of an option"),
    (["--name", "a b"], "--name=a b is not the name of an option"),
    (["--name", "null"], "--name=null is no text to YAML"),
    (["--name", "x\n"], "--name=x\\n is not the name of an option"),
    (["-o", ""], "-o '' is not the name of a folder"),
    (["-o", "-"], "-o '-' is not the name of a folder"),
    (["-o", "nowhere/x"], "there is no folder"),
    (["-o", "file"], "file is not a folder"),
    (["-o", "half"], "half/cluster is not a folder"),
    (["-o", "special"], "special/device/measured.yaml is not a plain file"),
    (["device=h2000"], "no device h2000: did you mean h200?"),
    (["conf=quickstart"], "calibrate takes no conf=quickstart"),
    (["device=odd", "--config-dir", "own"], "cluster.device.peak.bf16"),
    (["device=cpu", "device=cpu"], "calibrate takes one device="),
    (["--devices", "0"], "'--devices'"),
    (["launch.runner=pdsh"], "calibrate takes no launch.runner=pdsh"),
    (["launch"], "calibrate takes no launch"),
    (["launch.hostfile=even"], "launch.hostfile=even is not read by launch=local: set launch=deepspeed"),
    (["launch=slurm"], "launch=slurm leaves hosts to another program: set launch=deepspeed"),
    (["launch=deepspeed"], "launch=deepspeed needs launch.hostfile: name a file"),
    (["launch=deepspeed", "launch.hostfile=none"], "launch.hostfile=none: no such file"),
    (["launch=deepspeed", "launch.hostfile=even", "launch.include=c"], "launch.include=c names c, which is not in even"),
    (["launch=deepspeed", "launch.hostfile=even", "launch.exclude=b:4"], "launch.exclude=b:4: b has no slot 4"),
    (["launch=deepspeed", "launch.hostfile=even", "launch.exclude=b:1"], "the hosts have 1 to 2 slots"),
    (["launch=deepspeed", "launch.hostfile=even", "--devices", "3"], "--devices=3: a has 2 slots: --devices=2 or fewer"),
)


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_a_wrong_command_line_is_one_line_before_anything_starts(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distrain.trainer.machine.measurement.measure_devices", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("distrain.trainer.launch.measure_hosts.measure_hosts", lambda *_: pytest.fail("measured"))
    (tmp_path / "even").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "file").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "cluster").touch()
    (tmp_path / "own" / "device").mkdir(parents=True)
    (tmp_path / "own" / "device" / "odd.yaml").write_text("name: odd\nmemory: 80e9\npeak: {bf16: fast}\n")
    (tmp_path / "special" / "device" / "measured.yaml").mkdir(parents=True)
    assert command(["calibrate", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distrain: ")
    assert says in line


@pytest.mark.parametrize(("words", "kind"), [([], None), (["device=local"], None), (["device=cpu"], "cpu"), (["device=h200"], "cuda")])
def test_a_device_says_which_kind_is_measured(
    words: list[str], kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[Any]()

    def measure(*request: Any) -> Problem:
        asked.append(request[:2])
        return Problem(rule="probe", says="it failed")

    monkeypatch.setattr("distrain.trainer.machine.measurement.measure_devices", measure)
    assert command(["calibrate", *words, "--devices", "3", "-o", str(tmp_path / "out")]) == 1
    assert (asked, capsys.readouterr().err) == ([(kind, 3)], "distrain: it failed\n")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root can write anywhere, so the system's answer is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert command(["calibrate", "-o", str(tmp_path / "new")]) == 2
    assert f"no file can be created in {tmp_path}" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_process(tmp_path, "calibrate", "device=h200")
    assert done.returncode == 1
    assert done.stderr == "distrain: torch finds no GPU on this machine: device=cpu measures its CPU\n"
    assert not (tmp_path / "calibrated").exists()


# The files of a GPU


def recorded_h200(name: str = "NVIDIA H200", devices: int = 1) -> DeviceMeasurement:
    """Return what the acceptance measured on one H200, as if so many had been measured."""
    rows = json.loads((ROOT / "tests" / "gpu" / "h200.json").read_text())["rows"]
    figures = next(row["figures"] for row in rows if row["name"] == "machine")
    products = figures["matrix product, FLOP/s"]
    link = AllReduceTimes(
        library="nccl", ranks=devices, short_bytes=4, short_seconds=20e-6, long_bytes=256 << 20, long_seconds=1.4e-3, latency=1.5e-6,
        bandwidth=360e9,
    )  # fmt: skip
    return DeviceMeasurement(
        kind="cuda",
        name=name,
        devices=devices,
        threads=1,
        cores=16,
        memory=figures["memory"],
        context=figures["context, bytes"],
        units=132,
        products=tuple(
            ProductRates(precision=precision, side=8192, rates=tuple(products[key] * (1 + 0.1 * at) for at in range(devices)))
            for precision, key in (("bf16", "bfloat16"), ("fp32", "float32"))
        ),
        copy_bytes=2 << 30,
        copies=(figures["copy, bytes/s read and written"],) * devices,
        launches=(figures["kernel launch, seconds"],) * devices,
        layer_rates=(),
        all_reduce=link if devices > 1 else None,
        load=0.0,
        versions={"torch": "2.11.0"},
        seconds=30.0,
        date="2026-11-26",
    )


def calibrated_run(measured: DeviceMeasurement, folder: Path, *words: str) -> Run:
    """Write the files of a measurement and return a run that is planned with them."""
    sheet = sheet_of_gpu(measured.name, None)
    write_files(CalibratedFiles(folder, "mine"), measured, device_figures(measured, sheet), cluster_figures(measured))
    return load_recipe("gpt2_124m_1gpu", ["cluster=mine", *words], folder)


def product_rate(device: Device, *, alone: bool, own: bool = True) -> float:
    """FLOP/s of a bf16 product of 8192 x 8192, as planned."""
    planned: DeviceRates | None = rates(device, "bf16", fused=True, own=own, alone=alone)
    assert planned is not None
    return 2 * 8192**3 / product_seconds(8192, 8192, 8192, 1, 2, planned.linear, planned)


@pytest.mark.parametrize("name", ["NVIDIA H200", "Another GPU"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_plan_takes_the_rates_that_were_measured_on_a_gpu(name: str, devices: int, tmp_path: Path) -> None:
    """With a data sheet or without one, on the only GPU or on several; the slowest counts."""
    measured = recorded_h200(name, devices)
    device = calibrated_run(measured, tmp_path).cluster.device
    assert product_rate(device, alone=devices == 1) == pytest.approx(measured.product("bf16"), rel=3e-3)
    planned = rates(device, "bf16", fused=True, own=True, alone=devices == 1)
    assert planned is not None
    assert planned.memory == pytest.approx(measured.copy, rel=1e-3)
    assert (device.memory, device.context) == (measured.memory, four_digits(measured.context or 0))


def test_a_calibrated_h200_is_planned_about_as_the_one_of_conf(tmp_path: Path) -> None:
    """The constants of conf/device/h200.yaml were set with the same measurements in view."""
    run = calibrated_run(recorded_h200(), tmp_path)
    conf = load_recipe("gpt2_124m_1gpu", ["device=h200"]).cluster.device
    assert run.cluster.device.peak == conf.peak
    assert run.cluster.device.name == conf.name
    assert run.cluster.device.sustained == pytest.approx(conf.sustained, rel=0.05)
    assert run.cluster.device.bandwidth == pytest.approx(conf.bandwidth, rel=0.05)
    calibrated, other = (make_plan(replace(run, cluster=replace(run.cluster, device=each))) for each in (run.cluster.device, conf))
    assert calibrated.time is not None
    assert other.time is not None
    assert calibrated.time.step == pytest.approx(other.time.step, rel=0.03)


def test_the_link_of_gpus_is_the_measured_one(tmp_path: Path) -> None:
    inside = calibrated_run(recorded_h200(devices=4), tmp_path).cluster.inside
    assert inside is not None
    assert (inside.rate, inside.latency) == (360e9, 1.5e-6)
    alone = calibrated_run(recorded_h200(), tmp_path).cluster
    assert (alone.inside, alone.gpus) == (None, 1)


def test_an_unknown_gpu_says_what_remains_to_be_typed(tmp_path: Path) -> None:
    measured = recorded_h200("Another GPU")
    run = calibrated_run(measured, tmp_path)
    assert (run.cluster.device.name, run.cluster.device.sustained) == ("Another GPU", Device.sustained)
    assert "ESTIMATES" in (tmp_path / "device" / "mine.yaml").read_text()
    assert "its peaks are estimates" in figures_to_type(measured, None)[0]
    assert figures_to_type(recorded_h200(), sheet_of_gpu("NVIDIA H200", None)) == ("cluster.between, if there are more machines",)


def test_a_gpu_is_shown_beside_its_data_sheet() -> None:
    measured = recorded_h200(devices=4)
    source, known = known_figures(measured, sheet_of_gpu(measured.name, None))
    page = calibrate_text(measured, measured_rows(measured, known), source, Style()).splitlines()
    assert page[0].startswith("NVIDIA H200: 4 GPUs, measured together")
    (product,) = [line.split() for line in page if line.startswith("product 8192 x 8192, bf16")]
    assert product[5:] == ["671", "TFLOP/s", "989", "TFLOP/s", "67.8", "%"]
    assert "device=h200" in page[2]


@pytest.mark.parametrize("load", [0.1, 1.5])
def test_a_busy_machine_is_named_on_the_page_and_in_the_files(load: float, tmp_path: Path) -> None:
    measured = replace(recorded_h200(), load=load)
    page = calibrate_text(measured, measured_rows(measured, {}), "", Style())
    assert ("This machine was busy: 1.5 processes per core" in page) == (load > 1)
    calibrated_run(measured, tmp_path)
    assert f"{load:.2f} processes per core ran" in (tmp_path / "device" / "mine.yaml").read_text()


def test_a_process_of_a_full_cpu_has_its_share_of_a_core(document: Any) -> None:
    measured = replace(measured_here(document), devices=8, cores=2)
    assert measured.copy == pytest.approx(max(measured.copies) / 4)
    assert measured.launch == pytest.approx(min(measured.launches) * 4)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.78, 6.5e-6, 3.637e-05, 999.9, 1e3, 85.03e9, 1.3e9, 1.5625e9, 989e12, 1e-2, 9.999e-3])
def test_a_number_is_written_as_it_reads_back(value: float) -> None:
    assert float(si_number(value)) == value
    assert figure_values([]) == {}
    assert yaml_text([]) == "\n"
