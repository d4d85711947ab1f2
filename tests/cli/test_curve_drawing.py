"""Drawings of curves: ticks that can be told apart, points where their values are, and none of a curve's ends lost."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from distrain.cli.drawings.chart_scale import MOST_TICKS, ChartScale, loose_scale
from distrain.cli.drawings.curve_drawing import LINES, DrawnCurve, curve_drawing, line_of, thin_points

SVG = "{http://www.w3.org/2000/svg}"
values = some.floats(-1e30, 1e30)
sizes = some.floats(1e-30, 1e30)


def check_ticks(scale: ChartScale) -> None:
    """Ticks are few, ascending, inside the scale, and each has a text of its own."""
    ticks, texts = scale.ticks(), [text for _, text in scale.tick_texts()]
    assert len(ticks) <= MOST_TICKS
    assert ticks == sorted(set(ticks))
    assert all(scale.low <= each <= scale.high for each in ticks)
    assert len(set(texts)) == len(texts)


@given(some.lists(values, min_size=1, max_size=5), some.sampled_from([None, 0.0]))
def test_an_even_scale_has_two_ticks_or_more_and_holds_its_values(held: list[float], floor_at: float | None) -> None:
    scale = loose_scale(held, 200.0, 10.0, floor_at=floor_at)
    assert scale.low <= min(held) <= max(held) <= scale.high
    check_ticks(scale)
    assert len(scale.ticks()) >= 2
    assert floor_at is None or scale.low <= floor_at


@given(some.lists(sizes, min_size=2, max_size=5))
def test_a_logarithmic_scale_has_a_tick_or_more_and_holds_its_values(held: list[float]) -> None:
    assume(max(held) >= 8 * min(held))
    scale = loose_scale(held, 200.0, 10.0, logarithmic=True)
    assert scale.low <= min(held) <= max(held) <= scale.high
    check_ticks(scale)
    assert scale.ticks()


@given(some.lists(sizes, min_size=2, max_size=2, unique=True), some.booleans())
def test_a_position_is_between_the_ends_and_in_order(ends: list[float], logarithmic: bool) -> None:
    low, high = sorted(ends)
    assume(high > low * 1.001)
    scale = ChartScale(low=low, high=high, start=0.0, end=100.0, logarithmic=logarithmic)
    middle = low + 0.37 * (high - low)
    assert scale.position(low) == 0.0
    assert scale.position(high) == pytest.approx(100.0)
    assert 0.0 < scale.position(middle) < 100.0


def test_equal_ratios_are_equal_distances_on_a_logarithmic_scale() -> None:
    scale = ChartScale(low=1.0, high=10_000.0, start=0.0, end=100.0, logarithmic=True)
    assert [scale.position(10.0**power) for power in range(5)] == pytest.approx([0.0, 25.0, 50.0, 75.0, 100.0])


points = some.lists(
    some.tuples(some.integers(0, 10**7), some.floats(0.1, 100.0)), min_size=2, max_size=300, unique_by=lambda point: point[0]
)


@given(points)
def test_thin_points_keep_the_lowest_the_highest_the_first_and_the_last(given_points: list[tuple[int, float]]) -> None:
    assume(max(step for step, _ in given_points) > 1)
    steps = sorted(max(1, step) for step, _ in given_points)
    assume(steps[0] < steps[-1])
    kept = thin_points(given_points, ChartScale(low=steps[0], high=steps[-1], start=0.0, end=20.0, logarithmic=True))
    assert kept == sorted(kept)
    assert set(kept) <= set(given_points)
    assert len(kept) <= 4 * 21
    for key in (min, max):
        assert key(value for _, value in kept) == key(value for _, value in given_points)
        assert key(kept) == key(given_points)


@given(points, some.booleans())
def test_every_drawing_is_well_formed_and_its_curve_stays_inside(given_points: list[tuple[int, float]], even: bool) -> None:
    svg = curve_drawing(
        [DrawnCurve(name="<a & b>\x1b\ud800", points=given_points, colour="#123456", dots=True)], "loss\x1b", even_steps=even
    )
    if len({max(1, step) for step, _ in given_points}) < 2:
        assert svg == ""
        return
    root = ElementTree.fromstring(svg)
    left, top, wide, tall = map(float, root.attrib["viewBox"].split())
    (curve,) = (each for each in root.iter(f"{SVG}path") if each.get("stroke") == "#123456")
    places = [tuple(map(float, place.split())) for place in re.split("[ML]", curve.attrib["d"]) if place]
    assert all(left <= x <= left + wide and top <= y <= top + tall for x, y in places)


def test_a_point_is_drawn_where_its_axes_say() -> None:
    curve = DrawnCurve(name="loss", points=[(1, 5.0), (10, 4.0), (100, 2.0)], colour="#123456", dots=True)
    root = ElementTree.fromstring(curve_drawing([curve], "loss"))
    across, up = (
        {each.text: each for each in root.iter(f"{SVG}text") if each.get("text-anchor") == anchor} for anchor in ("middle", "end")
    )
    dots = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in root.iter(f"{SVG}circle")]
    assert [x for x, _ in dots] == pytest.approx([float(across[step].attrib["x"]) for step in ("1", "10", "100")])
    assert [y for _, y in dots] == pytest.approx([float(up[f"{loss}"].attrib["y"]) - 4 for loss in (5, 4, 2)], abs=0.06)
    assert "step (logarithmic)" in across


def test_events_and_levels_are_drawn_and_named() -> None:
    curve = DrawnCurve(name="tokens/s", points=[(1, 90.0), (9, 95.0)], colour="#123456")
    root = ElementTree.fromstring(
        curve_drawing(
            [curve],
            "tokens/s",
            events=[(5, "<x>", "a <restart>"), (50, "later", "then")],
            level=("planned", 100.0),
            floor_at=0.0,
            even_steps=True,
        )
    )
    events = [each for each in root.iter(f"{SVG}path") if each.get("class") == "event"]
    assert [event[0].text for event in events] == ["a <restart>"]
    assert {"planned 100", "0", "<x>"} <= {each.text for each in root.iter(f"{SVG}text")}


def test_curves_of_one_page_look_different() -> None:
    assert len(set(LINES)) == len(LINES)
    assert line_of(len(LINES)) == line_of(0)


def test_a_curve_of_one_step_is_not_drawn() -> None:
    one = DrawnCurve(name="loss", points=[(0, 1.0), (1, 2.0)], colour="#123456")
    assert curve_drawing([one], "loss") == curve_drawing([], "loss") == ""
