"""A `fit` that is refused changes nothing on the disk, whoever refuses it: the command line, or the ranks that it started."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.tests.unrepeated import unrepeated

WORDS = (
    "fit", "conf=quickstart", "model=tiny", "model.layers=1", "data=synthetic", "cluster=1x1", "parallel.zero=0", "train.batch=4",
    "train.seq=16", "train.microbatch=4", "train.steps=2", "train.evaluate.every=0", "optim.warmup=0", "name=run",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log folder of a run that has trained two steps."""
    top = tmp_path_factory.mktemp("trained")
    assert command([*WORDS, f"log.dir={top}"]) == 0
    return top


@pytest.fixture
def used(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file by its name, but for the logs of ranks that were started, and the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "ranks" and path.name != "lock")
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


# fmt: off
REFUSED = (
    ("model.heads=2",                                "model.heads was 4 when step 2 was saved, and is 2 now"),
    ("model.act=relu",                               "model.act was gelu_tanh when step 2 was saved, and is relu now"),
    ("model.layers=2",                               "model.layers was 1 when step 2 was saved, and is 2 now"),
    ("optim=sgd",                                    "optim.name was adamw when step 2 was saved, and is sgd now"),
    ("data.documents=true",                          "data.documents was false when step 2 was saved, and is true now"),
    ("checkpoint.resume=never",                      "checkpoint.resume=never and "),
    ("checkpoint.accept=[model.heads]",              "checkpoint.accept=[model.heads] is no key that can be accepted"),
    ("parallel.tp=3",                                "tp 3 x pp 1 x cp 1 = 3 does not divide"),
    ("train.precision=fp8",                          "engine zero does not run train.precision=fp8"),
    ("data=text data.path=/nothing.txt",             "data.path=/nothing.txt: no such file or folder"),
)
# fmt: on


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_the_command_line_refuses_changes_nothing(used: Path, capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    before = contents(used)
    assert command([*WORDS, f"log.dir={used}", "train.steps=4", *words.split()]) == 1
    assert any(line.startswith(f"distrain: {says}") for line in capsys.readouterr().err.splitlines())
    assert contents(used) == before


def test_what_ranks_refuse_changes_nothing_and_is_no_fault_of_theirs(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (used / "run" / "checkpoints" / "step_2").glob("weight.*")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    before = contents(used)
    assert command(unrepeated(*WORDS, f"log.dir={used}", "train.steps=4", "optim.lr=5e-4")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"distrain: no checkpoint in {used}/run/checkpoints verifies (step_2: {file.name} is not as it was written (its hash differs)): "
        "restore one of them, or set checkpoint.resume=never to begin anew"
    )
    assert contents(used) == before


def test_a_run_that_is_refused_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*WORDS, f"log.dir={tmp_path}/runs", "checkpoint.resume=must"]) == 1
    assert "checkpoint.resume=must and no checkpoint in " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
