"""Scaled rotary embeddings: logits equal those of transformers, below and beyond the original length, and config.json says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.trainer.layers.transformer.rotary import rotary_frequencies  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights, named_weights  # noqa: E402
from distrain.trainer.models.hf_format.config import read_hf_config  # noqa: E402
from distrain.trainer.models.hf_format.weights import read_hf_weights, write_hf_folder  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.spec.changed_run import with_changes  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402
from distrain.trainer.spec.read import read  # noqa: E402
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train  # noqa: E402
from distrain.trainer.spec.sections.rope import Rope  # noqa: E402

CPU = torch.device("cpu")
ORIGINAL = 16  # tokens of the sequences before scaling
LENGTHS = (11, 48)
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 10000.0}
# fmt: off
THEIRS: dict[str, dict[str, Any]] = {
    "linear":                    {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "dynamic":                   {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
    "llama3":                    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": ORIGINAL, "rope_theta": 500.0},
    "yarn":                      YARN,
    "yarn, beta":                YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    "yarn, attention_factor":    YARN | {"attention_factor": 0.7},
    "yarn, mscale":              YARN | {"mscale": 0.707, "mscale_all_dim": 1.4},
    "yarn, nothing is stretched whole": YARN | {"rope_theta": 1.3},  # the ramp would end beyond the last frequency
    "yarn, factor from lengths": {key: value for key, value in YARN.items() if key != "factor"} | {"factor": None},
}
# fmt: on


def config_keys(name: str) -> dict[str, Any]:
    """The keys of a config.json; transformers takes the original length of `dynamic` from max_position_embeddings."""
    return SHAPE | {"rope_parameters": dict(THEIRS[name])} | ({"max_position_embeddings": ORIGINAL} if name == "dynamic" else {})


def run_of(model: Model) -> Run:
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    return Run(name="test", model=model, cluster=cluster, parallel=Parallel(), train=Train(batch=2, microbatch=2, seq=64, steps=1))


@pytest.mark.parametrize("name", THEIRS)
def test_logits_are_those_of_transformers_and_the_folder_is_read_and_written(name: str, tmp_path: Path, transformers: Any) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(initializer_range=0.2, **config_keys(name))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    run = run_of(read(read_hf_config(tmp_path / "theirs"), Model))
    assert run.model.rope.type == name.partition(",")[0]
    ours = build_model(run, device=CPU, dtype=torch.float32)
    load_weights(ours, read_hf_weights(tmp_path / "theirs", run))
    write_hf_folder(named_weights(ours, run), run, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert read(read_hf_config(tmp_path / "ours"), Model).rope == run.model.rope
    for length in LENGTHS:  # a short sequence after a long one, too: dynamic scaling follows each sequence's own length
        for model in (theirs, again):
            tokens = torch.randint(run.model.vocab, (2, length), generator=torch.Generator().manual_seed(7))
            with torch.no_grad():
                torch.testing.assert_close(ours.logits(tokens), model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", THEIRS)
def test_scaling_changes_the_logits_beyond_the_original_length(name: str, tmp_path: Path) -> None:
    """What the test above compares differs from plain rope: otherwise a model that ignores its scaling would pass."""
    (tmp_path / "config.json").write_text(json.dumps(config_keys(name) | {"model_type": "llama"}))
    run = run_of(read(read_hf_config(tmp_path), Model))
    plain = with_changes(run, [("model.rope", Rope())])
    tokens = torch.randint(run.model.vocab, (1, LENGTHS[1]), generator=torch.Generator().manual_seed(7))
    first, second = (build_model(each, device=CPU, dtype=torch.float32, seed=5).logits(tokens) for each in (run, plain))
    assert (first - second).abs().max() > 1e-4


def test_llama_3_1_has_the_frequencies_of_its_own_code() -> None:
    """Wavelengths below 8192 / 4 tokens stay, above 8192 are 8 times as long; the figures are of float64 arithmetic by hand."""
    rope = Rope(type="llama3", factor=8.0, original_max_position_embeddings=8192)
    model = Model(family="llama", layers=1, hidden=4096, heads=32, vocab=8, positions="rope", rope_base=5e5, rope=rope)
    found, scale = rotary_frequencies(model, 131072, CPU, torch.float64)
    plain = [5e5 ** (-index / 64) for index in range(64)]
    assert scale == 1
    for index, frequency in enumerate(plain):
        wavelength = 2 * torch.pi / frequency
        if wavelength < 2048:
            assert found[index] == pytest.approx(frequency, rel=1e-12)
        elif wavelength > 8192:
            assert found[index] == pytest.approx(frequency / 8, rel=1e-12)
        else:
            share = (8192 / wavelength - 1) / 3
            assert found[index] == pytest.approx(frequency * (share + (1 - share) / 8), rel=1e-12)
    assert 0 < sum(2048 < 2 * torch.pi / each < 8192 for each in plain) < 64


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope_type=longrope: it has default, linear,"),
        ({"rope_type": "linear"}, "factor of rope_type=linear is missing"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor of rope_type=llama3 is missing"),
        ({"rope_type": "yarn", "factor": "4"}, 'factor="4"'),
        ({"rope_type": "yarn", "factor": True}, "factor=true is not a number"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate=1 is not true or false"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section=[16, 24, 24]"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, "rope_type={"),
        ("linear", "factor of rope_type=linear is missing"),
    ],
)
def test_other_scalings_are_refused_by_name(rope: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "llama", "rope_scaling": rope}))
    with pytest.raises(Unreadable) as error:
        read_hf_config(tmp_path)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.rope.type=yarn"], "model.rope.type=yarn needs model.rope.original_max_position_embeddings"),
        (
            ["model.rope={type: llama3, factor: 8, original_max_position_embeddings: 64, low_freq_factor: 4, high_freq_factor: 4}"],
            "model.rope.high_freq_factor=4 is not above model.rope.low_freq_factor=4: set model.rope.high_freq_factor=16",
        ),
        (
            ["model.rope={type: yarn, factor: 8, original_max_position_embeddings: 64, beta_fast: 1, beta_slow: 2}"],
            "model.rope.beta_fast=1 is below model.rope.beta_slow=2: set model.rope.beta_fast=64",
        ),
        (
            ["model.head_dim=8", "model.rope_share=0.25", "model.rope={type: dynamic, factor: 8, original_max_position_embeddings: 64}"],
            "model.rope.type=dynamic needs more than 2 elements of a head to turn: set model.rope.type=linear",
        ),
        (["model.head_dim=15"], "model.positions=rope turns pairs of elements, but a head has 15: set model.head_dim=16"),
        (
            ["model.head_dim=2", "model.rope={type: dynamic, factor: 8, original_max_position_embeddings: 64}"],
            "model.rope.type=dynamic needs more than 2 elements of a head to turn: set model.rope.type=linear",
        ),
    ],
)
def test_a_recipe_that_can_not_be_scaled_is_refused_with_a_fix(words: list[str], says: str) -> None:
    plan = make_plan(load_recipe("quickstart", ["model=tiny_llama", *words]))
    assert says in "\n".join(map(str, plan.problems))


@pytest.mark.parametrize("share", ["0", "1.5", "half"])
def test_a_share_of_a_head_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(Unreadable, match=rf"model\.rope_share={share} is not a number, above 0, at most 1"):
        load_recipe("quickstart", ["model=tiny_llama", f"model.rope_share={share}"])


def test_a_factor_below_1_and_an_unknown_type_are_refused() -> None:
    with pytest.raises(Unreadable, match=r"model\.rope\.factor=0\.5 is not a number, at least 1"):
        load_recipe("quickstart", ["model=tiny_llama", "model.rope={type: linear, factor: 0.5}"])
    with pytest.raises(Unreadable, match=r"model\.rope\.type=longrope is not one of default, linear, dynamic, llama3, yarn"):
        load_recipe("quickstart", ["model=tiny_llama", "model.rope.type=longrope"])
