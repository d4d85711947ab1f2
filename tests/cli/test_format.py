"""Numbers as text, text layout, and pages of plans that no recipe has."""

from dataclasses import replace

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.plan_facts import verdict
from distrain.cli.pages.plan_page import plan_text
from distrain.cli.pages.plan_sweep_page import sweep_text
from distrain.cli.pages.text_layout import DEFAULT_WIDTH, Style, table, wrap
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Memory, MemoryBytes, Plan, StageMemory
from distrain.trainer.spec.numbers.as_text import count_text, digits, in_unit, part_of_size, rate_text, seconds_text, share_text, size_text
from distrain.trainer.spec.problem import Problem, one_line

PLAIN = Style(colour=False, blocks=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan that the tests change."""
    return make_plan(load_recipe("gpt3_175b"))


def stages(*totals: tuple[int, int]) -> Memory:
    """The memory of stages given as (GiB, layers)."""
    first, held = 0, []
    for index, (gib, layers) in enumerate(totals):
        kinds = MemoryBytes(
            weights=gib * 2**30, gradients=0, optimizer=0, activations=0, logits=0, buffers=0, temporary=0, overhead=0, total=gib * 2**30
        )  # fmt: skip
        part = (first, first + layers)
        held.append(StageMemory(index=index, layers=part, parts=(part,), parameters=layers, in_flight=1.0, bytes=kinds))
        first += layers
    peak = max(gib for gib, _ in totals) * 2**30
    at = [gib * 2**30 for gib, _ in totals].index(peak)
    return Memory(peak=peak, capacity=80 * 2**30, stage=at, form="megatron", stages=tuple(held))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (digits(0), "0.00"), (digits(9.99), "9.99"), (digits(9.999), "10.0"), (digits(31.44), "31.4"), (digits(99.96), "100"),
        (digits(3142.3), "3,142"),
        (size_text(0), "0 B"), (size_text(1023), "1,023 B"), (size_text(2**20), "1.00 MiB"),
        (size_text(61.23 * 2**30), "61.2 GiB"), (size_text(2**70), "1,024 EiB"),
        (in_unit(2**30, "GiB"), "1.00"), (in_unit(1, "GiB"), "<0.01"), (in_unit(0, "GiB"), "0.00"),
        (part_of_size(2**35, 2**36), "32.0 of 64.0 GiB"), (part_of_size(2**21, 2**31), "2.00 MiB of 2.00 GiB"),
        (count_text(3072), "3,072"), (count_text(175e9), "175 B"), (count_text(1.008e12), "1.01 T"), (count_text(999.96e6), "1.00 B"),
        (rate_text(163e12, "FLOP/s"), "163 TFLOP/s"), (rate_text(0.502e18, "FLOP/s"), "502 PFLOP/s"),
        (seconds_text(0), "0 s"), (seconds_text(5e-6), "5.00 us"), (seconds_text(0.0123), "12.3 ms"), (seconds_text(0.99999), "1.00 s"),
        (seconds_text(65.2), "65.2 s"),
        (seconds_text(119), "119 s"), (seconds_text(7200), "2.00 h"), (seconds_text(84 * 86400), "84.0 days"),
        (seconds_text(148.5 * 365.25 * 86400), "148 years"),
        (share_text(0.4712), "47.1 %"),
        (one_line("a\nb\x1bé"), "a\\nb\\x1bé"),
    ],
)  # fmt: skip
def test_numbers_are_written_as_people_write_them(said: str, text: str) -> None:
    assert said == text


def test_table_columns_are_aligned() -> None:
    assert table([["a", "1"], ["bcd", "22"]]) == ["a     1", "bcd  22"]
    assert table([]) == []


def test_wrapping_keeps_every_word() -> None:
    words = " ".join(f"word{number}" for number in range(60))
    lines = wrap(words)
    assert max(map(len, lines)) <= DEFAULT_WIDTH
    assert " ".join(line.strip() for line in lines) == words


@pytest.mark.parametrize(("part_of", "bar"), [(0.0, "........"), (0.5, "####...."), (1.0, "########"), (3.0, "#######>")])
def test_a_bar_is_filled_to_its_share(part_of: float, bar: str) -> None:
    assert PLAIN.bar(part_of, 8) == bar


def test_similar_stages_share_a_line(plan: Plan) -> None:
    memory = stages((50, 2), *[(60 - at, 2) for at in range(30)], (20, 1))
    lines = plan_text(replace(plan, memory=memory), PLAIN).split("\n\n")[-5].splitlines()
    assert lines[0] == "Memory of a rank in GiB, capacity 80.0; activations as the papers count them; a"
    assert [line.split()[:3] for line in lines[3:]] == [["0-30", "0-61", "60.0"], ["31", "62", "20.0"]]


def test_of_many_different_stages_the_first_the_fullest_and_the_last_are_shown(plan: Plan) -> None:
    memory = stages(*[(70 if at == 20 else 30, 1 + at % 2) for at in range(64)])
    lines = plan_text(replace(plan, memory=memory), PLAIN).split("\n\n")[-5].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "...", "20", "...", "62", "63"]
    assert lines[4].strip() == "... 18 lines like these"


def test_the_verdict_says_whether_the_plan_fits_and_runs(plan: Plan) -> None:
    problem = Problem(rule="x", says="x is wrong", mend="mend x")
    full = replace(plan, fits=False, memory=stages((50, 1), (91, 1)), memory_low=81 << 30, memory_high=140 << 30)
    assert verdict(plan).startswith("gpt3_175b fits: ")
    assert verdict(full).startswith("gpt3_175b does not fit: needs 91.0 of 80.0 GiB (81 to 140) on stage 1; ")
    assert verdict(replace(plan, ok=False, problems=(problem,))).startswith("gpt3_175b can't run: 1 problem (")
    nothing = replace(plan, ok=False, fits=None, memory=None, problems=(problem, problem), time=None, throughput=None, run=None)
    assert verdict(nothing) == "gpt3_175b can't be laid out: 2 problems"
    assert verdict(replace(plan, time=None, throughput=None)).endswith("; step time not known")


def test_a_plan_without_any_figures_has_a_page(plan: Plan) -> None:
    least = replace(
        plan, ok=False, fits=None, mesh=None, groups={}, engine=None, microbatches=None, model=None, memory=None, traffic=(), time=None,
        bubble_fraction=None, throughput=None, run=None,
    )  # fmt: skip
    assert plan_text(least, PLAIN).splitlines()[0] == "gpt3_175b can't be laid out: 0 problems"
    assert sweep_text([((), least)], PLAIN).splitlines()[1].split() == ["gpt3_175b", "can't", "-", "-", "-", "-"]


def test_colour_changes_no_text(plan: Plan) -> None:
    painted = plan_text(plan, Style(colour=True, blocks=False))
    for code in ("\x1b[1m", "\x1b[1;31m", "\x1b[1;32m", "\x1b[33m", "\x1b[0m"):
        painted = painted.replace(code, "")
    assert painted == plan_text(plan, PLAIN)
