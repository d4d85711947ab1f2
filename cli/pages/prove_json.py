"""A proof as one JSON document, in SI units: `distrain prove --json` and prove.json."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ...trainer.prove.judge import LayoutResult, ProofResult
from ...trainer.prove.trials.plan_proof import Proof
from ...trainer.prove.trials.trial import Trial
from ...trainer.prove.trials.written_choices import choices_sentence, written_choices
from ...trainer.prove.untested import untested_parts
from .prove_verdict import verdict_sentence


def proof_document(proof: Proof, result: ProofResult) -> dict[str, Any]:
    """All figures of a proof as plain data; null for what is not known."""
    plain: dict[str, Any] = {
        "version": 1,
        "name": proof.recipe.name,
        "ok": result.ok,
        "steps": proof.steps,
        "precision": proof.reference.run.train.precision,
        "folder": str(proof.folder),
        "says": verdict_sentence(proof, result),
        "written": {"keys": list(written_choices(proof.recipe)), "says": choices_sentence(proof)},
        "tolerance": {"loss": result.tolerance.loss, "grad_norm": result.tolerance.norm, "weights": result.tolerance.weights},
        "alone": _result_row(result.reference),
        "control": _result_row(result.control) if result.control else None,
        "layouts": [_result_row(each) for each in result.layouts],
        "checks": [{"check": each.trial.check, **_result_row(each)} for each in result.checks],
        "untested": untested_parts(proof, result),
        "not_compared": result.not_compared,
        "more": proof.unchosen,
        "left_out": [{"layout": each.layout.name, "says": each.problem.says} for each in proof.skipped],
    }
    finite: dict[str, Any] = _replace_non_finite(plain)
    return finite


def _result_row(result: LayoutResult) -> dict[str, Any]:
    return {
        **_trial_row(result.trial),
        "verdict": result.verdict,
        "held_to": result.trial.layout.simulation.replace("_", " ") or "one process",
        "says": result.reason,
        "departure": result.departure,
        "in_float64": result.in_float64,
        "seconds": result.seconds,
        "losses": list(result.curve.losses) if result.curve else [],
        "grad_norms": list(result.curve.norms) if result.curve else [],
        "apart": {
            "loss": result.loss,
            "grad_norm": result.norm,
            "weights": result.weights,
            "weight": result.furthest_weight or None,
            "evaluation": result.evaluation,
        },
        "evaluation": result.curve.evaluation if result.curve else None,
        "samples": result.samples,
        "messages": result.messages,
    }


def _trial_row(trial: Trial) -> dict[str, Any]:
    parallel = trial.run.parallel
    return {
        "layout": trial.layout.name,
        "ranks": trial.plan.world,
        "mesh": trial.plan.mesh,
        "engine": trial.plan.engine,
        "schedule": parallel.schedule if parallel.pp > 1 else None,
        "zero": parallel.zero,
        "sequence": parallel.sequence,
        "cp_comm": parallel.cp_comm if parallel.cp > 1 else None,
        "chunks": parallel.chunks,
        "stages": list(parallel.stages) if parallel.stages else None,
        "shard": parallel.shard,
        "gather": parallel.gather,
        "offload": list(parallel.offload.names),
        "sync": parallel.sync.every,
        "staleness": parallel.staleness,
        "reduce": parallel.reduce,
        "servers": parallel.servers if parallel.reduce == "server" else None,
        "recompute": parallel.recompute,
        "microbatch": trial.run.train.microbatch,
        "microbatches": trial.plan.microbatches,
        "folder": str(trial.folder),
    }


def _replace_non_finite(value: Any) -> Any:
    """Plain data with null for every number that JSON can't hold."""
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
