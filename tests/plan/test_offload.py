"""Offloading: seconds of published optimizer steps on hosts, copies of a step, bytes on hosts, and plans that overflow one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from math import ceil, log2
from statistics import median
from typing import Any, NamedTuple

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.plan_page import plan_text
from distrain.cli.pages.text_layout import Style
from distrain.trainer.plan.costs.offload import HOST_STREAMING, HostRates, HostWork, copies
from distrain.trainer.plan.deepspeed.offload import gradient_copies, host_step
from distrain.trainer.plan.error_bars import ON_HOST
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import HostMemory, Plan


class PublishedStep(NamedTuple):
    """A measured step on hosts: parameters that a node steps, over how many ranks, bytes/s of the host's memory by its data sheet and of a
    copy; seconds, and of what: Adam alone, Adam and its copies back, or all that offloading added to a step."""

    source: str
    parameters: float
    ranks: int
    memory: float
    link: float
    what: str
    seconds: float


EPYC, XEON_8168, XEON_8480 = 409.6e9, 256e9, 563.2e9  # bytes/s, two sockets: as in conf/cluster
# fmt: off
PUBLISHED = (
    PublishedStep("arXiv:2101.06840 table 4, DGX-2",                         1e9,     1, XEON_8168, 12e9, "adam",   0.22),
    PublishedStep("arXiv:2101.06840 table 4, DGX-2",                         4e9,     1, XEON_8168, 12e9, "adam",   1.03),
    PublishedStep("arXiv:2101.06840 table 4, DGX-2",                         10e9,    1, XEON_8168, 12e9, "adam",   2.57),
    # DeepSpeed blogs/zenflow-corebinding, Qwen2.5 on 2 A100: 1,365 ms with, 240 without; 2,497 ms with, of the larger one about 480 without
    PublishedStep("DeepSpeed blogs/zenflow-corebinding, Qwen2.5-1.5B",       1.54e9,  2, EPYC,      13e9, "all",    1.125),
    PublishedStep("DeepSpeed blogs/zenflow-corebinding, Qwen2.5-3B",         3.09e9,  2, EPYC,      13e9, "all",    2.017),
    PublishedStep("DeepSpeed blogs/deepspeed-zenflow, Llama 2 7B on 4 A100", 6.74e9,  4, EPYC,      13e9, "step",   4.0),
    PublishedStep("DeepSpeed issue 6834, 72B on 4 nodes of 8 A100",          18e9,    8, EPYC,      13e9, "step",   10.0),
    PublishedStep("THUDM/slime issue 1139, GLM-4.5-Air on 4 nodes of 8 H100", 26.5e9, 8, XEON_8480, 45e9, "adam",   9.6),
)
# fmt: on


def planned_seconds(row: PublishedStep) -> float:
    own, rates = int(row.parameters / row.ranks), HostRates(row.memory * HOST_STREAMING / row.ranks, row.link)
    if row.what == "adam":
        return HostWork(own * 28).seconds(rates)
    step = host_step(2, own, weight=2, states=8, weights_on_host=False).seconds(rates)
    (copied,) = gradient_copies(2, 1, weight=2, gradient=2)
    return step + (own * copied.size / row.link if row.what == "all" else 0.0)


def test_published_steps_on_hosts_lie_inside_the_error_bar() -> None:
    ratios = [row.seconds / planned_seconds(row) for row in PUBLISHED]
    assert all(1 / ON_HOST.low <= each <= ON_HOST.high for each in ratios), ratios
    assert 0.9 < median(ratios) < 1.15
    assert (ON_HOST.runs, ON_HOST.sources) == (len(PUBLISHED), len({row.source.partition(",")[0] for row in PUBLISHED}))


def plan_of(*words: str) -> Plan:
    return make_plan(load_recipe("llama3_8b_1node", ["parallel.zero=2", "parallel.offload.optimizer=true", *words]))


def pinned(size: float) -> float:
    return float(2 ** ceil(log2(size)))


def copied(plan: Plan) -> dict[tuple[str, int], float]:
    """Bytes an element of a rank's part that a step copies, by direction and by the rounds of a step."""
    assert plan.model
    own = plan.model.parameters / plan.world
    found: dict[tuple[str, int], float] = {}
    buckets = -(-own // 50_000_000)
    for each in plan.traffic:
        if each.axis == "host":
            assert each.link == "host"
            rounds = max(1, round(each.count / buckets))
            found[each.verb, rounds] = found.get((each.verb, rounds), 0.0) + each.sent / own
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("engine=zero", "train.microbatch=16"), {("to_host", 1): 4, ("to_device", 1): 2}),
        (("engine=zero", "train.microbatch=4"), {("to_host", 4): 8, ("to_device", 3): 6, ("to_host", 1): 4, ("to_device", 1): 2}),
        (("engine=zero", "train.microbatch=4", "parallel.zero=1"), {("to_host", 1): 4, ("to_device", 1): 2}),
        (("engine=zero", "train.microbatch=4", "parallel.zero=3"),
            {("to_host", 4): 8, ("to_device", 4): 8, ("to_host", 1): 4, ("to_device", 1): 2}),
        (("engine=zero", "train.microbatch=16", "train.gradients=fp32"), {("to_host", 1): 4, ("to_device", 1): 2}),
        (("engine=native", "train.microbatch=4"), {("to_host", 1): 2, ("to_device", 1): 2}),
        (("engine=native", "train.microbatch=4", "train.gradients=fp32"), {("to_host", 1): 4, ("to_device", 1): 2}),
        (("engine=native", "train.microbatch=4", "parallel.zero=3"), {("to_host", 1): 4, ("to_device", 1): 2}),
    ],
    ids=str,
)  # fmt: skip
def test_copies_of_a_step(words: tuple[str, ...], expected: dict[tuple[str, int], float]) -> None:
    assert copied(plan_of("train.batch=128", *words)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_copies_take_their_bytes_over_the_links_rate(parts: int) -> None:
    made = copies("to_host", 240, parts, 2, HostRates(1e9, 10.0))
    assert (made.parts * made.payload, made.seconds) == (240, 240 / 10.0)


def test_offloaded_weights_are_copied_for_each_forward_and_each_backward() -> None:
    plan = plan_of("engine=zero", "train.batch=128", "train.microbatch=4", "parallel.zero=3", "parallel.offload.parameters=true")
    assert plan.memory
    assert plan.model
    own = 2 * plan.model.parameters / 8
    fetched = [each for each in plan.traffic if each.verb == "to_device" and each.count == 4 * 32]
    assert [each.sent for each in fetched] == pytest.approx([4 * own, 4 * (own - 2 * 5e8 / 8)], rel=1e-3)  # backward finds 500 M elements
    assert 1 not in {each.count for each in plan.traffic if each.verb == "to_device"}  # the step's weights stay
    host = plan.memory.host
    assert host
    assert host.rank.weights == pinned(own)
    assert plan.memory.stages[0].bytes.weights == 0


def host_of(plan: Plan) -> HostMemory:
    assert plan.memory
    assert plan.memory.host
    return plan.memory.host


LARGEST = pinned(2 * 128_256 * 4096)  # the embedding, through which DeepSpeed copies gradients
HIDDEN, KEYS, FFN = 4096, 1024, 14_336
MATRICES = [128_256 * HIDDEN, *32 * [*(HIDDEN * each for each in (HIDDEN, KEYS, KEYS, HIDDEN, FFN, FFN, FFN))], 128_256 * HIDDEN]


def most_overlapping(own: float) -> float:
    """Elements of the whole matrices that overlap the part of the rank with most."""
    ends = list(accumulate(MATRICES))
    rows = [(end - size, end) for size, end in zip(MATRICES, ends, strict=True)]
    return max(sum(end - first for first, end in rows if end > rank * own and first < (rank + 1) * own) for rank in range(8))


BYTES_ON_HOST: dict[tuple[str, ...], Callable[[float], tuple[float, float, float]]] = {  # words -> elements of a part -> bytes
    ("engine=zero", "train.microbatch=16"): lambda own: (pinned(4 * own) + 8 * own, pinned(4 * own), pinned(2 * own) + LARGEST),
    ("engine=zero", "train.microbatch=4"): lambda own: (
        pinned(4 * own) + 8 * own,
        pinned(4 * own) + 2 * most_overlapping(own),  # DeepSpeed accumulates whole parameters
        pinned(2 * own) + LARGEST,
    ),
    ("engine=zero", "train.microbatch=4", "parallel.zero=1"): lambda own: (
        pinned(4 * own) + 8 * own,
        pinned(4 * own),
        pinned(2 * own) + LARGEST,
    ),
    ("engine=zero", "parallel.zero=3"): lambda own: (12 * own, pinned(4e9) + pinned(4 * (own - 1e9)) + pinned(2 * own), 0),
    ("engine=native",): lambda own: (12 * own, 0, 2 * 2 * pinned(2 * 2**24)),  # two pieces, gradients and weights
    ("engine=native", "parallel.zero=3"): lambda own: (12 * own, 0, 2 * (4 + 2) * 2**24),  # float32 gradients
}


@pytest.mark.parametrize("words", BYTES_ON_HOST, ids=str)
def test_bytes_on_a_host(words: tuple[str, ...]) -> None:
    """Of a rank: optimizer, gradients, buffers. Pinned memory comes in powers of two."""
    plan = plan_of("train.batch=128", *words)
    assert plan.model
    host = host_of(plan)
    assert (host.rank.optimizer, host.rank.gradients, host.rank.buffers) == pytest.approx(
        BYTES_ON_HOST[words](plan.model.parameters / 8), rel=1e-3
    )
    assert host.node == 8 * (host.rank.optimizer + host.rank.gradients + host.rank.weights + host.rank.buffers)


@pytest.mark.parametrize(("zero", "elements"), [(1, 128_256 * 4096), (2, 128_256 * 4096), (3, 0)])
def test_deepspeed_copies_each_parameter_through_a_buffer_on_the_device_but_for_zero_3(zero: int, elements: int) -> None:
    """ZeRO 1 and 2 hold one of the largest parameter's elements, here the embedding's, in the weights' type; ZeRO 3 copies its own part."""
    words = ("train.batch=128", "engine=zero", f"parallel.zero={zero}")
    offloaded, kept = (plan_of(*words, *more).memory for more in ((), ("parallel.offload.optimizer=false",)))
    assert offloaded
    assert kept
    assert offloaded.stages[0].bytes.buffers - kept.stages[0].bytes.buffers == 2 * elements


def test_the_fullest_node_holds_what_its_stages_do() -> None:
    """Four stages of two ranks, two stages on a node: none has two of the fullest."""
    plan = plan_of("cluster=2x4", "parallel.pp=4", "parallel.zero=1", "engine=native", "model.vocab=400_000", "parallel.bucket=1_000_000")
    host = host_of(plan)
    assert plan.memory
    first, second, third, last = (stage.parameters for stage in plan.memory.stages)
    assert host.node == pytest.approx(12 * max(first + second, third + last), rel=0.02)
    assert host.node < 0.9 * 12 * 2 * max(first, last)


def test_a_plan_that_overflows_its_hosts_says_so_and_what_fits() -> None:
    words = ("engine=zero", "cluster.host.memory=100e9")
    plan = plan_of(*words)
    host = host_of(plan)
    assert host.node > 100e9
    assert (plan.ok, plan.fits) == (True, False)
    assert plan.memory
    assert plan.memory.peak < plan.memory.capacity
    (problem,) = plan.problems
    assert problem.says.startswith(f"needs {host.node / 2**30:.1f} GiB of 93.1 on each node's host: of a rank optimizer ")
    assert ("parallel.offload.optimizer=false",) in problem.changes
    for change in problem.changes:
        assert make_plan(load_recipe("llama3_8b_1node", ["parallel.zero=2", "parallel.offload.optimizer=true", *words, *change])).fits
    page = plan_text(plan, Style())
    assert "does not fit: needs" in page.splitlines()[0]
    assert "93.1 GiB on each node's host" in " ".join(page.split())
    assert "On a node's host" in page


def test_the_bar_of_a_step_doubles_the_hosts_part_alone() -> None:
    plan, plain = plan_of("engine=native"), make_plan(load_recipe("llama3_8b_1node", ["engine=native", "parallel.zero=2"]))
    assert plan.time
    assert plan.step_high
    bar = plain.bars["step"]
    rest = plan.time.step - plan.time.optimizer
    assert plan.step_high == pytest.approx(rest * bar.high + plan.time.optimizer * 2)
    assert plan.step_low == pytest.approx(rest / bar.low + plan.time.optimizer / 2)
    assert plan.bars["step"].because.startswith(f"{bar.because}; the optimizer's part on the host within a factor of 2")


def test_a_host_that_is_faster_shortens_the_step_alone() -> None:
    slow, fast = (plan_of("engine=native", f"cluster.host.bandwidth={each}", "cluster.host.link=1e15") for each in (100e9, 200e9))
    assert slow.time
    assert fast.time
    normed = slow.time.optimizer - 2 * (slow.time.optimizer - fast.time.optimizer)  # what the host's rate does not change
    assert 0 < normed < 0.05 * slow.time.optimizer
    assert replace(slow.time, step=0, optimizer=0) == replace(fast.time, step=0, optimizer=0)


def optimizer_seconds(*words: str) -> float:
    plan = plan_of(*words)
    assert plan.time
    return plan.time.optimizer


def test_the_ranks_of_a_node_share_its_host() -> None:
    words = ("engine=zero", "cluster.host.link=1e15")
    assert optimizer_seconds(*words, "cluster=1x8") == pytest.approx(8 * optimizer_seconds(*words, "cluster=8x1"), rel=0.05)


@pytest.mark.parametrize(("engine", "zero", "each"), [("zero", 2, 8 + 28 + 6), ("native", 2, 28), ("native", 3, 30)])
def test_a_step_on_the_host_reads_and_writes_so_many_bytes(engine: str, zero: int, each: int) -> None:
    """DeepSpeed clips, steps and casts; parts of ours are cast in a processor's cache. Gradients of ZeRO 3 are float32."""
    layout = (f"engine={engine}", f"parallel.zero={zero}", "cluster.host.link=1e15")
    slow, fast = (optimizer_seconds(*layout, f"cluster.host.bandwidth={rate}") for rate in (1e11, 1e15))
    assert slow - fast == pytest.approx(8.03e9 * each / (1e11 * HOST_STREAMING), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "each"),
    [
        (("engine=zero", "train.microbatch=4"), 0),
        (("engine=zero", "train.microbatch=4", "parallel.zero=3"), 0),
        (("engine=zero", "train.microbatch=16", "parallel.zero=1"), 0),
        (("engine=zero", "train.microbatch=4", "parallel.zero=1"), 2),
        (("engine=zero", "train.microbatch=4", "train.gradients=fp32"), 4 / 8),
        (("engine=native", "train.microbatch=4"), 2 / 8),
        (("engine=native", "train.microbatch=4", "parallel.zero=1"), 2),
        (("engine=native", "train.microbatch=4", "parallel.zero=3"), 4 / 8),
    ],
    ids=str,
)
def test_gradients_that_stay_on_the_device(words: tuple[str, ...], each: float) -> None:
    """In bytes of a parameter of the model, over eight ranks."""
    plan = plan_of("train.batch=128", *words)
    assert plan.memory
    assert plan.model
    assert plan.memory.stages[0].bytes.gradients == pytest.approx(each * plan.model.parameters, rel=1e-3)


