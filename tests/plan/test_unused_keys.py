"""Keys without effect: each row of the table warns where its condition holds, and nowhere else."""

from dataclasses import replace
from typing import Any

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.keys import config_files
from distrain.cli.keys.keys import config_keys
from distrain.trainer.launch.admission import start_warnings
from distrain.trainer.models.hybrid.ops import LINEAR
from distrain.trainer.models.mla.ops import LATENT
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules.unused_keys import IDLE, READ, RULE, default
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train
from distrain.trainer.spec.sections.lora import Lora

DEVICE = Device(name="A100", memory=80e9, bandwidth=2e12, peak={"bf16": 312e12})
LINK = Link(bandwidth=300e9, latency=5e-6)
RUN = Run(
    name="test",
    model=Model(family="gpt", layers=4, hidden=64, heads=4, vocab=256),
    cluster=Cluster(nodes=1, gpus=8, device=DEVICE, inside=LINK, between=LINK),
    parallel=Parallel(),
    train=Train(batch=64, seq=32, steps=100),
)
Keys = dict[str, Any]
MOE: Keys = {"model.family": "moe", "model.experts": 4, "model.top_k": 2, "model.act": "swiglu"}
LATENT_MOE: Keys = MOE | {"model.family": "mla"} | dict.fromkeys((f"model.{key}" for key in LATENT), 16)
HYBRID: Keys = MOE | {"model.family": "hybrid", "model.shared_experts": 1} | dict.fromkeys((f"model.{key}" for key in LINEAR), 2)
HF: Keys = {"model.family": "hf", "model.parameters": {"embedding.weight": (256, 64)}}
ROPE: Keys = {"model.positions": "rope"}
LLAMA3: Keys = ROPE | {"model.rope.type": "llama3", "model.rope.original_max_position_embeddings": 16}
YARN: Keys = LLAMA3 | {"model.rope.type": "yarn"}
POWERSGD: Keys = {"parallel.compress.name": "powersgd"}
EXCHANGE: Keys = {"parallel.cp": 2, "parallel.cp_comm": "all_to_all"}
ONE: Keys = {"cluster.gpus": 1}
BOTH: Keys = {"parallel.pp": 2, "parallel.tp": 2}
PAIRS: Keys = {"data.name": "pairs", "data.path": "a", "data.documents": True}
PREFERENCES: Keys = PAIRS | {"data.name": "preferences"}
HOSTS: Keys = {"launch.name": "deepspeed"}

