"""Huge layer counts, degrees and batches are planned as quickly as small ones, with the same figures, or refused in one line."""

import random
import resource
import sys
from collections.abc import Iterator
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from distrain.cli.app import command
from distrain.cli.config.load import Loader, load_recipe
from distrain.cli.keys.keys import config_keys
from distrain.cli.pages.plan_page import plan_text
from distrain.cli.pages.text_layout import Style
from distrain.tests.fakes.time_limits import limit_processor_time
from distrain.trainer.plan.axes.weight_slices import HeadShards, dim_shard, idle_ranks
from distrain.trainer.plan.deepspeed.defaults import ALIGNED
from distrain.trainer.plan.deepspeed.flat_tensors import FlatParameter, StageParameters, flat_elements, stepped_elements
from distrain.trainer.plan.layout import layout
from distrain.trainer.plan.layout.layout import balanced_layers
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules.pipeline_rules import MOST_STAGES
from distrain.trainer.spec.numbers.bounded import MOST, MOST_LAYERS
from distrain.trainer.spec.numbers.divisors import divisors, least_divisor
from distrain.trainer.spec.problem import Unreadable

COUNTS = sorted(
    key for key, hint in config_keys().items() if "int" in str(hint) and key not in ("launch.port", "log.profile", "log.timeline")
)
HUGE = (10**12 + 39, 10**18)  # a prime, and the largest that is read
LOADER = Loader(None)
MOST_SECONDS = 60  # of processor time: what grows with such counts takes hours, and the rest a second


@pytest.fixture(autouse=True)
def stop_counting() -> Iterator[None]:
    """Stop code that counts layers or ranks one by one."""
    with limit_processor_time(MOST_SECONDS):
        yield


def page_or_problems(recipe: str, words: list[str]) -> str:
    """Return the page of a plan, or the problems of its overrides."""
    try:
        plan = make_plan(LOADER.load(recipe, words))
    except Unreadable as error:
        return str(error)
    return plan_text(plan, Style())


@pytest.mark.parametrize("key", COUNTS)
def test_a_huge_count_is_planned_or_refused_quickly(key: str) -> None:
    recipe = "mixtral_8x7b" if "expert" in key or key in ("model.top_k", "parallel.ep", "parallel.cp") else "llama3_8b"
    for value in HUGE:
        assert page_or_problems(recipe, [f"{key}={value}", "parallel.dp=auto"])


@pytest.mark.parametrize("seed", range(20))
def test_several_huge_counts_are_planned_or_refused_quickly(seed: int) -> None:
    drawn = random.Random(seed)
    several = drawn.sample(COUNTS, drawn.choice([2, 3, 5, 10]))
    words = [f"{key}={drawn.choice([1, 2, 7, 64, 10**4, 2**20, 10**5, 2**40, 10**6, *HUGE])}" for key in several]
    ways = [f"parallel.zero={drawn.randint(0, 3)}", f"parallel.sequence={drawn.choice(['true', 'false'])}", "parallel.dp=auto"]
    ways += [f"parallel.schedule={drawn.choice(['1f1b', 'gpipe', 'interleaved', 'dualpipev', 'pipedream'])}"]
    assert page_or_problems(drawn.choice(["quickstart", "llama3_70b", "mixtral_8x7b", "megatron_1t"]), words + ways)


def test_ten_huge_counts_at_once_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{key}={value}" for key, value in zip(random.Random(0).sample(COUNTS, 10), [10**18] * 10, strict=True)]
    assert command(["plan", "conf=llama3_8b", *words]) in (0, 1, 2)
    assert all(line.startswith("distrain: ") for line in capsys.readouterr().err.splitlines())


