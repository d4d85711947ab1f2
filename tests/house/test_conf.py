"""Every YAML that ships says what it is, composes, is read strictly, and names the source of its figures."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import distrain
from distrain.cli.config.load import load_recipe
from distrain.trainer.launch.file_checks import weight_problems
from distrain.trainer.machine.facts import DEVICE_OPTIONS
from distrain.trainer.models.families import FAMILIES
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.read import read
from distrain.trainer.spec.run import Checkpoint, Data, Device, Launch, Log, Model, Optim, Parallel, Run, Train

HOUSE = Path(str(distrain.__file__)).parent
GROUPS = ("checkpoint", "cluster", "data", "device", "launch", "log", "model", "optim", "parallel", "train")
FILES = sorted([*(HOUSE / "conf").rglob("*.yaml"), *(HOUSE / "recipes").glob("*.yaml")])
RECIPES = sorted(file.stem for file in (HOUSE / "recipes").glob("*.yaml"))
WHOLE: dict[str, type] = {  # files that spell out every key of their part
    "parallel/default": Parallel,
    "train/default": Train,
    "optim/adamw": Optim,
    "data/synthetic": Data,
    "log/default": Log,
    "checkpoint/default": Checkpoint,
    "launch/local": Launch,
}
# What the defaults of a part leave to its file, and what a file gives in place of a default.
OWN = {"train/default": {"batch": 8, "seq": 1024, "steps": 1000}}

FIGURE = re.compile(r"^\s+(fp32|tf32|bf16|fp16|fp8|fp4|bandwidth|latency): \S|^(memory|bandwidth|units|context): \S")
NONE = re.compile(r": (null|auto|0\.0)\b")
SOURCE = re.compile(
    r"datasheet|whitepaper|product page|reference architecture|chronicles-prequel|dgxc-benchmarking README|tuning\.cc|NCCL's"
    r"|what torch reports|torch's multi_processor_count"
)


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (HOUSE / "conf" / group).glob("*.yaml"))


def plain(name: str) -> dict[str, Any]:
    """A group's file as plain data, not composed."""
    words = OmegaConf.to_container(OmegaConf.load(HOUSE / "conf" / f"{name}.yaml"))
    assert isinstance(words, dict)
    return {str(key): value for key, value in words.items() if key != "defaults"}


def named(file: Path) -> str:
    return str(file.relative_to(HOUSE))


def figures(text: str) -> list[tuple[str, str]]:
    """(line, its comment): of its own, or that of the block of comments above it."""
    above, block, found = "", "", list[tuple[str, str]]()
    for line in text.splitlines():
        body, _, comment = line.partition("#")
        if not body.strip():
            block += comment
            above = block
            continue
        block = ""
        if FIGURE.match(line) and not NONE.search(line):
            found.append((line, comment or above))
    return found


def test_the_groups_are_those_of_a_run() -> None:
    assert sorted(path.name for path in (HOUSE / "conf").iterdir() if path.is_dir() and path.name != "__pycache__") == sorted(GROUPS)


@pytest.mark.parametrize("file", FILES, ids=named)
def test_the_first_line_says_what_a_file_is(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    assert re.fullmatch(r"# \S.{0,76}[^\s.]", first)


@pytest.mark.parametrize("file", FILES, ids=named)
def test_a_file_parses_and_has_short_lines(file: Path) -> None:
    assert OmegaConf.to_container(OmegaConf.load(file))
    assert max(map(len, file.read_text().splitlines())) <= 140


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name in ("device", "cluster")], ids=named)
def test_a_figure_of_hardware_has_its_source_beside_it(file: Path) -> None:
    without = [line for line, comment in figures(file.read_text()) if not SOURCE.search(comment)]
    assert not without


@pytest.mark.parametrize("name", [name for name in options("device") if name not in ("cpu", "local")])
def test_a_device_of_a_vendor_states_all_that_times_need(name: str) -> None:
    text = (HOUSE / "conf" / "device" / f"{name}.yaml").read_text()
    device = read(plain(f"device/{name}"), Device)
    assert device.units
    assert device.bandwidth
    assert {"fp32", "fp16"} <= set(device.peak)
    assert len(figures(text)) == 4 + len(device.peak)  # memory, bandwidth, units, context and the peaks


def test_a_cpu_states_no_rate_that_nobody_measured() -> None:
    device = read(plain("device/cpu"), Device)
    assert plain("device/local") == {**plain("device/cpu"), "kind": "auto"}
    assert (device.kind, device.memory, device.bandwidth, device.peak) == ("cpu", "auto", None, {})


@pytest.mark.parametrize("name", options("model"))
def test_a_model_is_read_strictly_and_names_its_source(name: str) -> None:
    model = read(plain(f"model/{name}"), Model)
    assert model.family in FAMILIES
    text = (HOUSE / "conf" / "model" / f"{name}.yaml").read_text()
    assert re.search(r"arXiv:\d{4}\.\d{5}|Hugging Face \S+/|github\.com/|our own choice", text)


