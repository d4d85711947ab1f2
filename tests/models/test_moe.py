"""A mixture of experts matches its formulas, and split over expert and tensor ranks computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from distrain.tests.fakes.deadline import LONG_DEADLINE  # noqa: E402
from distrain.trainer.layers import experts  # noqa: E402
from distrain.trainer.layers.counter_rng import normal  # noqa: E402
from distrain.trainer.layers.cross_entropy import IGNORED  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights, named_constants, named_weights  # noqa: E402
from distrain.trainer.models.families import op_table  # noqa: E402
from distrain.trainer.models.moe.routing import earlier_choices, imbalance, near_tie_count, route  # noqa: E402
from distrain.trainer.models.moe.routing_counts import expert_loads, step_bias  # noqa: E402
from distrain.trainer.models.ops.op_table import model_constants  # noqa: E402
from distrain.trainer.spec.changed_run import with_changes  # noqa: E402
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train  # noqa: E402
from distrain.trainer.spec.sections.router import Router  # noqa: E402

CPU = torch.device("cpu")
B, S, E = 3, 24, 4
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 61, "experts": E, "top_k": 2}
MODEL = Model(family="moe", norm="rmsnorm", act="swiglu", positions="rope", **SHAPE)


def run_of(**changes: Any) -> Run:
    """Return a run of a small mixture, with keys changed: model__top_k=1."""
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    train = Train(batch=B, microbatch=B, seq=S, steps=1, precision="fp32")
    run = Run(name="moe", model=MODEL, cluster=cluster, parallel=Parallel(), train=train)
    return with_changes(run, [(key.replace("__", "."), value) for key, value in changes.items()])


def module_of(run: Run) -> Any:
    """Return a module in which every weight has an effect, float64."""
    module = build_model(run, device=CPU, dtype=torch.float64, seed=5)
    drawn = (
        (name, tensor.float() + 0.3 * normal(6, name, 0, tensor.numel()).view(tensor.shape)) for name, tensor in named_weights(module, run)
    )
    load_weights(module, drawn)
    return module


def batch_of(run: Run) -> tuple[Any, Any]:
    return tuple(torch.randint(run.model.vocab, (2, B, S), generator=torch.Generator().manual_seed(7)))


def written_out(run: Run, w: dict[str, Any], x: Any) -> tuple[Any, Any]:
    """Return (output of a layer's experts for one sequence x [S, H], computed token by token; its routing imbalance)."""
    model = run.model
    room = model.capacity and int(model.capacity * model.top_k * S / E)
    rows, taken, wanted, chances = [], [0] * E, [0] * E, []
    for token in x:
        logits = token @ w["router.weight"]
        scores = torch.exp(logits) / torch.exp(logits).sum() if model.router.score == "softmax" else 1 / (1 + torch.exp(-logits))
        chances.append(scores / scores.sum())
        first = chosen_written_out(model, scores, w.get("router.bias", torch.zeros(E)))
        shares = scores[first] / scores[first].sum() if model.router.normalize else scores[first]
        row = torch.zeros_like(token)
        for one in largest(range(E), scores, model.top_k) if model.router.bias else first:
            wanted[one] += 1
        for share, one in zip(model.router.scale * shares, first, strict=True):
            if room is None or taken[one] < room:
                taken[one] += 1
                row = row + share * feed_forward_written_out(
                    {name: each[one] for name, each in w.items() if "experts" in name}, "experts", token
                )
        rows.append(row + feed_forward_written_out(w, "shared", token) if model.shared_experts else row)
    even = E * sum(want / (S * model.top_k) * chance for want, chance in zip(wanted, torch.stack(chances).mean(0), strict=True))
    return torch.stack(rows), even


def chosen_written_out(model: Model, scores: Any, bias: Any) -> list[int]:
    """Return a token's experts: of the best groups, by the largest score or with a bias by the sum of the two largest, the best."""
    values, size = scores + bias, E // model.router.groups
    groups = [range(first, first + size) for first in range(0, E, size)]
    of_group = torch.stack([sum(sorted(values[list(each)], reverse=True)[: 2 if model.router.bias else 1]) for each in groups])
    best = largest(range(len(groups)), of_group, model.router.top_groups)
    return largest((one for group in best for one in groups[group]), values, model.top_k)


def largest(these: Any, values: Any, count: int) -> list[int]:
    return sorted(these, key=lambda one: -values[one].item())[:count]


def feed_forward_written_out(w: dict[str, Any], name: str, x: Any) -> Any:
    gate, up, down = (w[f"{name}.{part}.weight"] for part in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


CHANGES = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__top_k": 1},
        {"model__top_k": E},
        {"model__shared_experts": 2},
        {"model__capacity": 0.6},
        {"model__capacity": 1.5, "model__shared_experts": 1},
        {"model__router": Router(normalize=False)},
        {"model__router": Router(scale=2.5), "model__capacity": 0.9},
        {"model__router": Router(groups=2, scale=16.0, normalize=False)},
        {"model__router": Router(bias=True)},
        {"model__router": Router(score="sigmoid", normalize=False)},
        {"model__router": Router(score="sigmoid", groups=4, top_groups=2), "model__shared_experts": 1},
        {"model__router": Router(score="sigmoid", groups=2, bias=True, scale=2.5)},
        {"model__router": Router(score="sigmoid", groups=2, top_groups=2, bias=True), "model__top_k": 3, "model__capacity": 0.8},
    ],
    ids=lambda changes: " ".join(f"{key.removeprefix('model__')}={value}" for key, value in changes.items()) or "as it is",
)


