"""Family hf, causal language models that only transformers has: planned on the meta device, trained with data parallelism and ZeRO."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config import ask_transformers
from distrain.cli.config.load import compose_config, load_recipe
from distrain.cli.pages.plan_facts import verdict
from distrain.cli.pages.plan_page import plan_text
from distrain.cli.pages.text_layout import Style
from distrain.tests.fakes.hf_models import NEOX, OPT, SIZES, STEPS, words, write_config
from distrain.tests.fakes.rank_pool import PoolJob, RankPool
from distrain.trainer.loop.offline.evaluate_run import evaluate_run
from distrain.trainer.models.hf.inspect_config import inspect_config
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.measured_run import read_measured_run
from distrain.trainer.spec.problem import Unreadable

transformers: Any = pytest.importorskip("transformers", reason="transformers, which has these models, is not installed")
torch: Any = pytest.importorskip("torch")

Layout = tuple[str, int, int]  # model_type, dp, ZeRO stage
Losses = dict[Layout, list[float]]
Capture = pytest.CaptureFixture[str]


def problems(*said: str) -> list[str]:
    """Return the problems of a plan, one line each."""
    return [str(each) for each in make_plan(load_recipe("quickstart", said)).problems]


@pytest.mark.parametrize("config", [NEOX, OPT], ids=lambda config: str(config["model_type"]))
def test_the_plan_has_the_parameters_that_transformers_has(config: dict[str, Any], tmp_path: Path) -> None:
    run = load_recipe("quickstart", words(write_config(tmp_path, config), 2, 1))
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


def test_times_are_null_and_activations_are_warned_about(neox: Path) -> None:
    plan = make_plan(load_recipe("quickstart", [*words(neox, 2, 1), "cluster.device.peak.fp32=1e11", "cluster.device.bandwidth=1e10"]))
    assert (plan.ok, plan.runnable, plan.engine, plan.time) == (True, True, "zero", None)
    said = [str(each) for each in plan.warnings]
    assert "no times: the operations of family hf are not in a table: `distrain fit` measures them as it trains" in said
    assert any(line.startswith("activations of family hf are not known: ") for line in said)
    assert plan.memory is not None
    assert plan.memory.unknown == ("activations", "logits")
    heading, stage, *_ = (line.split() for line in plan_text(plan, Style()).splitlines() if line.startswith(("  stage", "  0 ")))
    assert stage[heading.index("activ")] == "?"
    assert ", without activations, which are not known; " in verdict(plan)


def test_the_answer_of_transformers_is_cached(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_recipe("quickstart", words(neox, 1, 0))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert load_recipe("quickstart", words(neox, 1, 0)) == first


def test_the_composed_config_has_no_parameter_shapes(neox: Path) -> None:
    assert "parameters" not in compose_config("quickstart", words(neox, 1, 0))["model"]


@pytest.fixture(scope="module")
def runs(hf_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, PoolJob]:
    """Runs of six steps, whose config.json is gone."""
    folder = tmp_path_factory.mktemp("runs")
    jobs: dict[Layout, PoolJob] = {}
    for config, layouts in ((NEOX, ((1, 0), (2, 1), (2, 3))), (OPT, ((1, 0), (2, 3)))):
        name = str(config["model_type"])
        at = write_config(folder / name, config)
        for dp, zero in layouts:
            jobs[name, dp, zero] = hf_ranks.train(folder / f"{name}_{dp}_{zero}", "quickstart", *words(at, dp, zero))
        (at / "config.json").unlink()
    return jobs


@pytest.fixture(scope="module")
def losses(runs: dict[Layout, PoolJob]) -> Losses:
    return {layout: job.figures("loss") for layout, job in runs.items()}


@pytest.fixture(scope="module")
def trained(runs: dict[Layout, PoolJob]) -> Path:
    """The folder of a run that has trained under ZeRO 3."""
    return runs["gpt_neox", 2, 3].folder


def test_the_losses_are_the_same_in_every_layout(losses: Losses) -> None:
    for (name, _, _), figures in losses.items():
        assert len(figures) == STEPS
        assert figures == pytest.approx(losses[name, 1, 0], abs=2e-6, rel=0)


@pytest.mark.parametrize("zero", [0, 2])
def test_engine_native_trains_the_same_losses(zero: int, hf_ranks: RankPool, neox: Path, tmp_path: Path, losses: Losses) -> None:
    job = hf_ranks.train(tmp_path / "run", "quickstart", *words(neox, 2, zero), "engine=native")
    assert job.figures("loss") == pytest.approx(losses["gpt_neox", 1, 0], abs=2e-6, rel=0)


def test_the_losses_fall(losses: Losses) -> None:
    assert all(figures[-1] < figures[0] - 0.3 for figures in losses.values()), losses


def test_a_stopped_run_resumes_in_another_layout(hf_ranks: RankPool, neox: Path, tmp_path: Path, losses: Losses) -> None:
    stopped = hf_ranks.fit(tmp_path / "run", "quickstart", *words(neox, 2, 3), signals=[(2, 1, signal.SIGTERM)])
    assert set(stopped.codes) == {75}
    reached = stopped.rows[-1]["step"]
    assert reached < STEPS
    job = hf_ranks.train(tmp_path / "run", "quickstart", *words(neox, 2, 1))
    assert f"resumes from step {reached}" in job.lines
    assert job.figures("loss") == pytest.approx(losses["gpt_neox", 1, 0], abs=2e-6, rel=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_writes_a_folder_that_transformers_loads(
    trained: Path, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distrain.trainer.loop.offline.export import export
    from distrain.trainer.loop.offline.load_run import load_model, load_saved_run

    export(trained, tmp_path / "out", dtype)
    assert "from those of transformers" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    found = load_saved_run(trained)
    module = load_model(found, torch.device("cpu"))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again.float()(tokens).logits, module.logits(tokens), rtol=0, atol=1e-5 if dtype == "fp32" else 0.1)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["max_length"], generation["do_sample"]) == (64, True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("def test")["input_ids"]) == "def test"


def test_generate_prints_what_the_export_generates(trained: Path, capsys: Capture) -> None:
    from distrain.trainer.loop.offline.generate import Sampling, generate

    generate(trained, Sampling(prompt="def ", tokens=8, temperature=0, top_k=None, seed=0, tokenizer=None))
    said = capsys.readouterr().out
    assert said.startswith("def ")
    assert len(said) > len("def \n")


def test_a_run_starts_from_published_weights(hf_ranks: RankPool, neox: Path, tmp_path: Path) -> None:
    """The first loss is another than from initial values, and the same under ZeRO-3; the weights are in several files."""
    torch.manual_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING["gpt_neox"].from_dict(NEOX)).float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 1
    (tmp_path / "weights" / "config.json").write_text(json.dumps(NEOX))
    first = {}
    for dp, zero in ((1, 0), (2, 3)):
        start = (*words(neox, dp, zero), f"model.weights={tmp_path / 'weights'}", "train.steps=2")
        job = hf_ranks.train(tmp_path / f"run{dp}", "quickstart", *start)
        assert f"starts from the weights in {tmp_path / 'weights'}" in job.lines
        first[dp] = job.figures("loss")[0]
    assert first[1] == pytest.approx(first[2], abs=2e-6)
    random = hf_ranks.train(tmp_path / "random", "quickstart", *words(neox, 1, 0), "train.steps=2").figures("loss")[0]
    assert abs(random - first[1]) > 0.05
    again = hf_ranks.train(tmp_path / "run1", "quickstart", *words(neox, 1, 0), f"model.weights={tmp_path / 'gone'}", "train.steps=3")
    assert "resumes from step 2" in again.lines


def test_an_evaluation_has_the_loss_of_the_runs_validation(hf_ranks: RankPool, neox: Path, tmp_path: Path, capsys: Capture) -> None:
    """`distrain evaluate`, of the weights and of their average."""
    layout = ("engine=native", "optim.ema=0.5", "train.evaluate={every: 3, batches: 2}", "data.validation=0.3", "train.steps=3")
    job = hf_ranks.train(tmp_path / "run", "quickstart", *words(neox, 2, 1), *layout, f"data.cache={tmp_path / 'cache'}")
    for ema, key in ((False, "validation_loss"), (True, "validation_ema_loss")):
        capsys.readouterr()
        evaluate_run(job.folder, changes={}, ema=ema, as_json=True)
        (held,) = json.loads(capsys.readouterr().out)["sets"]
        assert held["loss"] == pytest.approx(job.figures(key)[-1], abs=1e-5)
    assert job.figures("validation_loss") != job.figures("validation_ema_loss")


def test_planned_bytes_match_the_measured_bytes(hf_ranks: RankPool, neox: Path, tmp_path: Path) -> None:
    short = (*words(neox, 1, 2), "train.steps=2", "train.precision=bf16")
    hf_ranks.train(tmp_path / "run", "quickstart", *short)
    counted = json.loads((tmp_path / "run" / "measured.json").read_text())["memory"]
    plan = make_plan(load_recipe("quickstart", short))
    assert plan.memory is not None
    held = plan.memory.stages[0].bytes
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(held, kind) == pytest.approx(counted[kind], rel=0.02), kind
    activations = next(row for row in read_measured_run(tmp_path / "run").memory if row.name == "activations")
    assert activations.planned is None
    assert activations.measured


def test_half_precision_keeps_rotary_frequencies_in_float32(neox: Path) -> None:
    from distrain.trainer.models.hf.module import build_causal_lm

    module = build_causal_lm(load_recipe("quickstart", words(neox, 1, 0)), device=torch.device("cpu"), dtype=torch.bfloat16, seed=1)
    module.bfloat16()  # as DeepSpeed does
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
    assert {each.dtype for name, each in module.named_buffers() if name.endswith("inv_freq")} == {torch.float32}


def test_a_z_loss_adds_to_the_gradients_alone(neox: Path) -> None:
    from distrain.trainer.models.hf.module import build_causal_lm

    run = load_recipe("quickstart", (*words(neox, 1, 0), "train.z_loss=0.01"))
    module = build_causal_lm(run, device=torch.device("cpu"), dtype=torch.float64, seed=1)
    tokens, labels = torch.randint(SIZES["vocab_size"], (2, 2, 8))
    loss, _ = module(tokens, labels)
    logits = module.logits(tokens).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(expected + 0.01 * logits.logsumexp(-1).square().sum(), parameters)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted)


def test_a_model_that_looks_ahead_is_refused(neox: Path, tmp_path: Path) -> None:
    from distrain.trainer.models.hf.module import build_causal_lm

    folder = write_config(tmp_path / "bert", {"model_type": "bert", "intermediate_size": 64, **SIZES})
    shapes = {name: tuple(shape) for name, shape in inspect_config(folder / "config.json")["parameters"].items()}
    run = load_recipe("quickstart", words(neox, 1, 0))
    with pytest.raises(Unreadable, match="bert: its model sees the tokens that it should predict"):
        build_causal_lm(
            replace(run, model=replace(run.model, hf=str(folder), parameters=shapes)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            seed=1,
        )


def test_a_model_with_other_parameters_than_planned_is_refused(neox: Path) -> None:
    from distrain.trainer.models.hf.module import build_causal_lm

    run = load_recipe("quickstart", words(neox, 1, 0))
    changed = replace(run, model=replace(run.model, parameters={"weight": (2, 2)}))
    with pytest.raises(Unreadable, match="has changed since the run was planned"):
        build_causal_lm(changed, device=torch.device("cpu"), dtype=torch.float32, seed=1)


REFUSED = (
    ("train.seq=128",                     "train.seq=128 is longer than the 64 tokens of its config.json: set train.seq=64"),
    ("data.documents=true",               "data.documents=true: attention of family hf crosses document boundaries"),
    ("parallel.recompute=full",           "parallel.recompute=full: family hf saves all activations: set parallel.recompute=none"),
    ("parallel.tp=2",                     "parallel.tp=2 does not apply to family hf, which trains with data parallelism and ZeRO only"),
    ("parallel.pp=2",                     "parallel.pp=2 does not apply to family hf, which trains with data parallelism and ZeRO only"),
    ("model.dropout=0.1",                 "model.dropout=0.1: dropout of family hf is not keyed by train.seed and differs between layouts"),
)  # fmt: skip


@pytest.mark.parametrize(("word", "says"), REFUSED, ids=[word for word, _ in REFUSED])
def test_the_plan_refuses_what_family_hf_does_not_support(word: str, says: str, neox: Path) -> None:
    assert any(line.startswith(says) for line in problems(*words(neox, 2, 1), word)), problems(*words(neox, 2, 1), word)


def test_dropout_in_a_config_is_refused(tmp_path: Path) -> None:
    (line,) = problems("train.seq=16", f"model.hf={write_config(tmp_path, OPT)}")
    assert line.startswith("model.dropout=0.1: dropout of family hf is not keyed by train.seed")


def test_sizes_beside_a_config_are_refused(neox: Path) -> None:
    with pytest.raises(Unreadable, match=f"model.layers=3 differs from {neox}: change it there, and leave it out here"):
        load_recipe("quickstart", [*words(neox, 2, 1), "model.layers=3"])


WRONG = (
    ({"model_type": "vit"},                 "has no causal language model of model_type=vit"),
    ({"model_type": "t5"},                  "has no causal language model of model_type=t5"),
    ({**NEOX, "num_attention_heads": "4x"}, "num_attention_heads"),
    ({**NEOX, "num_attention_heads": 5},    ""),
)  # fmt: skip


@pytest.mark.parametrize(("config", "says"), WRONG, ids=["vit", "t5", "text", "heads"])
def test_a_config_without_a_model_gives_the_reason(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    (key, why), *more = inspect_config(write_config(tmp_path, config) / "config.json").items()
    assert (key, more) == ("problem", [])
    assert says in why


def test_an_unknown_model_type_is_reported_in_one_line(tmp_path: Path) -> None:
    folder = write_config(tmp_path, {"model_type": "nonesuch"})
    with pytest.raises(Unreadable) as caught:
        load_recipe("quickstart", [f"model.hf={folder}"])
    release = transformers.__version__
    assert str(caught.value) == f"model.hf={folder}/config.json: transformers {release} has no model_type=nonesuch"


def test_missing_transformers_is_reported_in_one_line(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ask_transformers, "version", absent)
    with pytest.raises(Unreadable) as caught:
        load_recipe("quickstart", words(neox, 1, 0))
    assert str(caught.value) == f"model.hf={neox} needs transformers, which is not installed: pip install 'distrain[hf]'"
