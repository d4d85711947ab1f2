"""`model.lora.weights`: a run begins with an adapter's A and B, in every layout to the last bit, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.quantized_folders import dequantize_folder, fp8_config, quantize_folder  # noqa: E402
from distrain.tests.fakes.small_models import CPU  # noqa: E402
from distrain.tests.models.test_adapter import MIXED, MODELS, NEXT, add_as_peft, additions_of, published_with_lora, tokens_of, tolerance  # noqa: E402
from distrain.trainer.launch.file_checks import weight_problems  # noqa: E402
from distrain.trainer.loop.offline.export_adapter import export_adapter  # noqa: E402
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights  # noqa: E402
from distrain.trainer.models.hf_format.adapter import write_adapter  # noqa: E402
from distrain.trainer.models.hf_format.adapter_reader import open_adapter  # noqa: E402
from distrain.trainer.models.hf_format.weights import read_hf_weights  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool
    from distrain.trainer.spec.run import Run

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SMALL = ("quickstart", "data=synthetic", "train.seq=64", "train.batch=8", "train.evaluate.every=0", "train.microbatch=2", "log.every=1")
STILL = ("train.steps=1", "optim.warmup=0", "optim.lr=1e-30", "optim.min_lr=0")  # a step that moves no weight


def read_additions(folder: Path, run: Run) -> dict[str, Any]:
    with open_adapter(folder, run) as opened:
        return {name: each.values.clone() for name, each in opened.items()}


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def begun_module(run: Run) -> Any:
    """The module that a run begins with."""
    module, adapter = build_model(run, device=CPU, dtype=torch.float32, seed=1), Path(str(run.model.lora.weights))
    load_weights(module, read_hf_weights(str(run.model.weights), run), partial=True)
    load_weights(module, read_additions(adapter, run).items(), partial=True)
    return module


# What is written is read


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_that_we_wrote_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    run, module = published_with_lora(MODELS[name][0], tmp_path / "published")
    (tmp_path / "adapter").mkdir()
    written = additions_of(module, run)
    write_adapter(written, run, tmp_path / "adapter")
    found = read_additions(tmp_path / "adapter", run)
    assert found.keys() == written.keys()
    assert not [each for each in written if not torch.equal(found[each], written[each])]


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek v3", "gpt2", "qwen3-next"])
def test_a_recipe_without_rank_alpha_and_targets_takes_those_of_the_adapter(name: str, tmp_path: Path) -> None:
    run, module = published_with_lora(MODELS[name][0], tmp_path / "published")
    (tmp_path / "adapter").mkdir()
    write_adapter(additions_of(module, run), run, tmp_path / "adapter")
    words = [each for each in MODELS[name][0] if "lora" not in each]
    found = load_recipe("quickstart", [*words, f"model.lora.weights={tmp_path / 'adapter'}", "model.weights=x"]).model
    assert (found.lora.rank, found.lora.alpha, found.lora_layers) == (4, 6.0, run.model.lora_layers)
    own = load_recipe("quickstart", [*words, f"model.lora.weights={tmp_path / 'adapter'}", "model.weights=x", "model.lora.rank=2"]).model
    assert (own.lora.rank, own.lora.alpha) == (2, 6.0)


# What others write, by PEFT's formulas


def by_hand(run: Run, folder: Path, shapes: dict[str, tuple[int, int]], **config: Any) -> None:
    """Write an adapter of rank 4 as PEFT does: one A and one B for each module, by its name [inner, outer]."""
    draw = torch.Generator().manual_seed(3)
    folder.mkdir()
    tensors = {}
    for name, (inner, outer) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, inner, generator=draw) / 4
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outer, 4, generator=draw) / 4
    save_file(tensors, folder / TENSORS)
    words = sorted({name.rpartition(".")[2] for name in shapes})
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": words, "target_parameters": None, "bias": "none"}
    patterns = {"rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False, "init_lora_weights": True}
    (folder / CONFIG).write_text(json.dumps(given | patterns | config))


def with_lora(run: Run, **changes: Any) -> Run:
    return replace(run, model=replace(run.model, lora=replace(run.model.lora, **changes)))


HAND: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], dict[str, tuple[int, int]]], dict[str, Any]]] = {
    "gpt2, one A for q, k and v": (
        ("model=tiny",),
        ("query", "key", "value"),
        lambda m: {f"transformer.h.{each}.attn.c_attn": (m.hidden, 3 * m.hidden) for each in range(m.layers)},
        {"fan_in_fan_out": True},
    ),
    "latents, one A for both": (
        ("model=tiny_mla", *MIXED),
        ("kv_a_proj_with_mqa", "q_a_proj"),
        lambda m: (
            {f"model.layers.{each}.self_attn.kv_a_proj_with_mqa": (m.hidden, m.kv_lora_rank + m.qk_rope_head_dim) for each in range(2)}
            | {f"model.layers.{each}.self_attn.q_a_proj": (m.hidden, m.q_lora_rank) for each in range(2)}
        ),
        {},
    ),
    "linear attention, one A for both": (
        NEXT,
        ("in_proj_ba", "in_proj_qkvz"),
        lambda m: (
            {f"model.layers.{each}.linear_attn.in_proj_ba": (m.hidden, 2 * m.linear_num_value_heads) for each in (0,)}
            | {f"model.layers.{each}.linear_attn.in_proj_qkvz": (m.hidden, 2 * 4 * 8 + 2 * 8 * 16) for each in (0,)}
        ),
        {},
    ),
    "gated attention, one A for both": (
        NEXT,
        ("q_proj", "k_proj"),
        lambda m: (
            {f"model.layers.{each}.self_attn.q_proj": (m.hidden, 2 * m.heads * m.head_dim) for each in (1,)}
            | {f"model.layers.{each}.self_attn.k_proj": (m.hidden, m.kv_heads * m.head_dim) for each in (1,)}
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_one_a_for_weights_side_by_side_is_read_for_each_of_them(name: str, transformers: Any, tmp_path: Path) -> None:
    words, targets, shapes, config = HAND[name]
    run, module = published_with_lora((*words, f"model.lora.targets=[{','.join(targets)}]"), tmp_path / "published")
    by_hand(run, tmp_path / "adapter", shapes(run.model), **config)
    load_weights(module, read_additions(tmp_path / "adapter", run).items(), partial=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32).eval()
    with torch.no_grad():
        before = model(tokens_of(run)).logits
        add_as_peft(model, tmp_path / "adapter")
        ours, theirs = module.logits(tokens_of(run)), model(tokens_of(run)).logits
    assert (before - theirs).abs().max() > 0.05
    assert (ours - theirs).abs().max() < (1e-4 if words[0] == NEXT[0] else 1e-5) * max(1.0, float(ours.abs().max()))
    some = with_lora(run, targets=targets[:1])
    with pytest.raises(Unreadable, match=r"(mixes|changes) .*"):
        read_additions(tmp_path / "adapter", some)


def test_experts_that_are_modules_are_read(tmp_path: Path) -> None:
    """As PEFT wrote them on transformers 4: an A and a B for each expert's matrix."""
    run, _ = published_with_lora(("model=tiny_moe", "model.layers=2", "model.lora.targets=[up,down]"), tmp_path / "published")
    model = run.model
    ffn, sizes = model.expert_ffn or model.ffn or 0, dict[str, tuple[int, int]]()
    for layer in range(2):
        for expert in range(model.experts):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            sizes |= {f"{name}.w3": (model.hidden, ffn), f"{name}.w2": (ffn, model.hidden)}
    by_hand(run, tmp_path / "adapter", sizes)
    found, held = read_additions(tmp_path / "adapter", run), load_file(tmp_path / "adapter" / TENSORS)
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.2"
    assert torch.equal(found["layers.1.experts.up.lora_a.weight"][2], held[f"{name}.w3.lora_A.weight"].T)
    assert torch.equal(found["layers.1.experts.down.lora_b.weight"][2], held[f"{name}.w2.lora_B.weight"].T)
    assert load_recipe("quickstart", ["model=tiny_moe", f"model.lora.weights={tmp_path / 'adapter'}"]).model.lora.targets == ("down", "up")


