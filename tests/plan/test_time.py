"""Seconds, days and rates of a step against measured runs, and the parts of a step."""

from typing import Any

import pytest

from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan, StepTime, Throughput, WholeRun
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

# NVIDIA A100 80GB SXM datasheet: 312e12 dense FLOP/s in half precision, 2.039e12 bytes/s, NVLink 300e9 a direction, 108
# multiprocessors; a 200 Gb/s HDR InfiniBand card a device, as in arXiv:2104.04473 section 5.
A100 = Device(name="A100", memory=85e9, bandwidth=2.039e12, peak={"fp16": 312e12, "bf16": 312e12}, units=108, sustained=0.78, flash=0.42)
NVLINK, HDR = Link(bandwidth=300e9, latency=5e-6), Link(bandwidth=25e9, latency=1e-5)
DAY, YEAR = 86400, 365.25 * 86400


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Model:
    return Model(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=vocab, bias=True, tied=True, dropout=0.1)


def plan_of(model: Model, ranks: int, **changes: Any) -> Plan:
    """A plan in Megatron's way of 2021 and 2022 (fp16, attention unfused, kernels fused by hand), keys changed: parallel__tp=8."""
    gpus = min(8, ranks)
    cluster = Cluster(nodes=ranks // gpus, gpus=gpus, device=A100, inside=NVLINK, between=HDR)
    train = Train(batch=ranks, seq=2048, steps=1, precision="fp16", attention="math", compile=True)
    run = Run(name="test", engine="papers", model=model, cluster=cluster, parallel=Parallel(), train=train)
    return make_plan(with_changes(run, [(key.replace("__", "."), value) for key, value in changes.items()]))


def known_times(plan: Plan) -> tuple[StepTime, Throughput, WholeRun]:
    assert plan.time is not None
    assert plan.throughput is not None
    assert plan.run is not None
    return plan.time, plan.throughput, plan.run


# arXiv:2104.04473 table 1 and section 5.1: 1T parameters on 384 nodes of 8, 502 PFLOP/s of hardware FLOPs, 84 days for 450e9 tokens.
def trillion(**changes: Any) -> Plan:
    keys = {"parallel__tp": 8, "parallel__pp": 64, "parallel__dp": 6, "parallel__recompute": "full", "train__batch": 3072}
    return plan_of(gpt(128, 25600, 160), 3072, **keys | {"train__tokens": 450e9, "train__steps": None} | changes)


def test_a_trillion_parameters_on_3072_a100s_run_at_narayanans_rate() -> None:
    """Within 10 %: the machine is modelled from its data sheets."""
    plan = trillion()
    _, throughput, whole = known_times(plan)
    assert plan.problems == ()
    assert throughput.hardware_flops_per_second_per_gpu * 3072 == pytest.approx(502e15, rel=0.1)
    assert whole.days == pytest.approx(84, rel=0.1)


# arXiv:2104.04473 eq. 4 and section 5.1: 8TP/(nX) is 84 days of 3072 devices at 163 TFLOP/s, and 34 of 1024 at 140.
# fmt: off
EQUATION_4 = pytest.mark.parametrize(("model", "tokens", "devices", "rate", "days"), [
    (gpt(128, 25600, 160), 450e9, 3072, 163e12, 84),
    (gpt( 96, 12288,  96), 300e9, 1024, 140e12, 34),
])
# fmt: on


@EQUATION_4
def test_eight_passes_of_two_flops_a_parameter_take_narayanans_days(
    model: Model, tokens: float, devices: int, rate: float, days: int
) -> None:
    plan = plan_of(model, 8, train__flops="parameters", train__tokens=tokens, train__steps=None)
    assert plan.run is not None
    assert round(plan.run.flops * 8 / 6 / (devices * rate) / DAY) == days


@EQUATION_4
def test_the_plans_own_flops_take_narayanans_days_at_the_measured_rate(
    model: Model, tokens: float, devices: int, rate: float, days: int
) -> None:
    """Within 3 %: the equation leaves out attention's products and counts the vocabulary's four times, not three."""
    keys: dict[str, Any] = {"parallel__tp": 8, "parallel__zero": 3, "parallel__recompute": "full"}
    _, throughput, whole = known_times(plan_of(model, devices, train__tokens=tokens, train__steps=None, train__batch=1536, **keys))
    hardware = whole.flops * throughput.hfu / throughput.mfu
    assert hardware / (devices * rate) / DAY == pytest.approx(days, rel=0.03)


# arXiv:2205.05198 table 5: seconds of a step with selective recomputation and sequence parallel, with full recomputation, and
# model FLOPs of the first in % of the peak. Table 3: layers, hidden, heads, stages, chunks, micro-batch, batch.
# fmt: off
KORTHIKANTI = pytest.mark.parametrize(("L", "h", "a", "p", "v", "b", "B", "selective", "full", "mfu"), [
    ( 48,  6144,  64,  1, 1, 4,   4,  1.10,  1.42, 41.5),
    ( 96, 12288,  96,  8, 3, 1,  64, 13.75, 18.13, 51.4),
    (105, 20480, 128, 35, 3, 1, 280, 37.83, 49.05, 56.0),
    (128, 25600, 160, 64, 1, 1, 512, 71.49, 94.42, 56.3),
])
# fmt: on


def korthikanti(L: int, h: int, a: int, p: int, v: int, b: int, B: int, **changes: Any) -> Plan:
    schedule = "interleaved" if v > 1 else "1f1b"
    keys: dict[str, Any] = {"parallel__tp": 8, "parallel__pp": p, "parallel__chunks": v, "parallel__schedule": schedule}
    keys |= {"parallel__scatter": True, "train__microbatch": b, "train__batch": B}
    return plan_of(gpt(L, h, a), 8 * p, **keys | changes)


@KORTHIKANTI
def test_a_step_takes_korthikantis_seconds(
    L: int, h: int, a: int, p: int, v: int, b: int, B: int, selective: float, full: float, mfu: float
) -> None:
    """Within 10 %: one rate of matrix products stands for every shape and month of driver."""
    fast, _, _ = known_times(korthikanti(L, h, a, p, v, b, B, parallel__sequence=True, parallel__recompute="selective"))
    slow, _, _ = known_times(korthikanti(L, h, a, p, v, b, B, parallel__recompute="full"))
    assert fast.step == pytest.approx(selective, rel=0.1)
    assert slow.step == pytest.approx(full, rel=0.1)


@KORTHIKANTI
def test_korthikantis_seconds_give_its_share_of_the_peak(
    L: int, h: int, a: int, p: int, v: int, b: int, B: int, selective: float, full: float, mfu: float
) -> None:
    """Within 1 %: seconds and shares are printed to three digits."""
    plan = korthikanti(L, h, a, p, v, b, B, parallel__sequence=True, parallel__recompute="selective")
    time, throughput, _ = known_times(plan)
    assert 100 * throughput.mfu * time.step / selective == pytest.approx(mfu, rel=0.01)


def test_gpt_3_takes_its_papers_flops_and_148_years_of_one_device() -> None:
    """3.14e23: arXiv:2005.14165 table D.1, of 174.6e9 parameters and 300e9 tokens; 148.5 years at 67e12 FLOP/s."""
    keys: dict[str, Any] = {"cluster__device__peak": {"fp16": 67e12}, "train__flops": "parameters", "train__batch": 1536}
    plan = plan_of(gpt(96, 12288, 96, vocab=50257), 1, **keys, train__tokens=300e9, train__steps=None)
    assert plan.run is not None
    assert plan.model is not None
    assert plan.model.parameters == pytest.approx(174.6e9, rel=1e-4)
    assert plan.run.ideal_seconds is not None
    assert plan.run.flops == pytest.approx(3.14e23, rel=2e-3)
    assert plan.run.ideal_seconds / YEAR == pytest.approx(148.5, rel=2e-3)


# Meanings of the figures.

SMALL = gpt(8, 1024, 16)
# fmt: off
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"parallel__tp": 8, "parallel__sequence": True, "parallel__recompute": "selective"},
    {"parallel__tp": 2, "parallel__pp": 4, "parallel__recompute": "full", "train__microbatch": 2},
    {"parallel__pp": 4, "parallel__schedule": "interleaved", "parallel__chunks": 2, "parallel__overlap__data": False},
    {"parallel__pp": 4, "parallel__schedule": "zb_h1", "parallel__zero": 1},
    {"parallel__pp": 3, "parallel__tp": 2, "cluster__nodes": 3, "train__batch": 24},
    {"parallel__cp": 4, "parallel__zero": 3, "train__attention": "flash"},
    {"parallel__zero": 2, "train__compile": False, "parallel__overlap__tensor": True, "parallel__tp": 4},
]
# fmt: on


