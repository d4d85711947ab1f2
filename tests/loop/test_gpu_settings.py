"""What a run does for a GPU that can be seen without one: deterministic kernels, and the figure that its memory is compared with."""

from __future__ import annotations

import os

import pytest
import torch

from distrain.cli.config.load import load_recipe
from distrain.trainer.loop.build import compile_options
from distrain.trainer.loop.metrics.throughput import planned_figures
from distrain.trainer.loop.train_rank import take_deterministic_kernels
from distrain.trainer.plan.plan import make_plan


def test_deterministic_kernels_are_taken_and_where_torch_has_none_it_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what is set here ends with the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        take_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("words", "alike"),
    [
        ("parallel.tp=1", False),
        ("parallel.tp=2", True),
        ("parallel.tp=2 parallel.sequence=true", False),
        ("parallel.tp=2 parallel.sequence=true model=tiny_moe", True),
        ("parallel.tp=1 model=tiny_moe", False),
    ],
)
def test_tensor_ranks_that_compute_the_same_time_no_kernels(words: str, alike: bool) -> None:
    """Another kernel's sum may differ in its last bit: a rank would route a token elsewhere, or norm it otherwise."""
    run = load_recipe("quickstart", ["cluster.gpus=2", "parallel.dp=auto", *words.split()])
    assert compile_options(run) == ({"deterministic": True} if alike else None)


def test_a_gpus_allocator_is_compared_with_the_plan_without_the_drivers_memory() -> None:
    plan = make_plan(load_recipe("llama3_8b_1node", []))
    assert plan.memory is not None
    held = plan.memory.stages[plan.memory.stage].bytes
    assert held.overhead > 1e9
    assert planned_figures(plan)["planned_memory_peak"] == held.total - held.overhead
