"""Plans of context parallelism: what an exchange of tokens for heads sends, copies and keeps, and which messages a device waits for."""

from __future__ import annotations

from typing import Any

import pytest

from distrain.tests.fakes.planned_messages import B, H, S, messages, of_a_layer, plan_of, run_of
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.spec.run import Device

HEADS, LAYERS = 8, 4
EXCHANGE: dict[str, Any] = {"parallel__cp_comm": "all_to_all"}
WIDTH = 2  # bytes of an element
NO_HOST: dict[str, Any] = {"cluster__device__launch": 0.0, "cluster__device__dispatch": 0.0}  # kernels and messages take the host no time


def saved(plan: Plan) -> int:
    """The bytes of activations that the first stage keeps."""
    assert plan.memory is not None
    return plan.memory.stages[0].bytes.activations


def computing(plan: Plan) -> float:
    assert plan.time is not None
    return plan.time.compute


@pytest.mark.parametrize(("kv_heads", "cp"), [(8, 2), (2, 2), (2, 8)])
def test_an_exchange_sends_what_each_rank_attends_with(kv_heads: int, cp: int) -> None:
    """A rank has b s (2a + 2n) d / c elements of queries, values, keys and values' results (arXiv:2309.14509 section 3.2), of which it is
    sent all but its own; with fewer key heads than ranks each has a copy of one."""
    own = B * S * (2 * HEADS + 2 * max(kv_heads, cp)) * (H // HEADS) * WIDTH // cp
    once = own * (cp - 1) // cp
    assert of_a_layer("cp", parallel__cp=cp, model__kv_heads=kv_heads, **EXCHANGE) == 2 * once
    assert of_a_layer("cp", parallel__cp=cp, model__kv_heads=kv_heads, parallel__recompute="full", **EXCHANGE) == 3 * once


@pytest.mark.parametrize("changes", [{}, {"train__precision": "fp32", "cluster__device__peak": {"fp32": 1e14}}, {"parallel__tp": 2}])
def test_one_rank_of_a_sequence_exchanges_nothing(changes: dict[str, Any]) -> None:
    one, other = plan_of(**changes), plan_of(**changes, **EXCHANGE)
    assert (one.memory, one.time, one.traffic) == (other.memory, other.time, other.traffic)


@pytest.mark.parametrize("engine", ["native", "zero"])
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_our_engines_wait_for_the_messages_of_layers(engine: str, axis: str) -> None:
    keys = NO_HOST | {f"parallel__{axis}": 4, "parallel__overlap__tensor": True}
    sent = messages(plan_of(engine=engine, **keys), axis)
    assert sum(each.exposed or 0 for each in sent) == pytest.approx(sum(each.seconds or 0 for each in sent), rel=0.01)
    hidden = messages(plan_of(engine="papers", **keys), axis)
    assert sum(each.exposed or 0 for each in hidden) < 0.8 * sum(each.seconds or 0 for each in hidden)


def test_nothing_hides_an_exchange() -> None:
    sent = messages(plan_of(engine="papers", parallel__cp=4, **NO_HOST, **EXCHANGE), "cp")
    assert sum(each.exposed or 0 for each in sent) == pytest.approx(sum(each.seconds or 0 for each in sent), rel=0.01)


def test_an_exchange_copies_what_it_sends_and_what_it_receives() -> None:
    """Each of two copies reads and writes, and a half is turned round: five times the bytes of queries, keys, values and results, forward
    and backward."""
    device = NO_HOST | {"cluster__device__streaming": 1.0}
    gather, exchange = (plan_of(parallel__cp=2, engine="papers", **device, **keys) for keys in ({}, EXCHANGE))
    copied = 5 * 4 * B * S * H * WIDTH // 2
    assert computing(exchange) - computing(gather) == pytest.approx(2 * LAYERS * copied / 2e12, rel=0.01)


WIDE = {"model__head_dim": 264}  # more than FlashAttention-2 takes


LONG: dict[str, Any] = {"parallel__cp": 2, "engine": "native", "train__seq": 1 << 17}  # attention takes longer than an exchange


@pytest.mark.parametrize("compiled", [False, True])
def test_no_core_runs_again_after_an_exchange(compiled: bool) -> None:
    """Ranks that gather keys run a fused kernel again in backward where it is not called by blocks (core_attention.py, FusedCore)."""
    keys: dict[str, Any] = {"data__documents": True, "train__compile": compiled, **WIDE, **LONG}
    assert computing(plan_of(**keys, **EXCHANGE)) < 0.9 * computing(plan_of(**keys))


@pytest.mark.parametrize("documents", [False, True])
def test_compiled_layers_that_gather_keys_call_the_kernel_by_blocks(documents: bool) -> None:
    """They attend outside their graphs: no core runs again, and no mask is kept."""
    plain, compiled = (plan_of(**LONG, data__documents=documents, train__compile=each) for each in (False, True))
    assert computing(compiled) < computing(plain)
    assert saved(compiled) < saved(plain)


def test_documents_cost_no_core_twice_where_the_kernel_takes_their_bounds() -> None:
    keys: dict[str, Any] = {"parallel__cp": 2, "engine": "native", "model__positions": "none"}
    plain, apart = (plan_of(**keys, data__documents=each) for each in (False, True))
    assert (computing(apart), saved(apart)) == (computing(plain), saved(plain))


def test_a_core_after_an_exchange_copies_grouped_keys_in_float32_as_that_of_one_rank() -> None:
    """CUDA's fused kernel for float32 takes no grouped heads. A rank has half of the heads then, and the results of its kernel besides."""
    keys: dict[str, Any] = {"train__precision": "fp32", "cluster__device__peak": {"fp32": 1e14}, "engine": "native"}
    grouped, copied = (saved(plan_of(model__kv_heads=kv_heads, parallel__cp=2, **keys, **EXCHANGE)) for kv_heads in (2, HEADS))
    assert grouped == copied


def test_a_rank_keeps_the_mask_of_all_rows_of_a_sequence() -> None:
    """A rank that gathers keys has the rows of its own tokens alone."""
    gpu = Device(name="gpu", memory=1e18, kind="cuda", bandwidth=1e10, peak={"fp32": 1e12})  # in float32 no kernel takes bounds
    keys: dict[str, Any] = {"train__precision": "fp32", "model__positions": "none", "parallel__cp": 2, "engine": "native"}

    def mask(**changes: Any) -> int:
        run = run_of(cluster__device=gpu, **keys, **changes)
        return saved(make_plan(run)) if run else 0

    with_mask, without = (mask(data__documents=apart, **EXCHANGE) for apart in (True, False))
    assert with_mask - without == 4 * B * S * S
    with_mask, without = (mask(data__documents=apart) for apart in (True, False))
    assert with_mask - without == 4 * B * S * S // 2
