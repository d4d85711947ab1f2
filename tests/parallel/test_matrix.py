"""The matrix: every combination of parallel axes trains the curve of one process, or the plan refuses it.

The rows that are trained contain every pair of choices that occurs in any legal layout of up to eight ranks, where each degree up to
dp 2 and tp 4 is a choice of its own, and every mesh. DeepSpeed's engines have one matrix, with the layouts that only engine native runs,
and it another. A row is here to find two choices that do not go together. Of schedules and shards that engine native runs in one way some
are here, and all are in test_native.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.tests.fakes.layout_matrix import Choice, LayoutMatrix, MatrixLayout, Words
from distrain.tests.fakes.one_process import reference_curve
from distrain.trainer.launch.admission import check_start
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.plan import make_plan

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

STEPS = 2  # how states go on from step to step is in test_fit_matrix, test_native and test_pipe
BASE = (
    *("quickstart", "data=synthetic", f"train.steps={STEPS}", "train.seq=16", "train.evaluate.every=0", "log.every=1"),
    *("optim.lr=1e-3", "optim.warmup=1", "checkpoint.final=false", "train.clip=0.5"),
)
# fmt: off
SHAPES: dict[str, Words] = {
    "gpt tied":       ("model=tiny",       "model.tied=true"),
    "gpt odd":        ("model=tiny",       "model.tied=false", "model.heads=6", "model.head_dim=8", "model.ffn=250",
                       "model.vocab=257",  "model.dropout=0.1"),
    "llama":          ("model=tiny_llama", "model.tied=false", "model.qk_norm=true", "model.qk_norm_over=all", "model.norm_place=after",
                       "model.rope={type: yarn, factor: 4, original_max_position_embeddings: 8}"),
    "moe":            ("model=tiny_moe",   "model.aux_loss=0.01", "model.window=6", "model.qk_norm=true",
                       "model.sinks=true", "model.expert_bias=true", "model.act=swiglu_clamped"),
}


def mesh_name(*degrees: int) -> str:
    return " ".join(f"{axis}{degree}" for axis, degree in zip(("dp", "tp", "pp", "cp", "ep"), degrees, strict=False) if degree > 1)


def mesh(dp: int, tp: int, pp: int, cp: int = 1, ep: int = 1) -> Choice:
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    keys = ((f"parallel.{axis}", degree) for axis, degree in degrees.items())
    return (("cluster.gpus", dp * tp * pp * cp), *keys)


def least_sizes(values: Mapping[str, Any]) -> Choice:
    """Two sequences a replica and two layers where there are no stages; two parts a stage, and two micro-batches for each stage, where a
    schedule needs them; else uneven stages."""
    pp, micro = values["parallel.pp"], values["train.microbatch"]
    dp = values["cluster.gpus"] // (values["parallel.tp"] * pp * values["parallel.cp"])
    if pp > 1 and values["parallel.schedule"] in TWO_PARTS:
        return (("train.batch", dp * 2 * pp * micro), ("model.layers", 2 * pp))
    return (("train.batch", 2 * dp if pp == 1 else max(4, 2 * dp)), ("model.layers", 2 if pp == 1 else pp + 1))


MESHES = {mesh_name(*degrees): mesh(*degrees) for degrees in (
    (1, 2, 1), (1, 4, 1), (1, 8, 1), (2, 2, 1), (2, 4, 1),
    (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (1, 4, 2), (2, 2, 2),
    (1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2),
    (2, 1, 1, 1, 2), (4, 1, 1, 1, 2), (2, 2, 1, 1, 2), (2, 1, 2, 1, 2),
)}
NATIVE_MESHES = tuple(each for name, each in MESHES.items() if "tp4" not in name and "tp8" not in name)  # tensor layers are the same
ZEROS      = tuple((("parallel.zero", stage),) for stage in range(4))
SEQUENCES  = tuple((("parallel.sequence", value),) for value in (False, True))
SCHEDULES: tuple[Choice, ...] = ((("parallel.schedule", "1f1b"),), (("parallel.schedule", "gpipe"),),
                                 (("parallel.schedule", "dualpipev"),))
NATIVE_SCHEDULES: tuple[Choice, ...] = (*SCHEDULES[:1], (("parallel.schedule", "zb_h1"),), (("parallel.schedule", "zb_v"),),
                                        (("parallel.schedule", "interleaved"), ("parallel.chunks", 2)))
TWO_PARTS  = ("zb_v", "dualpipev", "interleaved")
RECOMPUTES = tuple((("parallel.recompute", word), ("train.microbatch", many), ("train.loss_chunks", chunks)) for word, many, chunks in
                   (("none", 2, 1), ("selective", 1, 1), ("full", 2, 3)))
NATIVE_RECOMPUTES = tuple((("parallel.recompute", word), ("train.microbatch", 1), ("train.loss_chunks", chunks)) for word, chunks in
                          (("none", 1), ("full", 3)))
PRECISIONS = ((("train.precision", "fp32"),), (("train.precision", "bf16"), ("train.gradients", "bf16")),
              (("train.precision", "bf16"), ("train.gradients", "fp32")))
# fmt: on
MATRICES = {
    "deepspeed": LayoutMatrix(
        BASE,
        tuple(SHAPES.items()),
        (tuple(MESHES.values()), ZEROS, SEQUENCES, SCHEDULES, RECOMPUTES, PRECISIONS),
        least_sizes,
    ),
    "native": LayoutMatrix(
        (*BASE, "engine=native"),
        tuple(SHAPES.items()),
        (NATIVE_MESHES, ZEROS, SEQUENCES, NATIVE_SCHEDULES, NATIVE_RECOMPUTES, (PRECISIONS[0], PRECISIONS[2])),
        least_sizes,
    ),
}


@pytest.mark.parametrize(
    ("engines", "mesh"), [(name, mesh) for name in MATRICES for mesh in MESHES if MESHES[mesh] in MATRICES[name].meshes]
)
def test_a_mesh_trains_the_curves_of_one_process(ranks: RankPool, tmp_path: Path, engines: str, mesh: str) -> None:
    """bf16 is looser because a weight has 8 bits: 2e-4 of a loss and 0.13 % of a norm were seen, and 1 % of a norm where the model norms
    what its halves return, which at first is small (2.1 % on a CPU with AMX, which adds in another order). A token of a mixture that
    rounding sends to another expert moves a loss by up to 1.6e-3, in one process too (tests/models/test_moe.py)."""
    layouts = [layout for layout in MATRICES[engines].trained_layouts if layout.choices[0] == MESHES[mesh]]
    assert layouts
    for at, layout in enumerate(layouts):
        losses, norms = reference_curve(layout.curve)
        job = ranks.train(tmp_path / str(at), *layout.base, *layout.overrides)
        half = PRECISIONS[0] not in layout.choices
        half_losses = 2e-3 if layout.shape == "moe" else 1e-3
        half_norms = 3e-2 if "model.norm_place=after" in layout.words else 5e-3
        assert job.figures("loss") == pytest.approx(losses, abs=half_losses if half else 3e-6, rel=0), str(layout)
        assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=half_norms if half else 2e-5), str(layout)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_every_choice_of_the_matrix_is_trained(matrix: LayoutMatrix) -> None:
    run = {choice for layout in matrix.trained_layouts for choice in layout.choices}
    assert run == {choice for choices in matrix.factors for choice in choices}
    assert {layout.shape for layout in matrix.trained_layouts} == {name for name, _ in matrix.shapes}


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_the_plan_refuses_every_other_layout_with_its_reason(matrix: LayoutMatrix) -> None:
    """For the first three layouts of each reason: fit refuses them with that reason and a fix."""
    by_reason: dict[str, list[MatrixLayout]] = {}
    for layout, wrong in matrix.layouts[1].items():
        by_reason.setdefault(wrong[0], []).append(layout)
    for says, refusals in by_reason.items():
        for layout in refusals[:3]:
            run = layout.run()
            plan = make_plan(run)
            problems = check_start(run, plan).problems
            assert says in [each.says for each in problems], layout
            assert all(each.mend for each in problems if each.says == says), f"{says}: no fix is given"
            assert not plan.runnable


@pytest.mark.parametrize("name", MATRICES)
def test_every_trained_layout_is_planned_as_runnable(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = MATRICES[name]
    legal, illegal = matrix.layouts
    for layout in matrix.trained_layouts:
        plan = make_plan(layout.run())
        assert plan.runnable, layout
        assert plan.engine in ENGINES
    trained = matrix.trained_layouts
    worlds = Counter(make_plan(layout.run()).world for layout in trained)
    with capsys.disabled():
        counts = ", ".join(f"{many} on {world} ranks" for world, many in sorted(worlds.items()))
        print(f"\nmatrix {name}: {len(trained)} of {len(legal)} legal layouts are trained ({counts}); {len(illegal)} are refused")
