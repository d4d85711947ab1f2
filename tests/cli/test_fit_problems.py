"""`distrain fit` refuses a run that can't start before it starts a process, and reports bad data in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from distrain.cli.app import command
from distrain.tests.fakes.overrides import without_repeats

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

SMALL = ("model=tiny", "model.layers=2", "train.batch=8", "train.seq=16", "train.microbatch=2", "train.steps=4", "optim.warmup=0")
# fmt: off
REFUSED = (
    ("engine=pipe parallel.pp=2 parallel.zero=2",
                                           "engine pipe does not run parallel.zero=2: set parallel.zero=1 or parallel.pp=1 engine=auto"),
    ("parallel.pp=2 parallel.dp=1 parallel.zero=3 parallel.schedule=zb_h1 parallel.gather=micro engine=native",
                                           ("engine native does not run parallel.zero=3 with parallel.schedule=zb_h1 and "
                                            "parallel.gather=micro: set parallel.gather=step or parallel.zero=2")),
    ("parallel.pp=2 parallel.dp=1 parallel.schedule=zb_h2",
                                           "parallel.schedule=zb_h2 is not known: did you mean zb_h1?"),
    ("parallel.pp=2 parallel.dp=1 parallel.stages=[2,1]",
                                           ("parallel.stages=[2,1] adds up to 3 layers, not to model.layers=2: "
                                            "set parallel.stages=null")),
    ("parallel.zero=0 parallel.offload.optimizer=true engine=native",
                                           "parallel.offload.optimizer=true needs parallel.zero of 1 or more: set parallel.zero=1"),
    ("parallel.zero=1 parallel.offload.optimizer=true engine=native optim.name=sgd",
                                           ("engine native does not run parallel.offload.optimizer=true with optim.name=sgd: "
                                            "set optim.name=adamw or parallel.offload.optimizer=false")),
    ("launch=slurm",                       ("fit does not start launch=slurm: run what `distrain show --launch` prints for it, "
                                            "or fit launch=deepspeed launch.runner=slurm in a job")),
    ("launch=torchrun",                    "fit does not start launch=torchrun: run what `distrain show --launch` prints for it"),
    ("launch=deepspeed",                   ("launch=deepspeed needs launch.hostfile: name a file with a line per host: host1 slots=2; "
                                            "or set launch=local to use this machine only")),
    ("launch=deepspeed cluster=2x1 parallel.dp=auto",
                                           ("launch=deepspeed needs launch.hostfile: name a file with a line per host: host1 slots=1; "
                                            "or run it in a Slurm job with launch.runner=slurm")),
    ("cluster=4x8 parallel.dp=auto train.batch=64 device=h100_80g",
                                           ("launch=local starts every rank on one machine, and the cluster has 4 nodes of 8 GPUs: "
                                            "set launch=deepspeed launch.hostfile=FILE, or launch=deepspeed launch.runner=slurm "
                                            "in a Slurm job")),
    ("model=bert_large",                   "engine zero does not run model.family=bert: it runs gpt, hf, hybrid, llama, mla or moe"),
    ("train.precision=fp4",                ("engine zero does not run train.precision=fp4: "
                                            "set train.precision=fp32 or train.precision=bf16")),
    ("train.precision=fp16",               ("train.precision=fp16 does not run on a CPU: DeepSpeed accepts it only on the few that "
                                            "multiply in fp16: set train.precision to fp32 or bf16, or engine=native")),
    ("parallel={zero: 1, offload: {parameters: true}}",
                                           "parallel.offload.parameters=true needs parallel.zero=3, not 1: set parallel.zero=3"),
    ("parallel.dp=3",                      ("parallel.dp=3 x tp 1 x cp 1 x pp 1 = 3, but the cluster has 1 x 2 = 2 devices: "
                                            "set parallel.dp=2 or parallel.dp=auto")),
    ("train.batch=7",                      "train.batch=7 is not a multiple of dp 2 x train.microbatch=2: set train.batch=8"),
    ("train.gradients=bf16",               ("train.gradients=bf16 is not supported with train.precision=fp32: "
                                            "set train.gradients=auto or train.gradients=fp32")),
)
# fmt: on


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_cannot_run_is_refused_before_anything_starts(
    words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [words] if words.startswith("parallel={") else words.split()
    status = command(["fit", "conf=quickstart", *SMALL, *given, f"log.dir={tmp_path}"])
    said = capsys.readouterr()
    assert (status, said.out) == (1, "")
    assert f"distrain: {line}" in said.err.splitlines()
    assert not list(tmp_path.iterdir())


# fmt: off
CARELESS = (  # the text of a schedule's file, the place that is named, how the sentence goes on
    ("0F0,0B0\n",                           "the file has 1 row and the pipeline 2 stages", "write one row for each stage"),
    ("0F0,0X0\n1F0,1B0\n",                  "row 1, cell 2",                              "0X0 is not an action"),
    ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n",      "row 2",                                      "stage 1 never runs 1B1, or 1I1 and 1W1"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",  "row 1, cell 2",                              "stage 0 waits for ever to run 0B0"),
)
# fmt: on


@pytest.mark.parametrize(("text", "place", "says"), CARELESS)
@pytest.mark.parametrize("engine", ["auto", "pipe", "native"])
def test_a_careless_file_of_actions_is_refused_in_one_line(
    text: str, place: str, says: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.csv").write_text(text)
    words = (f"engine={engine}", "parallel.pp=2", "parallel.dp=1", f"parallel.schedule={tmp_path}/mine.csv", f"log.dir={tmp_path}/runs")
    assert command(["fit", "conf=quickstart", *SMALL, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"distrain: parallel.schedule={tmp_path}/mine.csv: {place}: {says}")
    assert line.endswith(": fix the file, or name a schedule")
    assert not (tmp_path / "runs").exists()


def test_a_launcher_that_fit_does_not_start_is_its_one_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["fit", "conf=quickstart", *SMALL, "cluster=2x1", "launch=torchrun"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "distrain: fit does not start launch=torchrun: run what `distrain show --launch` prints for it"


# fmt: off
LAUNCH_WARNINGS = (
    ("launch=local",                         ""),
    ("launch=deepspeed",                     "launch=deepspeed needs launch.hostfile: "),
    ("launch=deepspeed launch.runner=slurm", ""),
    ("launch=slurm",                         "fit does not start launch=slurm: "),
    ("launch=torchrun",                      "fit does not start launch=torchrun: "),
)
# fmt: on


@pytest.mark.parametrize(("words", "says"), LAUNCH_WARNINGS)
def test_a_plan_warns_of_a_launch_that_fit_would_refuse(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=megatron_1t_6x8x64", "--json", *words.split()]) == 0
    told = [each["says"] + ": " for each in json.loads(capsys.readouterr().out)["warnings"] if each["rule"] in ("launch", "hostfile")]
    assert told == ([says] if says else [])


def test_a_missing_launcher_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("h1 slots=2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("launch=deepspeed", f"launch.hostfile={tmp_path}/hosts", "launch.runner=openmpi", f"log.dir={tmp_path}/runs")
    assert command(["fit", "conf=quickstart", *SMALL, "cluster=1x2", *words]) == 1
    says = "launch.runner=openmpi needs mpirun and ompi_info, not found on PATH: install openmpi"
    assert f"distrain: {says}" in capsys.readouterr().err.splitlines()
    assert not (tmp_path / "runs").exists()


def test_more_ranks_than_this_machine_can_serve_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = command(["fit", *without_repeats("conf=quickstart", *SMALL, "cluster=1x8000", "train.batch=16000", f"log.dir={tmp_path}")])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 1
    assert line.startswith("distrain: 8000 ranks are more than this machine's ")
    assert not list(tmp_path.iterdir())


def empty(folder: Path) -> str:
    (folder / "a.txt").write_text("")
    return "data=text"


def missing(folder: Path) -> str:
    return "data=text"


def short(folder: Path) -> str:
    (folder / "a.txt").write_text("too short")
    return "data=text"


def outside(folder: Path) -> str:
    np.arange(1000, dtype=np.uint16).tofile(folder / "a.bin")
    return "data=tokens"


def not_text(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    return "data=text"


# fmt: off
BAD = (
    (empty,    "a.txt",   "{path} is empty: name another"),
    (missing,  "a.txt",   "data.path={path}: no such file or folder"),
    (short,    "a.txt",   ("train has 10 tokens of data=text, fewer than one sequence and the token after it: train.seq=16: "
                           "set train.seq to at most 9")),
    (outside,  "a.bin",   ("{path}: token 256 at position 256 is not in the vocabulary, model.vocab=256: the largest id near it is 999: "
                           "train a model with the vocabulary of the tokenizer that wrote the file")),
    (not_text, "a.jsonl", "{path} line 2 has no text under text but 3"),
)
# fmt: on


@pytest.mark.parametrize(("make", "name", "line"), BAD, ids=[make.__name__ for make, *_ in BAD])
def test_bad_data_is_one_problem_of_the_run(ranks: RankPool, tmp_path: Path, make: Callable[[Path], str], name: str, line: str) -> None:
    words = (make(tmp_path), f"data.path={tmp_path / name}", f"data.cache={tmp_path / 'cache'}")
    job = ranks.fit(tmp_path / "run", "quickstart", *SMALL, *words)
    assert job.problems == (line.format(path=tmp_path / name),)
    assert 0 not in job.codes


@pytest.mark.parametrize(("make", "name"), [(missing, "a.txt"), (outside, "a.bin")])
def test_bad_data_is_one_line_on_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Callable[[Path], str], name: str
) -> None:
    words = (make(tmp_path), f"data.path={tmp_path / name}", f"data.cache={tmp_path / 'cache'}", f"log.dir={tmp_path}")
    status = command(["fit", "conf=quickstart", *SMALL, *words])
    said = capfd.readouterr()
    (line,) = said.err.splitlines()
    assert status == 1
    assert str(tmp_path / name) in line
    assert "Traceback" not in said.out
