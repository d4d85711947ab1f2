"""Family hf, causal language models that only transformers has: planned on the meta device, trained with data parallelism and ZeRO."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config import hf_family
from distrain.cli.config.load import compose_config, load_recipe
from distrain.tests.fakes.rank_pool import RankPool
from distrain.trainer.models.hf.inspect_config import inspect_config
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.read import read
from distrain.trainer.spec.run import Model

transformers: Any = pytest.importorskip("transformers", reason="transformers, which has these models, is not installed")
torch: Any = pytest.importorskip("torch")

STEPS = 6
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
NEOX = {"model_type": "gpt_neox", "intermediate_size": 64, "dtype": "float16", **SIZES}
OPT = {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1, **SIZES}  # its head is its embedding
WORDS = (
    "data=text",
    f"data.path={__file__}",
    "train.batch=8",
    "train.seq=16",
    "log.every=1",
    "train.evaluate.every=0",
    "optim.warmup=1",
    "optim.lr=1e-2",
    f"train.steps={STEPS}",
)


Capture = pytest.CaptureFixture[str]
Losses = dict[tuple[str, int, int], list[float]]


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write config.json to a folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(folder: Path, dp: int, zero: int) -> tuple[str, ...]:
    """Return the overrides of a run with a model, data-parallel ranks and a ZeRO stage."""
    return (*WORDS, f"model.hf={folder}", "model.dropout=0", f"cluster.gpus={dp}", f"parallel.zero={zero}", "train.microbatch=2")


def problems(*said: str) -> list[str]:
    """Return the problems of a plan, one line each."""
    return [str(each) for each in make_plan(load_recipe("quickstart", said)).problems]


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("neox"), NEOX)


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
    assert any(line.startswith("activations of family hf are not planned: ") for line in said)


def test_the_answer_of_transformers_is_cached(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_recipe("quickstart", words(neox, 1, 0))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert load_recipe("quickstart", words(neox, 1, 0)) == first


def test_the_composed_config_has_no_parameter_shapes(neox: Path) -> None:
    assert "parameters" not in compose_config("quickstart", words(neox, 1, 0))["model"]


@pytest.fixture(scope="module")
def hf_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Return ranks that have already imported transformers."""
    program = Path(__file__).parents[1] / "rank_programs" / "hf_ranks.py"
    pool = RankPool(tmp_path_factory.mktemp("hf") / "server.log", command=[sys.executable, str(program)])
    with pool.server:
        yield pool


