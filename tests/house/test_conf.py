"""Every YAML file of the package: its first comment describes it, it is read strictly, its figures have sources, and recipes fit."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import distrain
from distrain.cli.config.load import load_recipe
from distrain.cli.keys.keys import WRITTEN_KEYS
from distrain.trainer.launch.file_checks import weight_problems
from distrain.trainer.machine.measure_machine import DEVICE_OPTIONS
from distrain.trainer.models.families import FAMILIES
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.spec.read import read
from distrain.trainer.spec.run import Checkpoint, Data, Device, Launch, Log, Model, Parallel, Train
from distrain.trainer.spec.sections.optimizer import Optim

PACKAGE = Path(str(distrain.__file__)).parent
GROUPS = ("checkpoint", "cluster", "data", "device", "launch", "log", "model", "optim", "parallel", "train")
FILES = sorted([*(PACKAGE / "conf").rglob("*.yaml"), *(PACKAGE / "recipes").glob("*.yaml")])
RECIPES = sorted(file.stem for file in (PACKAGE / "recipes").glob("*.yaml"))
COMPLETE: dict[str, type] = {  # files with every key of their section
    "parallel/default": Parallel,
    "train/default": Train,
    "optim/adamw": Optim,
    "data/synthetic": Data,
    "log/default": Log,
    "checkpoint/default": Checkpoint,
    "launch/local": Launch,
}
# Values of a file for keys that have no default in the data class, or another one.
REQUIRED_VALUES = {"train/default": {"batch": 8, "seq": 1024, "steps": 1000}}

FIGURE = re.compile(r"^\s+(fp32|tf32|bf16|fp16|fp8|fp4|bandwidth|latency|memory|link): \S|^(memory|bandwidth|units|context): \S")
NONE = re.compile(r": (null|auto|0\.0)\b")
SOURCE = re.compile(
    r"datasheet|whitepaper|product page|reference architecture|chronicles-prequel|dgxc-benchmarking README|tuning\.cc|NCCL's"
    r"|MLPerf Training|nvbandwidth|pinned copy|arXiv:|as in dgx_h100|tuning guide"
    r"|torchtitan benchmarks|what torch reports|torch's multi_processor_count"
)


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (PACKAGE / "conf" / group).glob("*.yaml"))


def plain(name: str) -> dict[str, Any]:
    """Return an option's file as plain data, not composed."""
    keys = OmegaConf.to_container(OmegaConf.load(PACKAGE / "conf" / f"{name}.yaml"))
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items() if key != "defaults"}


@cache
def plan_of(recipe: str, *overrides: str) -> Plan:
    """The plan of a recipe, made once."""
    return make_plan(load_recipe(recipe, overrides))


def relative_name(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def figures(text: str) -> list[tuple[str, str]]:
    """Return (line, comment) of every figure; the comment is on the line or in the block above it."""
    above, block, rows = "", "", list[tuple[str, str]]()
    for line in text.splitlines():
        body, _, comment = line.partition("#")
        if not body.strip():
            block += comment
            above = block
            continue
        block = ""
        if FIGURE.match(line) and not NONE.search(line):
            rows.append((line, comment or above))
    return rows


def test_the_groups_are_the_sections_of_a_run() -> None:
    assert sorted(path.name for path in (PACKAGE / "conf").iterdir() if path.is_dir() and path.name != "__pycache__") == sorted(GROUPS)


def test_the_first_line_describes_the_file() -> None:
    first = {relative_name(file): file.read_text().splitlines()[0] for file in FILES}
    assert {name: line for name, line in first.items() if not re.fullmatch(r"# \S.{0,76}[^\s.]", line)} == {}


def test_a_file_parses_and_has_short_lines() -> None:
    for file in FILES:
        assert OmegaConf.to_container(OmegaConf.load(file)), file
        assert max(map(len, file.read_text().splitlines())) <= 140, file


def test_a_hardware_figure_has_its_source_in_a_comment() -> None:
    files = [file for file in FILES if file.parent.name in ("device", "cluster")]
    assert files
    without = {relative_name(file): [line for line, comment in figures(file.read_text()) if not SOURCE.search(comment)] for file in files}
    assert {name: lines for name, lines in without.items() if lines} == {}


@pytest.mark.parametrize("name", [name for name in options("device") if name not in ("cpu", "local")])
def test_a_vendors_device_has_every_figure_that_times_need(name: str) -> None:
    text = (PACKAGE / "conf" / "device" / f"{name}.yaml").read_text()
    device = read(plain(f"device/{name}"), Device)
    assert device.units
    assert device.bandwidth
    assert {"fp32", "fp16"} <= set(device.peak)
    assert len(figures(text)) == 4 + len(device.peak)  # memory, bandwidth, units, context and the peaks


def test_a_cpu_has_no_rates_before_it_is_measured() -> None:
    cpu = plain("device/cpu")
    assert plain("device/local") == {**cpu, "kind": "auto"}
    device = read(cpu, Device)
    assert (device.kind, device.memory, device.bandwidth, device.peak) == ("cpu", "auto", None, {})
    assert (device.sustained, device.flash) == (None, None)


@pytest.mark.parametrize("name", options("model"))
def test_a_model_is_read_strictly_and_has_a_source(name: str) -> None:
    model = read(plain(f"model/{name}"), Model)
    assert model.family in FAMILIES
    text = (PACKAGE / "conf" / "model" / f"{name}.yaml").read_text()
    assert re.search(r"arXiv:\d{4}\.\d{5}|Hugging Face \S+/|github\.com/|our own choice", text)


@pytest.mark.parametrize(("name", "section"), COMPLETE.items(), ids=COMPLETE)
def test_a_default_file_has_every_key_in_order(name: str, section: type) -> None:
    keys = plain(name)
    assert list(keys) == [row.name for row in fields(section) if f"{name.partition('/')[0]}.{row.name}" not in WRITTEN_KEYS]
    for key, value in keys.items():
        if isinstance(value, dict):
            nested = getattr(section(**REQUIRED_VALUES.get(name, {})), key)
            assert is_dataclass(nested)
            assert list(value) == [row.name for row in fields(nested)]


@pytest.mark.parametrize(("name", "section"), COMPLETE.items(), ids=COMPLETE)
def test_a_default_file_equals_the_defaults_of_the_data_class(name: str, section: type) -> None:
    assert read(plain(name), section) == section(**REQUIRED_VALUES.get(name, {}))


@pytest.mark.parametrize("name", options("cluster"))
def test_a_cluster_brings_its_device_and_takes_another(name: str) -> None:
    cluster = OmegaConf.load(PACKAGE / "conf" / "cluster" / f"{name}.yaml")
    own = plain(f"device/{cluster.defaults[0]['/device@device']}")
    assert load_recipe("quickstart", [f"cluster={name}"]).cluster.device.name == own["name"]
    assert load_recipe("quickstart", [f"cluster={name}", "device=h200"]).cluster.device.name == "H200"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_name_of_its_file_no_problems_and_fits(name: str) -> None:
    plan = plan_of(name)
    assert plan.name == name
    assert [str(problem) for problem in plan.problems] == []
    assert plan.fits


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("quickstart", 2),
        ("tiny_2x2x2", 8),
        ("gpt2_124m", 8),
        ("gpt3_175b", 1024),  # arXiv:2104.04473 section 5.1
        ("megatron_22b", 8),  # arXiv:2205.05198 table 3, as the next three
        ("megatron_175b", 64),
        ("megatron_530b", 280),
        ("megatron_1t", 512),
        ("megatron_1t_6x8x64", 3072),  # arXiv:2104.04473 table 1
        ("llama3_405b", 8192),  # arXiv:2407.21783 table 4
    ],
)
def test_a_recipe_has_the_number_of_devices_in_its_source(name: str, world: int) -> None:
    cluster = load_recipe(name).cluster
    assert cluster.nodes * cluster.gpus == world