def test_rank_stabilized_scales_are_alpha_of_ours(tmp_path: Path) -> None:
    run, _ = published_with_lora(("model=tiny_llama", "model.lora.targets=[query]"), tmp_path / "published")
    by_hand(run, tmp_path / "adapter", query_shapes(run), use_rslora=True)
    with pytest.raises(Unreadable) as found:
        read_additions(tmp_path / "adapter", run)
    (problem,) = found.value.problems
    assert problem.mend == "set model.lora.alpha=12"
    assert "scales A B by 3, which is alpha / sqrt(rank)" in problem.says
    assert read_additions(tmp_path / "adapter", with_lora(run, alpha=12.0))
    assert load_recipe("quickstart", ["model=tiny_llama", f"model.lora.weights={tmp_path / 'adapter'}"]).model.lora.alpha == 12.0


def query_shapes(run: Run) -> dict[str, tuple[int, int]]:
    return {f"model.layers.{each}.self_attn.q_proj": (run.model.hidden, run.model.hidden) for each in range(run.model.layers)}


PEFT_MADE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gpt2": (("model=tiny",), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "llama": (("model=tiny_llama",), {"target_modules": "all-linear", "use_rslora": True}),
    "mixtral": (
        ("model=tiny_moe", "model.layers=2"),
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "deepseek v3": (("model=tiny_mla", *MIXED), {"target_modules": ["kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj"]}),
    "qwen3-next": (
        NEXT,
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "shared_expert_gate"]},
    ),
    "qwen3-next, experts": (
        NEXT,
        {
            "target_modules": ["q_proj"],
            "target_parameters": [
                *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
                *(f"mlp.shared_expert.{each}_proj.weight" for each in ("gate", "up", "down")),
            ],
        },
    ),
}


