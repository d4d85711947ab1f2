"""`distrain report --timeline` on real runs of each engine: what ranks recorded, the page, its files, and what a careless user types."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.pages.text_layout import DEFAULT_WIDTH, Style
from distrain.cli.pages.timeline_page import COLUMNS, clock_text, timeline_text
from distrain.trainer.plan.layout.schedules import SCHEDULES, part_of
from distrain.trainer.plan.timeline.compare_steps import lane_spans
from distrain.trainer.plan.timeline.step_segments import IDLE_CAUSES
from distrain.trainer.plan.timeline.timed_spans import TimedSpan
from distrain.trainer.rundir.measured_step import MachineUse, MeasuredStep, measured_step
from distrain.trainer.rundir.run_in_manifest import read_run_file
from distrain.trainer.rundir.timeline_files import RankTimeline, layout_key, read_timelines
from distrain.trainer.rundir.timeline_report import read_timeline_report

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

# fmt: off
WORDS = (
    "quickstart", "data=synthetic", "model.hidden=64", "model.heads=4", "model.ffn=160", "model.layers=4", "train.seq=32", "train.batch=8",
    "train.microbatch=1", "train.evaluate.every=0", "train.steps=5", "optim.warmup=1", "checkpoint.final=false", "log.sinks=[jsonl]",
    "cluster.device.peak.fp32=5e10", "cluster.device.bandwidth=1e10", "cluster.inside.bandwidth=1e9", "cluster.inside.latency=1e-5",
)
WINDOW, STEPS = "log.timeline=[3,4]", [3, 4]
MICROS = 4
RUNS = {  # engine -> keys, schedule, stages, chunks
    "native": (("parallel.pp=2", "parallel.dp=2", "parallel.schedule=zb_v", "cluster=1x4"), "zb_v", 2, 2),
    "pipe":   (("parallel.pp=2", "parallel.dp=2", "parallel.schedule=dualpipev", "cluster=1x4"), "dualpipev", 2, 2),
    "zero":   (("parallel.dp=2", "parallel.zero=1", "cluster=1x2"), "1f1b", 1, 1),
}
# fmt: on
EVERY_ENGINE = pytest.mark.parametrize("engine", RUNS)
AGAIN = "train with log.timeline=[first,last] again"


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each engine."""
    folder = tmp_path_factory.mktemp("timelines")
    for engine, (words, *_) in RUNS.items():
        ranks.train(folder / engine, *WORDS, *words, f"engine={engine}", WINDOW)
    return folder


def timelines_of(folder: Path) -> list[RankTimeline]:
    run = read_run_file(folder / "run.json")
    assert run
    return read_timelines(folder, run)


