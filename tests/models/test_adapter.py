"""LoRA's additions as PEFT's files: added to the model of transformers by PEFT's formulas, they make our logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.side_by_side import losses_side_by_side  # noqa: E402
from distrain.tests.fakes.small_models import CPU, module_of  # noqa: E402
from distrain.trainer.loop.offline import load_run  # noqa: E402
from distrain.trainer.loop.offline.export import export  # noqa: E402
from distrain.trainer.loop.offline.export_adapter import export_adapter  # noqa: E402
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run  # noqa: E402
from distrain.trainer.models.build import build_model, named_weights  # noqa: E402
from distrain.trainer.models.hf_format.adapter import write_adapter  # noqa: E402
from distrain.trainer.models.hf_format.weights import write_hf_folder  # noqa: E402
from distrain.trainer.models.ops.lora import without_lora  # noqa: E402
from distrain.trainer.rundir.run_in_manifest import run_from_record  # noqa: E402
from distrain.trainer.spec.changed_run import with_changes  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402
from distrain.trainer.spec.run import Run  # noqa: E402
from distrain.trainer.spec.sections.lora import Lora  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

MIXED = ("model.layers=2", "model.dense_layers=1", "model.shared_experts=1", "model.router={score: sigmoid, scale: 2.5, bias: true}")
NEXT = ("model=tiny_hybrid", "model.layers=2", "model.norm_eps=1e-2")  # which keep float32 from enlarging its rounding
# fmt: off
MODELS = {  # words; the modules and parameters that PEFT finds, where they are not all
    "gpt2":           (("model=tiny",),                                                     "c_attn c_fc c_proj"),
    "gpt2, some":     (("model=tiny", "model.lora.targets=[query,value,down]"),             "c_attn mlp.c_proj"),
    "llama":          (("model=tiny_llama",),             "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
    "mixtral":        (("model=tiny_moe", "model.layers=2"),
                       "k_proj o_proj q_proj v_proj | mlp.experts.down_proj mlp.experts.gate_up_proj"),
    "mixtral, some":  (("model=tiny_moe", "model.lora.targets=[up,query]"),                 "q_proj | mlp.experts.gate_up_proj"),
    "glm4":           (("model=tiny_moe", "model.qkv_bias=true", *MIXED),                   None),
    "gpt-oss":        (("model=tiny_gpt_oss", "model.lora.targets=[gate,down,out]"),
                       "o_proj | mlp.experts.down_proj mlp.experts.gate_up_proj"),
    "deepseek v2":    (("model=tiny_mla", "model.q_lora_rank=0", "model.lora.targets=[query,value,kv_a_proj_with_mqa]"),
                       "kv_a_proj_with_mqa kv_b_proj q_proj"),
    "deepseek v3":    (("model=tiny_mla", *MIXED),                                          None),
    "qwen3-next":     (NEXT,
                       ("in_proj_ba in_proj_qkvz k_proj o_proj out_proj q_proj shared_expert_gate v_proj | mlp.experts.down_proj "
                       "mlp.experts.gate_up_proj mlp.shared_expert.down_proj.weight mlp.shared_expert.gate_proj.weight "
                       "mlp.shared_expert.up_proj.weight")),
    "qwen3-next, some": ((*NEXT, "model.lora.targets=[query,in_proj_ba,o_proj,down]"),
                       "in_proj_ba in_proj_qkvz o_proj q_proj | mlp.experts.down_proj mlp.shared_expert.down_proj.weight"),
}
# fmt: on


def published_with_lora(words: tuple[str, ...], folder: Path) -> tuple[Run, Any]:
    """Return a run whose model.weights is a folder of its frozen weights, and its module with trained additions."""
    given = ("data=synthetic", "train.seq=64", "train.batch=8", "model.lora.rank=4", "model.lora.alpha=6")
    run = load_recipe("quickstart", [*words, *given])
    module = module_of(run, torch.float32)
    frozen = ((name, each.detach()) for name, each in named_weights(module, run) if not Lora.owns(name))
    write_hf_folder(frozen, without_lora(run), folder)
    return replace(run, model=replace(run.model, weights=str(folder))), module


def additions_of(module: Any, run: Run) -> dict[str, Any]:
    return {name: each for name, each in named_weights(module, run) if Lora.owns(name)}


def add_as_peft(model: Any, folder: Path) -> None:
    """Add an adapter to a model of transformers, as PEFT's layer.py does: `ParamWrapper` numbers the columns of B rank by rank, the rows of
    A expert by expert."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    targets = {name: modules[name].weight for name in modules if any(ends(name, each) for each in config["target_modules"])}
    targets |= {name: parameters[name] for name in parameters if any(ends(name, each) for each in config["target_parameters"] or ())}
    inside: dict[str, list[str]] = {}
    for name in targets:
        module = name.removesuffix(".weight") if name in modules or name.endswith(".weight") else name.rpartition(".")[0]
        inside.setdefault(module, []).append(name)
    for module, names in inside.items():
        for name, wrappers in zip(names, reversed(range(len(names))), strict=True):
            a, b = (tensors.pop(f"base_model.model.{module}{'.base_layer' * wrappers}.lora_{each}.weight") for each in "AB")
            rank, alpha = (
                next((value for key, value in config[pattern].items() if fullmatch(rf"(.*\.)?({key})", name)), config[default])
                for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
            )
            weight, transposed = targets[name], config["fan_in_fan_out"] or getattr(modules[module], "is_transposed", False)
            experts = len(weight) if weight.dim() == 3 else 1
            assert len(a) == rank * experts
            added = torch.einsum("o r e, e r i -> e o i", b.view(len(b), rank, experts), a.view(experts, rank, -1)) * alpha / rank
            with torch.no_grad():
                weight += (added.mT if transposed else added).view_as(weight)
    assert not tensors


