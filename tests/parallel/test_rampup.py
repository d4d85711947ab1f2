"""A batch that is ramped up (train.rampup): every engine trains the curve of one plain loop, and resumes it across a level in another
layout."""

from __future__ import annotations

import json
import re
import signal
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from msgspec.json import decode, encode  # noqa: E402
from torch import nn  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.cli.pages.report_page import planned_measured_title  # noqa: E402
from distrain.cli.verbs.prove_run import Printer, prove_recipe  # noqa: E402
from distrain.trainer.layers.counter_rng import dropout_keys  # noqa: E402
from distrain.trainer.loop.data.prepare import cache_folder, prepare_corpus  # noqa: E402
from distrain.trainer.loop.data.samples.batches import Batches  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.rundir.measured_run import read_measured_run  # noqa: E402
from distrain.trainer.rundir.timeline_report import read_timeline_report  # noqa: E402
from distrain.trainer.spec.derived.batch_levels import run_at_batch  # noqa: E402
from distrain.trainer.spec.run import Run  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

Words = tuple[str, ...]

SEQ, STEPS, STOPPED = 16, 7, 75
# From 4 to 12 sequences by 4 over 20 sequences: 4 until 10 are trained on, 8 until 20; and levels that double at numbers of their own.
LINEAR = ("train.batch=12", "train.rampup.batch=4", "train.rampup.by=4", f"train.rampup.until={20 * SEQ}")
LISTED = ("train.batch=16", "train.rampup.batch=[4,8]", f"train.rampup.until=[{8 * SEQ},{25 * SEQ}]")
BATCHES = {LINEAR: [4, 4, 4, 8, 12, 12, 12], LISTED: [4, 4, 8, 8, 8, 16, 16]}
BASE = (
    *("quickstart", "data=synthetic", f"train.steps={STEPS}", f"train.seq={SEQ}", "train.evaluate={every: 5, batches: 1}", "log.every=1"),
    *("optim.warmup=2", "optim.lr=1e-3", "train.clip=0.5", "train.precision=fp32", "log.ledger=true", "model=tiny", "model.layers=4"),
    *("model.tied=false", "model.dropout=0.1", "train.microbatch=1", "optim.min_lr=1e-4", "log.timeline=[1,2]"),
    *("cluster.device.peak.fp32=5e10", "cluster.device.bandwidth=1e10", "cluster.inside.bandwidth=1e9", "cluster.inside.latency=1e-5"),
)


