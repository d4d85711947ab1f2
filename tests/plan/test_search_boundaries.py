"""The best stage boundaries of a layout equal brute force over all partitions, each costed as a plan costs it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import inf
from random import Random
from typing import Any

import pytest

from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.layout.layout import Layout
from distrain.trainer.plan.layout.schedules import SCHEDULES
from distrain.trainer.plan.layout_cost import layout_cost
from distrain.trainer.plan.layout_of_run import layout_on
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules.rules import broken_rules
from distrain.trainer.plan.search import stage_boundaries as boundaries
from distrain.trainer.plan.search.path_bounds import PathBound, PathBounds, StageLimits, combined_path, least_layers, stage_limits
from distrain.trainer.plan.search.stage_boundaries import BestStages, best_stages, with_stages
from distrain.trainer.plan.search.step_paths import Path, StepPaths
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

LLAMA: dict[str, Any] = {"family": "llama", "norm": "rmsnorm", "act": "swiglu", "positions": "rope", "heads": 8}
EXPERTS: dict[str, Any] = {"family": "moe", "experts": 2, "top_k": 1, "dense_layers": 2}  # of every third case
CASES = 6


def random_run(schedule: str, case: int) -> Run:
    """A small model on a few devices, under a schedule; a heavy head in half of the cases."""
    random = Random(f"{schedule} {case}")
    pp = random.choice([2, 3, 4])
    parts = SCHEDULES[schedule].parts(2 if SCHEDULES[schedule].chunked else 1)
    layers = random.randint(pp * parts, pp * parts + 5)
    words = LLAMA | (EXPERTS if case % 3 == 2 else {})
    model = Model(
        **words,
        layers=layers + words.get("dense_layers", 0),
        hidden=512,
        ffn=1536,
        vocab=random.choice([1024, 60000]),
        tied=random.random() < 0.5,
    )
    parallel = Parallel(
        dp=2, pp=pp, zero=random.choice([0, 1]), schedule=schedule, chunks=2 if SCHEDULES[schedule].chunked else 1,
        recompute=random.choice(["none", "full"]),
    )  # fmt: skip
    device = Device(name="A100", memory=40e9, bandwidth=2e12, peak={"bf16": 312e12}, units=108)
    link = Link(bandwidth=25e9, latency=1e-5)
    cluster = Cluster(nodes=pp, gpus=2, device=device, inside=Link(bandwidth=300e9, latency=5e-6), between=link)
    batch = 2 * pp * random.choice([2, 3, 5])
    return Run(name="small", model=model, cluster=cluster, parallel=parallel, train=Train(batch=batch, seq=512, steps=1), engine="native")


def partitions(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to give each part some of the layers."""
    for ends in combinations(range(1, layers), parts - 1):
        yield tuple(end - begin for begin, end in zip((0, *ends), (*ends, layers), strict=True))


def layout_of(run: Run) -> tuple[CostContext, Layout]:
    context = CostContext(run)
    return context, layout_on(ENGINES[run.engine], context, run.parallel, run.train.microbatch)


@cache
def every_partition(schedule: str, case: int) -> list[tuple[float, int]]:
    """(seconds of a step, bytes of the fullest rank) of each partition of a random run, as plans cost it."""
    run = random_run(schedule, case)
    context, layout = layout_of(run)
    rows = []
    for stages in partitions(run.model.repeated_layers, len(layout.partition.parts)):
        cost = layout_cost(context, with_stages(layout, stages))
        assert cost.seconds
        rows.append((cost.seconds.step, cost.peak))
    return rows


def search_stages(schedule: str, case: int, capacity: int) -> BestStages:
    run = random_run(schedule, case)
    context, layout = layout_of(run)
    return best_stages(context, layout, layout_cost(context, layout).blocks, capacity)


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_best_boundaries_are_those_of_brute_force(schedule: str, case: int) -> None:
    rows = every_partition(schedule, case)
    found = search_stages(schedule, case, 10**12)
    assert found.seconds == pytest.approx(min(seconds for seconds, _ in rows), rel=1e-9)
    assert found.least == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_boundaries_leave_out_stages_that_do_not_fit(schedule: str, case: int) -> None:
    rows = every_partition(schedule, case)
    _, fastest = min(rows)
    capacity = (min(peak for _, peak in rows) + fastest) // 2
    fitting = [seconds for seconds, peak in rows if peak <= capacity]
    found = search_stages(schedule, case, capacity)
    assert found.stages
    assert found.seconds == pytest.approx(min(fitting), rel=1e-9)
    assert search_stages(schedule, case, min(peak for _, peak in rows) - 1).stages is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_of_the_found_boundaries_has_their_seconds(schedule: str) -> None:
    run, found = random_run(schedule, 0), search_stages(schedule, 0, 10**12)
    planned = replace(run, parallel=replace(run.parallel, stages=found.stages))
    assert not broken_rules(planned, planned.parallel, planned.train.microbatch)
    plan = make_plan(planned)
    assert plan.time
    assert plan.time.step == found.seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_none_is_found_where_none_is_faster_than_asked(schedule: str) -> None:
    run = random_run(schedule, 1)
    context, layout = layout_of(run)
    blocks, fastest = layout_cost(context, layout).blocks, min(every_partition(schedule, 1))[0]
    assert best_stages(context, layout, blocks, 10**12, below=fastest).stages is None
    assert best_stages(context, layout, blocks, 10**12, below=fastest * 1.001).seconds == pytest.approx(fastest, rel=1e-9)


