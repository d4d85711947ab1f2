"""What our modules keep for backward on a GPU, traced on fake CUDA tensors, is what the plan counts for them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from distrain.scripts.trace_cuda.device_guard import NoGuard, device_guard
from distrain.scripts.trace_cuda.processes import TraceJob, trace

GPU = ("device=h200", "cluster.nodes=1", "data=synthetic", "model.layers=4", "train.microbatch=1")
MODELS = {
    "gpt": ("gpt2_124m", "train.seq=512"),
    "llama": (
        "llama3_8b",
        "train.seq=2048",
        "model.hidden=1024",
        "model.heads=8",
        "model.kv_heads=4",
        "model.ffn=3584",
        "model.vocab=8192",
    ),
    "moe": (
        "mixtral_8x7b",
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
    "pp": ("cluster.gpus=4", "parallel.dp=1", "parallel.pp=4", "train.batch=8"),
}
# fmt: off
PLAIN = (
    "parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.ep=1", "parallel.zero=0", "parallel.sequence=false", "parallel.chunks=1",
    "parallel.schedule=1f1b", "parallel.shard=all", "train.compile=false",
)
# fmt: on


def drawn_jobs(seed: int, count: int) -> list[TraceJob]:
    """Runs of every model and layout, with recomputation, attention, dropout and precision drawn by a seed."""
    random, jobs = Random(seed), []
    for number in range(count):
        recipe, *sizes = list(MODELS.values())[number % len(MODELS)]
        layout = list(LAYOUTS.values())[number % len(LAYOUTS)]
        choices = (
            f"parallel.recompute={random.choice(('none', 'selective', 'full'))}",
            f"train.attention={random.choice(('flash', 'math'))}",
            f"model.dropout={random.choice((0, 0.1))}",
            f"train.precision={random.choice(('bf16', 'fp32') if recipe != 'mixtral_8x7b' else ('bf16',))}",  # its fp32 asks the host
        )
        jobs.append(TraceJob(recipe=recipe, words=(*GPU, *PLAIN, *sizes, *layout, *choices)))
    return jobs


JOBS = [TraceJob(recipe="gpt2_124m_1gpu"), TraceJob(recipe="llama3_2_1b_1node"), *drawn_jobs(14, 15)]


@pytest.fixture(scope="module")
def answers() -> dict[int, dict[str, Any]]:
    try:
        device_guard()
    except NoGuard as error:
        pytest.skip(str(error))
    return {number: answer for number, (_, answer) in enumerate(trace(JOBS))}


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_a_rank_keeps_the_bytes_that_the_plan_counts_for_our_modules(number: int, answers: Mapping[int, dict[str, Any]]) -> None:
    assert "error" not in answers[number], (JOBS[number], answers[number])
    for rank in answers[number]["ranks"]:
        assert rank["traced"]["kept"] == pytest.approx(rank["planned"]["eager"], rel=0.005), JOBS[number]
