"""What float64 says of a departure: rounding, which is no error, or an error, which stays one."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING

import pytest

from distrain.cli.verbs.prove_run import RecipeForRanks
from distrain.tests.fakes.prove_screen import run_prove
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.trainer.prove.checks.curve import Curve
from distrain.trainer.prove.confirm_departures import confirm_departures, may_be_rounding, wide_verdict
from distrain.trainer.prove.fork_client import ServerGone, start_wide_server
from distrain.trainer.prove.judge import LayoutResult, ProofResult, tolerance
from distrain.trainer.prove.trials.layouts import ProveLayout
from distrain.trainer.prove.trials.plan_proof import Proof, ProveRequest, plan_proof
from distrain.trainer.spec.changed_run import with_changes

if TYPE_CHECKING:
    from pathlib import Path

TINY = ("model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=4")


def test_a_layout_that_departs_in_float32_alone_trains_the_same_curve(ranks: RankPool, tmp_path: Path) -> None:
    """Also under AdamW in torch's fused kernel, which knows no float64 divisor, and in checkpoints. Ranks err in float32 alone here."""
    choose_program(tmp_path, "spoiled", {"dp2.zero1.native": "same_evaluation"})
    server = start_wide_server(tmp_path / "wide.log", {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    try:
        arguments = ["layouts=dp2,dp2.zero1.native", "steps=2", "checks=none", "optim.eps=1e-8"]
        record = run_prove(arguments, tmp_path, lambda *_: nullcontext(ranks.server), start_wide=lambda *_: nullcontext(server))
    finally:
        server.close()
    assert record.status == 0
    rows = [line.split() for line in record.lines if line.split(" ")[0] in ("dp2", "dp2.zero1.native")]
    assert [(row[0], row[-1]) for row in rows] == [("dp2", "same"), ("dp2.zero1.native", "departs"), ("dp2.zero1.native", "rounding")]
    output = " ".join(" ".join(record.lines).split())
    assert output.endswith(" over 2 steps; rounding grows in dp2.zero1.native, as float64 confirms")
    document = json.loads((tmp_path / "quickstart.prove" / "prove.json").read_text())
    dp2, departed = document["layouts"]
    assert dp2["in_float64"] == ""
    assert f"dp2.zero1.native: {departed['in_float64']}" in output
    verdict, _, figure = departed["in_float64"].partition(": in float64 ")
    assert verdict == "rounding"
    assert 0 < float(figure.split()[2]) < 1e-11
    assert sorted(each.name for each in (tmp_path / "quickstart.prove").iterdir() if each.is_dir()) == ["dp1", "dp2", "dp2.zero1.native"]


def departed(*words: str, step: int = 2) -> tuple[Proof, ProofResult]:
    """A proof whose layout has another loss in a step than one process."""
    recipe = RecipeForRanks("quickstart", (*TINY, *words), None)
    proof = plan_proof(ProveRequest(steps=2, chosen="named", layouts=(ProveLayout(dp=2),), checks=False), recipe.run(), recipe.run_on)
    curve = Curve(losses=(5.0, 4.0), norms=(1.0, 1.0), rates=(1e-3, 1e-3))
    reference = LayoutResult(trial=proof.reference, verdict="same", curve=curve)
    other = replace(curve, losses=tuple(loss + 0.01 * (number == step) for number, loss in enumerate(curve.losses, 1)))
    layout = LayoutResult(trial=proof.trials[0], verdict="departs", curve=other, loss=0.01, norm=0.0, weights=0.0)
    return proof, ProofResult(reference=reference, layouts=(layout,), tolerance=tolerance(reference))


def confirmed(proof: Proof, result: ProofResult, **wide: float) -> LayoutResult:
    """The layout of a proof after float64 has differed by so much."""

    def run_wide(asked: Proof) -> ProofResult:
        (trial,) = asked.trials
        assert trial.folder.parent == proof.folder / "float64"
        return replace(result, layouts=(replace(result.layouts[0], **{"loss": 0.0, **wide}),))  # type: ignore[arg-type]

    (layout,) = confirm_departures(proof, result, run_wide).layouts
    return layout


def test_an_error_stays_a_departure() -> None:
    proof, result = departed()
    assert (confirmed(proof, result, norm=1e-10).verdict, confirmed(proof, result).in_float64[:8]) == ("rounding", "rounding")
    for figure in ("loss", "norm", "evaluation"):
        error = confirmed(proof, result, **{figure: 2e-9})
        assert (error.verdict, error.in_float64) == ("departs", f"error: in float64 {figure} is 2.0e-09 from one process")
    assert confirmed(proof, result, weights=3e-12).verdict == "departs"  # learning rates add up to 2e-3
    layout, reference = result.layouts[0], result.reference
    assert wide_verdict(replace(layout, samples="twice"), layout, reference) == "error: twice"
    assert wide_verdict(replace(layout, verdict="hangs", reason="why"), layout, reference) == "not confirmed: float64 hangs: why"
    assert wide_verdict(replace(layout, weights=nan), layout, reference).startswith("error: in float64 weights is inf")
    far = replace(layout, loss=0.5)  # in float32
    assert [wide_verdict(replace(layout, loss=loss), far, reference)[:5] for loss in (4e-8, 6e-8)] == ["round", "error"]


def test_rounding_does_not_hide_other_messages() -> None:
    proof, result = departed()
    sends = replace(result.layouts[0], messages={"verdict": "differs", "says": "dp all_reduce: counted 24, planned 26"})
    layout = confirmed(proof, replace(result, layouts=(sends,)))
    assert (layout.verdict, layout.reason, layout.in_float64[:8]) == ("messages", "dp all_reduce: counted 24, planned 26", "rounding")


def test_a_server_in_float64_that_ends_confirms_nothing() -> None:
    proof, result = departed()

    def gone(_: Proof) -> ProofResult:
        raise ServerGone("it ended with 3")

    (layout,) = confirm_departures(proof, result, gone).layouts
    assert (layout.verdict, layout.in_float64) == ("departs", "not confirmed: it ended with 3")
    (layout,) = confirm_departures(proof, result, lambda _: replace(result, layouts=())).layouts
    assert (layout.verdict, layout.in_float64) == ("departs", "not confirmed: one process did not train in float64")
    failed = replace(result, reference=replace(result.reference, reason="no room"), layouts=())
    (layout,) = confirm_departures(proof, result, lambda _: failed).layouts
    assert layout.in_float64.endswith("in float64: no room")


@pytest.mark.parametrize("words", [(), ("train.precision=bf16",), ("engine=native", "optim.moments=int8")], ids=" ".join)
def test_only_what_is_float32_throughout_may_be_rounding(words: tuple[str, ...]) -> None:
    proof = departed(*words)[1]
    (layout,) = proof.layouts
    assert may_be_rounding(layout, proof) == (words == ())
    assert not may_be_rounding(replace(layout, samples="read twice"), proof)
    assert not may_be_rounding(replace(layout, verdict="failed"), proof)
    begins_apart = departed(step=1)[1]
    assert not may_be_rounding(begins_apart.layouts[0], begins_apart)
    begun = with_changes(layout.trial.run, [("model.weights", "folder")])  # of the type that its files have
    assert not may_be_rounding(replace(layout, trial=replace(layout.trial, run=begun)), proof)
