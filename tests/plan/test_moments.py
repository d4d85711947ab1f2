"""What a plan says of moments in bf16 and in 8 bits: their bytes in memory, in a step and in a checkpoint, and which engines keep them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.plan.test_search_bounds import EveryLayout, NothingDiscarded, larger
from distrain.trainer.models.families import op_table
from distrain.trainer.models.ops.op_table import model_parameters
from distrain.trainer.plan.engines import ENGINES, engine_for, engine_reason
from distrain.trainer.plan.engines.engine_limits import exceeded_limits
from distrain.trainer.plan.native.optimizer_step import PARTS, part_bytes
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.plan.search.search import LayoutSearch
from distrain.trainer.plan.search.space import Space
from distrain.trainer.rundir.resume_changes import compare_runs
from distrain.trainer.rundir.timeline_files import layout_key
from distrain.trainer.spec.run import Device, Run

LLAMA = ("llama3_8b_1node", "cluster.gpus=4", "model.layers=4", "train.batch=16", "engine=native", "parallel.zero=1")
BF16, INT8 = "optim.moments=bf16", "optim.moments=int8"
SGD = ("optim.name=sgd", "optim.momentum=0.9")


def run_of(*words: str) -> Run:
    return load_recipe(words[0], list(words[1:]))


def planned(*words: str) -> Plan:
    plan = make_plan(run_of(*words))
    assert plan.memory
    assert plan.model
    assert plan.time
    assert plan.run
    return plan


@pytest.mark.parametrize(
    ("words", "spared"),
    [((), 4), (SGD, 2), (("parallel.zero=0",), 4), (("parallel.zero=3",), 4), (("parallel.zero=0", "engine=papers"), 4)],
)
def test_memory_and_checkpoints_spare_two_bytes_of_each_moment(words: tuple[str, ...], spared: int) -> None:
    wide, narrow = planned(*LLAMA, *words), planned(*LLAMA, *words, BF16)
    assert wide.model
    parameters, ranks = wide.model.parameters, 1 if "parallel.zero=0" in words else 4
    (one,), (other,) = wide.memory.stages, narrow.memory.stages  # type: ignore[union-attr]
    assert one.bytes.optimizer - other.bytes.optimizer == pytest.approx(spared * parameters / ranks, rel=1e-3)
    assert wide.run.checkpoint_bytes - narrow.run.checkpoint_bytes == spared * parameters  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "moments"),
    [((), 2), (SGD, 1), (("parallel.zero=0",), 2), (("parallel.zero=3",), 2), (("parallel.zero=0", "engine=papers"), 2)],
)
def test_moments_in_8_bits_have_a_byte_and_a_share_of_a_scale(words: tuple[str, ...], moments: int) -> None:
    """Of a block of 256 elements: 4 bytes. A checkpoint has them in float32."""
    wide, narrow = planned(*LLAMA, *words), planned(*LLAMA, *words, INT8)
    parameters, ranks = wide.model.parameters, 1 if "parallel.zero=0" in words else 4  # type: ignore[union-attr]
    (one,), (other,) = wide.memory.stages, narrow.memory.stages  # type: ignore[union-attr]
    spared = moments * (3 - 4 / 256) * parameters / ranks
    assert one.bytes.optimizer - other.bytes.optimizer == pytest.approx(spared, rel=1e-5)
    assert wide.run.checkpoint_bytes == narrow.run.checkpoint_bytes  # type: ignore[union-attr]


def test_each_weight_of_a_rank_has_blocks_of_its_own() -> None:
    """Whole ones and one of the rest, which has a scale too. On two ranks each has about half of them all."""
    words = ("engine=native", "model=tiny", "model.layers=1", "model.vocab=301", INT8, "train.precision=fp32", "cluster.gpus=2")
    table = op_table(run_of("quickstart", *words))
    weights = [prod(each.shape(table.sizes)) for each in model_parameters(table, range(1))]
    blocks = sum(-(-each // 256) for each in weights)
    found = []
    for zero in (0, 1):
        plan = make_plan(run_of("quickstart", *words, f"parallel.zero={zero}"))
        assert plan.memory
        found.append(plan.memory.stages[0].bytes.optimizer)
    assert found[0] == 2 * sum(weights) + 2 * 4 * blocks
    assert found[1] - sum(weights) == pytest.approx(2 * 4 * blocks / 2, abs=2 * 4 * 9)


def test_muons_momentum_in_8_bits_is_widened_in_a_checkpoint() -> None:
    wide, narrow = planned(*LLAMA, "optim=muon"), planned(*LLAMA, "optim=muon", INT8)
    assert wide.run.checkpoint_bytes == narrow.run.checkpoint_bytes  # type: ignore[union-attr]
    masters = 4 * wide.model.parameters // 4  # type: ignore[union-attr]
    (one,), (other,) = wide.memory.stages, narrow.memory.stages  # type: ignore[union-attr]
    assert (one.bytes.optimizer - masters) / (other.bytes.optimizer - masters) == pytest.approx(4 / (1 + 4 / 256), rel=1e-3)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    wide, narrow = planned(*LLAMA, "optim=muon"), planned(*LLAMA, "optim=muon", BF16)
    masters = 4 * wide.model.parameters // 4  # type: ignore[union-attr]
    (one,), (other,) = wide.memory.stages, narrow.memory.stages  # type: ignore[union-attr]
    assert (one.bytes.optimizer - masters) / (other.bytes.optimizer - masters) == pytest.approx(2, rel=1e-3)


def test_moments_on_the_host_are_as_narrow() -> None:
    words = (*LLAMA, "parallel.offload.optimizer=true")
    wide, narrow = (planned(*words, *more).memory for more in ((), (BF16,)))
    assert wide
    assert narrow
    assert wide.host
    assert narrow.host
    parameters = planned(*LLAMA).model.parameters  # type: ignore[union-attr]
    assert wide.host.rank.optimizer - narrow.host.rank.optimizer == pytest.approx(4 * parameters / 4, rel=1e-3)


def test_a_step_on_a_gpu_moves_22_bytes_an_element() -> None:
    """Of 30 with moments in fp32: of a whole bucket and of a quarter of it, beside what every step takes."""

    def moving(*words: str) -> float:
        whole, quarter = (planned(*LLAMA, *words, f"parallel.zero={zero}").time for zero in (0, 1))
        assert whole
        assert quarter
        return whole.optimizer - quarter.optimizer

    assert moving(BF16) / moving() == pytest.approx(22 / 30, rel=1e-3)
    assert moving(INT8) / moving() == pytest.approx((18 + 16 / 256) / 30, rel=1e-3)


# fmt: off
TENSORS: list[tuple[tuple[str, ...], int]] = [  # float32 tensors of a part
    ((),                                                  5),  # two moments, random bits and what they are mixed with
    (("optim.rounding=nearest",),                         2),
    (("optim.rounding=nearest", "train.precision=bf16"),  3),  # and gradients
    ((*SGD, "optim.rounding=nearest"),                    1),
]
# fmt: on


@pytest.mark.parametrize(("words", "tensors"), TENSORS)
def test_a_step_on_a_cpu_widens_a_part_at_once(words: tuple[str, ...], tensors: int) -> None:
    run = run_of("quickstart", "engine=native", BF16, *words)
    casts = run.train.precision == "bf16"
    assert part_bytes(run, 10**7, casts=casts) == tensors * 4 * PARTS["cpu"]
    assert part_bytes(run, 1000, casts=casts) == tensors * 4 * 1000


@pytest.mark.parametrize(("words", "each"), [((), 8 + 13), (("train.precision=bf16",), 12 + 13), (SGD, 4 + 13)])
def test_a_step_on_a_cpu_quantizes_a_part_at_once(words: tuple[str, ...], each: int) -> None:
    run = run_of("quickstart", "engine=native", INT8, *words)
    assert part_bytes(run, 10**7, casts=run.train.precision == "bf16") == each * PARTS["cpu"]


def test_a_kernel_widens_nothing_and_muons_matrices_a_part() -> None:
    assert part_bytes(run_of(*LLAMA, BF16), 10**9, casts=True) == 0
    assert part_bytes(run_of(*LLAMA, BF16, "optim=muon"), 10**9, casts=True) == 4 * 4 * PARTS["cuda"]
    assert part_bytes(run_of(*LLAMA, BF16, "optim=sgd", "optim.momentum=0"), 10**9, casts=True) == 0


@pytest.mark.parametrize("words", [("parallel.zero=0",), ("parallel.zero=3",), ("parallel.pp=2",)])
def test_auto_takes_the_engine_that_keeps_them(words: tuple[str, ...]) -> None:
    run = run_of(*LLAMA[:-2], *words, BF16, "engine=auto")
    row, limits = engine_for(run, run.parallel)
    assert row
    assert (row.name, limits) == ("native", ())
    assert engine_reason(run, run.parallel, "native") == "it alone runs optim.moments=bf16"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("parallel.offload.optimizer=true",), "parallel.offload.optimizer=true with optim.moments=int8"),
        (("parallel.sync.every=4", "parallel.zero=0"), "parallel.sync.every=4 with optim.moments=int8"),
        (("engine=zero",), "optim.moments=int8"),
    ],
)
def test_moments_in_8_bits_are_refused_where_they_do_not_run(words: tuple[str, ...], says: str) -> None:
    run = run_of(*LLAMA, INT8, *words)
    limits = list(exceeded_limits(ENGINES[run.engine], run, run.parallel))
    assert [each.says for each in limits] == [f"engine {run.engine} does not run {says}"]
    assert limits[0].candidates


def test_a_change_of_type_is_reported_and_a_change_of_rounding_too() -> None:
    wide, narrow, nearest = (run_of("quickstart", *more) for more in ((), (BF16,), (BF16, "optim.rounding=nearest")))
    assert [list(compare_runs(*pair, step=4).remarks(4)) for pair in ((wide, narrow), (narrow, wide), (narrow, nearest))] == [
        ["changed since step 4: optim.moments fp32 -> bf16", "the checkpoint's optimizer moments are rounded to the nearest bf16"],
        ["changed since step 4: optim.moments bf16 -> fp32", "the checkpoint's optimizer moments are widened to fp32"],
        ["changed since step 4: optim.rounding stochastic -> nearest"],
    ]
    remarks = list(compare_runs(wide, run_of("quickstart", INT8), step=4).remarks(4))
    assert remarks == ["changed since step 4: optim.moments fp32 -> int8", "the checkpoint's optimizer moments are quantized to 8 bits"]


def test_a_timeline_is_of_moments_of_one_type() -> None:
    runs = [run_of("quickstart", *more) for more in ((), (BF16,), (BF16, "optim.rounding=nearest"), ("optim.rounding=nearest",))]
    wide, narrow, nearest, idle = map(layout_key, runs)
    assert wide == idle
    assert len({wide, narrow, nearest}) == 3


def rounded(name: str, moments: Literal["bf16", "int8"]) -> Run:
    run = larger(name)
    return replace(run, optim=replace(run.optim, moments=moments))


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_search_finds_the_best_layouts(moments: Literal["bf16", "int8"]) -> None:
    """With bounds as without, and none is above what a layout costs."""
    search = EveryLayout(Space(rounded("moe", moments), runnable=True), rows=1)
    search.capacity = 1 << 60
    search.run_all()
    assert search.held > 100
    some, every = (kind(Space(rounded("llama", moments), runnable=True), rows=10).run_all() for kind in (LayoutSearch, NothingDiscarded))
    assert some.best
    assert [(each.peak, each.seconds) for each in some.best] == [(each.peak, each.seconds) for each in every.best]


# fmt: off
@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((), 8.0), (("optim.rounding=nearest",), 2.8), (("optim.name=sgd", "optim.momentum=0.9"), 5.8),
        (("optim.name=sgd", "optim.momentum=0.9", "optim.rounding=nearest"), 1.7), ((INT8,), 16.5),
        (("optim.name=sgd", "optim.momentum=0.9", INT8), 8.0),
    ],
)  # fmt: skip
def test_a_cpu_takes_longer_for_moments_in_bf16_by_what_was_measured(words: tuple[str, ...], steps: float) -> None:
    """The optimizer's seconds beside those of AdamW in float32; a GPU's are of what it moves."""
    base = ("data=synthetic", "engine=native", "train.precision=fp32", "cluster=1x1")
    device = Device(name="cpu", kind="cpu", memory=1e10, bandwidth=1e10, dispatch=0.0)
    times = []
    for more in ((), ("optim.moments=bf16", *words)):
        run = load_recipe("quickstart", [*base, *more])
        time = make_plan(replace(run, cluster=replace(run.cluster, device=replace(device, peak={"fp32": 1e11})))).time
        assert time is not None
        times.append(time)
    assert times[1].optimizer / times[0].optimizer == pytest.approx(steps, rel=1e-9)
    assert times[1].compute == times[0].compute


STALLS: list[tuple[tuple[str, ...], bool]] = [  # what differs, whether some moments do not decay
    (("optim.betas=[0.9,0.996]",),   False),  # 1 - 2^-8 is 0.99609
    (("optim.betas=[0.9,0.9961]",),  True),
    (("optim.betas=[0.9,0.9961]", "optim.rounding=stochastic"), False),
    (("optim.betas=[0.9,0.9961]", "optim.moments=fp32"),        False),
    (("optim.betas=[0.9,0.9961]", INT8), False),
    (("optim.betas=[0.9961,0.95]",), True),
    ((*SGD, "optim.betas=[0.9,0.9961]"), False),
]
# fmt: on


@pytest.mark.parametrize(("words", "stalls"), STALLS)
def test_a_plan_warns_of_moments_that_do_not_decay(words: tuple[str, ...], stalls: bool) -> None:
    rules = [each.rule for each in planned(*LLAMA, BF16, "optim.rounding=nearest", *words).warnings]
    assert ("moments" in rules) == stalls
