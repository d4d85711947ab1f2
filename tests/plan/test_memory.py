"""Planned memory of a stage, one mechanism a test, and what DeepSpeed and our modules were measured to hold."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.planned_memory import MODELS, ZERO_7B, first_stage, gpt, memory_of, run_of, stage_bytes, states
from distrain.trainer.models.families import op_table
from distrain.trainer.spec.run import Device, Model, Run

# One mechanism each, on a layer of 12 h^2 + 13 h parameters.
H, V = 1024, 50000
LAYER = 12 * H * H + 13 * H
SMALL = gpt(4, H, 16, vocab=V)


def parameters(run: Run) -> list[int]:
    return [stage.parameters for stage in memory_of(run).stages]


def test_tied_weights_are_held_once_on_one_stage_and_twice_on_two() -> None:
    (alone,) = parameters(run_of(SMALL, 1))
    assert alone == 4 * LAYER + V * H + 2048 * H + 2 * H
    assert parameters(run_of(SMALL, 2, parallel__pp=2)) == [2 * LAYER + V * H + 2048 * H, 2 * LAYER + V * H + 2 * H]


def test_untied_embedding_and_head_are_two_weights_everywhere() -> None:
    apart = gpt(4, H, 16, vocab=V, tied=False)
    assert sum(parameters(run_of(apart, 1))) == sum(parameters(run_of(apart, 2, parallel__pp=2))) == 4 * LAYER + 2 * V * H + 2050 * H


def test_a_vocabulary_is_padded_so_that_each_rank_has_a_multiple() -> None:
    """Megatron pads GPT-2's 50257 words to 51200 at tp 8: 128 x 8 goes into it 50 times."""
    rank = {"parallel__tp": 8, "model__vocab_multiple": 128}
    assert parameters(run_of(gpt(4, H, 16, vocab=50257), 8, **rank)) == parameters(run_of(gpt(4, H, 16, vocab=51200), 8, **rank))
    assert parameters(run_of(gpt(4, H, 16, vocab=50257), 1)) == [4 * LAYER + 50257 * H + 2050 * H]


