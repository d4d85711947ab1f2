"""A causal language model that only transformers has: planned from the meta device, trained under data parallel and ZeRO."""

from __future__ import annotations

import json
import signal
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.cli import foreign
from distrain.cli.app import main as command
from distrain.cli.load import compose, load
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.problem import Unreadable

if TYPE_CHECKING:
    from distrain.tests.conftest import Ranks

transformers: Any = pytest.importorskip("transformers", reason="transformers, which has these models, is not installed")
torch: Any = pytest.importorskip("torch")

STEPS = 6
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
NEOX = {"model_type": "gpt_neox", "intermediate_size": 64, "dtype": "float16", **SIZES}
OPT = {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, **SIZES}  # its head is its embedding
PHI = {"model_type": "phi", "intermediate_size": 64, **SIZES}
WORDS = (
    "data=synthetic",
    "train.batch=8",
    "train.seq=16",
    "log.every=1",
    "train.evaluate.every=0",
    "optim.warmup=1",
    f"train.steps={STEPS}",
)


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(folder: Path, dp: int, zero: int) -> tuple[str, ...]:
    return (*WORDS, f"model.hf={folder}", f"cluster.gpus={dp}", f"parallel.zero={zero}", "train.microbatch=2")


def problems(*said: str) -> list[str]:
    """What a plan refuses, a line each."""
    return [str(each) for each in make_plan(load("quickstart", said)).problems]


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("neox"), NEOX)


@pytest.mark.parametrize("config", [NEOX, OPT, PHI], ids=lambda config: str(config["model_type"]))
def test_the_plan_has_the_parameters_that_transformers_has(config: dict[str, Any], tmp_path: Path) -> None:
    run = load("quickstart", words(written(tmp_path, config), 2, 1))
    plan = make_plan(run)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config))
    assert plan.model is not None
    assert plan.memory is not None
    assert plan.model.parameters == plan.memory.stages[0].parameters == sum(each.numel() for each in theirs.parameters())
    assert run.model.parameters == {name: tuple(each.shape) for name, each in theirs.named_parameters()}
    assert (run.model.family, run.model.layers, run.model.hidden, run.model.heads, run.model.vocab, run.model.context) == (
        "hf",
        2,
        32,
        4,
        256,
        64,
    )
    assert plan.model.flops_per_token == 6.0 * plan.model.parameters


def test_what_is_not_counted_is_null_or_warned_of(neox: Path) -> None:
    plan = make_plan(load("quickstart", [*words(neox, 2, 1), "cluster.device.peak.fp32=1e11", "cluster.device.bandwidth=1e10"]))
    assert (plan.ok, plan.runnable, plan.engine, plan.time) == (True, True, "zero", None)
    said = [str(each) for each in plan.warnings]
    assert "no times: what a model of family hf computes is in no table" in said
    assert any(line.startswith("activations of family hf are not counted: ") for line in said)


