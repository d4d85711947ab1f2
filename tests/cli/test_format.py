"""Numbers as text, and pages of plans that no recipe has."""

from dataclasses import replace

import pytest

from distrain.cli.config.load import load
from distrain.cli.pages.format import USUAL, Look, count, digits, in_unit, one_line, part, rate, seconds, share, size, table, wrapped
from distrain.cli.pages.plan_page import page, rows, verdict
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.result import Bytes, Memory, Plan, StageMemory
from distrain.trainer.spec.problem import Problem

PLAIN = Look(colour=False, blocks=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan to vary."""
    return make_plan(load("gpt3_175b"))


def stages(*totals: tuple[int, int]) -> Memory:
    """Memory of stages that hold (GiB, layers) each."""
    first, held = 0, []
    for index, (gib, layers) in enumerate(totals):
        kinds = Bytes(
            weights=gib * 2**30, gradients=0, optimizer=0, activations=0, logits=0, buffers=0, overhead=0, total=gib * 2**30
        )  # fmt: skip
        held.append(StageMemory(index=index, layers=(first, first + layers), parameters=layers, in_flight=1.0, bytes=kinds))
        first += layers
    peak = max(gib for gib, _ in totals) * 2**30
    at = [gib * 2**30 for gib, _ in totals].index(peak)
    return Memory(peak=peak, capacity=80 * 2**30, stage=at, form="megatron", stages=tuple(held))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (digits(0), "0.00"), (digits(9.99), "9.99"), (digits(9.999), "10.0"), (digits(31.44), "31.4"), (digits(99.96), "100"),
        (digits(3142.3), "3,142"),
        (size(0), "0 B"), (size(1023), "1,023 B"), (size(2**20), "1.00 MiB"), (size(61.23 * 2**30), "61.2 GiB"), (size(2**70), "1,024 EiB"),
        (in_unit(2**30, "GiB"), "1.00"), (in_unit(1, "GiB"), "<0.01"), (in_unit(0, "GiB"), "0.00"),
        (part(2**35, 2**36), "32.0 of 64.0 GiB"), (part(2**21, 2**31), "2.00 MiB of 2.00 GiB"),
        (count(3072), "3,072"), (count(175e9), "175 B"), (count(1.008e12), "1.01 T"), (count(999.96e6), "1.00 B"),
        (rate(163e12, "FLOP/s"), "163 TFLOP/s"), (rate(0.502e18, "FLOP/s"), "502 PFLOP/s"),
        (seconds(0), "0 s"), (seconds(5e-6), "5.00 us"), (seconds(0.0123), "12.3 ms"), (seconds(0.99999), "1.00 s"),
        (seconds(65.2), "65.2 s"),
        (seconds(119), "119 s"), (seconds(7200), "2.00 h"), (seconds(84 * 86400), "84.0 days"),
        (seconds(148.5 * 365.25 * 86400), "148 years"),
        (share(0.4712), "47.1 %"),
        (one_line("a\nb\x1bé"), "a\\nb\\x1bé"),
    ],
)  # fmt: skip
def test_numbers_read_as_people_write_them(said: str, text: str) -> None:
    assert said == text


def test_columns_line_up() -> None:
    assert table([["a", "1"], ["bcd", "22"]]) == ["a     1", "bcd  22"]
    assert table([]) == []


def test_long_words_are_wrapped_and_kept() -> None:
    words = " ".join(f"word{number}" for number in range(60))
    lines = wrapped(words)
    assert max(map(len, lines)) <= USUAL
    assert " ".join(line.strip() for line in lines) == words


@pytest.mark.parametrize(("part_of", "bar"), [(0.0, "........"), (0.5, "####...."), (1.0, "########"), (3.0, "#######>")])
def test_a_bar_is_as_long_as_its_share(part_of: float, bar: str) -> None:
    assert PLAIN.bar(part_of, 8) == bar


def test_stages_that_are_alike_share_a_line(plan: Plan) -> None:
    memory = stages((50, 2), *[(60 - at, 2) for at in range(30)], (20, 1))
    lines = page(replace(plan, memory=memory), PLAIN).split("\n\n")[-4].splitlines()
    assert lines[0] == "Memory of a rank, in GiB of 80.0; a range shows its fullest stage"
    assert [line.split()[:3] for line in lines[2:]] == [["0-30", "0-61", "60.0"], ["31", "62", "20.0"]]


def test_many_unlike_stages_show_the_first_the_fullest_and_the_last(plan: Plan) -> None:
    memory = stages(*[(70 if at == 20 else 30, 1 + at % 2) for at in range(64)])
    lines = page(replace(plan, memory=memory), PLAIN).split("\n\n")[-4].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "...", "20", "...", "62", "63"]
    assert lines[4].strip() == "... 18 lines like these"


def test_each_verdict_is_said(plan: Plan) -> None:
    problem = Problem(rule="x", says="x is wrong", mend="mend x")
    full = replace(plan, fits=False, memory=stages((50, 1), (91, 1)))
    assert verdict(plan).startswith("gpt3_175b fits: ")
    assert verdict(full).startswith("gpt3_175b does not fit: needs 91.0 of 80.0 GiB on stage 1; ")
    assert verdict(replace(plan, ok=False, problems=(problem,))).startswith("gpt3_175b can't run: 1 problem (")
    nothing = replace(plan, ok=False, fits=None, memory=None, problems=(problem, problem), time=None, throughput=None, run=None)
    assert verdict(nothing) == "gpt3_175b can't be laid out: 2 problems"
    assert verdict(replace(plan, time=None, throughput=None)).endswith("; how long it takes is not known")


def test_the_smallest_plan_has_a_page(plan: Plan) -> None:
    least = replace(
        plan, ok=False, fits=None, mesh=None, groups={}, engine=None, microbatches=None, model=None, memory=None, traffic=(), time=None,
        bubble_fraction=None, throughput=None, run=None,
    )  # fmt: skip
    assert page(least, PLAIN).splitlines()[0] == "gpt3_175b can't be laid out: 0 problems"
    assert rows([((), least)], PLAIN).splitlines()[1].split() == ["gpt3_175b", "can't", "-", "-", "-", "-"]


def test_colour_changes_no_word(plan: Plan) -> None:
    painted = page(plan, Look(colour=True, blocks=False))
    for code in ("\x1b[1m", "\x1b[1;31m", "\x1b[1;32m", "\x1b[33m", "\x1b[0m"):
        painted = painted.replace(code, "")
    assert painted == page(plan, PLAIN)
