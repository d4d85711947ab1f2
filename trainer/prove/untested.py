"""What a proof leaves untested: parts of the mathematics that its recipe does not use."""

from __future__ import annotations

from collections.abc import Iterator

from ..models.families import has_experts
from ..spec.derived.batch_levels import samples_before, steps_of_levels
from ..spec.derived.data_blends import tokens_of_stages
from ..spec.numbers.as_text import plural
from ..spec.run import Run
from .judge import ProofResult
from .trials.plan_proof import Proof

ALL_PARTS = "tiny_full"  # the recipe that has them all


def untested_parts(proof: Proof, result: ProofResult) -> list[str]:
    """The parts of the mathematics that no run of a proof has used."""
    return [*unused_parts(proof, result), *skipped_checks(proof, result)]


def unused_parts(proof: Proof, result: ProofResult) -> list[str]:
    """The parts that the recipe does not use: ALL_PARTS has them."""
    return [*_unused_by_model(proof), *_unused_by_training(proof, result)]


def _unused_by_model(proof: Proof) -> Iterator[str]:
    model, seq = proof.recipe.model, proof.recipe.train.seq
    if not model.dropout:
        yield "dropout"
    if model.kv_heads in (None, model.heads):
        yield "grouped heads"
    if not any(_pads_vocabulary(each.run) for each in (proof.reference, *proof.trials)):
        yield "vocabulary padding"
    if not has_experts(model):
        yield "experts"
    if not model.effective_window(seq):
        yield "windows"


def _unused_by_training(proof: Proof, result: ProofResult) -> Iterator[str]:
    if not proof.recipe.data.documents:
        yield "documents"
    clip, norms = proof.recipe.train.clip, result.reference.curve.norms if result.reference.curve else ()
    if not clip or not any(norm > clip for norm in norms):
        yield "clipping"


def skipped_checks(proof: Proof, result: ProofResult) -> Iterator[str]:
    """Yield the checks that a proof leaves out: as requested, or because nothing here can be checked so."""
    if proof.control is None or not proof.control.check:
        yield "other micro-batches"
    if proof.resume is None:
        yield "a resume"
    if result.reference.curve and result.reference.curve.evaluation is None:
        yield "evaluation"
    if len(begun := steps_of_levels(proof.reference.run.train)) > 1 and begun[1].steps >= proof.steps:
        yield f"a batch that grows, as train.rampup has it after step {begun[1].steps:,}"

    run = proof.reference.run
    tokens = samples_before(run.train, proof.steps) * run.train.seq
    unread = len(run.data.stages or ()) - len(tokens_of_stages(run.data, tokens))
    if unread > 0:
        yield f"{plural(unread, 'later stage')} of data.stages"


def _pads_vocabulary(run: Run) -> bool:
    return bool(run.model.vocab % (run.model.vocab_multiple * run.parallel.tp))