def test_a_config_is_asked_of_transformers_once(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("quickstart", words(neox, 1, 0))
    monkeypatch.setattr(foreign.sys, "executable", "/nowhere/python")
    assert load("quickstart", words(neox, 1, 0)) == first


def test_what_is_shown_holds_the_sizes_alone(neox: Path) -> None:
    assert "parameters" not in compose("quickstart", words(neox, 1, 0))["model"]


@pytest.fixture(scope="module")
def losses(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], list[float]]:
    """Six losses by model_type, dp and ZeRO stage."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for config, layouts in ((NEOX, ((1, 0), (2, 1), (2, 3))), (OPT, ((1, 0), (2, 3)))):
        name = str(config["model_type"])
        at = written(folder / name, config)
        for dp, zero in layouts:
            job = ranks.trained(folder / f"{name}_{dp}_{zero}", "quickstart", *words(at, dp, zero))
            found[name, dp, zero] = job.figures("loss")
    return found


def test_the_losses_are_the_same_in_every_layout(losses: dict[tuple[str, int, int], list[float]]) -> None:
    for (name, _, _), found in losses.items():
        assert len(found) == STEPS
        assert found == pytest.approx(losses[name, 1, 0], abs=2e-6, rel=0)


def test_the_losses_fall(losses: dict[tuple[str, int, int], list[float]]) -> None:
    assert all(found[-1] < found[0] - 0.01 for found in losses.values()), losses


def test_a_stopped_run_goes_on_in_another_layout(
    ranks: Ranks, neox: Path, tmp_path: Path, losses: dict[tuple[str, int, int], list[float]]
) -> None:
    stopped = ranks.fit(tmp_path / "run", "quickstart", *words(neox, 2, 3), signals=[(2, 1, signal.SIGTERM)])
    assert set(stopped.codes) == {75}
    reached = stopped.rows[-1]["step"]
    assert reached < STEPS
    job = ranks.trained(tmp_path / "run", "quickstart", *words(neox, 2, 1))
    assert f"goes on from step {reached}" in job.said
    assert job.figures("loss") == pytest.approx(losses["gpt_neox", 1, 0], abs=2e-6, rel=0)


def test_bytes_are_planned_as_they_are_held(ranks: Ranks, neox: Path, tmp_path: Path) -> None:
    ranks.trained(tmp_path / "run", "quickstart", *words(neox, 2, 2), "train.steps=2", "train.precision=bf16")
    counted = json.loads((tmp_path / "run" / "measured.json").read_text())["memory"]
    plan = make_plan(load("quickstart", [*words(neox, 2, 2), "train.steps=2", "train.precision=bf16"]))
    assert plan.memory is not None
    held = plan.memory.stages[0].bytes
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(held, kind) == pytest.approx(counted[kind], rel=0.02), kind


def test_half_precision_leaves_rotary_frequencies_whole(neox: Path) -> None:
    from distrain.trainer.models.build import trained

    module = trained(load("quickstart", words(neox, 1, 0)), device=torch.device("cpu"), dtype=torch.bfloat16, seed=1)
    module.bfloat16()  # as DeepSpeed does
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
    assert {each.dtype for name, each in module.named_buffers() if name.endswith("inv_freq")} == {torch.float32}


def test_a_model_that_looks_ahead_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = written(tmp_path / "bert", {"model_type": "bert", "intermediate_size": 64, **SIZES})
    job = ranks.fit(tmp_path / "run", "quickstart", *words(folder, 1, 0), "model.dropout=0")
    assert (job.codes, job.problems) == ((1,), (f"{folder}: its model sees the tokens that it is to foretell",))


REFUSED = (
    ("train.seq=128",                     "train.seq=128 is longer than the 64 tokens of its config.json: set train.seq=64"),
    ("data.documents=true",               "data.documents=true: attention of family hf does not stay inside documents: set data.documents=false"),
    ("parallel.recompute=full",           "parallel.recompute=full: family hf keeps all of its activations: set parallel.recompute=none"),
    ("parallel.tp=2",                     "parallel.tp=2 splits nothing of family hf: it trains under dp and ZeRO"),
    ("parallel.pp=2",                     "parallel.pp=2 splits nothing of family hf: it trains under dp and ZeRO"),
    ("model.dropout=0.1",                 "model.dropout=0.1: dropout of family hf can't be keyed, so that layouts would train apart: set model.dropout=0"),
)  # fmt: skip


@pytest.mark.parametrize(("word", "says"), REFUSED, ids=[word for word, _ in REFUSED])
def test_what_family_hf_can_not_do_is_refused_by_the_plan(word: str, says: str, neox: Path) -> None:
    assert any(line.startswith(says) for line in problems(*words(neox, 2, 1), word)), problems(*words(neox, 2, 1), word)


def test_dropout_of_a_config_is_told_and_can_be_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path, {**OPT, "dropout": 0.1})
    (line,) = problems(*words(folder, 2, 1))
    assert line.startswith("model.dropout=0.1: dropout of family hf can't be keyed")
    assert not problems(*words(folder, 2, 1), "model.dropout=0")


def test_sizes_beside_a_config_are_refused(neox: Path) -> None:
    with pytest.raises(Unreadable, match=f"model.layers=3 is not what {neox} says: change it there, and leave it out here"):
        load("quickstart", [*words(neox, 2, 1), "model.layers=3"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "nonesuch"}, "model_type=nonesuch is none that transformers"),
        ({"model_type": "vit"}, "has no causal language model of model_type=vit"),
        ({**NEOX, "num_attention_heads": "four"}, "config.json: "),
    ],
    ids=["nonesuch", "vit", "wrong"],
)
def test_a_config_that_makes_no_model_gets_one_line(
    config: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = command(["plan", "conf=quickstart", f"model.hf={written(tmp_path, config)}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert says in line


def test_without_transformers_there_is_one_clear_line(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(foreign, "version", absent)
    with pytest.raises(Unreadable) as caught:
        load("quickstart", words(neox, 1, 0))
    assert str(caught.value) == f"model.hf={neox}: transformers, which has this model, is not installed: pip install 'distrain[hf]'"