@pytest.mark.parametrize("name", PEFT_MADE)
def test_an_adapter_that_peft_made_gives_its_logits(name: str, transformers: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft, the yardstick, is not installed")
    words, given = PEFT_MADE[name]
    published_with_lora(words, tmp_path / "published")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32)
    model, draw = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **given)).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 8)
    model.save_pretrained(tmp_path / "adapter")
    common = ["data=synthetic", "train.seq=64", "train.batch=8", f"model.weights={tmp_path / 'published'}"]
    run = load_recipe("quickstart", [*words, *common, f"model.lora.weights={tmp_path / 'adapter'}"])
    module = begun_module(run)
    with torch.no_grad():
        ours, theirs = module.logits(tokens_of(run)), model(tokens_of(run)).logits
    assert (ours - theirs).abs().max() < tolerance(name) * max(1.0, float(ours.abs().max()))


# Layouts

LAYOUTS = {
    "zero 3": ("llama", "cluster.gpus=2", "parallel.zero=3"),
    "zero 3, native, bf16": ("llama", "cluster.gpus=2", "parallel.zero=3", "engine=native", "train.precision=bf16"),
    "pp 2": ("llama", "cluster.gpus=2", "parallel.pp=2", "engine=native"),
    "tp 2": ("gpt2", "cluster.gpus=2", "parallel.tp=2"),
    "tp 2 ep 2": ("mixtral", "cluster.gpus=4", "parallel={tp: 2, ep: 2, zero: 1}"),
    "latents, tp 2": ("deepseek v3", "cluster.gpus=2", "parallel.tp=2"),
    "hybrid, tp 2 ep 2": ("qwen3-next", "cluster.gpus=4", "parallel={tp: 2, ep: 2, zero: 1}"),
    "hybrid, ep 2, zero 3": ("qwen3-next", "cluster.gpus=2", "parallel={ep: 2, zero: 3}", "engine=native"),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders `published` and `adapter` of a model of each kind."""
    top = tmp_path_factory.mktemp("adapters")
    for name in {model for model, *_ in LAYOUTS.values()}:
        run, module = published_with_lora(MODELS[name][0], top / name / "published")
        (top / name / "adapter").mkdir()
        write_adapter(additions_of(module, run), run, top / name / "adapter")
    return {path.name: path for path in top.iterdir()}


def words_of(name: str, folder: Path) -> tuple[str, ...]:
    return (*SMALL, *MODELS[name][0], f"model.weights={folder / 'published'}", f"model.lora.weights={folder / 'adapter'}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_begins_with_the_adapter(layout: str, adapters: dict[str, Path], ranks: RankPool, tmp_path: Path) -> None:
    name, *given = LAYOUTS[layout]
    words = words_of(name, adapters[name])
    job = ranks.train(tmp_path / "run", *words, *STILL, *given)
    assert f"starts from the weights in {adapters[name] / 'published'}, with the adapter in {adapters[name] / 'adapter'}" in job.lines
    export_adapter(tmp_path / "run", tmp_path / "again", "fp32")
    before, after = (load_file(folder / TENSORS) for folder in (adapters[name] / "adapter", tmp_path / "again"))
    assert before.keys() == after.keys()
    assert not [each for each in before if not torch.equal(before[each], after[each])]
    run = load_recipe(words[0], words[1:])
    module = begun_module(run)
    with torch.no_grad():
        found = load_model(load_saved_run(tmp_path / "run"), CPU).logits(tokens_of(run))
        assert (module.logits(tokens_of(run)) - found).abs().max() < 1e-5 * max(1.0, float(found.abs().max()))


def test_a_run_resumes_without_its_adapter(adapters: dict[str, Path], ranks: RankPool, tmp_path: Path) -> None:
    words = (
        *SMALL,
        "model=tiny_llama",
        "optim.warmup=0",
        "cluster.gpus=1",
        "parallel.zero=0",
        f"model.weights={adapters['llama'] / 'published'}",
    )
    ranks.train(tmp_path / "run", *words, f"model.lora.weights={adapters['llama'] / 'adapter'}", "train.steps=1")
    taken = ("model.lora={rank: 4, alpha: 6, weights: " + f"{tmp_path / 'gone'}" + "}",)
    job = ranks.train(tmp_path / "run", *words, *taken, "train.steps=2")
    assert "resumes from step 1" in job.lines
    assert any("model.lora.weights" in line for line in job.lines), job.lines
    run = load_recipe(words[0], [*words[1:], *taken, f"log.dir={tmp_path}", "name=run"])
    assert list(weight_problems(run)) == []


# A base that is quantized


def test_an_adapter_goes_with_a_quantized_base_as_with_the_plain_one(transformers: Any, ranks: RankPool, tmp_path: Path) -> None:
    """The additions of a run on a quantized folder, exported, added by PEFT's formulas to the plain one, make the run's logits; and both
    folders begin with them alike."""
    words = ("model=tiny_mla", *MIXED)
    run, _ = published_with_lora(words, tmp_path / "source")
    quantize_folder(tmp_path / "source", tmp_path / "packed", fp8_config((16, 13)))
    dequantize_folder(tmp_path / "packed", tmp_path / "plain")
    common = (*SMALL, *words, "model.lora={rank: 4, alpha: 6}", "cluster.gpus=2", "parallel.tp=2")
    ranks.train(tmp_path / "run", *common, f"model.weights={tmp_path / 'packed'}", "train.steps=2", "optim.lr=1e-2", "optim.warmup=0")
    export_adapter(tmp_path / "run", tmp_path / "adapter", "fp32")
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["base_model_name_or_path"] == str(tmp_path / "packed")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    with torch.no_grad():
        before = model(tokens_of(run)).logits
        add_as_peft(model, tmp_path / "adapter")
        ours, theirs = load_model(load_saved_run(tmp_path / "run"), CPU).logits(tokens_of(run)), model(tokens_of(run)).logits
    assert (before - theirs).abs().max() > 1e-3
    assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(ours.abs().max()))
    begins = (f"model.lora.weights={tmp_path / 'adapter'}", *STILL)
    packed, plain = (
        ranks.train(tmp_path / f"on_{form}", *common, f"model.weights={tmp_path / form}", *begins).figures("loss")
        for form in ("packed", "plain")
    )
    assert packed == plain


# What is refused


def problems_of(run: Run, folder: Path, logs: Path) -> list[str]:
    return [str(each) for each in weight_problems(replace(with_lora(run, weights=str(folder)), log=replace(run.log, dir=str(logs))))]


@pytest.fixture(scope="module")
def query_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return published_with_lora(("model=tiny_llama", "model.lora.targets=[query]"), tmp_path_factory.mktemp("refused") / "published")[0]


MERGE = "merge it into the weights with peft's merge_and_unload, and name that folder in model.weights"
ALPHA = "scales A B by 1.5, which is alpha / rank, and model.lora.alpha=5 by 1.25: set model.lora.alpha=6"
# fmt: off
REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (  # changes of adapter_config.json, of model.lora, the problem
    ({"use_dora": True}, {}, f"@ has DoRA, which model.lora has not: {MERGE}"),
    ({"modules_to_save": ["lm_head"], "bias": "all"}, {},
        f"@ has modules that are trained whole (modules_to_save), trained biases (bias=all), which model.lora has not: {MERGE}"),
    ({"peft_type": "IA3"}, {}, f"@ is an adapter of peft_type IA3, not LORA: {MERGE}"),
    ({"init_lora_weights": "pissa_niter_4"}, {},
        ("@ began with init_lora_weights=pissa_niter_4, which changes the frozen weights too: "
         "save it with PEFT's path_initial_model_for_weight_conversion")),
    ({}, {"rank": 8, "alpha": 12.0}, "@ has rank 4, and model.lora.rank=8: set model.lora.rank=4"),
    ({}, {"alpha": 5.0}, f"@ {ALPHA}"),
    ({"alpha_pattern": {"q_proj": 3}}, {},
        "@ scales A B by 0.75, which is alpha / rank, and model.lora.alpha=6 by 1.5: set model.lora.alpha=3"),
    ({"alpha_pattern": {"layers.1.self_attn.q_proj": 3}}, {},
        f"@ scales A B by 0.75 in some layers and 1.5 in others, and model.lora all alike: {MERGE}"),
    ({"alpha_pattern": {"(": 3}}, {}, "@/adapter_config.json has no lora_alpha that can be read: save the adapter again"),
    ({"lora_alpha": None}, {}, "@/adapter_config.json has no lora_alpha that can be read: save the adapter again"),
    ({}, {"targets": ("query", "value")}, "@ changes query, and model.lora.targets query, value: set model.lora.targets=[query]"),
)
# fmt: on


@pytest.mark.parametrize(("config", "lora", "says"), REFUSED, ids=lambda each: str(each)[:40] if isinstance(each, dict) else "")
def test_an_adapter_that_is_not_that_of_model_lora_is_refused_in_a_line(
    config: dict[str, Any], lora: dict[str, Any], says: str, query_run: Run, tmp_path: Path
) -> None:
    by_hand(query_run, tmp_path / "adapter", query_shapes(query_run), **config)
    assert problems_of(with_lora(query_run, **lora), tmp_path / "adapter", tmp_path) == [says.replace("@", str(tmp_path / "adapter"))]


def test_an_adapter_without_a_rank_does_not_leave_lora_out(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"peft_type": "IA3", "target_modules": ["q_proj"]}')
    with pytest.raises(Unreadable, match=r"adapter_config\.json names no r and lora_alpha: its peft_type is IA3"):
        load_recipe("quickstart", ["model=tiny_llama", f"model.lora.weights={tmp_path}"])


def test_files_that_are_missing_or_damaged_are_named(query_run: Run, tmp_path: Path) -> None:
    at = tmp_path / "adapter"
    write = "name a folder that PEFT's save_pretrained or `export --adapter` wrote"
    assert problems_of(query_run, at, tmp_path) == [f"model.lora.weights={at} is not a folder: {write}"]
    at.mkdir()
    assert problems_of(query_run, at, tmp_path) == [f"model.lora.weights={at} holds no {CONFIG}: {write}"]
    (at / CONFIG).write_text("[]")
    assert problems_of(query_run, at, tmp_path) == [f"{at / CONFIG} does not hold a mapping of keys: save the adapter again"]
    (at / CONFIG).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 6}')
    (at / "adapter_model.bin").touch()
    saved = "save it with PEFT's save_pretrained, which writes safetensors"
    assert problems_of(query_run, at, tmp_path) == [f"model.lora.weights={at} holds no {TENSORS}: {saved}"]
    (at / TENSORS).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert problems_of(query_run, at, tmp_path) == [f"{at / TENSORS} is not a safetensors file: download it again"]


def test_layers_of_another_rank_of_other_sizes_or_too_few_are_named(query_run: Run, tmp_path: Path) -> None:
    at, hidden = tmp_path / "adapter", query_run.model.hidden
    by_hand(query_run, at, query_shapes(query_run))
    tensors, name = load_file(at / TENSORS), "base_model.model.model.layers.1.self_attn.q_proj"
    save_file(tensors | {f"{name}.lora_A.weight": torch.zeros(2, hidden), f"{name}.lora_B.weight": torch.zeros(hidden, 2)}, at / TENSORS)
    several = "2 for model.layers.1.self_attn.q_proj, 4 for "
    (problem,) = problems_of(query_run, at, tmp_path)
    assert problem.startswith(f"{at} has ranks {several}")
    save_file(tensors | {f"{name}.lora_A.weight": torch.zeros(4, hidden + 1)}, at / TENSORS)
    problems = problems_of(query_run, at, tmp_path)
    assert problems[0].startswith(f"{at}: model.layers.1.self_attn.q_proj.lora_")
    assert problems[0].endswith("is of no layer that LoRA changes in this model")
    save_file({key: each for key, each in tensors.items() if not key.startswith(name)}, at / TENSORS)
    (problem,) = problems_of(query_run, at, tmp_path)
    assert f"has no A and B for 1 of {query_run.model.layers} weights, such as layers.1.attention.query.weight" in problem
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, hidden)}, at / TENSORS)
    (problem,) = problems_of(query_run, at, tmp_path)
    assert problem == f"{at}: lm_head.lora_A.weight, [4, {hidden}], is of no layer that LoRA changes in this model"
