"""A `fit` that is refused changes no file, whether the command line refuses it or the ranks that it started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import json as encoder

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.overrides import without_repeats
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.files import write_outcome
from distrain.trainer.rundir.run_summary import run_summary

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

OVERRIDES = (
    "model=tiny", "model.layers=1", "data=synthetic", "cluster=1x1", "parallel.zero=0", "train.batch=4",
    "train.seq=16", "train.microbatch=4", "train.steps=2", "train.evaluate.every=0", "optim.warmup=0", "name=run",
)  # fmt: skip


WORDS = ("fit", "conf=quickstart", *OVERRIDES)


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log folder of a run that has trained two steps."""
    folder = tmp_path_factory.mktemp("trained")
    run = load_recipe("quickstart", [*OVERRIDES, f"log.dir={folder}"])
    ranks.train(folder / "run", "quickstart", *OVERRIDES)
    (folder / "run" / "plan.json").write_bytes(encoder.encode(make_plan(run)))  # as the controller does
    return folder


@pytest.fixture
def logs(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that log folder, which a test may change."""
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of every file by its name, except for the logs of started ranks, and the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "ranks" and path.name != "lock")
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


# fmt: off
REFUSED = (
    ("model.heads=2",                                "model.heads was 4 when step 2 was saved, and is 2 now"),
    ("model.act=relu",                               "model.act was gelu_tanh when step 2 was saved, and is relu now"),
    ("model.layers=2",                               "model.layers was 1 when step 2 was saved, and is 2 now"),
    ("optim=sgd",                                    "optim.name was adamw when step 2 was saved, and is sgd now"),
    ("data.documents=true",                          "data.documents was false when step 2 was saved, and is true now"),
    ("checkpoint.resume=never",                      "checkpoint.resume=never, but "),
    ("checkpoint.accept=[model.heads]",              "checkpoint.accept=[model.heads] is not a key that can be accepted"),
    ("parallel.tp=3",                                "tp 3 x cp 1 x pp 1 = 3 does not divide"),
    ("train.precision=fp4",                          "engine zero does not run train.precision=fp4"),
    ("data=text data.path=/nothing.txt",             "data.path=/nothing.txt: no such file or folder"),
)
# fmt: on


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_run_refused_by_the_command_line_changes_nothing(logs: Path, capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    before = contents(logs)
    assert command([*WORDS, f"log.dir={logs}", "train.steps=4", *words.split()]) == 1
    assert any(line.startswith(f"distrain: {says}") for line in capsys.readouterr().err.splitlines())
    assert contents(logs) == before


def test_a_run_refused_by_its_ranks_changes_nothing_and_prints_one_line(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (logs / "run" / "checkpoints" / "step_2").glob("weight.*")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    before = contents(logs)
    assert command(without_repeats(*WORDS, f"log.dir={logs}", "train.steps=4", "optim.lr=5e-4")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"distrain: no checkpoint in {logs}/run/checkpoints verifies (step_2: {file.name} is not as it was written (its hash differs)): "
        "restore one of them, or set name=NEW to train another run"
    )
    assert contents(logs) == before


def test_a_run_that_is_refused_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*WORDS, f"log.dir={tmp_path}/runs", "checkpoint.resume=must"]) == 1
    assert "checkpoint.resume=must, but no checkpoint in " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_fit_of_a_finished_run_keeps_its_run_json(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (logs / "run" / name).read_bytes() for name in ("run.json", "plan.json")}
    assert command([*WORDS, f"log.dir={logs}", "train.precision=bf16", "optim.lr=5e-4"]) == 0
    assert "nothing to train" in capsys.readouterr().out
    assert {name: (logs / "run" / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(("steps", "state"), [(2, "finished"), (6, "stopped")])
def test_fit_without_a_step_left_ends_a_stopped_run_only_if_it_has_every_step(steps: int, state: str, logs: Path) -> None:
    run = logs / "run"
    for name, part in (("run.json", "train"), ("plan.json", "run")):
        written = json.loads((run / name).read_text())
        written[part]["steps"] = steps
        (run / name).write_text(json.dumps(written))
    write_outcome(run, 75, "stopped; a checkpoint is saved: the same command continues")
    assert command([*WORDS, f"log.dir={logs}"]) == 0
    found = run_summary(run)
    assert (found.steps, found.of, found.state) == (2, steps, state)


def test_a_resumed_run_writes_its_new_run_json(logs: Path) -> None:
    assert command(without_repeats(*WORDS, f"log.dir={logs}", "train.steps=3", "optim.lr=5e-4")) == 0
    written = json.loads((logs / "run" / "run.json").read_text())
    assert (written["train"]["steps"], written["optim"]["lr"]) == (3, 5e-4)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("/nowhere/at/all")])
def test_metrics_jsonl_that_is_not_a_plain_file_is_refused_before_the_start(
    make: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / "metrics.jsonl")
    assert command([*WORDS, f"log.dir={tmp_path}"]) == 1
    says = f"distrain: {tmp_path}/run/metrics.jsonl is not a plain file, and the run logs its metrics there: move it away\n"
    assert capsys.readouterr().err == says


def test_plan_warns_of_files_that_fit_would_refuse(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS[1:], f"log.dir={logs}", "train.steps=4"]
    assert command(["plan", *without_repeats(*words, "model.heads=2")]) == 0
    page = capsys.readouterr().out
    assert "; `fit` would refuse it on this machine" in " ".join(page.partition("\n\n")[0].split())
    assert "does not run it" not in page
    assert command(["plan", "-m", *without_repeats(*words, "model.heads=2,4")]) == 0
    page = capsys.readouterr().out
    assert [line.split("  ")[1].strip() for line in page.splitlines()[1:3]] == ["fits, refused", "fits"]
    assert "refused: model.heads was 4 when step 2 was saved, and is 2 now" in page


def test_a_mistake_in_the_data_is_told_before_what_has_changed_since_the_checkpoint(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*without_repeats(*WORDS, f"log.dir={logs}", "train.steps=4", "data=text", "data.path=/nowhere.txt")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distrain: data.path=/nowhere.txt: no such file or folder")


def test_show_warns_of_a_launch_script_that_fit_would_refuse(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", "--launch", *without_repeats(*WORDS[1:], f"log.dir={logs}", "model.heads=2")]) == 0
    assert capsys.readouterr().err.startswith("distrain: warning: `fit` would refuse this here: model.heads was 4 ")
