"""Linear attention by the gated delta rule: its chunks compute what one token after another does, and so do its gradients."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.moved_bytes import MovedBytes  # noqa: E402
from distrain.tests.fakes.small_models import CPU, MODELS, gradients, module_of, run_of  # noqa: E402
from distrain.trainer.layers.counter_rng import hash64  # noqa: E402
from distrain.trainer.layers.delta_inputs import DeltaInputs  # noqa: E402
from distrain.trainer.layers.gated_delta import CHUNK, UNIT_EPS, gated_delta  # noqa: E402
from distrain.trainer.layers.output_gates import GatedNorm, add_gated, gated_product  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402
from distrain.trainer.models.families import op_table  # noqa: E402
from distrain.trainer.models.hybrid import ops  # noqa: E402
from distrain.trainer.models.hybrid.module import GatedDeltaNet  # noqa: E402
from distrain.trainer.models.ops.op_table import parameter_count  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.plan.timeline.make_timeline import make_timeline  # noqa: E402
from distrain.trainer.plan.timeline.step_costs import step_costs  # noqa: E402
from distrain.trainer.spec.run import Model  # noqa: E402
from distrain.trainer.spec.sections.router import Router  # noqa: E402

NAMES = [field.name for field in fields(DeltaInputs)]
B, K, R, D, V, W = 2, 2, 3, 4, 5, 4  # sequences, key heads, value heads of each, widths of keys and values, taps


def inputs_of(seq: int, dtype: Any = torch.float64, taps: int = W) -> DeltaInputs:
    drawn = torch.Generator().manual_seed(seq)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (B, seq, K * D),
        "key": (B, seq, K * D),
        "value": (B, seq, K * R * V),
        "beta": (B, seq, K * R),
    }
    shapes |= {"decay": (B, seq, K * R), "query_conv": (taps, K * D), "key_conv": (taps, K * D), "value_conv": (taps, K * R * V)}
    shapes |= {"a_log": (K * R,), "dt_bias": (K * R,)}
    return DeltaInputs(**{name: torch.randn(shapes[name], generator=drawn).to(dtype).requires_grad_() for name in NAMES})


def tensors_of(inputs: DeltaInputs) -> list[Any]:
    return [getattr(inputs, name) for name in NAMES]


def convolved(x: Any, taps: Any) -> Any:
    """The causal convolution of each channel, by torch."""
    return F.conv1d(F.pad(x.mT, (len(taps) - 1, 0)), taps.mT.unsqueeze(1), groups=x.shape[-1]).mT


def token_by_token(inputs: DeltaInputs) -> Any:
    """Return what the queries read, by arXiv:2412.06464 equation 10, one token after another."""
    query, key, value = (
        F.silu(convolved(x, taps))
        for x, taps in ((inputs.query, inputs.query_conv), (inputs.key, inputs.key_conv), (inputs.value, inputs.value_conv))
    )
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + UNIT_EPS).sqrt()).repeat_interleave(R, 2)
        for x in (torch.unflatten(each, -1, (K, D)) for each in (query, key))
    )
    query, value = query / D**0.5, torch.unflatten(value, -1, (K * R, V))
    beta, decay = torch.sigmoid(inputs.beta), (-inputs.a_log.exp() * F.softplus(inputs.decay + inputs.dt_bias)).exp()
    state, read = query.new_zeros(B, K * R, V, D), []
    identity = torch.eye(D, dtype=query.dtype)
    for at in range(query.shape[1]):
        k, share = key[:, at], beta[:, at, :, None, None]  # [B, A, D]
        state = state * decay[:, at, :, None, None] @ (identity - share * k.unsqueeze(-1) * k.unsqueeze(-2))
        state = state + share * value[:, at].unsqueeze(-1) * k.unsqueeze(-2)
        read.append((state @ query[:, at].unsqueeze(-1)).squeeze(-1))
    return torch.stack(read, 1).flatten(2)


@pytest.mark.parametrize(("seq", "chunk", "taps"), [(1, 64, 4), (2, 4, 4), (21, 1, 4), (21, 4, 1), (24, 8, 2), (21, 64, 4), (130, 64, 4)])
def test_chunks_compute_what_one_token_after_another_does(seq: int, chunk: int, taps: int) -> None:
    inputs = inputs_of(seq, taps=taps)
    expected, found = token_by_token(inputs), gated_delta(inputs, D, chunk)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs, ours = (torch.autograd.grad(each, tensors_of(inputs), grad) for each in (expected, found))
    for name, one, other in zip(NAMES, ours, theirs, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-12 * float(other.abs().max() + 1), msg=lambda text, name=name: f"{name}: {text}"
        )


def test_float32_keeps_to_float64_over_many_chunks() -> None:
    wide = inputs_of(500)
    narrow = DeltaInputs(**{name: getattr(wide, name).detach().float().requires_grad_() for name in NAMES})
    expected, found = token_by_token(wide), gated_delta(narrow, D)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad(expected, tensors_of(wide), grad.double())
    for one, other in zip(torch.autograd.grad(found, tensors_of(narrow), grad), theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=5e-6 * float(other.abs().max()))


@pytest.mark.parametrize("shift", [-40.0, 40.0])
def test_states_that_never_and_at_once_decay_have_finite_gradients(shift: float) -> None:
    """Within a chunk the rates add up to thousands: their exponentials are taken of differences that are at most 0."""
    inputs = inputs_of(100, torch.float32)
    inputs = replace(inputs, dt_bias=torch.full((K * R,), shift).requires_grad_(), a_log=torch.full((K * R,), 2.7).requires_grad_())
    found = gated_delta(inputs, D)
    torch.testing.assert_close(found, token_by_token(inputs), rtol=0, atol=1e-5)
    found.square().sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in tensors_of(inputs))


def test_in_bf16_it_rounds_what_float32_makes() -> None:
    narrow = DeltaInputs(**{name: each.detach().bfloat16() for name, each in zip(NAMES, tensors_of(inputs_of(70)), strict=True)})
    wide = DeltaInputs(**{name: each.float() for name, each in zip(NAMES, tensors_of(narrow), strict=True)})
    assert torch.equal(gated_delta(narrow, D), gated_delta(wide, D).bfloat16())


@pytest.mark.parametrize("seq", [CHUNK, 3 * CHUNK])
def test_the_rule_computes_the_flops_of_its_op(seq: int) -> None:
    """torch's counter does not know triangular systems, which the op counts. Backward needs no state behind the last chunk."""
    model = replace(MODELS["hybrid"], linear_num_key_heads=K, linear_num_value_heads=K * R, linear_key_head_dim=D, linear_value_head_dim=V)
    rule, heads = ops.delta_rule(model), B * seq * K * R
    inputs, solved = inputs_of(seq), heads * CHUNK * (D + V)
    with FlopCounterMode(display=False) as forward:
        read = gated_delta(inputs, D)
    with FlopCounterMode(display=False) as backward:
        read.sum().backward()
    counted, last = 6 * heads * D * V, 2 * B * K * R * CHUNK * D * V
    assert forward.get_total_flops() == pytest.approx(counted * rule.computed - solved, rel=1e-12)
    assert backward.get_total_flops() == pytest.approx(counted * rule.computed * rule.backward - 2 * solved - last, rel=1e-12)


