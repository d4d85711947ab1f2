"""`distrain plan --html`: the figures of `--json`, for plans that fit, that do not, and that break rules; one file that loads nothing."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.drawings.plan_drawing import KINDS, PARTS
from distrain.cli.html.plan_html import CONFIG, plan_html
from distrain.cli.keys import config_files
from distrain.cli.pages.plan_facts import outcome, verdict
from distrain.cli.recipe_files.config_text import config_text
from distrain.tests.fakes.html_page import SVG, XHTML, HtmlPage, text_of
from distrain.tests.fakes.run_command import run_command
from distrain.tests.fakes.valid_run import HF_MODEL
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.numbers.as_text import (
    binary_unit,
    count_text,
    in_unit,
    part_of_size,
    seconds_range_text,
    seconds_text,
    share_text,
    size_range_text,
    size_text,
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


MADE: dict[str, tuple[HtmlPage, Any]] = {}  # what page_and_json has returned


def page_and_json(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[HtmlPage, Any]:
    """The page of a plan, and what `--json` prints of it; tests change neither."""
    if words not in MADE:
        _, out, _ = run_command(f"plan {words} --json --html page.html", capsys)
        MADE[words] = HtmlPage.read(Path("page.html")), json.loads(out)
    return MADE[words]


@pytest.mark.parametrize("recipe", config_files.recipes(None))
def test_every_recipe_has_a_page_with_its_verdict_and_config(recipe: str) -> None:
    plan, config = make_plan(load_recipe(recipe)), config_text(recipe, (), None, comments=False)
    page = HtmlPage(plan_html(plan, None, None, config, f"distrain plan conf={recipe}"))
    assert page.texts("h1") == [plan.name]
    assert page.texts("title") == [f"{plan.name}: {outcome(plan)}"]
    assert page.texts("span", "badge") == [outcome(plan)]
    assert [each.get("content") for each in page.all("meta") if each.get("name") == "description"] == [verdict(plan)]
    assert page.texts("summary") == [CONFIG]
    assert page.texts("pre") == [config, f"distrain plan conf={recipe}"]
    assert "None" not in page.body.replace(config, "")


FITTING = (
    "conf=megatron_1t_6x8x64",
    "conf=llama3_8b_1node cluster.price=2.5",
    "conf=mixtral_8x7b",
    "conf=gpt3_175b parallel.pp=1 parallel.dp=auto",
)


@pytest.mark.parametrize("words", FITTING)
def test_tiles_are_the_figures_of_the_json(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, plan = page_and_json(words, capsys)
    memory, speed, run = plan["memory"], plan["throughput"], plan["run"]
    step = plan["time"]["step"]
    expected = {
        "memory of a device": (
            part_of_size(memory["peak"], memory["capacity"]),
            size_range_text(memory["peak"], plan["memory_low"], plan["memory_high"]).strip(),
        ),
        "a step": (seconds_text(step), seconds_range_text(step, plan["step_low"], plan["step_high"]).strip()),
        "tokens/s": (count_text(speed["tokens_per_second"]), f"{count_text(speed['tokens_per_second_per_gpu'])} on each device"),
        "MFU": (share_text(speed["mfu"]), f"HFU {share_text(speed['hfu'])}" if speed["hfu"] > speed["mfu"] else ""),
        "the whole run": (seconds_text(run["seconds"]), f"{run['steps']:,} steps"),
        **({"cost": (count_text(run["cost"]), "at cluster.price")} if run["cost"] is not None else {}),
    }
    assert page.tiles == expected
    assert ("cost" in page.tiles) == ("price" in words)


@pytest.mark.parametrize("words", FITTING)
def test_tables_are_the_figures_of_the_json(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, plan = page_and_json(words, capsys)
    time, run = plan["time"], plan["run"]
    rows = {row[0]: row[1:] for row in page.tables("Time of a step")[0][1:]}
    assert rows == {name: [seconds_text(time[key]), share_text(time[key] / time["step"])] for key, name, _ in PARTS if time[key]}
    messages = sorted(plan["traffic"], key=lambda each: -each["sent"])[:14]
    assert page.tables("Traffic")[0][1 : len(messages) + 1] == [
        [
            each["axis"], each["verb"], each["link"], f"{each['count']:,} x {size_text(each['payload'])}", size_text(each["sent"]),
            seconds_text(each["seconds"]), seconds_text(each["exposed"]),
        ]
        for each in messages
    ]  # fmt: skip
    facts = {name: figure for table in page.tables("Model and run") for figure, name in table}
    assert facts["parameters"] == count_text(plan["model"]["parameters"])
    assert facts["tokens"] == count_text(run["tokens"])
    assert facts["of training"] == seconds_text(run["seconds"])
    assert facts["at every device's peak"] == seconds_text(run["ideal_seconds"])
    assert facts["device-hours"] == count_text(plan["world"] * run["seconds"] / 3600)
    assert facts["a checkpoint"] == size_text(run["checkpoint_bytes"])
    assert [row[:2] for row in page.tables("Mesh")[0][1:]] == [[axis, f"{plan['mesh'][axis]:,}"] for axis in plan["groups"]]


@pytest.mark.parametrize("words", FITTING)
def test_the_memory_of_the_fullest_stage_is_that_of_the_json(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, plan = page_and_json(words, capsys)
    memory = plan["memory"]
    unit, names = binary_unit(memory["peak"]), {name: kind for kind, name, _ in KINDS}
    heading, *rows = page.tables("Memory")[0]
    (row,) = [dict(zip(heading, row, strict=True)) for row in rows if holds(row[0], memory["stage"])]
    held = memory["stages"][memory["stage"]]["bytes"]
    assert {name: row[name] for name in heading if name in names} == {
        name: in_unit(held[kind], unit) for name, kind in names.items() if any(stage["bytes"][kind] for stage in memory["stages"])
    }
    assert row["total"] == in_unit(memory["peak"], unit)
    assert float(row["of capacity"].removesuffix(" %").replace(",", "")) == pytest.approx(
        100 * memory["peak"] / memory["capacity"], abs=0.5
    )


def holds(stages: str, stage: int) -> bool:
    """Whether a range of stages has one."""
    first, _, last = stages.partition("-")
    return stages[:1].isdigit() and int(first) <= stage <= int(last or first)


def boxes(drawing: Any, colours: Mapping[str, str]) -> dict[str, list[tuple[float, float]]]:
    """(width, height) of the boxes of each colour of a drawing, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for box in drawing.iter(f"{SVG}rect"):
        found.setdefault(colours[box.get("fill")], []).append((float(box.get("width")), float(box.get("height"))))
    return found


