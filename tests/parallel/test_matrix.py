"""The matrix: hybrids of data, tensor, sequence and pipeline parallel train the curve of one process, and the plan refuses the rest.

Rows are such that every two choices that meet in any legal layout of up to eight ranks meet in one of them.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from distrain.cli.config.load import load
from distrain.cli.verbs.fit import refused
from distrain.tests.fakes.one_process import reference
from distrain.trainer.plan.changed_run import changed, words
from distrain.trainer.plan.engines import ENGINES, engine_for, unbuilt
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules import broken
from distrain.trainer.prove.covering import covering
from distrain.trainer.spec.run import Run

if TYPE_CHECKING:
    from distrain.tests.conftest import Ranks

Choice = tuple[tuple[str, object], ...]  # (key, value) pairs that are set together
Words = tuple[str, ...]

STEPS = 4
BASE = (
    *("quickstart", "data=synthetic", f"train.steps={STEPS}", "train.batch=8", "train.seq=32", "train.evaluate.every=0", "log.every=1"),
    *("optim.lr=1e-3", "optim.warmup=2", "checkpoint.every=0", "train.clip=0.5"),
)
# fmt: off
SHAPES: dict[str, Words] = {
    "gpt tied":       ("model=tiny",       "model.layers=5", "model.tied=true"),
    "gpt odd":        ("model=tiny",       "model.layers=4", "model.tied=false", "model.heads=6", "model.head_dim=8", "model.ffn=250",
                       "model.vocab=257",  "model.dropout=0.1"),
    "llama tied":     ("model=tiny_llama", "model.layers=5", "model.tied=true",  "train.attention=math"),
    "llama":          ("model=tiny_llama", "model.layers=4", "model.tied=false"),
    "moe":            ("model=tiny_moe",   "model.layers=4", "model.aux_loss=0.01"),
}


def mesh(dp: int, tp: int, pp: int, cp: int = 1, ep: int = 1) -> Choice:
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    return (("cluster.gpus", dp * tp * pp * cp), *((f"parallel.{axis}", degree) for axis, degree in degrees.items()))


MESHES = tuple(mesh(*degrees) for degrees in (
    (1, 2, 1), (1, 4, 1), (1, 8, 1), (2, 2, 1), (2, 4, 1), (4, 2, 1),
    (1, 1, 2), (1, 1, 4), (2, 1, 2), (4, 1, 2), (2, 1, 4),
    (1, 2, 2), (1, 4, 2), (1, 2, 4), (2, 2, 2),
    (1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2),
    (2, 1, 1, 1, 2), (4, 1, 1, 1, 2), (2, 2, 1, 1, 2), (2, 1, 2, 1, 2),
))
ZEROS      = tuple((("parallel.zero", stage),) for stage in range(4))
SEQUENCES  = tuple((("parallel.sequence", value),) for value in (False, True))
SCHEDULES  = tuple((("parallel.schedule", name),) for name in ("1f1b", "gpipe", "dualpipev"))
MICROS     = tuple((("train.microbatch", many),) for many in (2, 1))
RECOMPUTES = tuple((("parallel.recompute", word),) for word in ("none", "selective", "full"))
PRECISIONS = ((("train.precision", "fp32"),), (("train.precision", "bf16"), ("train.gradients", "bf16")),
              (("train.precision", "bf16"), ("train.gradients", "fp32")))
# fmt: on
FACTORS: tuple[tuple[Choice, ...], ...] = (MESHES, ZEROS, SEQUENCES, SCHEDULES, MICROS, RECOMPUTES, PRECISIONS)


class Layout(NamedTuple):
    """A row: the shape's name, and a choice of each factor."""

    shape: str
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        degrees = [f"{key.rpartition('.')[2]}{value}" for key, value in self.choices[0] if value != 1]
        return " ".join([self.shape, *degrees, *(str(value).lower() for choice in self.choices[1:] for _, value in choice)])

    @property
    def words(self) -> Words:
        return tuple(word for choice in self.choices for word in words(choice))

    def run(self) -> Run:
        return changed(shaped(self.shape), [pair for choice in self.choices for pair in choice])


