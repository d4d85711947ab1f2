"""Estimates equal plans: the same verdict, seconds and peaks on random layouts, legal and not."""

from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.engines import ENGINES, engine_for
from distrain.trainer.plan.estimate import ILLEGAL, Estimator
from distrain.trainer.plan.layout.schedules import SCHEDULES
from distrain.trainer.plan.layout_cost import LayoutCost, layout_cost
from distrain.trainer.plan.layout_of_run import LayoutBase, base_key, layout_of_run
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules.broken_rule import Rule
from distrain.trainer.plan.rules.rules import OF_LAYOUT, OF_STEP, STEP_KEYS, broken_rules
from distrain.trainer.plan.stage_cost import StageCost, stage_costs
from distrain.trainer.spec.run import Cluster, Compress, Device, Link, Model, Offload, OuterOptimizer, Overlap, Parallel, Run, Sync, Train

GPT: dict[str, Any] = {"family": "gpt", "bias": True, "dropout": 0.1}
LLAMA: dict[str, Any] = {"family": "llama", "norm": "rmsnorm", "act": "swiglu", "positions": "rope"}

LINEAR: dict[str, Any] = {"full_attention_interval": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
LINEAR |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}

# fmt: off
MODELS = {
    "gpt":     Model(**GPT, layers=12, hidden=768, heads=12, vocab=50257, tied=True),
    "llama":   Model(**LLAMA, layers=24, hidden=2048, heads=32, kv_heads=4, ffn=5632, vocab=32000, qk_norm=True, qk_norm_over="all",
                     norm_place="after"),
    "moe":     Model(**LLAMA | {"family": "moe"}, layers=9, hidden=1024, heads=16, kv_heads=8, ffn=3584, vocab=32000, experts=8, top_k=2,
                     dense_layers=1),
    "hybrid":  Model(**LLAMA | {"family": "hybrid"}, layers=36, hidden=1024, heads=16, kv_heads=2, vocab=32000, experts=8, top_k=2,
                     expert_ffn=512, shared_experts=1, **LINEAR),
    "uneven":  Model(**GPT, layers=13, hidden=1024, heads=16, vocab=51200, tied=True),
    "bert":    Model(**GPT | {"family": "bert"}, layers=24, hidden=1024, heads=16, vocab=30522, tied=True),
}
# fmt: on
MEMORY = {
    "gpt": 2.2e9,
    "llama": 4.5e9,
    "moe": 4.5e9,
    "hybrid": 4.5e9,
    "uneven": 3.3e9,
    "bert": 4e9,
}  # so that some layouts fit and some don't


def run_of(name: str, **changes: Any) -> Run:
    device = Device(name="A100", memory=MEMORY[name], bandwidth=2e12, peak={"bf16": 312e12}, units=108)
    nvlink, nic = Link(bandwidth=300e9, latency=5e-6), Link(bandwidth=25e9, latency=1e-5)
    cluster = Cluster(nodes=6, gpus=8, device=device, inside=nvlink, between=nic)
    train = Train(batch=192, seq=1024, steps=1, attention="math")
    return replace(Run(name=name, model=MODELS[name], cluster=cluster, parallel=Parallel(), train=train), **changes)


def layout(draw: Random) -> tuple[Parallel, int]:
    """Return a random layout, which is usually legal, and a micro-batch."""

    def seldom(*rare: Any, usual: Any) -> Any:
        return draw.choice(rare) if draw.random() < 0.08 else usual

    schedule = draw.choice([*SCHEDULES, "1f1b", "1f1b"])
    chunked = SCHEDULES[schedule].chunked

    def either() -> bool:
        return draw.random() < 0.5

    parallel = Parallel(
        dp=seldom(1, 2, 6, 48, usual="auto"),
        tp=draw.choice([1, 1, 2, 3, 4, 8]),
        pp=draw.choice([1, 2, 3, 4, 6]),
        cp=seldom(2, 4, usual=1),
        ep=seldom(2, 4, usual=1),
        zero=draw.choice([0, 1, 2, 3]),
        shard=seldom(2, 8, 24, usual="all"),
        schedule=schedule,
        chunks=seldom(1, 2, 3, usual=2 if chunked else 1),
        sequence=either(),
        recompute=draw.choice(["none", "selective", "full"]),
        reduce=seldom("halving", "server", "hierarchical", "tree", "auto", usual="ring"),
        servers=seldom(2, usual=1),
        staleness=seldom(1, 3, usual=0),
        bucket=seldom(10_000_000, usual=50_000_000),
        scatter=either(),
        offload=seldom(Offload(optimizer=True), Offload(optimizer=True, parameters=True), usual=Offload()),
        overlap=Overlap(data=either(), tensor=either(), pipeline=either(), context=either()),
    )
    return parallel, draw.choice([1, 1, 2, 4])


