"""The default layouts of recipes, and the page of their proof on a terminal of 80 columns."""

from functools import cache

import pytest

from distrain.cli.pages.prove_page import ProofTable, proof_closing, proof_opening, reference_line
from distrain.cli.pages.text_layout import Style
from distrain.cli.verbs.prove_run import RecipeForRanks
from distrain.trainer.plan.layout.schedules import SCHEDULES
from distrain.trainer.prove.checks.curve import Curve
from distrain.trainer.prove.judge import LayoutResult, ProofResult, tolerance
from distrain.trainer.prove.trials.layouts import DEFAULT_COUNT, ProveLayout
from distrain.trainer.prove.trials.plan_proof import Proof, ProveRequest, plan_proof
from distrain.trainer.prove.trials.trial import Trial


@cache
def default_proof(recipe: str) -> Proof:
    read = RecipeForRanks(recipe, [], None)
    return plan_proof(ProveRequest(), read.run(), read.run_on)


def test_the_default_layouts_train_the_data_axis_and_what_other_engines_lack_on_engine_native() -> None:
    trials = default_proof("tiny_2x2x2").trials
    native = [each.run.parallel for each in trials if each.plan.engine == "native"]
    assert any(each.pp == 1 and each.dp == 2 for each in native)
    assert any(each.pp > 1 and SCHEDULES[each.schedule].splits_backward for each in native)
    assert any(each.pp > 1 and each.schedule == "interleaved" and each.chunks == 2 for each in native)
    assert len(trials) == DEFAULT_COUNT


@pytest.mark.parametrize("recipe", ["tiny_2x2x2", "quickstart"])
def test_the_page_of_the_default_layouts_has_fewer_than_40_lines(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = page(default_proof(recipe)).splitlines()
    assert sum(line.endswith(" same") for line in lines) == 14  # 12 layouts, other micro-batches, a resume
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80


def page(proof: Proof) -> str:
    """The page of a proof whose layouts all differ by rounding from one process."""
    reference = result(proof.reference)
    assert proof.control
    assert proof.resume
    known = ProofResult(
        reference=reference,
        layouts=tuple(map(result, proof.trials)),
        tolerance=tolerance(reference),
        control=result(proof.control),
        resumed=result(proof.resume),
    )
    table = ProofTable(proof, Style())
    rows = [table.row(each) for each in (*known.layouts, *known.checks)]
    return "\n".join([proof_opening(proof), reference_line(reference), "", table.head(), *rows, proof_closing(proof, known, reasons=False)])


def result(trial: Trial) -> LayoutResult:
    return LayoutResult(
        trial=trial,
        verdict="same",
        seconds=0.5,
        curve=Curve(losses=(5.4, 5.2), norms=(1.0, 1.0), rates=(1e-3, 1e-3)),
        loss=4.8e-7,
        norm=2.6e-8,
        weights=6.3e-7,
        evaluation=1.8e-7,
        not_compared=("layers.0.attention.key.bias", "layers.1.attention.key.bias"),
        messages={"verdict": "explained"},
    )


def test_one_process_that_took_no_step_has_no_seconds() -> None:
    read = RecipeForRanks("quickstart", [], None)
    trial = plan_proof(ProveRequest(chosen="named", layouts=(ProveLayout(dp=2),)), read.run(), read.run_on).reference
    assert reference_line(LayoutResult(trial=trial, verdict="failed", seconds=-9.8e-7)) == "one process took no step"