@pytest.mark.parametrize("keys", LAYOUTS)
def test_the_parts_of_a_step_add_up_to_it(keys: dict[str, Any]) -> None:
    time, _, _ = known_times(plan_of(SMALL, 32, **keys))
    assert time.compute + time.exposed + time.bubble + time.optimizer + time.host == pytest.approx(time.step, rel=1e-12)
    assert min(time.compute, time.exposed, time.bubble, time.optimizer, time.host) >= 0
    assert time.compute > 0
    assert time.optimizer > 0


@pytest.mark.parametrize("keys", [keys for keys in LAYOUTS if "parallel__pp" not in keys])
def test_exposed_seconds_of_a_step_are_those_of_its_messages(keys: dict[str, Any]) -> None:
    plan = plan_of(SMALL, 32, **keys)
    assert known_times(plan)[0].exposed == pytest.approx(sum(each.exposed or 0.0 for each in plan.traffic), rel=1e-9)


@pytest.mark.parametrize("keys", LAYOUTS)
def test_rates_are_tokens_and_flops_over_the_step(keys: dict[str, Any]) -> None:
    plan = plan_of(SMALL, 32, **keys)
    time, rates, whole = known_times(plan)
    assert plan.model is not None
    tokens = whole.tokens / whole.steps
    assert rates.tokens_per_second == pytest.approx(tokens / time.step, rel=1e-12)
    assert rates.tokens_per_second_per_gpu == pytest.approx(rates.tokens_per_second / plan.world, rel=1e-12)
    assert rates.model_flops_per_second_per_gpu == pytest.approx(plan.model.flops_per_token * rates.tokens_per_second_per_gpu, rel=1e-12)
    assert rates.mfu == pytest.approx(rates.model_flops_per_second_per_gpu / 312e12, rel=1e-12)
    assert rates.hfu == pytest.approx(rates.hardware_flops_per_second_per_gpu / 312e12, rel=1e-12)


