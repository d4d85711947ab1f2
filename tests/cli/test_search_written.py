"""The recipe that `distrain search -o` writes: it plans as it was found and trains, and no file is lost."""

import json
import shlex
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.tests.cli.test_search import HEAVY_HEAD, SMALL, answer, call
from distrain.trainer.plan.plan import make_plan


@pytest.mark.parametrize("words", ["", "parallel.pp=2", "parallel.tp=2 engine=native", f"{HEAVY_HEAD} search.boundaries=true"])
def test_the_written_recipe_plans_as_it_was_found(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.yaml"
    status, _, err = call(f"{SMALL} {words} -o {file}", capsys)
    assert (status, err) == (0, "")
    row = answer(words, capsys)["rows"][0]
    plan = make_plan(load_recipe(str(file)))
    assert plan.name == "best"
    assert plan.runnable
    assert plan.memory
    assert plan.time
    assert (plan.memory.peak, plan.time.step) == (row["memory"], row["step"])


def test_a_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.yaml"
    file.write_text("mine")
    status, out, err = call(f"{SMALL} search.rows=1 -o {file}", capsys)
    assert (status, out) == (2, "")
    assert err == f"distrain: {file} already exists: name another file, or remove it first\n"
    assert file.read_text() == "mine"


def test_a_file_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(f"{SMALL} -o {tmp_path}/none/best.yaml", capsys)
    assert (status, out) == (2, "")
    assert err == f"distrain: {tmp_path}/none/best.yaml: there is no folder {tmp_path}/none: create it first\n"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("best.md", "best.md does not end in .yaml or .yml: name it best.yaml"),
        ("a/best.tar.gz", "a/best.tar.gz does not end in .yaml or .yml: name it a/best.tar.yaml"),
        ("''", "'' is not the name of a file: name one that ends in .yaml"),
        ("-", "'-' is not the name of a file: name one that ends in .yaml"),
    ],
)
def test_a_file_of_another_kind_is_refused_before_the_search(file: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(f"{SMALL} -o {file}", capsys) == (2, "", f"distrain: {line}\n")


def test_a_folder_that_can_only_be_read_is_refused_before_the_search(read_only_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = read_only_disk / "best.yaml"
    says = f"{file} can't be written: no file can be created in {read_only_disk}: choose another folder"
    assert call(f"{SMALL} -o {file}", capsys) == (2, "", f"distrain: {says}\n")


def test_json_is_all_of_stdout_where_a_recipe_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(f"{SMALL} search.rows=1 --json -o {tmp_path}/best", capsys)
    assert (status, len(json.loads(out)["rows"])) == (0, 1)
    assert err.startswith(f"wrote {tmp_path}/best.yaml; next: ")


RATES = ("cluster.device.peak={fp32: 5e10}", "cluster.device.bandwidth=1e10", "cluster.inside={bandwidth: 1e10, latency: 1e-5}")
TWO_STAGES = (
    "parallel.pp=2 parallel.schedule=1f1b model.layers=8 model.hidden=64 model.vocab=9000 train.seq=64 search.boundaries=true "
    + shlex.join(RATES)
)


def test_a_written_recipe_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine, as it was planned: the best layout of two processes, three steps, with stages of its own."""
    file = tmp_path / "found.yaml"
    words = "cluster=1x2 train.steps=3 train.evaluate.every=0 data=synthetic optim.warmup=0"
    assert call(f"conf=quickstart {words} {TWO_STAGES} -o {file}", capsys)[0] == 0
    first, last = load_recipe(str(file)).parallel.stages or (0, 0)
    assert first > last
    status = command(["fit", f"conf={file}", f"log.dir={tmp_path}"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert "step 3/3" in out
