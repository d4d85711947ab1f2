"""Every verb with malformed arguments and files: a line for each problem, the right exit status, no child and no changed file."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from distrain.cli.app import app, command
from distrain.cli.keys.keys import config_keys
from distrain.tests.fakes.folder_state import folder_state
from distrain.tests.fakes.malformed_files import FILES, RAW, damaged_json, fifo, run_folder
from distrain.tests.fakes.processes import children
from distrain.tests.fakes.time_limits import limit_processor_time

VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
MOST_SECONDS = 20  # of processor time
LONGEST = 2200  # characters of a line

# Arguments after which no verb starts a process: fit does not start torchrun, and there are no such weights.
STOPPERS = ("launch=torchrun", "model.weights=/nowhere/at/all")

# fmt: off
KEYS = [*config_keys(), "model", "cluster", "parallel", "device", "train", "hydra", "defaults", "conf", "", "a", "model.layer",
        "train.evaluate", "batch_size", "zero_optimization.stage", "parallel.offload", "cluster.device.peak.bf16", "steps", "layouts"]
VALUES = ["1", "0", "-1", "-0", "1e400", "nan", "inf", "0x10", "1_000", ".5", "'1'", "true", "null", "~", "", "''", "[]", "{}", "[1,2]",
          "{a:{b:1}}", "1,2", "range(1,3)", "range(1,10,0)", "choice(1,2)", "glob(*)", "interval(1,2)", "sort(2,1)", "tag(a,1)", "int(3)",
          "${name}", "${", "${oc.env:NOPE}", "${.x}", "$name", "a b", "a=b", "[", "]", "{", "(", ")", "\\", "'", '"', "#", "%", "é", "日本",
          "\udcff", "\x1b[31m", "\n", "\u202e", "x" * 300, "9" * 5000, "9" * 20, "1" + "0" * 18, "2x4", "2x2x2", "0x0", "9x9x9x9", "8gb",
          "80GiB", "100Gb/s", "4k", "quickstart", "tiny", "/", "..", "../../zz", "/dev/null", "~nobody/x", "-", "--", "???", "dp2",
          "[" * 300, "é" * 20_000]
# fmt: on


def check_command(argv: Sequence[str], kept: Path, *, adds: bool = False) -> str:
    """Run a command line in this process, check what must hold for any, and return its stderr.

    The files in `kept` must not change, and only a verb that `adds` files may create new ones there.
    """
    out, err = io.StringIO(), io.StringIO()
    before, running = folder_state(kept), children_at_first()
    with redirect_stdout(out), redirect_stderr(err), limit_processor_time(MOST_SECONDS):
        status = command(list(argv))
    said = err.getvalue()
    assert status in (0, 1, 2), argv
    assert "Traceback" not in said
    assert "a bug in distrain" not in said
    for line in said.splitlines():
        assert line.startswith(("distrain: ", "wrote ")), said
        assert len(line) <= LONGEST
    assert said or status == 0 or out.getvalue(), f"{argv} exited with {status} without a message"
    assert children(os.getpid()) <= running
    after = folder_state(kept)
    for name in re.findall(r"^wrote (\S+)", out.getvalue() + said, re.MULTILINE):  # a page of ours, which a new one replaces
        before.pop(name, None)
        after.pop(name, None)
    assert {name: after.get(name) for name in (before if adds else after)} == before
    return said


@cache
def children_at_first() -> set[int]:
    """The children of this process when the first command line is run: a look at every process of this machine takes long."""
    return children(os.getpid())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the current folder of the tests, with a run folder, a folder of configs, some of them malformed, and other paths."""
    folder = tmp_path_factory.mktemp("place")
    run_folder(folder / "run")
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "mine.yaml").write_text("# mine\ndefaults: [quickstart]\n")
    (folder / "conf" / "model" / "mine.yaml").write_text("defaults: [tiny]\n")
    for name in ("fifo", "loop of links", "latin-1", "laughs", "folder"):
        FILES[name](folder / "conf" / f"{name.replace(' ', '_')}.yaml")
        FILES[name](folder / "conf" / "model" / f"{name.replace(' ', '_')}.yaml")
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("x")
    fifo(folder / "pipe")
    (folder / "odd").mkdir()
    fifo(folder / "odd" / "run.json")
    with chdir(folder):
        yield folder


