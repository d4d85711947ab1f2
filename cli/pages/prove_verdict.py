"""The verdict of a proof in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...trainer.prove.judge import ProofResult
from ...trainer.prove.plan_proof import Proof
from ...trainer.prove.trial import Trial
from ...trainer.spec.format_numbers import plural

NAMES_SHOWN = 4  # of a list


def verdict_sentence(proof: Proof, result: ProofResult) -> str:
    """The verdict: `7 layouts train the same curve: losses within 2.4e-07 over 8 steps`."""
    if result.reference.verdict == "departs":
        return f"one process trains on the wrong samples: {result.reference.reason}"
    if result.reference.verdict != "same":
        return f"one process did not train: {result.reference.reason}"
    if not result.ok:
        return "; ".join(_wrong_sentences(result))
    count = plural(len(result.layouts), "layout")
    largest = result.largest_loss_difference
    verb, losses = "trains" if len(result.layouts) == 1 else "train", f"within {largest:.1e}" if largest else "equal to the last bit"
    return f"{count} {verb} the same curve: losses {losses} over {plural(proof.steps, 'step')}"


def _wrong_sentences(result: ProofResult) -> Iterator[str]:
    """How many layouts train another curve, how many only send other messages, and which checks fail."""
    count = plural(len(result.layouts), "layout")
    curves = [each.trial.name for each in result.layouts if each.verdict not in ("same", "messages")]
    messages = [each.trial.name for each in result.layouts if each.verdict == "messages"]
    if curves:
        yield f"{len(curves)} of {count} {'does' if len(curves) == 1 else 'do'} not train the same curve: {names_text(curves)}"
    if messages:
        verb = "sends" if len(messages) == 1 else "send"
        yield f"{len(messages)} of {count} {verb} other messages than the plan says: {names_text(messages)}"
    for each in (each for each in result.checks if each.verdict != "same"):
        micros = f" with micro-batches of {micro_batches(each.trial)}" if each.trial.check == "microbatch" else ""
        yield f"{each.trial.name}{micros} {'sends other messages' if each.verdict == 'messages' else 'does not train the same curve'}"


def micro_batches(trial: Trial) -> str:
    """Micro-batches: their number x the sequences in each."""
    return f"{trial.plan.microbatches or 0} x {trial.run.train.microbatch}"


def names_text(names: Sequence[str]) -> str:
    """Names joined; of a long list the first."""
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:NAMES_SHOWN])} and {rest} more"
