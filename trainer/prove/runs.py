"""Trains the runs of a proof one after another on the fork server, and has each judged against one process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any

from ..plan.plan import make_plan
from ..spec.divisors import divisors
from ..system.cpu import cpu_count
from .fork_client import ForkServer, JobResult
from .judge import (
    Curve,
    LayoutResult,
    ProofResult,
    departure_reason,
    departure_step,
    exit_verdict,
    is_slight,
    tolerance,
    widened_tolerance,
    with_differences,
)
from .locate import locate_departure, remove_reference_trace
from .messages import compare_messages
from .plan_proof import Proof, Trial, write_run_folder

PATIENCE = 60.0  # seconds that a layout has for its start and its end
SLOWER = 10.0  # times the seconds of one process's steps that each rank of a layout has for its own
TRACED = 5.0  # times as long again where every module is traced

Show = Callable[[str], None]
StartServer = Callable[[Path, Mapping[str, str]], AbstractContextManager[ForkServer]]  # from its log file and its environment


class Prover:
    """Trains the runs of a proof on a fork server and judges each."""

    def __init__(self, proof: Proof, server: ForkServer, live: Show) -> None:
        self.proof = proof
        self._server = server
        self._live = live

    def prove(self, on_result: Callable[[LayoutResult], None]) -> ProofResult:
        """Train one process, then each layout; call `on_result` with each result. Stops if one process fails. Raises ServerGone."""
        reference = self._train(self.proof.reference, "one process", None)
        proof = ProofResult(reference=reference, layouts=(), tolerance=tolerance(reference))
        on_result(reference)
        for number, trial in enumerate(self.proof.trials if reference.verdict == "same" else (), 1):
            limit = PATIENCE + SLOWER * trial.plan.world * reference.seconds
            result = self._train(trial, f"{number}/{len(self.proof.trials)} {trial.layout.name}", limit)
            if result.verdict == "same":
                result, proof = self._judge(result, proof)
            proof = replace(proof, layouts=(*proof.layouts, result))
            on_result(result)
        remove_reference_trace(self.proof.reference)
        return proof

    def _train(self, trial: Trial, where: str, limit: float | None) -> LayoutResult:
        """Train a run to its end, in `limit` seconds; if all its ranks succeed it counts as the same until it is judged."""
        write_run_folder(trial)
        step_times = list[float]()
        self._live(f"{where}: starts")

        def on_message(message: Mapping[str, Any]) -> None:
            if "step" in message:
                step_times.append(monotonic())
                self._live(f"{where}: step {message['step'] + 1} of {self.proof.steps}")
            else:
                self._live(f"{where}: {message['status']}")

        job = self._run_job(trial, limit, on_message)
        verdict, reason = exit_verdict(job, limit)
        seconds = monotonic() - min(step_times, default=monotonic())
        return LayoutResult(trial=trial, verdict=verdict, reason=reason, seconds=seconds, curve=read_curve(trial))

    def _judge(self, result: LayoutResult, proof: ProofResult) -> tuple[LayoutResult, ProofResult]:
        """Compare a successful run with one process; where it departs slightly, first widen the tolerance by a control run."""
        result = self._compare(result, proof.reference)
        if result.verdict == "same" and is_slight(result, proof) and (trial := control_trial(self.proof.reference)):
            control = self._compare(self._train(trial, "one process, in other micro-batches", None), proof.reference)
            proof = replace(proof, control=control, tolerance=widened_tolerance(proof.tolerance, control))
        if result.verdict == "same" and (reason := departure_reason(proof.reference, result, proof.tolerance)):
            result = replace(result, verdict="departs", reason=reason, departure=self._locate(result, proof))
        if result.verdict == "same":
            _remove_checkpoints([result])  # a dozen of a large model fill a disk
        return result, proof

    def _locate(self, result: LayoutResult, proof: ProofResult) -> str:
        """Trace a layout that departs; the module and rank where it first does, in words."""
        self._live(f"{result.trial.layout.name}: traces where it departs")
        limit = PATIENCE + TRACED * SLOWER * result.trial.plan.world * proof.reference.seconds
        step = departure_step(proof.reference, result, proof.tolerance)
        return locate_departure(proof.reference.trial, result.trial, step, lambda trial: self._run_job(trial, limit))

    def _compare(self, result: LayoutResult, reference: LayoutResult) -> LayoutResult:
        """Add the differences from one process to a result; failed if they can't be computed."""
        if result.curve is None or reference.curve is None:
            return replace(result, verdict="failed", reason="it wrote no losses")
        folders = {"reference": str(reference.trial.folder), "layout": str(result.trial.folder)}
        reply = self._server.ask("weight_difference", **folders)
        if "failed" in reply:
            return replace(result, verdict="failed", reason=reply["failed"])
        return replace(with_differences(result, reference, reply["answer"]), messages=compare_messages(result.trial))

    def _run_job(self, trial: Trial, limit: float | None, on_message: Callable[[Mapping[str, Any]], None] = lambda _: None) -> JobResult:
        run, ranks = trial.folder / "run.json", trial.plan.world
        return self._server.run_job(run, ranks, threads=threads_per_rank(trial), seconds=limit, on_message=on_message)


def control_trial(reference: Trial) -> Trial | None:
    """One process with other micro-batches, whose departure shows how rounding grows in this recipe; None if no others divide the batch."""
    run = reference.run
    sizes = [size for size in divisors(run.train.batch) if size != run.train.microbatch]
    size = max((each for each in sizes if each < run.train.microbatch), default=min(sizes, default=0))
    if not size:
        return None
    run = replace(run, name="dp1.again", train=replace(run.train, microbatch=size))
    return Trial(layout=reference.layout, run=run, plan=make_plan(run))


def read_curve(trial: Trial) -> Curve | None:
    """The curve that a run logged in metrics.jsonl; None where it logged none."""
    with suppress(OSError, ValueError, KeyError):
        rows = [json.loads(line) for line in (trial.folder / "metrics.jsonl").read_text().splitlines()]
        return Curve(
            losses=tuple(row["loss"] if row["loss"] is not None else nan for row in rows),
            norms=tuple(row["grad_norm"] if row["grad_norm"] is not None else nan for row in rows),
            rates=tuple(row["lr"] for row in rows),
        )
    return None


def threads_per_rank(trial: Trial) -> int:
    """The threads that `distrain fit` would give each rank."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) else max(1, cpu_count() // trial.plan.world)


def run_proof(proof: Proof, on_result: Callable[[LayoutResult], None], live: Show, start_server: StartServer = ForkServer) -> ProofResult:
    """Train and judge one process and all layouts; call `on_result` with each result as it is known. Raises ServerGone."""
    proof.folder.mkdir(parents=True, exist_ok=True)
    for stale in proof.folder.glob("*/run.json"):  # of this recipe's previous proof
        shutil.rmtree(stale.parent, ignore_errors=True)
    # Without this, DeepSpeed uses the GPUs that it finds.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if proof.reference.run.cluster.device.kind == "cpu" else {}
    with start_server(proof.folder / "server.log", {**os.environ, **hidden}) as server:
        result = Prover(proof, server, live).prove(on_result)
    if result.ok:
        _remove_checkpoints([result.reference, *([result.control] if result.control else [])])
    return result


def _remove_checkpoints(results: Iterable[LayoutResult]) -> None:
    for each in results:
        shutil.rmtree(each.trial.folder / "checkpoints", ignore_errors=True)