@pytest.fixture(scope="module")
def losses(hf_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Return six losses for each (model_type, dp, ZeRO stage)."""
    folder = tmp_path_factory.mktemp("runs")
    figures: Losses = {}
    for config, layouts in ((NEOX, ((1, 0), (2, 1), (2, 3))), (OPT, ((1, 0), (2, 3)))):
        name = str(config["model_type"])
        at = write_config(folder / name, config)
        for dp, zero in layouts:
            job = hf_ranks.train(folder / f"{name}_{dp}_{zero}", "quickstart", *words(at, dp, zero))
            figures[name, dp, zero] = job.figures("loss")
    return figures


def test_the_losses_are_the_same_in_every_layout(losses: Losses) -> None:
    for (name, _, _), figures in losses.items():
        assert len(figures) == STEPS
        assert figures == pytest.approx(losses[name, 1, 0], abs=2e-6, rel=0)


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


def test_planned_bytes_match_the_measured_bytes(hf_ranks: RankPool, neox: Path, tmp_path: Path) -> None:
    short = (*words(neox, 1, 2), "train.steps=2", "train.precision=bf16")
    hf_ranks.train(tmp_path / "run", "quickstart", *short)
    counted = json.loads((tmp_path / "run" / "measured.json").read_text())["memory"]
    plan = make_plan(load_recipe("quickstart", short))
    assert plan.memory is not None
    held = plan.memory.stages[0].bytes
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(held, kind) == pytest.approx(counted[kind], rel=0.02), kind


def test_half_precision_keeps_rotary_frequencies_in_float32(neox: Path) -> None:
    from distrain.trainer.models.hf.module import build_causal_lm

    module = build_causal_lm(load_recipe("quickstart", words(neox, 1, 0)), device=torch.device("cpu"), dtype=torch.bfloat16, seed=1)
    module.bfloat16()  # as DeepSpeed does
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
    assert {each.dtype for name, each in module.named_buffers() if name.endswith("inv_freq")} == {torch.float32}


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

    monkeypatch.setattr(hf_family, "version", absent)
    with pytest.raises(Unreadable) as caught:
        load_recipe("quickstart", words(neox, 1, 0))
    assert str(caught.value) == f"model.hf={neox} needs transformers, which is not installed: pip install 'distrain[hf]'"


# Offline: the verbs on a trained run, and what they are made of for many architectures.

SMALL = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
# fmt: off
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt_neox":    {},
    "opt":         {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom":       {"n_layer": 2, "n_head": 4},
    "falcon":      {"head_dim": None, "ffn_hidden_size": 64},
    "phi":         {},
    "phi3":        {},
    "gemma":       {},
    "gemma2":      {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "olmo2":       {},
    "granite":     {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "smollm3":     {},
    "starcoder2":  {"sliding_window": 8},
    "stablelm":    {},
    "cohere":      {},
    "qwen3_moe":   MOE,
    "deepseek_v3": {**MOE, **LATENT, **ROUTED},
}
# fmt: on


def small_causal_lm(model_type: str, folder: Path) -> tuple[Any, Any]:
    """Return a run of a small model of an architecture, and the model with random weights that all have an effect."""
    from distrain.trainer.models.hf.module import build_causal_lm

    keys = {"model_type": model_type, **SMALL, **ARCHITECTURES[model_type]}
    config = {key: value for key, value in keys.items() if value is not None}
    answer = inspect_config(write_config(folder, config) / "config.json")
    plain = load_recipe("quickstart", [*WORDS, "model.dropout=0", "cluster.gpus=1", "train.microbatch=2"])
    run = replace(plain, model=read({"family": "hf", "hf": str(folder), **answer["sizes"], "parameters": answer["parameters"]}, Model))
    module = build_causal_lm(run, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return run, module


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_generation_with_a_cache_draws_what_transformers_draws(model_type: str, tmp_path: Path) -> None:
    """The likeliest tokens, beyond windows of 8; and after the context of 20 is full, those of the last 20 tokens alone."""
    from distrain.trainer.loop.offline.generate import Sampling, generate_tokens

    run, module = small_causal_lm(model_type, tmp_path)
    prompt = torch.arange(3, 9)
    wanted = Sampling(prompt="", tokens=12, temperature=0, top_k=None, seed=0, tokenizer=None)
    ours = list(generate_tokens(module, prompt, 64, wanted, size=run.model.vocab))
    theirs = module.hf.generate(
        prompt[None], attention_mask=torch.ones(1, 6), max_new_tokens=12, do_sample=False, eos_token_id=None, min_new_tokens=12
    )
    assert ours == theirs[0, 6:].tolist()
    short = list(generate_tokens(module, prompt, 10, wanted, size=run.model.vocab))
    tokens = prompt.tolist()
    with torch.no_grad():
        for token in short:
            assert token == int(module.logits(torch.tensor([tokens[-10:]]))[0, -1].argmax())
            tokens.append(token)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_neox"])
def test_the_plan_counts_the_parameters_that_a_token_uses(model_type: str, tmp_path: Path) -> None:
    """Of four experts a token uses two: of transformers' own parameters, half of those of experts."""
    run, module = small_causal_lm(model_type, tmp_path)
    plan = make_plan(run)
    assert plan.ok
    assert plan.model is not None
    every = sum(each.numel() for each in module.parameters())
    of_experts = sum(each.numel() for name, each in module.named_parameters() if ".experts." in name)
    assert (of_experts > 0) == (model_type != "gpt_neox")
    assert (plan.model.parameters, plan.model.active_parameters) == (every, every - of_experts // 2)
    assert plan.model.flops_per_token == 6.0 * plan.model.active_parameters


def test_zero_3_is_planned_to_gather_a_layer_at_a_time(tmp_path: Path) -> None:
    """Two layers' weights, the one that computes and the one gathered ahead, and one layer's gradients; not the whole model's."""
    run, module = small_causal_lm("qwen3_moe", tmp_path)
    changes = [("cluster.gpus", 2), ("cluster.device.kind", "cuda"), ("parallel.zero", 3)]
    plan = make_plan(with_changes(run, changes))
    assert plan.memory is not None
    sizes: dict[str, int] = {}
    for name, each in module.hf.named_parameters():
        part = ".".join(name.split(".")[:3]) if ".layers." in name else name
        sizes[part] = sizes.get(part, 0) + each.numel()
    assert len(sizes) == 2 + 3  # two layers; the embedding, the last norm and the head
    assert plan.memory.stages[0].bytes.buffers == max(sizes.values()) * (2 * 4 + 4)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_written_model_has_the_same_logits_in_transformers(model_type: str, tmp_path: Path) -> None:
    from distrain.trainer.models.hf.module import write_causal_lm

    _, module = small_causal_lm(model_type, tmp_path)
    write_causal_lm(module, tmp_path / "out", torch.float32, {"eos_token_id": 7, "bos_token_id": None})
    again, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (again.config.eos_token_id, again.config.bos_token_id) == (7, 1)
    tokens = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, module.logits(tokens), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def trained(hf_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained; the config.json that it was planned from is gone."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "config", NEOX)
    hf_ranks.train(folder / "run", "quickstart", *words(config, 2, 3))
    (config / "config.json").unlink()
    return folder / "run"


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
    module = load_model(found.run, found.checkpoint, torch.device("cpu"))
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


@pytest.mark.parametrize("model_type", ["gpt_neox", "qwen3_moe", "gemma3_text"])
def test_published_weights_are_read_as_transformers_reads_them(model_type: str, tmp_path: Path) -> None:
    """Experts lie one by one in the files of transformers, and in one tensor in its model."""
    from distrain.trainer.models.hf_format.transformers_weights import read_published_weights

    run, module = small_causal_lm(model_type, tmp_path / "config")
    module.hf.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
    read = dict(read_published_weights(tmp_path / "weights", run))
    assert read.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        assert torch.equal(read[name], parameter), name


def test_weights_of_another_model_are_refused_key_by_key(neox: Path, tmp_path: Path) -> None:
    from distrain.trainer.launch.file_checks import weight_problems

    transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING["gpt_neox"].from_dict(NEOX)).save_pretrained(
        tmp_path / "weights"
    )
    (tmp_path / "weights" / "config.json").write_text(json.dumps(NEOX | {"rotary_pct": 0.5, "hidden_size": 64}))
    run = load_recipe("quickstart", [*words(neox, 1, 0), f"model.weights={tmp_path / 'weights'}", f"log.dir={tmp_path}"])
    said = "\n".join(map(str, weight_problems(run)))
    assert f"{tmp_path / 'weights'} has hidden_size=64, and model.hf={neox} 32" in said
    assert "rotary_pct=0.5" in said
    assert f"set model.hf={tmp_path / 'weights'} to take its sizes" in said
    missing = load_recipe("quickstart", [*words(neox, 1, 0), f"model.weights={tmp_path / 'nowhere'}", f"log.dir={tmp_path}"])
    assert "is not a folder" in str(next(weight_problems(missing)))
