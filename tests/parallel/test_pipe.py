"""Engine `pipe` computes what one process of plain torch computes, up to rounding, under every schedule and with the other axes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.deadline import DEADLINE  # noqa: E402
from distrain.tests.fakes.rank_pool import RankPool, choose_program  # noqa: E402
from distrain.tests.rank_programs.pipe_ranks import LR, STEPS, batch  # noqa: E402
from distrain.trainer.engines.deepspeed.import_deepspeed import import_deepspeed  # noqa: E402
from distrain.trainer.engines.torch_optimizer import torch_optimizer  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402
from distrain.trainer.plan.compare_rank_messages import CONTROL, MessageRow  # noqa: E402
from distrain.trainer.plan.layout.mesh import Mesh  # noqa: E402
from distrain.trainer.plan.layout.schedules import SCHEDULES, Action, peak_in_flight  # noqa: E402
from distrain.trainer.spec.run import Run  # noqa: E402

Words = tuple[str, ...]

RAN = ("1f1b", "gpipe", "dualpipev")
BASE = (
    "model=tiny", "model.hidden=32", "model.ffn=64", "model.vocab=96", "data=synthetic", "train.steps=3", "train.batch=8",
    "train.seq=16", "train.microbatch=2",
)  # fmt: skip
TIED, UNTIED = ("model.tied=true",), ("model.tied=false",)
LLAMA = ("model=tiny_llama", "model.tied=false")
# Adam divides by what a gradient is: an eps that is larger than rounding, or its noise is a step.
ADAM, SGD = ("train.clip=0.5", "optim.eps=1e-3"), ("train.clip=0", "optim=sgd", "optim.momentum=0.9")
FULL, SEQUENCE = "parallel.recompute=full", "parallel.sequence=true"


@dataclass(frozen=True)
class Row:
    """A layout: schedule, ZeRO stage, pp x dp x tp, layers of each part of the model; overrides of the curve and of the layout."""

    schedule: str
    zero: int
    axes: tuple[int, int, int]
    layers: tuple[int, ...]
    curve: Words
    words: Words = ()

    @property
    def ranks(self) -> int:
        pp, dp, tp = self.axes
        return pp * dp * tp

    @property
    def name(self) -> str:
        pp, dp, tp = self.axes
        words = " ".join(word.rpartition(".")[2] for word in (*self.curve, *self.words))
        return f"{self.schedule} zero{self.zero} pp{pp} dp{dp} tp{tp} {words}"

    @cache  # noqa: B019  # a row stays as long as the tests do
    def run(self, *words: str) -> Run:
        pp, dp, tp = self.axes
        layout = (f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.tp={tp}", f"cluster.gpus={self.ranks}")
        how = (f"parallel.schedule={self.schedule}", f"parallel.zero={self.zero}", *self.words)
        return load_recipe("quickstart", [*whole(self.curve, sum(self.layers)), *layout, *how, *words])


# fmt: off
ROWS = (
    Row("1f1b",      0, (2, 1, 1), (2, 2),          (*TIED, *SGD)),
    Row("1f1b",      0, (4, 1, 1), (1, 2, 1, 1),    (*UNTIED, *ADAM)),
    Row("1f1b",      1, (4, 1, 1), (2, 1, 1, 1),    (*TIED, *SGD),     (FULL,)),
    Row("1f1b",      0, (2, 2, 1), (1, 2),          (*TIED, *ADAM),    (FULL,)),
    Row("1f1b",      1, (2, 2, 1), (2, 2),          (*LLAMA, *ADAM)),
    Row("1f1b",      0, (2, 1, 2), (2, 1),          (*TIED, *ADAM)),
    Row("1f1b",      1, (2, 2, 2), (1, 1),          (*TIED, *SGD),     (SEQUENCE,)),
    Row("gpipe",     0, (2, 1, 1), (3, 1),          (*TIED, *ADAM),    ("train.microbatch=4",)),
    Row("gpipe",     1, (2, 2, 1), (1, 1),          (*UNTIED, *SGD),   (FULL,)),
    Row("dualpipev", 0, (2, 1, 1), (1, 1, 1, 1),    (*TIED, *SGD)),
    Row("dualpipev", 1, (2, 2, 1), (1, 2, 1, 1),    (*TIED, *ADAM),    (FULL, "train.microbatch=1")),
    Row("dualpipev", 1, (2, 1, 2), (2, 1, 1, 1),    (*LLAMA, *ADAM),   (SEQUENCE,)),
)
HALVES = (  # and the precision of gradients
    (Row("1f1b",      1, (4, 1, 1), (1, 1, 1, 1),    (*TIED, *ADAM)),                   "bf16"),
    (Row("1f1b",      0, (2, 1, 2), (1, 2),          (*TIED, *ADAM),    (SEQUENCE,)),   "fp32"),
    (Row("gpipe",     1, (2, 2, 1), (1, 2),          (*UNTIED, *ADAM)),                 "fp32"),
    (Row("dualpipev", 1, (2, 1, 1), (1, 1, 1, 1),    (*TIED, *ADAM)),                   "bf16"),
)
RESTORED = ((ROWS[0], "bf16"), (ROWS[4], "bf16"), (ROWS[5], "fp32"), (ROWS[10], "fp32"))  # and the precision
# fmt: on
EVERY = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def whole(curve: Words, layers: int) -> list[str]:
    return [*BASE, f"model.layers={layers}", "train.precision=fp32", *curve]


class PipeJob:
    """The results of a job's ranks."""

    def __init__(self, ranks: RankPool, folder: Path, row: Row, run: Run, does: str) -> None:
        choose_program(folder, "pipe")
        (folder / "run.json").write_bytes(msgspec.json.encode(run))
        (folder / "job.json").write_text(json.dumps({"layers": row.layers, "does": does}))
        crew = ranks.server.run_job(folder / "run.json", row.ranks, seconds=DEADLINE)
        if crew.timed_out or set(crew.codes) != {0}:
            logs = (f"-- {log}\n{log.read_text()[-1500:]}" for log in sorted((folder / "ranks").glob("*.log")))
            pytest.fail(f"{row.name}: {crew.says}\n" + "\n".join(logs))
        self.ranks: list[dict[str, Any]] = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(row.ranks)]


