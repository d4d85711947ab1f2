"""Every page at several widths: no line is longer than the page, except for words that can't be broken."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from distrain.cli.app import VERBS, app, command
from distrain.cli.keys import config_files
from distrain.cli.pages.hosts_page import preflight_lines
from distrain.cli.pages.report_page import report_text
from distrain.cli.pages.text_layout import DEFAULT_WIDTH, MAX_WIDTH, MIN_WIDTH, Style, narrow_table, page_width, wrap
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.preflight.checks import HostState
from distrain.trainer.launch.preflight.preflight import PreflightReport
from distrain.trainer.machine.doctor_checks import MachineCheck
from distrain.trainer.rundir.measured_run import MeasuredRun
from distrain.trainer.rundir.planned_measured import PlannedMeasured

WIDTHS = (MIN_WIDTH, DEFAULT_WIDTH, 100, MAX_WIDTH)
DRAWN = (MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH)
LONG = "a_name_of_a_recipe_that_nobody_would_ever_want_to_read_twice"
RECIPE_PAGES = [f"plan conf={recipe}" for recipe in config_files.recipes(None)]
PAGES = [
    *RECIPE_PAGES,
    f"plan conf=megatron_1t_6x8x64 name={LONG} parallel.schedule=pipedream parallel.zero=1",
    "plan conf=megatron_1t_6x8x64 parallel.pp=1 parallel.dp=auto",
    "plan conf=llama3_8b_1node cluster=4x8 parallel=diloco train.batch=64 parallel.sync.every=123456",
    "plan conf=llama3_405b model.layers=98765 train.batch=123456789024 train.seq=1048576 parallel.pp=1 parallel.dp=auto",
    "plan conf=mixtral_8x7b parallel.pp=4 parallel.dp=auto parallel.schedule=zb_h1 model.shared_experts=2 train.gradients=fp32",
    "plan conf=gpt3_175b parallel.tp=7",
    "plan conf=deepseek_v3 --operators",
    "plan conf=megatron_1t_6x8x64 parallel.tp=7 --operators",
    "plan -m conf=gpt3_175b parallel.overlap.pipeline=true,false parallel.offload.optimizer=true,false",
    "plan -m conf=megatron_175b parallel.tp=8,4 parallel.schedule=interleaved,1f1b",
    "search conf=llama3_70b cluster=8x8 search.rows=3",
    "search conf=llama3_8b_1node search.nodes=1..2",
    *(f"simulate conf={recipe}" for recipe in ("gpt3_175b", "megatron_175b", "llama3_8b")),
    f"simulate conf=gpt3_175b name={LONG} --slow 1=1.25 --slow 2=1.25 --slow 10=1.25",
    "simulate conf=llama3_8b_1node engine=native parallel.pp=4 parallel.dp=2 parallel.tp=1 train.microbatch=1 parallel.schedule=zb_v",
    "ls",
    *(f"ls {group}" for group in config_files.groups(None)),
    *(f"{verb} --help" for verb in ("", *(verb.__name__ for verb, _ in VERBS))),
]


def too_long(page: Sequence[str], columns: int) -> list[str]:
    """The lines that are longer than the page although they could be broken."""
    return [line for line in page if len(line) > columns and " " in line.strip()]


@pytest.mark.parametrize("words", PAGES)
def test_no_line_of_a_page_is_too_long(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages of recipes are alike, and test_verbs has them at the default width, test_search those of searches."""
    drawn = (MIN_WIDTH,) if words in RECIPE_PAGES else (MIN_WIDTH, MAX_WIDTH) if words.startswith("search ") else DRAWN
    for columns in (DEFAULT_WIDTH, MAX_WIDTH) if "--help" in words else drawn:
        monkeypatch.setenv("COLUMNS", str(columns))
        command(shlex.split(words))
        assert not too_long(capsys.readouterr().out.splitlines(), columns)


def test_the_help_of_every_verb_is_among_the_pages() -> None:
    assert {command.name or command.callback.__name__ for command in app.registered_commands if command.callback} <= {
        words.split()[0] for words in PAGES if "--help" in words
    }


@pytest.mark.parametrize("columns", WIDTHS)
def test_no_line_of_a_report_is_too_long(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    row = PlannedMeasured(name="forward and backward", unit="seconds", planned=1e-9, measured=1e9)
    points = tuple((step * 10**9, 1e6 / (step + 1)) for step in range(200))
    sets = (("", points[::20]), *((f"a_set_of_quite_a_long_name_indeed{each:02}"[-32:], points[::40]) for each in range(12)))
    ran = MeasuredRun(
        name=LONG, steps=10**9, whole=10**12, starts=7, restarts=((1, 2), (3, 4)) * 9, goodput=0.5, again=((5, 1),) * 9,
        saved=tuple(range(0, 10**6, 25_000)), device="cpu", entropy=1e5, memory=(row,), time=(row, row, row), speed=(row,),
        skipped=3, skipped_spikes=2, spikes=4,
        resident=2**60, losses=points, validation=sets[0][1], validations=sets,
        lost=12345, damaged=("plan.json", "run.json", "measured.json"),
    )  # fmt: skip
    for blocks in (True, False):
        assert not too_long(report_text(ran, Style(blocks=blocks)).splitlines(), columns)


@pytest.mark.parametrize("columns", WIDTHS)
def test_no_line_of_hosts_and_checks_is_too_long(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    host = Host(name="a-host-with-quite-a-long-name.of.some.cluster.example.org", slots=tuple(range(8)))
    facts = {"versions": {"python": "3.11.7", "torch": "2.13.0+cu130"}, "cards": [{}] * 8, "folder": {"free": 2**45}, "cores": 128}
    seen = HostState(host=host, seconds=0.4, facts=facts, drift=0.0, links={"reached": ["x"]})
    report = PreflightReport(seen=(seen, seen), problems=(), notes=("clocks differ, and so on, " * 6,), hosts=(host,), rate=1e9)
    assert not too_long(list(preflight_lines(report, {host.name})), columns)
    check = MachineCheck(
        "disk", "problem", "4.00 KiB free in /a/folder " + "of some depth " * 8, "make room, or set log.dir to another disk"
    )
    assert not too_long(wrap(str(check), hang=" " * 9), columns)


@pytest.mark.parametrize(
    ("said", "columns"),
    [("20", MIN_WIDTH), ("100", 100), ("1000", MAX_WIDTH), ("", DEFAULT_WIDTH), ("many", DEFAULT_WIDTH), ("0", DEFAULT_WIDTH)],
)
def test_COLUMNS_sets_the_page_width_within_bounds(said: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", said)
    assert page_width() == columns


def test_a_page_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import struct
    import termios

    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 97, 0, 0))
    with os.fdopen(ours, "rb", buffering=0), os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        assert page_width() == 97


def test_piped_output_has_the_default_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with (tmp_path / "page.txt").open("w") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert page_width() == DEFAULT_WIDTH


cell = some.text("abcdefgh 0123", max_size=30)


grids = some.integers(1, 5).flatmap(lambda count: some.lists(some.lists(cell, min_size=count, max_size=count), min_size=2, max_size=5))


@given(grids)
def test_a_narrow_table_loses_no_word(rows: list[list[str]]) -> None:
    said = {word.strip(";") for word in " ".join(narrow_table(rows, width=40)).split()}
    assert {word for row in rows for each in row for word in each.split()} <= said
