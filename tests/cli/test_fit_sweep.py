"""`distrain fit -m`: the names of a sweep's runs, the checks before the first run, and the exit status of the sweep."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from distrain.cli.app import command
from distrain.cli.verbs.fit_sweep import LONGEST_NAME, fit_sweep, sweep_name, sweep_runs
from distrain.trainer.launch.train_run import TrainingResult
from distrain.trainer.rundir.files import run_folder
from distrain.trainer.rundir.metric_rows import read_step_rows
from distrain.trainer.rundir.run_summary import run_summary
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Run

SMALL = (
    "model=tiny",
    "cluster=1x1",
    "train.batch=4",
    "train.microbatch=4",
    "train.seq=16",
    "train.steps=4",
    "optim.warmup=1",
    "log.every=1",
)
WORDS = (*SMALL, "data=synthetic", "train.precision=fp32", "train.evaluate={every: 2, batches: 1}")


# Names


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), "mine"),
        (("optim.lr=0.001",), "mine.lr=0.001"),
        (("optim.lr=0.001", "parallel.tp=2"), "mine.lr=0.001.tp=2"),
        (("parallel.schedule=gpipe",), "mine.parallel.schedule=gpipe"),  # the optimizer has a schedule too
        (("model=tiny",), "mine.model=tiny"),
        (("+optim.lr=0.001",), "mine.lr=0.001"),
        (("conf=mine", "name=mine", "train.seed=1"), "mine.seed=1"),
        (("data.path=/a/b.txt",), "mine.path=a_b.txt-2bf2a18b"),
        (("optim.betas=[0.9,0.99]",), "mine.betas=0.9_0.99-fe0d5a2a"),
    ],
)
def test_a_run_of_a_sweep_is_named_by_its_overrides(words: tuple[str, ...], name: str) -> None:
    found = sweep_name("mine", words)
    if "-" in name:  # the digest: of the word
        assert re.fullmatch(re.escape(name[:-8]) + "[0-9a-f]{8}", found)
    else:
        assert found == name


values = st.text(max_size=8) | st.text(st.sampled_from("ab.=-_/ 1"), max_size=300)
rows = st.tuples(values, values)


@given(one=rows, two=rows)
def test_different_values_have_different_folders_with_shell_safe_names(one: tuple[str, str], two: tuple[str, str]) -> None:
    names = [sweep_name("mine", (f"data.text_key={row[0]}", f"optim.lr={row[1]}")) for row in (one, two)]
    assert (names[0] == names[1]) == (one == two)
    assert all(re.fullmatch(r"[A-Za-z0-9._=:-]+", name) and len(name) <= LONGEST_NAME + 20 for name in names)


@given(key=st.sampled_from(["optim.lr", "train.seed", "data.text_key"]), other=st.sampled_from(["log.dir", "data.cache"]), value=values)
def test_the_same_value_of_another_key_has_another_folder(key: str, other: str, value: str) -> None:
    assert sweep_name("mine", (f"{key}={value}",)) != sweep_name("mine", (f"{other}={value}",))


def test_1e_3_and_0_001_have_the_same_folder(tmp_path: Path) -> None:
    names = [[each.run.name for each in sweep_runs("quickstart", (f"optim.lr={lr}",), None)] for lr in ("1e-3,2e-3", "0.001,0.002")]
    assert names[0] == names[1] == ["quickstart.lr=0.001", "quickstart.lr=0.002"]


def test_recipes_that_are_swept_keep_their_own_names() -> None:
    assert [each.run.name for each in sweep_runs("quickstart,tiny_2x2x2", (), None)] == ["quickstart", "tiny_2x2x2"]
    assert [each.run.name for each in sweep_runs("quickstart", ("name=a,b", "train.seed=1,2"), None)] == [
        f"{name}.seed={seed}" for name in "ab" for seed in (1, 2)
    ]


def test_runs_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"2 runs of the sweep would share .*/quickstart.seed=1: remove what is listed twice"):
        sweep_runs("quickstart", ("train.seed=1,1",), None)


# Checks before the first run, and the sweep's exit status


def sweep(tmp_path: Path, fit: Callable[[Callable[[], Run]], TrainingResult], *words: str) -> int:
    return fit_sweep("quickstart", (*WORDS, f"log.dir={tmp_path}/runs", *words), None, fit)


def test_all_runs_are_checked_before_the_first_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["fit", "-m", "conf=quickstart", *WORDS, f"log.dir={tmp_path}/runs", "parallel.tp=1,3", "optim.lr=1e-3,2e-3"]) == 1
    out, err = capsys.readouterr()
    assert "run 1 of" not in out
    assert {line.partition(": ")[2].partition(":")[0] for line in err.splitlines()} == {"tp=3 lr=0.001", "tp=3 lr=0.002"}
    assert not (tmp_path / "runs").exists()


def test_all_wrong_overrides_of_a_sweep_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["fit", "-m", "conf=quickstart", "train.batch=4,x", "optim.lrr=1,2"]) == 2
    out, err = capsys.readouterr()
    assert (out, sorted(err.splitlines())) == (
        "",
        ["distrain: no key optim.lrr: did you mean optim.lr?", "distrain: train.batch=x is not a whole number, at least 1"],
    )


@pytest.mark.parametrize(
    ("statuses", "status", "told"),
    [
        ([0, 0, 0], 0, ["trained"] * 3),
        ([0, 1, 0], 1, ["trained", "failed", "trained"]),
        ([0, 75], 75, ["trained", "stopped and saved", "not started"]),
        ([1, 130], 130, ["failed", "stopped", "not started"]),
    ],
)
def test_a_sweep_goes_on_after_a_failure_and_ends_when_it_is_stopped(
    statuses: list[int],
    status: int,
    told: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coming, names, groups = iter(statuses), [], set()

    def fit(read: Callable[[], Run]) -> TrainingResult:
        names.append(read().name)
        groups.add(os.environ["WANDB_RUN_GROUP"])
        return TrainingResult(status=next(coming))

    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    assert sweep(tmp_path, fit, "train.seed=1,2,3") == status
    assert (groups, os.environ.get("WANDB_RUN_GROUP")) == ({"quickstart"}, None)
    assert names == [f"quickstart.seed={seed}" for seed in (1, 2, 3)][: len(statuses)]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed=")]
    assert [row.split(maxsplit=4)[4] for row in rows] == told


def test_a_run_that_finishes_after_a_stop_request_is_the_last(tmp_path: Path) -> None:
    started: list[str] = []

    def fit(read: Callable[[], Run]) -> TrainingResult:
        started.append(read().name)
        return TrainingResult(status=0, stop_signals=(signal.SIGINT,))

    assert sweep(tmp_path, fit, "train.seed=1,2") == 130
    assert started == ["quickstart.seed=1"]


def test_ctrl_c_between_runs_is_no_traceback(tmp_path: Path) -> None:
    def fit(read: Callable[[], Run]) -> TrainingResult:
        raise KeyboardInterrupt

    assert sweep(tmp_path, fit, "train.seed=1,2") == 130


@pytest.mark.parametrize(("key", "words"), [("validation_loss", "validation loss at step 4: seed=3"), ("loss", "loss at step 4: seed=2")])
def test_the_run_with_the_lowest_last_loss_is_named(key: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = iter([(2.0, 2.1, 0), (1.5, 1.9, 0), (1.8, 1.2, 0), (0.1, 0.1, 1), (None, 3.0, 0)])

    def fit(read: Callable[[], Run]) -> TrainingResult:
        folder = run_folder(read())
        folder.mkdir(parents=True)
        loss, validation, status = next(rows)
        row = {"step": 4, "loss": loss, "validation_loss": validation} if key != "loss" else {"step": 4, "loss": loss}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return TrainingResult(status=status)

    assert sweep(tmp_path, fit, "train.seed=1,2,3,4,5") == 1
    assert f"\nlowest {words}\n" in capsys.readouterr().out


# Whole sweeps


def test_a_sweep_trains_each_run_in_its_own_folder_and_goes_on_after_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "-m", "conf=quickstart", *WORDS, f"log.dir={tmp_path}/runs", "optim.lr=1e30,1e-3", "train.skip=0"]
    assert command(words) == 1
    out, err = capsys.readouterr()
    failed, trained = (tmp_path / "runs" / name for name in sorted(os.listdir(tmp_path / "runs"), reverse=True))
    assert (run_summary(failed).state, run_summary(trained).state) == ("failed", "finished")
    rows = read_step_rows(trained)
    table = [line.split(maxsplit=4) for line in out.splitlines() if re.match(r"lr=\S+ +\S+ +\S+ +\S+ +\w", line)]
    assert [(row[0], row[4]) for row in table] == [("lr=1e+30", "failed"), ("lr=0.001", "trained")]
    assert table[1][1:3] == [f"{rows[-1]['loss']:.4f}", f"{rows[-1]['validation_loss']:.4f}"]
    assert json.loads((trained / "run.json").read_text())["optim"]["lr"] == 1e-3
    assert "not finite" in err


def test_ctrl_c_saves_and_ends_the_sweep(tmp_path: Path) -> None:
    words = ["-m", "conf=quickstart", *WORDS, f"log.dir={tmp_path}/runs", "train.seed=1,2", "train.steps=100000"]
    with subprocess.Popen([sys.executable, "-m", "distrain", "fit", *words], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [next(line for line in child.stdout if line.startswith("step "))]
        child.send_signal(signal.SIGINT)
        said += child.stdout.readlines()
    assert child.returncode == 75
    assert [line.split(maxsplit=4)[4] for line in said if line.startswith("seed=")] == ["stopped and saved\n", "not started\n"]
    first = run_summary(tmp_path / "runs" / "quickstart.seed=1")
    assert (first.state, first.checkpoint) == ("stopped", first.steps)
    assert os.listdir(tmp_path / "runs") == ["quickstart.seed=1"]
