"""`distrain simulate`: its page, its JSON, its drawing and its trace, and what a careless user types."""

import gzip
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.drawings.timeline_drawing import COLOURS, LATER_PART, LEFT, MOST_BOXES, RIGHT, WIDTH, draw_timeline
from distrain.cli.pages.simulate_page import MARKS
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.timeline.column_shares import IDLE, column_shares
from distrain.trainer.plan.timeline.make_timeline import make_timeline
from distrain.trainer.plan.timeline.step_costs import step_costs
from distrain.trainer.plan.timeline.timeline import Timeline
from distrain.trainer.spec.numbers.as_text import seconds_text

# fmt: off
SMALL = (
    "conf=llama3_8b_1node engine=native parallel.pp=4 parallel.dp=2 parallel.tp=1 parallel.zero=1 train.microbatch=1 train.batch=16"
    " parallel.schedule=zb_v"
)
# fmt: on
NO_FACTOR = "does not say how many times as long the stage computes, above 0 and at most 1000: write --slow 1=1.2 for a fifth longer"
SAMPLES = 100  # of a column
RECTANGLE = "{http://www.w3.org/2000/svg}rect"


def call(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run `distrain simulate`; return (exit status, stdout, stderr)."""
    status = command(["simulate", *shlex.split(arguments)])
    return status, *capsys.readouterr()


def timeline_of(words: str) -> Timeline:
    conf, *overrides = words.split()
    costs = step_costs(load_recipe(conf.removeprefix("conf="), overrides))
    assert costs
    return make_timeline(costs)


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status, out, err = call(f"{SMALL} --json", capsys)
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_document_has_the_planned_step_and_every_span(document: dict[str, Any]) -> None:
    conf, *overrides = SMALL.split()
    plan, timeline = make_plan(load_recipe(conf.removeprefix("conf="), overrides)), timeline_of(SMALL)
    assert plan.time
    assert (document["planned"], document["seconds"]) == (plan.time.step, timeline.seconds)
    for stage, shown in zip(timeline.stages, document["stages"], strict=True):
        assert [(span["kind"], span["start"], span["end"]) for span in shown["spans"]] == [
            (span.kind, span.start, span.end) for span in stage.spans
        ]
        causes = ("computing", "messages", "filling", "waiting", "draining")
        assert sum(shown[cause] for cause in causes) == pytest.approx(document["seconds"])
    assert sum(document["critical_path"]["seconds"].values()) == pytest.approx(document["seconds"])
    assert all(row["seconds"] > 0 for row in document["what_if"])
    micros = Counter(span["micro"] for stage in document["stages"] for span in stage["spans"] if span["kind"] == "F")
    assert micros == dict.fromkeys(range(document["microbatches"]), 8)  # two parts of each of four stages


def test_the_page_says_what_the_document_says(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    status, page, err = call(SMALL, capsys)
    assert (status, err) == (0, "")
    assert page.startswith(
        f"llama3_8b_1node: a step takes {seconds_text(document['seconds'])} simulated, {seconds_text(document['planned'])} planned\n"
    )
    for row in document["what_if"]:
        assert f"{row['says']} " in page
        assert f"{100 * (row['seconds'] / document['seconds'] - 1):+.1f} %" in page
    rows = re.findall(r"^  stage (\d)  (.*?)  +([\d.]+) %$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [0, 1, 2, 3]
    for stage, (_, _, idle) in zip(document["stages"], rows, strict=True):
        busy = stage["computing"] + stage["messages"]
        assert float(idle) == pytest.approx(100 * (1 - busy / document["seconds"]), abs=0.06)


def test_the_table_of_stages_has_the_documents_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = "conf=gpt3_175b"
    _, page, _ = call(words, capsys)
    document = json.loads(call(f"{words} --json", capsys)[1])
    table = page.split("\n\n")[2].splitlines()
    assert table[2].split() == ["stage", "layers", "compute", "messages", "fill", "wait", "drain", "held", "path"]
    rows = [re.split(r"\s{2,}", line.strip()) for line in table[3:]]
    assert [row[0] for row in rows] == ["0", "2", "4", "6", "9", "11", "13", "15"]
    for row in rows:
        stage = document["stages"][int(row[0])]
        shown = [float(cell) if cell != "-" else 0.0 for cell in row[2:7]]
        planned = [stage[cause] for cause in ("computing", "messages", "filling", "waiting", "draining")]
        assert shown == [pytest.approx(each, rel=0.01, abs=0.006) for each in planned]
        assert float(row[7]) == pytest.approx(stage["in_flight"], abs=0.6)
        on_path = document["critical_path"]["stages"][stage["index"]] / document["seconds"]
        assert float(row[8].removesuffix(" %")) == pytest.approx(100 * on_path, abs=0.06)


def test_the_timeline_marks_what_takes_most_of_each_column(capsys: pytest.CaptureFixture[str]) -> None:
    timeline = timeline_of(SMALL)
    _, page, _ = call(SMALL, capsys)
    rows = [line for line in page.splitlines() if re.match(r"  stage \d  ", line)]
    columns = len(rows[0]) - len("  stage 0  ") - len("  18.7 %")
    checked = 0
    for stage, line in zip(timeline.stages, rows, strict=True):
        for column, mark in enumerate(line[len("  stage 0  ") :][:columns]):
            moments = [(column + (sample + 0.5) / SAMPLES) * timeline.seconds / columns for sample in range(SAMPLES)]
            kinds = Counter(next((span.kind for span in stage.spans if span.start <= at < span.end), IDLE) for at in moments)
            shares = Counter[str]()
            for kind, many in kinds.items():
                shares[kind if kind in MARKS else "messages"] += many
            (most, first), *others = shares.most_common(2)
            if not others or first - others[0][1] > 0.05 * SAMPLES:  # sampling tells which is more
                assert mark == MARKS[most][1 if page.isascii() else 0]
                checked += 1
    assert checked > 0.8 * columns * len(rows)


def test_the_shares_of_columns_add_up_to_the_spans() -> None:
    timeline = timeline_of(SMALL)
    for stage in timeline.stages:
        shares = column_shares(stage, timeline.seconds, 97)
        assert all(sum(each.values()) == pytest.approx(1) for each in shares)
        idle = sum(each[IDLE] for each in shares) / 97
        assert idle == pytest.approx(stage.idle(timeline.seconds), abs=1e-9)


def test_one_device_has_a_timeline_of_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    status, page, _ = call("conf=gpt2_124m_1gpu", capsys)
    assert status == 0
    assert "as planned" in page
    assert "Stages" not in page
    assert "a device took 10 % longer to compute" in page


def test_slow_stages_lengthen_the_step_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, page, _ = call(f"{SMALL} --slow 1=1.5 --slow 2=2", capsys)
    assert status == 0
    line = " ".join(page.split("\n\n")[-1].split())
    slow = "With stage 1 computing 1.5 times as long, stage 2 computing 2.0 times as long the step takes"
    assert re.fullmatch(rf"{slow} [\d.]+ s, \+[\d.]+ %", line)
    assert "What if" not in page


def test_a_run_that_does_not_fit_is_simulated_and_its_problem_said(capsys: pytest.CaptureFixture[str]) -> None:
    status, page, err = call("conf=llama3_70b parallel.recompute=none", capsys)
    assert status == 0
    assert page.startswith("llama3_70b: a step takes")
    assert "needs 423.4 GiB of 79.2" in err


def boxes(svg: str) -> list[dict[str, float | str]]:
    return [
        {key: value if key == "fill" else float(value) for key, value in each.attrib.items()}
        for each in ElementTree.fromstring(svg).iter(RECTANGLE)
    ]


def test_the_drawing_has_a_box_for_every_span_where_it_lies() -> None:
    timeline = timeline_of(SMALL)
    spans = [span for stage in timeline.stages for span in stage.spans]
    scale = (WIDTH - LEFT - RIGHT) / timeline.seconds
    titles = ElementTree.fromstring(draw_timeline(timeline, "run")).findall(f".//{RECTANGLE}")
    shown = [each.attrib for each in titles if len(each)]  # those with a title
    assert len(shown) == len(spans)
    first = {stage.index: min(span.part for span in stage.spans if span.is_pass) for stage in timeline.stages}
    for span, each in zip(spans, shown, strict=True):
        assert float(each["x"]) == pytest.approx(LEFT + span.start * scale, abs=0.02)
        assert float(each["width"]) == pytest.approx(span.seconds * scale, abs=0.02)
        later = span.is_pass and span.part != first[span.stage]
        assert each["fill"] == (LATER_PART if later else COLOURS)[span.kind]


@pytest.mark.parametrize(("words", "unit", "name"), [(SMALL, 1.0, "s"), ("conf=gpt2_124m", 1e-3, "ms")])
def test_a_tick_of_the_drawing_stands_at_its_time(words: str, unit: float, name: str) -> None:
    timeline = timeline_of(words)
    texts = ElementTree.fromstring(draw_timeline(timeline, "run")).iter("{http://www.w3.org/2000/svg}text")
    small = [each for each in texts if each.get("font-size") == "11"]
    assert small[-1].text == name
    scale = (WIDTH - LEFT - RIGHT) / timeline.seconds
    assert len(small) >= 5
    for tick in small[:-1]:
        assert tick.text
        assert float(tick.attrib["x"]) == pytest.approx(LEFT + float(tick.text) * unit * scale, abs=0.06)


def test_the_drawing_of_a_long_step_blends_passes_and_stays_small() -> None:
    timeline = timeline_of("conf=megatron_1t_6x8x64")
    assert sum(len(stage.spans) for stage in timeline.stages) > MOST_BOXES
    svg = draw_timeline(timeline, "run")
    assert len(svg) < 200_000
    drawn = boxes(svg)
    assert all(float(each["x"]) >= LEFT - 1 for each in drawn[1:])
    row = [each for each in drawn[1:] if each["y"] == drawn[1]["y"]]
    filled = sum(float(each["width"]) for each in row[1:]) / (WIDTH - LEFT - RIGHT)
    busy = 1 - timeline.stages[0].idle(timeline.seconds)
    assert busy < filled < busy + 0.1  # a column with some work has a box


def test_files_are_written_and_only_our_own_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace, packed = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.json.gz"
    for _ in range(2):
        status, out, err = call(f"{SMALL} --svg {svg} --trace {trace}", capsys)
        assert (status, err) == (0, "")
        assert out.endswith(f"wrote {svg}\nwrote {trace}: open it at ui.perfetto.dev\n")
        assert call(f"{SMALL} --trace {packed} --json", capsys)[2] == f"wrote {packed}: open it at ui.perfetto.dev\n"
    assert svg.read_text() == draw_timeline(timeline_of(SMALL), "llama3_8b_1node")
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads(trace.read_text())
    for file in (svg, trace, packed):
        file.write_bytes(b"<svg>mine</svg>")
        option = "--svg" if file == svg else "--trace"
        status, out, err = call(f"{SMALL} {option} {file}", capsys)
        assert (status, out) == (2, "")
        assert err == f"distrain: {file} already exists: name another file, or remove it first\n"
        assert file.read_bytes() == b"<svg>mine</svg>"


def test_a_name_of_markup_is_text_in_the_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(f"{SMALL} \"name='<script>&'\" --svg {tmp_path / 'a.svg'}", capsys)[0] == 0
    drawing = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    assert any("<script>" in (each.text or "") for each in drawing.iter("{http://www.w3.org/2000/svg}text"))
    assert not any("script" in each.tag for each in drawing.iter())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--slow 4=2", "--slow 4=2: there is no stage 4: name one of stages 0 to 3: --slow 0=1.2"),
        ("--slow=-1=2", "--slow -1=2: there is no stage -1: name one of stages 0 to 3: --slow 0=1.2"),
        ("--slow 1", f"--slow 1 {NO_FACTOR}"),
        ("--slow 1=x", f"--slow 1=x {NO_FACTOR}"),
        ("--slow 1=nan", f"--slow 1=nan {NO_FACTOR}"),
        ("--slow 1=1e9", f"--slow 1=1e9 {NO_FACTOR}"),
        ("--slow 1=0", f"--slow 1=0 {NO_FACTOR}"),
        ("--slow 1=inf", f"--slow 1=inf {NO_FACTOR}"),
        ("--slow 1=2 --slow 1=3", "--slow 1=3: stage 1 has a factor already: give it one"),
        ("--svg step.png", "step.png does not end in .svg: name it step.svg"),
        ("--trace step.txt", "step.txt does not end in .json or .gz: name it step.json"),
        ("--svg ''", "'' is not the name of a file: name one that ends in .svg"),
        ("--svg /nowhere/a", "/nowhere/a.svg: there is no folder /nowhere: create it first"),
        ("train.seq=2048,4096", "train.seq=2048,4096 is a sweep: add -m to plan or fit each"),
    ],
)
def test_wrong_words_are_refused_in_a_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(f"{SMALL} {words}", capsys) == (2, "", f"distrain: {says}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("conf=gpt3_175b parallel.tp=7", "tp 7"),
        (
            "conf=llama3_8b parallel.zero=1 parallel.offload.optimizer=true cluster.host.bandwidth=null",
            "no times: how fast its node's host is, to which the run offloads, is not stated",
        ),
        ("conf=llama3_8b cluster.between=null", "no times: cluster.between is not stated"),
    ],
)
def test_a_run_without_a_step_time_is_refused_in_a_line(words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(f"{words} --svg {tmp_path / 'a.svg'}", capsys)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert says in err
    assert not list(tmp_path.iterdir())


def test_a_page_without_block_characters_is_ascii(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from distrain.cli.pages import text_layout

    monkeypatch.setattr(text_layout, "stdout_style", lambda: text_layout.Style(blocks=False))
    assert call(SMALL, capsys)[1].isascii()
