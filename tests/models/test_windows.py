"""Sliding windows: logits equal those of transformers, in blocks as under a whole mask; folders, FLOPs, kept bytes and rules follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.trainer.layers.rank_group import Group  # noqa: E402
from distrain.trainer.layers.transformer import windowed_core  # noqa: E402
from distrain.trainer.layers.transformer.context_parallel import ContextParallel  # noqa: E402
from distrain.trainer.layers.transformer.core_attention import flash_attention, window_band, window_mask, windowed_attention  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights, named_weights  # noqa: E402
from distrain.trainer.models.hf_format.config import read_hf_config  # noqa: E402
from distrain.trainer.models.hf_format.weights import read_hf_weights, write_hf_folder  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402
from distrain.trainer.spec.read import read  # noqa: E402
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train  # noqa: E402

CPU = torch.device("cpu")
WINDOW = 12
LENGTHS = (9, 12, 13, 24, 40)
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 101, "max_position_embeddings": 64, "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL, SLIDING, SLIDING]
SWITCHED = {"use_sliding_window": True}
# fmt: off
THEIRS: dict[str, tuple[str, dict[str, Any], tuple[int | None, tuple[str, ...] | None]]] = {  # class, keys, (model.window, layer_types)
    "mistral":               ("MistralConfig",   {}, (WINDOW, None)),
    "mistral, full":         ("MistralConfig",   {"sliding_window": None}, (None, None)),
    "mixtral":               ("MixtralConfig",   {"num_local_experts": 4}, (WINDOW, None)),
    "ministral":             ("MinistralConfig", {"head_dim": 16, "layer_types": MIXED}, (WINDOW, tuple(MIXED))),
    "ministral, alike":      ("MinistralConfig", {"head_dim": 24}, (WINDOW, None)),
    "qwen2, off":            ("Qwen2Config",     {}, (None, None)),
    "qwen2, from a layer":   ("Qwen2Config",     SWITCHED | {"max_window_layers": 3}, (WINDOW, (FULL, FULL, FULL, SLIDING))),
    "qwen2, by layers":      ("Qwen2Config",     SWITCHED | {"layer_types": MIXED}, (WINDOW, tuple(MIXED))),
    "qwen2, beyond the end": ("Qwen2Config",     SWITCHED, (None, None)),
}
# fmt: on


def run_of(model: Model, **train: Any) -> Run:
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    words = {"batch": 2, "microbatch": 2, "seq": 64, "steps": 1} | train
    return Run(name="test", model=model, cluster=cluster, parallel=Parallel(), train=Train(**words))


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("name", THEIRS)
def test_logits_are_those_of_transformers_and_the_folder_is_read_and_written(
    name: str, attention: str, tmp_path: Path, transformers: Any
) -> None:
    kind, keys, (window, types) = THEIRS[name]
    torch.manual_seed(3)
    config = getattr(transformers, kind)(initializer_range=0.1, **(SHAPE | keys))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = read(read_hf_config(tmp_path / "theirs"), Model)
    assert (model.window, model.layer_types) == (window, types)
    run = run_of(model, attention=attention)
    ours = build_model(run, device=CPU, dtype=torch.float32)
    load_weights(ours, read_hf_weights(tmp_path / "theirs", run))
    write_hf_folder(named_weights(ours, run), run, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    written = read(read_hf_config(tmp_path / "ours"), Model)
    assert (written.window, written.layer_types) == (window, types)
    for length in LENGTHS:
        tokens = torch.randint(model.vocab, (2, length), generator=torch.Generator().manual_seed(7))
        for other in (theirs, again):
            with torch.no_grad():
                torch.testing.assert_close(ours.logits(tokens), other(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 5, 6, 7, 12, 17, 18, 40])
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_compute_what_a_whole_mask_does(size: int, documents: bool) -> None:
    """Values and gradients, in float64; with a mask of documents that begin at every fifth position."""
    window = 6
    torch.manual_seed(size)
    query, key, value = tensors = [torch.randn(2, heads, size, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    mask = None
    if documents:
        start = torch.arange(size) // 5 * 5
        hidden = (torch.arange(size)[None] < start[:, None]) | torch.ones(size, size, dtype=torch.bool).triu(1)
        mask = torch.zeros(2, 1, size, size, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    whole = window_mask(size, window, torch.float64, CPU)
    ours = windowed_attention(query, key, value, mask, window_band(window, torch.float64, CPU))
    expected = flash_attention(query, key, value, whole if mask is None else mask + whole)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    weights = torch.randn_like(ours)
    gradients = (torch.autograd.grad((values * weights).sum(), tensors) for values in (ours, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_position_sees_the_window_and_nothing_else() -> None:
    """By hand: position 4 with a window of 3 sees 2, 3 and 4."""
    seen = window_mask(6, 3, torch.float32, CPU) == 0
    assert [torch.nonzero(row).flatten().tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


# Plans: the model's FLOPs count twice the pairs of query and key that are seen, as they count the whole square without a window.


def flash_of_a_gpu(query: Any, key: Any, value: Any, *others: Any, scale: float, window_size_left: Any, window_size_right: Any) -> Any:
    """What FlashAttention-2's forward returns for tensors [B, L or K, A or N, D]: the last query sees the last key
    (torch.ops.aten._flash_attention_forward)."""
    assert others == (None, None, query.shape[1], key.shape[1], 0.0, True, False)
    assert (window_size_left, window_size_right) == (WINDOW - 1, 0)
    assert key.shape[1] < query.shape[1] + WINDOW
    key, value = (each.repeat_interleave(query.shape[2] // each.shape[2], dim=2).transpose(1, 2) for each in (key, value))
    scores = query.transpose(1, 2) @ key.mT * scale
    behind = torch.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2] - torch.arange(scores.shape[-1])
    scores = scores.masked_fill((behind < 0) | (behind > window_size_left), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1), None, None, None


def flash_gradients_of_a_gpu(grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *others: Any, **options: Any) -> Any:
    """What its backward returns, from what its forward does; it is given the values and sums of that."""
    given = tuple(each.detach().requires_grad_() for each in (query, key, value))
    with torch.enable_grad():
        values, found = flash_of_a_gpu(*given, *others[:6], False, **options)[:2]
    assert torch.equal(values, out)
    assert torch.equal(found, sums)
    assert sums.is_contiguous()
    return torch.autograd.grad(values, given, grad)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_gather_keys_compute_their_queries_of_a_window(ranks: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 12 tokens are as long as the window, those of 6 are shorter. A GPU's kernel is given no keys that none of them sees."""
    monkeypatch.setattr(windowed_core, "_is_on_gpu", lambda query: on_gpu)
    monkeypatch.setattr(windowed_core, "_GPU_FORWARD", flash_of_a_gpu)
    monkeypatch.setattr(windowed_core, "_GPU_BACKWARD", flash_gradients_of_a_gpu)
    torch.manual_seed(1)
    query, key, value, grad = (torch.randn(2, many, 48, 8, dtype=torch.float64, requires_grad=True) for many in (4, 2, 2, 4))
    seen = window_mask(48, WINDOW, torch.float64, CPU)
    expected = flash_attention(query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1), seen)
    theirs = torch.autograd.grad(expected, (query, key, value), grad)
    totals = [torch.zeros_like(each) for each in theirs]
    for rank in range(ranks):
        context = ContextParallel(group=Group(name="cp", ranks=tuple(range(ranks)), rank=rank, handle=None))  # type: ignore[arg-type]
        own, core = context.positions(48, CPU), windowed_core.WindowedCore(context, WINDOW)
        given = query.detach()[:, :, own], key.detach(), value.detach()
        values, saved = core.forward(*given, None)
        assert torch.allclose(values, expected[:, :, own].transpose(1, 2), atol=1e-12)
        found = core.backward(grad.detach()[:, :, own].transpose(1, 2).contiguous(), *given, None, saved)
        totals[0][:, :, own] += found[0]
        for total, part in zip(totals[1:], found[1:], strict=True):
            total += part
    for total, each in zip(totals, theirs, strict=True):
        assert torch.allclose(total, each, atol=1e-12)