@pytest.fixture(scope="module")
def train_row(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of the ranks that train a row; each row trains once."""

    @cache
    def results(row: Row, *words: str) -> list[dict[str, Any]]:
        return PipeJob(ranks, tmp_path_factory.mktemp("pipe") / "run", row, row.run(*words), "train").ranks

    return results


@dataclass(frozen=True, kw_only=True)
class ReferenceCurve:
    """The curve of one process of plain torch: losses and gradient norms of the steps, the model before and after them."""

    losses: list[float]
    norms: list[float]
    before: Any
    after: Any


@cache
def reference(curve: Words, layers: int) -> ReferenceCurve:
    """Train a curve in one process, each global batch at once."""
    run = load_recipe("quickstart", whole(curve, layers))
    before, module = (build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed) for _ in range(2))
    stepper = torch_optimizer(run, module)
    for group in stepper.param_groups:
        group["lr"] = LR
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels, counted = batch(run, step)
        loss = module(tokens, labels)[0] / counted
        stepper.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), run.train.clip or torch.inf)))
        stepper.step()
        losses.append(loss.item())
    return ReferenceCurve(losses=losses, norms=norms, before=before, after=module)


def weights(module: Any) -> dict[str, Any]:
    return {name: each.detach() for name, each in module.named_parameters()}


def block(tensor: Any, shard: Any) -> Any:
    """Return a rank's block of a whole weight."""
    return tensor[tuple(slice(first, first + length) for first, length in zip(shard.offset, shard.length, strict=True))]


def without_padding(tensor: Any, shard: Any) -> Any:
    """Return a rank's tensor without padding."""
    return tensor[tuple(slice(length) for length in shard.length)]


@EVERY
def test_an_engine_connects_all_ranks_before_the_first_batch_of_sends(train_row: Any, row: Row) -> None:
    """NCCL would wait in that batch for ranks that it leaves out."""
    for rank in train_row(row):
        assert MessageRow(axis=CONTROL, verb="all_reduce", payload=8, count=1) in rank["built"]


@EVERY
def test_losses_and_norms_equal_those_of_one_process(train_row: Any, row: Row) -> None:
    one = reference(row.curve, sum(row.layers))
    for rank in train_row(row):
        assert rank["losses"] == pytest.approx(one.losses, abs=2e-6, rel=0)  # two roundings of a loss of 4.6
        assert rank["norms"] == pytest.approx(one.norms, abs=0, rel=1e-6)


@EVERY
def test_all_ranks_report_the_same_loss_to_the_bit(train_row: Any, row: Row) -> None:
    assert len({tuple(rank["losses"]) for rank in train_row(row)}) == 1


@EVERY
def test_weights_of_every_stage_equal_those_of_one_process(train_row: Any, row: Row) -> None:
    """The gradient of key biases is rounding only."""
    after = weights(reference(row.curve, sum(row.layers)).after)
    for rank in train_row(row):
        rows = [each for each in rank["weights"] if not each[0].endswith("key.bias")]
        ours = {name: without_padding(held, placed) for name, placed, held in rows}
        torch.testing.assert_close(ours, {name: block(after[name], placed) for name, placed, _ in rows}, atol=1e-6, rtol=0)


@pytest.mark.parametrize("row", [row for row in ROWS if "optim=sgd" in row.curve], ids=lambda row: row.name)
def test_every_stage_steps_as_far_as_one_process(train_row: Any, row: Row) -> None:
    """DeepSpeed before 0.19.3 divided gradients by the accumulation steps once per stage: with SGD a step shows it."""
    one = reference(row.curve, sum(row.layers))
    before, after = weights(one.before), weights(one.after)
    for rank in train_row(row):
        ours, theirs = [], []
        for name, placed, held in rank["weights"]:
            ours.append((without_padding(held, placed) - block(before[name], placed)).flatten())
            theirs.append((block(after[name], placed) - block(before[name], placed)).flatten())
        assert float(torch.cat(ours).norm() / torch.cat(theirs).norm()) == pytest.approx(1.0, abs=1e-5)


@EVERY
def test_evaluation_returns_the_loss_before_and_after_training(train_row: Any, row: Row) -> None:
    """ReferenceCurve micro-batch a replica; only ranks with the head return it."""
    one, run = reference(row.curve, sum(row.layers)), row.run()
    tokens, labels, _ = batch(run, STEPS)
    rows = slice(0, row.axes[1] * run.train.microbatch)
    for at, module in enumerate((one.before, one.after)):
        with torch.no_grad():
            loss, counted = module(tokens[rows], labels[rows])
        evaluations = [rank["evaluations"][at] for rank in train_row(row) if rank["evaluations"][at] != (0.0, 0)]
        assert len(evaluations) == row.ranks // row.axes[0]
        assert sum(each for each, _ in evaluations) / sum(each for _, each in evaluations) == pytest.approx(
            float(loss / counted), abs=2e-6, rel=0
        )


@EVERY
def test_a_stage_holds_as_many_micro_batches_as_planned(train_row: Any, row: Row) -> None:
    planned, (pp, dp, _) = SCHEDULES[row.schedule].in_flight, row.axes
    run = row.run()
    micros = run.train.batch // (dp * run.train.microbatch)
    for rank in train_row(row):
        assert rank["held"] == planned(rank["coordinates"]["pp"], pp, micros, 1)


@EVERY
def test_after_a_step_no_micro_batch_is_kept(train_row: Any, row: Row) -> None:
    assert [rank["kept"] for rank in train_row(row)] == [0] * row.ranks


@EVERY
def test_a_tied_gradient_is_summed_once_a_step_and_hidden_states_are_sent_once_a_micro_batch(train_row: Any, row: Row) -> None:
    run, (pp, dp, _) = row.run(), row.axes
    micros = run.train.batch // (dp * run.train.microbatch)
    for rank in train_row(row):
        stage = rank["coordinates"]["pp"]
        ties = sum(each.count for each in rank["rows"] if each.axis == "ends")
        assert ties == (run.model.tied and len(row.layers) == pp and stage in (0, pp - 1))
        links = (2 if len(row.layers) > pp else 1) * ((stage > 0) + (stage < pp - 1))
        assert sum(each.count for each in rank["rows"] if each.axis == "pp") == micros * links


@pytest.mark.parametrize(("row", "gradients"), HALVES, ids=lambda each: getattr(each, "name", each))
def test_bf16_trains_as_float32_does_within_its_precision(train_row: Any, row: Row, gradients: str) -> None:
    """The tolerance is that of 8-bit mantissas: 1.3e-4 of a loss and 0.13 % of a norm were measured."""
    one = reference(row.curve, sum(row.layers))
    for rank in train_row(row, "train.precision=bf16", f"train.gradients={gradients}"):
        assert rank["losses"] == pytest.approx(one.losses, abs=5e-4, rel=0)
        assert rank["norms"] == pytest.approx(one.norms, abs=0, rel=3e-3)


@pytest.mark.parametrize(("row", "precision"), RESTORED, ids=lambda each: getattr(each, "name", each))
def test_training_after_a_restore_repeats_to_the_bit(ranks: RankPool, tmp_path: Path, row: Row, precision: str) -> None:
    for rank in PipeJob(ranks, tmp_path / "run", row, row.run(f"train.precision={precision}"), "restore").ranks:
        assert rank["again"] == rank["once"]


def executed_actions(schedule: Any) -> Iterator[Action]:
    """The forward and backward passes of a stage's instructions: a phase's k-th forward is micro-batch k, and backward takes
    the one that its buffer holds."""
    forwards, held = {0: 0, 1: 0}, dict[int, int]()
    for instruction in (each for step in schedule for each in step):
        phase = getattr(instruction, "phase", 0)
        match instruction.name:
            case "ForwardPass":
                assert instruction.buffer_id not in held, "it is still held"
                held[instruction.buffer_id] = forwards[phase]
                forwards[phase] += 1
                yield Action("F", held[instruction.buffer_id], phase)
            case "BackwardPass":
                yield Action("B", held.pop(instruction.buffer_id), phase)


@pytest.mark.parametrize(("stages", "micros"), [(1, 3), (2, 2), (2, 4), (2, 5), (3, 6), (3, 2), (4, 3), (4, 8), (4, 11), (5, 10)])
@pytest.mark.parametrize("name", RAN)
def test_instructions_are_the_planned_actions(name: str, stages: int, micros: int) -> None:
    import_deepspeed()
    from distrain.trainer.engines.deepspeed.instructions import training_instructions

    row = SCHEDULES[name]
    if row.folded and micros < 2 * stages:
        pytest.skip("fewer micro-batches than it needs")
    for stage in range(stages):
        actions = list(executed_actions(training_instructions(name, micros, stages, stage)))
        assert actions == row.actions(stage, stages, micros, 1)
        assert peak_in_flight(actions, row.parts(1)) == row.in_flight(stage, stages, micros, 1)


@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp=2, tp=2), Mesh(pp=3, dp=1, tp=4), Mesh(pp=4, dp=3), Mesh(pp=2, dp=2, cp=3, tp=2)], ids=str)
def test_deepspeeds_topology_orders_ranks_as_the_mesh_does(mesh: Mesh) -> None:
    import_deepspeed()
    from distrain.trainer.engines.deepspeed.pipeline_module import topology

    made = topology(mesh)
    for rank in range(mesh.world):
        place = mesh.coordinates(rank)
        assert made.get_rank(pipe=place["pp"], data=place["dp"] * mesh.cp + place["cp"], model=place["tp"]) == rank
