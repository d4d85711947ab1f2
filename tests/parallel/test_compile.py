"""train.compile: the layers of a dense model are one graph without breaks, in every layout, and train what uncompiled ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import LONG_DEADLINE
from distrain.tests.fakes.inductor_settings import INDUCTOR
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.metric_rows import read_step_rows

PROGRAM = Path(__file__).parents[1] / "rank_programs" / "compiled_layers.py"
LAYOUTS = (
    "model=tiny model.dropout=0.1 cluster.gpus=1",
    "model=tiny_llama cluster.gpus=1 parallel.recompute=full model.window=8",
    "model=tiny_llama cluster.gpus=1 parallel.recompute=selective data.documents=true",
    "model=tiny_llama cluster.gpus=2 parallel.tp=2 model.sinks=true model.window=8 model.act=swiglu_clamped",
    "model=tiny_llama cluster.gpus=2 parallel.tp=2 parallel.sequence=true train.precision=fp8",
    "model=tiny_llama cluster.gpus=4 parallel.tp=2 parallel.cp=2 parallel.sequence=true parallel.recompute=selective",
    "model=tiny_llama cluster.gpus=2 parallel.cp=2 parallel.cp_comm=all_to_all",
    "model=tiny_llama cluster.gpus=2 parallel.cp=2 data.documents=true",
)
BROKEN_GRAPHS = ("model=tiny_hybrid cluster.gpus=1", "model=tiny_moe cluster.gpus=2 parallel.ep=2 parallel.dp=2")


@pytest.fixture(scope="module")
def compile_answers() -> dict[str, dict[str, Any]]:
    """The answers of a process of its own: the tests' own one has put torch's compiler out of use."""
    known = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *LAYOUTS, *BROKEN_GRAPHS], env=known, capture_output=True, text=True, timeout=LONG_DEADLINE
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(LAYOUTS) + len(BROKEN_GRAPHS), done.stderr[-3000:]
    return dict(zip((*LAYOUTS, *BROKEN_GRAPHS), answers, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_one_graph_without_breaks(layout: str, compile_answers: dict[str, dict[str, Any]]) -> None:
    """A second graph for dropout, whose layer number is a variable of the graph from the second layer on; one more for evaluation."""
    graphs = 2 if "dropout" in layout else 1
    found = compile_answers[layout]
    assert found["breaks"] == []
    assert (found["trained"], found["evaluated"]) == (graphs, graphs + 1)
    assert found["joined"] == (0 if "parallel.tp=2" in layout else 3)  # weights of attention, or with fewer key heads of the feed-forward


@pytest.mark.parametrize("layout", [*LAYOUTS, *BROKEN_GRAPHS])
def test_compiled_layers_have_the_gradients_of_uncompiled_ones(layout: str, compile_answers: dict[str, dict[str, Any]]) -> None:
    assert compile_answers[layout]["apart"] < 1e-5


@pytest.mark.parametrize("layout", [*LAYOUTS, *BROKEN_GRAPHS])
def test_no_forward_returns_a_tensor_that_an_operator_returned_twice(layout: str, compile_answers: dict[str, dict[str, Any]]) -> None:
    """With torch 2.11 such an output has no gradient, with later ones this alone shows it."""
    assert compile_answers[layout]["repeated"] == []


SMALL = (
    *("data=synthetic", "model=tiny", "model.layers=2", "train.seq=32", "train.steps=3", "optim.warmup=0", "train.evaluate.every=0"),
    *("log.every=1", "checkpoint.final=false"),
)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the compiler is found on Linux")


@LINUX
@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        ("cluster.gpus=2 parallel.pp=2 parallel.dp=1 parallel.zero=0", False),
        ("cluster.gpus=1 parallel.zero=0 engine=native", False),
        ("cluster.gpus=1 parallel.zero=1 engine=native model=tiny_llama", True),
    ],
)
def test_an_engine_trains_compiled_layers(layout: str, kernels: bool, ranks: RankPool, tmp_path: Path) -> None:
    """With the kernels of torch's compiler a Llama, and a GPT by `fit`; the others' graphs run operator by operator."""
    words = (*SMALL, *layout.split())
    if not kernels:
        choose_program(tmp_path / "true", "operators")
    plain, compiled = (ranks.train(tmp_path / name, "quickstart", *words, f"train.compile={name}") for name in ("false", "true"))
    assert compiled.figures("loss") == pytest.approx(plain.figures("loss"), abs=1e-5, rel=0)
    assert len(plain.figures("loss")) == 3


@LINUX
def test_fit_trains_compiled_layers(ranks: RankPool, tmp_path: Path) -> None:
    """In a rank that nothing was imported for, where DeepSpeed compiles functions of its own too."""
    words = (*SMALL, "cluster.gpus=1", "parallel.zero=1")
    command = [sys.executable, "-m", "distrain", "fit", "conf=quickstart", *words, "train.compile=true", f"log.dir={tmp_path}"]
    done = subprocess.run(command, env={**os.environ, **INDUCTOR}, capture_output=True, text=True, timeout=LONG_DEADLINE)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [row["loss"] for row in read_step_rows(tmp_path / "quickstart")]
    assert losses == pytest.approx(ranks.train(tmp_path / "plain", "quickstart", *words).figures("loss"), abs=1e-5, rel=0)
    assert len(losses) == 3


MIXTURE = (
    *("data=synthetic", "model=tiny_moe", "model.top_k=4", "model.layers=2", "train.seq=32", "train.batch=8", "train.microbatch=1"),
    *("cluster.gpus=1", "parallel.zero=0", "engine=native", "train.compile=true", "train.evaluate.every=0", "log.every=1"),
    *("train.steps=2", "optim.warmup=1", "checkpoint.final=false"),
)
LORA = ("model.lora={rank: 4, alpha: 8}",)


def planned_bytes(*words: str) -> int:
    memory = make_plan(load_recipe("quickstart", [*MIXTURE, *words])).memory
    assert memory is not None
    return memory.stages[0].bytes.activations + memory.stages[0].bytes.logits


@LINUX
def test_a_compiled_mixture_keeps_what_is_planned(ranks: RankPool, tmp_path: Path) -> None:
    """Experts read how many rows each has, where the graph breaks; gated activations are compiled. They train as uncompiled ones do."""
    words = (*LORA, "model.layers=1")
    plain = ranks.train(tmp_path / "plain", "quickstart", *MIXTURE, *words, "train.compile=false")
    choose_program(tmp_path / "run", "operators")
    compiled = ranks.train(tmp_path / "run", "quickstart", *MIXTURE, *words)
    assert compiled.figures("loss") == pytest.approx(plain.figures("loss"), abs=1e-5, rel=0)
    assert json.loads((tmp_path / "run" / "measured.json").read_text())["memory"]["activations"] == planned_bytes(*words)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("model.layers=4", *LORA), 1_727_872),
        (("model.layers=4",), 1_736_064),
        (("model.layers=4", "model.lora={rank: 4, alpha: 8, targets: [query,key,value,out]}"), 1_179_008),
        (("model=tiny_gpt_oss", "model.top_k=4"), 945_504),
    ],
)
def test_plans_of_compiled_mixtures_are_what_runs_on_a_cpu_kept(words: tuple[str, ...], kept: int) -> None:
    """As the first test measures it, without the labels' counts of 8 bytes that gpt-oss's auxiliary loss keeps."""
    assert planned_bytes(*words) == kept
