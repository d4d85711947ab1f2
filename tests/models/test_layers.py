"""The torch modules: documents, vocabulary padding, recomputation, split batches, bf16, and initial values."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from distrain.tests.fakes.small_models import CPU, MODELS, B, S, batch_of, gradients, keys_of, module_of, run_of  # noqa: E402
from distrain.trainer.layers import cross_entropy as entropy  # noqa: E402
from distrain.trainer.layers.cross_entropy import IGNORED, cross_entropy  # noqa: E402
from distrain.trainer.layers.norms import RMSNorm  # noqa: E402
from distrain.trainer.models.build import build_model, named_weights  # noqa: E402
from distrain.trainer.parallel.saved_bytes import count_saved_tensors  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402
from distrain.trainer.spec.run import Run  # noqa: E402
from distrain.trainer.spec.sections.initial_weights import InitialWeights  # noqa: E402

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
ATTENTION = pytest.mark.parametrize("attention", ["flash", "math"])


@EVERY_MODEL
@ATTENTION
def test_documents_are_computed_like_separate_sequences(name: str, attention: str) -> None:
    run = run_of(name, train__attention=attention)
    module, (tokens, labels) = module_of(run), batch_of(run)
    ends = [(0, 5, 6, 24), (0, 24), (0, 12, 24)]
    documents = torch.zeros(B, S, dtype=torch.long)
    for row, cuts in enumerate(ends):
        for index, (first, last) in enumerate(pairwise(cuts)):
            documents[row, first:last] = index % 2  # a number comes back: it is its change that counts
    loss, _ = module(tokens, labels, documents=documents)
    alone = [
        module(tokens[row, None, first:last], labels[row, None, first:last])[0]
        for row, cuts in enumerate(ends)
        for first, last in pairwise(cuts)
    ]
    torch.testing.assert_close(loss, sum(alone), rtol=1e-12, atol=0)


def padding_masks(run: Run, module: Any) -> dict[str, Any]:
    """Return the mask of the padding of each padded weight. A constant is never padded."""
    held, found = dict(module.named_parameters()), {}
    for name, logical in named_weights(module, run):
        if name in held and logical.shape != held[name].shape:
            found[name] = torch.ones_like(held[name], dtype=torch.bool)
            found[name][tuple(slice(size) for size in logical.shape)] = False
    return found


@EVERY_MODEL
def test_vocabulary_padding_has_no_effect(name: str) -> None:
    run = run_of(name, model__vocab_multiple=1)
    plain, wide = module_of(run), module_of(run_of(name, model__vocab_multiple=256))
    tokens, labels = batch_of(run)
    padding = padding_masks(run, wide)
    assert len(padding) == (1 if run.model.tied else 2)
    with torch.no_grad():
        for key, outside in padding.items():
            wide.get_parameter(key)[outside] = 9.0
    torch.testing.assert_close(wide.logits(tokens), plain.logits(tokens), rtol=1e-12, atol=1e-12)
    (loss, expected), (found, grads) = gradients(plain, tokens, labels), gradients(wide, tokens, labels)
    torch.testing.assert_close(found, loss, rtol=1e-13, atol=0)
    for key, grad in expected.items():
        torch.testing.assert_close(grads[key][tuple(slice(size) for size in grad.shape)], grad, rtol=1e-10, atol=1e-15)
    assert not any(grads[key][outside].any() for key, outside in padding.items() if key in grads)


@EVERY_MODEL
@ATTENTION
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_gives_bitwise_equal_gradients(name: str, attention: str, dropout: float, dtype: Any) -> None:
    found = []
    for recompute in ("none", "selective", "full"):
        run = run_of(name, parallel__recompute=recompute, train__attention=attention, model__dropout=dropout)
        found.append(gradients(module_of(run, dtype), *batch_of(run), keys=keys_of()))
    for loss, grads in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert all(torch.equal(grads[key], found[0][1][key]) for key in grads)


@EVERY_MODEL
def test_splitting_a_batch_does_not_change_the_loss_with_dropout(name: str) -> None:
    run = run_of(name, model__dropout=0.2)
    module, (tokens, labels) = module_of(run), batch_of(run)
    whole, _ = module(tokens, labels, keys=keys_of())
    parts = [module(tokens[row, None], labels[row, None], keys=keys_of(samples=torch.tensor([row])))[0] for row in range(B)]
    torch.testing.assert_close(whole, sum(parts), rtol=1e-12, atol=0)


@EVERY_MODEL
def test_dropout_differs_between_steps_and_is_off_without_keys(name: str) -> None:
    run = run_of(name, model__dropout=0.2)
    module, batch = module_of(run), batch_of(run)
    losses = {module(*batch, keys=keys_of(step))[0].item() for step in range(4)}
    assert len(losses) == 4
    assert module(*batch)[0] == module_of(run_of(name))(*batch)[0]


@EVERY_MODEL
def test_counting_saved_activations_changes_no_gradient(name: str) -> None:
    run = run_of(name)
    module, batch = module_of(run), batch_of(run)
    loss, plain = gradients(module, *batch)
    with count_saved_tensors(module.parameters(), batch):
        other, found = gradients(module, *batch)
    assert torch.equal(loss, other)
    assert all(torch.equal(found[key], plain[key]) for key in plain)


@EVERY_MODEL
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_weight_freed_after_forward_takes_no_memory(name: str, recompute: str) -> None:
    """ZeRO-3 frees a parameter's data and puts it back before backward. A saved view of the parameter would keep its memory."""
    run = run_of(name, parallel__recompute=recompute)
    module, batch = module_of(run), batch_of(run)
    _, expected = gradients(module, *batch)
    loss, labels = module(*batch)
    held = {name: each for name, each in module.named_parameters() if each is not module.head.weight}  # whose backward comes next
    copies = {name: each.detach().clone() for name, each in held.items()}
    storages = [StorageWeakRef(each.untyped_storage()) for each in held.values()]
    for each in held.values():
        each.data = torch.empty(0, dtype=each.dtype)
    assert all(storage.expired() for storage in storages)
    for key, each in held.items():
        each.data = copies[key]
    found = torch.autograd.grad(loss / labels, [each for each in module.parameters() if each.requires_grad])
    assert all(torch.equal(each, other) for each, other in zip(found, expected.values(), strict=True))


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_cross_entropy_matches_torch_for_any_chunk_size(z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.randint(7, (2, 5))
    labels[1] = IGNORED
    logits = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=True)
    expected = F.cross_entropy(logits[..., :7].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    squares = z_loss * logits[0, :, :7].logsumexp(-1).square().sum()  # of the rows whose labels count
    wanted = torch.autograd.grad(2 * (expected + squares), logits)
    for rows in (1, 3, 100):
        monkeypatch.setitem(entropy._CHUNK, "cpu", 10 * rows)
        loss = cross_entropy(logits, labels, 7, z_loss=z_loss)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(2 * loss, logits), wanted)


