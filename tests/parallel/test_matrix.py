"""The matrix: every combination of parallel axes trains the curve of one process, or the plan refuses it.

The rows that are trained contain every pair of choices that occurs in any legal layout of up to eight ranks, where each degree is a
choice of its own, and every mesh.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import reference_curve
from distrain.trainer.launch.admission import check_start
from distrain.trainer.plan.engines import ENGINES, engine_for
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules.rules import broken_rules
from distrain.trainer.prove.covering import Pair, choice_pairs, covering_rows
from distrain.trainer.spec.changed_run import overrides, with_changes
from distrain.trainer.spec.run import Run

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

Choice = tuple[tuple[str, Any], ...]  # (key, value) pairs that are set together
Words = tuple[str, ...]

STEPS = 3
SIZES = ("train.batch", "model.layers")  # that a layout brings with it
BASE = (
    *("quickstart", "data=synthetic", f"train.steps={STEPS}", "train.seq=32", "train.evaluate.every=0", "log.every=1"),
    *("optim.lr=1e-3", "optim.warmup=2", "checkpoint.every=0", "train.clip=0.5"),
)
# fmt: off
SHAPES: dict[str, Words] = {
    "gpt tied":       ("model=tiny",       "model.layers=5", "model.tied=true"),
    "gpt odd":        ("model=tiny",       "model.layers=4", "model.tied=false", "model.heads=6", "model.head_dim=8", "model.ffn=250",
                       "model.vocab=257",  "model.dropout=0.1"),
    "llama tied":     ("model=tiny_llama", "model.layers=5", "model.tied=true",  "train.attention=math",
                       "model.rope={type: llama3, factor: 4, original_max_position_embeddings: 16}"),
    "llama":          ("model=tiny_llama", "model.layers=4", "model.tied=false", "model.qk_norm=true",
                       "model.rope={type: yarn, factor: 4, original_max_position_embeddings: 16}"),
    "moe":            ("model=tiny_moe",   "model.layers=4", "model.aux_loss=0.01", "model.window=12"),
}


def mesh(dp: int, tp: int, pp: int, cp: int = 1, ep: int = 1) -> Choice:
    """The degrees, a batch of one or two micro-batches a replica where the micro-batch is 2, and two layers where there are no stages."""
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    keys = ((f"parallel.{axis}", degree) for axis, degree in degrees.items())
    layers = (("model.layers", 2),) if pp == 1 else ()
    return (("cluster.gpus", dp * tp * pp * cp), *keys, ("train.batch", max(4, 2 * dp)), *layers)


MESHES = tuple(mesh(*degrees) for degrees in (
    (1, 2, 1), (1, 4, 1), (1, 8, 1), (2, 2, 1), (2, 4, 1), (4, 2, 1),
    (1, 1, 2), (1, 1, 4), (2, 1, 2), (4, 1, 2), (2, 1, 4),
    (1, 2, 2), (1, 4, 2), (1, 2, 4), (2, 2, 2),
    (1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2),
    (2, 1, 1, 1, 2), (4, 1, 1, 1, 2), (2, 2, 1, 1, 2), (2, 1, 2, 1, 2),
))
ZEROS      = tuple((("parallel.zero", stage),) for stage in range(4))
SEQUENCES  = tuple((("parallel.sequence", value),) for value in (False, True))
SCHEDULES: tuple[Choice, ...] = ((("parallel.schedule", "1f1b"),), (("parallel.schedule", "gpipe"),),
              (("parallel.schedule", "dualpipev"), ("train.batch", 8)))  # it needs twice as many micro-batches as stages
MICROS     = tuple((("train.microbatch", many),) for many in (2, 1))
RECOMPUTES = tuple((("parallel.recompute", word),) for word in ("none", "selective", "full"))
PRECISIONS = ((("train.precision", "fp32"),), (("train.precision", "bf16"), ("train.gradients", "bf16")),
              (("train.precision", "bf16"), ("train.gradients", "fp32")))
# fmt: on
FACTORS: tuple[tuple[Choice, ...], ...] = (MESHES, ZEROS, SEQUENCES, SCHEDULES, MICROS, RECOMPUTES, PRECISIONS)


class MatrixLayout(NamedTuple):
    """A row of the matrix: the name of a shape, and a choice of each factor."""

    shape: str
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        degrees = [f"{key.rpartition('.')[2]}{value}" for key, value in self.choices[0] if value != 1 and key not in SIZES]
        others = [str(value).lower() for choice in self.choices[1:] for key, value in choice if key not in SIZES]
        return " ".join([self.shape, *degrees, *others])

    @property
    def overrides(self) -> Words:
        return overrides(dict(pair for choice in self.choices for pair in choice).items())

    @property
    def curve(self) -> Words:
        """The arguments of the run except its layout."""
        run = self.run()
        return (*BASE, *SHAPES[self.shape], f"train.batch={run.train.batch}", f"model.layers={run.model.layers}")

    def run(self) -> Run:
        return chosen_run(self.shape, self.choices)


def pairs_in(layout: MatrixLayout) -> set[Pair]:
    """Every pair of choices in a layout, and its mesh."""
    mesh, *others = layout.choices
    gpus, tp, pp, cp, ep = (value for key, value in mesh if key not in SIZES)
    return choice_pairs((layout.shape, gpus // (tp * pp * cp), tp, pp, cp, ep, *others)) | {(-1, mesh, -1, mesh)}


@cache
def shape_run(shape: str) -> Run:
    """The run of a shape, in one process."""
    run = load_recipe(BASE[0], [*BASE[1:], *SHAPES[shape]])
    return with_changes(run, [("parallel.dp", "auto")])


@lru_cache(maxsize=10_000)
def chosen_run(shape: str, choices: tuple[Choice, ...]) -> Run:
    """The run of a shape under choices of the first factors; runs that begin with the same choices share the work."""
    return with_changes(chosen_run(shape, choices[:-1]), choices[-1]) if choices else shape_run(shape)


def has_idle_choice(choices: tuple[Choice, ...]) -> bool:
    """Whether a choice has no effect: parallel.sequence without a tensor axis, or a schedule without stages."""
    values = dict(pair for choice in choices for pair in choice)
    return (values["parallel.tp"] == 1 and values["parallel.sequence"] is True) or (
        values["parallel.pp"] == 1 and values["parallel.schedule"] != "1f1b"
    )


def refusal_reasons(run: Run) -> list[str]:
    """Why a run is refused, in words, without planning it."""
    found = [each.says for each in broken_rules(run, run.parallel, run.train.microbatch)]
    _, limits = engine_for(run, run.parallel)
    return [*found, *(each.says for each in limits)]


@cache
def layouts() -> tuple[tuple[MatrixLayout, ...], dict[MatrixLayout, list[str]]]:
    """Every layout whose choices all have an effect: (those that run, the others with the refusal_reasons why they don't)."""
    legal, illegal = list[MatrixLayout](), dict[MatrixLayout, list[str]]()
    for shape in SHAPES:
        for choices in product(*FACTORS):
            if not has_idle_choice(choices):
                layout = MatrixLayout(shape, choices)
                wrong = refusal_reasons(layout.run())
                if wrong:
                    illegal[layout] = wrong
                else:
                    legal.append(layout)
    return tuple(legal), illegal


@cache
def trained_layouts() -> tuple[MatrixLayout, ...]:
    """A few legal layouts, in which every pair of choices and every mesh occurs."""
    return tuple(covering_rows(layouts()[0], pairs_of=pairs_in))


@pytest.mark.parametrize("layout", trained_layouts(), ids=str)
def test_a_layout_trains_the_curve_of_one_process(ranks: RankPool, tmp_path: Path, layout: MatrixLayout) -> None:
    """bf16 is looser because a weight has 8 bits: 2e-4 of a loss and 0.13 % of a norm were seen."""
    losses, norms = reference_curve(layout.curve)
    job = ranks.train(tmp_path / "run", *BASE, *SHAPES[layout.shape], *layout.overrides)
    half = PRECISIONS[0] not in layout.choices
    assert job.figures("loss") == pytest.approx(losses, abs=1e-3 if half else 3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=5e-3 if half else 2e-5)


def test_every_choice_of_the_matrix_is_trained() -> None:
    run = {choice for layout in trained_layouts() for choice in layout.choices}
    assert run == {choice for choices in FACTORS for choice in choices}
    assert {layout.shape for layout in trained_layouts()} == set(SHAPES)


def test_the_plan_refuses_every_other_layout_with_its_reason() -> None:
    """For the first three layouts of each reason: fit refuses them with that reason and a fix."""
    _, illegal = layouts()
    by_reason: dict[str, list[MatrixLayout]] = {}
    for layout, wrong in illegal.items():
        by_reason.setdefault(wrong[0], []).append(layout)
    for says, refusals in by_reason.items():
        for layout in refusals[:3]:
            run = layout.run()
            plan = make_plan(run)
            problems = check_start(run, plan).problems
            assert says in [each.says for each in problems], layout
            assert all(each.mend for each in problems if each.says == says), f"{says}: no fix is given"
            assert not plan.runnable


def test_every_trained_layout_is_planned_as_runnable(capsys: pytest.CaptureFixture[str]) -> None:
    legal, illegal = layouts()
    for layout in trained_layouts():
        plan = make_plan(layout.run())
        assert plan.runnable, layout
        assert plan.engine in ENGINES
    worlds = Counter(make_plan(layout.run()).world for layout in trained_layouts())
    with capsys.disabled():
        counts = ", ".join(f"{many} on {world} ranks" for world, many in sorted(worlds.items()))
        print(f"\nmatrix: {len(trained_layouts())} of {len(legal)} legal layouts are trained ({counts}); {len(illegal)} are refused")
