"""Planned messages of each axis against the papers' volumes."""

from typing import Any

import pytest

from distrain.tests.fakes.planned_messages import MOE, B, D, H, S, V, bytes_of, messages, of_a_layer, plan_of, run_of
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.traffic import rank_traffic
from distrain.trainer.spec.run import Device, Run


@pytest.mark.parametrize("t", [2, 4, 8])
def test_a_tensor_parallel_layer_sends_8bsh_values(t: int) -> None:
    """Four all-reduces: 8bsh(t - 1)/t (arXiv:2104.04473 section 3.2), at 2 bytes; two more of them where forward runs again."""
    reduced = 2 * (t - 1) * B * S * H * 2 // t
    assert of_a_layer("tp", parallel__tp=t) == 4 * reduced == 8 * B * S * H * (t - 1) // t * 2
    assert of_a_layer("tp", parallel__tp=t, parallel__recompute="full", engine="papers") == 6 * reduced


@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallelism_sends_as_much_and_gathers_each_column_layers_input_again(t: int) -> None:
    """arXiv:2205.05198 section 4.2.2: the volume is the same, plus gathers of the two inputs of which a rank saves only its shard."""
    half = (t - 1) * B * S * H * 2 // t
    assert of_a_layer("tp", parallel__tp=t, parallel__sequence=True) == (8 + 2) * half
    assert of_a_layer("tp", parallel__tp=t, parallel__sequence=True, parallel__recompute="full", engine="papers") == (8 + 2 + 4) * half


def test_sequence_parallelism_sums_gradients_of_replicated_weights_once_a_step() -> None:
    """arXiv:2205.05198 leaves them out; norms and biases of rows of a layer are 6h, the last norm 2h, the positions sh."""
    plan = plan_of(parallel__tp=8, parallel__sequence=True, micros=3)
    (added,) = (each for each in messages(plan, "tp", "all_reduce") if each.count == 1)
    assert added.payload == (4 * 6 + 2 + S) * H * 2


REPLICATED = (4 * 6 + 2 + S) * H  # elements that the tensor axis does not split


def replicated_bytes(run: Run, rank: int) -> int:
    """Bytes of a rank's message of once a step over the tensor axis; 0 where it sends none."""
    return sum(each.payload for each in rank_traffic(run, rank) if (each.axis, each.verb, each.count) == ("tp", "all_reduce", 1))


# fmt: off
ZEROS = pytest.mark.parametrize(("zero", "precision", "gradients", "width"), [
    (0, "fp32", "auto", 4),
    (0, "bf16", "auto", 2),
    (1, "fp32", "auto", 4),
    (1, "bf16", "fp32", 4),
    (2, "bf16", "fp32", 4),
    (3, "bf16", "auto", 2),
])
# fmt: on


@ZEROS
def test_a_rank_sums_the_replicated_weights_gradients_that_it_steps(zero: int, precision: str, gradients: str, width: int) -> None:
    """Each rank all of them at ZeRO 0 in float32, and where bf16 adds up in float32 at stage 1; else each of 4 ranks its part."""
    keys: dict[str, Any] = {"parallel__tp": 2, "parallel__sequence": True, "parallel__zero": zero, "train__gradients": gradients}
    run = run_of(**keys, train__precision=precision, cluster__device__peak={"bf16": 1e14, "fp32": 1e13})
    sizes = [replicated_bytes(run, rank) for rank in range(8)]
    assert sizes[::2] == sizes[1::2]
    whole = (zero, precision) == (0, "fp32") or (zero, gradients) == (1, "fp32")
    assert sum(sizes[::2]) == (4 if whole else 1) * REPLICATED * width
    assert (len(set(sizes)) == 1) == (whole or zero == 3)
    assert max(sizes) in [each.payload for each in make_plan(run).traffic]