# The key and its value; the reason why it has no effect; the other keys of that run; the keys of a run in which it has an effect.
# fmt: off
ROWS: list[tuple[str, Any, str, Keys, Keys]] = [
    ("model.context", 64, "model.positions=rope", {"model.positions": "rope"}, {}),
    ("model.ffn", 128, "model.expert_ffn=64 of every layer", MOE | {"model.expert_ffn": 64}, {}),
    ("model.rope_base", 5e5, "model.positions=learned", {}, {"model.positions": "rope"}),
    ("model.rope_share", 0.5, "model.positions=learned", {}, {"model.positions": "rope"}),
    ("model.rope_share", 0.5, "model.family=mla", LATENT_MOE | ROPE, ROPE),
    ("model.qk_norm_over", "all", "model.qk_norm=false", {}, {"model.qk_norm": True}),
    ("model.scale_embedding", True, "model.family=bert", {"model.family": "bert"}, MOE),
    ("model.query_pre_attn_scalar", 64, "model.family=hf", HF, {}),
    ("model.rope_local_base", 5e4, "model.positions=learned", {"model.window": 8}, ROPE | {"model.window": 8}),
    ("model.rope_local_base", 5e4, "model.window=null", ROPE, ROPE | {"model.window": 32}),
    ("model.rope_local_base", 1e5, "model.rope_base=100000 of all layers", ROPE | {"model.rope_base": 1e5, "model.window": 8},
     YARN | {"model.rope_base": 1e5, "model.window": 8}),
    ("model.norm_place", "after", "model.family=hf", HF, {}),
    ("model.norm_place", "both", "model.family=bert", {"model.family": "bert"}, MOE),
    ("model.window", 16, "model.family=hf", HF, {}),
    ("model.sinks", True, "model.family=hf", HF, {}),
    ("model.expert_bias", True, "model.family=gpt", {}, MOE),
    ("model.layer_types", ("full_attention",), "model.family=hf", HF, {"model.window": 16}),
    ("model.layer_types", ("full_attention",), "model.window=null", {}, {"model.window": 16}),
    ("model.lora.alpha", 8.0, "model.lora.rank=0", {}, {"model.lora.rank": 4}),
    ("model.lora.weights", "adapter", "model.lora.rank=0", {}, {"model.lora.rank": 4, "model.weights": "base"}),
    ("model.lora.dropout", 0.1, "model.lora.rank=0", {}, {"model.lora.rank": 4}),
    ("model.lora.targets", ("query",), "model.lora.rank=0", {}, {"model.lora.rank": 4}),
    ("model.mtp.weight", 0.1, "model.mtp.layers=0", {}, {"model.mtp.layers": 1}),
    ("model.rope.type", "linear", "model.positions=learned", {}, {"model.positions": "rope"}),
    ("model.rope.factor", 2.0, "model.rope.type=default", ROPE, ROPE | {"model.rope.type": "linear"}),
    ("model.rope.original_max_position_embeddings", 8, "model.rope.type=linear", ROPE | {"model.rope.type": "linear"}, LLAMA3),
    ("model.rope.low_freq_factor", 2.0, "model.rope.type=yarn", YARN, LLAMA3),
    ("model.rope.high_freq_factor", 2.0, "model.rope.type=yarn", YARN, LLAMA3),
    ("model.rope.beta_fast", 8.0, "model.rope.type=llama3", LLAMA3, YARN),
    ("model.rope.beta_slow", 2.0, "model.rope.type=llama3", LLAMA3, YARN),
    ("model.rope.attention_factor", 2.0, "model.rope.type=llama3", LLAMA3, YARN),
    ("model.rope.mscale", 2.0, "model.rope.type=llama3", LLAMA3, YARN),
    ("model.rope.mscale_all_dim", 2.0, "model.rope.type=llama3", LLAMA3, YARN),
    ("model.rope.truncate", False, "model.rope.type=llama3", LLAMA3, YARN),
    ("model.top_k", 2, "model.family=gpt", {}, MOE),
    ("model.init.std", 0.006, "model.family=hf", HF, {}),
    ("model.init.scale_residual", False, "model.family=hf", HF, {}),
    ("model.router.score", "sigmoid", "model.family=gpt", {}, MOE),
    ("model.router.normalize", False, "model.family=hf", HF | {"model.experts": 4}, MOE),
    ("model.router.scale", 2.5, "model.family=gpt", {}, MOE),
    ("model.router.groups", 2, "model.family=gpt", {}, MOE),
    ("model.router.top_groups", 2, "model.router.groups=1", MOE, MOE | {"model.router.groups": 2}),
    ("model.router.top_groups", 2, "model.family=gpt", {}, LATENT_MOE | {"model.router.groups": 2}),
    ("model.router.bias", True, "model.family=gpt", {}, MOE),
    ("model.router.z_loss", 0.001, "model.family=gpt", {}, MOE),
    ("model.router.bias_rate", 0.001, "model.router.bias=false", MOE, MOE | {"model.router.bias": True}),
    ("model.router.bias_rate", 0.001, "model.family=gpt", {"model.router.bias": True}, MOE | {"model.router.bias": True}),
    ("model.expert_ffn", 64, "model.family=gpt", {}, MOE),
    ("model.shared_experts", 1, "model.family=gpt", {}, MOE),
    *((f"model.{key}", 8, "model.family=gpt", {}, LATENT_MOE) for key in LATENT),
    *((f"model.{key}", 1 if "key_heads" in key else 4, "model.family=gpt", {}, HYBRID) for key in LINEAR),
    ("model.head_dim", 8, "model.family=mla", LATENT_MOE, {}),
    ("model.aux_loss", 0.01, "model.family=gpt", {}, MOE),
    ("model.capacity", 1.25, "model.family=gpt", {}, MOE),
    ("checkpoint.background", True, "checkpoint.every=0", {"checkpoint.every": 0}, {"checkpoint.every": 5}),
    ("model.weights", "x", "checkpoint.resume=must", {"checkpoint.resume": "must"}, {}),
    ("model.weights", "x", "checkpoint.resume=must", {"checkpoint.resume": "must"}, {"checkpoint.resume": "must"} | PREFERENCES),
    ("parallel.shard", 4, "parallel.zero=0", {}, {"parallel.zero": 2}),
    ("parallel.schedule", "gpipe", "parallel.pp=1", {}, {"parallel.pp": 2}),
    ("parallel.gather", "step", "parallel.zero=0", {}, {"parallel.zero": 3}),
    ("parallel.vertical", True, "parallel.pp=1", {}, {"parallel.pp": 2, "parallel.schedule": "pipedream"}),
    ("parallel.stages", (1, 3), "parallel.pp=1", {}, {"parallel.pp": 2}),
    ("parallel.chunks", 2, "parallel.pp=1", {"parallel.schedule": "interleaved"}, {"parallel.schedule": "interleaved", "parallel.pp": 2}),
    ("parallel.sequence", True, "parallel.tp=1", {}, {"parallel.tp": 2}),
    ("parallel.reduce", "halving", "one data-parallel rank", ONE, {}),
    ("parallel.reduce", "hierarchical", "all data-parallel ranks in one node, or one in each", {}, {"cluster.nodes": 2, "cluster.gpus": 2}),
    ("parallel.servers", 2, "parallel.reduce=ring", {}, {"parallel.reduce": "server"}),
    ("parallel.servers", 2, "one data-parallel rank", ONE | {"parallel.reduce": "server"}, {"parallel.reduce": "server"}),
    ("parallel.staleness", 2, "one data-parallel rank", ONE, {}),
    ("parallel.sync.every", 2, "one worker", ONE, {}),
    ("parallel.sync.every", 2, "one worker", {"parallel.sync.across": "node"}, {}),
    ("parallel.sync.across", "node", "parallel.sync.every=1", {}, {"parallel.sync.every": 2}),
    ("parallel.sync.outer.lr", 0.7, "parallel.sync.every=1", {}, {"parallel.sync.every": 2}),
    ("parallel.sync.outer.momentum", 0.9, "one worker", {**ONE, "parallel.sync.every": 2}, {"parallel.sync.every": 2}),
    ("parallel.sync.outer.nesterov", True, "parallel.sync.outer.momentum=0.0", {"parallel.sync.every": 2},
        {"parallel.sync.every": 2, "parallel.sync.outer.momentum": 0.9}),
    ("parallel.bucket", 1000, "one data-parallel rank", ONE, {}),
    ("parallel.compress.name", "powersgd", "one data-parallel rank", ONE, {}),
    ("parallel.compress.name", "powersgd", "engine=papers", {"engine": "papers"}, {}),
    ("parallel.compress.rank", 2, "parallel.compress.name=none", {}, POWERSGD),
    ("parallel.compress.start", 5, "one data-parallel rank", ONE | POWERSGD, POWERSGD),
    ("parallel.scatter", True, "parallel.tp=1", {"parallel.pp": 2}, {"parallel.pp": 2, "parallel.tp": 2}),
    ("parallel.scatter", True, "parallel.sequence=true", {**BOTH, "parallel.sequence": True}, BOTH),
    ("parallel.overlap.data", False, "one data-parallel rank", ONE, {}),
    ("parallel.overlap.tensor", True, "parallel.tp=1", {}, {"parallel.tp": 2, "engine": "papers"}),
    ("parallel.overlap.tensor", True, "engine zero, which waits for them", {"parallel.tp": 2}, {"parallel.tp": 2, "engine": "papers"}),
    ("parallel.overlap.pipeline", True, "parallel.pp=1", {}, {"parallel.pp": 2}),
    ("parallel.overlap.context", False, "parallel.cp=1", {}, {"parallel.cp": 2, "engine": "papers"}),
    ("parallel.overlap.context", False, "parallel.cp_comm=all_to_all", EXCHANGE, {"parallel.cp": 2, "engine": "papers"}),
    ("parallel.cp_comm", "all_to_all", "parallel.cp=1", {}, {"parallel.cp": 2}),
    ("parallel.ep_load", 1.5, "parallel.ep=1", MOE, MOE | {"parallel.ep": 2}),
    ("train.linear_attention", "fla", "model.family=gpt", {}, HYBRID),
    ("train.linear_attention", "fla", "model.full_attention_interval=1", HYBRID | {"model.full_attention_interval": 1}, HYBRID),
    ("train.compile", True, "parallel.zero=3", {"parallel.zero": 3}, {"parallel.zero": 2}),
    ("train.evaluate.batches", 20, "train.evaluate.every=0", {}, {"train.evaluate.every": 10}),
    ("train.preference.loss", "ipo", "data.name=pairs", PAIRS, PREFERENCES),
    ("train.preference.beta", 0.2, "data.name=synthetic", {}, PREFERENCES),
    ("train.preference.label_smoothing", 0.1, "data.name=synthetic", {}, PREFERENCES),
    ("train.preference.label_smoothing", 0.1, "train.preference.loss=ipo", PREFERENCES | {"train.preference.loss": "ipo"}, PREFERENCES),
    ("train.preference.margin", 0.5, "data.name=synthetic", {}, PREFERENCES | {"train.preference.loss": "simpo"}),
    ("train.preference.margin", 0.5, "train.preference.loss=ipo", PREFERENCES | {"train.preference.loss": "ipo"}, PREFERENCES),
    ("train.preference.nll_weight", 0.2, "data.name=synthetic", {}, PREFERENCES),
    ("optim.betas", (0.9, 0.99), "optim.name=sgd", {"optim.name": "sgd"}, {}),
    ("optim.eps", 1e-6, "optim.name=sgd", {"optim.name": "sgd"}, {}),
    ("optim.momentum", 0.9, "optim.name=adamw", {}, {"optim.name": "sgd"}),
    ("optim.eps", 1e-6, "optim.name=sgd", {"optim.name": "sgd"}, {"optim.name": "muon"}),
    ("optim.moments", "bf16", "optim.momentum=0.0", {"optim.name": "sgd"}, {"optim.name": "sgd", "optim.momentum": 0.9}),
    ("optim.rounding", "nearest", "optim.moments=fp32", {}, {"optim.moments": "bf16"}),
    ("optim.muon.momentum", 0.9, "optim.name=adamw", {}, {"optim.name": "muon"}),
    ("optim.muon.nesterov", False, "optim.name=adamw", {}, {"optim.name": "muon"}),
    ("optim.muon.ns_steps", 6, "optim.name=sgd", {"optim.name": "sgd"}, {"optim.name": "muon"}),
    ("optim.muon.adjust_lr_fn", "original", "optim.name=adamw", {}, {"optim.name": "muon"}),
    ("optim.min_lr", 1e-5, "optim.schedule=constant", {"optim.schedule": "constant"}, {}),
    ("data.path", "x.txt", "data.name=stdlib", {"data.name": "stdlib"}, {"data.name": "text"}),
    ("data.validate", {"w": "w.txt"}, "train.evaluate.every=0", {"data.name": "stdlib"},
        {"data.name": "stdlib", "train.evaluate.every": 9}),
    ("data.weights", (1.0, 2.0), "data.name=synthetic", {}, {"data.name": "text", "data.path": ("a", "b")}),
    ("data.tokenizer", "x.json", "data.name=synthetic", {}, {"data.name": "tokens", "data.path": "a"}),
    ("data.end", 7, "data.name=synthetic", {}, {"data.name": "text", "data.path": "a"}),
    ("data.document_tokens", 512, "data.documents=false", {}, {"data.name": "text", "data.path": "a", "data.documents": True}),
    ("data.text_key", "content", "data.name=tokens", {"data.name": "tokens"}, {"data.name": "text"}),
    ("data.prompt_key", "question", "data.name=text", {"data.name": "text"}, PAIRS),
    ("data.completion_key", "answer", "data.name=synthetic", {}, PAIRS),
    ("data.messages_key", "chat", "data.name=preferences", PREFERENCES, PAIRS),
    ("data.turns", "last", "data.name=synthetic", {}, PAIRS),
    ("data.chosen_key", "good", "data.name=pairs", PAIRS, PREFERENCES),
    ("data.rejected_key", "bad", "data.name=synthetic", {}, PREFERENCES),
    ("data.cache", "x", "data.name=synthetic", {}, {"data.name": "stdlib"}),
    ("log.profile", (500, 510), "train.steps=100", {}, {"train.steps": 1000}),
    ("log.timeline", (500, 510), "train.steps=100", {}, {"train.steps": 1000}),
    ("launch.hostfile", "x", "launch.name=local", {}, HOSTS),
    ("launch.include", "x", "launch.name=local", {}, HOSTS),
    ("launch.exclude", "x", "launch.name=local", {}, HOSTS),
    ("launch.address", "x", "launch.name=slurm", {"launch.name": "slurm"}, HOSTS),
    ("launch.runner", "openmpi", "launch.name=local", {}, HOSTS),
    ("launch.port", 29500, "launch.name=local", {}, {"launch.name": "slurm"}),
    ("launch.environment", ("A",), "launch.name=local", {}, HOSTS),
    ("launch.restarts", 3, "launch.name=torchrun", {"launch.name": "torchrun"}, {}),
    ("launch.spares", 2, "launch.name=torchrun", {"launch.name": "torchrun"}, HOSTS),
    ("launch.spares", 2, "launch.restarts=0 and launch.preflight=false", {**HOSTS, "launch.preflight": False}, HOSTS),
    ("launch.patience", 60.0, "launch.name=slurm", {"launch.name": "slurm"}, {}),
    ("launch.preflight", False, "launch.name=local", {}, HOSTS),
]
# fmt: on