@pytest.mark.parametrize("name", MODELS)
def test_an_estimate_equals_the_plan(name: str) -> None:
    """One estimator for 120 layouts of a model; equal to 1e-12, with at least 5 layouts of each verdict."""
    run, draw = run_of(name), Random(name)
    estimator = Estimator(run)
    met = {"illegal": 0, "fits": 0, "full": 0}
    for _ in range(120):
        parallel, microbatch = layout(draw)
        estimate = estimator(parallel, microbatch)
        plan = make_plan(replace(run, parallel=parallel, train=replace(run.train, microbatch=microbatch)))
        assert estimate.legal == plan.ok
        if not plan.ok:
            assert estimate == ILLEGAL
            met["illegal"] += 1
            continue
        assert plan.memory is not None
        assert estimate.fits == plan.fits
        assert estimate.peak == plan.memory.peak == max(stage.bytes.total for stage in plan.memory.stages)
        assert estimate.step == (pytest.approx(plan.time.step, rel=1e-12) if plan.time else None)
        met["fits" if plan.fits else "full"] += 1
    assert min(met.values()) >= 5, met


KEYS = {field.name for field in fields(Parallel)}


def noting(parallel: Parallel, read: set[str]) -> Parallel:
    """Return equal degrees that note which of their keys are read."""

    class Noting(Parallel):
        def __getattribute__(self, name: str) -> Any:
            if name in KEYS:
                read.add(name)
            return super().__getattribute__(name)

    return Noting(**vars(parallel))


@pytest.mark.parametrize("rule", OF_LAYOUT, ids=lambda rule: rule.__name__)
def test_a_rule_reads_only_the_keys_by_which_an_estimator_keeps_its_verdict(rule: Rule) -> None:
    read, draw = set[str](), Random(1)
    hf = run_of("gpt", model=replace(MODELS["gpt"], family="hf"))
    for run in (run_of("gpt"), run_of("moe"), hf):
        for _ in range(300):
            parallel, microbatch = layout(draw)
            schedule = draw.choice(["lists.csv", parallel.schedule, parallel.schedule])
            given = replace(parallel, schedule=schedule, vertical=draw.random() < 0.5, stages=draw.choice([None, (4, 8), (6, 6, 1)]))
            several = [tuple(rule(run, noting(given, read), each)) for each in (microbatch, 5)]
            assert rule in OF_STEP or several[0] == several[1]
    assert read <= (set(STEP_KEYS) if rule in OF_STEP else KEYS - {"recompute"})


@pytest.mark.parametrize("engine", ["auto", *ENGINES, "papers"])
def test_the_base_of_a_layout_reads_all_but_its_recomputation(engine: str) -> None:
    run, read, draw, built = run_of("moe", engine=engine), set[str](), Random(1), 0
    for _ in range(300):
        parallel, microbatch = layout(draw)
        if not broken_rules(run, parallel, microbatch, OF_LAYOUT):
            watched = noting(parallel, read)
            LayoutBase(engine_for(run, watched)[0], CostContext(run), watched).layout(watched, microbatch)
            built += 1
    assert built > 50
    assert "recompute" not in read


@pytest.mark.parametrize("key", sorted(KEYS - {"offload", "overlap", "sync", "compress"}))
def test_layouts_that_differ_in_a_key_of_parallel_have_other_bases_but_for_recomputation(key: str) -> None:
    is_same = base_key(Parallel()) == base_key(replace(Parallel(), **{key: "another"}))  # type: ignore[arg-type]
    assert is_same == (key == "recompute")


