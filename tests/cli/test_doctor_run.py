"""`distrain doctor conf=...`: a line for each thing that one run needs, and status 1 for what `fit` would refuse."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from distrain.cli.app import command
from distrain.cli.config.load import load
from distrain.cli.verbs.doctor import Finding
from distrain.cli.verbs.doctor_run import run_findings
from distrain.cli.verbs.fit import refused
from distrain.trainer.launch.admission import FileChecks
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.lock import held

NAMES = ["python", "distrain", "torch", "deepspeed", "transformers", "tokenizers"]
OF_A_RUN = ["plan", "engine", "devices", "memory", "data", "tokenizer", "weights", "disk", "run folder"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[tuple[str, str, str]]]:
    """The status, and each line as (state, name, the rest)."""
    status = command(shlex.split(words))
    text = capsys.readouterr().out.replace("\n         ", " ")  # where a finding goes on
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    return status, [(state, *rest.partition(": ")[::2]) for state, rest in lines]


def found(*words: str, conf: str = "quickstart") -> dict[str, Finding]:
    """The findings of a run by name, a problem before all else that is said of its subject."""
    run = load(conf, words)
    rows = [*run_findings(run, make_plan(run), hosted=False)]
    order = ("ok", "warning", "problem")
    return {each.name: each for each in sorted(rows, key=lambda each: order.index(each.state))}


def test_a_run_that_can_start_gets_a_line_each_and_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = said("doctor conf=quickstart", capsys)
    assert status == 0
    assert list(dict.fromkeys(name for _, name, _ in rows)) == NAMES + OF_A_RUN
    assert {state for state, _, _ in rows} <= {"ok", "warning"}
    assert ("ok", "engine", "zero runs it") in rows
    assert ("ok", "run folder", "runs/quickstart is new") in rows
    assert os.listdir() == [], "looking writes nothing"


TABLE: list[tuple[str, tuple[str, ...]]] = [
    ("plan", ("parallel.tp=3",)),
    ("plan", ("model.hidden=65536", "model.heads=64", "model.layers=400")),
    ("engine", ("parallel.zero=1", "parallel.shard=1")),
    ("devices", ("cluster=dgx_h100", "train.precision=bf16", "train.batch=64")),
    ("devices", ("cluster=100x100", "train.batch=10000", "train.microbatch=1", "parallel.zero=0")),
    ("data", ("data=text",)),
    ("data", ("data=tokens", "data.path=nowhere.bin")),
    ("data", ("data=text", "data.path=[there.txt,'*.md']")),
    ("tokenizer", ("data=text", "data.path=there.txt", "data.tokenizer=nowhere.json")),
    ("weights", ("model.weights=nowhere",)),
    ("disk", ("log.dir=/proc",)),
]


@pytest.mark.parametrize(("name", "words"), TABLE, ids=str)
def test_what_is_missing_is_a_problem_of_its_subject(name: str, words: tuple[str, ...]) -> None:
    Path("there.txt").write_text("text\n")
    problems = {each.name for each in found(*words).values() if each.state == "problem"}
    assert name in problems, found(*words)
    assert problems <= {name, "disk"}  # a model that does not fit leaves no room for its checkpoints either


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.tp=3",),
        ("train.precision=fp16", "device=cpu"),
        ("model.weights=nowhere",),
        ("data=text", "data.path=nowhere.txt"),
        ("checkpoint.resume=must",),
        ("checkpoint.accept=[optim.lrr]",),
        ("cluster=dgx_h100", "train.precision=bf16"),
        ("launch=deepspeed", "launch.hostfile=nowhere"),
        ("parallel.shard=2", "parallel.zero=1"),
    ],
    ids=" ".join,
)
def test_what_fit_refuses_is_a_problem_in_the_same_words(words: tuple[str, ...]) -> None:
    run = load("quickstart", words)
    rows = [(each.says, each.mend) for each in run_findings(run, make_plan(run), hosted=False) if each.state == "problem"]
    wrong = (*refused(run, make_plan(run)), *FileChecks().look(run).problems)
    assert wrong
    assert {(each.says, each.mend) for each in wrong} <= set(rows)


@pytest.mark.parametrize("name", ["torchrun", "slurm"])
def test_a_launch_that_is_anothers_is_a_warning(name: str) -> None:
    Path("hosts").write_text("h1 slots=2\n")
    more = ("launch.hostfile=hosts",) if name == "torchrun" else ()
    assert found(f"launch={name}", *more)["devices"].state == "warning"


# Data, tokenizer, weights


def test_data_are_looked_at() -> None:
    Path("corpus").mkdir()
    Path("corpus/a.txt").write_text("some text\n" * 1000)
    row = found("data=text", "data.path=corpus")["data"]
    assert row.state == "ok"
    assert re.fullmatch(r"(about )?[\d,]+ tokens, (about )?\d+ documents", row.says)


def test_a_run_that_wants_far_more_tokens_than_there_are_is_a_warning() -> None:
    Path("a.txt").write_text("some text\n" * 1000)
    assert "epochs" in found("data=text", "data.path=a.txt")["plan"].says


def test_weights_are_counted() -> None:
    Path("W").mkdir()
    for name, content in {"config.json": b"{}", "a.safetensors": b"x" * 1024, "b.safetensors": b"x" * 1024}.items():
        (Path("W") / name).write_bytes(content)
    assert found("model.weights=W")["weights"].says == f"{Path.cwd()}/W: 2 files, 2.00 KiB"


# Room


def test_disk_is_counted_for_the_checkpoints_that_are_there_at_once() -> None:
    one = make_plan(load("quickstart")).run
    assert one is not None
    for words, number in (
        ((), 1),
        (("checkpoint.every=100",), 3),
        (("checkpoint.every=10", "checkpoint.keep=5"), 6),
        (("checkpoint.every=150",), 2),
    ):
        assert f": {number} of 37.3 MiB" in found(*words)["disk"].says


def test_a_disk_that_is_too_small_is_a_problem_or_a_warning(disk: Path) -> None:
    assert found(f"log.dir={disk}/runs")["disk"].state == "problem"
    small = ("model=tiny", "model.layers=1", "model.ffn=64", "train.seq=16", "checkpoint.every=100", f"log.dir={disk}")
    row = found(*small)["disk"]
    assert (row.state, row.mend) == ("warning", "make room, set log.dir to another disk, or checkpoint.keep below 2"), row


def test_what_checkpoints_take_already_counts_as_room(disk: Path) -> None:
    small = ("model=tiny", "model.layers=1", "model.ffn=64", "train.seq=16", "checkpoint.every=300", f"log.dir={disk}")
    (disk / "quickstart/checkpoints/step_300").mkdir(parents=True)
    (disk / "quickstart/checkpoints/step_300/x").write_bytes(b"0" * 700_000)
    assert found(*small)["disk"].state == "ok"
    (disk / "quickstart/checkpoints/step_300/x").rename(disk / "x")
    assert found(*small)["disk"].state == "problem"


def test_ranks_that_take_more_memory_than_is_free_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrain.cli.verbs.doctor_run.memory_free", lambda: 600_000_000)
    assert found()["memory"].state == "warning"
    assert found("cluster=1x1")["memory"].state == "ok"


def test_cards_are_held_against_the_recipes_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def cards(name: str, memory: float) -> None:
        facts: dict[str, Any] = {"cuda": [{"name": name, "memory": memory, "units": 132, "bf16": True}] * 8, "cpu": None}
        monkeypatch.setattr(facts, "found", lambda: facts)

    words = ("cluster=dgx_h100", "train.precision=bf16", "train.batch=64")
    cards("NVIDIA H100 80GB HBM3", 84.9e9)
    assert found(*words)["devices"] == Finding("devices", "ok", "NVIDIA H100 80GB HBM3, 79.1 GiB")
    cards("NVIDIA A100-SXM4-40GB", 42.3e9)
    row = found(*words)["devices"]
    assert (row.state, row.mend) == ("warning", "plan with it: device=a100_40g")
    cards("Some Card", 42.3e9)
    assert found(*words)["devices"].mend == "set cluster.device.memory to what it has"


# The run's folder


SMALL = ("model=tiny", "model.layers=1", "cluster=1x1", "train.seq=16", "train.batch=4", "train.microbatch=4", "optim.warmup=1")


def test_the_folder_of_a_run_says_what_a_start_in_it_does(ranks: Any, tmp_path: Path) -> None:
    words = (*SMALL, "data=synthetic", f"log.dir={tmp_path}/runs", "train.steps=3")
    assert found(*words)["run folder"].says == "runs/quickstart is new"
    ranks.trained(tmp_path / "runs" / "quickstart", "quickstart", *SMALL, "data=synthetic", "train.steps=2")
    assert found(*words)["run folder"].says == "runs/quickstart is there (finished); a start in it goes on from step 2"
    assert found(*words, "checkpoint.resume=never")["run folder"].state == "problem"
    with held(tmp_path / "runs" / "quickstart"):
        assert found(*words)["run folder"] == Finding(
            "run folder", "problem", "runs/quickstart is being trained in", "stop that run, or set name= to train another"
        )


def test_a_hostile_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = said("""doctor conf=quickstart data=text 'data.path="a\nb\x1b[31m"'""", capsys)
    assert status == 1
    assert [row for row in rows if row[1] == "data"] == [("problem", "data", "data.path=a\\nb\\x1b[31m matches no file")]


def test_wrong_words_leave_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["doctor", "quickstart"]) == 2
    assert capsys.readouterr().err == "distrain: quickstart stands alone: write conf=quickstart\n"
    assert command(["doctor", "conf=quickstart", "launch=deepspeed", "launch.hostfile=nowhere"]) == 2