@pytest.mark.parametrize(("rows", "words", "lengths"), [(64, 50_000, [20, 20, 20, 4]), (64, 1000, [64]), (2, 1 << 21, [1, 1])])
def test_as_many_logits_are_float32_at_a_time_as_fit_a_cache(rows: int, words: int, lengths: list[int]) -> None:
    chunks = entropy._chunks(torch.empty(1, 1).expand(rows, words))
    assert [len(range(rows)[each]) for each in chunks] == lengths


def test_the_loss_of_bf16_logits_is_computed_in_float32() -> None:
    logits = (4 * torch.randn(2, 64, 512)).bfloat16().requires_grad_()
    labels = torch.randint(512, (2, 64))
    loss = cross_entropy(logits, labels, 512)
    assert loss.dtype == torch.float32
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(loss, logits)[0].double(), torch.autograd.grad(expected, wide)[0]
    torch.testing.assert_close(*grads, rtol=2**-8, atol=1e-12)


def test_the_gradient_of_rms_norm_matches_its_formula() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(8, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x, _: RMSNorm({"weight": weight}, 1e-3)(x), (x, weight))
    torch.testing.assert_close(RMSNorm({"weight": weight}, 1e-3)(x), F.rms_norm(x, (8,), weight, 1e-3))


def test_embeddings_are_scaled_by_a_root_in_their_own_type() -> None:
    """The root of 48 is 6.9282; in bf16 it is 6.9375, in which transformers multiplies."""
    module = module_of(run_of("gemma3"), torch.bfloat16)
    found = []
    hook = module.layers["0"].register_forward_pre_hook(lambda layer, inputs: found.append(inputs[0]))
    tokens, _ = batch_of(run_of("gemma3"))
    module.logits(tokens)
    hook.remove()
    assert torch.equal(found[0], module.embedding.weight[tokens] * 6.9375)


