"""The average of the weights (optim.ema): torch's own of what each step left, in every layout, and a run beside it as without it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.rank_pool import choose_program  # noqa: E402
from distrain.tests.fakes.trained_runs import read_run  # noqa: E402
from distrain.trainer.loop.checkpoint import CheckpointReader, open_checkpoint, whole_slice  # noqa: E402
from distrain.trainer.loop.offline.weight_diff import furthest_weight, weight_difference  # noqa: E402
from distrain.trainer.models.build import build_model, named_constants, named_weights  # noqa: E402
from distrain.trainer.models.hf_format.weights import write_hf_folder  # noqa: E402
from distrain.trainer.plan.engines import engine_for, engine_reason  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

Words = tuple[str, ...]

DECAY = 0.75
BASE = (
    *("quickstart", "data=synthetic", "train.seq=32", "log.every=1", "train.steps=4", "train.evaluate.every=1"),
    *("train.evaluate.batches=1", "train.clip=0.5", "train.microbatch=1", "train.precision=fp32", "parallel.zero=0", "optim.lr=3e-3"),
    *("optim.warmup=2", "checkpoint.every=1", "checkpoint.keep=9", "train.batch=4"),
)
EMA = f"optim.ema={DECAY}"
GPT = ("model=tiny", "model.layers=2", "model.tied=true", "model.dropout=0.1")
LLAMA = ("model=tiny_llama", "model.layers=2")
MOE = ("model=tiny_moe", "model.layers=2", "model.router.bias_rate=0.01")
HALF, MUON, SGD = "train.precision=bf16", "optim.name=muon", ("optim.name=sgd", "optim.momentum=0.0")

# fmt: off
LAYOUTS: list[tuple[Words, Words]] = [  # the curve, the layout
    (GPT,             ("cluster.gpus=1",)),
    (GPT,             ("cluster.gpus=2", "parallel.pp=2")),  # a tied weight on both stages
    ((*LLAMA, HALF),  ("cluster.gpus=2", "parallel.zero=1", "parallel.bucket=20000")),
    ((*LLAMA, *SGD),  ("cluster.gpus=2", "parallel.zero=2")),
    (LLAMA,           ("cluster.gpus=4", "parallel.zero=3", "parallel.tp=2", "parallel.sequence=true")),
    ((*LLAMA, HALF),  ("cluster.gpus=2", "parallel.zero=3", "parallel.gather=step")),
    ((*MOE, MUON),    ("cluster.gpus=4", "parallel.zero=1", "parallel.ep=2")),
    ((*LLAMA, "optim.moments=bf16"), ("cluster.gpus=2", "parallel.zero=1", "parallel.offload.optimizer=true")),
    ((*LLAMA, "optim.moments=int8"), ("cluster.gpus=2", "parallel.zero=1")),
    (LLAMA,           ("cluster.gpus=2", "parallel.reduce=server")),
    (LLAMA,           ("cluster.gpus=2", "parallel.staleness=1")),
    (LLAMA,           ("cluster.gpus=2", "parallel.compress.name=powersgd", "parallel.compress.rank=2")),
    ((*LLAMA, "model.lora.rank=4"), ("cluster.gpus=2", "parallel.zero=2")),
]
# fmt: on


@pytest.mark.parametrize(("curve", "layout"), LAYOUTS)
def test_a_layout_averages_the_weights_that_its_steps_leave_as_torch_does(
    ranks: RankPool, tmp_path: Path, curve: Words, layout: Words
) -> None:
    """Bit for bit, and validations see the average alone: the run's own losses are those of a run without one, bit for bit. What is held
    and saved is as planned."""
    words = (*BASE, *curve, *layout, "engine=native")
    plain, job = (ranks.train(tmp_path / name, *words, *more) for name, more in (("plain", ()), ("averaged", (EMA,))))
    for key in ("loss", "grad_norm", "validation_loss"):
        assert job.figures(key) == plain.figures(key)
    run, average = read_run(job.folder), torch_average(job, 4)
    assert average
    for name, expected in average.items():
        saved = read_saved(job, 4, name, "ema", tuple(expected.shape))
        torch.testing.assert_close(saved, expected, rtol=0, atol=0)
    losses = job.figures("validation_ema_loss")
    assert losses[0] != job.figures("validation_loss")[0]  # three quarters of it are the first weights
    plan, held = make_plan(run), json.loads((job.folder / "measured.json").read_text())["ranks"]
    assert plan.memory is not None
    stages = plan.memory.stages
    for at, stage in enumerate(stages):
        rows = held[at * len(held) // len(stages) :][: len(held) // len(stages)]
        host = plan.memory.host
        planned, kind = (stage.bytes.optimizer, "optimizer") if host is None else (sum(vars(host.rank).values()), "host")
        assert max(each[kind] for each in rows) == pytest.approx(planned, rel=5e-3)  # counts of steps, padding
    saved_bytes = sum(each.stat().st_size for each in (job.folder / "checkpoints" / "step_4").glob("*.safetensors"))
    assert plan.run is not None
    assert saved_bytes == pytest.approx(plan.run.checkpoint_bytes, rel=0.08)  # headers of small files


@pytest.mark.parametrize("layout", [("cluster.gpus=2",), ("cluster.gpus=4", "parallel.tp=2"), ("cluster.gpus=2", "parallel.gather=step")])
def test_each_validation_of_an_average_of_gathered_weights_is_that_of_one_process(ranks: RankPool, tmp_path: Path, layout: Words) -> None:
    """All of them, the embedding and the head too, which fully_shard keeps gathered after the validation of the run's own weights."""
    words = (*BASE, *LLAMA, "optim.lr=3e-2", "optim.warmup=0", "engine=native", EMA)
    one = ranks.train(tmp_path / "one", *words, "cluster.gpus=1")
    job = ranks.train(tmp_path / "sharded", *words, "parallel.zero=3", *layout)
    for key in ("loss", "validation_loss", "validation_ema_loss"):
        assert job.figures(key) == pytest.approx(one.figures(key), abs=1e-5, rel=0)