def test_copies_of_engine_native_go_on_beside_its_step() -> None:
    """Those of a step take less time than it, so that all but one piece's are hidden; DeepSpeed's come after it."""
    fast, slow = "cluster.host.link=1e15", "cluster.host.link=20e9"
    native, zero = (optimizer_seconds(f"engine={each}", slow) - optimizer_seconds(f"engine={each}", fast) for each in ("native", "zero"))
    own = 8.03e9 / 8
    assert native == pytest.approx(2**24 * (2 + 2) / 20e9, rel=1e-3)
    assert zero == pytest.approx(2 * own / 20e9, rel=1e-3)


def test_rows_of_zero_3_are_half_as_wide_where_the_host_steps_them() -> None:
    """Weights of forward's type stay on the device; float32 ones, 12 bytes a parameter with AdamW's states, leave it. What is gathered is
    the same."""
    words = ("engine=native", "parallel.zero=3", "train.batch=128")
    plain, host = (make_plan(load_recipe("llama3_8b_1node", [*words, f"parallel.offload.optimizer={each}"])) for each in ("false", "true"))
    assert (plain.runnable, host.runnable) == (True, True)
    assert plain.memory
    assert host.memory
    assert plain.model
    before, after = plain.memory.stages[0].bytes, host.memory.stages[0].bytes
    own = plain.model.parameters / 8
    assert (before.weights, before.optimizer) == pytest.approx((4 * own, 8 * own), rel=1e-3)
    assert after.weights == pytest.approx(2 * own, rel=1e-3)
    assert after.optimizer == 0
    assert (after.gradients, after.buffers) == (before.gradients, before.buffers)
    messages = [[each for each in plan.traffic if each.axis != "host"] for plan in (plain, host)]
    assert [each.sent for each in messages[0]] == [each.sent for each in messages[1]]


