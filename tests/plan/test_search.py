"""Searches equal brute force over the estimator, which equals `make_plan`: the layouts, their number, the best and the front."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from operator import itemgetter
from typing import Any, get_args

import pytest

from distrain.trainer.plan.engines import ENGINES, engine_for
from distrain.trainer.plan.estimate import Estimator
from distrain.trainer.plan.layout.schedules import SCHEDULES
from distrain.trainer.plan.search.search import SLOWEST, LayoutSearch, SearchResult, search_layouts
from distrain.trainer.plan.search.space import OFFLOADS, RECOMPUTES, Space, Zero
from distrain.trainer.spec.derived.batch_levels import levels_of_run, run_at_batch
from distrain.trainer.spec.run import Cluster, CpComm, Device, Link, Model, NodeHost, Offload, OuterOptimizer, Parallel, Run, Sync, Train
from distrain.trainer.spec.sections.rampup import Rampup

GPT: dict[str, Any] = {"family": "gpt", "bias": True, "dropout": 0.1, "tied": True}
LLAMA: dict[str, Any] = {"family": "llama", "norm": "rmsnorm", "act": "swiglu", "positions": "rope"}
# (model, nodes, GPUs of a node, bytes of a GPU's memory, batch, sequence, compiled): some layouts fit and some don't
CASES = {
    "gpt": (Model(**GPT, layers=4, hidden=1024, heads=16, vocab=50257), 1, 4, 1.7e9, 4, 1024, False),
    "llama": (Model(**LLAMA, layers=6, hidden=2048, heads=16, kv_heads=2, ffn=5632, vocab=32000), 2, 2, 1.7e9, 4, 2048, True),
    "moe": (
        Model(**LLAMA | {"family": "moe"}, layers=4, dense_layers=1, hidden=512, heads=8, ffn=1024, vocab=8192, experts=4, top_k=2),
        1,
        4,
        0.3e9,
        6,
        512,
        False,
    ),
}

# Where some layouts overflow the host, and the best offload to it; those of the other cases are not stated: what they step has no time.
HOSTS = {"llama": NodeHost(memory=3.1e9, bandwidth=400e9, link=20e9)}
TOO_LARGE = 1 << 60  # bytes of a layout that overflows its device or its host
ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)
Figures = tuple[float, int]  # seconds of a step, bytes of the fullest rank
MeshKey = tuple[int, int, int, int]


def run_of(name: str) -> Run:
    model, nodes, gpus, memory, batch, seq, compiled = CASES[name]
    device = Device(name="A100", memory=memory, bandwidth=2e12, peak={"bf16": 312e12}, units=108)
    inside, between = Link(bandwidth=300e9, latency=5e-6), Link(bandwidth=25e9, latency=1e-5)
    cluster = Cluster(nodes=nodes, gpus=gpus, device=device, inside=inside, between=between, host=HOSTS.get(name, NodeHost()))
    train = Train(batch=batch, seq=seq, steps=1, compile=compiled)
    return Run(name=name, model=model, cluster=cluster, parallel=Parallel(), train=train)


def compiled_run(run: Run, compiled: bool) -> Run:
    return replace(run, train=replace(run.train, compile=compiled))


def every_layout(run: Run, *, compiled: bool | None = None) -> Iterator[Run]:
    """Yield the runs of plain loops over all values, legal or not; train.compile as given, or None: both."""
    world, layers = run.cluster.nodes * run.cluster.gpus, run.model.repeated_layers
    own = (run.train.compile, not run.train.compile) if compiled is None else (compiled,)  # ZeRO 3 does not read it
    whole = [each for each in range(1, world + 1) if world % each == 0]
    for tp, pp, cp, ep in product(whole, whole, whole, whole if run.model.experts else [1]):
        if world % (tp * pp * cp):
            continue
        dp = world // (tp * pp * cp)
        shards: list[Any] = ["all", *(each for each in range(1, dp * cp) if dp * cp % each == 0 and each * tp % run.cluster.gpus == 0)]
        pipelines = [
            (name, chunks)
            for name, row in SCHEDULES.items()
            if row.flushes
            for chunks in (range(1, layers // pp + 1) if row.chunked else [1])
        ]
        for micro in (each for each in range(1, 65) if run.train.batch % (dp * each) == 0):
            for zero, shard, sequence, recompute, offload, (schedule, chunks), engine in product(
                ZEROS, shards, [False, True][: 1 + (tp > 1)], RECOMPUTES, OFFLOADS, pipelines if pp > 1 else [("1f1b", 1)], ENGINES
            ):
                if (shard != "all" and not zero) or (pp <= layers and (layers // pp) % chunks):
                    continue
                for comm, fused in product(get_args(CpComm)[: 1 + (cp > 1)], own[: 1 + (zero < 3)]):
                    parallel = Parallel(
                        dp=dp, tp=tp, pp=pp, cp=cp, cp_comm=comm, ep=ep, zero=zero, shard=shard, sequence=sequence, recompute=recompute,
                        offload=offload, schedule=schedule, chunks=chunks,
                    )  # fmt: skip
                    yield replace(run, parallel=parallel, train=replace(run.train, microbatch=micro, compile=fused), engine=engine)


@cache
def brute_force(name: str) -> dict[MeshKey, list[Figures]]:
    """The figures of every layout that has no problem but memory and runs, by mesh."""
    found: dict[MeshKey, list[Figures]] = {}
    whole = run_of(name)
    estimators = {
        (engine, comm, compiled): Estimator(replace(compiled_run(whole, compiled), engine=engine, parallel=Parallel(cp_comm=comm)))
        for engine, comm, compiled in product(ENGINES, get_args(CpComm), (False, True))
    }
    for run in every_layout(whole):
        estimate = estimators[run.engine, run.parallel.cp_comm, run.train.compile](run.parallel, run.train.microbatch)
        if estimate.legal and not engine_for(run, run.parallel)[1]:
            assert estimate.peak
            key = (run.parallel.tp, run.parallel.pp, run.parallel.cp, run.parallel.ep)
            peak = estimate.peak if estimate.fits else max(estimate.peak, TOO_LARGE)
            found.setdefault(key, []).append((estimate.step or float("inf"), peak))
    return found


@cache
def search_result(name: str, rows: int, by_memory: bool) -> SearchResult:
    run = run_of(name)
    return search_layouts(replace(run, search=replace(run.search, headroom=0.0)), rows=rows, by_memory=by_memory)


def fitting(name: str) -> dict[MeshKey, list[Figures]]:
    capacity = CASES[name][3]
    rows = {mesh: [each for each in figures if each[1] <= capacity] for mesh, figures in brute_force(name).items()}
    return {mesh: figures for mesh, figures in rows.items() if figures}


@pytest.mark.parametrize("name", CASES)
def test_the_space_has_as_many_layouts_as_plain_loops_find(name: str) -> None:
    assert search_result(name, 10, False).legal == sum(map(len, brute_force(name).values()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_best_of_each_mesh_are_those_of_brute_force(name: str, rows: int) -> None:
    best = sorted(min(figures) for figures in fitting(name).values())
    expected = [each for each in best if each[0] <= SLOWEST * best[0][0]][:rows]
    assert [(each.seconds, each.peak) for each in search_result(name, rows, False).best] == expected


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_of_each_mesh_are_those_of_brute_force(name: str) -> None:
    expected = sorted((min((peak, seconds) for seconds, peak in figures)) for figures in fitting(name).values())[:5]
    assert [(each.peak, each.seconds) for each in search_result(name, 5, True).best] == expected


@pytest.mark.parametrize("name", CASES)
def test_the_front_is_that_of_brute_force(name: str) -> None:
    expected: list[Figures] = []
    for each in sorted(each for figures in fitting(name).values() for each in figures):
        if not expected or each[1] < expected[-1][1]:
            expected.append(each)
    expected = [each for each in expected if each[0] <= SLOWEST * expected[0][0]]
    assert [(each.seconds, each.peak) for each in search_result(name, 10, False).front] == expected


@pytest.mark.parametrize("name", CASES)
def test_some_layouts_are_too_large_and_most_are_discarded(name: str) -> None:
    layouts, fit = sum(map(len, brute_force(name).values())), sum(map(len, fitting(name).values()))
    assert 0.05 * layouts < fit < 0.95 * layouts
    assert search_result(name, 10, False).costed < layouts


@pytest.mark.parametrize(
    "fixed",
    [
        {"parallel.tp": 2}, {"parallel.pp": 2, "parallel.schedule": "zb_h1"}, {"parallel.zero": 1, "train.microbatch": 2},
        {"parallel.dp": 2}, {"engine": "native"}, {"parallel.sequence": True, "parallel.tp": 2},
        {"parallel.offload.optimizer": True}, {"parallel.shard": 2, "parallel.zero": 3}, {"train.compile": False}, {"train.compile": True},
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_the_user_fixed_stay(fixed: dict[str, Any]) -> None:
    run = run_of("gpt")
    for key, value in fixed.items():
        section, _, name = key.rpartition(".")
        if section == "parallel.offload":
            run = replace(run, parallel=replace(run.parallel, offload=Offload(**{name: value})))
        elif section:
            run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
        else:
            run = replace(run, engine=value)
    found = search_layouts(run, frozenset(fixed), rows=10)
    assert found.best
    for each in (*found.best, *found.front):
        parallel, microbatch, engine, compiled = each.candidate
        values = {
            "train.microbatch": microbatch,
            "train.compile": compiled,
            "engine": engine,
            "parallel.offload.optimizer": parallel.offload.optimizer,
        }
        for key, value in fixed.items():
            assert values.get(key, getattr(parallel, key.rpartition(".")[2], None)) == value


def best_of_each_mesh(runs: Iterable[Run], capacity: float) -> list[Figures]:
    """Return the fastest of each mesh, the fastest first, of layouts that an engine runs and that fit; those that a search keeps.

    One estimator serves those of an engine that share sequences alike, as in a search; the best are estimated once more, each alone.
    """
    estimators: dict[tuple[str, str], Estimator] = {}
    found: dict[MeshKey, list[tuple[Figures, Run]]] = {}
    for run in runs:
        parallel = run.parallel
        if engine_for(run, parallel)[1]:
            continue
        kind = (run.engine, parallel.cp_comm)
        if kind not in estimators:
            estimators[kind] = Estimator(run)
        estimate = estimators[kind](parallel, run.train.microbatch)
        if estimate.legal and estimate.peak is not None and estimate.peak <= capacity:
            key = (parallel.tp, parallel.pp, parallel.cp, parallel.ep)
            found.setdefault(key, []).append(((estimate.step or float("inf"), estimate.peak), run))
    best = sorted((min(layouts, key=itemgetter(0)) for layouts in found.values()), key=itemgetter(0))
    for (seconds, peak), run in best:
        alone = Estimator(run)(run.parallel, run.train.microbatch)
        assert (alone.step or float("inf"), alone.peak) == (seconds, peak)
    return [figures for figures, _ in best if figures[0] <= SLOWEST * best[0][0][0]]


def test_layers_as_the_user_gives_them_are_searched_as_brute_force_does() -> None:
    run = run_of("gpt")
    run = replace(run, parallel=replace(run.parallel, pp=2, stages=(1, 3)))
    found = LayoutSearch(Space(run, frozenset({"parallel.pp", "parallel.stages"})), rows=100).run_all()
    given = (
        replace(each, parallel=replace(each.parallel, stages=(1, 3))) for each in every_layout(run, compiled=False) if each.parallel.pp == 2
    )
    assert [(each.seconds, each.peak) for each in found.best] == best_of_each_mesh(given, CASES["gpt"][3])


ON_THE_DATA_AXIS: list[dict[str, Any]] = [
    *({"sync": Sync(every=4, across=across, outer=OuterOptimizer(momentum=0.9))} for across in ("all", "node")),
    {"staleness": 1},
    {"reduce": "hierarchical"},
    {"reduce": "server", "servers": 2, "staleness": 2},
    {"reduce": "auto"},
]


@pytest.mark.parametrize("keys", ON_THE_DATA_AXIS, ids=lambda keys: ".".join(keys))
def test_layouts_that_sum_gradients_otherwise_are_searched_as_brute_force_does(keys: dict[str, Any]) -> None:
    run = run_of("gpt")
    run = replace(run, parallel=replace(run.parallel, **keys), train=replace(run.train, steps=9))
    found = LayoutSearch(Space(run, frozenset(f"parallel.{key}" for key in keys)), rows=100).run_all()
    given = (replace(each, parallel=replace(each.parallel, **keys)) for each in every_layout(run, compiled=False))
    assert [(each.seconds, each.peak) for each in found.best] == best_of_each_mesh(given, CASES["gpt"][3])


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_where_the_batch_grows_the_whole_run_ranks_as_brute_force_does(name: str) -> None:
    """60 steps, of 2 sequences, of 6 and of 12; seconds are those of the run over as many steps of 12 as have its samples."""
    ramp = Rampup(batch=(2, 6), until=(20 * 2 * 512, 20 * 2 * 512 + 20 * 6 * 512))
    run = run_of(name)
    run = replace(run, train=replace(run.train, batch=12, seq=512, steps=60, rampup=ramp))
    assert [(each.batch, each.steps) for each in levels_of_run(run.train)] == [(2, 20), (6, 20), (12, 20)]
    found = search_layouts(replace(run, search=replace(run.search, headroom=0.0)), rows=100)
    whole = (20 * 2 + 20 * 6 + 20 * 12) / 12
    expected: dict[MeshKey, list[Figures]] = {}
    of_step: dict[MeshKey, float] = {}
    estimators = {
        (batch, engine, comm, compiled): Estimator(replace(at_batch, parallel=Parallel(cp_comm=comm), engine=engine))
        for batch, engine, comm, compiled in product((0, 2, 6, 12), ENGINES, get_args(CpComm), (False, True))
        for at_batch in [compiled_run(run_at_batch(run, batch) if batch else run, compiled)]
    }
    for of_smallest in every_layout(run_at_batch(run, 2)):  # which divide the others too
        each = replace(of_smallest, train=replace(run.train, microbatch=of_smallest.train.microbatch, compile=of_smallest.train.compile))
        if engine_for(each, each.parallel)[1]:
            continue
        kind, layout = (each.engine, each.parallel.cp_comm, each.train.compile), (each.parallel, each.train.microbatch)
        estimate = estimators[0, *kind](*layout)
        if estimate.legal and estimate.peak is not None and estimate.fits:
            steps = [estimators[batch, *kind](*layout).step for batch in (2, 6, 12)]
            key = (each.parallel.tp, each.parallel.pp, each.parallel.cp, each.parallel.ep)
            expected.setdefault(key, []).append((20 * sum(step or float("inf") for step in steps) / whole, estimate.peak))
            of_step[key] = min(of_step.get(key, float("inf")), estimate.step or float("inf"))
    best = sorted((min(figures), key) for key, figures in expected.items())
    best = [each for each in best if each[0][0] <= SLOWEST * best[0][0][0]]
    assert [each.peak for each in found.best] == [peak for (_, peak), _ in best]
    assert [each.seconds for each in found.best] == pytest.approx([seconds for (seconds, _), _ in best], rel=1e-12)
    assert best[0][0][0] > 1.02 * of_step[best[0][1]], "steps of fewer micro-batches take longer for each sample"


def run_with_documents() -> Run:
    run = run_of("llama")
    return replace(run, data=replace(run.data, documents=True), train=replace(run.train, batch=2))


@cache
def brute_force_with_documents() -> list[tuple[Parallel, Figures | None]]:
    """Every layout that has no problem but memory and runs, with its figures where it fits."""
    estimators: dict[tuple[object, ...], Estimator] = {}
    found = list[tuple[Parallel, Figures | None]]()
    for each in every_layout(run_with_documents()):
        parallel = each.parallel
        if engine_for(each, parallel)[1]:
            continue
        key = (each.engine, parallel.cp_comm, parallel.cp > 1, parallel.zero == 3, each.train.compile)
        if key not in estimators:
            estimators[key] = Estimator(each)
        estimate = estimators[key](parallel, each.train.microbatch)
        if estimate.legal and estimate.peak is not None:
            found.append((parallel, (estimate.step or float("inf"), estimate.peak) if estimate.fits else None))
    return found


@pytest.mark.parametrize("given", [1, 2])
@pytest.mark.parametrize("fixed", [frozenset[str](), frozenset({"parallel.cp_comm"})], ids=["either way", "keys gathered"])
def test_each_layout_keeps_documents_apart_as_it_trains_them(given: int, fixed: frozenset[str]) -> None:
    """Whatever the recipe's own degrees are."""
    run = run_with_documents()
    whole = replace(run, search=replace(run.search, headroom=0.0), parallel=Parallel(cp=given, dp=4 // given))
    found = search_layouts(whole, fixed, rows=100)
    layouts = [each for each in brute_force_with_documents() if not fixed or each[0].cp_comm == "all_gather"]
    expected: dict[MeshKey, list[Figures]] = {}
    for parallel, figures in layouts:
        if figures is not None:
            expected.setdefault((parallel.tp, parallel.pp, parallel.cp, parallel.ep), []).append(figures)
    best = sorted(min(figures) for figures in expected.values())
    assert found.legal == len(layouts)
    assert [(each.seconds, each.peak) for each in found.best] == [each for each in best if each[0] <= SLOWEST * best[0][0]]
    assert len(found.contexts) == (2 if fixed else 4), "compiled or not, by each way to share a sequence"


def test_where_no_rate_is_known_the_smallest_layouts_are_found() -> None:
    run = run_of("gpt")
    bare = replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, peak={})))
    found = search_layouts(replace(bare, search=replace(bare.search, headroom=0.0)), rows=3)
    assert {each.seconds for each in found.best} == {float("inf")}
    assert [each.peak for each in found.best] == [peak for peak, _ in sorted(min((p, s) for s, p in f) for f in fitting("gpt").values())][
        :3
    ]


def test_without_an_engine_layouts_are_planned_as_the_papers_do() -> None:
    run = run_of("gpt")
    runnable, every = (LayoutSearch(Space(run, runnable=runnable), rows=10).run_all() for runnable in (True, False))
    assert every.legal > runnable.legal
    assert every.best[0].seconds <= runnable.best[0].seconds