WORDS = ["model=tiny_llama", "train.seq=64"]


def plan_of(*words: str) -> Any:
    return make_plan(load_recipe("quickstart", [*WORDS, *words]))


def test_flops_follow_the_window() -> None:
    whole, all_windowed, half = (
        plan_of(*words).model.flops_per_token
        for words in ([], ["model.window=16"], ["model.window=16", f"model.layer_types=[{SLIDING}, {FULL}]"])
    )
    core = 3 * 4 * 4 * 64 * 64  # forward and backward x two products of 2 FLOPs x 4 layers x hidden 64 x 64 keys: of each token
    share = 16 * (2 * 64 - 16) / 64**2
    assert whole - all_windowed == pytest.approx(core * (1 - share), rel=1e-9)
    assert whole - half == pytest.approx(core * (1 - share) / 2, rel=1e-9)


def test_a_window_that_covers_the_sequence_changes_no_plan() -> None:
    assert plan_of("model.window=64").memory == plan_of().memory
    assert plan_of("model.window=64").ok


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["model.window=16", "cluster.gpus=2", "parallel.cp=2", "device=v100_32g", "train.precision=fp16"],
            "V100-32G does not run it on heads of 16 elements in fp16: set parallel.cp_comm=all_to_all or parallel.cp=1",
        ),
        (["model.layer_types=[sliding_attention]"], "model.layer_types names layers with sliding_attention, but model.window=null"),
        (
            ["model.window=16", f"model.layer_types=[{SLIDING}, {FULL}, {FULL}, {FULL}, {FULL}]"],
            "model.layer_types names 5 layers, more than model.layers=4: set model.layer_types=null",
        ),
    ],
)
def test_a_window_that_can_not_be_computed_is_refused_with_a_fix(words: list[str], says: str) -> None:
    assert says in "\n".join(map(str, plan_of(*words).problems))