def test_native_keeps_offloaded_weights_and_gradients_on_the_host_and_copies_them_at_each_micro_batch() -> None:
    """Weights in forward's type, pinned, to the device twice a micro-batch, those of the ends once; gradients in their type to the host
    once. The step copies nothing."""
    words = ("engine=native", "parallel.zero=3", "parallel.offload.parameters=true", "train.batch=256", "train.microbatch=2")
    plan = plan_of(*words)
    assert plan.runnable
    assert plan.memory
    assert plan.model
    own, micros, ends = plan.model.parameters / 8, 16, 2 * 128256 * 4096 / 8
    held, host = plan.memory.stages[0].bytes, host_of(plan).rank
    assert (held.weights, held.gradients, held.optimizer) == (0, 0, 0)
    assert 2 * own < host.weights < 4 * own
    assert (host.gradients, host.optimizer, host.buffers) == pytest.approx((4 * own, 12 * own, 2 * 2 * 2**27), rel=1e-3)
    copied = [(each.verb, each.sent) for each in plan.traffic if each.axis == "host"]
    sent = {verb: sorted(size for each, size in copied if each == verb) for verb in ("to_device", "to_host")}
    assert sent["to_device"] == pytest.approx([micros * 2 * (own - ends), micros * 2 * own], rel=1e-3)
    assert sent["to_host"] == pytest.approx([micros * 2 * own], rel=1e-3)