def test_an_average_begins_with_published_weights(ranks: RankPool, tmp_path: Path) -> None:
    run = load_recipe(BASE[0], (*BASE[1:], *LLAMA, "cluster.gpus=1"))
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=11)
    weights = {name: each.detach() for name, each in module.named_parameters()}
    write_hf_folder(iter(weights.items()), run, tmp_path / "base")
    start = (
        f"model.hf={tmp_path / 'base'}",
        f"model.weights={tmp_path / 'base'}",
        "cluster.gpus=2",
        "parallel.zero=2",
        "train.steps=1",
        "optim.warmup=0",
    )
    job = ranks.train(tmp_path / "run", *BASE, *start, "engine=native", EMA)
    for name, before in weights.items():
        after, average = (read_saved(job, 1, name, kind, tuple(before.shape)) for kind in ("weight", "ema"))
        torch.testing.assert_close(average, before.lerp(after, 1 - DECAY), rtol=0, atol=1e-7)


@pytest.mark.parametrize("layout", [("cluster.gpus=2", "parallel.zero=1"), ("cluster.gpus=2", "parallel.zero=3")])
def test_a_step_that_is_skipped_is_not_averaged(ranks: RankPool, tmp_path: Path, layout: Words) -> None:
    choose_program(tmp_path, "spoiled", {"skips": "poisons"})  # the third step
    job = ranks.train(tmp_path / "skips", *BASE, *LLAMA, *layout, "engine=native", EMA)
    assert ["skipped" in row for row in job.rows] == [False, False, True, False]
    for name, expected in torch_average(job, 4, skipped=3).items():
        torch.testing.assert_close(read_saved(job, 4, name, "ema", tuple(expected.shape)), expected, rtol=0, atol=0)


def torch_average(job: PoolJob, steps: int, skipped: int = 0) -> dict[str, Tensor]:
    """What torch's own average is of the weights that a run began with and those that it saved after each step but a skipped one."""
    run = read_run(job.folder)
    rows = open_checkpoint(job.folder / "checkpoints" / "step_1").manifest.tensors
    averaged = {row.name for row in rows if row.kind == "ema"}
    dtype = torch.bfloat16 if run.train.precision == "bf16" else torch.float32
    module = build_model(run, device=torch.device("cpu"), dtype=dtype, seed=run.train.seed)
    drawn, constants = dict(named_weights(module, run)), dict(named_constants(module))
    names = [name for name in drawn if name in averaged]
    assert len(names) == len(averaged) == sum(row.kind == "weight" and row.name not in constants for row in rows)
    model = torch.nn.ParameterList(drawn[name].detach().float() for name in names)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # takes the weights before the first step
    for step in (each for each in range(1, steps + 1) if each != skipped):
        with torch.no_grad():
            for name, held in zip(names, model, strict=True):
                held.copy_(read_saved(job, step, name, "weight", tuple(held.shape)))
        average.update_parameters(model)
    return dict(zip(names, (each.detach() for each in average.module.parameters()), strict=True))


