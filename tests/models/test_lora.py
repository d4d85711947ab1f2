"""LoRA: frozen weights and their trained additions, in every layout, through checkpoints and exports, in the plan."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.tests.fakes.rank_pool import RankPool  # noqa: E402
from distrain.tests.fakes.side_by_side import BATCH, TOKENS, losses_side_by_side  # noqa: E402
from distrain.tests.fakes.small_models import CPU, batch_of, module_of, run_of  # noqa: E402
from distrain.trainer.layers.counter_rng import dropout_keys  # noqa: E402
from distrain.trainer.layers.dropout import Dropout  # noqa: E402
from distrain.trainer.loop.offline.evaluate_run import _evaluate, _read_of, _sets  # noqa: E402
from distrain.trainer.loop.offline.export import export  # noqa: E402
from distrain.trainer.loop.offline.export_adapter import export_adapter  # noqa: E402
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights  # noqa: E402
from distrain.trainer.models.hf_format.weights import read_hf_weights, write_hf_folder  # noqa: E402
from distrain.trainer.models.ops.lora import without_lora  # noqa: E402
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.spec.changed_run import with_changes  # noqa: E402

STEPS = 3  # the first gradients of A are 0, its second ones change the third loss
COMMON = (f"train.steps={STEPS}", "train.seq=32", "train.batch=8", "train.evaluate.every=0", "log.every=1", "train.microbatch=2")
TUNED = ("model=tiny_llama", "model.layers=4", "model.kv_heads=2", "model.qk_norm=true", "model.lora={rank: 4, alpha: 8}")
DROPPED = ("model.lora.dropout=0.2",)
NORMS = ("model.qk_norm_over=all", "model.norm_place=both")
CURVE = ("quickstart", "data=synthetic", *COMMON, *TUNED, "optim.lr=1e-2", "optim.warmup=1")
LAYOUTS = (
    ("cluster.gpus=2", "parallel.zero=2"),
    # each key head on two ranks; for the loss in chunks backward gathers the input of a head that is not trained
    ("cluster.gpus=4", "parallel.tp=4", "parallel.zero=1", "parallel.sequence=true", "train.loss_chunks=4", "train.microbatch=4"),
    ("cluster.gpus=2", "parallel.zero=3", "parallel.recompute=full"),
    ("cluster.gpus=4", "parallel.cp=2", "parallel.tp=2", "parallel.zero=0", "parallel.recompute=selective", "train.microbatch=4"),
    ("cluster.gpus=2", "parallel.pp=2", "parallel.schedule=dualpipev"),
    ("cluster.gpus=2", "parallel.zero=3", "engine=native"),
    ("cluster.gpus=4", "parallel.pp=2", "parallel.zero=1", "parallel.schedule=zb_h1", "parallel.tp=2"),
    ("model.tied=true", "cluster.gpus=2", "parallel.pp=2", "engine=native"),  # a frozen embedding has no gradient that both ends sum
    ("model.tied=true", "cluster.gpus=2", "parallel.pp=2", "engine=pipe"),
)


OF_DROPPED = (
    # heads of the output product and the feed-forward are padded; attention takes scores with masks of its own; MLA's latents
    (
        *DROPPED,
        "model.ffn=190",
        "model.heads=6",
        "model.kv_heads=3",
        "model.head_dim=16",
        "cluster.gpus=4",
        "parallel.tp=4",
        "parallel.zero=1",
        "train.microbatch=4",
    ),
    (
        *DROPPED,
        "model.dropout=0.1",
        "cluster.gpus=4",
        "parallel.tp=2",
        "parallel.sequence=true",
        "parallel.cp=2",
        "parallel.cp_comm=all_to_all",
        "train.microbatch=4",
    ),
    (*DROPPED, "model.lora.targets=[query,out,up]", "cluster.gpus=2", "parallel.tp=2", "parallel.sequence=true", "engine=native"),
)


@pytest.mark.parametrize("layout", [*LAYOUTS, *((*DROPPED, *layout) for layout in LAYOUTS), *OF_DROPPED], ids=" ".join)
def test_a_layout_trains_the_curve_of_one_process_and_holds_the_planned_bytes(
    ranks: RankPool, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    losses, norms = reference_curve((*CURVE, *NORMS, *(word for word in layout if word.startswith("model."))))
    job = ranks.train(tmp_path / "run", *CURVE, *NORMS, *layout, "log.ledger=true", "checkpoint.final=false")
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(
        norms, abs=0, rel=1e-3
    )  # Adam enlarges the rounding of A's first gradients, which are 0
    counted = json.loads((tmp_path / "run" / "measured.json").read_text())["memory"]
    run = load_recipe(CURVE[0], [*CURVE[1:], *NORMS, *layout])
    plan = make_plan(run)
    assert plan.memory is not None
    held = plan.memory.stages[0].bytes
    for kind in ("weights", "gradients", "optimizer"):
        assert counted[kind] == pytest.approx(getattr(held, kind), rel=0.003), kind
    assert counted["activations"] == held.activations + held.logits
    rows = json.loads((tmp_path / "run" / "ledger.json").read_text())["ranks"]
    assert not [line for rank, each in enumerate(rows) for line in compare_rank_messages(run, rank, each) if line.verdict == "differs"]


@pytest.mark.parametrize(
    "words",
    [
        "model=tiny_mla model.lora.targets=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj]",
        "model=tiny_mla model.lora.targets=[out] parallel.sequence=true",
        "model=tiny_llama model.lora.targets=[query]",
        "model=tiny_llama model.lora.targets=[down]",
        "model=tiny_moe model.lora.targets=[query] model.shared_experts=1",
        "model=tiny_moe model.lora.targets=[query]",
    ],
)
def test_recomputation_ends_before_frozen_products_that_backward_does_not_need(words: str, ranks: RankPool, tmp_path: Path) -> None:
    """Of a feed-forward without LoRA the last product is not computed again, and its sum not sent again."""
    layout = ("cluster.gpus=2", "parallel.tp=2", "parallel.zero=0", "parallel.recompute=full", "optim.warmup=0")
    changes = ("data=synthetic", *COMMON[1:], *layout, "model.lora={rank: 4, alpha: 8}", *words.split(), "train.steps=1")
    ranks.train(tmp_path / "run", "quickstart", *changes, "log.ledger=true", "checkpoint.final=false")
    rows = json.loads((tmp_path / "run" / "ledger.json").read_text())["ranks"]
    run = load_recipe("quickstart", changes)
    lines = [line for rank, each in enumerate(rows) for line in compare_rank_messages(run, rank, each)]
    assert any(line.axis == "tp" for line in lines)
    assert not [line for line in lines if line.verdict == "differs"]


def test_the_plan_counts_trained_weights_alone() -> None:
    run = load_recipe("quickstart", [*CURVE[1:], "cluster.gpus=1", "parallel.zero=0"])
    sizes = (64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64)  # query, key, value, out, gate, up, down
    assert (run.model.hidden, run.model.ffn, run.model.heads) == (64, 192, 4)
    trained = 4 * sum(4 * (rows + columns) for rows, columns in sizes)
    plan, whole = make_plan(run), make_plan(without_lora(run))
    assert plan.memory is not None
    assert plan.model is not None
    assert plan.run is not None
    assert whole.model is not None
    assert whole.run is not None
    assert plan.model.trained_parameters == trained
    assert plan.model.parameters == whole.model.parameters + trained
    held = plan.memory.stages[0].bytes
    assert (held.weights, held.gradients, held.optimizer) == (4 * plan.model.parameters, 4 * trained, 8 * trained)
    assert plan.run.checkpoint_bytes * whole.model.parameters == whole.run.checkpoint_bytes * trained
    forward = sum(2 * 4 * rows * columns for rows, columns in sizes) + 2 * 64 * 256  # FLOPs of a token through frozen products
    assert whole.model.flops_per_token - plan.model.flops_per_token == forward - 6 * trained


def test_each_target_computes_its_weight_plus_alpha_over_rank_times_a_times_b() -> None:
    run = run_of("lora")
    module, plain = module_of(run), build_model(without_lora(run_of("lora")), device=CPU, dtype=torch.float64)
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    for name in [name for name in weights if name.endswith("lora_a.weight")]:
        target = name.removesuffix("lora_a.weight")
        weights[f"{target}weight"] += 6.0 / 3 * weights.pop(name) @ weights.pop(f"{target}lora_b.weight")
    load_weights(plain, weights.items())
    tokens, _ = batch_of(run)
    torch.testing.assert_close(module.logits(tokens), plain.logits(tokens), rtol=1e-12, atol=1e-12)


PEFT_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def test_dropout_is_of_training_alone(ranks: RankPool, tmp_path: Path) -> None:
    """Before the first step B is 0, so that no mask is seen; the second step sees them, a validation never does."""
    words = (*CURVE, "cluster.gpus=1", "train.steps=2", "train.evaluate={every: 1, batches: 1}", "optim.warmup=0")
    plain, dropped = (ranks.train(tmp_path / name, *words, *more) for name, more in (("plain", ()), ("dropped", DROPPED)))
    assert plain.figures("loss")[0] == dropped.figures("loss")[0]
    assert abs(plain.figures("loss")[1] - dropped.figures("loss")[1]) > 1e-4
    losses = [float(load_loss(job.folder)) for job in (plain, dropped)]
    assert losses == pytest.approx([plain.figures("validation_loss")[-1], dropped.figures("validation_loss")[-1]], abs=1e-5)


def load_loss(folder: Path) -> float:
    """The loss of a run's checkpoint on the text that it holds out, outside training."""
    saved = load_saved_run(folder)
    (held,) = _sets(saved.run, given=False)
    return _evaluate(saved.run, load_model(saved, CPU), _read_of(saved.run, held, None), CPU).loss


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_training_follows_peft(published: Path, transformers: Any, share: float) -> None:
    """With the same base, first A and B, batches and optimizer, and the same masks of PEFT's dropout: the float32 losses of six steps."""
    peft = pytest.importorskip("peft", reason="peft, the yardstick, is not installed")
    run = load_recipe(
        "quickstart", ["data=synthetic", *COMMON, f"model.hf={published}", f"model.lora={{rank: 4, alpha: 8, dropout: {share}}}"]
    )
    ours = build_model(run, device=CPU, dtype=torch.float32, seed=1)
    load_weights(ours, read_hf_weights(published, run), partial=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=share, target_modules=list(PEFT_NAMES.values())))
    keys = dropout_keys(7, 3, torch.arange(BATCH), torch.arange(TOKENS - 1))
    weights = {name: each for name, each in theirs.named_parameters() if each.requires_grad}
    sides: list[list[Any]] = [[], []]
    for name, each in ours.named_parameters():
        if each.requires_grad:
            _, layer, half, target, matrix, _ = name.split(".")
            module = f"layers.{layer}.{'self_attn' if half == 'attention' else half}.{PEFT_NAMES[target]}"
            other = weights.pop(f"base_model.model.model.{module}.{matrix[:-1]}{matrix[-1].upper()}.default.weight")
            with torch.no_grad():
                other.copy_(each.t())
            if share:
                dropout = Dropout(share, int(layer), f"lora.{half}.{target}")
                masks = partial(dropout, states=keys.states)
                theirs.get_submodule(f"base_model.model.model.{module}").lora_dropout["default"].forward = masks
            sides = [[*sides[0], each], [*sides[1], other]]
    assert not weights

    losses = losses_side_by_side(ours, theirs.train(), sides, lr=0.02, keys=keys)
    assert losses[0] == pytest.approx(losses[1], abs=3e-6, rel=0)
    assert losses[0][-1] < losses[0][0] - 0.1


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of weights as Hugging Face has them."""
    folder = tmp_path_factory.mktemp("published")
    run = without_lora(load_recipe("quickstart", [*CURVE[1:], "cluster.gpus=1"]))
    run = with_changes(run, [("train.seq", 64)])
    module = build_model(run, device=CPU, dtype=torch.float32, seed=11)
    write_hf_folder(((name, each.detach()) for name, each in module.named_parameters()), run, folder)
    return folder


def test_published_weights_are_tuned_on_pairs_saved_resumed_and_exported(ranks: RankPool, published: Path, tmp_path: Path) -> None:
    lora = "model.lora={rank: 4, alpha: 8, dropout: 0.1, targets: [query, value, down]}"
    start = (f"model.hf={published}", f"model.weights={published}", lora)
    rows = [{"prompt": f"{number} plus 1 is ", "completion": f"{number + 1}."} for number in range(200)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = ("data=pairs", f"data.path={tmp_path / 'pairs.jsonl'}", "data.validation=0")
    words = ("quickstart", *COMMON, "train.steps=4", *data, *start, "optim.lr=1e-2", "optim.schedule=constant", "optim.warmup=0")
    whole = ranks.train(tmp_path / "whole", *words, "cluster.gpus=1", "parallel.zero=0")
    ranks.train(tmp_path / "run", *words, "cluster.gpus=2", "parallel.zero=3", "train.steps=2", "train.precision=fp32")
    resumed = ranks.train(tmp_path / "run", *words, "cluster.gpus=2", "parallel.tp=2", "parallel.zero=1")
    assert "resumes from step 2" in resumed.lines
    assert any(line.startswith("data: ") and " tokens in 200 examples; the run reads " in line for line in whole.lines)
    assert resumed.figures("loss")[-2:] == pytest.approx(whole.figures("loss")[2:], abs=3e-6, rel=0)

    other = tmp_path / "other"
    shutil.copytree(published, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 4
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    refused = ranks.fit(tmp_path / "run", *words, f"model.weights={other}", "cluster.gpus=2", "parallel.zero=1", "train.steps=6")
    assert set(refused.codes) == {1}
    assert any("loss" in problem and "step 4" in problem for problem in refused.problems), refused.problems

    found = load_saved_run(tmp_path / "run")
    assert {row.name.rpartition(".lora_")[0].rpartition(".")[2] for row in found.checkpoint.manifest.tensors} == {"query", "value", "down"}
    export(tmp_path / "run", tmp_path / "out", "fp32")
    export_adapter(tmp_path / "run", tmp_path / "adapter", "fp32")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.1
    plain = without_lora(found.run)
    before, after = dict(read_hf_weights(published, plain)), dict(read_hf_weights(tmp_path / "out", plain))
    changed = {name for name, each in after.items() if not torch.equal(each, before[name])}
    assert changed == {f"layers.{layer}.{name}.weight" for layer in range(4) for name in ("attention.query", "attention.value", "mlp.down")}

    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = load_model(found, CPU).logits(tokens)
        exported = build_model(plain, device=CPU, dtype=torch.float32)
        load_weights(exported, after.items())
        torch.testing.assert_close(exported.logits(tokens), ours, rtol=0, atol=1e-5)

    steps = sorted(int(each.name.removeprefix("step_")) for each in (tmp_path / "run" / "checkpoints").glob("step_*"))
    for step in steps:
        export(tmp_path / "run", tmp_path / f"out_{step}", "fp32", step=step)
    export(tmp_path / "run", tmp_path / "mean", "fp32", average=len(steps))
    assert len(steps) > 1
    each_step = [dict(read_hf_weights(tmp_path / f"out_{step}", plain)) for step in steps]
    for name, each in read_hf_weights(tmp_path / "mean", plain):
        torch.testing.assert_close(each, sum(weights[name] for weights in each_step) / len(steps), rtol=1e-6, atol=1e-7)