def test_pipeline_stages_sum_the_gradients_of_all_replicated_weights() -> None:
    run = run_of(parallel__tp=2, parallel__pp=2, parallel__sequence=True, parallel__zero=1, micros=2)
    first, last = (2 * 6 + S) * H * 2, (2 * 6 + 2) * H * 2
    assert [replicated_bytes(run, rank) for rank in range(8)] == [first] * 4 + [last] * 4


@pytest.mark.parametrize("keys", [{}, {"parallel__zero": 3}, {"parallel__pp": 2}])
@pytest.mark.parametrize(("kv_heads", "tp", "copies"), [(1, 2, 2), (2, 4, 2), (1, 4, 4), (2, 2, 1), (3, 4, 1)])
def test_ranks_that_share_key_and_value_heads_sum_their_gradients(kv_heads: int, tp: int, copies: int, keys: dict[str, Any]) -> None:
    """Once a step, sequence parallel or not: h + 1 elements for each of a head's dims, of keys and of values. ZeRO shares them out."""
    heads = 6 if kv_heads == 3 else 8
    run = run_of(parallel__tp=tp, model__heads=heads, model__head_dim=64, model__kv_heads=kv_heads, micros=2, **keys)
    pp = run.parallel.pp
    found = [each for rank in range(0, 8 // pp, tp) for each in rank_traffic(run, rank) if each.axis == "copies"]
    if copies == 1:
        assert found == []
        return
    assert {(each.verb, each.count) for each in found} == {("all_reduce", 1)}
    assert all(each.sent == 2 * -(-each.payload * (copies - 1) // copies) for each in found)
    whole = 4 // pp * 2 * (H + 1) * 64 * 2
    assert sum(each.payload for each in found) == (whole if pp == 1 else whole * (8 // pp // tp))


def test_a_plans_traffic_is_that_of_the_rank_that_sends_most() -> None:
    run = run_of(parallel__tp=2, parallel__sequence=True, parallel__zero=1)
    ranks = [rank_traffic(run, rank) for rank in range(8)]
    assert make_plan(run).traffic == max(ranks, key=lambda rows: sum(each.sent for each in rows))


def test_torchs_checkpoint_stops_before_a_layers_last_sum_unless_dropout_follows_it() -> None:
    """Our own modules, on a CPU: five all-reduces a layer, six with dropout; gathers and scatters alike."""
    cpu = Device(name="cpu", memory=1e18, bandwidth=2e12, peak={"bf16": 312e12}, kind="cpu")
    keys: dict[str, Any] = {"cluster__device": cpu, "parallel__tp": 4, "parallel__recompute": "full"}
    half = 3 * B * S * H * 2 // 4
    assert of_a_layer("tp", **keys) == 5 * 2 * half
    assert of_a_layer("tp", **keys, model__dropout=0.1) == 6 * 2 * half
    assert of_a_layer("tp", **keys, parallel__sequence=True) == (8 + 2 + 3) * half
    assert of_a_layer("tp", **keys, parallel__sequence=True, model__dropout=0.1) == (8 + 2 + 4) * half


def test_embedding_and_head_are_summed_over_the_vocabularys_shards() -> None:
    """The embedding's sum forward, the head's input gradient backward, and three numbers a token for the loss."""
    plan = plan_of(parallel__tp=8)
    whole = [each for each in messages(plan, "tp", "all_reduce") if each.payload == B * S * H * 2]
    assert sum(each.count for each in whole) == 4 * 4 + 2
    assert [each.count for each in messages(plan, "tp") if each.payload == B * S * 4] == [3]


def test_selective_recomputation_sends_nothing_again() -> None:
    assert of_a_layer("tp", parallel__tp=8, parallel__recompute="selective", train__attention="math") == of_a_layer("tp", parallel__tp=8)


# Bytes that a rank sends on the data axis, in (d - 1)/d of the parameters' bytes, for m micro-batches a step.
# Papers: arXiv:1910.02054 section 7. DeepSpeed 0.19 all-reduces where the papers reduce-scatter, from stage 2 on at every micro-batch;
# at stage 3, backward reuses the weights that forward gathered. In half precision its stage 0 is stage 1.
# fmt: off
DEEPSPEED = [(0, 1, 3), (0, 4, 3), (1, 1, 3), (1, 4, 3), (2, 1, 3), (2, 4, 2 * 4 + 1), (3, 1, 2), (3, 4, 2 * 4)]
PAPERS =    [(0, 1, 2), (0, 4, 2), (1, 1, 2), (1, 4, 2), (2, 1, 2), (2, 4, 1 * 4 + 1), (3, 1, 3), (3, 4, 3 * 4)]
# fmt: on


@pytest.mark.parametrize(("zero", "micros", "times"), DEEPSPEED)
def test_traffic_of_a_deepspeed_engine_is_deepspeeds(zero: int, micros: int, times: int) -> None:
    plan = plan_of(parallel__zero=zero, micros=micros)
    assert plan.engine == "zero"
    assert plan.model is not None
    assert bytes_of(plan, "dp") == times * plan.model.parameters * 2 * (D - 1) // D


@pytest.mark.parametrize(("zero", "micros", "times"), PAPERS)
def test_traffic_without_an_engine_is_the_papers(zero: int, micros: int, times: int) -> None:
    plan = plan_of(parallel__zero=zero, micros=micros, train__precision="fp8", parallel__bucket=10**9, engine="papers")
    assert plan.engine is None
    assert plan.model is not None
    weights, gradients = (3, 2)  # bytes of a parameter's bf16 and fp8 copies, and of its gradient
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * micros}[zero]
    assert bytes_of(plan, "dp") == (gathers * weights + (times - gathers) * gradients) * plan.model.parameters * (D - 1) // D


def test_traffic_of_an_interleaved_pipeline_is_the_papers() -> None:
    plan = plan_of(ranks=16, parallel__pp=2, parallel__schedule="interleaved", parallel__chunks=2, parallel__zero=1, micros=2)
    assert plan.memory is not None
    assert plan.engine == "native"
    assert bytes_of(plan, "dp") in [2 * stage.parameters * 2 * (D - 1) // D for stage in plan.memory.stages]


def test_float32_gradients_are_sent_in_float32_except_by_deepspeed() -> None:
    """It casts them to the model's own type, as was counted."""
    ours, papers = plan_of(train__gradients="fp32"), plan_of(train__gradients="fp32", parallel__reduce="halving")
    assert ours.model is not None
    assert papers.engine is None
    assert bytes_of(ours, "dp") == 3 * ours.model.parameters * 2 * (D - 1) // D
    assert bytes_of(papers, "dp") == 2 * ours.model.parameters * 4 * (D - 1) // D


def test_gradients_travel_in_buckets() -> None:
    plan = plan_of(parallel__bucket=1_000_000)
    assert plan.model is not None
    (reduced,) = messages(plan, "dp", "all_reduce")
    assert reduced.count == -(-plan.model.parameters // 1_000_000)
    assert reduced.payload * reduced.count == pytest.approx(2 * plan.model.parameters, abs=reduced.count)


def test_a_hybrid_shard_gathers_inside_nodes_and_sums_across_them() -> None:
    """Shards of 8 ranks in a node, 4 nodes: 3 Psi inside for each micro-batch, and an eighth of the gradients between."""
    plan = plan_of(ranks=32, parallel__zero=3, parallel__shard=8, micros=2)
    assert plan.model is not None
    (far,) = messages(plan, "dp", "all_reduce")
    near = [each for each in messages(plan, "dp") if each is not far]
    assert {each.link for each in near} == {"inside"}
    assert sum(each.sent for each in near) == 2 * 3 * plan.model.parameters * 2 * 7 // 8
    assert (far.link, far.sent) == ("between", 2 * plan.model.parameters * 2 // 8 * 3 // 4)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_tokens_travel_to_their_experts_and_back_twice(ep: int) -> None:
    """Two all-to-alls forward and two backward, each of top_k copies of a token (arXiv:2006.16668 section 3.2)."""
    (exchanged,) = messages(plan_of(MOE, parallel__ep=ep), "ep")
    assert (exchanged.verb, exchanged.count, exchanged.payload) == ("all_to_all", 4, B * S * H * 2 * 2)
    assert exchanged.sent == 4 * B * S * H * 2 * 2 * (ep - 1) // ep


def test_expert_gradients_are_summed_only_over_their_copies() -> None:
    experts = 16 * 3 * H * 1024
    whole, split = (plan_of(MOE, parallel__ep=ep, engine="papers") for ep in (1, 8))
    assert whole.model is not None
    assert bytes_of(whole, "dp") == 2 * whole.model.parameters * 2 * 7 // 8
    assert bytes_of(split, "dp") == 2 * (whole.model.parameters - experts) * 2 * 7 // 8
    both = plan_of(MOE, ranks=16, parallel__ep=8, engine="papers")
    assert bytes_of(both, "dp") == 2 * (whole.model.parameters - experts) * 2 * 15 // 16 + 2 * experts // 8 * 2 // 2


@pytest.mark.parametrize(("kv_heads", "cp"), [(8, 2), (8, 8), (2, 4)])
def test_context_parallelism_gathers_keys_and_values(kv_heads: int, cp: int) -> None:
    """(cp - 1)/cp 2 s b h_kv forward, again backward, and their gradients scattered (arXiv:2407.21783 section 3.3.2)."""
    once = 2 * B * S * kv_heads * (H // 8) * 2 * (cp - 1) // cp
    assert of_a_layer("cp", parallel__cp=cp, model__kv_heads=kv_heads) == 3 * once
    assert of_a_layer("cp", parallel__cp=cp, model__kv_heads=kv_heads, parallel__recompute="full") == 4 * once


# The message between stages: arXiv:2104.04473 section 3.2; 1/t of it with scatter (section 4.1) or sequence parallelism.
@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({}, 2 * B * S * H),
        ({"train__precision": "fp32"}, 4 * B * S * H),
        ({"parallel__tp": 2}, 2 * B * S * H),
        ({"parallel__tp": 2, "parallel__scatter": True}, B * S * H),
        ({"parallel__tp": 2, "parallel__sequence": True}, B * S * H),
        ({"parallel__cp": 2}, B * S * H),
    ],
)
def test_a_stage_sends_2bsh_bytes(keys: dict[str, Any], size: int) -> None:
    (handed,) = messages(plan_of(parallel__pp=4, cluster__device__peak={"bf16": 1e14, "fp32": 1e13}, **keys), "pp")
    assert (handed.verb, handed.payload) == ("send", size)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2)])
def test_an_inner_stage_sends_activations_and_gradients_of_each_micro_batch_and_chunk(schedule: str, chunks: int) -> None:
    keys: dict[str, Any] = {"parallel__schedule": schedule, "parallel__chunks": chunks, "model__layers": 8}
    (handed,) = messages(plan_of(ranks=4, parallel__pp=4, micros=4, **keys), "pp")
    assert handed.count == 4 * 2 * chunks
    assert handed.sent == handed.count * handed.payload


def test_a_folded_pipeline_turns_around_on_its_last_stage_and_ends_on_its_first() -> None:
    keys: dict[str, Any] = {"parallel__schedule": "dualpipev", "model__layers": 8, "model__tied": True}
    run = run_of(ranks=4, parallel__pp=4, micros=8, **keys)
    sends = [[(each.verb, each.count) for each in rank_traffic(run, stage) if each.axis == "pp"] for stage in range(4)]
    assert sends == [[("send", 8 * 2)], [("send", 8 * 4)], [("send", 8 * 4)], [("send", 8 * 2)]]


def test_the_first_and_the_last_stage_sum_a_tied_weights_gradient() -> None:
    plan = plan_of(ranks=2, parallel__pp=2, model__tied=True, micros=2)
    (tied,) = messages(plan, "pp", "all_reduce")
    assert (tied.payload, tied.count, tied.sent) == (V * H * 2, 1, V * H * 2)
    assert messages(plan, "pp", "send")[0].count == 2
