"""`distrain doctor conf=...`: a line for each check of one run, and exit status 1 where `fit` would refuse it."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.trainer.launch.admission import check_start
from distrain.trainer.launch.doctor_run_checks import checks_of_run
from distrain.trainer.launch.file_checks import FileChecks
from distrain.trainer.machine import measure_machine as machine
from distrain.trainer.machine.doctor_checks import MachineCheck
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.lock import hold_run_folder

NAMES = ["python", "distrain", "torch", "deepspeed", "transformers", "tokenizers"]
OF_A_RUN = ["plan", "engine", "devices", "memory", "data", "tokenizer", "weights", "disk", "run folder"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_command(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[tuple[str, str, str]]]:
    """Run a command; its exit status, and each line as (state, subject, the rest)."""
    status = command(shlex.split(line))
    text = capsys.readouterr().out.replace("\n         ", " ")  # lines that a check was wrapped to
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    return status, [(state, *rest.partition(": ")[::2]) for state, rest in lines]


def all_checks(*overrides: str) -> list[MachineCheck]:
    """The checks of the quickstart with overrides."""
    run = load_recipe("quickstart", overrides)
    return [*checks_of_run(run, make_plan(run), "fits", hosted=False)]


def checks(*overrides: str) -> dict[str, MachineCheck]:
    """The checks of the quickstart by subject: of several, the worst."""
    order = ("ok", "warning", "problem")
    return {each.name: each for each in sorted(all_checks(*overrides), key=lambda each: order.index(each.state))}


def test_a_run_that_can_start_has_no_problem_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run_command("doctor conf=quickstart", capsys)
    assert status == 0
    assert list(dict.fromkeys(name for _, name, _ in rows)) == NAMES + OF_A_RUN
    assert {state for state, _, _ in rows} <= {"ok", "warning"}
    assert ("ok", "engine", "zero runs it") in rows
    assert ("ok", "run folder", "runs/quickstart is new") in rows
    assert os.listdir() == [], "looking writes nothing"


TABLE: list[tuple[str, tuple[str, ...]]] = [
    ("plan", ("parallel.tp=3",)),
    ("plan", ("model.hidden=65536", "model.heads=64", "model.layers=400")),
    ("engine", ("parallel.reduce=tree",)),
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
def test_a_missing_thing_is_a_problem_of_its_subject(name: str, words: tuple[str, ...]) -> None:
    Path("there.txt").write_text("text\n")
    problems = {each.name for each in checks(*words).values() if each.state == "problem"}
    assert name in problems, checks(*words)
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
        ("parallel.reduce=tree",),
        ("model=tiny_hybrid", "train.linear_attention=fla", "device=cpu"),
    ],
    ids=" ".join,
)
def test_doctor_reports_what_fit_refuses_with_the_same_message(words: tuple[str, ...]) -> None:
    run = load_recipe("quickstart", words)
    rows = [(each.says, each.mend) for each in all_checks(*words) if each.state == "problem"]
    wrong = (*check_start(run, make_plan(run)).problems, *FileChecks().check_run(run).problems)
    assert wrong
    assert {(each.says, each.mend) for each in wrong} <= set(rows)


@pytest.mark.parametrize("name", ["torchrun", "slurm"])
def test_a_launch_that_the_user_starts_is_a_warning(name: str) -> None:
    Path("hosts").write_text("h1 slots=2\n")
    more = ("launch.hostfile=hosts",) if name == "torchrun" else ()
    assert checks(f"launch={name}", *more)["devices"].state == "warning"


# Data, tokenizer, weights


def test_tokens_and_documents_are_counted() -> None:
    Path("corpus").mkdir()
    Path("corpus/a.txt").write_text("some text\n" * 1000)
    row = checks("data=text", "data.path=corpus")["data"]
    assert row.state == "ok"
    assert re.fullmatch(r"(about )?[\d,]+ tokens, (about )?\d+ documents", row.says)


def test_many_epochs_are_a_warning() -> None:
    Path("a.txt").write_text("some text\n" * 1000)
    assert "epochs" in checks("data=text", "data.path=a.txt")["plan"].says


def test_weight_files_are_counted() -> None:
    Path("W").mkdir()
    for name, content in {"config.json": b"{}", "a.safetensors": b"x" * 1024, "b.safetensors": b"x" * 1024}.items():
        (Path("W") / name).write_bytes(content)
    assert checks("model.weights=W")["weights"].says == f"{Path.cwd()}/W: 2 files, 2.00 KiB"


# Room


def test_disk_space_is_needed_for_the_checkpoints_that_exist_at_once() -> None:
    one = make_plan(load_recipe("quickstart")).run
    assert one is not None
    for words, number in (
        ((), 1),
        (("checkpoint.every=100",), 3),
        (("checkpoint.every=10", "checkpoint.keep=5"), 6),
        (("checkpoint.every=150",), 2),
    ):
        assert f": {number} of 37.3 MiB" in checks(*words)["disk"].says


def test_a_run_that_saves_nothing_needs_no_disk_space(disk: Path) -> None:
    row = checks("checkpoint=never", f"log.dir={disk}/runs")["disk"]
    assert (row.state, "and nothing is saved unless the run is stopped" in row.says) == ("ok", True), row


def test_a_disk_too_small_for_one_checkpoint_is_a_problem_and_for_all_a_warning(disk: Path) -> None:
    assert checks(f"log.dir={disk}/runs")["disk"].state == "problem"
    small = ("model=tiny", "model.layers=1", "model.ffn=64", "train.seq=16", "checkpoint.every=100", f"log.dir={disk}")
    row = checks(*small)["disk"]
    assert (row.state, row.mend) == ("warning", "make room, set log.dir to another disk, or checkpoint.keep below 2"), row


def test_saved_checkpoints_count_as_free_space(disk: Path) -> None:
    small = ("model=tiny", "model.layers=1", "model.ffn=64", "train.seq=16", "checkpoint.every=300", f"log.dir={disk}")
    (disk / "quickstart/checkpoints/step_300").mkdir(parents=True)
    (disk / "quickstart/checkpoints/step_300/x").write_bytes(b"0" * 700_000)
    assert checks(*small)["disk"].state == "ok"
    (disk / "quickstart/checkpoints/step_300/x").rename(disk / "x")
    assert checks(*small)["disk"].state == "problem"


def test_ranks_that_need_more_memory_than_is_free_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrain.trainer.launch.doctor_run_checks.free_memory", lambda: 600_000_000)
    assert checks()["memory"].state == "warning"
    assert checks("cluster=1x1")["memory"].state == "ok"


def test_cards_are_compared_with_the_device_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def cards(name: str, memory: float) -> None:
        facts: dict[str, Any] = {"cuda": [{"name": name, "memory": memory, "units": 132, "bf16": True}] * 8, "cpu": None}
        monkeypatch.setattr(machine, "cached_facts", lambda: facts)

    words = ("cluster=dgx_h100", "train.precision=bf16", "train.batch=64")
    cards("NVIDIA H100 80GB HBM3", 84.9e9)
    assert checks(*words)["devices"] == MachineCheck("devices", "ok", "NVIDIA H100 80GB HBM3, 79.1 GiB")
    cards("NVIDIA A100-SXM4-40GB", 42.3e9)
    row = checks(*words)["devices"]
    assert (row.state, row.mend) == ("warning", "plan with it: device=a100_40g")
    cards("Some Card", 42.3e9)
    assert checks(*words)["devices"].mend == "set cluster.device.memory to its memory"


# The run's folder


SMALL = ("model=tiny", "model.layers=1", "cluster=1x1", "train.seq=16", "train.batch=4", "train.microbatch=4", "optim.warmup=1")


def test_the_run_folder_check_names_the_step_at_which_fit_begins(ranks: Any, tmp_path: Path) -> None:
    words = (*SMALL, "data=synthetic", f"log.dir={tmp_path}/runs", "train.steps=3")
    assert checks(*words)["run folder"].says == "runs/quickstart is new"
    ranks.train(tmp_path / "runs" / "quickstart", "quickstart", *SMALL, "data=synthetic", "train.steps=2")
    assert checks(*words)["run folder"].says == "runs/quickstart exists (finished); `fit` goes on from step 2"
    assert checks(*words, "checkpoint.resume=never")["run folder"].state == "problem"
    with hold_run_folder(tmp_path / "runs" / "quickstart"):
        assert checks(*words)["run folder"] == MachineCheck(
            "run folder", "problem", "another process trains in runs/quickstart", "stop it, or set name= to train another run"
        )


def test_control_characters_in_a_path_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run_command("""doctor conf=quickstart data=text 'data.path="a\nb\x1b[31m"'""", capsys)
    assert status == 1
    assert [row for row in rows if row[1] == "data"] == [("problem", "data", "data.path=a\\nb\\x1b[31m matches no file")]


def test_a_wrong_command_line_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["doctor", "quickstart"]) == 2
    assert capsys.readouterr().err == "distrain: quickstart is neither conf=NAME nor KEY=VALUE: write conf=quickstart\n"
    assert command(["doctor", "conf=quickstart", "launch=deepspeed", "launch.hostfile=nowhere"]) == 2
