"""Plans of attention inside documents of stated lengths: what it counts, what it computes, and for whom ranks wait."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from statistics import fmean
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.document_facts import documents_text
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.costs.op_seconds import attention_seconds
from distrain.trainer.plan.costs.roofline import CPU_CALL, CPU_FLASH_KEYS, rates
from distrain.trainer.plan.costs.uneven_documents import SeenKeys, drawn_windows, slowest_part, slowest_replica
from distrain.trainer.plan.estimate import Estimator
from distrain.trainer.plan.layout_cost import layout_blocks
from distrain.trainer.plan.layout_of_run import layout_of_run
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.plan.timeline.make_timeline import make_timeline
from distrain.trainer.plan.timeline.step_costs import step_costs
from distrain.trainer.rundir.timeline_files import layout_key
from distrain.trainer.spec.derived.document_pairs import DocumentLengths, mean_documents, mean_pairs
from distrain.trainer.spec.run import Device, Run

SEQ = 64
MIXED = (1, 5, 20, 150)
APART = ("data=text", "data.path=x", "data.documents=true")
DOCUMENTS = (*APART, "data.document_tokens=[100,100,100,20000]")
LONG = ("data.document_tokens=1000000000000",)  # no sequence has the end of one


def text_windows(lengths: tuple[int, ...], windows: int, seq: int = SEQ, *, packed: bool = False) -> list[list[int]]:
    """Return the tokens of each document in windows that lie end to end in a text, or hold whole documents."""
    draw, found, held = Random(7), list[list[int]](), list[int]()
    while len(found) < windows:
        left = draw.choice(lengths)
        if packed:
            left = min(left, seq)
            if sum(held) + left > seq:
                found.append(held)
                held = []
            held.append(left)
            continue
        while left:
            part = min(left, seq - sum(held))
            held.append(part)
            left -= part
            if sum(held) == seq:
                found.append(held)
                held = []
    return found


def seen(tokens: int, window: int) -> int:
    """Twice the pairs of query and key that are seen in a document; each query sees itself once."""
    return sum(2 * min(at + 1, window) - 1 for at in range(tokens))


@pytest.mark.parametrize("lengths", [(3,), (64,), (1000,), MIXED])
def test_pairs_and_documents_are_those_of_windows_that_lie_end_to_end_in_a_text(lengths: tuple[int, ...]) -> None:
    """A prime number of tokens in a window, so that it begins anywhere in a document of any length."""
    windows = text_windows(lengths, 20_000, 67)
    known = DocumentLengths(lengths, packed=False)
    assert mean_pairs(known, 67) == pytest.approx(
        fmean(seen(each, 67) for window in windows for each in window) * fmean(map(len, windows)), rel=0.01
    )
    assert mean_documents(known, 67) == pytest.approx(fmean(map(len, windows)), rel=0.01)


def test_windows_of_packed_examples_hold_whole_ones() -> None:
    """Apart from padding, of which a plan has none."""
    known = DocumentLengths((2, 8, 100), packed=True)
    windows = text_windows(known.tokens, 20_000, packed=True)
    tokens = sum(map(sum, windows))
    assert mean_pairs(known, SEQ) / SEQ == pytest.approx(sum(each**2 for window in windows for each in window) / tokens, rel=0.02)
    assert mean_documents(known, SEQ) / SEQ == pytest.approx(sum(map(len, windows)) / tokens, rel=0.02)


def test_a_window_of_attention_counts_the_keys_that_its_queries_see() -> None:
    known, windows = DocumentLengths((4, 30, 90), packed=False), text_windows((4, 30, 90), 20_000, 67)
    found = fmean(sum(seen(each, 10) for each in window) for window in windows)
    assert mean_pairs(known, 67, 10) == pytest.approx(found + 67 - 10, rel=0.01)  # as a whole sequence's are counted
    assert mean_pairs(known, 67, 67) == mean_pairs(known, 67)


def plan_of(recipe: str, *words: str) -> Plan:
    return make_plan(load_recipe(recipe, words))


@pytest.mark.parametrize("words", [(), ("parallel.cp=2",), ("model=olmo3_7b",), ("train.precision=fp32", "cluster.device.peak.fp32=6e13")])
def test_documents_longer_than_any_sequence_cost_what_whole_sequences_cost(words: tuple[str, ...]) -> None:
    whole, long = (plan_of("llama3_8b_1node", *APART, *each, *words) for each in ((), LONG))
    assert whole.model
    assert long.model
    assert whole.time
    assert long.time
    assert long.model.flops_per_token == pytest.approx(whole.model.flops_per_token, rel=1e-6)
    assert long.time.step == pytest.approx(whole.time.step, rel=1e-6)
    assert long.memory == whole.memory


def test_attention_counts_the_pairs_inside_documents() -> None:
    """12 hidden layers FLOPs for each pair of a query and a key, forward and backward: 2 products of queries, keys and values."""
    run = load_recipe("llama3_8b_1node", [*APART, "data.document_tokens=[100,3000]"])
    apart, whole = CostContext(run), CostContext(replace(run, data=replace(run.data, document_tokens=None)))
    pairs = mean_pairs(DocumentLengths((100, 3000), packed=False), run.train.seq)
    fewer = 12 * run.model.layers * run.model.hidden * (run.train.seq - pairs / run.train.seq)
    assert whole.flops_per_token - apart.flops_per_token == pytest.approx(fewer, rel=1e-6)


@pytest.mark.parametrize("form", ["math", "mask"])
def test_a_mask_counts_fewer_pairs_and_computes_them_all(form: str) -> None:
    words = ("train.attention=math",) if form == "math" else ("train.precision=fp32", "cluster.device.peak.fp32=6e13")
    whole, short = (plan_of("llama3_8b_1node", *APART, *words, *each) for each in ((), ("data.document_tokens=100",)))
    assert whole.model
    assert short.model
    assert whole.time
    assert short.time
    assert short.documents
    assert short.model.flops_per_token < 0.85 * whole.model.flops_per_token
    assert short.time.step == whole.time.step
    assert not short.documents.computed


def core_of(run: Run) -> float:
    context = CostContext(run)
    return layout_blocks(context, layout_of_run(context, run.parallel, run.train.microbatch)).layer.core


def cpu_run(*words: str) -> Run:
    device = Device(name="cpu", memory=1e12, kind="cpu", peak={"fp32": 1e11}, bandwidth=1e10, flash=1.0, launch=0.0, dispatch=0.0)
    run = load_recipe("quickstart", ["cluster.gpus=1", "train.precision=fp32", "train.seq=1024", "train.microbatch=2", *words])
    return replace(run, cluster=replace(run.cluster, device=device))


def test_a_cpu_calls_its_kernel_for_each_document() -> None:
    short, shorter = (core_of(cpu_run(*APART, f"data.document_tokens={each}")) for each in (32, 16))
    pairs = [mean_pairs(DocumentLengths((each,), packed=False), 1024) for each in (32, 16)]
    known = rates(cpu_run().cluster.device, "fp32", fused=False)
    assert known
    flops = 4 * 256 * 0.5 * 2  # of a pair, in two sequences
    computing = [sum(attention_seconds(flops * each, 32, each / 1024, 2.5, known)) for each in pairs]
    calls = 2 * 3.5 * CPU_CALL * (1023 / 16 - 1023 / 32)
    assert shorter - short == pytest.approx(computing[1] - computing[0] + calls, rel=1e-9)


def test_a_cpu_reaches_the_measured_rate_at_the_measured_keys_and_less_with_fewer() -> None:
    known = rates(cpu_run().cluster.device, "fp32", fused=False)
    assert known
    measured, short, long = (attention_seconds(1e9, 128, keys, 1.0, known)[0] for keys in (CPU_FLASH_KEYS, 64, 4096))
    assert measured == pytest.approx(1e9 / 1e11)
    assert short / measured == pytest.approx(2 / 1.25)
    assert long < measured


FLAT = SeenKeys(0.0)


@pytest.mark.parametrize(("ranks", "sequences"), [(2, 1), (8, 1), (8, 4), (8, 32), (64, 1), (64, 16)])
def test_the_slowest_replica_is_that_of_a_text(ranks: int, sequences: int) -> None:
    """Against groups of ranks that draw their sequences from windows of a text."""
    known, draw = DocumentLengths((8, 8, 8, 200), packed=False), Random(3)
    loads = [sum(each**2 for each in window) for window in text_windows(known.tokens, 20_000)]
    sums = [[sum(draw.choices(loads, k=sequences)) for _ in range(ranks)] for _ in range(400)]
    assert slowest_replica(known, SEQ, sequences, ranks, FLAT) == pytest.approx(fmean(map(max, sums)) / sequences / fmean(loads), rel=0.06)


def test_of_many_replicas_the_slowest_has_the_longest_window_drawn() -> None:
    known = DocumentLengths((8, 8, 8, 200), packed=False)
    loads = [sum((end - begin) ** 2 for begin, end in pairwise(each)) for each in drawn_windows(known, SEQ)]
    assert slowest_replica(known, SEQ, 1, 100_000, FLAT) == pytest.approx(max(loads) / fmean(loads))


def test_sequences_of_a_micro_batch_even_out_between_ranks_that_share_them() -> None:
    one, four = (plan_of("llama3_8b_128k", *DOCUMENTS, f"train.microbatch={each}").documents for each in (1, 4))
    assert one
    assert four
    assert one.slowest > 1.05
    assert four.slowest - 1 == pytest.approx((one.slowest - 1) / 2)


def test_ranks_of_experts_wait_at_every_micro_batch() -> None:
    words = ("model=mixtral_8x7b", "parallel.zero=1", "train.batch=256", "train.microbatch=1", "engine=papers")
    apart, together = (plan_of("llama3_8b_1node", *DOCUMENTS, *words, f"parallel.ep={each}").documents for each in (1, 8))
    assert apart
    assert together
    assert apart.wait
    assert together.wait
    assert together.wait > 1.5 * apart.wait


def test_a_stage_of_two_waits_for_half_of_the_layers() -> None:
    run = load_recipe("llama3_8b_1node", [*DOCUMENTS, "parallel.pp=2", "train.microbatch=1", "engine=native", "parallel.zero=0"])
    documents, context = make_plan(run).documents, CostContext(run)
    layout = layout_of_run(context, run.parallel, 1)
    seen = SeenKeys((650 + 2.5 * 1000) / 3.5)
    longer = slowest_replica(DocumentLengths((100, 100, 100, 20000), packed=False), run.train.seq, layout.micros, 4, seen) - 1
    core = run.model.layers / 2 * layout_blocks(context, layout).layer.core
    assert documents
    assert documents.wait == pytest.approx(longer * layout.micros * core)


def test_recomputation_runs_attention_again() -> None:
    once, again = (core_of(cpu_run(f"parallel.recompute={each}")) for each in ("none", "full"))
    assert again / once == pytest.approx(4.5 / 3.5)


def test_steps_over_documents_of_other_lengths_are_of_other_layouts() -> None:
    plain, short = (load_recipe("llama3_8b_1node", [*APART, f"data.document_tokens={each}"]) for each in (10, 20))
    assert layout_key(plain) != layout_key(short)


def test_wasted_keys_and_windows_make_replicas_more_alike() -> None:
    known = DocumentLengths((8, 8, 8, 200), packed=False)
    plain, wasted, windowed = (slowest_replica(known, SEQ, 1, 8, each) for each in (FLAT, SeenKeys(100.0), SeenKeys(0.0, 4, 1.0)))
    assert 1 < windowed < wasted < plain
    assert slowest_replica(known, SEQ, 1, 1, FLAT) == 1
    assert slowest_replica(DocumentLengths((10**9,), packed=False), SEQ, 1, 8, FLAT) == pytest.approx(1)


def test_the_drawn_windows_are_those_of_a_text() -> None:
    """Within three deviations of their mean."""
    for packed in (False, True):
        known = DocumentLengths((4, 16, 100), packed=packed)
        loads = [sum((end - begin) ** 2 for begin, end in pairwise(each)) for each in drawn_windows(known, SEQ)]
        found = [sum(each**2 for each in window) for window in text_windows(known.tokens, 5_000, packed=packed)]
        deviation = (fmean((each - fmean(loads)) ** 2 for each in loads) / len(loads)) ** 0.5
        padding = fmean((SEQ - sum(window)) ** 2 for window in text_windows(known.tokens, 5_000, packed=packed)) if packed else 0.0
        assert abs(fmean(loads) - fmean(found) - padding) < 3 * deviation


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("lengths", [(8,), (8, 8, 8, 200)])
def test_the_busiest_part_is_that_of_a_text(lengths: tuple[int, ...], parts: int) -> None:
    """Rank r of c has chunks r and 2c - 1 - r."""
    most = whole = 0
    for window in text_windows(lengths, 4_000, 56 if lengths == (8,) else SEQ):
        seq = sum(window)
        starts = list(accumulate(window, initial=0))
        keys = [1 + at - starts[bisect_right(starts, at) - 1] for at in range(seq)]
        chunk = [at * 2 * parts // seq for at in range(seq)]
        ranks = [sum(2 * many - 1 for many, each in zip(keys, chunk, strict=True) if each in (r, 2 * parts - 1 - r)) for r in range(parts)]
        most, whole = most + max(ranks), whole + sum(ranks)
    known = DocumentLengths(lengths, packed=False)
    if lengths != (8,):
        assert slowest_part(known, SEQ, parts, SeenKeys(0.0)) == pytest.approx(most * parts / whole, rel=0.05)
    assert slowest_part(known, SEQ, parts, SeenKeys(1e9)) == pytest.approx(1, abs=1e-4)
    assert slowest_part(DocumentLengths((10**9,), packed=False), SEQ, parts, SeenKeys(0.0)) == pytest.approx(1)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("reach", [4, 8, 48])
@pytest.mark.parametrize("windowed", [0.5, 1.0])
def test_the_busiest_part_is_that_of_a_window(windowed: float, reach: int, parts: int) -> None:
    """Of whole sequences the first tokens see fewer keys, so that the rank which has them waits for the others."""
    ranks = []
    for rank in range(parts):
        tokens = [at for at in range(SEQ) if at * 2 * parts // SEQ in (rank, 2 * parts - 1 - rank)]
        ranks.append(sum((1 - windowed) * (at + 1) + windowed * min(at + 1, reach) for at in tokens))
    found = slowest_part(None, SEQ, parts, SeenKeys(0.0, reach, windowed))
    assert found == pytest.approx(max(ranks) * parts / sum(ranks), rel=0.01)
    assert found > 1


def test_replicas_wait_for_the_one_with_the_longest_documents() -> None:
    words = ("cluster.device.dispatch=0", "train.batch=32", "train.microbatch=1")
    once, often = (
        plan_of("llama3_8b_1node", *words, *DOCUMENTS, *each)
        for each in (("parallel.zero=1",), ("parallel.zero=3", "parallel.gather=micro"))
    )
    alone = plan_of("llama3_8b_1node", *DOCUMENTS, "parallel.dp=1", "parallel.tp=8")
    assert once.documents
    assert often.documents
    assert alone.documents
    assert once.documents.wait
    assert often.documents.wait
    assert once.documents.wait < often.documents.wait
    assert alone.documents.wait == 0
    run = load_recipe("llama3_8b_1node", [*words, *DOCUMENTS, "parallel.zero=1"])
    context = CostContext(run)
    layout = layout_of_run(context, run.parallel, 1)
    core = run.model.layers * layout_blocks(context, layout).layer.core
    waste = SeenKeys((650 + 2.5 * 1000) / 3.5)
    longer = slowest_replica(DocumentLengths((100, 100, 100, 20000), packed=False), run.train.seq, layout.micros, 8, waste) - 1
    assert once.documents.wait == pytest.approx(longer * layout.micros * core)


def test_a_step_is_longer_by_the_wait_for_the_slowest_replica() -> None:
    run = load_recipe("llama3_8b_1node", [*DOCUMENTS, "parallel.zero=1"])
    plan, context = make_plan(run), CostContext(run)
    layout = layout_of_run(context, run.parallel, run.train.microbatch)
    assert plan.time
    assert plan.documents
    assert plan.documents.wait
    parts = plan.time.compute + plan.time.exposed + plan.time.bubble + plan.time.optimizer + plan.time.host
    assert plan.time.step == pytest.approx(parts)
    assert plan.time.exposed > plan.documents.wait
    assert layout.mesh.dp == 8


@pytest.mark.parametrize("words", [(), ("parallel.pp=2",), ("parallel.pp=2", "parallel.schedule=zb_h1"), ("parallel.cp=2",)])
def test_a_timeline_is_as_long_as_planned(words: tuple[str, ...]) -> None:
    run = load_recipe("llama3_8b_1node", [*DOCUMENTS, *words, "parallel.zero=1", "train.batch=32"])
    costs = step_costs(run)
    assert costs
    assert make_timeline(costs).seconds == pytest.approx(costs.planned, rel=0.02 if run.parallel.pp > 1 else 1e-9)


@pytest.mark.parametrize("words", [(), ("parallel.pp=2",), ("parallel.cp=2",), ("parallel.ep=2", "model=mixtral_8x7b")])
def test_estimates_and_searches_plan_documents(words: tuple[str, ...]) -> None:
    run = load_recipe("llama3_8b_1node", [*DOCUMENTS, *words, "train.batch=32"])
    plan = make_plan(run)
    assert plan.time
    assert Estimator(run)(run.parallel, run.train.microbatch).step == pytest.approx(plan.time.step, rel=1e-12)


def test_the_page_says_what_attention_computes_and_for_whom_ranks_wait() -> None:
    text = documents_text(plan_of("llama3_8b_128k", *APART, "data.document_tokens=[500,3000,100000]"))
    assert text.startswith("attention computes 5")
    assert "of a whole sequence's pairs: documents of 34,500 tokens; the busiest rank of a sequence has 1." in text
    short = documents_text(plan_of("llama3_8b_1node", *DOCUMENTS, "train.attention=math"))
    assert short.startswith("attention counts")
    assert "replica" not in short
    assert "a step is for the replica with the longest" in documents_text(plan_of("llama3_8b_1node", *DOCUMENTS))
    assert documents_text(plan_of("llama3_8b_1node")) == documents_text(plan_of("llama3_8b_1node", *APART)) == ""


def test_a_plan_warns_of_documents_of_unknown_lengths_where_attention_takes_long() -> None:
    def warned(*words: str) -> list[Any]:
        return [str(each) for each in plan_of("llama3_8b_1node", *words).warnings if each.rule == "documents"]

    (found,) = warned(*APART)
    assert found.startswith("data.documents=true: attention, 15 % of a layer's time, is planned as if each sequence were one document")
    assert warned(*APART, "train.seq=512") == warned(*DOCUMENTS) == warned() == []