def test_context_parallelism_is_planned_where_the_window_covers_the_sequence() -> None:
    assert plan_of("model.window=64", "cluster.gpus=2", "parallel.cp=2").ok


@pytest.mark.parametrize(
    "words", [[], ["device=h100_80g", "train.precision=bf16"], ["device=v100_32g", "train.precision=fp16", "train.attention=math"]]
)
def test_ranks_that_gather_keys_compute_a_window(words: list[str]) -> None:
    plan = plan_of("model.window=16", "cluster.gpus=2", "parallel.cp=2", *words)
    assert plan.ok, plan.problems


@pytest.mark.parametrize(
    ("model_type", "keys", "says"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window=0 is not a whole number, at least 1"),
        ("mistral", {"sliding_window": "4k"}, 'sliding_window="4k" is not a whole number'),
        ("mistral", {"layer_types": MIXED}, "whatever layer_types says: use model_type ministral"),
        ("qwen2", {"layer_types": [FULL]}, "layer_types names 1 layers, but num_hidden_layers=4"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, 'layer_types=["chunked_attention"'),
    ],
)
def test_a_config_with_other_windows_is_refused(model_type: str, keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": model_type} | keys))
    with pytest.raises(Unreadable) as error:
        read_hf_config(tmp_path)
    assert says in str(error.value)


def test_a_word_in_place_of_a_list_is_shown_as_a_list() -> None:
    with pytest.raises(Unreadable, match=r"write model\.layer_types=\[sliding_attention\]"):
        load_recipe("quickstart", ["model.window=16", "model.layer_types=sliding_attention"])
