"""The ledger counts every message of a rank, and the counts match the plan: row by row, or to the byte with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.loop.measure.instrumentation import recorded_step
from distrain.trainer.plan.compare_rank_messages import ComparedMessages, MessageRow, compare_rank_messages, compare_with_plan
from distrain.trainer.plan.costs.traffic_term import TrafficTerm
from distrain.trainer.plan.plan_data import Message
from distrain.trainer.prove.checks.message_order import order_difference

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

# The ledger: messages of 100 float32 between two ranks that are each other's tensor axis.

# fmt: off
KINDS = {
    "all_reduce":                       [("tp", "all_reduce", 400, 1)],
    "all_reduce under way":             [("tp", "all_reduce", 400, 1)],
    "all_gather_into_tensor":           [("tp", "all_gather", 800, 1)],
    "all_gather":                       [("tp", "all_gather", 800, 1)],
    "reduce_scatter_tensor":            [("tp", "reduce_scatter", 400, 1)],
    "reduce_scatter":                   [("tp", "reduce_scatter", 400, 1)],
    "all_to_all_single":                [("tp", "all_to_all", 400, 1)],
    "broadcast":                        [("tp", "broadcast", 400, 1)],
    "barrier":                          [("control", "barrier", 0, 1)],
    "send and receive":                 [("pp", "send", 400, 1)],
    "isend and irecv":                  [("pp", "send", 400, 1)],
    "batch_isend_irecv":                [("pp", "send", 400, 1)],
    "a float":                          [("control", "all_reduce", 4, 1)],
    "losses":                           [("control", "all_reduce", 32, 1)],
    "few gradients":                    [("tp", "all_reduce", 16, 1)],
    "figures of a step":                [("control", "all_reduce", 800, 1)],
    "gradients in float64":             [("tp", "all_reduce", 800, 1)],
    "one rank":                         [],
    "another group of the same ranks":  [("tp", "all_reduce", 400, 1)],
    "backward":                         [("tp", "all_reduce", 400, 2)],
    "recomputation":                    [("tp", "all_reduce", 400, 3)],
}
# fmt: on


@cache
def seen_messages() -> dict[str, list[tuple[Any, ...]]]:
    script, environment = Path(__file__).parents[1] / "rank_programs" / "ledger_ranks.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=DEADLINE, env=environment)
    assert ended.returncode == 0, ended.stderr
    return {what: [tuple(row) for row in rows] for what, rows in json.loads(ended.stdout).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_ledger_sees_every_kind_of_message(kind: str) -> None:
    assert seen_messages()[kind] == KINDS[kind]


def test_objects_are_control() -> None:
    assert {axis for axis, *_ in seen_messages()["objects"]} == {"control"}
    assert seen_messages().keys() == {*KINDS, "objects"}


# The audit.


def planned_message(axis: str, verb: str, payload: int, count: int) -> Message:
    return Message(axis=axis, verb=verb, payload=payload, count=count, sent=0, link="inside", seconds=None, exposed=None)


def row(axis: str, verb: str, payload: int, count: int) -> MessageRow:
    return MessageRow(axis=axis, verb=verb, payload=payload, count=count)


@pytest.mark.parametrize("axis", ["tp", "pp", "copies", "cp"])
def test_messages_inside_a_replica_are_as_planned_or_differ(axis: str) -> None:
    """Whatever the bytes: two of 100 are not one of 200."""
    (same,) = compare_with_plan(
        [row(axis, "send", 100, 2)], [planned_message(axis, "send", 100, 2)], [TrafficTerm(verb="send", bytes=200, says="so")]
    )
    assert (same.verdict, same.why) == ("equal", "")
    found = compare_with_plan(
        [row(axis, "send", 200, 1)], [planned_message(axis, "send", 100, 2)], [TrafficTerm(verb="send", bytes=200, says="so")]
    )
    assert [(each.payload, each.verdict, each.why) for each in found] == [
        (100, "differs", "planned, and never sent"),
        (200, "differs", "sent, and not planned"),
    ]


def test_messages_of_the_data_axis_are_equal_in_bytes_however_they_are_cut() -> None:
    rows = [row("dp", "all_reduce", 100, 2), row("dp", "all_reduce", 50, 1)]
    (found,) = compare_with_plan(rows, [planned_message("dp", "all_reduce", 250, 1)])
    assert (found.verdict, found.payload, found.counted_count, found.counted_bytes) == ("equal", None, 3, 250)


@pytest.mark.parametrize(("bytes_told", "verdict"), [(260, "explained"), (261, "differs")])
def test_other_bytes_of_the_data_axis_are_explained_to_the_byte_or_differ(bytes_told: int, verdict: str) -> None:
    terms = [TrafficTerm(verb="all_gather", bytes=200, says="once"), TrafficTerm(verb="all_gather", bytes=bytes_told - 200, says="padded")]
    (found,) = compare_with_plan([row("dp", "all_gather", 130, 2)], [planned_message("dp", "all_gather", 250, 1)], terms)
    assert found.verdict == verdict
    assert found.why == ("once; padded" if verdict == "explained" else "more or fewer than planned")


def test_the_first_and_the_last_stage_are_planned_as_the_pipeline_and_counted_as_ends() -> None:
    (found,) = compare_with_plan([row("ends", "all_reduce", 100, 1)], [planned_message("pp", "all_reduce", 100, 1)])
    assert (found.axis, found.verdict) == ("ends", "equal")


def test_control_that_no_engine_plans_is_one_line_and_the_last() -> None:
    *_, last = compare_with_plan([row("control", "all_reduce", 4, 3), row("control", "barrier", 0, 1), row("tp", "all_reduce", 8, 1)], [])
    assert (last.axis, last.verb, last.counted_count, last.counted_bytes, last.verdict) == ("control", "any", 4, 12, "explained")


# Layouts that train.

# fmt: off
BASE = (
    "quickstart", "data=synthetic", "train.steps=2", "train.seq=32", "train.evaluate.every=0", "log.every=1", "log.ledger=true",
    "train.microbatch=1", "train.precision=fp32", "optim.warmup=0",
)
ODD: Words = (  # sizes that no number of ranks divides
    "model=tiny", "model.hidden=60", "model.ffn=131", "model.vocab=251", "model.layers=2", "model.tied=false", "train.batch=6",
    "cluster.gpus=3",
)
GPT: Words = ("model=tiny", "model.layers=2", "train.batch=4")
STAGES: Words = ("model=tiny", "model.layers=2", "train.batch=4", "parallel.pp=2")
FOLDED: Words = ("model.layers=4", "train.batch=8")  # two parts of the model a stage
LLAMA: Words = ("model=tiny_llama", "model.layers=2", "model.kv_heads=2", "model.qk_norm=true", "train.batch=4")
OLMO: Words = (*LLAMA, "model.qk_norm_over=all", "model.norm_place=after")  # of two key heads, each on two of four ranks
HALF: Words = ("train.precision=bf16", "train.gradients=fp32")
BF16: Words = ("train.precision=bf16",)
MOE: Words = ("model=tiny_moe", "parallel.pp=2")
NATIVE: Words = ("engine=native",)
EVALUATED: Words = ("train.evaluate={every: 1, batches: 1}",)  # so that the step that is counted follows an evaluation
PRECISIONS: tuple[tuple[int, Words], ...] = ((0, BF16), (0, HALF), (1, ()), (1, BF16), (2, ()), (2, HALF), (3, BF16), (3, HALF))
LAYOUTS: tuple[Words, ...] = (
    *((*ODD, f"parallel.zero={stage}", *precision) for stage, precision in PRECISIONS),
    (*ODD, "parallel.zero=1", "parallel.bucket=20000"),
    (*ODD, "parallel.zero=3", "parallel.bucket=20000"),
    ("model=tiny", "model.hidden=512", "model.layers=2", "model.ffn=600", "train.batch=4", "cluster.gpus=2", "parallel.zero=3"),
    (*GPT, "cluster.gpus=2", "parallel.tp=2", "parallel.recompute=full"),
    (*GPT, "cluster.gpus=2", "parallel.tp=2", "parallel.sequence=true", "parallel.recompute=full", "model.dropout=0.1"),
    (*GPT, "cluster.gpus=4", "parallel.tp=2", "parallel.dp=2", "parallel.sequence=true", "parallel.zero=3"),
    (*LLAMA, "cluster.gpus=4", "parallel.tp=4", "parallel.zero=1"),
    (*OLMO, "cluster.gpus=4", "parallel.tp=4", "parallel.recompute=full", *HALF),
    (*STAGES, "model.layers=4", "cluster.gpus=4", "parallel.pp=4"),
    (*STAGES, "cluster.gpus=4", "parallel.dp=2", "parallel.zero=1", *HALF),
    (*STAGES, "cluster.gpus=4", "parallel.dp=2", "parallel.schedule=gpipe", "model.tied=false"),
    (*STAGES, *FOLDED, "cluster.gpus=4", "parallel.dp=2", "parallel.schedule=dualpipev", "parallel.zero=1"),
    (*STAGES, "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true"),
    (*ODD, "model.lora.rank=3", "parallel.zero=1", *HALF),
    (*ODD, "model.lora.rank=3", "parallel.zero=3"),
    (*OLMO, "model.lora.rank=4", "cluster.gpus=4", "parallel.tp=4", "parallel.sequence=true", "parallel.zero=0"),
    *((*ODD, f"parallel.zero={stage}", "parallel.bucket=20000", *HALF, *NATIVE) for stage in range(4)),
    (*ODD, "model.lora.rank=3", "parallel.zero=3", *NATIVE),
    (*STAGES, *FOLDED, "cluster.gpus=4", "parallel.dp=2", "parallel.zero=2", "parallel.schedule=zb_v", *NATIVE),
    (*STAGES, "cluster.gpus=4", "parallel.dp=2", "parallel.zero=3", "parallel.gather=micro", *HALF, *NATIVE),
    (*GPT, "cluster.gpus=4", "parallel.dp=2", "parallel.tp=2", "parallel.sequence=true", "parallel.zero=3", *NATIVE, *EVALUATED),
    (*STAGES, "cluster.gpus=4", "parallel.tp=2", "parallel.sequence=true", "parallel.schedule=zb_h1", *NATIVE),
    (*STAGES, *FOLDED, "cluster.gpus=2", "parallel.schedule=interleaved", "parallel.chunks=2", *NATIVE),
    (*LLAMA, "cluster.gpus=4", "parallel.tp=4", "parallel.sequence=true", *NATIVE),
    (*MOE, *FOLDED, "cluster.gpus=4", "parallel.ep=2", "parallel.schedule=dualpipev_w", "parallel.zero=1", *NATIVE),
)
# fmt: on


SHOWN = ("parallel.", "train.precision", "train.gradients", "model.lora", "engine")


def name_of(words: Words) -> str:
    return " ".join(word.rpartition(".")[2] for word in words if word.startswith(SHOWN))


def audit_of_ranks(ranks: RankPool, folder: Path, words: Words) -> list[list[ComparedMessages]]:
    """The audit of each rank of a run."""
    job = ranks.train(folder, *BASE, *words)
    run = load_recipe(BASE[0], [*BASE[1:], *words])
    told = json.loads((job.folder / "ledger.json").read_text())
    assert told["step"] == 2
    orders = json.loads((job.folder / "message_order.json").read_text())["ranks"]
    assert [len(order) for order in orders] == [sum(row["count"] for row in rows if row["verb"] != "send") for rows in told["ranks"]]
    assert order_difference(job.folder) == ""
    return [compare_rank_messages(run, rank, rows) for rank, rows in enumerate(told["ranks"])]


@pytest.mark.parametrize("words", LAYOUTS, ids=name_of)
def test_every_rank_sends_what_its_plan_says(ranks: RankPool, tmp_path: Path, words: Words) -> None:
    for audit in audit_of_ranks(ranks, tmp_path / "run", words):
        assert {line.axis for line in audit} - {"control"}, "it speaks"
        assert [line for line in audit if line.verdict == "differs" or line.axis == "world"] == []
        assert {line.verdict for line in audit if line.axis not in ("dp", "ep", "control")} <= {"equal"}
        assert words[0] == MOE[0] or sum(line.counted_bytes for line in audit if line.axis == "control") <= 100


def test_counting_changes_no_number(ranks: RankPool, tmp_path: Path) -> None:
    """Nor how many bytes are held: of two steps the second is measured and counted at once."""
    words = (*BASE, *GPT, "model.dropout=0.1", "parallel.recompute=selective", "parallel.zero=2", "cluster.gpus=2")
    counted, plain = (ranks.train(tmp_path / f"counted_{word}", *words, f"log.ledger={word}") for word in ("true", "false"))
    assert counted.figures("loss") == plain.figures("loss")
    assert counted.figures("grad_norm") == plain.figures("grad_norm")
    measured = [json.loads((job.folder / "measured.json").read_text()) for job in (counted, plain)]
    assert measured[0] == measured[1]
    assert [(job.folder / "ledger.json").exists() for job in (counted, plain)] == [True, False]


def test_the_step_that_is_counted_follows_no_evaluation(ranks: RankPool, tmp_path: Path) -> None:
    """At ZeRO 3 DeepSpeed gathers weights once more in the step after one."""
    words = (*GPT, "parallel.zero=3", "cluster.gpus=2", "engine=zero", "train.steps=5", "train.evaluate={every: 2, batches: 1}")
    job = ranks.train(tmp_path / "run", *BASE, *words)
    told = json.loads((job.folder / "ledger.json").read_text())
    run = load_recipe(BASE[0], [*BASE[1:], *words])
    assert told["step"] == 4
    lines = [line for rank, rows in enumerate(told["ranks"]) for line in compare_rank_messages(run, rank, rows)]
    assert [line for line in lines if line.verdict == "differs"] == []


@pytest.mark.parametrize(
    ("keys", "step"),
    [
        ((), 2),
        (("train.evaluate.every=2",), 3),
        (("train.evaluate.every=2", "checkpoint.every=3"), 5),
        (("train.evaluate.every=1",), 2),  # each step follows one
        (("train.evaluate.every=2", "parallel.sync.every=4"), 3),
        (("train.evaluate.every=3", "parallel.sync.every=4"), 7),
    ],
)
def test_the_step_that_is_counted_is_the_first_that_is_like_others(keys: Words, step: int) -> None:
    run = load_recipe(BASE[0], [*BASE[1:], *GPT, "train.steps=20", *keys])
    assert recorded_step(run, 0, 20) == step
    assert recorded_step(run, 0, 1) == 0