@CHANGES
def test_a_layer_matches_the_written_out_formulas(changes: dict[str, Any]) -> None:
    router = changes.get("model__router", Router())
    run = run_of(**changes | {"model__router": replace(router, z_loss=0.3)}, model__aux_loss=0.1)
    layer = module_of(run).layers["1"]
    x = torch.randn(B, S, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    routed, losses, *_ = layer.mixture(x)
    output = routed if layer.shared is None else routed + layer.shared(x)
    weights = {**dict(layer.named_parameters()), **dict(named_constants(layer))}
    rows = [written_out(run, weights, sequence) for sequence in x]
    expected, expected_imbalances = (torch.stack(each) for each in zip(*rows, strict=True))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    log_sums = (x @ layer.router.weight).logsumexp(-1)
    expected_losses = 0.1 * expected_imbalances + 0.3 * (log_sums * log_sums).mean(1)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)
    inputs = [x, *(each for name, each in layer.named_parameters() if name.startswith(("router", "experts", "shared")))]
    weights = torch.randn(output.shape, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((values * weights).sum() + each.sum(), inputs, retain_graph=True)
        for values, each in ((output, losses), (expected, expected_losses))
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_auxiliary_loss_is_in_the_gradient_but_not_in_the_loss(ignored: bool, recompute: str) -> None:
    """It is the mean over sequences of their routing imbalance, weighted by their labels that count."""
    plain, run = (module_of(run_of(model__aux_loss=aux, parallel__recompute=recompute)) for aux in (0.0, 0.7))
    tokens, labels = batch_of(run_of())
    if ignored:
        labels[0, 3:7] = labels[2, 1:] = IGNORED
    (loss, counted), (other, _) = plain(tokens, labels), run(tokens, labels)
    assert torch.equal(loss, other)
    (other / counted).backward()
    each = summed_imbalance(plain, tokens)  # [B]
    many = (labels != IGNORED).sum(1)
    (loss / counted + 0.7 * ((each * many).sum() / many.sum() if ignored else each.mean())).backward()
    for (name, one), two in zip(run.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-14, msg=name)


def summed_imbalance(module: Any, tokens: Any) -> Any:
    """Return each sequence's routing imbalance, summed over layers, from the routers' logits."""
    found = []

    def look(_: Any, given: Any, logits: Any) -> None:
        found.append(imbalance(logits, route(logits, MODEL.top_k, None).chosen))

    hooks = [layer.router.register_forward_hook(look) for layer in module.layers.values()]
    recompute, module.recompute = module.recompute, False
    module.hidden_states(tokens, None, None)
    module.recompute = recompute
    for hook in hooks:
        hook.remove()
    return torch.stack(found).sum(0)


def test_the_imbalance_is_1_for_even_routing_and_the_number_of_experts_for_one_expert() -> None:
    logits = torch.eye(E, dtype=torch.float64).repeat(2, 6, 1) * 30
    assert imbalance(logits, route(logits, 1, None).chosen).tolist() == pytest.approx([1, 1])
    logits = torch.zeros(1, 9, E, dtype=torch.float64).index_fill_(2, torch.tensor([2]), 30.0)
    assert imbalance(logits, route(logits, 1, None).chosen).tolist() == pytest.approx([E])


def test_a_near_tie_is_a_difference_within_rounding() -> None:
    logits = torch.tensor([[[1, 5, 3.000001, 3.0], [4, 4, 1, 0], [2, 2, 2, 9], [0, 1, 2, 3]]])
    assert [int(near_tie_count(logits, 2, dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [2, 2, 1]
    assert int(near_tie_count(logits, E, torch.float32)) == 0


def test_a_lead_of_sixteen_units_in_the_last_place_is_a_near_tie() -> None:
    """Of the token's largest logit by magnitude, here -8."""
    logits = torch.tensor([[[1.0, 1.0, 0.0, -8.0]]]).repeat(1, 2, 1)
    logits[0, :, 1] -= torch.tensor([16, 17]) * 8 * torch.finfo(torch.float32).eps
    assert near_tie_count(logits, 1, torch.float32) == 1


def near_ties(values: list[list[float]], router: Router, bias: list[float] | None = None, top_k: int = 1) -> int:
    constant = None if bias is None else torch.tensor(bias, dtype=torch.float32)
    return int(near_tie_count(torch.tensor([values], dtype=torch.float32), top_k, torch.float32, router, constant))


def test_a_near_tie_of_groups_is_one_too() -> None:
    """Of the last group that is chosen and the next, by what groups are chosen by; not of a group's own experts that are not chosen."""
    two = Router(groups=2)
    assert near_ties([[3, 1, 3.000001, 0], [3, 1, 3.1, 3.1], [3, 0, 0, 0], [2, 1, 5, 0]], two) == 2  # the second: of its experts
    assert near_ties([[1, 1, 5, 0], [5, 0, 1, 1]], two) == 0
    assert near_ties([[3, 1, 3.000001, 0]], Router(groups=2, top_groups=2)) == 1
    by_sum = Router(score="sigmoid", groups=2, bias=True)
    assert near_ties([[3, 1, 2, 1.9]], by_sum, [0.0] * 4) == 0
    assert near_ties([[3, 1, 1, 3], [3, 1, 4, 1]], by_sum, [0.0] * 4, 2) == 1


def test_with_a_bias_a_near_tie_is_of_scores_with_it() -> None:
    """A lead of logits that a bias takes away is none; where sigmoids are flat, rounding of logits moves them less."""
    v3 = Router(score="sigmoid", bias=True)
    lead = float(torch.sigmoid(torch.tensor(1.0)) - torch.sigmoid(torch.tensor(0.0)))
    assert near_ties([[1, 0]], v3, [0, 0]) == near_ties([[1, 1.00001]], v3, [0.1, 0]) == 0
    assert near_ties([[1, 0]], v3, [0, lead]) == near_ties([[1, 1.00000001]], v3, [0, 0]) == 1
    unit = torch.finfo(torch.float32).eps
    for logit in (0.0, 4.0):
        slope = float(torch.sigmoid(torch.tensor(logit)) * (1 - torch.sigmoid(torch.tensor(logit))))
        bound = 16 * unit * (8 * slope + 1)  # of the largest logit, 8, and of a score of 1 at most
        given = [[logit, logit, -8.0]]
        assert [near_ties(given, v3, [lead, 0, 0]) for lead in (0.4 * bound, 1.2 * bound)] == [1, 0]


def bf16_departure(seed: int, choice: list[float]) -> tuple[float, int]:
    """Return (the loss in bf16 minus that in float32 of the same drawn weights, near ties in bf16) of a mixture with the gate and biases of
    gpt-oss, where a token chooses experts by its logits plus `choice`."""
    run = run_of(model__act="swiglu_clamped", model__expert_bias=True, model__router__bias=True, train__seed=seed)
    losses, ties = [], 0
    for dtype in (torch.float32, torch.bfloat16):
        module: Any = build_model(run, device=CPU, dtype=torch.float32, seed=seed).to(dtype)
        for _, bias in named_constants(module):
            bias.copy_(torch.tensor(choice))
        total, labels = module(*batch_of(run))
        losses.append(total.item() / int(labels))
        ties = sum(int(each[-1]) for each in module.routing_counts.values())
    return losses[1] - losses[0], ties


def test_a_mixture_in_bf16_departs_from_float32_by_its_choice_of_experts() -> None:
    """The clamped gate's product is as large as the gate, not as its square: a token that rounding sends to another expert changes the loss
    several times as much as all rounding else. 12 seeds were 2.0e-4 and 0.5e-4 away (root mean square)."""
    free, fixed = ([bf16_departure(seed, choice) for seed in range(8)] for choice in ([0.0] * E, [100.0, 0.0, 100.0, 0.0]))
    assert all(ties for _, ties in free)
    assert not any(ties for _, ties in fixed)
    spread, least = (sum(each**2 for each, _ in some) ** 0.5 for some in (free, fixed))
    assert spread > 2 * least
    assert max(abs(each) for each, _ in fixed) < 3e-4


def test_a_bias_falls_where_more_tokens_chose_an_expert_than_the_mean() -> None:
    """Each of a token's copies counts; at the mean a bias stays."""
    load = expert_loads(torch.tensor([[[0, 1], [0, 2], [0, 1]]]), E)
    assert load.tolist() == [3, 2, 1, 0]
    bias = torch.zeros(E)
    step_bias(bias, load, 0.5)
    step_bias(bias, torch.tensor([3, 2, 2, 1]), 0.25)
    assert bias.tolist() == [-0.75, -0.5, 0.5, 0.75]


def test_logits_choose_where_their_sigmoids_are_equal() -> None:
    """Without a bias: in float32 both are 1."""
    logits = torch.tensor([[[30.0, 40.0, 0.0, 0.0]]])
    assert route(logits, 1, None, router=Router(score="sigmoid")).chosen.tolist() == [[[1]]]


def test_experts_whose_sigmoids_are_all_0_weigh_nothing() -> None:
    logits = torch.full((1, 2, 4), -200.0, requires_grad=True)
    weights = route(logits, 2, None, router=Router(score="sigmoid")).weights
    weights.sum().backward()
    assert not weights.any()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_an_expert_takes_the_first_tokens_of_each_sequence_up_to_its_capacity() -> None:
    logits = torch.randn(B, S, E, generator=torch.Generator().manual_seed(1))
    room = 7
    routing = route(logits, 2, room)
    kept = torch.zeros(B * S * 2, dtype=torch.bool).index_fill_(0, routing.order, True).view(B, S, 2)
    for sequence, chosen in zip(kept, routing.chosen, strict=True):
        for one in range(E):
            asks = [bool(sequence[token, at]) for token, at in (chosen == one).nonzero().tolist()]
            assert asks == [True] * min(room, len(asks)) + [False] * (len(asks) - room)
    assert int(routing.ends[-1]) == len(routing.order) == int((earlier_choices(routing.chosen, E) < room).sum())
    experts = routing.chosen.flatten()[routing.order]
    assert torch.equal(experts, experts.sort().values)


def test_capacity_is_per_sequence_and_does_not_depend_on_the_batch() -> None:
    run = run_of(model__capacity=0.5)
    module, (tokens, labels) = module_of(run), batch_of(run)
    parts = [module(tokens[row, None], labels[row, None])[0] for row in range(B)]
    torch.testing.assert_close(module(tokens, labels)[0], sum(parts), rtol=1e-12, atol=0)


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    module = module_of(run_of())
    with torch.no_grad():
        module.layers["0"].router.weight.zero_()  # all are equal: the first two are taken
    loss, _ = module(*batch_of(run_of()))
    loss.backward()
    for part in ("gate", "up", "down"):
        grad = module.get_parameter(f"layers.0.experts.{part}.weight").grad
        assert [bool(each.any()) for each in grad].count(False) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_matches_one_product_per_expert(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path, run by torch's CPU kernel; one expert has no rows."""
    x, grad = torch.randn(40, 16).to(dtype), torch.randn(40, 24).to(dtype)
    weight, ends = torch.randn(4, 16, 24).to(dtype), torch.tensor([10, 10, 33, 40])

    def products() -> tuple[Any, ...]:
        return (
            experts.grouped_matmul(x, weight, ends),
            experts.grouped_matmul(grad, weight.mT, ends),
            experts.grouped_weight_gradient(x, grad, ends),
        )

    apart = products()
    monkeypatch.setattr(experts, "_has_fused_kernel", lambda *_: True)
    for one, other in zip(apart, products(), strict=True):
        torch.testing.assert_close(one, other)
    x, grad, ends = x[:0], grad[:0], torch.zeros(4, dtype=torch.int64)
    assert [(tuple(each.shape), each.sum()) for each in products()] == [((0, 24), 0), ((0, 16), 0), ((4, 16, 24), 0)]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "expected"),
    [
        (40, 16, torch.bfloat16, True),
        (40, 16, torch.float32, False),
        (0, 16, torch.bfloat16, True),
        (40, 12, torch.bfloat16, False),
    ],
)
def test_a_gpu_has_one_kernel_for_rows_in_bf16_of_a_multiple_of_16_bytes(rows: int, columns: int, dtype: Any, expected: bool) -> None:
    with FakeTensorMode():
        x, other = (torch.empty(rows, each, dtype=dtype, device="cuda") for each in (columns, 24))
        assert experts._has_fused_kernel(x, other) is expected
        assert experts._has_fused_kernel(other, x) is expected
        assert not experts._has_fused_kernel(x.cpu(), other.cpu())


@pytest.mark.parametrize("rows", [40, 0])
def test_no_count_of_rows_is_read_where_one_kernel_multiplies_for_all_experts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of device `meta` have no values: what reads one fails. It would break a compiled graph, and only on ranks that are sent no
    rows, where the kernel is not called."""
    monkeypatch.setattr(experts, "_has_fused_kernel", lambda *_: True)
    if not rows:
        monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    x, grad, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, 16), (rows, 24), (4, 16, 24)))
    ends = torch.empty(4, dtype=torch.int64, device="meta")
    output, gradient = experts.grouped_matmul(x, weight, ends), experts.grouped_weight_gradient(x, grad, ends)
    shapes = [tuple(each.shape) for each in (output, gradient, experts.grouped_sum(grad, ends))]
    assert shapes == [(rows, 24), (4, 16, 24), (4, 24)]


FACTS = {"loss", "flips", "gradients of router", "gradients of experts", "gradients of others"}
SPLITS = ("4x1", "1x4", "2x2")


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    """Return the largest difference of each fact, by layout."""
    script = Path(__file__).parents[1] / "rank_programs" / "moe_ranks.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(script), *SPLITS], capture_output=True, text=True, timeout=LONG_DEADLINE, env=environment)
    assert ended.returncode == 0, ended.stderr
    return {layout: found for line in ended.stdout.splitlines() for layout, found in json.loads(line).items()}


@pytest.mark.parametrize(
    "model", ["dropless", "balanced", "limited capacity", "groups and bias", "biases and sinks", "latent", "latent keys", "hybrid"]
)
@pytest.mark.parametrize("layout", SPLITS)
def test_expert_and_tensor_ranks_compute_what_one_rank_computes(layout: str, model: str, differences: dict[str, dict[str, float]]) -> None:
    """In float64, and no token is routed to another expert."""
    found = {what.removeprefix(f"{model}: "): most for what, most in differences[layout].items() if what.startswith(f"{model}: ")}
    assert found.keys() - {"gradients of shared"} == FACTS
    assert found["flips"] == 0
    assert max(found.values()) < 1e-13


def test_only_layers_with_a_router_have_a_bias() -> None:
    run = run_of(model__dense_layers=1, model__router__bias=True)
    assert [name for name, _ in named_constants(module_of(run))] == ["layers.1.router.bias"]
    assert [each.name for each in model_constants(op_table(run), range(run.model.layer_groups))] == ["layers.1.router.bias"]
