"""Products in 8-bit floats: what a cast keeps, products against torch's own kernel and in float64, and which layers compute so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.trainer.layers.fp8 import BACKWARD, FORWARD, Scaled, cast, fp8_product, scaled_product  # noqa: E402
from distrain.trainer.layers.weight_gradients import WeightGradients, defer_weight_gradients  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, dtype

EITHER = pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])


def drawn(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    x: Tensor = spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16()


def exact(x: Scaled) -> Tensor:
    return x.values.double() * x.scale.double()


@EITHER
@pytest.mark.parametrize("largest", [1e-20, 3e-4, 1.0, 1.75, 448.0, 449.0, 57344.0, 1e30])
def test_a_scale_is_the_smallest_power_of_two_that_fits(dtype: dtype, largest: float) -> None:
    x = torch.tensor([[largest, -largest / 3, 0.0]]).bfloat16()
    cast_x, most = cast(x, dtype), torch.finfo(dtype).max
    assert torch.frexp(cast_x.scale).mantissa == 0.5
    assert most / 2 < x.float().max() / cast_x.scale <= most
    share = 2.0 ** -(4 if dtype == FORWARD else 3)  # half of the last bit, of 3 and of 2 bits
    assert (exact(cast_x) - x.double()).abs().max() <= share * largest


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    assert not exact(cast(torch.zeros(4, 4).bfloat16(), FORWARD)).any()
    for bad in (float("nan"), float("inf")):
        x = drawn(4, 4)
        x[1, 2] = bad
        assert not exact(cast(x, FORWARD)).isfinite().all()


@EITHER
def test_an_element_rounds_alike_whatever_else_its_tensor_holds(dtype: dtype) -> None:
    """Ranks hold other parts of a tensor; all but the smallest of its elements are cast alike."""
    x = drawn(64, 64)
    x[x.abs() < 0.1] = 1.0  # beside an element 2^4 times the largest, these are still normal numbers
    alone, beside = cast(x, dtype), cast(torch.cat((x, torch.full((1, 64), 64.0).bfloat16())), dtype)
    assert alone.scale < beside.scale
    assert torch.equal(exact(alone), exact(beside)[:64])


def test_a_product_on_a_cpu_is_that_of_torchs_kernel() -> None:
    """Its result in bf16, from other orders of sums: a unit in the last place apart where those meet a tie."""
    for first, second in ((FORWARD, FORWARD), (BACKWARD, FORWARD), (FORWARD, BACKWARD)):
        a, b = cast(drawn(32, 48), first), cast(drawn(48, 16, seed=1, spread=5.0), second)
        columns = b.values.mT.contiguous().mT
        theirs = torch._scaled_mm(a.values, columns, scale_a=a.scale, scale_b=b.scale, out_dtype=torch.bfloat16)
        ours = scaled_product(a, b)
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(ours.double(), exact(a) @ exact(b), rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_layer_multiplies_cast_tensors_forward_and_backward(deferred: bool) -> None:
    x, weight, bias = drawn(2, 16, 32).requires_grad_(), torch.nn.Parameter(drawn(32, 48, seed=1)), torch.nn.Parameter(drawn(48, seed=2))
    grad = drawn(2, 16, 48, seed=3, spread=1e-3)
    kept: list[Tensor] = []
    gradients = WeightGradients(lambda parameter, gradient: kept.append(gradient)) if deferred else None
    with defer_weight_gradients(gradients):
        output = fp8_product(x, weight, bias)
    output.backward(grad)
    if gradients is not None:
        assert weight.grad is None
        gradients.compute()
        (weight.grad,) = kept
    cast_x, cast_weight = exact(cast(x.detach(), FORWARD)).flatten(0, 1), exact(cast(weight.detach(), FORWARD))
    cast_grad = exact(cast(grad, BACKWARD)).flatten(0, 1)
    close = {"rtol": 2**-7, "atol": 0.0}
    expected = (cast_x @ cast_weight).bfloat16() + bias.detach()
    torch.testing.assert_close(output.flatten(0, 1), expected, rtol=2**-7, atol=0.02)
    assert x.grad is not None
    assert bias.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), cast_grad @ cast_weight.mT, rtol=2**-7, atol=2e-5)
    torch.testing.assert_close(weight.grad.double(), cast_x.mT @ cast_grad, rtol=2**-7, atol=2e-5)
    torch.testing.assert_close(bias.grad, grad.flatten(0, 1).sum(0), **close)


def test_a_gradient_far_below_the_largest_one_is_not_lost() -> None:
    """By 2^-24, which e5m2 holds beside the largest element of a tensor, and e4m3 does not."""
    x, weight = drawn(16, 32).requires_grad_(), torch.nn.Parameter(drawn(32, 16, seed=1))
    grad = torch.full((16, 16), 2.0**-24).bfloat16()
    grad[0] = 1.0
    fp8_product(x, weight).backward(grad)
    assert x.grad is not None
    expected = grad[1:].double() @ exact(cast(weight.detach(), FORWARD)).mT
    torch.testing.assert_close(x.grad[1:].double(), expected, rtol=2**-7, atol=1e-9)


def test_an_evaluation_multiplies_as_training_does() -> None:
    x, weight, bias = drawn(2, 16, 32), torch.nn.Parameter(drawn(32, 48, seed=1)), torch.nn.Parameter(drawn(48, seed=2))
    trained = fp8_product(x, weight, bias)
    with torch.no_grad():
        assert torch.equal(fp8_product(x, weight, bias), trained)
    assert not torch.equal(trained, torch.addmm(bias, x.flatten(0, 1), weight).view_as(trained))


@pytest.mark.parametrize(
    ("model", "bf16"),
    [
        ("tiny", {"head", "embedding"}),
        ("tiny_llama", {"head", "embedding"}),
        ("tiny_moe model.shared_experts=1", {"head", "embedding", "router", "gate", "up", "down"}),
        ("tiny_mla", {"head", "embedding", "router", "gate", "up", "down"}),
    ],
)
def test_the_products_of_attention_and_feed_forwards_are_in_fp8(model: str, bf16: set[str]) -> None:
    run = load_recipe("quickstart", ["data=synthetic", *f"model={model}".split(), "train.precision=fp8", "engine=native"])
    module = build_model(run, device=torch.device("meta"), dtype=torch.bfloat16, seed=1)
    linears = {name: each for name, each in module.named_modules() if isinstance(getattr(each, "weight", None), torch.nn.Parameter)}
    matrices = {name: each for name, each in linears.items() if each.weight.dim() > 1}
    plain = {name.rpartition(".")[2] for name, each in matrices.items() if not getattr(each, "in_fp8", False)}
    assert plain <= bf16 | {"positions"}
    in_fp8 = {name.removeprefix("layers.0.") for name, each in matrices.items() if getattr(each, "in_fp8", False) and ".0." in f".{name}"}
    assert {"attention.query", "attention.out"} <= in_fp8
    assert not any("experts" in name or "router" in name for name in in_fp8)


def test_a_saved_model_is_read_in_float32() -> None:
    """As `export` and `generate` do, which are compared with transformers."""
    words, tokens = ["data=synthetic", "model=tiny_llama", "engine=native"], torch.arange(32).view(1, 32)

    def logits(precision: str, dtype: dtype) -> Tensor:
        run = load_recipe("quickstart", [*words, f"train.precision={precision}"])
        with torch.no_grad():
            found: Tensor = build_model(run, device=torch.device("cpu"), dtype=dtype, seed=1).logits(tokens)
        return found

    assert torch.equal(logits("fp8", torch.float32), logits("fp32", torch.float32))
    assert not torch.equal(logits("fp8", torch.bfloat16), logits("bf16", torch.bfloat16))
