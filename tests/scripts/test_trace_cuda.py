"""What our modules keep for backward and hold at most on a GPU, traced on fake CUDA tensors, is what the plan counts for them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.scripts.trace_cuda import trace_process
from distrain.scripts.trace_cuda.device_guard import NoGuard, device_guard
from distrain.scripts.trace_cuda.kernel_checks import CHECKS
from distrain.scripts.trace_cuda.processes import TraceJob, trace
from distrain.scripts.trace_cuda.trace_process import planned_bytes
from distrain.tests.fakes.deadline import LONG_DEADLINE
from distrain.trainer.models.families import op_table
from distrain.trainer.models.ops.op_table import OpTable
from distrain.trainer.plan.costs import block_temporary_bytes, cost_context
from distrain.trainer.plan.deepspeed.flat_tensors import FlatElements
from distrain.trainer.plan.deepspeed.memory import FrozenElements, ZeroSetting, step_bytes, step_work, zero_bytes
from distrain.trainer.plan.layout_cost import in_flight
from distrain.trainer.plan.native.optimizer_step import step_moves
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import with_changes

GPU = ("device=h200", "cluster.nodes=1", "data=synthetic", "train.microbatch=1")
MODELS = {
    "gpt": ("gpt2_124m", "model.layers=2", "train.seq=512"),
    "llama": (
        "llama3_8b",
        "model.layers=4",  # of two, what the plan leaves out of a peak is more than the tolerance
        "train.seq=2048",
        "model.hidden=1024",
        "model.heads=8",
        "model.kv_heads=4",
        "model.ffn=3584",
        "model.vocab=8192",
    ),
    "moe": (
        "mixtral_8x7b",
        "model.layers=2",
        "train.seq=1024",
        "model.hidden=512",
        "model.heads=8",
        "model.kv_heads=4",
        "model.ffn=1792",
        "model.vocab=8192",
    ),
}
LAYOUTS = {
    "one rank": ("cluster.gpus=1", "parallel.dp=1", "train.batch=2"),
    "tp": ("cluster.gpus=2", "parallel.dp=1", "parallel.tp=2", "parallel.sequence=false", "train.batch=2"),
    "sequence": ("cluster.gpus=4", "parallel.dp=1", "parallel.tp=4", "parallel.sequence=true", "train.batch=2"),
    "cp": ("cluster.gpus=2", "parallel.dp=1", "parallel.cp=2", "train.batch=2"),
    "pp": ("cluster.gpus=4", "parallel.dp=1", "parallel.pp=4", "train.batch=5", "model.layers=4"),  # a micro-batch more than are in flight
}
# fmt: off
EXCHANGE = (  # context ranks exchange tokens for the heads of a tensor rank
    "cluster.gpus=4", "parallel.dp=1", "parallel.tp=2", "parallel.sequence=true", "parallel.cp=2", "parallel.cp_comm=all_to_all",
    "train.batch=2",
)
PLAIN = (
    "parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.ep=1", "parallel.zero=0", "parallel.sequence=false", "parallel.chunks=1",
    "parallel.schedule=1f1b", "parallel.shard=all", "train.compile=false",
)
# fmt: on


def drawn_jobs(seed: int, count: int) -> list[TraceJob]:
    """Runs of every model three times and of every layout, with recomputation, attention, dropout and precision drawn by a seed."""
    random, jobs = Random(seed), []
    for number in range(count):
        recipe, *sizes = list(MODELS.values())[number % len(MODELS)]
        name = list(LAYOUTS)[number % len(LAYOUTS)]
        layout = LAYOUTS[name]
        choices = (
            f"parallel.recompute={random.choice(('none', 'selective', 'full'))}",
            f"train.attention={random.choice(('flash', 'math'))}",
            f"model.dropout={random.choice((0, 0.1))}",
            f"train.precision={random.choice(('bf16', 'fp32') if recipe != 'mixtral_8x7b' else ('bf16',))}",  # its fp32 asks the host
        )
        jobs.append(TraceJob(recipe=recipe, words=(*GPU, *PLAIN, *sizes, *layout, *choices)))
    return jobs


def with_one_micro_batch(jobs: Iterable[TraceJob]) -> list[TraceJob]:
    """The same runs, of one micro-batch where what it keeps and holds is their claim: a second one takes as long again.

    Stages run as many as they need. Beside the little that layers hold which are computed again, what the plan leaves out of a peak is more
    than the tolerance, without the gradients of an earlier micro-batch.
    """
    needing = ("parallel.pp=4", "train.microbatch=2", "parallel.recompute=full")
    return [job if any(each in job.words for each in needing) else replace(job, words=(*job.words, "train.batch=1")) for job in jobs]


PREFERENCES = ("data=preferences", "data.path=a.jsonl", "data.tokenizer=bytes")
FINETUNE = (
    "cluster.gpus=1",
    "model.layers=2",
    "model.hidden=512",
    "model.heads=8",
    "model.kv_heads=2",
    "model.ffn=1024",
    "model.vocab=4096",
    "train.loss_chunks=4",
)
BF16 = ("parallel.recompute=none", "train.attention=flash", "train.precision=bf16", "train.compile=true")
COMPILED = [  # a model, a layout, dropout
    TraceJob(recipe=MODELS[model][0], words=(*GPU, *PLAIN[:-1], *MODELS[model][1:], *LAYOUTS[layout], *BF16, f"model.dropout={dropout}"))
    for model, layout, dropout in (("llama", "tp", 0),)
]
# fmt: off
DROPOUT_AGAIN = (  # masks of the hidden states, drawn again, are what it holds most
    "model.hidden=1024", "model.heads=8", "model.vocab=1024", "model.dropout=0.1", "train.seq=512", "train.attention=math",
    "train.precision=bf16", "parallel.recompute=full",
)
# fmt: on
# fmt: off
LATENT = (
    "model=deepseek_v2_lite", "model.layers=2", "train.seq=1024", "model.hidden=512", "model.heads=8", "model.kv_lora_rank=128",
    "model.experts=8", "model.top_k=2", "model.expert_ffn=1024", "model.vocab=8192", "train.precision=bf16",
)
# fmt: on
LATENT_JOBS = [
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *LATENT, *LAYOUTS[layout], *words))
    for layout, words in (
        ("one rank", ("model.q_lora_rank=192", "parallel.recompute=selective")),
        ("cp", ("parallel.recompute=none",)),
    )
]
# fmt: off
GLM = (  # a dense layer and one with experts, of whose heads a half turns
    "model=glm45_355b", "model.layers=2", "model.dense_layers=1", "train.seq=1024", "model.hidden=512", "model.heads=8", "model.kv_heads=4",
    "model.ffn=1792", "model.experts=8", "model.top_k=2", "model.expert_ffn=1024", "model.vocab=8192", "train.precision=bf16",
)
# fmt: on
GLM_JOBS = [
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *GLM, *LAYOUTS["sequence"], "parallel.recompute=none", "train.loss_chunks=4"))
]
# fmt: off
OLMO = (  # norms after each half, and of all heads together; a window in three of four layers, unscaled
    "model=olmo3_7b", "model.layers=4", "model.window=512", "train.seq=2048", "model.hidden=1024", "model.heads=8", "model.kv_heads=4",
    "model.head_dim=128", "model.ffn=3584", "model.vocab=8192", "train.precision=bf16",
)
# fmt: on
OLMO_JOBS = [
    TraceJob(recipe="llama3_8b", words=(*GPU, *PLAIN, *OLMO, *LAYOUTS[layout], "parallel.recompute=none")) for layout in ("sequence", "cp")
]
# fmt: off
GEMMA = (  # five of six layers have a window, which the sequence is longer than; norms on both sides
    "model=gemma3_27b", "model.layers=6", "train.seq=2048", "model.hidden=1024", "model.heads=8", "model.kv_heads=4", "model.ffn=3584",
    "model.vocab=8192", "model.window=512", "train.precision=bf16",
)
# fmt: on
GEMMA_JOBS = [
    TraceJob(recipe="llama3_8b", words=(*GPU, *PLAIN, *GEMMA, *LAYOUTS[layout], f"parallel.recompute={recompute}"))
    for layout, recompute in (("one rank", "none"), ("tp", "full"))
]
GEMMA_JOBS += [  # compiled layers add up the second norm's input again
    TraceJob(recipe="llama3_8b", words=(*GPU, *PLAIN[:-1], *GEMMA, *LAYOUTS["sequence"], "parallel.recompute=none", "train.compile=true"))
]
# fmt: off
GPT_OSS = (
    "model=gpt_oss_20b", "model.layers=4", "train.seq=1024", "model.hidden=512", "model.heads=8", "model.kv_heads=4", "model.experts=8",
    "model.top_k=2", "model.expert_ffn=1024", "model.vocab=8192", "train.precision=bf16",
)
SINKS = ("model.sinks=true", "model.window=512", "model.act=swiglu_clamped", "model.vocab=1024")
# fmt: on
SINK_JOBS = [
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *GPT_OSS, *LAYOUTS["sequence"], "parallel.recompute=none")),
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *GPT_OSS, *LAYOUTS["one rank"], "parallel.recompute=selective")),
    TraceJob(recipe=MODELS["llama"][0], words=(*GPU, *PLAIN, *MODELS["llama"][1:], *SINKS, *EXCHANGE, *BF16[:-1])),
]
# fmt: off
HYBRID = (  # a group: a layer with linear attention, of two value heads a key head, and a gated one
    "model=qwen3_next_80b", "model.layers=2", "model.full_attention_interval=2", "train.seq=512",
    "model.hidden=512", "model.heads=8", "model.kv_heads=2",
    "model.linear_num_key_heads=4", "model.linear_num_value_heads=8", "model.linear_key_head_dim=64", "model.linear_value_head_dim=64",
    "model.head_dim=64", "model.experts=8", "model.top_k=2", "model.expert_ffn=1024", "model.vocab=8192", "train.precision=bf16",
)
WHOLE_GROUP = (  # three layers with linear attention; of one alone with adapters, what the plan leaves out of a peak is 3 %
    "model.layers=4", "model.full_attention_interval=4", "train.seq=1024",
)
MOSTLY_LINEAR = (  # three of four layers; what the delta rule's backward holds for a moment is what they hold most
    "model.layers=4", "model.full_attention_interval=4",
    "model.experts=4", "model.expert_ffn=128", "model.vocab=1024", "model.linear_key_head_dim=128", "model.linear_value_head_dim=128",
    "model.linear_num_key_heads=8", "model.linear_num_value_heads=16", "train.seq=1000",
)
# fmt: on
HYBRID_JOBS = [
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *HYBRID, *LAYOUTS[layout], *words))
    for layout, words in (
        ("one rank", ("parallel.recompute=none",)),
        ("tp", ("parallel.recompute=full",)),
        ("cp", ("parallel.recompute=none", *MOSTLY_LINEAR, "data.documents=true", "train.attention=flash")),
    )
]
EXCHANGE_JOBS = [
    TraceJob(recipe="llama3_8b", words=(*GPU, *PLAIN, *GEMMA, *EXCHANGE, "parallel.recompute=none")),
]
APART = ("data.documents=true", "train.precision=bf16", "train.attention=flash", "model.dropout=0")
DOCUMENT_JOBS = [  # kept apart by the kernel, in each family: with windows, experts, latent attention
    TraceJob(recipe=MODELS[model][0], words=(*GPU, *PLAIN, *MODELS[model][1:], *layout, *APART, *words))
    for model, layout, words in (
        ("gpt", LAYOUTS["one rank"], ("train.compile=true",)),
        ("moe", LAYOUTS["pp"], ("parallel.recompute=full",)),
        ("llama", LAYOUTS["cp"], ("parallel.recompute=selective", "train.microbatch=2", "model.window=512")),
        ("llama", LAYOUTS["cp"], ("train.compile=true",)),  # outside their graphs
        ("llama", EXCHANGE, ("train.compile=true", "model.window=512")),
    )
]
DOCUMENT_JOBS += [
    TraceJob(recipe="llama3_8b", words=(*GPU, *PLAIN, *GEMMA, *LAYOUTS["one rank"], *APART, "parallel.recompute=none")),
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *LATENT, *LAYOUTS["sequence"], *APART, "parallel.recompute=none")),
]
FP8_JOBS = [
    TraceJob(recipe=MODELS[model][0], words=(*GPU, *PLAIN, *MODELS[model][1:], *LAYOUTS[layout], *BF16[:-1], *words, "train.precision=fp8"))
    for model, layout, words in (
        ("llama", "sequence", ()),
        ("gpt", "one rank", ("train.compile=true",)),
        ("moe", "tp", ("parallel.recompute=selective", "model.window=512", "model.layer_types=[sliding_attention,full_attention]")),
    )
]
FP8_JOBS += [  # of linear attention some products are in bf16
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *HYBRID, *LAYOUTS[layout], "model.dropout=0", *words, "train.precision=fp8"))
    for layout, words in (
        ("sequence", ("parallel.recompute=none",)),
        ("tp", ("parallel.recompute=selective",)),
    )
]
FURTHER_JOBS = (
    [  # modules that predict further tokens; of a large vocabulary gradients of the head wait for each other
        TraceJob(recipe=MODELS["llama"][0], words=(*GPU, *PLAIN, *MODELS["llama"][1:], *LAYOUTS[layout], *BF16[:-1], *words))
        for layout, words in (
            ("one rank", ("model.mtp.layers=1", "model.vocab=65536", "train.loss_chunks=8")),
            ("pp", ("model.mtp.layers=2", "model.vocab=65536", "model.tied=true")),
        )
    ]
    + [
        TraceJob(
            recipe="mixtral_8x7b",
            words=(*GPU, *PLAIN, *LATENT, *LAYOUTS["sequence"], "model.q_lora_rank=192", "parallel.recompute=full", "model.mtp.layers=1"),
        )
    ]
)
LORA = ("model.lora.rank=16", "train.precision=bf16", "model.dropout=0")
LORA_JOBS = [  # of experts: of all linear layers, or where no expert needs what it is sent
    TraceJob(recipe="mixtral_8x7b", words=(*GPU, *PLAIN, *sizes, *LAYOUTS[layout], *LORA, *words))
    for sizes, layout, words in (
        (MODELS["moe"][1:], "sequence", ("parallel.recompute=none",)),
        (GLM, "tp", ("parallel.recompute=none", "model.lora.targets=[query,value]", "train.batch=1")),
        (LATENT, "one rank", ("parallel.recompute=none",)),
        (HYBRID, "one rank", ("parallel.recompute=none",)),
        (HYBRID, "sequence", ("parallel.recompute=none", *WHOLE_GROUP, "model.lora.targets=[k_proj,o_proj,shared_expert_gate]")),
        (HYBRID, "cp", ("parallel.recompute=none", "parallel.cp_comm=all_to_all", "model.lora.targets=[q_proj,in_proj_qkvz]")),
    )
]
# fmt: off
MIXTURE_JOBS = [  # compiled, each layer one graph: a router in float32, experts of all tokens, what is computed again keeps no rows
    TraceJob(
        recipe="mixtral_8x7b", words=(*GPU, *PLAIN[:-1], *sizes, *LAYOUTS[layout], "train.precision=bf16", "train.compile=true", *words),
    )
    for sizes, layout, words in (
        (MODELS["moe"][1:], "one rank", ("parallel.recompute=none", "model.dropout=0.1")),  # masks but one are drawn again
        (MODELS["moe"][1:], "one rank", ("parallel.recompute=full", "model.dropout=0")),
        # what is gathered along the sequence is gathered again
        (LATENT, "sequence", ("parallel.recompute=none", "model.dropout=0", "model.q_lora_rank=192")),
        (HYBRID, "sequence", ("parallel.recompute=none", "model.dropout=0")),
    )
]
# fmt: on
ONE_MICRO_BATCH_JOBS = [  # so short that its gradients are most of what it leaves
    TraceJob(recipe=MODELS[model][0], words=(*GPU, *PLAIN, *MODELS[model][1:], *LAYOUTS[layout], "train.batch=1", "train.seq=64", *words))
    for model, layout, words in (
        ("gpt", "one rank", ("train.precision=fp32",)),
        ("llama", "sequence", ("train.precision=bf16", "parallel.recompute=none", "model.tied=true")),
        ("llama", "pp", ("train.precision=bf16", "parallel.recompute=none")),
    )
]
JOBS = [
    TraceJob(recipe="gpt2_124m_1gpu", words=("model.layers=3", "model.dropout=0.1")),
    TraceJob(recipe="gpt2_124m", words=(*GPU, *PLAIN, "model.layers=4", *LAYOUTS["tp"], *DROPOUT_AGAIN)),
    TraceJob(recipe="llama3_2_1b_1node", words=("model.layers=3", "train.loss_chunks=16")),  # of a large vocabulary, tied
    TraceJob(recipe="finetune_llama", words=FINETUNE),  # documents apart, a frozen head
    TraceJob(recipe="finetune_llama", words=(*FINETUNE, *PREFERENCES, "train.loss_chunks=4")),
    TraceJob(recipe="llama3_8b_finetune", words=(*PREFERENCES, "model.layers=2", "model.weights=null", *LAYOUTS["cp"], "engine=native")),
    *COMPILED,
    *ONE_MICRO_BATCH_JOBS,
    *with_one_micro_batch(
        (
            *LATENT_JOBS,
            *GLM_JOBS,
            *LORA_JOBS,
            *MIXTURE_JOBS,
            *OLMO_JOBS,
            *GEMMA_JOBS,
            *SINK_JOBS,
            *HYBRID_JOBS,
            *EXCHANGE_JOBS,
            *FP8_JOBS,
            *FURTHER_JOBS,
            *DOCUMENT_JOBS,
        )
    ),
    *drawn_jobs(14, 9),
]


@pytest.fixture(scope="module")
def all_answers() -> list[dict[str, Any]]:
    """What is traced and planned of JOBS, HOST_STEPS and HOST_ROWS, by one process; skips where there is no C++ compiler."""
    try:
        device_guard()
    except NoGuard as error:
        pytest.skip(str(error))
    return [answer for _, answer in trace([*JOBS, *HOST_STEPS, *HOST_ROWS])]


@pytest.fixture(scope="module")
def answers(all_answers: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return dict(enumerate(all_answers[: len(JOBS)]))


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_a_rank_keeps_and_holds_the_bytes_that_the_plan_counts(number: int, answers: Mapping[int, dict[str, Any]]) -> None:
    assert "error" not in answers[number], (JOBS[number], answers[number])
    for rank in answers[number]["ranks"]:
        assert rank["traced"]["kept"] == pytest.approx(rank["planned"]["kept"], rel=0.005), JOBS[number]
        tolerance = 0.02 if "model.dropout=0.1" in JOBS[number].words else 0.005
        if "train.compile=true" in JOBS[number].words or rank["planned"]["kept_compiled"] is not None:
            assert rank["traced"]["kept_compiled"] == pytest.approx(rank["planned"]["kept_compiled"], rel=tolerance), JOBS[number]
        assert rank["traced"]["peak"] == pytest.approx(rank["planned"]["peak"], rel=peak_tolerance(JOBS[number])), JOBS[number]


def test_traces_have_every_kernel_whose_tensors_are_checked(answers: Mapping[int, dict[str, Any]]) -> None:
    """But those that make the host wait. A kernel that a GPU would refuse is an error of the trace."""
    seen = {name for answer in answers.values() for rank in answer["ranks"] for name in rank["traced"]["checked"]}
    assert seen | {"_local_scalar_dense"} == set(CHECKS)


def peak_tolerance(job: TraceJob) -> float:
    """2 %; 3 % where norms of 1 + weight hold float32 tensors; 3.5 % where few small layers compute their scores again, beside which copies
    of queries and keys count."""
    if set(GEMMA) <= set(job.words):
        return 0.03
    if "parallel.recompute=selective" in job.words:
        return 0.035
    return 0.002 if set(DROPOUT_AGAIN) <= set(job.words) else 0.02


# fmt: off
# Layouts of which compiled layers take seconds to trace, and of which the jobs above trace the modules. What was traced of each on 29
# November 2026 with torch 2.13: bytes kept, held at most, of gradients, and kept where layers are compiled.
TRACED_BEFORE = [
    (
        TraceJob(
            recipe=recipe,
            words=(*GPU, *PLAIN[:-1], *sizes, *LAYOUTS.get(layout, EXCHANGE), "train.batch=1", "train.compile=true", *words),
        ),
        traced,
    )
    for recipe, sizes, layout, words, traced in (
        ("llama3_8b", MODELS["llama"][1:], "sequence", ("train.batch=2", *BF16),
         (99_706_976, 150_070_272, 36_718_592, 76_638_304)),
        ("llama3_8b", MODELS["llama"][1:], "cp", ("train.batch=2", *BF16),
         (197_828_608, 363_527_168, 146_819_072, 168_468_480)),
        ("llama3_8b", MODELS["llama"][1:], "exchange", ("model.vocab=1024", *BF16),
         (96_032_864, 103_379_968, 58_738_688, 72_964_192)),
        ("llama3_8b", (*MODELS["llama"][1:], *SINKS), "exchange", BF16,
         (81_352_704, 90_268_672, 58_740_736, 72_964_096)),
        ("llama3_8b", MODELS["llama"][1:], "sequence", (*BF16, "train.precision=fp8"),
         (94_464_128, 108_112_896, 36_718_592, 64_055_536)),
        ("llama3_8b", MODELS["llama"][1:], "sequence", (*APART, "parallel.recompute=none"),
         (99_706_880, 113_356_288, 36_718_592, 76_638_208)),
        ("mixtral_8x7b", MODELS["moe"][1:], "sequence", (*BF16[:1], "train.precision=bf16", "model.dropout=0.1"),
         (158_033_024, 197_500_416, 181_949_440, 124_253_248)),
        ("mixtral_8x7b", GLM, "tp", (*BF16[:1], "model.dropout=0"),
         (52_887_704, 58_139_648, 28_462_080, 50_008_184)),
        ("mixtral_8x7b", GLM, "sequence", (*BF16[:1], "model.dropout=0"),
         (26_092_696, 30_558_208, 14_239_744, 23_082_104)),
        ("mixtral_8x7b", LATENT, "one rank", (*BF16[:1], "model.dropout=0", "model.lora.rank=16"),
         (176_857_224, 177_943_040, 2_979_840, 146_067_560)),
        ("mixtral_8x7b", HYBRID, "one rank", (*BF16[:1], "model.dropout=0", "train.precision=fp8"),
         (48_818_432, 57_742_848, 77_383_168, 42_559_744)),
    )
]
# fmt: on


@pytest.mark.parametrize("number", range(len(TRACED_BEFORE)))
def test_the_plan_counts_the_bytes_that_were_traced(number: int) -> None:
    job, (kept, peak, gradients, kept_compiled) = TRACED_BEFORE[number]
    run = load_recipe(job.recipe, job.words)
    plain = planned_bytes(with_changes(run, [("train.compile", False)]), 0, gradients)
    assert plain.kept == pytest.approx(kept, rel=0.005)
    assert plain.peak == pytest.approx(peak, rel=peak_tolerance(job))
    assert planned_bytes(run, 0, gradients).kept == pytest.approx(kept_compiled, rel=0.005)


def without_saves(table: OpTable, name: str) -> OpTable:
    return replace(table, layer=tuple(replace(op, saves_torch=()) if op.name == name else op for op in table.layer))


@pytest.mark.parametrize(
    "error", ["a norm keeps nothing", "the logits' gradient has a place of its own", "one micro-batch more is in flight"]
)
def test_an_error_in_the_plan_is_found(error: str, answers: Mapping[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    match error:
        case "a norm keeps nothing":
            monkeypatch.setattr(cost_context, "op_table", lambda run: without_saves(op_table(run), "norm1"))
        case "the logits' gradient has a place of its own":
            monkeypatch.setattr(block_temporary_bytes, "_loss_bytes", lambda logits, local, device: local.bytes(logits))
        case _:
            monkeypatch.setattr(trace_process, "in_flight", lambda layout, stage: in_flight(layout, stage) + 1)
    assert [number for number in answers if not is_planned(JOBS[number], answers[number])]


def is_planned(job: TraceJob, answer: Mapping[str, Any]) -> bool:
    run = with_changes(load_recipe(job.recipe, job.words), [("train.compile", False)])
    rows = [(each["traced"], asdict(planned_bytes(run, each["traced"]["stage"], each["traced"]["gradients"]))) for each in answer["ranks"]]
    return all(
        traced[key] == pytest.approx(planned[key], rel=tolerance)
        for traced, planned in rows
        for key, tolerance in (("kept", 0.005), ("peak", peak_tolerance(job)))
    )


WIDTHS = {("fp32", "auto"): (4, 4), ("bf16", "auto"): (2, 2), ("bf16", "fp32"): (2, 4)}  # of weights and gradients


NATIVE_STEPS = (("fp32", "auto", "fp32"), ("bf16", "auto", "fp32"), ("bf16", "auto", "bf16"))
ROW_BYTES = 700  # that operators move to hash a row of a weight for random bits
ZERO_STEPS = ((1, "bf16", "auto"), (2, "bf16", "fp32"), (3, "fp32", "auto"))


def step_words(engine: str, zero: int, precision: str, gradients: str, moments: str = "fp32") -> str:
    """The configuration of a step of two micro-batches."""
    return f"{engine},{zero},{precision},{gradients},2,{moments}"


@pytest.fixture(scope="module")
def measured_steps() -> dict[str, dict[str, float]]:
    """What the optimizer's step of each configuration holds and moves."""
    words = [*(step_words("native", 0, *each) for each in NATIVE_STEPS), *(step_words("zero", *each) for each in ZERO_STEPS)]
    arguments = [sys.executable, "-m", "distrain.scripts.trace_cuda.optimizer_step", *words]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=LONG_DEADLINE, check=True)
    return dict(zip(words, (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")), strict=True))


@pytest.mark.parametrize(("precision", "gradients", "moments"), NATIVE_STEPS)
def test_a_step_of_engine_native_holds_and_moves_the_bytes_that_the_plan_counts(
    precision: str, gradients: str, moments: str, measured_steps: Mapping[str, dict[str, float]]
) -> None:
    """For each parameter of one rank; the host waits for no number before the step, and for two after it."""
    measured = measured_steps[step_words("native", 0, precision, gradients, moments)]
    run = load_recipe(
        "quickstart", ["cluster=1x1", "device=cpu", "engine=native", f"train.precision={precision}", f"optim.moments={moments}"]
    )
    plan = make_plan(run)
    assert plan.memory is not None
    assert plan.model is not None
    planned = plan.memory.stages[0].bytes
    states = (planned.weights + planned.gradients + planned.optimizer) / plan.model.parameters
    assert measured["after"] == pytest.approx(states, rel=1e-3)
    assert measured["step"] == pytest.approx(states, rel=1e-3)  # buckets are cast one by one
    moved = step_moves(*WIDTHS[precision, gradients], states=8 if moments == "fp32" else 4, one_kernel=True)
    of_rows = ROW_BYTES / 256 if moments == "bf16" else 0
    assert moved * 0.999 <= measured["moved"] <= moved * 1.001 + of_rows
    assert measured["moved"] <= 32 * 1.001
    assert measured["waits"] <= 2


@pytest.mark.parametrize(("zero", "precision", "gradients"), ZERO_STEPS)
def test_a_step_holds_and_moves_the_bytes_that_the_plan_counts(
    zero: int, precision: str, gradients: str, measured_steps: Mapping[str, dict[str, float]]
) -> None:
    """For each parameter of one rank, beside activations; a step also holds its norm's partial sums."""
    measured = measured_steps[step_words("zero", zero, precision, gradients)]
    weight, gradient = WIDTHS[precision, gradients]
    setting = ZeroSetting(stage=zero, ranks=1, micros=2, weight=weight, gradient=gradient, states=8, bucket=0, buckets=1, pipeline=False)
    flat = FlatElements(whole=10**6, part=10**6, count_overlapping=lambda: 10**6, stage3=10**6)
    held = zero_bytes(setting, 10**6, flat, FrozenElements(0, 0))
    states = (held.weights + held.gradients + held.optimizer) / 1e6
    assert max(measured["passes"], measured["step"]) == pytest.approx(states + step_bytes(setting, 10**6, flat) / 1e6, rel=0.02)
    work = step_work(zero, weight=weight, gradient=gradient)
    assert (measured["moved"], measured["kernels"]) == pytest.approx((work.moved, work.kernels), rel=0.001)


OFFLOADED = ("engine=native", "parallel.zero=3", "train.compile=false")
# fmt: off
HOST_STEPS = [
    TraceJob(what="host_step", recipe=recipe, words=("model.layers=2", *OFFLOADED, "parallel.offload.optimizer=true", *words))
    for recipe, *words in (
        ("llama3_8b_1node",),
        ("llama3_2_1b_1node", "parallel.tp=2", "parallel.sequence=true", "optim.moments=bf16", "model.vocab=32768"),
        ("llama3_8b_1node", "model.lora.rank=16"),
    )
]
HOST_ROWS = [
    TraceJob(
        what="host_rows", recipe="llama3_8b_1node",
        words=("model.layers=4", *OFFLOADED, "parallel.offload={optimizer: true, parameters: true}", *words),
    )
    for words in (
        ("train.batch=16",),
        ("train.batch=16", "parallel.recompute=full", "train.loss_chunks=16", "train.gradients=fp32"),
        ("cluster.gpus=1", "train.batch=2", "train.seq=1024", "model.layers=2"),
    )
]
# fmt: on


@pytest.fixture(scope="module")
def host_answers(all_answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return all_answers[len(JOBS) :]


@pytest.mark.parametrize("number", range(len(HOST_STEPS)))
def test_a_rank_whose_host_steps_its_rows_holds_and_copies_the_bytes_that_are_planned(
    number: int, host_answers: Sequence[dict[str, Any]]
) -> None:
    """At ZeRO 3 of engine native: its weights and gradients on the device, nothing in addition in the step, and copies both ways."""
    answer = host_answers[number]
    assert "error" not in answer, answer
    assert answer["traced"] == pytest.approx(answer["planned"], rel=1e-4, abs=0)
    assert answer["traced"]["gradients"] == answer["traced"]["to_host"] == 2 * answer["traced"]["to_device"] > 0


@pytest.mark.parametrize("number", range(len(HOST_ROWS)))
def test_a_rank_with_its_weights_on_the_host_holds_and_copies_the_bytes_that_are_planned(
    number: int, host_answers: Sequence[dict[str, Any]]
) -> None:
    """By engine native under fully_shard: nothing between steps but a few numbers, at most what is planned within 3 %, and copies to the
    byte."""
    answer = host_answers[len(HOST_STEPS) + number]
    assert "error" not in answer, answer
    traced, planned = answer["traced"], answer["planned"]
    assert (traced["to_host"], traced["to_device"]) == (planned["to_host"], planned["to_device"])
    assert traced["held"] == pytest.approx(planned["held"], abs=64)
    assert traced["peak"] == pytest.approx(planned["peak"], rel=0.03)
    largest = 4 * 128256 * 4096  # bytes of the embedding in float32: one weight after another is drawn there, and leaves
    assert largest <= traced["built"] < 2 * largest