def warnings_of(run: Run) -> list[str]:
    """Return the warnings of a plan about keys without effect."""
    plan = make_plan(run)
    assert plan.ok, plan.problems
    return [each.says for each in plan.warnings if each.rule == RULE]


@pytest.mark.parametrize(("key", "value", "other", "idle", "used"), ROWS, ids=[f"{row[0]} {row[2]}" for row in ROWS])
def test_a_key_without_effect_is_warned_of_and_one_with_effect_is_not(key: str, value: Any, other: str, idle: Keys, used: Keys) -> None:
    (said,) = [each for each in warnings_of(with_changes(RUN, {**idle, key: value}.items())) if each.startswith(f"{key}=")]
    assert said.endswith(f" does nothing with {other}")
    assert not [each for each in warnings_of(with_changes(RUN, {**used, key: value}.items())) if each.startswith(f"{key}=")]
    assert not [each for each in warnings_of(with_changes(RUN, {**idle, key: default(key)}.items())) if each.startswith(f"{key}=")]


def test_every_key_that_can_be_idle_has_a_row() -> None:
    assert {row[0] for row in ROWS} == set(IDLE)


def test_every_key_has_a_row_or_is_always_read() -> None:
    read = {f"{section}.{key}".lstrip(".") for section, names in READ.items() for key in names}
    assert {*config_keys(), "reading", "model.parameters", "parallel.actions"} == read | set(IDLE)
    assert not read & set(IDLE)