@pytest.mark.parametrize(
    ("section", "key"), [(each, field.name) for each in ("offload", "overlap") for field in fields(getattr(Parallel(), each))]
)
def test_layouts_that_differ_in_a_section_of_parallel_have_other_bases(section: str, key: str) -> None:
    value = getattr(Parallel(), section)
    changed = replace(value, **{key: not getattr(value, key)})
    assert base_key(Parallel()) != base_key(replace(Parallel(), **{section: changed}))


def test_layouts_whose_gradients_are_compressed_otherwise_have_other_bases() -> None:
    found = {base_key(Parallel(compress=each)) for each in (Compress(), Compress(name="powersgd"), Compress(rank=2), Compress(start=9))}
    assert len(found) == 4


@pytest.mark.parametrize(
    "sync",
    [
        *(Sync(every=2), Sync(across="node")),
        *(Sync(outer=outer) for outer in (OuterOptimizer(lr=0.7), OuterOptimizer(momentum=0.9), OuterOptimizer(nesterov=True))),
    ],
)
def test_layouts_whose_workers_differ_have_other_bases(sync: Sync) -> None:
    assert base_key(Parallel()) != base_key(Parallel(sync=sync))


# fmt: off
CHANGES: list[tuple[str, Any]] = [
    ("dp", 2), ("tp", 1), ("tp", 2), ("tp", 8), ("pp", 1), ("pp", 2), ("pp", 4), ("cp", 2), ("ep", 2), ("chunks", 2), ("vertical", True),
    *[("zero", stage) for stage in range(4)], ("shard", 2), ("gather", "micro"), ("gather", "step"), ("bucket", 10**6),
    ("reduce", "halving"), *[("schedule", name) for name in SCHEDULES], ("sequence", True), ("sequence", False),
    ("recompute", "none"), ("recompute", "selective"), ("recompute", "full"), ("offload", Offload(optimizer=True)),
    ("offload", Offload(optimizer=True, parameters=True)), *[("overlap", Overlap(**{key: False})) for key in ("data", "context")],
    *[("overlap", Overlap(**{key: True})) for key in ("tensor", "pipeline")], ("stages", (2, 4)), ("stages", (4, 2)),
    ("scatter", True), ("scatter", False),
]
# fmt: on


def costs(context: CostContext, parallel: Parallel, microbatch: int) -> tuple[LayoutCost, list[StageCost]]:
    """Return the cost of a layout, and of each of its kinds of stage if it is asked for alone."""
    laid_out = layout_of_run(context, parallel, microbatch)
    found = layout_cost(context, laid_out)
    return found, [stage_costs(context, laid_out, found.blocks, (kind,))[0] for kind in laid_out.partition.kinds]


@pytest.mark.parametrize(("name", "engine"), [("gpt", "auto"), ("moe", "native"), ("gpt", "papers")])
def test_an_estimate_does_not_depend_on_the_layouts_before_it(name: str, engine: str) -> None:
    """Layouts that differ in one key from another: what is kept for one and used for another is decided by no key that differs."""
    run, draw, compared = run_of(name, engine=engine), Random(name), 0
    estimator = Estimator(run)
    for _ in range(20):
        parallel, microbatch = layout(draw)
        parallel = replace(parallel, gather=draw.choice(["auto", "micro"]))
        changed = [replace(parallel, **{key: value}) for key, value in CHANGES if getattr(parallel, key) != value]
        for each, micro in [(parallel, microbatch), (parallel, 2 * microbatch), *[(every, microbatch) for every in changed]]:
            estimate = estimator(each, micro)
            if estimate.legal:
                alone = Estimator(run)
                assert estimate == alone(each, micro), each
                assert costs(estimator.context, each, micro) == costs(alone.context, each, micro), each
                compared += 1
    assert compared > 150


def test_an_estimator_refuses_a_run_that_no_layout_fixes() -> None:
    run = run_of("gpt")
    with pytest.raises(ValueError, match=r"neither train\.steps nor train\.tokens is set"):
        Estimator(replace(run, train=replace(run.train, steps=None)))


def test_an_estimate_without_a_peak_has_bytes_and_no_seconds() -> None:
    run = run_of("gpt")
    bare = replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, peak={})))
    known, unknown = (Estimator(each)(run.parallel, 1) for each in (run, bare))
    assert known.step is not None
    assert unknown == known._replace(step=None)
