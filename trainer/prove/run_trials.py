"""Trains the runs of a proof one after another on the fork server, and has each judged against one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from ..rundir.checkpoints import checkpoints_folder
from ..system.cpu import cpu_count
from .checks.compare_trial_messages import compare_trial_messages
from .checks.curve import Curve, read_curve
from .checks.samples import sample_problem
from .confirm_departures import WIDE_FOLDER, confirm_departures, may_be_rounding
from .fork_client import START_AFRESH, ForkServer, JobResult
from .judge import (
    LayoutResult,
    ProofResult,
    departure_reason,
    departure_step,
    figure_departures,
    is_slight,
    judge_beside_curve,
    rounding_grows,
    tolerance,
    widened_tolerance,
    with_differences,
)
from .judge_exits import exit_verdict
from .locate_departure import locate_departure, remove_recording
from .trials.control_and_resume_trials import move_midway_checkpoint
from .trials.plan_proof import Proof, without_evaluation
from .trials.trial import Trial, write_run_folder

PATIENCE = 60.0  # seconds that a layout has at least for its start and its end
LONGER = (
    3.0  # times the seconds of one process, from start to end, that a layout has for them: where layers are compiled, that takes longest
)
SLOWER = 10.0  # times the seconds of one process's steps that each rank of a layout has for its own
TRACING_FACTOR = 5.0  # times as long again where every module is traced

Show = Callable[[str], None]
StartServer = Callable[[Path, Mapping[str, str]], AbstractContextManager[ForkServer]]  # from its log file and its environment


def start_seconds(one_process: float) -> float:
    """The seconds that a layout has for its start and its end, where one process took so many from start to end."""
    return max(PATIENCE, LONGER * one_process)


class Prover:
    """Trains the runs of a proof on a fork server and judges each."""

    def __init__(self, proof: Proof, server: ForkServer, live: Show, *, locates: bool = True) -> None:
        """`locates`: where a layout departs, it is trained again to find the module."""
        self.proof = proof
        self._server = server
        self._live = live
        self._patience = PATIENCE
        self._locates = locates

    def prove(self, on_result: Callable[[LayoutResult], None]) -> ProofResult:
        """Train one process, then each layout, then the checks; call `on_result` with each result. Stops if one process fails.

        Raises ServerGone.
        """
        result = self._prove_reference()
        on_result(result.reference)
        if result.reference.verdict == "same":
            result = self._prove_layouts(result, on_result)
            result = self._check_microbatch(result, on_result)
            result = self._check_resume(result, on_result)
        remove_recording(self.proof.reference)
        return result

    def _prove_reference(self) -> ProofResult:
        """Train one process; without an evaluation if it fails with one, as where no text is held out for it."""
        reference, why = self._train_reference(), ""
        if reference.verdict == "failed":
            evaluated, self.proof = reference, without_evaluation(self.proof)
            reference = self._train_reference()
            why = evaluated.reason if reference.verdict == "same" else ""
        if reference.verdict == "same" and (problem := sample_problem(reference.trial, reference.trial)):
            reference = replace(reference, verdict="departs", reason=problem)
        return ProofResult(reference=reference, layouts=(), tolerance=tolerance(reference), no_evaluation=why)

    def _train_reference(self) -> LayoutResult:
        """Train one process; what it takes decides how long layouts may take to start."""
        began = monotonic()
        reference = self._train(self.proof.reference, "one process", None)
        self._patience = start_seconds(monotonic() - began)
        return reference

    def _prove_layouts(self, proof: ProofResult, on_result: Callable[[LayoutResult], None]) -> ProofResult:
        for number, trial in enumerate(self.proof.trials, 1):
            result = self._train(trial, f"{number}/{len(self.proof.trials)} {trial.layout.name}", self._limit(trial, proof))
            if result.verdict == "same":
                result, proof = self._judge(result, proof)
            proof = replace(proof, layouts=(*proof.layouts, result))
            on_result(result)
        return proof

    def _check_microbatch(self, proof: ProofResult, on_result: Callable[[LayoutResult], None]) -> ProofResult:
        """Judge one process with other micro-batches."""
        if self.proof.control is None or not self.proof.control.check:
            return proof
        proof = self._with_control(proof)
        assert proof.control is not None
        on_result(proof.control)
        return proof

    def _check_resume(self, proof: ProofResult, on_result: Callable[[LayoutResult], None]) -> ProofResult:
        """Train the second half of the steps in another layout than the first, from what that one saved."""
        trial, saver = self.proof.resume, self.proof.saver
        if trial is None or saver is None or not any(each.trial is saver and each.curve for each in proof.layouts):
            return proof  # nothing was saved midway

        def prepare() -> None:
            move_midway_checkpoint(saver, trial, self.proof.steps)

        result = self._train(trial, trial.name, self._limit(trial, proof), prepare)
        if result.verdict == "same":
            result, proof = self._judge(result, proof)
        on_result(result)
        if result.verdict == "same":
            _remove_checkpoints(each for each in proof.layouts if each.trial is saver and each.verdict == "same")
        return replace(proof, resumed=result)

    def _limit(self, trial: Trial, proof: ProofResult) -> float:
        """The seconds that a layout has."""
        return self._patience + SLOWER * trial.plan.world * proof.reference.seconds

    def _train(self, trial: Trial, where: str, limit: float | None, prepare: Callable[[], None] = lambda: None) -> LayoutResult:
        """Train a run to its end, in `limit` seconds; if all its ranks succeed it counts as the same until it is judged.

        `prepare` is called when its run folder is there.
        """
        write_run_folder(trial)
        prepare()
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
        return LayoutResult(trial=trial, verdict=verdict, reason=reason, seconds=seconds, curve=read_curve(trial.folder))

    def _judge(self, result: LayoutResult, proof: ProofResult) -> tuple[LayoutResult, ProofResult]:
        """Compare a successful run with one process; where it departs slightly, first widen the tolerance by a control run."""
        is_simulated = result.trial.layout.has_other_curve
        result = self._compare_simulated(result, proof.reference) if is_simulated else self._compare(result, proof.reference)
        if result.verdict == "same" and not is_simulated and is_slight(result, proof):
            proof = self._with_control(proof)
        if result.verdict == "same" and (reason := departure_reason(proof.reference, result, proof.tolerance)):
            result = replace(result, verdict="departs", reason=reason, departure=self._locate(result, proof))
        if result.verdict == "same":
            result = judge_beside_curve(result)
        if result.verdict == "same" and result.trial is not self.proof.saver:
            _remove_checkpoints([result])  # a dozen of a large model fill a disk
        return result, proof

    def _with_control(self, proof: ProofResult) -> ProofResult:
        """Train one process with other micro-batches, once, and widen the tolerance if that shows that rounding grows."""
        trial = self.proof.control
        if proof.control or trial is None:
            return proof
        control = self._train(trial, "one process, in other micro-batches", None)
        control = self._compare(control, proof.reference) if control.verdict == "same" else control
        if control.verdict != "same":
            return replace(proof, control=control)
        if rounding_grows(control, proof):
            return replace(proof, control=control, tolerance=widened_tolerance(proof.tolerance, control))
        if reason := departure_reason(proof.reference, control, proof.tolerance):
            control = replace(control, verdict="departs", reason=reason)
        return replace(proof, control=control)

    def _locate(self, result: LayoutResult, proof: ProofResult) -> str:
        """Trace a layout that departs; the module and rank where it first does, in words. Neither a resumed run is trained
        again, nor one that is simulated."""
        if (
            not self._locates
            or result.trial.check
            or result.trial.layout.has_other_curve
            or not departure_reason(proof.reference, replace(result, evaluation=None, samples=""), proof.tolerance)
        ):
            return ""
        self._live(f"{result.trial.layout.name}: traces where it departs")
        limit = self._patience + TRACING_FACTOR * SLOWER * result.trial.plan.world * proof.reference.seconds
        step = departure_step(proof.reference, result, proof.tolerance)
        figures = figure_departures(proof.reference, result, proof.tolerance)
        return locate_departure(proof.reference.trial, result.trial, step, figures, lambda trial: self._run_job(trial, limit))

    def _compare(self, result: LayoutResult, reference: LayoutResult) -> LayoutResult:
        """Add the differences from one process to a result; failed if they can't be computed."""
        if result.curve is None or reference.curve is None:
            return replace(result, verdict="failed", reason="it wrote no losses")
        folders = {"reference": str(reference.trial.folder), "layout": str(result.trial.folder)}
        return self._with_answer(result, reference, self._server.ask("weight_difference", **folders))

    def _compare_simulated(self, result: LayoutResult, reference: LayoutResult) -> LayoutResult:
        """Add the differences from the layout's own curve, which one process simulates; failed if they can't be computed."""
        if result.curve is None:
            return replace(result, verdict="failed", reason="it wrote no losses")
        simulated = result.trial.layout.simulation
        self._live(f"{result.trial.layout.name}: one process simulates its {simulated.replace('_', ' ')}")
        reply = self._server.ask(simulated, layout=str(result.trial.folder))
        if answer := reply.get("answer"):
            losses, norms, rates = tuple(answer["losses"]), tuple(answer["norms"]), result.curve.rates
            result = replace(result, held_to=Curve(losses=losses, norms=norms, rates=rates, evaluations=answer["evaluations"]))
        return self._with_answer(result, reference, reply)

    def _with_answer(self, result: LayoutResult, reference: LayoutResult, reply: Mapping[str, Any]) -> LayoutResult:
        """Add the differences that the fork server has computed."""
        if "failed" in reply:
            return replace(result, verdict="failed", reason=reply["failed"])
        samples = sample_problem(result.trial, reference.trial)
        return replace(with_differences(result, reference, reply["answer"]), messages=compare_trial_messages(result.trial), samples=samples)

    def _run_job(self, trial: Trial, limit: float | None, on_message: Callable[[Mapping[str, Any]], None] = lambda _: None) -> JobResult:
        run, ranks = trial.folder / "run.json", trial.plan.world
        return self._server.run_job(run, ranks, threads=threads_per_rank(trial), seconds=limit, on_message=on_message)


