"""Adding a family, an axis, a schedule or an engine touches the files that CONTRIBUTING names and no others: a dummy of each is added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import reference_curve
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.tests.rank_programs import added_family, added_schedule
from distrain.tests.rank_programs.plain_engine import BUFFERS, ROW
from distrain.trainer.engines.engine import Engine
from distrain.trainer.launch.admission import check_start
from distrain.trainer.loop.build import engine_class
from distrain.trainer.models.build import build_model, module_of_family
from distrain.trainer.models.families import FAMILIES, family_of
from distrain.trainer.models.hf_format.config_kinds import CONFIG_KINDS
from distrain.trainer.models.hf_format.tensor_names import HF_TENSORS
from distrain.trainer.models.ops.op_table import Op, Tensor
from distrain.trainer.plan.axes import AXES, Axis
from distrain.trainer.plan.axes.axis import RankTensors
from distrain.trainer.plan.axes.message import AxisMessage
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.layout.mesh import Mesh
from distrain.trainer.plan.layout.schedules import SCHEDULES, bubble_share
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.search.search_result import find_layouts
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Parallel, Run


@pytest.fixture
def added_ranks(ranks: RankPool, tmp_path: Path) -> RankPool:
    """Return ranks whose tables have the added engine, schedule and family."""
    choose_program(tmp_path, "added")
    return ranks


# Engine: a row of ENGINES and its class.

CURVE = (
    "quickstart", "model=tiny", "data=synthetic", "train.steps=4", "train.batch=8", "train.seq=32", "train.evaluate.every=2", "log.every=1",
    "optim.schedule=constant", "optim.warmup=1",
)  # fmt: skip
LAYOUT = ("engine=plain", "parallel.dp=2", "parallel.zero=0", "cluster.gpus=2", "train.microbatch=2")


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, ROW.name, ROW)


@pytest.mark.usefixtures("plain_engine")
def test_an_added_engine_is_planned_by_its_own_cost_model() -> None:
    plan = make_plan(load_recipe(CURVE[0], (*CURVE[1:], *LAYOUT)))
    assert plan.runnable
    assert plan.engine == "plain"
    assert plan.memory is not None
    assert plan.memory.stages[0].bytes.buffers == BUFFERS


@pytest.mark.usefixtures("plain_engine")
def test_an_added_engine_trains_as_one_process_does_and_resumes(added_ranks: RankPool, tmp_path: Path) -> None:
    added_ranks.train(tmp_path / "run", *CURVE, *LAYOUT, "train.steps=2")
    resumed = added_ranks.train(tmp_path / "run", *CURVE, *LAYOUT)
    losses, norms = reference_curve(CURVE)
    assert resumed.figures("loss") == pytest.approx(losses, rel=1e-5)
    assert resumed.figures("grad_norm") == pytest.approx(norms, rel=1e-5)
    assert any("resumed from step 2" in line or "step 2" in line for line in resumed.lines)


@pytest.mark.usefixtures("plain_engine")
def test_an_engine_refuses_what_its_row_does_not_name() -> None:
    run = load_recipe(CURVE[0], (*CURVE[1:], *LAYOUT, "cluster.gpus=4", "parallel.tp=2"))
    plan = make_plan(run)
    assert not plan.runnable
    assert "engine plain does not run parallel.tp=2" in [each.says for each in check_start(run, plan).problems]


def test_an_engine_without_a_class_is_planned_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "plain", replace(ROW, engine_class=""))
    run = load_recipe(CURVE[0], (*CURVE[1:], *LAYOUT))
    plan = make_plan(run)
    assert plan.memory is not None
    assert not plan.runnable
    (problem,) = check_start(run, plan).problems
    assert problem.says == "engine=plain can be planned, but has no class that trains"
    assert problem.changes == (("engine=auto",),)
    with pytest.raises(ValueError, match="engine plain has no class that trains"):
        engine_class("plain", Parallel())


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_row_names_a_class(name: str) -> None:
    assert issubclass(engine_class(name, Parallel()), Engine)


# Schedule: a function that lists a stage's actions and a row of SCHEDULES.

PIPELINE = (
    *CURVE, "model.layers=3", "parallel.schedule=eager_1f1b", "parallel.pp=3", "parallel.dp=1", "parallel.zero=0", "cluster.gpus=3",
    "train.microbatch=1",
)  # fmt: skip


@pytest.fixture
def eager_1f1b(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "eager_1f1b", added_schedule.ROW)


@pytest.mark.usefixtures("eager_1f1b")
def test_an_added_schedule_is_planned_from_its_actions() -> None:
    plan = make_plan(load_recipe(PIPELINE[0], PIPELINE[1:]))
    assert plan.runnable
    assert plan.engine == "pipe"
    assert plan.memory is not None
    assert [stage.in_flight for stage in plan.memory.stages] == [5, 3, 1]
    assert bubble_share(SCHEDULES["eager_1f1b"], 3, 8, 1) == pytest.approx(2 / (8 + 2))  # (p - 1)/(m + p - 1)


@pytest.mark.usefixtures("eager_1f1b")
def test_an_added_schedule_trains_as_one_process_does(added_ranks: RankPool, tmp_path: Path) -> None:
    job = added_ranks.train(tmp_path / "run", *PIPELINE)
    losses, norms = reference_curve((*CURVE, "model.layers=3"))
    assert job.figures("loss") == pytest.approx(losses, rel=1e-5)
    assert job.figures("grad_norm") == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if not row.is_plain and name not in ENGINES["pipe"].schedules])
def test_a_schedule_that_instructions_cannot_express_is_refused(name: str) -> None:
    from distrain.trainer.engines.deepspeed.import_deepspeed import import_deepspeed

    import_deepspeed()
    from distrain.trainer.engines.deepspeed.instructions import training_instructions

    with pytest.raises(ValueError, match=f"engine pipe cannot run parallel.schedule={name}"):
        training_instructions(name, 4, 2, 0)


# Axis: a module with its row, the row's place in AXES, and the field of its degree in Parallel.


@dataclass(frozen=True, kw_only=True)
class WiderParallel(Parallel):
    """The config keys of `parallel` and `parallel.xp`."""

    xp: int = 1


def ffn_messages(op: Op, on_rank: RankTensors) -> Iterator[AxisMessage]:
    """All-reduce the result of the product over the ffn dim, in forward and in backward."""
    product = op.product
    if op.weights and product is not None and "ffn" in product.inner:
        yield AxisMessage("xp", "all_reduce", on_rank.bytes(Tensor(product.rows + product.outers[0])), 1, 1)


def on_axis(degree: int) -> Run:
    run = load_recipe("llama3_8b_1node", ["parallel.tp=1", "parallel.pp=2", "parallel.dp=auto", "parallel.zero=0"])
    keys = {each.name: getattr(run.parallel, each.name) for each in fields(Parallel)}
    return replace(run, parallel=WiderParallel(**keys, xp=degree))


@pytest.fixture
def axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AXES, "xp", Axis(name="xp", splits=("ffn",), messages=ffn_messages, source="tests"))


@pytest.mark.usefixtures("axis")
def test_an_added_axis_takes_ranks_of_the_mesh() -> None:
    plan = make_plan(on_axis(2))
    assert plan.mesh is not None
    assert plan.mesh["xp"] == 2
    assert plan.mesh["pp"] * plan.mesh["dp"] * plan.mesh["xp"] == plan.world
    assert plan.groups["xp"] == "2 ranks inside a node"
    assert list(Mesh(pp=2, xp=2).groups("xp")) == [(0, 1), (2, 3)]
    assert list(Mesh(pp=2, xp=2).groups("data")) == [(0,), (1,), (2,), (3,)]


@pytest.mark.usefixtures("axis")
def test_an_added_axis_splits_the_weights_of_its_dims() -> None:
    one, two = make_plan(on_axis(1)), make_plan(on_axis(2))
    model = on_axis(1).model
    assert one.memory is not None
    assert two.memory is not None
    assert model.ffn is not None
    halves = 3 * model.hidden * model.ffn * (model.layers // 2) // 2  # gate, up and down of a stage's layers
    assert one.memory.stages[0].parameters - two.memory.stages[0].parameters == halves
    assert two.memory.stages[0].bytes.activations < one.memory.stages[0].bytes.activations


@pytest.mark.usefixtures("axis")
def test_an_added_axis_sends_its_messages() -> None:
    run = on_axis(2)
    plan = make_plan(run)
    assert plan.microbatches is not None
    (row,) = [row for row in plan.traffic if row.axis == "xp"]
    assert (row.verb, row.link) == ("all_reduce", "inside")
    assert row.payload == run.train.microbatch * run.train.seq * run.model.hidden * 2  # bf16
    assert row.count == 2 * plan.microbatches * run.model.layers // 2
    assert "xp" not in {row.axis for row in make_plan(on_axis(1)).traffic}


@pytest.mark.usefixtures("axis")
def test_an_added_axis_is_refused_until_an_engine_runs_it() -> None:
    plan = make_plan(on_axis(2))
    assert not plan.runnable
    assert any("parallel.xp=2" in each.says for each in plan.warnings)


@pytest.mark.usefixtures("axis")
def test_a_search_keeps_the_degree_of_an_added_axis() -> None:
    run = on_axis(2)
    answer = find_layouts(replace(run, search=replace(run.search, rows=3, runnable=False)))
    assert answer.rows
    for row in answer.rows:
        assert row.mesh["xp"] == 2
        assert row.mesh["pp"] * row.mesh["dp"] * row.mesh["cp"] * row.mesh["tp"] * 2 == answer.nodes * answer.gpus


# Family: a folder with its op table and its module, and a row of FAMILIES.

FAMILY = "model.family=side_by_side"


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "side_by_side", added_family.ROW)


@pytest.mark.usefixtures("side_by_side")
def test_an_added_family_is_planned_from_its_op_table() -> None:
    run, dense = (load_recipe(CURVE[0], (*CURVE[1:], *overrides)) for overrides in ((FAMILY, "cluster.gpus=1"), ("cluster.gpus=1",)))
    plan, other = make_plan(run), make_plan(dense)
    assert (run.model.norm, run.model.bias) == ("rmsnorm", False)  # the row's defaults
    assert (plan.runnable, plan.engine) == (True, "zero")
    assert plan.memory is not None
    assert plan.memory.form == "megatron"  # the row does not state what its module saves
    assert plan.model is not None
    assert other.model is not None
    hidden, layers, ffn = dense.model.hidden, dense.model.layers, dense.model.ffn or 4 * dense.model.hidden
    assert other.model.parameters - plan.model.parameters == layers * (2 * hidden + hidden + 5 * hidden + ffn) + hidden  # norms and biases


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("layout", [("cluster.gpus=1",), ("cluster.gpus=2", "parallel.tp=2"), ("cluster.gpus=2", "parallel.pp=2")])
def test_an_added_family_trains_as_one_process_does(layout: tuple[str, ...], added_ranks: RankPool, tmp_path: Path) -> None:
    job = added_ranks.train(tmp_path / "run", *CURVE, FAMILY, *layout, "train.microbatch=2")
    losses, norms = reference_curve((*CURVE, FAMILY))
    assert job.figures("loss") == pytest.approx(losses, rel=1e-5)
    assert job.figures("grad_norm") == pytest.approx(norms, rel=1e-5)


def test_a_family_without_a_module_is_planned_and_refused() -> None:
    run = load_recipe(CURVE[0], (*CURVE[1:], "model.family=bert", "cluster.gpus=1"))
    plan = make_plan(run)
    assert plan.memory is not None
    assert not plan.runnable
    assert [each.says for each in check_start(run, plan).problems] == ["engine zero does not run model.family=bert"]
    with pytest.raises(
        Unreadable, match=r"model\.family=bert can be planned, but not trained: it has no module: families gpt, .* have one"
    ):
        build_model(run, device=torch.device("meta"), dtype=torch.float32)


def test_an_unknown_family_raises() -> None:
    model = load_recipe(CURVE[0], CURVE[1:]).model
    with pytest.raises(Unreadable, match=r"model\.family=gtp is not known: did you mean gpt\?"):
        family_of(replace(model, family="gtp"))


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.module])
def test_a_family_row_names_a_module(family: str) -> None:
    assert callable(module_of_family(replace(load_recipe(CURVE[0], CURVE[1:]).model, family=family)))


def test_families_rows_and_hugging_faces_model_types_agree() -> None:
    model_types = [model_type for row in FAMILIES.values() for model_type in row.model_types]
    assert sorted(model_types) == sorted(CONFIG_KINDS)
    assert set(HF_TENSORS) <= set(model_types)