def test_heads_and_feed_forwards_that_do_not_divide_are_padded() -> None:
    """6 heads on 4 ranks are 2 each, 10 rows of a feed-forward 3 each; biases of columns go with them."""
    model = gpt(1, 48, 6, vocab=1024, ffn=10)
    heads, rows, head_dim = 2, 3, 8
    columns = 3 * (48 + 1) * heads * head_dim + (48 + 1) * rows
    expected = columns + heads * head_dim * 48 + rows * 48 + (2 + 2 + 1 + 1) * 48 + (1024 // 4 + 2048 + 2) * 48
    assert parameters(run_of(model, 4, parallel__tp=4)) == [expected]


def test_key_and_value_heads_are_replicated_where_ranks_are_more() -> None:
    few, many = (Model(**MODELS[1] | {"kv_heads": heads}, layers=2, hidden=64, heads=8, vocab=1000) for heads in (2, 8))
    assert parameters(run_of(few, 8, parallel__tp=8)) == parameters(run_of(many, 8, parallel__tp=8))
    assert parameters(run_of(few, 2, parallel__tp=2)) < parameters(run_of(many, 2, parallel__tp=2))


def test_zero_3_holds_two_layers_gathered_and_the_gradients_of_one() -> None:
    small = gpt(4, H, 16, vocab=1000)
    whole, sharded = (first_stage(run_of(small, 8, parallel__zero=zero)) for zero in (0, 3))
    assert sharded.buffers - whole.buffers == (2 + 2 + 2) * LAYER


def test_zero_1_and_2_hold_a_bucket_of_gradients() -> None:
    for zero in (1, 2):
        held = first_stage(run_of(SMALL, 8, parallel__zero=zero, parallel__bucket=1_000_000))
        assert held.buffers - first_stage(run_of(SMALL, 8)).buffers == 2 * 1_000_000


def test_native_holds_two_buckets_of_gradients_at_zero_2_and_none_at_zero_1() -> None:
    """In bf16, beside what passes hold: one that is filled, and one whose sum is under way."""
    for zero, buckets in ((1, 0), (2, 2)):
        words = ("engine=native", "model.layers=8", f"parallel.zero={zero}")
        small, large = (memory_of(load_recipe("llama3_8b_1node", (*words, f"parallel.bucket={size}"))) for size in (10_000_000, 20_000_000))
        assert large.stages[0].bytes.temporary - small.stages[0].bytes.temporary == buckets * 2 * 10_000_000


def test_zero_over_one_rank_changes_nothing() -> None:
    assert [first_stage(run_of(SMALL, 1, parallel__zero=zero)) for zero in range(4)] == [first_stage(run_of(SMALL, 1))] * 4


def test_a_hybrid_shard_divides_by_its_ranks_alone() -> None:
    shared = states(first_stage(run_of(ZERO_7B, 64, parallel__zero=3, parallel__shard=8)))
    assert shared == 16 * 7.5e9 / 8


def test_experts_are_divided_among_expert_ranks_and_sharded_over_the_others() -> None:
    model = Model(family="moe", layers=1, hidden=64, heads=8, vocab=1024, ffn=128, experts=8, top_k=2, positions="rope")
    experts = 8 * 3 * 64 * 128
    whole, split = (memory_of(run_of(model, 8, parallel__ep=ep)).stages[0] for ep in (1, 4))
    assert whole.parameters - split.parameters == experts - experts // 4
    rest = whole.parameters - experts
    assert states(split.bytes) == 16 * (rest + experts // 4)
    sharded = first_stage(run_of(model, 8, parallel__ep=4, parallel__zero=3))
    assert states(sharded) == 16 * (rest + experts) // 8


def test_an_offloaded_optimizer_and_offloaded_weights_are_not_on_the_device() -> None:
    here = first_stage(run_of(SMALL, 8, parallel__zero=3))
    optimizer = first_stage(run_of(SMALL, 8, parallel__zero=3, parallel__offload__optimizer=True))
    everything = first_stage(run_of(SMALL, 8, parallel__zero=3, parallel__offload__optimizer=True, parallel__offload__parameters=True))
    assert (optimizer.weights, optimizer.gradients, optimizer.optimizer) == (here.weights, here.gradients, 0)
    assert (everything.weights, everything.gradients, everything.optimizer) == (0, here.gradients, 0)


OF_SEPARATE_KERNELS = ("conf=llama3_8b_1node", "train.attention=math", "train.seq=1024")
OF_A_FUSED_ONE = ("conf=llama3_8b_1node", "train.precision=fp32", "train.seq=1024", "model.kv_heads=32", "model.layers=8")


@pytest.mark.parametrize(
    ("words", "masks"),
    [
        ((*OF_SEPARATE_KERNELS, "parallel.recompute=none"), 0),  # softmax's result is enough for backward
        ((*OF_SEPARATE_KERNELS, "parallel.recompute=selective"), 1),  # an argument of what runs again
        ((*OF_SEPARATE_KERNELS, "parallel.recompute=full"), 1),
        ((*OF_SEPARATE_KERNELS, "parallel.recompute=none", "parallel.cp=2"), 0.5),  # the rows of a rank's tokens, for its core's backward
        ((*OF_A_FUSED_ONE, "parallel.recompute=full"), 1),
        ((*OF_A_FUSED_ONE, "parallel.recompute=full", "train.compile=true"), 1),
        ((*OF_A_FUSED_ONE, "parallel.recompute=selective", "train.compile=true"), 1),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_the_mask_of_documents_is_kept_once_by_what_reads_it_again(words: tuple[str, ...], masks: float) -> None:
    conf, *rest = words
    common = [*rest, "engine=zero", "parallel.zero=1", "train.microbatch=1", "data=text", "data.path=x"]
    apart, whole = (
        memory_of(load_recipe(conf.removeprefix("conf="), [*common, f"data.documents={each}"])).stages[0].bytes.activations
        for each in ("true", "false")
    )
    assert apart - whole == masks * 1024**2 * (4 if "train.precision=fp32" in words else 2)


def test_logits_take_two_bytes_and_their_softmax_four() -> None:
    held = first_stage(run_of(SMALL, 2, parallel__tp=2, train__microbatch=2, train__batch=2))
    assert held.logits == 2048 * 2 * (V // 2) * (2 + 4)
    assert (
        first_stage(run_of(SMALL, 2, parallel__tp=2, train__microbatch=2, train__batch=2, train__loss_chunks=4)).logits == held.logits / 4
    )


def test_gpipe_keeps_every_micro_batchs_logits_on_the_last_stage() -> None:
    stages = {
        name: memory_of(run_of(SMALL, 2, parallel__pp=2, parallel__schedule=name, train__batch=6)).stages for name in ("gpipe", "1f1b")
    }
    assert stages["gpipe"][1].bytes.logits == 6 * stages["1f1b"][1].bytes.logits == 6 * 2048 * V * 6
    assert stages["gpipe"][0].bytes.logits == 0


def test_a_folded_pipeline_has_both_ends_on_its_first_stage() -> None:
    """Stages 0 and 1 of 2 hold layers 0 and 3, 1 and 2; a tied weight is one there, and the logits of one micro-batch at once."""
    first, last = memory_of(run_of(SMALL, 2, parallel__pp=2, parallel__schedule="dualpipev", train__batch=4)).stages
    assert (first.layers, first.back, last.layers, last.back) == ((0, 1), (3, 4), (1, 2), (2, 3))
    assert (first.parameters, last.parameters) == (2 * LAYER + V * H + 2048 * H + 2 * H, 2 * LAYER)
    assert (first.in_flight, last.in_flight) == (2.5, 2.5)
    assert (first.bytes.logits, last.bytes.logits) == (2048 * V * 6, 0)


def test_schedules_without_a_flush_keep_older_weights() -> None:
    run = run_of(SMALL, 4, parallel__pp=4)
    once, stashed, twice = (stage_bytes(run, "parallel.schedule", name) for name in ("1f1b", "pipedream", "pipedream_2bw"))
    assert [held.weights for held in stashed] == [(4 - stage) * held.weights for stage, held in enumerate(once)]
    assert [held.weights for held in twice] == [2 * held.weights for held in once]


def test_context_parallelism_splits_saved_activations() -> None:
    whole, split = (first_stage(run_of(SMALL, 8, parallel__cp=cp, train__attention="flash")) for cp in (1, 8))
    assert split.activations * 8 == whole.activations


def test_the_drivers_memory_is_overhead() -> None:
    assert first_stage(run_of(SMALL, 1)).overhead == 700_000_000


# The memory of DeepSpeed and our modules on a CPU, as counted on live tensors.
CPU = Device(name="cpu", memory=1e12, kind="cpu")
TINY = gpt(4, 64, 4, vocab=250, dropout=0.0)


def cpu(ranks: int, **changes: Any) -> Run:
    keys: dict[str, Any] = {
        "engine": "auto",
        "cluster__device": CPU,
        "train__precision": "fp32",
        "train__seq": 32,
        "train__batch": 8,
        "train__microbatch": 1,
    }
    return run_of(TINY, ranks, **keys | changes)


@pytest.mark.parametrize("keys", [{}, {"parallel__tp": 2}, {"parallel__pp": 2}, {"parallel__tp": 2, "parallel__pp": 2}])
@pytest.mark.parametrize("zero", [0, 1])
def test_deepspeed_holds_a_stages_own_parameters(keys: dict[str, Any], zero: int) -> None:
    """Weights and gradients take 4 bytes a parameter, Adam's states 8; ZeRO-1 adds a master copy and shards it and the states over dp."""
    memory = memory_of(cpu(4, parallel__zero=zero, **keys))
    assert memory.form == "torch"
    dp = 4 // (keys.get("parallel__tp", 1) * keys.get("parallel__pp", 1))
    for stage in memory.stages:
        held, each = stage.bytes, stage.parameters
        assert held.gradients == 4 * each
        assert held.weights == pytest.approx(4 * each, abs=16 * dp if zero else 0)  # flat tensors are padded
        assert held.optimizer == pytest.approx(12 * each / dp if zero else 8 * each, abs=48 * zero)


def test_a_pipelines_gradients_are_whole_until_the_last_backward() -> None:
    alone, first, _ = (
        stage.bytes.gradients / stage.parameters
        for keys in ({"train__batch": 4}, {"parallel__pp": 2, "train__batch": 2})
        for stage in memory_of(cpu(4, parallel__zero=1, **keys)).stages
    )
    assert alone < 4 == first


def test_rotary_angles_of_the_whole_sequence_are_saved_once_a_stage() -> None:
    """head_dim float32 a token and micro-batch in flight, and once for each of two parts where the pipeline is folded."""
    each = 32 * 16 * 4
    keys: dict[str, Any] = {"parallel__tp": 2, "parallel__sequence": True, "parallel__pp": 2}
    for schedule, flights, parts in (("1f1b", (2, 1), 1), ("dualpipev", (2.5, 2.5), 2)):
        with_angles, without = (
            [stage.bytes.activations for stage in memory_of(cpu(4, **keys, parallel__schedule=schedule, model__positions=word)).stages]
            for word in ("rope", "none")
        )
        assert [one - other for one, other in zip(with_angles, without, strict=True)] == [parts * each * held for held in flights]


HALF: dict[str, Any] = {"cluster__device__peak": {"bf16": 1e14, "fp32": 1e13}}  # compute capability 8 or later


@pytest.mark.parametrize(
    ("kind", "changes", "has_mask"),
    [
        ("cpu", {}, False),
        ("cpu", {"train__attention": "math"}, False),  # which saves scores
        ("cuda", HALF, False),
        ("cuda", HALF | {"model__window": 8}, False),
        ("cuda", HALF | {"model__head_dim": 264}, True),
        ("cuda", {}, True),
    ],
)
def test_documents_save_a_mask_where_no_kernel_takes_their_bounds(
    kind: Literal["cpu", "cuda"], changes: dict[str, Any], has_mask: bool
) -> None:
    """The mask [B, S, S] is saved once for all layers; CUDA's fused kernel that takes one takes no grouped heads. With bounds the blocks of
    a window save nothing either."""
    model = Model(
        family="llama", layers=3, hidden=64, heads=8, kv_heads=2, vocab=250, ffn=128, norm="rmsnorm", act="swiglu", positions="rope"
    )
    keys: dict[str, Any] = {"engine": "auto", "cluster__device": replace(CPU, kind=kind), "train__precision": "bf16", "train__seq": 32}
    keys |= {"train__attention": "flash", "train__microbatch": 2, "train__batch": 2, **changes}
    plain, apart = (first_stage(run_of(model, 1, **keys, data__documents=each)).activations for each in (False, True))
    if "model__window" in changes:
        plain = first_stage(run_of(model, 1, **keys | {"model__window": None})).activations
    copies = 3 * 2 * (8 - 2) * keys.get("model__head_dim", 8) * 2 * 32 * 2
    assert apart - plain == (2 * 32 * 32 * 2 + copies) * has_mask


def test_a_gpu_that_takes_bounds_computes_of_a_window_what_its_queries_see() -> None:
    """Half of what counts, as in a causal layer without a window; a CPU computes blocks of two windows."""
    model = Model(**MODELS[1] | {"kv_heads": 2}, layers=2, hidden=64, heads=8, vocab=1000, window=8)
    found = {}
    for kind in ("cpu", "cuda"):
        keys: dict[str, Any] = {"cluster__device": replace(CPU, kind=kind), "train__precision": "bf16", "train__attention": "flash"}
        run = run_of(model, 1, **keys, **HALF, train__seq=32, data__documents=True)
        (core,) = (each.product for each in op_table(run).layer if each.core)
        assert core is not None
        found[kind] = core.computed / core.counted
    assert found["cuda"] == 0.5 < found["cpu"]


def test_a_head_saves_one_float32_a_token_of_the_whole_sequence_and_its_logits() -> None:
    """It also saves the inputs of the last norm and of the head, and the norm's mean and deviation."""
    for tp, sequence in ((1, False), (2, False), (2, True)):
        stages = memory_of(cpu(4, parallel__tp=tp, parallel__pp=2, parallel__sequence=sequence)).stages
        kept = stages[1].bytes.activations - (stages[0].bytes.activations - 2 * 32 * 8) / 2
        run = 32 // tp if sequence else 32
        assert kept == 32 * 4 + run * (2 * 64 * 4 + 2 * 4)
        assert stages[1].bytes.logits == 32 * 250 // tp * 4


def test_a_pipeline_engine_holds_input_and_output_of_each_micro_batch_in_flight() -> None:
    """A stream of 32 x 64 float32; of each in flight one received and one sent on, and a buffer for each way; a bucket is whole."""
    stream = 32 * 64 * 4
    stages = memory_of(cpu(4, parallel__pp=4, parallel__zero=1)).stages
    streams = [stage.bytes.buffers / stream - 4 * stage.parameters / stream for stage in stages]
    assert streams == pytest.approx([4 + 1, 2 * 3 + 2, 2 * 2 + 2, 1 + 1])