def test_the_trillion_parameter_recipe_scales_down_to_eight_processes() -> None:
    plan = make_plan(load_recipe("megatron_1t_6x8x64", ["cluster=2x2x2", "device=cpu", "model=tiny", "train.seq=64", "train.batch=16"]))
    assert plan.mesh == {"pp": 2, "dp": 2, "cp": 1, "ep": 1, "tp": 2}
    assert plan.problems == ()


# Recipes for newcomers: this version runs them, and memory is left over.
STARTERS = (
    "llama3_8b_1node",
    "llama3_2_1b_1node",
    "llama3_8b_finetune",
    "llama3_70b_dpo",
    "llama3_8b_ethernet",
    "gpt2_124m_1gpu",
    "llama3_8b_128k",
)


@pytest.mark.parametrize("name", STARTERS)
def test_this_version_runs_a_starter_with_a_tenth_of_the_memory_free(name: str) -> None:
    plan = plan_of(name)
    assert plan.runnable
    assert plan.memory is not None
    assert plan.memory.peak <= 0.9 * plan.memory.capacity


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_has_its_sources_and_no_figures_of_the_plan(name: str) -> None:
    text = (PACKAGE / "recipes" / f"{name}.yaml").read_text()
    plan = plan_of(name)
    assert re.search(r"arXiv:\d{4}\.\d{5}|github\.com/", text)
    assert plan.throughput is not None
    assert not re.search(r"GiB|tokens/s|MFU|\bdays\b", text)


def test_only_gradients_of_the_ethernet_starter_cross_between_nodes_and_only_once_per_step() -> None:
    plan = plan_of("llama3_8b_ethernet")
    assert {(each.axis, each.verb) for each in plan.traffic if each.link == "between"} == {("dp", "all_reduce"), ("dp", "all_gather")}
    more = plan_of("llama3_8b_ethernet", "train.batch=512")
    assert [each.count for each in plan.traffic if each.link == "between"] == [
        each.count for each in more.traffic if each.link == "between"
    ]


@pytest.mark.parametrize("overrides", [["parallel.zero=2"], ["parallel.zero=3"], ["parallel.tp=8"], ["parallel.tp=4"]])
def test_the_ethernet_starter_is_faster_than_similar_layouts(overrides: list[str]) -> None:
    starter, other = (plan_of("llama3_8b_ethernet", *each).throughput for each in ([], overrides))
    assert starter is not None
    assert other is not None
    assert starter.tokens_per_second > other.tokens_per_second


def test_the_fine_tuning_starter_needs_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_recipe("llama3_8b_finetune")
    assert run.model.weights == str(tmp_path / "Meta-Llama-3-8B")
    assert [each.rule for each in weight_problems(run)] == ["weights"]


def test_the_device_options_have_the_names_that_drivers_report() -> None:
    assert DEVICE_OPTIONS["NVIDIA GeForce RTX 4090"] == "rtx_4090"
    assert set(DEVICE_OPTIONS.values()) == set(options("device")) - {"cpu", "local"}