def read_saved(job: PoolJob, step: int, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    reader = CheckpointReader(open_checkpoint(job.folder / "checkpoints" / f"step_{step}"))
    return reader.read(whole_slice(name, kind, shape))


def test_a_run_resumes_its_average_bit_for_bit_and_in_any_layout(ranks: RankPool, tmp_path: Path) -> None:
    """An average that is not in the checkpoint begins with its weights, and one that is not wanted is dropped; a line says so."""
    words, two = (*BASE, *LLAMA, "engine=native"), ("cluster.gpus=2", "parallel.zero=1")
    whole = ranks.train(tmp_path / "whole", *words, EMA, *two)
    rows = open_checkpoint(whole.folder / "checkpoints" / "step_4").manifest.tensors
    shapes = {row.name: row.shape for row in rows if row.kind == "ema"}

    def resume(name: str, source: Path, *more: str, begin: int = 2) -> PoolJob:
        shutil.copytree(source, tmp_path / name)
        for step in range(begin + 1, 5):
            shutil.rmtree(tmp_path / name / "checkpoints" / f"step_{step}")
        return ranks.train(tmp_path / name, *words, "checkpoint.resume=must", *more)

    def averages(job: PoolJob, step: int = 4, kind: str = "ema") -> list[Tensor]:
        return [read_saved(job, step, name, kind, shape) for name, shape in shapes.items()]

    for one, other in zip(averages(resume("same", whole.folder, EMA, *two)), averages(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    decayed = resume("other", whole.folder, "optim.ema=0.5", *two)
    differences = [weight_difference(str(whole.folder), str(tmp_path / name)) for name in ("same", "other")]  # as a proof judges them
    assert differences[0]["weights"] == 0 < differences[1]["weights"]
    assert differences[1]["weight"].endswith(" (averaged)")
    assert averages(decayed, kind="weight")[0].equal(averages(whole, kind="weight")[0])
    rows_job = resume("rows", whole.folder, EMA, "cluster.gpus=4", "parallel.zero=3", "parallel.pp=2")
    for one, other in zip(averages(rows_job), averages(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert rows_job.figures("validation_ema_loss") == pytest.approx(whole.figures("validation_ema_loss"), abs=1e-5, rel=0)
    dropped = resume("dropped", whole.folder, "cluster.gpus=1")
    assert "the checkpoint's average of the weights is dropped (optim.ema=0.0)" in "\n".join(dropped.lines)
    assert not any(row.kind == "ema" for row in open_checkpoint(dropped.folder / "checkpoints" / "step_4").manifest.tensors)
    new = resume("new", dropped.folder, EMA, "cluster.gpus=1", begin=3)
    assert "the average of the weights begins with those of the checkpoint (optim.ema)" in "\n".join(new.lines)
    for average, before, after in zip(averages(new), averages(dropped, 3, "weight"), averages(new, kind="weight"), strict=True):
        torch.testing.assert_close(average, before.lerp(after, 1 - DECAY), rtol=0, atol=1e-7)


def test_a_weight_that_is_not_a_number_is_the_furthest_in_any_order() -> None:
    pairs = [("a", torch.tensor([torch.nan, 1.0]), torch.ones(2)), ("b", torch.ones(2), torch.zeros(2))]
    for order in (pairs, pairs[::-1]):
        found = furthest_weight(None, order)
        assert (found["weight"], found["weights"] != found["weights"]) == ("a", True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), ""),
        (("engine=zero",), "engine zero does not run optim.ema=0.75"),
        (("engine=pipe", "parallel.pp=2"), "engine pipe does not run optim.ema=0.75"),
        (("parallel.sync.every=4",), "engine native does not run optim.ema=0.75 with parallel.sync.every=4"),
        (("parallel.pp=2", "parallel.schedule=pipedream"), "engine native does not run optim.ema=0.75 with parallel.schedule=pipedream"),
    ],
)
def test_an_engine_without_an_average_that_is_right_is_refused(words: Words, says: str) -> None:
    run = load_recipe(BASE[0], (*BASE[1:], *LLAMA, "cluster.gpus=2", EMA, *words))
    row, limits = engine_for(run, run.parallel)
    assert [each.says for each in limits if each.key == "optim.ema"] == ([says] if says else [])
    if not says:
        assert row is not None
        assert row.name == "native"
        assert engine_reason(run, run.parallel, "native") == "it alone runs optim.ema=0.75"