@pytest.mark.parametrize(("name", "part"), WHOLE.items(), ids=WHOLE)
def test_a_default_spells_out_every_key_in_order(name: str, part: type) -> None:
    words = plain(name)
    assert list(words) == [row.name for row in fields(part)]
    for key, value in words.items():
        if isinstance(value, dict):
            nested = getattr(part(**OWN.get(name, {})), key)
            assert is_dataclass(nested)
            assert list(value) == [row.name for row in fields(nested)]


@pytest.mark.parametrize(("name", "part"), WHOLE.items(), ids=WHOLE)
def test_a_default_says_what_is_so_without_it(name: str, part: type) -> None:
    assert read(plain(name), part) == part(**OWN.get(name, {}))


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in options(group)])
def test_every_option_of_a_group_composes_into_a_run(choice: str) -> None:
    assert isinstance(load_recipe("quickstart", [choice]), Run)


@pytest.mark.parametrize("name", options("cluster"))
def test_a_cluster_brings_its_device_and_takes_another(name: str) -> None:
    words = OmegaConf.load(HOUSE / "conf" / "cluster" / f"{name}.yaml")
    own = plain(f"device/{words.defaults[0]['/device@device']}")
    assert load_recipe("quickstart", [f"cluster={name}"]).cluster.device.name == own["name"]
    assert load_recipe("quickstart", [f"cluster={name}", "device=h200"]).cluster.device.name == "H200"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_as_its_file(name: str) -> None:
    assert load_recipe(name).name == name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_laid_out_and_fits(name: str) -> None:
    plan = make_plan(load_recipe(name))
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
def test_a_recipe_has_the_devices_of_its_source(name: str, world: int) -> None:
    cluster = load_recipe(name).cluster
    assert cluster.nodes * cluster.gpus == world


def test_a_trillion_parameters_scale_down_to_eight_processes() -> None:
    plan = make_plan(load_recipe("megatron_1t_6x8x64", ["cluster=2x2x2", "device=cpu", "model=tiny", "train.seq=64", "train.batch=16"]))
    assert plan.mesh == {"pp": 2, "dp": 2, "cp": 1, "ep": 1, "tp": 2}
    assert plan.problems == ()


# What a newcomer starts from: recipes that this version runs, with room to spare.
STARTERS = ("llama3_8b_1node", "llama3_2_1b_1node", "llama3_8b_finetune", "llama3_8b_ethernet", "gpt2_124m_1gpu", "llama3_8b_128k")


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_is_run_by_this_version_and_leaves_a_tenth_of_the_memory(name: str) -> None:
    plan = make_plan(load_recipe(name))
    assert plan.runnable
    assert plan.memory is not None
    assert plan.memory.peak <= 0.9 * plan.memory.capacity


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_states_its_sources_and_no_figure_of_the_plan(name: str) -> None:
    text = (HOUSE / "recipes" / f"{name}.yaml").read_text()
    plan = make_plan(load_recipe(name))
    assert re.search(r"arXiv:\d{4}\.\d{5}|github\.com/", text)
    assert plan.throughput is not None
    assert not re.search(r"GiB|tokens/s|MFU|\bdays\b", text)


def test_gradients_of_the_ethernet_starter_cross_between_nodes_once_a_step_and_nothing_else_does() -> None:
    plan = make_plan(load_recipe("llama3_8b_ethernet"))
    assert {(each.axis, each.verb) for each in plan.traffic if each.link == "between"} == {("dp", "all_reduce"), ("dp", "all_gather")}
    more = make_plan(load_recipe("llama3_8b_ethernet", ["train.batch=512"]))
    assert [each.count for each in plan.traffic if each.link == "between"] == [
        each.count for each in more.traffic if each.link == "between"
    ]


@pytest.mark.parametrize("layout", [["parallel.zero=2"], ["parallel.zero=3"], ["parallel.tp=8"], ["parallel.tp=4"]])
def test_the_ethernet_starter_is_faster_than_its_neighbours(layout: list[str]) -> None:
    ours, theirs = (make_plan(load_recipe("llama3_8b_ethernet", words)).throughput for words in ([], layout))
    assert ours is not None
    assert theirs is not None
    assert ours.tokens_per_second > theirs.tokens_per_second


def test_the_fine_tuning_starter_wants_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_recipe("llama3_8b_finetune")
    assert run.model.weights == str(tmp_path / "Meta-Llama-3-8B")
    assert [each.rule for each in weight_problems(run)] == ["weights"]


def test_a_4090_is_found_by_its_name() -> None:
    assert DEVICE_OPTIONS["NVIDIA GeForce RTX 4090"] == "rtx_4090"
    assert set(DEVICE_OPTIONS.values()) == set(options("device")) - {"cpu", "local"}
