"""Package fla's kernels of the gated delta rule: they compute what our own rule does, and move, save and hold what plans count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import LONG_DEADLINE
from distrain.trainer.launch import admission
from distrain.trainer.launch.admission import fla_problem
from distrain.trainer.machine import measure_machine
from distrain.trainer.models.hybrid.fla_kernels import (
    BACKWARD,
    FORWARD,
    KERNELS,
    Kernel,
    fla_product,
    held_by_fla,
    moved_by,
)
from distrain.trainer.models.ops.op_table import Tensor, element_count
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.run import Device

MISSING = [name for name in ("torch", "triton", "fla", "einops") if find_spec(name) is None]
needs_fla = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")
MODEL = load_recipe("quickstart", ["data=synthetic", "model=qwen3_next_80b"]).model  # whose widths the counts have
# One key head, two value heads, two chunks, in bf16 (fla_in_interpreter.py, WIDE).
SIZES = {"core_tokens": 128, "tokens": 128, "batch": 1, "core_linear_keys": 1, "linear_keys": 1, "values_per_key": 2}
SIZES |= {"linear_key_dim": 128, "linear_value_dim": 128, "chunk": 64, "chunks": 2, "solved": 40, "conv_taps": 4}
CHANNELS = 4 * 128  # of the convolutions


@cache
def found() -> dict[str, Any]:
    """What the kernels compute and do, in Triton's interpreter, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "distrain.tests.fakes.fla_in_interpreter"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LONG_DEADLINE, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def bytes_of(tensors: tuple[Tensor, ...]) -> int:
    return sum(element_count(each.dims, SIZES) * (each.width or 2) for each in tensors)


def test_documents_begin_at_tokens_of_a_micro_batch() -> None:
    import torch

    from distrain.trainer.layers.fused_delta import packed_bounds

    assert packed_bounds(torch.tensor([[0, 0, 2], [0, 1, 1]])).tolist() == [0, 2, 3, 4, 6]


@needs_fla
@pytest.mark.parametrize(("case", "most"), [("float32", 3e-5), ("documents", 3e-5), ("a rank's heads", 3e-5), ("bf16", 5e-2)])
def test_they_compute_what_our_own_rule_does(case: str, most: float) -> None:
    """Values and every gradient, as shares of the largest, beside float64: key and value heads of odd widths, several documents."""
    assert max(found()[case].values()) < most, found()[case]


@needs_fla
def test_a_model_has_the_gradients_of_our_own_rule() -> None:
    """Furthest are a_log and dt_bias: what tokens write last cancels in their sums, which our own rule leaves out; others reach 3e-5."""
    assert found()["whole model"]["fla"] < 3e-4


@needs_fla
@pytest.mark.parametrize(("part", "kernels"), [("forward", FORWARD), ("backward", FORWARD + BACKWARD)])
def test_a_plan_counts_what_each_kernel_moves(part: str, kernels: tuple[Kernel, ...]) -> None:
    """Convolutions read the three tokens before a chunk besides, and torch copies and sums the taps, which are few beside many tokens."""
    counted, names = found()["counted"][part], {each.name for each in kernels}
    planned = {name: bytes_of(moved_by(tuple(each for each in kernels if each.name == name), MODEL)) for name in names}
    of_torch = sum(planned.pop(name) for name in names if name.startswith("torch"))
    assert {name: round(each / planned[name], 2) for name, each in counted["bytes"].items()} == {
        name: pytest.approx(1, abs=0.05) for name in planned
    }
    copied = 2 * 2 * SIZES["conv_taps"] * CHANNELS
    assert counted["torch"][0] == pytest.approx(of_torch + copied, rel=0.01 if part == "forward" else 0.08)


@needs_fla
def test_a_plan_counts_the_kernels_and_flops() -> None:
    product, forward, backward = fla_product(MODEL), *(sum(found()["counted"][part]["flops"].values()) for part in ("forward", "backward"))
    planned = 6 * 128 * 128 * 2 * 128 * product.computed
    assert forward == pytest.approx(planned, rel=1e-9)
    assert backward == pytest.approx(planned * product.backward, rel=1e-9)
    assert found()["counted"]["forward"]["kernels"] + found()["counted"]["forward"]["torch"][1] == KERNELS


@needs_fla
def test_a_plan_counts_what_is_saved_and_what_backward_holds() -> None:
    """Saved are the inputs alone: of each token queries, keys and values of two heads, two logits of each; and the weights."""
    assert found()["counted"]["saved"] == 2 * (128 * (CHANNELS + 2 * 2) + SIZES["conv_taps"] * CHANNELS + 2 * 2)
    waiting = 2 * bytes_of((Tensor(("tokens", "batch", "linear_keys", "values_per_key", "linear_value_dim")),))
    assert found()["counted"]["held"] == pytest.approx(bytes_of(held_by_fla()) - waiting, rel=0.02)


def test_what_fla_lacks_is_said_before_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, older = (
        Device(name="h100", memory=8e10, peak={"bf16": 9.9e14, "fp8": 1.98e15}),
        Device(name="a100", memory=8e10, peak={"bf16": 3e14}),
    )
    present = {"triton"}
    monkeypatch.setattr(admission, "find_spec", lambda name: name if name in present else None)
    monkeypatch.setattr(measure_machine, "package_version", lambda name: "3.6.0")
    without = "set train.linear_attention=torch"
    assert str(fla_problem(gpu)) == (
        f"train.linear_attention=fla needs fla-core, einops, not installed here: pip install fla-core einops, or {without}"
    )
    present |= {"fla", "einops"}
    assert str(fla_problem(gpu)) == (
        "train.linear_attention=fla: its gradients are wrong by Triton 3.6.0 on Hopper, where fla refuses it: "
        f"install Triton 3.7.1 or later, or {without}"
    )
    assert fla_problem(older) is None
    monkeypatch.setattr(measure_machine, "package_version", lambda name: "3.7.1")
    assert fla_problem(gpu) is None


def test_a_plan_of_the_80b_model_has_what_was_counted() -> None:
    """FLOPs of a token and value head, and bytes of the micro-batch above, as the interpreter counted them; the step is shorter for it."""
    product = fla_product(MODEL)
    assert 6 * 128 * 128 * product.computed == pytest.approx(176_128)
    assert product.computed * product.backward * 6 * 128 * 128 == pytest.approx(684_032)
    assert [bytes_of(moved_by(each, MODEL)) for each in (FORWARD, FORWARD + BACKWARD)] == [1_744_896, 6_275_072]
    words = ["cluster.nodes=1", "parallel.ep=8", "model.layers=8", "train.batch=64"]
    plans = [make_plan(load_recipe("qwen3_next_80b", [*words, f"train.linear_attention={rule}"])) for rule in ("torch", "fla")]
    spent = [{each.kind: each.seconds for each in plan.operators}["linear_attention"] for plan in plans]
    assert spent[1] < spent[0] / 4
