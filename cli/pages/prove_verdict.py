"""The verdict of a proof in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...trainer.prove.judge import AS_ONE_PROCESS, LayoutResult, ProofResult
from ...trainer.prove.trials.plan_proof import Proof
from ...trainer.prove.trials.trial import Trial
from ...trainer.spec.numbers.as_text import plural

NAMES_SHOWN = 4  # of a list
OTHER_CURVES = {
    "delayed_gradients": "the curve of delayed gradients, another one by design",
    "compressed_gradients": "the curve of compressed gradients, another one by design",
    "local_steps": "the curve of workers that step alone, another one by design",
}


def verdict_sentence(proof: Proof, result: ProofResult) -> str:
    """The verdict: `7 layouts train the same curve: losses within 2.4e-07 over 8 steps`."""
    if result.reference.verdict == "departs":
        return f"one process trains on the wrong samples: {result.reference.reason}"
    if result.reference.verdict != "same":
        return f"one process did not train: {result.reference.reason}"
    if not result.ok:
        return "; ".join(_wrong_sentences(result))
    same = [each for each in result.layouts if not each.trial.layout.has_other_curve]
    says = [_curve_sentence(len(same), "the same curve", result.largest_loss_difference)] if same else []
    for name, curve in OTHER_CURVES.items():
        if others := _results_of(result.layouts, name):
            says.append(_curve_sentence(len(others), curve, max(each.loss or 0.0 for each in others)))
    rounding = [each.trial.name for each in result.layouts if each.verdict == "rounding"]
    grows = f"; rounding grows in {names_text(rounding)}, as float64 confirms" if rounding else ""
    return f"{'; '.join(says)} over {plural(proof.steps, 'step')}{grows}"


def _results_of(results: Iterable[LayoutResult], name: str) -> list[LayoutResult]:
    """Those of the results that a simulation is the reference of."""
    return [each for each in results if each.trial.layout.simulation == name]


def _curve_sentence(layouts: int, curve: str, largest: float) -> str:
    verb, losses = "trains" if layouts == 1 else "train", f"within {largest:.1e}" if largest else "equal to the last bit"
    return f"{plural(layouts, 'layout')} {verb} {curve}: losses {losses}"


def _wrong_sentences(result: ProofResult) -> Iterator[str]:
    """How many layouts train another curve, how many only send other messages or run other actions, and which checks fail."""
    count = plural(len(result.layouts), "layout")
    wrong = [each for each in result.layouts if each.verdict not in (*AS_ONE_PROCESS, "messages", "actions")]
    curves = [each.trial.name for each in wrong if not each.trial.layout.has_other_curve]
    messages = [each.trial.name for each in result.layouts if each.verdict == "messages"]
    if curves:
        yield f"{len(curves)} of {count} {'does' if len(curves) == 1 else 'do'} not train the same curve: {names_text(curves)}"
    for name, curve in OTHER_CURVES.items():
        if others := [each.trial.name for each in _results_of(wrong, name)]:
            yield f"{len(others)} of {count} {'does' if len(others) == 1 else 'do'} not train {curve}: {names_text(others)}"
    if messages:
        verb = "sends" if len(messages) == 1 else "send"
        yield f"{len(messages)} of {count} {verb} other messages than the plan says: {names_text(messages)}"
    if ordered := [each.trial.name for each in result.layouts if each.verdict == "actions"]:
        verb = "runs" if len(ordered) == 1 else "run"
        yield f"{len(ordered)} of {count} {verb} other actions than the schedule says: {names_text(ordered)}"
    for each in (each for each in result.checks if each.verdict != "same"):
        micros = f" with micro-batches of {micro_batches(each.trial)}" if each.trial.check == "microbatch" else ""
        says = {"messages": "sends other messages", "actions": "runs other actions"}.get(each.verdict, "does not train the same curve")
        yield f"{each.trial.name}{micros} {says}"


def micro_batches(trial: Trial) -> str:
    """Micro-batches: their number x the sequences in each."""
    return f"{trial.plan.microbatches or 0} x {trial.run.train.microbatch}"


def names_text(names: Sequence[str]) -> str:
    """Names joined; of a long list the first."""
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:NAMES_SHOWN])} and {rest} more"