@pytest.mark.parametrize("schedule", [name for name, row in SCHEDULES.items() if row.flushes])
def test_every_known_path_is_a_lower_bound_of_every_partition(schedule: str) -> None:
    run = random_run(schedule, 2)
    _, layout = layout_of(run)
    context = CostContext(run)
    paths = StepPaths(layout, layout_cost(context, layout).blocks)
    every = list(partitions(run.model.layers, len(layout.partition.parts)))
    seconds = [paths.step_seconds(stages) for stages in every]
    assert paths.found_paths()
    for stages, step in zip(every, seconds, strict=True):
        assert max(path.seconds(stages) for path in paths.found_paths()) == pytest.approx(step, rel=1e-12)


def test_a_search_that_was_cut_short_says_what_no_partition_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "MOST_VISITED", 0)
    for schedule in SCHEDULES:
        for case in range(CASES):
            found, fastest = search_stages(schedule, case, 10**12), min(every_partition(schedule, case))[0]
            assert found.least <= fastest * (1 + 1e-9) <= found.seconds * (1 + 2e-9)


def limits_and_partitions(random: Random) -> tuple[StageLimits, list[tuple[int, ...]]]:
    """Limits of a few stages, and every partition within them."""
    stages, chunks = random.choice([(2, 1), (3, 1), (2, 2), (3, 2), (2, 3)])
    layers = random.randint(stages * chunks, stages * chunks + 6)
    most = [random.randint(chunks, layers) for _ in range(stages)]
    inside = [
        each
        for each in partitions(layers, stages * chunks)
        if all(sum(each[at * chunks : (at + 1) * chunks]) <= most[at] for at in range(stages))
    ]
    return stage_limits(most, chunks, layers), inside


def random_path(random: Random, limits: StageLimits) -> Path:
    return Path(random.random(), tuple(random.random() for _ in range(len(limits.most) * limits.chunks)))


@pytest.mark.parametrize("case", range(20))
def test_bounds_of_paths_are_their_least_over_all_partitions(case: int) -> None:
    random = Random(case)
    limits, inside = limits_and_partitions(random)
    assert limits.admit_any() == bool(inside)
    paths = [random_path(random, limits) for _ in range(4)]
    for path in paths if inside else []:
        least = min(path.seconds(each) for each in inside)
        assert PathBound(path, limits).least() == pytest.approx(least, rel=1e-12)
        assert path.seconds(least_layers(path, limits)) == pytest.approx(least, rel=1e-12)
    if inside:
        mean = PathBound(combined_path(paths, limits), limits).least()
        longest = min(max(path.seconds(each) for path in paths) for each in inside)
        assert mean <= longest * (1 + 1e-12)
        assert mean >= max(PathBound(path, limits).least() for path in paths) * 0.9


@pytest.mark.parametrize("case", range(40))
def test_the_ways_to_go_on_from_a_beginning_are_bounded_by_their_best(case: int) -> None:
    """Some paths become known while the partition is being made, as in a search, more than the arrays have rows at first."""
    random = Random(case)
    limits, inside = next(each for each in iter(lambda: limits_and_partitions(random), None) if each[1])
    bounds, paths, partition = PathBounds(limits), list[Path](), random.choice(inside)
    for at, many in enumerate(partition):
        for _ in range(random.choice((1, 3, 20))):
            paths.append(random_path(random, limits))
            bounds.add(paths[-1])
        stage, chunk = divmod(at, limits.chunks)
        behind, held, left = limits.chunks - 1 - chunk, sum(partition[at - chunk : at]), limits.layers - sum(partition[:at])
        least = 1 if behind else max(1, limits.least[stage] - held)
        choices = range(least, min(limits.most[stage] - held - behind, left) + 1)
        for choice, longest in zip(choices, bounds.longest(choices, held, left), strict=True):
            beginning = (*partition[:at], choice)
            goes_on = [each for each in inside if each[: at + 1] == beginning]
            best = max(min((path.seconds(each) for each in goes_on), default=inf) for path in paths)
            assert longest == pytest.approx(best, rel=1e-12)
        bounds.push(many)
    assert bounds.made == list(partition)