words = some.one_of(
    some.sampled_from(VALUES),
    some.text(max_size=8).filter(lambda text: "\0" not in text),
    some.builds(
        "".join,
        some.tuples(
            some.sampled_from(["", "", "", "", "+", "++", "~", "--"]),
            some.sampled_from(KEYS) | some.text(max_size=6).filter(lambda text: "\0" not in text),
            some.sampled_from(["=", "=", "=", "=", "", "==", " =", "@x="]),
            some.sampled_from(VALUES),
        ),
    ),
)
PATHS = [
    "run",
    "full",
    "full/file",
    "pipe",
    "odd",
    "nowhere",
    ".",
    "",
    "/dev/full",
    "~nobody",
    "a\nb",
    "\udcff",
    "x" * 300,
    "run/run.json",
    "-",
]


@some.composite
def command_lines(draw: some.DrawFn, verb: str) -> list[str]:
    """Draw a verb with malformed values for the parameters that it declares."""
    argv, line = [verb], VERBS[verb]
    for row in line.params:
        if isinstance(row, click.Option) or row.param_type_name == "option":
            if draw(some.integers(0, 3)) == 0 or row.required:
                name = draw(some.sampled_from(row.opts))
                folders = ["conf", *PATHS] if name == "--config-dir" else [*VALUES, *PATHS]
                argv += [name] if row.is_flag else [name, draw(some.sampled_from(folders))]
        elif row.nargs == -1 and verb == "report":
            argv += draw(some.lists(some.sampled_from(PATHS) | words, min_size=1, max_size=3))
        elif row.nargs == -1:
            conf = draw(some.sampled_from(["conf=quickstart", "conf=tiny_2x2x2", "conf=mine", "conf=fifo", "conf=./pipe", ""]))
            argv += [*([conf] if conf else []), *draw(some.lists(words, min_size=1, max_size=3)), *STOPPERS]
        else:
            known = [each for each in PATHS if each != "run" or verb == "report"]  # other verbs start a child for a real run
            argv.append(draw(some.sampled_from(known) | words))
    return [word for word in argv if word != "--help"]


@pytest.mark.parametrize("verb", VERBS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=some.data())
def test_a_verb_survives_malformed_arguments(verb: str, data: some.DataObject, place: Path) -> None:
    before = set(place.rglob("*"))
    check_command(data.draw(command_lines(verb)), place, adds=verb == "cp")
    for file in set(place.rglob("*")) - before:
        file.unlink()


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_named_and_leaves_other_files_usable(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "good.yaml").write_text("# a good one\ndefaults: [quickstart]\n")
    for path in (folder / "bad.yaml", folder / "model" / "bad.yaml"):
        FILES[name](path)
    mine = ["--config-dir", str(folder)]
    assert check_command(["ls", *mine], folder) == ""
    for argv in (["plan", f"conf={folder / 'bad.yaml'}"], ["plan", "conf=quickstart", "model=bad", *mine]):
        said = check_command(argv, folder)
        if "can't be read" in said or "UTF-8" in said or ", line " in said:
            assert "bad.yaml" in said
    assert not (tmp_path / "pwned").exists()


NAMES = ("run.json", "plan.json", "measured.json", "metrics.jsonl", "ranks/0.log", "checkpoints/step_6/manifest.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("whole") / "run")


@contextmanager
def copy_of(folder: Path) -> Iterator[Path]:
    """Copy a run folder to the folder `copy` next to it."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    yield copy


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=some.data())
def test_a_damaged_run_has_a_report(data: some.DataObject, whole: Path) -> None:
    with copy_of(whole) as folder:
        for name in data.draw(some.lists(some.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
            raw = (folder / name).read_bytes()
            if data.draw(some.booleans()) and name.endswith(("json", "jsonl")):
                rows = [json.loads(line) for line in raw.splitlines()] if name.endswith("jsonl") else [json.loads(raw)]
                (folder / name).write_text("\n".join(json.dumps(data.draw(damaged_json(row))) for row in rows))
            else:
                (folder / name).write_bytes(RAW[data.draw(some.sampled_from(sorted(RAW)))](raw))
        for more in ([], ["--json"]):
            assert check_command(["report", str(folder), *more], folder) == ""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["folder", "dangling link", "device", "fifo"])
def test_a_report_does_not_block_on_special_files(what: str, name: str, whole: Path) -> None:
    with copy_of(whole) as folder:
        (folder / name).unlink()
        FILES[what](folder / name)
        assert check_command(["report", str(folder)], folder) == ""
        shutil.rmtree(folder / "checkpoints")  # then only run.json makes it a run folder
        assert bool(check_command(["report", str(folder)], folder)) == (name == "run.json")


def test_every_verb_is_tested() -> None:
    assert {
        "ls",
        "cp",
        "show",
        "plan",
        "search",
        "simulate",
        "fit",
        "prove",
        "report",
        "evaluate",
        "export",
        "generate",
        "calibrate",
        "doctor",
    } <= set(VERBS)