def test_hardware_flops_are_the_models_without_recomputation() -> None:
    _, rates, _ = known_times(plan_of(SMALL, 8))
    assert rates.hfu == rates.mfu
    _, again, _ = known_times(plan_of(SMALL, 8, parallel__recompute="full"))
    assert again.mfu < again.hfu < again.mfu * 4 / 3
    _, chunked, _ = known_times(plan_of(SMALL, 8, train__loss_chunks=4))
    assert chunked.mfu < rates.mfu
    assert 1 < chunked.hfu / chunked.mfu < again.hfu / again.mfu


def test_flops_by_parameters_are_six_a_parameter_and_token() -> None:
    plan = plan_of(SMALL, 8, train__flops="parameters")
    assert plan.model is not None
    assert plan.model.flops_per_token == 6 * plan.model.parameters


def test_steps_are_given_or_enough_for_the_tokens() -> None:
    _, _, whole = known_times(plan_of(SMALL, 8, train__steps=None, train__tokens=100_000))
    assert (whole.steps, whole.tokens) == (7, 7 * 8 * 2048)
    time, _, ten = known_times(plan_of(SMALL, 8, train__steps=10))
    assert (ten.steps, ten.tokens) == (10, 10 * 8 * 2048)
    assert ten.seconds == pytest.approx(10 * time.step, rel=1e-12)
    assert ten.days == pytest.approx(10 * time.step / DAY, rel=1e-12)


def test_the_bubble_is_the_schedules_share_of_even_stages() -> None:
    """Stages of a pipeline of one layer each, without messages, differ by embedding and head alone: almost 3/11."""
    keys: dict[str, Any] = {"parallel__pp": 4, "train__batch": 8, "parallel__overlap__pipeline": True, "train__seq": 512}
    plan = plan_of(gpt(32, 8192, 64, vocab=64), 4, **keys)
    time, _, _ = known_times(plan)
    assert plan.bubble_fraction == pytest.approx(time.bubble / (time.compute + time.exposed + time.bubble), rel=0.01)
    assert plan.bubble_fraction == pytest.approx(3 / 11, rel=0.01)


# A time is null if a figure that it needs is missing; the other times stay.
# fmt: off
UNTIMED = pytest.mark.parametrize("missing", [
    {"cluster__device__peak": {}},
    {"cluster__device__bandwidth": None},
    {"cluster__inside": None},
    {"cluster__between": None},
    {"parallel__zero": 1, "parallel__offload__optimizer": True},
])
# fmt: on


@UNTIMED
def test_times_are_null_and_memory_is_planned_where_a_rate_is_missing(missing: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"parallel__tp": 2, "parallel__pp": 2, "train__microbatch": 2} | missing
    known, unknown = (
        plan_of(SMALL, 16, **keys | {"cluster__device": A100, "cluster__inside": NVLINK, "cluster__between": HDR}),
        plan_of(SMALL, 16, **keys),
    )
    assert (unknown.time, unknown.throughput) == (None, None)
    assert unknown.run is not None
    assert (unknown.run.seconds, unknown.run.days) == (None, None)
    assert all((each.seconds, each.exposed) == (None, None) for each in unknown.traffic)
    assert unknown.memory == known.memory
    assert [each.sent for each in unknown.traffic] == [each.sent for each in known.traffic]
    assert unknown.bubble_fraction == 1 / (2 + 1)  # two micro-batches through two stages
    assert [each.rule for each in unknown.warnings].count("time") == 1


def test_a_run_without_a_peak_has_no_ideal_seconds() -> None:
    plan = plan_of(SMALL, 8, cluster__device__peak={})
    assert plan.run is not None
    assert plan.run.ideal_seconds is None
    assert plan.run.flops > 0


def test_an_unused_link_need_not_be_stated() -> None:
    assert plan_of(SMALL, 8, cluster__between=None).time is not None
    assert plan_of(SMALL, 1, cluster__inside=None, cluster__between=None).time is not None