def call(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run `distrain`; return (exit status, stdout, stderr)."""
    status = command(shlex.split(words))
    return status, *capsys.readouterr()


def passes_of(timeline: RankTimeline, step: int) -> list[TimedSpan]:
    return [span for span in timeline.steps[step].spans if span.is_pass]


@EVERY_ENGINE
def test_every_rank_records_the_actions_of_its_schedule_in_the_steps_of_the_window(engine: str, runs: Path) -> None:
    _, schedule, stages, chunks = RUNS[engine]
    found = timelines_of(runs / engine)
    assert [each.rank for each in found] == list(range(2 * stages))
    for each in found:
        stage = each.rank // 2
        actions = [
            (action.kind, action.micro, part_of(stage, action.chunk, stages, folded=SCHEDULES[schedule].folded))
            for action in SCHEDULES[schedule].actions(stage, stages, MICROS, chunks)
        ]
        assert [step.step for step in each.steps] == STEPS
        for step in range(len(STEPS)):
            assert [(span.kind, span.micro, span.part) for span in passes_of(each, step)] == actions
            others = {span.kind for span in each.steps[step].spans if not span.is_pass}
            assert others >= {"data", "sum", "sync", "step"} | ({"send", "receive"} if stages > 1 else set())


def test_each_pass_that_needs_a_message_has_its_span_before_and_each_that_sends_one_behind(runs: Path) -> None:
    for each in timelines_of(runs / "native"):
        for step in each.steps:
            passes = [(span.micro, span.part) for span in step.spans if span.kind in ("F", "B", "I")]
            for kind in ("receive", "send"):
                found = [(span.micro, span.part) for span in step.spans if span.kind == kind and span.part >= 0]
                ends = {0} if kind == "send" else set()  # part 0 has nobody to send a gradient to
                assert [key for key in found if key[1] not in ends] == [key for key in passes if key[1] not in ends]


@EVERY_ENGINE
def test_spans_follow_each_other_inside_their_step(engine: str, runs: Path) -> None:
    for each in timelines_of(runs / engine):
        assert all(before.end <= after.start for before, after in pairwise(each.steps))
        for step in each.steps:
            moments = [step.start, *(at for span in step.spans for at in (span.start, span.end)), step.end]
            assert moments == sorted(moments)
            assert all(span.end > span.start for span in step.spans if span.is_pass or span.kind == "step")
            assert step.cpu > 0


@pytest.mark.parametrize("engine", ["native", "pipe"])
def test_on_the_common_clock_a_pass_starts_when_another_rank_has_made_its_input(engine: str, runs: Path) -> None:
    found = timelines_of(runs / engine)
    last = max(span.part for each in found for span in passes_of(each, 0))
    needed = 0
    for step in range(len(STEPS)):
        made = {
            (each.rank % 2, span.kind == "F", span.micro, span.part): span.end
            for each in found
            for span in passes_of(each, step)
            if span.kind != "W"
        }
        for each in found:
            for span in passes_of(each, step):
                before = span.part - 1 if span.kind == "F" else span.part + 1
                if span.kind != "W" and 0 <= before <= last:
                    assert made[each.rank % 2, span.kind == "F", span.micro, before] <= span.start
                    needed += 1
    assert needed == len(STEPS) * 2 * 2 * last * MICROS


@EVERY_ENGINE
def test_the_document_has_the_seconds_of_every_stage(engine: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(f"report {runs / engine} --timeline --json", capsys)
    document = json.loads(out)
    assert (status, err, document["version"], document["step"] in STEPS) == (0, "", 1, True)
    found = timelines_of(runs / engine)
    lengths = [max(each.steps[at].end for each in found) - min(each.steps[at].start for each in found) for at in range(len(STEPS))]
    assert [row["seconds"] for row in document["steps"]] == pytest.approx(lengths)
    assert document["seconds"] == pytest.approx(min(lengths))
    for which, seconds in (("measured", document["seconds"]), ("simulated", document["simulated"])):
        assert sum(document["critical_path"][which].values()) == pytest.approx(seconds)
        for stage in document["stages"]:
            assert sum(stage[which].values()) == pytest.approx(seconds)
    at = STEPS.index(document["step"])
    for stage in document["stages"]:
        spans = [span for each in found[2 * stage["index"] :][:2] for span in passes_of(each, at) if span.kind == "F"]
        assert stage["measured"]["forward"] == pytest.approx(sum(span.end - span.start for span in spans) / 2)
    forward = next(row for row in document["actions"] if (row["kind"], row["stage"]) == ("forward", 0))
    assert forward["number"] * forward["measured"] == pytest.approx(document["stages"][0]["measured"]["forward"])
    assert forward["number"] * forward["simulated"] == pytest.approx(document["stages"][0]["simulated"]["forward"])


def test_the_page_has_the_documents_figures_in_80_columns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, page, err = call(f"report {runs / 'native'} --timeline", capsys)
    document = json.loads(call(f"report {runs / 'native'} --timeline --json", capsys)[1])
    assert (status, err) == (0, "")
    assert max(map(len, page.splitlines())) <= DEFAULT_WIDTH
    assert page.startswith(f"native: step {document['step']} took ")
    # A step that took fifty times as long as planned leaves a stage of the plan no column.
    assert re.findall(r"^  (?:stage (\d)|       )  (measured|simulated)(?:  |$)", page, re.MULTILINE) == [
        (number if which == "measured" else "", which) for number in "01" for which in ("measured", "simulated")
    ]
    table = page[page.index("Stages: ") :].split("\n\n")[0].splitlines()
    unit = {"ms": 1e-3, "us": 1e-6, "s": 1.0}[table[0].rpartition(" ")[2]]
    keys = {"F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights"}
    for number, line in enumerate(table[2:]):
        shown = line.split()[-len(COLUMNS) :]
        seconds = document["stages"][number // 2][("measured", "simulated")[number % 2]]
        for cell, (_, causes) in zip(shown, COLUMNS, strict=True):
            value = sum(seconds[keys.get(cause, cause)] for cause in causes)
            assert (0.0 if cell == "-" else float(cell.replace(",", "")) * unit) == pytest.approx(value, rel=0.01, abs=0.006 * unit)


def test_the_page_says_what_makes_the_step_longer(runs: Path) -> None:
    report = read_timeline_report(runs / "native")
    page = " ".join(timeline_text(report, Style(blocks=False)).split())
    longer = "longer" if report.comparison.measured.seconds > report.comparison.simulated.seconds else "shorter"
    assert f" {longer}: " in page
    first = report.comparison.actions()[0]
    assert f"on stage {first.stage}: " in page
    assert page.isascii()


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (
            MachineUse(processes=4, cores=2, threads=1, busy=0.9, ran=0.5),
            "They share cores: what one does takes longer while others compute",
        ),
        (MachineUse(processes=2, cores=2, threads=4, busy=0.9, ran=0.5), "They share cores: "),
        (MachineUse(processes=2, cores=2, threads=1, busy=0.3, ran=0.4), "they had a core for 40 % of the time: other work took the rest"),
        (MachineUse(processes=2, cores=2, threads=1, busy=0.8, ran=0.98), "They have a core each, but share caches"),
        (MachineUse(processes=1, cores=2, threads=2, busy=0.8, ran=1.98), "a process on 2 cores of one machine, 2 threads, used 80 %"),
    ],
)
def test_the_page_says_whether_processes_share_cores(use: MachineUse, says: str) -> None:
    step = MeasuredStep(step=1, lanes=(), ranks=(), seconds={1: 1.0}, machines=(use,), clock_error=2e-4)
    assert says in clock_text(step)
    assert clock_text(step).endswith("Clocks of the machines agree to 200 us.")


def test_spans_of_gpus_are_said_to_be_of_their_streams(runs: Path) -> None:
    on_gpus = [json.loads((runs / "zero" / "timeline" / f"{rank}.json").read_text()) | {"device": "cuda"} for rank in range(2)]
    from msgspec import convert

    assert clock_text(measured_step([convert(each, RankTimeline) for each in on_gpus], 1)).startswith("Measured spans lie between events")


def test_the_trace_has_two_groups_of_processes_with_all_ranks(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    assert call(f"report {runs / 'native'} --timeline --trace {file}", capsys)[0] == 0
    report = read_timeline_report(runs / "native")
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.split(":")[0] for name in names.values()] == [
        "measured stage 0",
        "measured stage 1",
        "simulated stage 0",
        "simulated stage 1",
    ]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] < 2]
    assert threads == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for stage in range(2):
        for replica in range(2):
            lane = report.comparison.measured.segments[2 * stage + replica]
            busy = sum(each.seconds for each in lane if each.cause not in IDLE_CAUSES)
            shown = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (stage, replica)]
            assert sum(event["dur"] for event in shown) / 1e6 == pytest.approx(busy)
    flows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(flows) == len(set(flows)) == len(report.measured.transfers) + len(report.simulated.transfers)
    assert len(report.measured.transfers) == len(report.simulated.transfers) > 0
    for own in report.measured.stages:  # of the first replica
        assert own.spans == lane_spans(report.comparison.measured, 2 * own.index)


def test_the_drawing_has_both_steps_on_one_scale(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.svg"
    for _ in range(2):  # the second replaces the first
        assert call(f"report {runs / 'native'} --timeline --svg {file}", capsys)[0] == 0
    report = read_timeline_report(runs / "native")
    boxes = ElementTree.parse(file).getroot().findall("{http://www.w3.org/2000/svg}rect")
    widths = [float(box.attrib["width"]) for box in boxes if box.attrib["fill"] == "#f0f0ee"]
    assert len(widths) == 4
    rounded = 0.006 / widths[0] + 0.006 / widths[2]  # to two decimals; a step of a busy machine may be hundreds of times as long as planned
    assert widths[0] / widths[2] == pytest.approx(report.measured.seconds / report.simulated.seconds, rel=rounded)
    shown = [len(each.spans) for timeline in (report.measured, report.simulated) for each in timeline.stages]
    titled = [box for box in boxes if len(box)]
    assert len(titled) == sum(shown)


# fmt: off
CARELESS = [  # what happens to the folder, what is said
    ("rm -r {0}/timeline",                               "{0} has no timeline: train with log.timeline=[first,last], the steps to time"),
    ("truncate -s 100 {0}/timeline/1.json",              f"{{0}}/timeline/1.json is damaged: {AGAIN}"),
    ("truncate -s 0 {0}/timeline/1.json",                f"{{0}}/timeline/1.json is missing or can't be read: {AGAIN}"),
    ("rm {0}/timeline/1.json",                           f"{{0}}/timeline/1.json is missing or can't be read: {AGAIN}"),
    ("cp {0}/timeline/0.json {0}/timeline/1.json",       f"{{0}}/timeline/1.json is that of rank 0: {AGAIN}"),
    ("sed -i s/version.:1/version\\\":2/ {0}/timeline/0.json",
     f"{{0}}/timeline/0.json is of version 2, and this distrain reads version 1: {AGAIN}"),
    ("sed -i 's/attempt...../&x/' {0}/timeline/1.json",  f"{{0}}/timeline/1.json is of another attempt than 0.json: {AGAIN}"),
    ("sed -i 's/\\[\\[3,/[[2,/' {0}/timeline/1.json",    f"{{0}}/timeline/1.json has other steps than 0.json: {AGAIN}"),
    ("sed -i 's/\"hidden\":64/\"hidden\":128/' {0}/run.json",
     f"{{0}}/timeline/0.json is of another layout, model or version than {{0}}/run.json: {AGAIN}"),
    ("sed -i 's/\"hidden\":64/\"hiden\":\"x\"/' {0}/run.json",
     "{0}/run.json can't be read, or is of another version of distrain: train the run again"),
]
# fmt: on


def test_a_timeline_of_another_number_of_loss_chunks_is_not_of_the_same_costs() -> None:
    keys = [layout_key(load_recipe("quickstart", [f"train.loss_chunks={chunks}"])) for chunks in (1, 2, 3)]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(("damage", "says"), CARELESS)
def test_a_folder_without_a_timeline_that_can_be_read_gets_one_line(
    damage: str, says: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess

    folder = tmp_path / "run"
    shutil.copytree(runs / "zero", folder)
    subprocess.run(damage.format(folder), shell=True, check=True)
    assert call(f"report {folder} --timeline", capsys) == (2, "", f"distrain: {says.format(folder)}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("{0} --svg x.svg", "--svg is of a timeline: add --timeline"),
        ("{0} --trace x.json", "--trace is of a timeline: add --timeline"),
        ("{0} --timeline --html x.html", "--timeline is not shown as HTML: draw it with --svg FILE"),
        ("{0} {0} --timeline", "--timeline shows one run, not 2: give one RUN_DIR"),
        ("{0} --timeline --svg x.png", "x.png does not end in .svg: name it x.svg"),
    ],
)
def test_options_that_do_not_go_together_get_one_line(words: str, says: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(f"report {words.format(runs / 'zero')}", capsys)
    assert (status, out, err) == (2, "", f"distrain: {says}\n")
