"""AdamW in one kernel a bucket: what it computes, and what the kernel that torch's compiler makes of it reads and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import LONG_DEADLINE
from distrain.tests.fakes.inductor_settings import INDUCTOR
from distrain.trainer.launch.rank.environment import RankEnvironment
from distrain.trainer.plan.native.optimizer_step import step_moves, steps_in_one_kernel
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.system.reserved_port import reserve_port

PROGRAM = Path(__file__).parents[1] / "rank_programs" / "compiled_adamw.py"
WIDTHS = ((2, 2), (2, 4), (4, 4))  # bytes of the weights that forward uses, of gradients
ROUNDINGS = ("nearest", "stochastic")
PRECISIONS = ("fp32", "bf16")

QUANTIZED = len(WIDTHS) + len(ROUNDINGS)  # of the answers
FIRST_ENGINE = QUANTIZED + 1


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """The answers of a process of its own: the tests' own one has put torch's compiler out of use."""
    with reserve_port() as reserved:
        alone = RankEnvironment(rank=0, ranks=1, local_rank=0, local_ranks=1, address="127.0.0.1", port=reserved.getsockname()[1])
        known = {**alone.variables({**os.environ, **INDUCTOR}), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "0"}
        done = subprocess.run([sys.executable, str(PROGRAM)], env=known, capture_output=True, text=True, timeout=LONG_DEADLINE)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(WIDTHS) + len(ROUNDINGS) + len(PRECISIONS) + 3, done.stderr[-3000:]
    return lines


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler is found on Linux")
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_compiled_step_is_one_kernel_that_moves_the_planned_bytes(widths: tuple[int, int], answers: list[dict[str, Any]]) -> None:
    """The plan counts the norm too, which reads the gradient. In bf16 it is 30 bytes an element."""
    weight, gradient = widths
    graphs = answers[WIDTHS.index(widths)]["graphs"]
    assert len(graphs) == 2  # of vectors, and of elements
    for graph in graphs:
        assert graph["kernels"] == 1
        assert (graph["loads"], graph["stores"]) == (gradient + 12, 12 + (2 if weight == 2 else 0))
        assert gradient + graph["loads"] + graph["stores"] == step_moves(weight, gradient, 8, one_kernel=True)
    assert step_moves(2, 2, 8, one_kernel=True) == 30


@pytest.mark.parametrize("widths", WIDTHS)
def test_the_compiled_step_is_adamw_with_clipping_and_skips(widths: tuple[int, int], answers: list[dict[str, Any]]) -> None:
    assert answers[WIDTHS.index(widths)]["apart"] <= 1e-6  # of weights of up to 4


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler is found on Linux")
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_moments_in_bf16_are_rounded_in_the_same_kernel(rounding: str, answers: list[dict[str, Any]]) -> None:
    """It moves 8 bytes an element less, 22 with the norm; the 4 bytes of a column's words are read from a cache. As it is written it rounds
    alike; one row has a kernel of its own. On a CPU some kernels store the narrow weight element by element, which is not counted."""
    found = answers[len(WIDTHS) + ROUNDINGS.index(rounding)]
    words = 4 if rounding == "stochastic" else 0
    assert len(found["graphs"]) == (3 if words else 2)
    for graph in found["graphs"]:
        assert (graph["kernels"], graph["loads"]) == (1, 10 + words)
    most = max(graph["stores"] for graph in found["graphs"])
    assert 2 + 10 + most == step_moves(2, 2, 4, one_kernel=True)
    assert found["apart"] <= 1e-6
    assert found["differing"] <= 1e-3


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler is found on Linux")
def test_moments_in_8_bits_are_quantized_in_the_compiled_step(answers: list[dict[str, Any]]) -> None:
    """A skipped step changes no bit; one kernel serves any number of blocks. With the norm the plan counts 18.06 bytes."""
    found = answers[QUANTIZED]
    assert [graph["kernels"] for graph in found["graphs"]] == [1]
    assert found["apart"] <= 1e-6
    assert found["differing"] <= 1e-3
    assert step_moves(2, 2, 2 + 8 / 256, one_kernel=True) == 18 + 16 / 256


def test_engine_native_quantizes_moments_alike_in_one_kernel_and_in_parts(answers: list[dict[str, Any]]) -> None:
    found = answers[FIRST_ENGINE + len(PRECISIONS)]
    assert found["skipped"] == [1, 1]
    assert found["differing"]["kernel"] <= 0.01


def test_engine_native_rounds_moments_alike_in_one_kernel_in_parts_and_on_the_host(answers: list[dict[str, Any]]) -> None:
    """One is compared with steps part by part; where a float32 number differs in its last bit, one may round otherwise."""
    found = answers[-1]
    assert found["skipped"] == [1, 1, 1]
    assert found["differing"]["host"] == found["apart"]["host"] == 0
    assert found["differing"]["kernel"] <= 0.01


@pytest.mark.parametrize("precision", PRECISIONS)
def test_engine_native_steps_in_one_kernel_as_with_torchs_fused_adamw(precision: str, answers: list[dict[str, Any]]) -> None:
    """Weights, states, counts of steps and the weights that forward uses; in bf16 a weight may round to the other neighbour."""
    found = answers[FIRST_ENGINE + PRECISIONS.index(precision)]
    assert found["skipped"] == [1, 1, 1]
    assert found["tensors"] >= 20
    assert found["apart"]["kernel"] <= (1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_host_steps_as_torchs_fused_adamw_and_copies_what_is_planned(precision: str, answers: list[dict[str, Any]]) -> None:
    """Three steps of four copy gradients to it and weights back, in their own types; the skipped one copies nothing."""
    found = answers[FIRST_ENGINE + PRECISIONS.index(precision)]
    assert found["apart"]["host"] <= 1e-7
    stepped, *copied = found["copied"]
    run = load_recipe(
        "llama3_8b_1node", ["engine=native", "parallel.zero=1", "parallel.offload.optimizer=true", f"train.precision={precision}"]
    )
    plan = make_plan(run)
    assert plan.model
    planned = [row.sent for row in plan.traffic if row.axis == "host"]
    assert copied == pytest.approx([3 * stepped * each / (plan.model.parameters / 8) for each in planned], rel=1e-6)


def test_a_plan_steps_in_one_kernel_on_a_gpu() -> None:
    cuda = load_recipe("llama3_8b_1node", ["engine=native"])
    assert steps_in_one_kernel(cuda)
    assert not steps_in_one_kernel(load_recipe("llama3_8b_1node", ["engine=native", "optim.name=sgd"]))
    assert not steps_in_one_kernel(load_recipe("quickstart", ["engine=native"]))