@pytest.mark.parametrize("recipe", config_files.recipes(None))
def test_no_recipe_sets_a_key_without_effect(recipe: str) -> None:
    run = load_recipe(recipe)
    assert warnings_of(run) == []
    expected = ["data=synthetic: tokens are drawn at random"] if run.data.name == "synthetic" else []
    assert [each.says for each in start_warnings(run, make_plan(run)) if each.rule != RULE] == expected


def test_jsonl_is_written_even_where_log_sinks_leaves_it_out() -> None:
    run = replace(RUN, log=replace(RUN.log, sinks=("console",)))
    assert warnings_of(run) == ["log.sinks=[console] leaves out jsonl, which is always written"]


def test_fit_warns_of_keys_without_effect_below_its_verdict(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from distrain.trainer.launch import train_run
    from distrain.trainer.machine import measure_machine

    monkeypatch.setattr(measure_machine, "cached_facts", lambda: None)
    monkeypatch.setattr(measure_machine, "is_measured", lambda kind: True)
    monkeypatch.setattr(train_run, "train_run", lambda *_: train_run.TrainingResult(status=1, says="not started here"))
    words = ["conf=tiny_2x2x2", "optim.schedule=constant", "optim.min_lr=1e-5", "train.evaluate.batches=3", f"log.dir={tmp_path}"]
    assert command(["fit", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "warning: train.evaluate.batches=3 does nothing with train.evaluate.every=0",
        "warning: optim.min_lr=1e-05 does nothing with optim.schedule=constant",
    ]


def test_fit_warns_of_a_sink_whose_package_is_missing_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from distrain.trainer.launch import admission

    monkeypatch.setattr(admission, "find_spec", lambda name: None)
    run = replace(RUN, log=replace(RUN.log, sinks=("jsonl", "wandb")))
    assert [str(each) for each in start_warnings(run, make_plan(run)) if each.rule != "data"] == [
        "log.sinks names wandb, which is not installed: nothing is logged there: pip install wandb"
    ]


def test_fit_warns_where_additions_train_beside_random_weights() -> None:
    """And where preferences have a random reference; not where published weights are named."""
    says = "begins with weights that are drawn at random: set model.weights to a folder"
    lora = replace(RUN, model=replace(RUN.model, lora=Lora(rank=4)))
    assert [str(each) for each in start_warnings(lora, make_plan(lora)) if each.rule == "weights"] == [f"model.lora.rank=4 {says}"]
    pairs = load_recipe("llama3_70b_dpo", ["model.weights=null"])
    assert [str(each) for each in start_warnings(pairs, make_plan(pairs)) if each.rule == "weights"] == [f"data=preferences {says}"]
    named = replace(lora, model=replace(lora.model, weights="folder"))
    assert [each for each in start_warnings(named, make_plan(named)) if each.rule == "weights"] == []


def test_fit_warns_of_a_gradient_copy_that_no_engine_keeps() -> None:
    run = replace(RUN, optim=replace(RUN.optim, gradient_copy=True))
    assert [each.says for each in start_warnings(run, make_plan(run)) if each.rule != "data"] == [
        "optim.gradient_copy=true is in the plan, but no engine here keeps such a copy"
    ]