def test_as_many_layers_as_can_be_set_take_no_more_memory_than_a_few() -> None:
    page_or_problems("llama3_8b", ["model.layers=32"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page_or_problems(
        "llama3_8b", [f"model.layers={MOST_LAYERS}", "cluster.nodes=1000000000", "train.batch=1000000000000", "parallel.zero=1"]
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 50 << 20


def test_as_many_stages_as_a_plan_lists_are_listed() -> None:
    words = [f"model.layers={MOST_STAGES + 1}", f"parallel.pp={MOST_STAGES}", f"cluster.nodes={MOST_STAGES // 8}", "train.batch=512"]
    plan = make_plan(load_recipe("megatron_1t", [*words, "parallel.tp=1", "parallel.sequence=false"]))
    assert plan.memory is not None
    assert [stage.layers for stage in plan.memory.stages][-1][1] == MOST_STAGES + 1
    assert len(plan.memory.stages) == MOST_STAGES


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("model.layers=1e19", "model.layers=1e+19 is too large: at most 1e5"),
        ("model.layers=100001", "model.layers=100001 is too large: at most 1e5"),
        ("train.seed=99999999999999999999", "train.seed=99999999999999999999 is too large: at most 9e18"),
        ("optim.lr=1e-31", "optim.lr=1e-31 is too small: at least 1e-30"),
        ("optim.lr=1e31", "optim.lr=1e+31 is too large: at most 1e30"),
        ("optim.lr=1e400", "optim.lr=inf is not a number, above 0"),
        ("train.tokens=nan", "train.tokens=nan is not a number, above 0"),
        ("cluster.nodes=-0", "cluster.nodes=0 is not a whole number, at least 1"),
        ("model.layers=0x10", "model.layers=0x10 is not a whole number, at least 1"),
        ("model.layers='3'", "model.layers='3' is text, not a whole number, at least 1: leave the quotes out"),
        ("model.layers=true", "model.layers=true is not a whole number, at least 1"),
        ("optim.lr=true", "optim.lr=true is not a number, above 0"),
        ("cluster=99999999999999999999x8", "cluster=99999999999999999999x8 has a number of more than 18 digits"),
    ],
)
def test_an_absurd_number_is_refused_in_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=llama3_8b", words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"distrain: {line}")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("words", ["model.layers=1_0", "model.layers=1e1", "optim.lr=.5", "train.seed=0", f"train.seed={2**63 - 1}"])
def test_numbers_keep_the_value_that_was_written(words: str) -> None:
    assert make_plan(load_recipe("llama3_8b", [words])).ok


# Formulas that replace counting give the same numbers.


@given(some.integers(1, 20_000))
def test_divisors_are_all_that_divide(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


@given(some.integers(10**9, 10**18))
@settings(max_examples=30)
def test_divisors_of_a_large_number_divide_it_and_come_in_pairs(number: int) -> None:
    found = divisors(number)
    assert {number // each for each in found} == set(found)
    assert all(number % each == 0 for each in found)


@pytest.mark.parametrize("one", [999_999_937, 1_000_003, 2003])
def test_the_divisors_of_a_product_of_two_large_primes_are_found(one: int) -> None:
    assert divisors(one * 999_999_929) == sorted({1, one, 999_999_929, one * 999_999_929})
    assert divisors(one * one) == [1, one, one * one]


@given(some.integers(1, 3000).flatmap(lambda number: some.tuples(some.just(number), some.integers(1, number))))
def test_the_least_divisor_is_the_first_that_divides(pair: tuple[int, int]) -> None:
    number, least = pair
    assert least_divisor(number, least) == next(each for each in range(least, number + 1) if number % each == 0)


@given(some.integers(2, 9), some.integers(0, 150), some.floats(0, 60), some.floats(0, 60))
def test_layers_assigned_in_bulk_equal_those_assigned_one_by_one(stages: int, more: int, first: float, last: float) -> None:
    one_by_one = balanced_layers(stages + more, stages, 1.0, first, last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "ONE_BY_ONE", 0)
        assert balanced_layers(stages + more, stages, 1.0, first, last) == one_by_one


lie = some.builds(
    FlatParameter,
    some.sampled_from([0, 1, 2, 7]) | some.integers(1, 500),
    some.booleans(),
    some.sampled_from(["", "replicated", "shared"]),
    expert=some.just(False),
)
rows = some.lists(lie, max_size=4).map(tuple)


@given(some.builds(StageParameters, rows, rows, some.integers(1, 6), rows), some.sampled_from([1, 2, 3, 5, 16, 60]))
def test_flat_tensors_equal_those_laid_out_parameter_by_parameter(held: StageParameters, ranks: int) -> None:
    every = held.before + held.layer * held.layers + held.after
    part = whole = 0
    touched, mine = [0] * ranks, [0] * ranks
    for decays in (True, False):
        group = [each for each in every if each.decays == decays]
        each = -(-sum(one.elements for one in group) // (ALIGNED * ranks)) * ALIGNED
        part, whole, start = part + each, whole + each * ranks, 0
        for one in group:
            for rank in range(ranks):
                shared = min(start + one.elements, (rank + 1) * each) - max(start, rank * each)
                touched[rank] += one.elements if shared > 0 else 0
                mine[rank] += shared if shared > 0 and one.copies == "replicated" else 0
            start += one.elements
    flat = flat_elements(held, ranks)
    assert (flat.part, flat.whole, flat.count_overlapping()) == (part, whole, max(touched))
    assert flat.stage3 == sum(-(-one.elements // ranks) for one in every)
    if ranks > 1:
        assert [stepped_elements(held, "replicated", 1, ranks, rank) for rank in range(ranks)] == mine
        assert stepped_elements(held, "replicated", 1, ranks, None) == max(mine)


@given(some.integers(1, 40), some.integers(1, 8), some.integers(1, 40))
def test_idle_ranks_are_those_with_an_empty_shard(kv_heads: int, group: int, degree: int) -> None:
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "ffn": kv_heads * 3, "vocab": kv_heads * 7}
    for dim in ("heads", "ffn", "vocab"):
        empty = [rank for rank in range(degree) if not dim_shard(dim, sizes, degree, rank, vocab_multiple=4).length]
        assert idle_ranks(dim, sizes, degree, vocab_multiple=4) == len(empty)
    heads = HeadShards(sizes["heads"], kv_heads, degree)
    assert heads.lanes * heads.copies == degree


def test_a_billion_nodes_whose_hosts_hold_unlike_stages_are_planned() -> None:
    words = ["parallel.offload.optimizer=true", "parallel.pp=3", "parallel.tp=1", "cluster.nodes=3000000000"]
    plan = make_plan(load_recipe("llama3_8b", [*words, "train.batch=72000000000", "optim.warmup=0"]))
    assert plan.memory is not None
    assert plan.memory.host is not None
    assert plan.memory.host.node > 0


def test_products_of_the_largest_counts_are_still_numbers() -> None:
    assert float(prod([MOST] * 12)) < float("inf")
