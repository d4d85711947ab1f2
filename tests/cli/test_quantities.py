"""Quantities with units: read from the command line and from YAML; an ambiguous one is refused with its possible meanings."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.keys.keys import config_keys
from distrain.trainer.spec.keys.units import UNITS, unit_of
from distrain.trainer.spec.numbers.quantity import dimension_of, parse_quantity, suggest_quantity
from distrain.trainer.spec.run import Run

# fmt: off
READ: list[tuple[str, str, float]] = [
    ("cluster.between.bandwidth", "100Gb/s", 12.5e9), ("cluster.between.bandwidth", "25 GB/s", 25e9),
    ("cluster.between.bandwidth", "400 Gbps", 50e9), ("cluster.between.bandwidth", "400gbps", 50e9),
    ("cluster.between.bandwidth", "200Gbit/s", 25e9), ("cluster.inside.bandwidth", "0.9 TB/s", 0.9e12),
    ("cluster.inside.bandwidth", "1GiB/s", 2**30), ("cluster.inside.bandwidth", "25 GBps", 25e9),
    ("cluster.device.bandwidth", "3.35TB/s", 3.35e12), ("cluster.storage", "2 TB/s", 2e12),
    ("cluster.device.memory", "80GiB", 80 * 2**30), ("cluster.device.memory", "80 GB", 80e9), ("cluster.device.memory", "1.5TB", 1.5e12),
    ("cluster.device.context", "512 MiB", 512 * 2**20), ("cluster.device.context", "1_000 kB", 1e6),
    ("cluster.device.peak.bf16", "312 TFLOP/s", 312e12), ("cluster.device.peak.bf16", "312TFLOPS", 312e12),
    ("cluster.device.peak.bf16", "0.99 PFLOPs", 0.99e15),
    ("cluster.inside.latency", "5us", 5e-6), ("cluster.inside.latency", "5\u00b5s", 5e-6), ("cluster.inside.latency", "10 ms", 0.01),
    ("cluster.inside.latency", "300ns", 300e-9), ("launch.patience", "2min", 120), ("launch.patience", "1h", 3600),
    ("cluster.mtbf", "1000 days", 86.4e6),
]
WRONG: list[tuple[str, str]] = [
    ("cluster.between.bandwidth=400Gb", "is not a rate: write 400Gb/s or 50e9 (bytes/s per GPU)"),
    ("cluster.between.bandwidth=400G",  "is not a rate: write 400Gb/s or 400GB/s (bytes/s per GPU)"),
    ("cluster.between.bandwidth=100gb/s", "is not a rate: write 100Gb/s or 100GB/s (bytes/s per GPU)"),
    ("cluster.between.bandwidth=25GB",  "is not a rate: write 25GB/s (bytes/s per GPU)"),
    ("cluster.between.bandwidth=fast",  "is not a rate: write 25e9, 25GB/s or 200Gb/s (bytes/s per GPU)"),
    ("cluster.between.bandwidth=-5",    "is not a number, above 0 (bytes/s per GPU)"),
    ("cluster.device.memory=80G",       "is not a size: write 80GB or 80GiB (bytes)"),
    ("cluster.device.memory=80Gb",      "is not a size: write 80GB or 80GiB (bytes)"),
    ("cluster.device.peak.bf16=312T",   "is not a rate: write 312TFLOP/s (FLOP/s)"),
    ("cluster.inside.latency=5m",       "is not a time: write 5ms or 5min (seconds)"),
    ("cluster.storage=2TB",             "is not a rate: write 2TB/s (bytes/s)"),
    ("train.seq=4k",                    "is not a number: write 4000 or 4096"),
    ("train.batch=2M",                  "is not a number: write 2000000 or 2097152"),
    ("train.tokens=15T",                "is not a number: write 15e12"),
    ("train.tokens=300B",               "is not a number: write 300e9"),
]
# fmt: on


def value_of(run: Run, key: str) -> float:
    value: object = run
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    assert isinstance(value, int | float)
    return value


@pytest.mark.parametrize(("key", "text", "value"), READ, ids=[f"{key}={text}" for key, text, _ in READ])
def test_a_quantity_is_read_from_the_command_line_and_from_yaml(key: str, text: str, value: float, tmp_path: Path) -> None:
    assert value_of(load_recipe("gpt2_124m", [f"{key}={text}"]), key) == value
    file = tmp_path / "mine.yaml"
    lines = [f"{'  ' * at}{name}:" for at, name in enumerate(key.split("."))]
    file.write_text("\n".join(["defaults: [gpt2_124m]", *lines]) + f" {text}\n", encoding="utf-8")
    assert value_of(load_recipe(str(file)), key) == value


@pytest.mark.parametrize(("override", "line"), WRONG)
def test_an_ambiguous_quantity_is_refused_with_its_possible_meanings(override: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=gpt2_124m", override]) == 2
    assert capsys.readouterr().err == f"distrain: {override} {line}\n"


@pytest.mark.parametrize(("override", "line"), [row for row in WRONG if not row[1].startswith("is not a number, above")])
def test_every_suggested_quantity_can_be_read(override: str, line: str) -> None:
    key = override.partition("=")[0]
    suggestions = line.partition("write ")[2].partition(" (")[0]
    for each in suggestions.replace(", ", " or ").split(" or "):
        assert value_of(load_recipe("gpt2_124m", [f"{key}={each}", "train.steps=null"]), key) > 0


def test_a_mapping_of_quantities_is_read() -> None:
    run = load_recipe("gpt2_124m", ["cluster.inside={bandwidth: 300GB/s, latency: 2us}", "cluster.device.peak={bf16: 312 TFLOP/s}"])
    assert run.cluster.inside is not None
    assert (run.cluster.inside.bandwidth, run.cluster.inside.latency) == (300e9, 2e-6)
    assert run.cluster.device.peak["bf16"] == 312e12


def test_every_unit_is_used_by_a_key() -> None:
    for pattern in UNITS:
        assert [key for key in (*config_keys(), "cluster.device.peak.bf16") if unit_of(key) and unit_of(key) == UNITS[pattern]], pattern


def test_every_message_about_a_link_says_per_gpu() -> None:
    for link in ("inside", "between"):
        dimension = dimension_of(f"cluster.{link}.bandwidth")
        assert dimension is not None
        assert "per GPU" in dimension.unit
        assert "per GPU" in unit_of(f"cluster.{link}.bandwidth")


@given(some.text(max_size=12), some.sampled_from([key for key, _, _ in READ]))
def test_any_text_is_a_quantity_or_gets_a_suggestion(text: str, key: str) -> None:
    dimension = dimension_of(key)
    assert dimension is not None
    assert parse_quantity(text, dimension) is not None or suggest_quantity(text, dimension).startswith("write ")