def threads_per_rank(trial: Trial) -> int:
    """The threads that `distrain fit` would give each rank."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) else max(1, cpu_count() // trial.plan.world)


def run_proof(
    proof: Proof,
    on_result: Callable[[LayoutResult], None],
    live: Show,
    start_server: StartServer = ForkServer,
    start_wide: StartServer | None = None,
) -> ProofResult:
    """Train and judge one process and all layouts; call `on_result` with each result as it is known. With `start_wide`, which starts a
    server of ranks in float64, what departs and may be rounding is trained there last, and has a second result if that is what it is.
    Raises ServerGone."""
    proof.folder.mkdir(parents=True, exist_ok=True)
    for stale in proof.folder.glob("*/run.json"):  # of this recipe's previous proof
        shutil.rmtree(stale.parent, ignore_errors=True)
    # On a CPU DeepSpeed would use the GPUs that it finds.
    known = {"CUDA_VISIBLE_DEVICES": ""} if proof.reference.run.cluster.device.kind == "cpu" else {START_AFRESH: "1"}
    with start_server(proof.folder / "server.log", {**os.environ, **known}) as server:
        result = Prover(proof, server, live).prove(on_result)
    if start_wide and any(may_be_rounding(each, result) for each in result.layouts):
        result = confirm_departures(proof, result, lambda wide: _run_wide(wide, live, start_wide))
        for each in result.layouts:
            if each.in_float64 and each.verdict != "departs":
                on_result(each)
    if result.ok:
        shutil.rmtree(proof.folder / WIDE_FOLDER, ignore_errors=True)
        _remove_checkpoints(each for each in result.layouts if each.verdict == "rounding")
        _remove_checkpoints([result.reference, *([result.control] if result.control else []), *result.checks])
    return result


def _run_wide(proof: Proof, live: Show, start_wide: StartServer) -> ProofResult:
    """Train a proof in float64."""
    proof.folder.mkdir(parents=True, exist_ok=True)
    with start_wide(proof.folder / "server.log", {**os.environ, "CUDA_VISIBLE_DEVICES": ""}) as server:
        return Prover(proof, server, lambda text: live(f"{WIDE_FOLDER}: {text}"), locates=False).prove(lambda _: None)


def _remove_checkpoints(results: Iterable[LayoutResult]) -> None:
    for each in results:
        shutil.rmtree(checkpoints_folder(each.trial.folder), ignore_errors=True)