@cache
def plain_losses(words: Words) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of the ramp-up in one process of plain torch, which is told the batch of each step."""
    run = load_recipe(BASE[0], [*BASE[1:], *words])
    corpus = prepare_corpus(run.data, vocab=run.model.vocab, seq=SEQ, cache=cache_folder(run.data), progress=lambda *_: None)
    samples, module = (
        Batches(corpus, seed=run.train.seed, seq=SEQ),
        build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed),
    )
    decayed = {"params": [each for each in module.parameters() if each.dim() > 1], "weight_decay": run.optim.weight_decay}
    others = {"params": [each for each in module.parameters() if each.dim() == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, others], betas=run.optim.betas, eps=run.optim.eps)
    losses, norms, first = [], [], 0
    for step, size in enumerate(BATCHES[words]):
        batch = samples.batch(first, size)
        first += size
        keys = dropout_keys(run.train.seed, step, batch.samples, torch.arange(SEQ))
        total, labels = module(batch.tokens, batch.labels, documents=None, keys=keys)
        assert int(labels) == size * SEQ
        optimizer.zero_grad()
        (total / labels).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), run.train.clip)))
        for group in optimizer.param_groups:  # the schedule goes by steps
            rise, fall = (step + 1) / 2, (STEPS - step) / (STEPS - 2)
            group["lr"] = 1e-3 * rise if step < 2 else 1e-4 + 9e-4 * {"linear": fall}.get(run.optim.schedule, _cosine(1 - fall))
        optimizer.step()
        losses.append(float(total.detach() / labels))
    return losses, norms


def _cosine(done: float) -> float:
    return float(0.5 * (1 + torch.cos(torch.tensor(done * torch.pi, dtype=torch.float64))))


def check_curve(job: PoolJob, words: Words) -> None:
    losses, norms = plain_losses(words)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)


# fmt: off
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.chunks=2")
LAYOUTS = {
    "native pipeline":    (LINEAR, ("engine=native", "parallel.pp=2", "cluster.gpus=4", "parallel.zero=1")),
    "native interleaved": (LISTED, ("engine=native", "parallel.pp=2", "cluster.gpus=2", *INTERLEAVED)),
    "native zero 3":      (LINEAR, ("engine=native", "cluster.gpus=2", "parallel.zero=3")),
    "zero 2, cp":         (LINEAR, ("engine=zero", "cluster.gpus=2", "parallel.cp=2", "parallel.zero=2")),
    "zero 0, tp":         (LINEAR, ("engine=zero", "cluster.gpus=4", "parallel.tp=2", "parallel.zero=0")),
    "pipe":               (LINEAR, ("engine=pipe", "cluster.gpus=2", "parallel.pp=2", "parallel.zero=0")),
    "pipe folded":        (LISTED, ("engine=pipe", "cluster.gpus=2", "parallel.pp=2", "parallel.zero=1", "parallel.schedule=dualpipev")),
}
# fmt: on


@pytest.mark.parametrize("name", ["native interleaved", "zero 2, cp", "pipe folded"])  # the others resume each other
def test_a_batch_that_grows_trains_the_curve_of_one_loop(ranks: RankPool, tmp_path: Path, name: str) -> None:
    words, layout = LAYOUTS[name]
    job = ranks.train(tmp_path / "run", *BASE, *words, *layout)
    check_curve(job, words)
    done, tokens = 0, []
    for size in BATCHES[words]:
        done += size * SEQ
        tokens.append(done)
    assert job.figures("tokens") == tokens
    assert job.figures("batch") == BATCHES[words]
    check_messages(job.folder, BATCHES[words])
    check_reports(job, BATCHES[words])


def check_messages(folder: Path, batches: list[int]) -> None:
    """Hold the messages that were counted to those of a step of its batch."""
    run = decode((folder / "run.json").read_bytes(), type=Run)
    counted = json.loads((folder / "ledger.json").read_text())
    of_step = run_at_batch(run, batches[counted["step"] - 1])
    lines = [line for rank, rows in enumerate(counted["ranks"]) for line in compare_rank_messages(of_step, rank, rows)]
    assert not [line for line in lines if line.verdict == "differs"]


def check_reports(job: PoolJob, batches: list[int]) -> None:
    """Hold a report to compare steps of one batch with the plan of that batch, and bytes with those of the whole one."""
    run = decode((job.folder / "run.json").read_bytes(), type=Run)
    plan = make_plan(run)
    (job.folder / "plan.json").write_bytes(encode(plan))
    assert plan.run is not None
    assert plan.time is not None
    assert [(each.batch, each.steps) for each in plan.run.levels] == [(each, batches.count(each)) for each in dict.fromkeys(batches)]
    planned = {each.batch: each.step for each in plan.run.levels}
    assert job.figures("planned_seconds") == [planned[each] for each in batches]
    report = read_measured_run(job.folder)
    assert (report.batch, report.whole_batch, report.time[0].planned) == (batches[-1], True, plan.time.step)
    assert report.time[0].measured == median(row["seconds"] for row in job.rows if row.get("batch") == batches[-1])
    assert not [each for each in report.memory if each.drift is None or abs(each.drift) > 0.005]  # as without a ramp-up
    assert json.loads((job.folder / "measured.json").read_text())["step"] == batches.index(batches[-1]) + 1
    timed = read_timeline_report(job.folder)  # of the first level, whose step has fewer micro-batches than the last one's
    assert timed.costs.layout.micros * batches[-1] == (plan.microbatches or 0) * batches[0]
    assert timed.costs.planned == planned[batches[0]]
    metrics, first = job.folder / "metrics.jsonl", batches.index(batches[-1])
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:first]))
    early = read_measured_run(job.folder)
    second = batches[first - 1]
    assert (early.batch, early.whole_batch, early.time[0].planned) == (second, False, planned[second])
    assert early.speed[0].planned == pytest.approx(second * SEQ / (planned[second] or 0))
    assert planned_measured_title(early).startswith(f"Planned and measured in steps of {second} sequences, before those of train.batch")


def test_a_run_resumes_in_other_layouts_with_the_batches_that_follow(ranks: RankPool, tmp_path: Path) -> None:
    """Stopped on one level, in the midst of the next and on the last; the engine changes each time."""
    words, chain = LINEAR, [(2, "native pipeline"), (3, "zero 0, tp"), (5, "pipe")]
    for step, name in chain:
        stopped = ranks.fit(tmp_path / "run", *BASE, *words, *LAYOUTS[name][1], signals=[(step, 0, signal.SIGTERM)])
        assert set(stopped.codes) == {STOPPED}, (name, stopped)
    check_curve(job := ranks.train(tmp_path / "run", *BASE, *words, *LAYOUTS["native zero 3"][1]), words)
    assert job.figures("batch") == BATCHES[words]
    assert [row["step"] for row in job.rows] == list(range(1, STEPS + 1)), "no step is run twice"


PROVED = (
    *("conf=quickstart", "data=synthetic", "model=tiny", "model.layers=4", "model.dropout=0.1", "train.seq=16", "train.microbatch=1"),
    *("train.precision=fp32", "train.batch=12", "train.rampup.batch=4", "cluster=local", "steps=4"),
)


def prove(ranks: RankPool, folder: Path, *words: str) -> tuple[int, str]:
    """Prove a recipe on the pool; return (exit status, what it shows in one line)."""
    shown = list[str]()
    screen = Printer(show=shown.append, tell=lambda problems: shown.extend(map(str, problems)), live=lambda line: None)
    arguments = [*PROVED, *words, f"log.dir={folder}"]
    server = lambda *_: nullcontext(ranks.server)  # noqa: E731
    status = prove_recipe(arguments, None, screen, as_json=False, reasons=True, start_server=server)
    return status, " ".join(" ".join(shown).split())


def test_layouts_and_their_own_curves_are_proved_with_a_batch_that_grows(ranks: RankPool, tmp_path: Path) -> None:
    """Among them those whose curve one process simulates: workers that step alone, sums that are used late, compressed gradients."""
    layouts = "layouts=[pp2.interleaved,dp2.sync2,dp2.stale1,dp2.powersgd2]"
    status, page = prove(ranks, tmp_path, f"train.rampup.until={10 * SEQ}", layouts)  # three steps of 4, whose messages are counted
    assert status == 0, page
    assert "a batch that grows" not in page
    assert len(re.findall(r"(?:dp2|pp2)\S+ .{0,60}? equal same", page)) == 4, page


def test_a_proof_says_that_its_steps_all_have_one_batch(ranks: RankPool, tmp_path: Path) -> None:
    _, page = prove(ranks, tmp_path, f"train.rampup.until={16 * SEQ}", "layouts=dp2")
    assert "a batch that grows, as train.rampup has it after step 4" in page