@EVERY_MODEL
def test_the_loss_in_bf16_is_close_to_float32(name: str) -> None:
    """The losses differ by less than bf16's precision, 2^-8 of themselves."""
    run = run_of(name)
    losses = [gradients(module_of(run, dtype), *batch_of(run))[0] for dtype in (torch.float32, torch.bfloat16)]
    assert losses[1].dtype == torch.float32
    assert abs(losses[0] - losses[1]) < 2**-8 * losses[0]


@EVERY_MODEL
@pytest.mark.parametrize("init", [InitialWeights(), InitialWeights(std=0.006, scale_residual=False)], ids=["gpt2", "plain"])
def test_initial_weights_follow_gpt_2_or_are_all_alike(name: str, init: InitialWeights) -> None:
    """Normals of a deviation, divided by sqrt(2 layers) where they add to the residual stream; norms 1 (or 1 + 0), others 0.

    LoRA's B is 0, so that training begins at the model without it; its A has PEFT's deviation.
    """
    run = run_of(name, model__init=init)
    module = build_model(run, device=CPU, dtype=torch.float32, seed=3)
    for key, tensor in named_weights(module, run):
        if key.endswith((".a_log", ".dt_bias", ".gated_norm.weight")):  # of linear attention: test_hybrid.py
            continue
        if tensor.dim() == 1 or key.endswith("bias"):
            assert set(tensor.flatten().tolist()) == {0.0 if key.endswith(("bias", ".sinks")) or run.model.norm == "rmsnorm1p" else 1.0}
            continue
        if key.endswith(".lora_b.weight"):
            assert not tensor.any()
            continue
        deviation = init.std
        if init.scale_residual and key.endswith((".out.weight", ".down.weight")):
            deviation /= math.sqrt(2 * run.model.layers)
        if key.endswith(".lora_a.weight"):
            deviation = 1 / math.sqrt(3 * tensor.shape[0])
        assert tensor.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * tensor.numel()))
    assert not any(module.get_parameter(key)[outside].any() for key, outside in padding_masks(run, module).items())


def test_initial_weights_depend_only_on_the_seed_and_the_name() -> None:
    """With a padded vocabulary and another batch the weights are the same."""
    first = dict(named_weights(build_model(run_of("llama"), device=CPU, dtype=torch.float32, seed=3), run_of("llama")))
    other = run_of("llama", model__vocab_multiple=64, train__microbatch=1)
    for key, tensor in named_weights(build_model(other, device=CPU, dtype=torch.float32, seed=3), other):
        assert torch.equal(tensor, first[key])
    assert not torch.equal(first["layers.0.mlp.up.weight"], first["layers.1.mlp.up.weight"])


def test_a_family_without_a_module_is_refused() -> None:
    with pytest.raises(Unreadable, match=r"model\.family=bert can be planned, but not trained: it has no module"):
        build_model(run_of("gpt", model__family="bert"), device=CPU, dtype=torch.float32)
