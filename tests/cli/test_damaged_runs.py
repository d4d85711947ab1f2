"""Runs that went wrong and run folders with false contents: report, generate and export print one line, or a correct page."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distrain.cli.app import command
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.manifest_edits import drop_record
from distrain.trainer.loop.checkpoint import manifest as manifests
from distrain.trainer.loop.offline import export, generate

SMALL = (
    "cluster=1x1",
    "model=tiny",
    "model.layers=1",
    "train.batch=4",
    "train.microbatch=4",
    "train.seq=16",
    "train.steps=2",
    "optim.warmup=1",
)
EXPORT_OPTIONS = json.dumps({"dtype": "fp32"})
OPTIONS = {"prompt": "a", "tokens": 2, "temperature": 0.8, "top_k": None, "seed": 0, "tokenizer": None}


@pytest.fixture(scope="module")
def trained_run(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ranks.train(folder, "quickstart", *SMALL, "train.evaluate.every=0", "log.every=1", "data=synthetic")
    return folder


@pytest.fixture
def folder(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def poison(folder: Path, value: float) -> None:
    """Put a value into a weight of the checkpoint, and make every logged loss null, as after a run that diverged."""
    step = folder / "checkpoints" / "step_2"
    file = step / "weight.0.0.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)][...] = value
    save_file(tensors, file)
    found, raw = manifests.read_manifest(step), file.read_bytes()
    files = found.files | {file.name: replace(found.files[file.name], bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())}
    (step / "manifest.json").write_bytes(manifests.encode_manifest(replace(found, files=files)))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lost = [row | ({"loss": None, "grad_norm": None} if "loss" in row else {}) for row in rows]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lost))


def run_main(module: Any, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Run a child's main() in this process; its exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "argv", ["x", *argv])
    with redirect_stdout(out), redirect_stderr(err):
        status = module.main()
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_run_has_a_report_but_no_text_and_no_export(
    value: float, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(folder, value)
    assert command(["report", str(folder)]) == 0
    said = capsys.readouterr()
    assert "  the loss of 2 logged steps is not finite\n" in said.out
    assert said.err == ""
    status, _, err = run_main(generate, [str(folder), json.dumps(OPTIONS)], monkeypatch)
    assert (status, err.splitlines()) == (1, [err.rstrip("\n")])
    assert "the model's logits are not finite: the run has diverged" in err
    status, out, err = run_main(export, [str(folder), str(folder.parent / "out"), EXPORT_OPTIONS], monkeypatch)
    assert (status, out, err.splitlines()) == (1, "", [err.rstrip("\n")])
    assert " is not finite: the run has diverged: export an earlier checkpoint" in err
    assert not (folder.parent / "out").exists()


def test_no_token_is_chosen_from_logits_that_are_not_finite() -> None:
    from distrain.trainer.spec.problem import Unreadable

    for logits in ([float("nan"), 1.0], [float("inf"), 1.0], [float("-inf")] * 2):
        for temperature in (0.0, 1.0):
            with pytest.raises(Unreadable, match="not finite"):
                generate.sample_token(torch.tensor(logits), temperature, None, torch.Generator())


# fmt: off
CHANGED: list[tuple[str, Any]] = [
    ("model.layers", 2), ("model.layers", 10**9), ("model.hidden", 63), ("model.hidden", 10**18), ("model.heads", 3), ("model.ffn", 10**15),
    ("model.vocab", 10**12), ("model.family", "moe"), ("model.family", "hf"), ("model.family", "x"), ("model.positions", "rope"),
    ("model.norm", "rmsnorm"), ("model.act", "swiglu"), ("model.head_dim", 5), ("model.context", 7), ("model.layers", "many"),
    ("model.layers", 10**40), ("train.seq", 10**12), ("data.tokenizer", "/nowhere"), ("data.tokenizer", "/dev/zero"),
    ("model.vocab_multiple", 10**9), ("cluster.gpus", 10**9), ("parallel.tp", 64),
]
# fmt: on


@pytest.mark.parametrize(("key", "value"), CHANGED, ids=[f"{key}={value}" for key, value in CHANGED])
def test_a_false_run_json_prints_one_line(key: str, value: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads((folder / "run.json").read_text())
    section, _, name = key.partition(".")
    said[section][name] = value
    drop_record(folder / "checkpoints" / "step_2")  # a checkpoint that records its run is not read with run.json
    (folder / "run.json").write_text(json.dumps(said))
    for module, argv in (
        (generate, [str(folder), json.dumps(OPTIONS)]),
        (export, [str(folder), str(folder.parent / "out"), EXPORT_OPTIONS]),
    ):
        status, _, err = run_main(module, argv, monkeypatch)
        assert status in (0, 1)
        assert all(line.startswith("distrain: ") for line in err.splitlines())
        assert bool([line for line in err.splitlines() if "taking run.json's" not in line]) == bool(status)
        assert "a bug in distrain" not in err


def into_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [os.remove, into_a_fifo, lambda path: path.write_bytes(b"[" * 10**5)])
@pytest.mark.parametrize("name", ["run.json", "checkpoints/step_2/manifest.json"])
def test_a_missing_or_special_file_prints_one_line(
    name: str, change: Callable[[Path], object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_record(folder / "checkpoints" / "step_2")
    change(folder / name)
    status, out, err = run_main(generate, [str(folder), json.dumps(OPTIONS)], monkeypatch)
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith("distrain: ")


STREAMS = ((">/dev/full", "generate"), ("<&- >&- 2>&-", "export"))


@pytest.mark.parametrize(("redirections", "verb"), STREAMS)
def test_generate_and_export_work_with_closed_streams(redirections: str, verb: str, folder: Path, tmp_path: Path) -> None:
    more = ["--prompt", "ab", "--tokens", "2"] if verb == "generate" else [str(tmp_path / "out")]
    script = ["sh", "-c", f'"$@" {redirections}', "sh", sys.executable, "-m", "distrain", verb, str(folder), *more]
    done = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE)
    full = redirections == ">/dev/full"
    assert (done.returncode, done.stderr) == ((1, "distrain: can't write to stdout: No space left on device\n") if full else (0, ""))
    assert done.stdout == ""
    assert (tmp_path / "out" / "model.safetensors").is_file() == (verb == "export")


def test_a_long_prompt_reaches_the_child_and_options_without_effect_are_reported(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompt = '"\n' * 50_000
    words = ["generate", str(folder), "--prompt", prompt, "--tokens", "1", "--temperature", "0", "--top-k", "3", "--seed", "5"]
    assert command(words) == 0
    said = capfd.readouterr()
    assert said.out.startswith(prompt)
    assert said.err.splitlines() == [
        "distrain: --top-k 3 does nothing with --temperature 0",
        "distrain: --seed 5 does nothing with --temperature 0",
        "distrain: the prompt has 100,000 tokens and the model sees 16: only the last 16 count",
    ]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut checkpoint": (lambda run: os.truncate(run / "checkpoints/step_2/weight.0.0.safetensors", 9), "checkpoint step_2: "),
    "half a plan": (lambda run: (run / "plan.json").write_text('{"run": '), "plan.json"),
    "no config": (lambda run: (run / "run.json").write_text('{"a": 1}'), "run.json"),
    "half a row": (lambda run: (run / "metrics.jsonl").open("a").write('{"step": 2, "lo\n'), "1 line of metrics.jsonl"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_report_names_what_is_damaged(damage: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, says = DAMAGE[damage]
    change(folder)
    assert command(["report", str(folder)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 steps" in page
    assert f"damaged and left out: {says}" in page


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_a_report_names_what_is_missing(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run and its steps are then those of its newest checkpoint."""
    (folder / "plan.json").write_text("{}")
    assert command(["report", str(folder)]) == 0
    whole = capsys.readouterr().out
    assert "missing" not in whole
    (folder / name).unlink()
    assert command(["report", str(folder)]) == 0
    page = capsys.readouterr().out
    assert f"  missing: {name}\n" in page
    assert page.startswith("run: 2 of 2 steps")
    assert name != "run.json" or page == whole.replace("\n", "\n  missing: run.json\n", 1)


@pytest.mark.parametrize("line", ['{"step": 2, "lo', '{"step": 2}'])
def test_a_line_that_is_being_written_is_not_damaged(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "metrics.jsonl").open("a") as rows:
        rows.write(line)
    assert command(["report", str(folder)]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_a_folder_of_runs_proposes_the_newest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = folder.rename(folder.with_name("zz_older"))
    newer = Path(shutil.copytree(older, older.with_name("newer")))
    os.utime(older / "run.json", (1, 1))
    assert command(["report", str(newer.parent)]) == 2
    assert f"did you mean {newer}?" in " ".join(capsys.readouterr().err.split())