@pytest.mark.parametrize(("batch", "moved"), [(16, 2 + 4), (32, 2 + 8)])
def test_native_waits_for_the_sums_of_the_gradients_that_reach_the_host_last(batch: int, moved: int) -> None:
    """Of two buffers of 2^27 elements: once all passes are done the host reads each gradient, from the second micro-batch on its sum too,
    and writes the sum. The copies and earlier sums hide under backward."""
    words = ("engine=native", "parallel.zero=3", "parallel.offload.parameters=true", "train.microbatch=2", "cluster.host.bandwidth=1e12")
    wait = next(each.exposed for each in plan_of(*words, f"train.batch={batch}").traffic if each.verb == "to_host")
    assert wait == pytest.approx(2 * 2**27 * moved / (HOST_STREAMING * 1e12 / 8), rel=0.02)


def test_one_rank_alone_keeps_offloaded_weights_on_its_host() -> None:
    """Of 8 B parameters 128 GiB: its GPU has the ends and some layers."""
    words = ("cluster.gpus=1", "engine=native", "parallel.zero=3", "parallel.offload.parameters=true", "parallel.recompute=full")
    plan = plan_of(*words)
    assert plan.runnable
    assert plan.memory
    assert plan.memory.stages[0].bytes.buffers == pytest.approx(2 * 2 * 128256 * 4096, rel=1e-3)
    assert plan.memory.peak < 20e9
    assert host_of(plan).node > 16 * 8e9


def test_the_norm_reads_float32_gradients_of_zero_3_before_the_host_steps() -> None:
    """What no rate of the host shortens is that of ZeRO 2 with gradients in float32."""
    fast = ("engine=native", "cluster.host.link=1e30", "cluster.host.bandwidth=1e30")
    narrow, wide = (optimizer_seconds(*fast, "parallel.zero=2", f"train.gradients={each}") for each in ("bf16", "fp32"))
    assert narrow < optimizer_seconds(*fast, "parallel.zero=3") == pytest.approx(wide, rel=1e-9)


def test_copies_hide_under_backward_where_messages_overlap() -> None:
    waits: list[Any] = []
    for overlap in ("true", "false"):
        plan = plan_of("engine=zero", "train.batch=128", "train.microbatch=16", f"parallel.overlap.data={overlap}")
        (row,) = (each for each in plan.traffic if each.verb == "to_host")
        waits.append(row.exposed / row.seconds if row.exposed is not None and row.seconds else None)
    assert waits == [pytest.approx(0.5), pytest.approx(1.0)]