@pytest.mark.parametrize("words", ["conf=llama3_8b_1node", "conf=llama3_8b parallel.pp=4 parallel.dp=auto", "conf=megatron_1t_6x8x64"])
def test_drawings_are_to_scale(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, plan = page_and_json(words, capsys)
    drawn = boxes(page.drawing("Time of a step"), {colour: key for key, _, colour in PARTS})
    whole = sum(wide for parts in drawn.values() for wide, _ in parts)
    for key, ((wide, _),) in drawn.items():
        assert wide / whole == pytest.approx(plan["time"][key] / plan["time"]["step"], abs=1e-3)
    kinds = boxes(page.drawing("Memory"), {colour: key for key, _, colour in KINDS})
    stages, side = plan["memory"]["stages"], 1 if len(plan["memory"]["stages"]) > 8 else 0
    weights, activations = (sum(each[side] for each in kinds[kind]) for kind in ("weights", "activations"))
    expected = [sum(stage["bytes"][kind] for stage in stages) for kind in ("weights", "activations")]
    assert weights / activations == pytest.approx(expected[0] / expected[1], rel=0.01)


def test_columns_are_stacked_without_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    page, plan = page_and_json("conf=megatron_1t_6x8x64", capsys)
    columns: dict[str, list[tuple[float, float]]] = {}
    for box in page.drawing("Memory").iter(f"{SVG}rect"):
        columns.setdefault(box.attrib["x"], []).append((float(box.attrib["y"]), float(box.attrib["height"])))
    assert len(columns) == len(plan["memory"]["stages"])
    for column in columns.values():
        for (lower, _), (upper, tall) in pairwise(column):
            assert upper + tall == pytest.approx(lower, abs=0.02)


@pytest.mark.parametrize(("heading", "rows"), [("Memory", KINDS), ("Time of a step", PARTS)])
def test_the_colours_of_a_drawing_are_named_in_its_table(
    heading: str, rows: tuple[tuple[str, str, str], ...], capsys: pytest.CaptureFixture[str]
) -> None:
    page, _ = page_and_json("conf=megatron_1t_6x8x64", capsys)
    table = next(page.section(heading).iter(f"{XHTML}table"))
    swatches = {text_of(cell): each.attrib["style"] for cell in table.iter() for each in cell if each.get("class") == "swatch"}
    assert swatches == {name: f"background: {colour}" for _, name, colour in rows}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("conf=gpt3_175b", "good"),
        ("conf=llama3_8b_1node", "care"),
        ("conf=llama3_8b_1node train.microbatch=8", "bad"),
        ("conf=gpt3_175b parallel.tp=7", "bad"),
    ],
)
def test_the_verdict_has_its_colour(words: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = page_and_json(words, capsys)
    assert [each.get("class") for each in page.all("span") if "badge" in each.get("class", "")] == [f"badge {kind}"]


# Plans that do not fit, that break rules, that lack figures


def test_a_plan_that_does_not_fit_has_a_page_with_its_fixes_and_the_best_layout(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command("plan conf=llama3_8b_1node train.microbatch=8 --html page.html", capsys)
    page = HtmlPage.read(Path("page.html"))
    (problem,) = page.texts("li", "bad")
    best, command_line = page.section("A better layout")[1:]
    assert status == 1
    assert out.endswith("\nwrote page.html\n")
    assert page.texts("span", "badge") == ["does not fit"]
    assert problem == err.removeprefix("distrain: ").rstrip("\n").join(["Problem", ""])
    assert re.sub(r"\s+", " ", text_of(best)) in re.sub(r"\s+", " ", out)
    typed = text_of(command_line)
    assert run_command(typed[typed.index("plan ") :], capsys)[0] == 0


@pytest.mark.parametrize("words", ["parallel.tp=7", "parallel.tp=7 optim.warmup=1000000"])
def test_a_plan_that_breaks_rules_has_a_page_of_problems_without_figures(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run_command(f"plan conf=gpt3_175b {words} --html page.html", capsys)
    page = HtmlPage.read(Path("page.html"))
    assert status == 1
    assert page.texts("li", "bad") == [f"Problem{line.removeprefix('distrain: ')}" for line in err.splitlines()]
    assert page.tiles == {}
    assert page.texts("h2") == []
    assert page.texts("span", "badge")[0].startswith("can't be laid out: ")


def test_a_plan_without_a_known_peak_has_memory_and_no_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page, plan = page_and_json("conf=quickstart", capsys)
    assert plan["time"] is None
    assert list(page.tiles) == ["memory of a device"]
    assert "Time, throughput and days are not known." in page.texts("p")
    assert {row[-1] for row in page.tables("Traffic")[0][1:]} == {"?"}
    assert "of training" not in page.body


def test_a_plan_of_a_model_without_costs_says_that_activations_are_not_known() -> None:
    plan = make_plan(replace(load_recipe("quickstart", ["cluster.gpus=2", "model.dropout=0"]), model=HF_MODEL))
    page = HtmlPage(plan_html(plan, None, None, "", ""))
    assert plan.memory is not None
    assert list(plan.memory.unknown) == ["activations", "logits"]
    heading, row = page.tables("Memory")[0]
    assert dict(zip(heading, row, strict=True))["activations"] == "?"
    assert page.tiles["memory of a device"][1].endswith("without activations, which are not known")


SWEEPS = {
    "conf=megatron_175b parallel.dp=auto parallel.tp=8,4 train.microbatch=1,8": ["tp", "microbatch"],
    "conf=llama3_8b_1node parallel.recompute=full,none train.microbatch=1,8": ["recompute", "microbatch"],
    "conf=gpt3_175b parallel.pp=16,8 parallel.schedule=interleaved,1f1b": ["pp", "schedule"],
}


@pytest.mark.parametrize("words", SWEEPS)
def test_a_sweep_has_a_row_for_each_layout_and_the_fastest_stands_out(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    page, plans = page_and_json(f"{words} -m", capsys)
    heading, *rows = page.tables("Layouts")[0]
    assert heading == ["layout", "verdict", "memory", "step", "tokens/s", "MFU", "whole run"]
    names = [" ".join(word.rpartition(".")[2] for word in plan["overrides"]) for plan in plans]
    assert [row[0] for row in rows] == names
    assert [word.partition("=")[0] for word in names[0].split()] == SWEEPS[words]
    for row, plan in zip(rows, plans, strict=True):
        if plan["memory"]:
            assert row[2:4] == [part_of_size(plan["memory"]["peak"], plan["memory"]["capacity"]), seconds_text(plan["time"]["step"])]
    fitting = [plan for plan in plans if plan["ok"] and plan["fits"]]
    best = max(fitting, key=lambda plan: plan["throughput"]["tokens_per_second"])
    (strong,) = [text_of(row[0]) for row in page.all("tr") if row.get("class") == "strong"]
    assert strong == " ".join(word.rpartition(".")[2] for word in best["overrides"])
    assert page.texts("span", "badge") == [f"{len(fitting)} of 4 layouts fit{'s' if len(fitting) == 1 else ''}"]
    problems: dict[str, str] = {}
    for name, plan in zip(names, plans, strict=True):
        for each in plan["problems"]:
            says = f"{each['says']}: {each['mend']}"
            problems[says] = problems.get(says, "") + name
    assert dict(page.tables("Problems")[0][1:] if problems else []) == problems
    alone, whole = (text.splitlines() for text in page.texts("pre"))
    assert whole == [f"distrain plan -m {words} --html page.html"]
    assert all(set(plan["overrides"]) <= set(shlex.split(line)) for line, plan in zip(alone, plans, strict=True))
    for line, plan in ((alone[0], plans[0]), (alone[-1], plans[-1])):
        assert json.loads(run_command(f"{line.removeprefix('distrain ')} --json", capsys)[1])["memory"] == plan["memory"]


def test_a_sweep_of_which_nothing_fits_or_is_laid_out_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = page_and_json("conf=gpt3_175b -m parallel.tp=7,9", capsys)
    assert page.texts("span", "badge") == ["0 of 2 layouts fit"]
    assert page.tiles == {}


# What users write


def test_a_pipelines_page_draws_its_simulated_step_and_says_what_would_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = page_and_json("conf=gpt3_175b", capsys)
    simulated = json.loads(run_command("simulate conf=gpt3_175b --json", capsys)[1])
    (table,) = page.tables("One step")
    assert table[0] == ["what if", "a step", "change"]
    assert [row[0] for row in table[1:]] == [row["says"] for row in simulated["what_if"]]
    spans = sum(len(stage["spans"]) for stage in simulated["stages"])
    assert sum(len(each) > 0 for each in page.drawing("One step").iter(f"{SVG}rect")) == spans  # those with a title
    alone, _ = page_and_json("conf=llama3_8b", capsys)
    assert alone.tables("One step")[0][1][0] == "devices computed twice as fast"
    assert not list(alone.section("One step").iter(f"{SVG}svg"))


HOSTILE = "</title><script>alert(1)</script>&amp; \"'\x1b[31m\n\u202e\ud800 <b>x</b> ]]> <!-- --> javascript:alert(1)"


def test_names_devices_and_problems_are_shown_as_text() -> None:
    from distrain.cli.pages.search_page import LayoutHint
    from distrain.trainer.spec.problem import Problem, one_line

    plan = make_plan(load_recipe("llama3_8b_1node"))
    said = Problem(rule="x", says=HOSTILE, mend=HOSTILE)
    hostile = replace(plan, name=HOSTILE, device=HOSTILE, reading=HOSTILE, problems=(said,), warnings=(said,), groups={HOSTILE: HOSTILE})
    page = HtmlPage(plan_html(hostile, None, LayoutHint(says=HOSTILE, commands=(HOSTILE,)), HOSTILE, HOSTILE))
    assert page.texts("h1") == [one_line(HOSTILE)]
    assert page.texts("pre")[-1] == HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace("\ud800", "\\ud800")


def test_a_hostile_command_line_is_shown_and_can_be_typed_again(capsys: pytest.CaptureFixture[str]) -> None:
    name = "<script>alert('1')<|script> & \"x\""
    status, _, _ = run_command(f"plan conf=llama3_8b_1node {shlex.quote(f'name={json.dumps(name)}')} --html page.html", capsys)
    page = HtmlPage.read(Path("page.html"))
    assert status == 0
    assert page.texts("h1") == [name]
    assert run_command(page.texts("pre")[-1].removeprefix("distrain "), capsys)[1].startswith(name)


def test_the_same_plan_makes_the_same_page_but_for_its_date(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for _ in range(2):
        run_command("plan conf=llama3_8b_1node --html page.html", capsys)
        pages.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "", Path("page.html").read_text()))
    assert pages[0] == pages[1]