def test_the_plan_counts_what_the_rules_kernels_move() -> None:
    """Heads and chunks of a sixteenth of Qwen3-Next's; in two lengths, for the kernels of a chunk."""
    size, counted = 8, []
    for seq in (8 * size, 16 * size):
        shapes: dict[str, tuple[int, ...]] = {"query": (1, seq, size), "key": (1, seq, size), "value": (1, seq, 2 * size)}
        shapes |= {"beta": (1, seq, 2), "decay": (1, seq, 2)}
        shapes |= {"query_conv": (4, size), "key_conv": (4, size), "value_conv": (4, 2 * size), "a_log": (2,), "dt_bias": (2,)}
        drawn = torch.Generator().manual_seed(5)
        values = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
        inputs = DeltaInputs(**{name: each.to(torch.bfloat16).requires_grad_() for name, each in values.items()})
        with MovedBytes() as forward:
            read = gated_delta(inputs, size, size // 2)
        with MovedBytes() as backward:
            read.backward(torch.ones_like(read))
        unit = 4 * read.numel()
        counted.append((forward.bytes / unit, backward.bytes / unit, forward.kernels, backward.kernels))
    per_chunk = (counted[1][2] - counted[0][2]) / 16
    assert (per_chunk, counted[1][2] - 32 * per_chunk) == (ops.CHUNK_KERNELS, ops.RULE_KERNELS)
    assert counted[1][:2] == pytest.approx(ops.RULE_MOVES, rel=0.05)


def test_gates_have_the_gradients_of_their_formulas() -> None:
    drawn = torch.Generator().manual_seed(2)
    x, gate, total = (torch.randn(2, 3, 4, 5, generator=drawn, dtype=torch.float64).requires_grad_() for _ in range(3))
    weight = torch.nn.Parameter(torch.randn(5, generator=drawn, dtype=torch.float64))
    logit = torch.randn(2, 3, 4, 1, generator=drawn, dtype=torch.float64).requires_grad_()
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight * F.silu(gate)
    for found, expected in (
        (gated_product(x, gate), x * gate.sigmoid()),
        (add_gated(total, x, logit), total + x * logit.sigmoid()),
        (GatedNorm({"weight": weight}, 1e-3, None)(x, gate), normed),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        with_respect_to = [x, gate, total, weight, logit]
        ours, theirs = (torch.autograd.grad(each.square().sum(), with_respect_to, allow_unused=True) for each in (found, expected))
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_group_has_linear_layers_and_one_with_full_attention_last() -> None:
    module: Any = build_model(run_of("hybrid"), device=CPU, dtype=torch.float32)
    kinds = [isinstance(layer.attention, GatedDeltaNet) for group in module.layers.values() for layer in group]
    assert kinds == [True, True, False] * 2


def test_no_token_sees_a_later_one() -> None:
    run = run_of("hybrid", train__seq=80)
    module = module_of(run)
    tokens = torch.randint(run.model.vocab, (1, 80), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 70] = (tokens[0, 70] + 1) % run.model.vocab
    with torch.no_grad():
        one, two = module.logits(tokens), module.logits(other)
    assert torch.equal(one[:, :64], two[:, :64])  # an earlier chunk, bit for bit
    torch.testing.assert_close(one[:, :70], two[:, :70], rtol=0, atol=1e-12)
    assert not torch.allclose(one[:, 71:], two[:, 71:], rtol=0, atol=1e-6)


def test_initial_weights_are_those_of_transformers() -> None:
    """Rates are drawn evenly from 0.01 to 16; of norms, those of linear heads scale by their weight, the others by 1 + theirs."""
    run = run_of("hybrid", model__linear_num_key_heads=512, model__linear_num_value_heads=2048)
    found = dict(build_model(run, device=CPU, dtype=torch.float32, seed=1).named_parameters())
    rates = torch.cat([each.detach() for name, each in found.items() if name.endswith("a_log")]).exp()
    assert len(rates) == 4 * 2048
    assert 0.01 <= float(rates.min()) < 0.05 < 15.9 < float(rates.max()) <= 16
    assert float(rates.mean()) == pytest.approx(8, abs=0.2)
    for name, each in found.items():
        if name.endswith((".dt_bias", ".gated_norm.weight")):
            assert (each == 1).all()
        elif each.dim() == 1 and not name.endswith("a_log"):
            assert (each == 0).all()


def test_compiled_linear_attention_computes_the_same() -> None:
    run = run_of("hybrid", model__layers=2, model__full_attention_interval=2)
    tokens, labels = torch.randint(run.model.vocab, (2, 3, 24), generator=torch.Generator().manual_seed(3))
    plain, compiled = module_of(run), module_of(run)
    compiled.layers["0"][0].attention.compile(backend="aot_eager")
    (loss, expected), (other, found) = (gradients(each, tokens, labels) for each in (plain, compiled))
    assert float(loss) == pytest.approx(float(other), rel=1e-12)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_the_80b_model_has_as_many_parameters_as_that_of_transformers() -> None:
    transformers: Any = pytest.importorskip("transformers")
    run = load_recipe("quickstart", ["data=synthetic", "model=qwen3_next_80b"])
    counts = []
    for layers in (4, 8):
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3NextConfig(num_hidden_layers=layers))
        counts.append(sum(each.numel() for each in theirs.parameters()))
    expected = counts[0] + 11 * (counts[1] - counts[0])
    assert parameter_count(op_table(run), run.model.layer_groups) == expected == 79_674_391_296


def test_a_step_counts_the_state_of_each_value_head() -> None:
    """Model FLOPs of linear attention, of which MFU is a share: 6 x 128 x 128 a value head and token, whatever chunks compute."""
    run = load_recipe("quickstart", ["data=synthetic", "model=qwen3_next_80b", "train.seq=4096"])
    assert isinstance(run.model, Model)
    rule = ops.delta_rule(run.model)
    assert 2 * 128 * 128 * len(rule.outers) == 98_304
    assert rule.computed == pytest.approx(1.5)
    assert rule.backward == pytest.approx(3)


def test_every_layer_of_every_group_draws_dropout_of_its_own() -> None:
    module: Any = build_model(run_of("hybrid", model__dropout=0.1), device=CPU, dtype=torch.float32)
    layers = [layer for group in module.layers.values() for layer in group]
    assert [layer.dropout1.address for layer in layers] == [hash64(index, "attention.residual") for index in range(6)]
    assert [layers[at].attention.dropout.address for at in (2, 5)] == [hash64(index, "attention") for index in (2, 5)]


def test_every_layer_of_a_group_is_balanced_and_counts_its_tokens() -> None:
    router = Router(bias=True, bias_rate=0.01)
    plain, balanced = (run_of("hybrid", model__aux_loss=weight, model__router=router) for weight in (0.0, 0.5))
    batch = torch.randint(plain.model.vocab, (2, 3, 24), generator=torch.Generator().manual_seed(3))
    modules = [module_of(run) for run in (plain, balanced)]
    found = [gradients(module, *batch)[1] for module in modules]
    routers = [name for name in found[0] if name.endswith("router.weight")]
    assert len(routers) == 6
    assert all((found[0][name] - found[1][name]).abs().max() > 1e-4 for name in routers)
    assert sorted(modules[0].routing_counts) == [f"layers.{group}.{at}" for group in range(2) for at in range(3)]
    assert all(int(each[:-2].sum()) == 72 * balanced.model.top_k for each in modules[0].routing_counts.values())


@pytest.mark.parametrize("engine", ["papers", "native"])
@pytest.mark.parametrize("cp", [2, 4])
def test_context_ranks_exchange_what_the_rule_reads_and_returns(engine: str, cp: int) -> None:
    """Of each linear layer's key heads of 128 elements and value heads of 128, in bf16, forward and backward; and nothing hides it, though
    full attention gathers. In a step of two micro-batches of one sequence."""
    words = ["cluster.nodes=1", "parallel.ep=1", f"parallel.cp={cp}", "train.seq=8192", "train.microbatch=1", "parallel.recompute=none"]
    plan = make_plan(load_recipe("qwen3_next_80b", [*words, f"engine={engine}", f"train.batch={2 * 8 // cp}", "model.layers=8"]))
    sent = [each for each in plan.traffic if (each.axis, each.verb) == ("cp", "all_to_all")]
    read, returned = 2 * 8192 // cp * (2 * 2048 + 4096 + 2 * 32), 2 * 8192 // cp * 4096
    assert {each.payload: each.count for each in sent} == {read: 6 * 2 * 2, returned: 6 * 2 * 2}
    assert all(each.exposed is not None and each.seconds and each.exposed <= each.seconds for each in sent)
    assert any((each.axis, each.verb) == ("cp", "all_gather") for each in plan.traffic)


def test_nothing_hides_an_exchange_of_heads() -> None:
    """Where parallel.overlap.context hides what full attention gathers."""
    words = ["cluster.nodes=1", "parallel.ep=1", "parallel.cp=8", "train.seq=8192", "train.microbatch=1", "train.batch=1"]
    words += ["parallel.recompute=none", "model.layers=4", "engine=papers", "cluster.device.dispatch=0", "cluster.device.launch=0"]
    run = load_recipe("qwen3_next_80b", words)
    overlap, wait = (make_plan(load_recipe("qwen3_next_80b", [*words, f"parallel.overlap.context={each}"])) for each in ("true", "false"))
    assert run.parallel.cp_comm == "all_gather"
    exposed = [sum(each.exposed or 0 for each in plan.traffic if each.axis == "cp") for plan in (overlap, wait)]
    gathers, exchanges = (
        sum(each.seconds or 0 for each in wait.traffic if each.axis == "cp" and (each.verb == "all_to_all") == exchanged)
        for exchanged in (False, True)
    )
    assert exchanges > gathers > 0
    assert exposed[1] == pytest.approx(gathers + exchanges, rel=0.01)
    assert exchanges < exposed[0] < exposed[1]


def test_a_rank_goes_through_all_chunks_of_its_heads() -> None:
    """Context ranks divide the products of the rule, not the kernels that the host dispatches one chunk after another."""
    words = ["cluster.nodes=1", "parallel.ep=1", "train.microbatch=1", "train.batch=8", "train.seq=65536", "model.layers=4"]
    one, eight = (make_plan(load_recipe("qwen3_next_80b", [*words, f"parallel.cp={each}", "engine=native"])) for each in (1, 8))
    assert one.time is not None
    assert eight.time is not None
    assert eight.time.compute > 4 * one.time.compute  # of 8 sequences instead of one, one after another
    table = op_table(load_recipe("qwen3_next_80b", words))
    assert {op.kernels for op in table.layer if op.name == "attention.delta"} == {ops.RULE_KERNELS + ops.CHUNK_KERNELS * 65_536 // CHUNK}


def test_a_plan_names_layers_and_not_groups() -> None:
    for stages, expected in ((1, [(0, 48)]), (2, [(0, 24), (24, 48)])):
        plan = make_plan(load_recipe("qwen3_next_80b", [f"parallel.pp={stages}"]))
        assert plan.memory is not None
        assert [stage.layers for stage in plan.memory.stages] == expected
    costs = step_costs(load_recipe("qwen3_next_80b", ["parallel.pp=2"]))
    assert costs is not None
    assert [stage.parts for stage in make_timeline(costs).stages] == [((0, 24),), ((24, 48),)]


LENGTHS = (  # documents of a sequence, and the tokens of a chunk: they end inside chunks and with them, and are shorter than the taps
    ((7, 1, 2, 8, 3), 4),
    ((4, 8, 9), 4),
    ((1, 1, 1, 1), 4),
    ((3, 20), 64),
    ((64, 5, 60, 1), 64),
    ((5, 6), 1),
)


def starts_of(lengths: tuple[int, ...]) -> Any:
    """Where the document of each token starts, [S]."""
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    return torch.tensor([end - length for end, length in zip(ends, lengths, strict=True) for _ in range(length)], dtype=torch.int32)


@pytest.mark.parametrize(("lengths", "chunk"), LENGTHS)
def test_packed_documents_compute_what_each_does_alone(lengths: tuple[int, ...], chunk: int) -> None:
    """The second sequence holds the documents in reverse."""
    inputs = inputs_of(sum(lengths))
    rows = [lengths, lengths[::-1]]
    expected = []
    for row, each in enumerate(rows):
        parts, at = [], 0
        for length in each:
            own = {name: getattr(inputs, name) for name in NAMES}
            own |= {name: own[name][row : row + 1, at : at + length].expand(B, -1, -1) for name in NAMES[:5]}
            parts.append(token_by_token(DeltaInputs(**own))[:1])
            at += length
        expected.append(torch.cat(parts, 1))
    whole = torch.cat(expected)
    found = gated_delta(inputs, D, chunk, starts=torch.stack([starts_of(each) for each in rows]))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-13)
    grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs, ours = (torch.autograd.grad(each, tensors_of(inputs), grad, allow_unused=True) for each in (whole, found))
    for name, one, other in zip(NAMES, ours, theirs, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-12 * float(other.abs().max() + 1), msg=lambda text, name=name: f"{name}: {text}"
        )