@cache
def shaped(shape: str) -> Run:
    """A run of that shape, in one process."""
    run = load(BASE[0], [*BASE[1:], *SHAPES[shape]])
    return changed(run, [("parallel.dp", "auto")])


def idle(choices: tuple[Choice, ...]) -> bool:
    """Whether a choice says nothing: of the sequence where no tensor axis splits it, of a schedule where there are no stages."""
    said = dict(pair for choice in choices for pair in choice)
    return (said["parallel.tp"] == 1 and said["parallel.sequence"] is True) or (
        said["parallel.pp"] == 1 and said["parallel.schedule"] != "1f1b"
    )


def reasons(run: Run) -> list[str]:
    """Why it is not run, in words; without laying it out."""
    found = [each.says for each in broken(run, run.parallel, run.train.microbatch)]
    engine, limits = engine_for(run, run.parallel)
    built = unbuilt(engine, run.parallel) if engine else ()
    return [*found, *(each.says for each in (*limits, *built))]


@cache
def layouts() -> tuple[tuple[Layout, ...], dict[Layout, list[str]]]:
    """Every layout that says something: those that run, and why the others don't."""
    legal, illegal = list[Layout](), dict[Layout, list[str]]()
    for shape in SHAPES:
        for choices in product(*FACTORS):
            if not idle(choices):
                layout = Layout(shape, choices)
                wrong = reasons(layout.run())
                if wrong:
                    illegal[layout] = wrong
                else:
                    legal.append(layout)
    return tuple(legal), illegal


@cache
def rows() -> tuple[Layout, ...]:
    """Few of them, in which all pairs of choices meet."""
    legal, _ = layouts()
    return tuple(Layout(shape, choices) for shape, *choices in covering((layout.shape, *layout.choices) for layout in legal))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", rows(), ids=str)
def test_a_layout_trains_the_curve_of_one_process(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """bf16 is held to what 8 bits of a weight are: 2e-4 of a loss and 0.13 % of a norm were seen."""
    losses, norms = reference((*BASE, *SHAPES[layout.shape]))
    job = ranks.trained(tmp_path / "run", *BASE, *SHAPES[layout.shape], *layout.words)
    half = PRECISIONS[0] not in layout.choices
    assert job.figures("loss") == pytest.approx(losses, abs=1e-3 if half else 3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=5e-3 if half else 2e-5)


def test_every_choice_of_the_matrix_is_run() -> None:
    run = {choice for layout in rows() for choice in layout.choices}
    assert run == {choice for choices in FACTORS for choice in choices}
    assert {layout.shape for layout in rows()} == set(SHAPES)


def test_what_is_not_run_is_refused_by_the_plan_with_its_reason() -> None:
    """Every rule's first layouts: what the planner says, and that fit refuses the same."""
    _, illegal = layouts()
    by_reason: dict[str, list[Layout]] = {}
    for layout, wrong in illegal.items():
        by_reason.setdefault(wrong[0], []).append(layout)
    for says, refusals in by_reason.items():
        for layout in refusals[:3]:
            run = layout.run()
            plan = make_plan(run)
            problems = refused(run, plan)
            assert says in [each.says for each in problems], layout
            assert all(each.mend for each in problems if each.says == says), f"{says}: no way out is said"
            assert not plan.runnable


def test_what_is_run_is_planned_as_runnable(capsys: pytest.CaptureFixture[str]) -> None:
    legal, illegal = layouts()
    for layout in rows():
        plan = make_plan(layout.run())
        assert plan.runnable, layout
        assert plan.engine in {engine.name for engine in ENGINES}
    worlds = Counter(make_plan(layout.run()).world for layout in rows())
    with capsys.disabled():
        told = ", ".join(f"{many} on {world} ranks" for world, many in sorted(worlds.items()))
        print(f"\nmatrix: {len(rows())} of {len(legal)} legal layouts are run ({told}); {len(illegal)} are refused")