def tolerance(name: str) -> float:
    """Of logits in float32, relative to the largest: the delta rule enlarges rounding."""
    return 1e-4 if name.startswith("qwen3-next") else 1e-5


def ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def tokens_of(run: Run) -> Any:
    return torch.randint(run.model.vocab, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_added_to_the_published_weights_makes_our_logits(name: str, transformers: Any, tmp_path: Path) -> None:
    words, names = MODELS[name]
    run, module = published_with_lora(words, tmp_path / "published")
    (tmp_path / "adapter").mkdir()
    write_adapter(additions_of(module, run), run, tmp_path / "adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32).eval()
    with torch.no_grad():
        ours, before = module.logits(tokens_of(run)), model(tokens_of(run)).logits
        add_as_peft(model, tmp_path / "adapter")
        after = model(tokens_of(run)).logits
    assert (before - ours).abs().max() > 0.1
    assert (after - ours).abs().max() < tolerance(name) * max(1, ours.abs().max())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules, parameters = " ".join(config["target_modules"]), " ".join(config["target_parameters"] or [])
    assert names in (None, f"{modules} | {parameters}" if parameters else modules)


@pytest.mark.parametrize("name", ["gpt2", "llama", "glm4", "gpt-oss", "deepseek v3", "qwen3-next", "qwen3-next, some"])
def test_peft_itself_reads_an_adapter(name: str, transformers: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft, the yardstick, is not installed")
    run, module = published_with_lora(MODELS[name][0], tmp_path / "published")
    (tmp_path / "adapter").mkdir()
    write_adapter(additions_of(module, run), run, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens_of(run)).logits
        ours = module.logits(tokens_of(run))
    assert (theirs - ours).abs().max() < tolerance(name) * max(1, ours.abs().max())


@pytest.mark.parametrize(
    "words",
    [
        ("model=tiny_moe", "model.layers=2", "model.lora.targets=[query,key,value,out,down]"),
        ("model=tiny_mla", *MIXED, "model.lora.targets=[q_a_proj,q_b_proj,o_proj,down_proj]"),
        (*NEXT, "model.lora.targets=[k_proj,v_proj,o_proj,out_proj,down_proj,shared_expert_gate]"),
    ],
    ids=lambda words: words[0],
)
def test_training_follows_peft_where_hugging_face_fuses_no_target(words: tuple[str, ...], transformers: Any, tmp_path: Path) -> None:
    """The float32 losses of six steps from the same additions; routing is the same in both."""
    peft = pytest.importorskip("peft", reason="peft, the yardstick, is not installed")
    run, ours = published_with_lora(words, tmp_path / "published")
    (tmp_path / "adapter").mkdir()
    write_adapter(additions_of(ours, run), run, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    sides = [[each for each in module.parameters() if each.requires_grad] for module in (ours, theirs)]
    assert sum(each.numel() for each in sides[0]) == sum(each.numel() for each in sides[1])
    losses = losses_side_by_side(ours, theirs, sides, lr=0.01)
    assert losses[0] == pytest.approx(losses[1], abs=6e-6, rel=0)
    assert losses[0][-1] < losses[0][0] - 0.1


TUNED = ("model.hf={0}", "model.weights={0}", "model.lora={{rank: 4, alpha: 8}}", "train.steps=2", "optim.lr=1e-2", "optim.warmup=0")


@pytest.mark.parametrize(
    "words", [("model=tiny_mla", "model.layers=2"), (*NEXT, "model.layers=4")], ids=lambda words: words[0].removeprefix("model=")
)
def test_a_tuned_mixture_is_exported_as_an_adapter_and_merged(
    words: tuple[str, ...],
    ranks: RankPool,
    transformers: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on a CPU what trained on a GPU with linear attention by package fla."""
    shape = load_recipe("quickstart", ["data=synthetic", "train.seq=64", "train.batch=8", *words])
    base = build_model(shape, device=CPU, dtype=torch.float32, seed=3)
    write_hf_folder(((name, each.detach()) for name, each in base.named_parameters()), shape, tmp_path / "published")
    tuned = [each.format(tmp_path / "published") for each in TUNED]
    common = ("quickstart", "data=synthetic", "train.seq=64", "train.batch=8", "train.evaluate.every=0", "train.microbatch=2")
    ranks.train(tmp_path / "run", *common, *tuned, "cluster.gpus=4", "parallel={ep: 2, tp: 2, zero: 1}")

    def trained_by_fla(record: Any) -> Run:
        run = run_from_record(record)
        assert run is not None
        return with_changes(run, [("train.linear_attention", "fla")])

    monkeypatch.setattr(load_run, "run_from_record", trained_by_fla)
    export_adapter(tmp_path / "run", tmp_path / "adapter", "fp32")
    export(tmp_path / "run", tmp_path / "merged", "fp32")
    assert sorted(each.name for each in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert "trained parameters in fp32; " in capsys.readouterr().out
    added, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.float32).eval() for each in ("published", "merged")
    )
    before = added.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].clone()
    add_as_peft(added, tmp_path / "adapter")
    assert not torch.equal(added.state_dict()["model.layers.0.mlp.experts.gate_up_proj"], before)
    for name, each in merged.state_dict().items():
        torch.testing.assert_close(added.state_dict()[name], each, rtol=0, atol=1e-6, msg=name)
    module = load_model(load_saved_run(tmp_path / "run"), CPU)
    with torch.no_grad():
        assert (added(tokens_of(shape)).logits - module.logits(tokens_of(shape))).abs().max() < 3e-5


def test_a_run_without_additions_or_without_published_weights_has_no_adapter(ranks: RankPool, tmp_path: Path) -> None:
    sizes = ("train.seq=32", "train.batch=8", "train.evaluate.every=0", "train.microbatch=2", "train.steps=1", "optim.warmup=0")
    common = ("quickstart", "data=synthetic", *sizes, "cluster.gpus=1", "parallel.zero=0")
    ranks.train(tmp_path / "plain", *common, "model=tiny_llama")
    ranks.train(tmp_path / "drawn", *common, "model=tiny_llama", "model.lora.rank=2")
    for folder, says in (("plain", "this run has none"), ("drawn", "drawn from train.seed")):
        with pytest.raises(Unreadable, match=says):
            export_adapter(tmp_path / folder, tmp_path / "out", "fp32")
        assert not (tmp_path / "out").exists()
    with pytest.raises(Unreadable, match="a mean of products"):
        export_adapter(tmp_path / "drawn", tmp_path / "out", "fp32", average=2)
