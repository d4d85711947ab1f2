"""Traces: they locate a departure from one process by module, rank and micro-batch, and find none in a correct layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distrain.cli.config.load import load_recipe
from distrain.cli.verbs.prove_run import Printer, prove_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.trainer.layers.dropout import Dropout
from distrain.trainer.layers.recompute import recompute
from distrain.trainer.loop.trace.recorded_tensors import RecordedTensorReader
from distrain.trainer.loop.trace.tensor_recorder import TRACED_MODULES, Recorder, is_traced
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.prove.first_departure import (
    TensorDifference,
    TensorKind,
    computation_order,
    departure_sentence,
    first_departure,
    read_differences,
)
from distrain.trainer.prove.locate_departure import has_recording

# The first departure


def difference(
    step: int, micro: int, name: str, kind: TensorKind, apart: float = 1.0, scale: float = 1.0, rank: int = 0
) -> TensorDifference:
    return TensorDifference(step=step, micro=micro, name=name, kind=kind, apart=apart, scale=scale, rank=rank, place="")


IN_ORDER = (
    difference(0, -1, "embedding.weight", "weight"),
    difference(0, -1, "layers.0.mlp.up.weight", "weight"),
    difference(0, 0, "embedding", "output"),
    difference(0, 0, "positions", "output"),
    difference(0, 0, "dropout", "output"),
    difference(0, 0, "layers.0.norm1", "output"),
    difference(0, 0, "layers.0.attention.dropout", "output"),
    difference(0, 0, "layers.0.attention", "output"),
    difference(0, 0, "layers.0.attention", "output", rank=1),
    difference(0, 0, "layers.0.dropout1", "output"),
    difference(0, 0, "layers.0.norm2", "output"),
    difference(0, 0, "layers.0.mlp", "output"),
    difference(0, 0, "layers.0.dropout2", "output"),
    difference(0, 0, "layers.0", "output"),
    difference(0, 0, "layers.2.norm1", "output"),
    difference(0, 0, "layers.10.norm1", "output"),
    difference(0, 0, "norm", "output"),
    difference(0, 0, "head", "output"),
    difference(0, 1, "embedding", "output"),
    difference(0, 0, "head", "output_gradient"),
    difference(0, 0, "norm", "output_gradient"),
    difference(0, 0, "layers.10", "output_gradient"),
    difference(0, 0, "layers.10.mlp", "output_gradient"),
    difference(0, 0, "layers.10.norm1", "output_gradient"),
    difference(0, 0, "layers.2", "output_gradient"),
    difference(0, 0, "embedding", "output_gradient"),
    difference(0, 1, "head", "output_gradient"),
    difference(0, -1, "positions.weight", "gradient"),
    difference(0, -1, "layers.0.norm1.weight", "gradient"),
    difference(0, -1, "head.weight", "gradient"),
    difference(1, -1, "embedding.weight", "weight"),
    difference(1, 0, "embedding", "output"),
)


def test_differences_sort_in_the_order_in_which_a_step_computes_them() -> None:
    shuffled = list(IN_ORDER)
    Random(3).shuffle(shuffled)
    assert sorted(shuffled, key=computation_order) == list(IN_ORDER)
    assert first_departure(shuffled, "fp32") == IN_ORDER[0]


def test_layers_of_a_group_are_computed_before_the_group() -> None:
    names = ("layers.0.0.norm1", "layers.0.0.attention", "layers.0.0", "layers.0.1.mlp", "layers.0", "layers.1.0.norm1")
    in_order = [difference(0, 0, name, "output") for name in names]
    assert sorted([*in_order[3:], *in_order[:3]], key=computation_order) == in_order
    assert all(map(TRACED_MODULES.fullmatch, names))


def test_moments_in_8_bits_move_weights_apart() -> None:
    moved = [difference(2, -1, "head.weight", "weight", 0.5), difference(2, 0, "head", "output", 0.1)]
    assert first_departure(moved, "fp32") == moved[0]
    assert first_departure(moved, "fp32", "int8") is None
    assert first_departure([*moved, difference(0, 0, "head", "output", 1e-4)], "fp32", "int8") is not None


def test_a_difference_that_rounding_explains_is_no_departure() -> None:
    small = [
        difference(0, 0, "embedding", "output", 1e-5),
        difference(3, 0, "embedding", "output", 5e-4),
        difference(1, -1, "a.weight", "weight", 1e-3),
    ]
    assert first_departure(small, "fp32") is None
    assert first_departure([*small, difference(3, 0, "head", "output", 5e-3)], "fp32") == difference(3, 0, "head", "output", 5e-3)
    assert first_departure([*small, difference(3, 0, "head", "output", 5e-3)], "bf16") is None


def test_a_difference_that_is_not_finite_is_a_departure() -> None:
    assert first_departure([difference(0, 0, "embedding", "output", float("nan"))], "fp32") is not None
    assert first_departure([difference(0, 0, "embedding", "output", 1e-9, 0.0)], "fp32") is not None
    assert first_departure([difference(0, 0, "embedding", "output", 0.0, 0.0)], "fp32") is None


# fmt: off
SENTENCES = (
    ({"kind": "output"},
     "step 3, micro-batch 1, layers.2.attention ON: its output differs from the reference by 3.1e-02 (largest value 0.8)"),
    ({"kind": "output_gradient", "name": "layers.2.norm2"},
     ("step 3, micro-batch 1, layers.2.norm2 ON: the gradient of its output (computed by layers.2.mlp in backward) differs from the "
      "reference by 3.1e-02 (largest value 0.8)")),
    ({"kind": "gradient", "name": "norm.weight", "micro": -1},
     "step 3, norm.weight ON: its gradient differs from the reference by 3.1e-02 (largest value 0.8)"),
    ({"kind": "weight", "name": "norm.weight", "micro": -1},
     "after step 2, norm.weight ON: it differs from the reference by 3.1e-02 on average; everything computed before agrees"),
)
# fmt: on


def test_a_weight_after_steps_that_are_not_traced_says_so() -> None:
    weight = difference(7, -1, "norm.weight", "weight")
    traced = [difference(0, 0, "head", "output"), difference(7, 0, "head", "output"), weight]
    assert departure_sentence(weight, traced).startswith("by the end of step 7, norm.weight on rank 0: ")
    assert departure_sentence(weight, traced).endswith("; steps 2 to 7 are not traced, and everything in step 1 agrees")


def test_in_a_mixture_the_router_and_the_experts_read_the_second_norm() -> None:
    norm = difference(0, 0, "layers.1.norm2", "output_gradient")
    assert "(computed by layers.1.mlp in backward)" in departure_sentence(norm, [norm])
    router = difference(0, 0, "layers.1.router", "output")
    assert "(computed by layers.1.router and experts in backward)" in departure_sentence(norm, [norm, router])


@pytest.mark.parametrize(("given", "sentence"), SENTENCES, ids=[str(given["kind"]) for given, _ in SENTENCES])
def test_a_departure_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    departure: dict[str, Any] = {"step": 2, "micro": 0, "name": "layers.2.attention", "apart": 3.14e-2, "scale": 0.8, "rank": 5}
    each = TensorDifference(**departure | {"place": "pp 1 dp 1 tp 0"} | given)
    assert departure_sentence(each) == sentence.replace("ON", "on rank 5 (pp 1 dp 1 tp 0)")


# The recorder


class Stack(nn.Module):
    """Two layers, the second recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embedding = True, nn.Linear(3, 3)
        self.layers = nn.ModuleDict({"4": nn.Linear(3, 3), "5": nn.Linear(3, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers["4"](self.embedding(x))
        made: Tensor = recompute(self.layers["5"], x)
        return made.sum()


def test_each_output_and_its_gradient_is_recorded_once_even_if_recomputed() -> None:
    torch.manual_seed(0)
    stack, recorded = Stack(), list[tuple[int, str, str]]()
    with Recorder([stack], lambda micro, name, kind, tensor: recorded.append((micro, name, kind))).open():
        losses = [stack(torch.randn(2, 3)) for _ in range(2)]  # a pipeline has several in flight
        for loss in losses:
            loss.backward()
    names = ["embedding", "layers.4", "layers.5"]
    forward = [(micro, name, "output") for micro in range(2) for name in names]
    backward = [(micro, name, "output_gradient") for micro in range(2) for name in reversed(names)]
    assert recorded == forward + backward
    stack(torch.randn(2, 3)).backward()
    assert len(recorded) == len(forward + backward), "nothing is recorded after the recorder is closed"


def test_every_module_that_writes_to_the_residual_stream_is_traced() -> None:
    parts = ("norm1", "attention", "attention.dropout", "dropout1", "norm2", "mlp", "router", "experts", "shared", "dropout2")
    names = ["embedding", "positions", "dropout", "norm", "head", "layers.3", *(f"layers.3.{part}" for part in parts)]
    assert all(TRACED_MODULES.fullmatch(name) for name in names)
    assert not any(TRACED_MODULES.fullmatch(name) for name in ("", "layers", "layers.3.attention.out", "layers.3.experts.up"))


def test_a_dropout_is_traced_only_where_it_drops_anything() -> None:
    assert is_traced("layers.3.dropout1", Dropout(0.1, 3, "attention.residual"))
    assert not is_traced("layers.3.dropout1", Dropout(0.0, 3, "attention.residual"))


# Layouts

# fmt: off
BASE = (
    "quickstart", "data=synthetic", "train.steps=3", "train.seq=32", "train.evaluate.every=0", "log.every=1", "optim.warmup=0",
    "train.batch=4", "train.microbatch=2", "train.precision=fp32",
)
GPT = ("model=tiny", "model.layers=4")
LLAMA = ("model=tiny_llama", "model.layers=2", "model.kv_heads=2", "model.vocab=250", "model.vocab_multiple=16", "train.attention=math")
HALF = (*GPT, "train.precision=bf16")
MIXTURE = ("model=tiny_moe", "model.layers=2", "model.dropout=0.1", "model.shared_experts=1")
CORRECT = (
    (GPT,   ("cluster.gpus=2", "parallel.zero=3")),
    (GPT,   ("cluster.gpus=4", "parallel.tp=2", "parallel.dp=2", "parallel.sequence=true", "parallel.zero=1", "parallel.recompute=full")),
    (GPT,   ("cluster.gpus=4", "parallel.pp=4")),
    (GPT,   ("cluster.gpus=2", "parallel.pp=2", "parallel.schedule=dualpipev", "train.microbatch=1")),
    (LLAMA, ("cluster.gpus=4", "parallel.tp=4", "train.loss_chunks=3")),  # whose head makes no logits
    (HALF,  ("cluster.gpus=4", "parallel.tp=2", "parallel.dp=2", "parallel.sequence=true", "parallel.zero=2")),
    (HALF,  ("cluster.gpus=2", "parallel.pp=2", "parallel.recompute=selective")),
    (MIXTURE, ("cluster.gpus=4", "parallel.tp=2", "parallel.dp=2", "parallel.ep=2", "parallel.sequence=true")),
    (MIXTURE, ("cluster.gpus=2", "parallel.cp=2", "parallel.cp_comm=all_to_all")),
    (GPT,   ("cluster.gpus=2", "parallel.pp=2", "parallel.schedule=zb_v", "train.microbatch=1")),
    (GPT,   ("cluster.gpus=2", "parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2")),
    (HALF,  ("cluster.gpus=2", "parallel.zero=1", "engine=native")),
)
FAULTY = (
    (("cluster.gpus=2", "parallel.zero=1"), ("louder", 1, 1),
     (r"step 1, micro-batch 1, layers\.1\.mlp on rank 1 \(dp 1\): its output differs from the reference by 3\.\de-05 "
      r"\(largest value 0\.0\d+\)")),
    (("cluster.gpus=2", "parallel.zero=3", "parallel.recompute=full"), ("louder", 2, 0),
     r"step 1, micro-batch 1, layers\.2\.mlp on rank 0 \(dp 0\): its output .*"),
    (("cluster.gpus=2", "parallel.zero=2"), ("steeper", 2, 1),
     (r"step 1, micro-batch 1, layers\.2\.norm1 on rank 1 \(dp 1\): the gradient of its output "
      r"\(computed by layers\.2\.attention in backward\) .*")),
    (("cluster.gpus=4", "parallel.dp=2", "parallel.tp=2"), ("unsummed", 2, 3),
     r"step 1, micro-batch 1, layers\.2\.attention on rank 3 \(dp 1 tp 1\): its output .*"),
    (("cluster.gpus=4", "parallel.tp=2", "parallel.pp=2", "parallel.sequence=true", "parallel.recompute=full"),
     ("unsummed", 3, 3), r"step 1, micro-batch 1, layers\.3\.attention on rank 3 \(pp 1 tp 1\): its output .*"),
    (("cluster.gpus=2", "parallel.tp=2", "parallel.sequence=true"), ("unshared", 0, 0),
     r"step 1, positions\.weight on rank 0 \(tp 0\): its gradient differs .*"),
    (("cluster.gpus=2", "parallel.pp=2", "parallel.schedule=zb_h1"), ("steeper", 2, 1),
     (r"step 1, micro-batch 1, layers\.2\.norm1 on rank 1 \(pp 1\): the gradient of its output "
      r"\(computed by layers\.2\.attention in backward\) .*")),
    (("cluster.gpus=2", "parallel.tp=2", "parallel.sequence=true", "engine=native"), ("unshared", 0, 0),
     r"step 1, positions\.weight on rank 0 \(tp 0\): its gradient differs .*"),
    (("cluster.gpus=2", "parallel.zero=2"), ("faster", 0, 0),
     (r"after step 1, embedding\.weight on rank 0 \(dp 0\): it differs from the reference by \S+ on average; "
      r"everything computed before agrees")),
)
# fmt: on


TraceLayout = Callable[..., list[TensorDifference]]


@pytest.fixture(scope="module")
def traced(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> TraceLayout:
    """Trains a layout under a trace and returns its differences. Each model's recording is made once."""
    recordings: dict[tuple[str, ...], Path] = {}

    def of(model: tuple[str, ...], layout: tuple[str, ...], fault: tuple[str, int, int] | None = None) -> list[TensorDifference]:
        if model not in recordings:
            recordings[model] = tmp_path_factory.mktemp("recording")
            _run(ranks, tmp_path_factory.mktemp("one"), (*model, "cluster.gpus=1"), recordings[model], None)
        return _run(ranks, tmp_path_factory.mktemp("layout"), (*model, *layout), recordings[model], fault)

    return of


def _run(ranks: RankPool, top: Path, words: Sequence[str], recording: Path, fault: tuple[str, int, int] | None) -> list[TensorDifference]:
    from msgspec import json as encoder

    folder = top / "run"
    folder.mkdir()
    run = load_recipe(BASE[0], [*BASE[1:], *words, f"log.dir={top}", "name=run"])
    (folder / "run.json").write_bytes(encoder.encode(run))
    (folder / "trace.json").write_text(json.dumps({"steps": [0, 1], "recording": str(recording)}))
    choose_program(folder, "trace")
    if fault:
        (folder / "spoiler").write_text(json.dumps(dict(zip(("how", "layer", "rank"), fault, strict=True))))
    result = ranks.server.run_job(folder / "run.json", make_plan(run).world, seconds=DEADLINE)
    assert not any(result.codes), result.says
    return [each for file in folder.glob("departure/*.json") for each in read_differences(json.loads(file.read_text()))]


@pytest.mark.parametrize(("model", "layout"), CORRECT, ids=lambda words: " ".join(word.rpartition(".")[2] for word in words))
def test_a_correct_layout_departs_nowhere(traced: TraceLayout, model: tuple[str, ...], layout: tuple[str, ...]) -> None:
    differences = traced(model, layout)
    assert first_departure(differences, "bf16" if model is HALF else "fp32") is None
    assert {each.kind for each in differences} == {"weight", "output", "output_gradient", "gradient"}
    assert {(each.step, each.kind) for each in differences} >= {(step, kind) for step in range(2) for kind in ("output", "gradient")}


@pytest.mark.parametrize(("layout", "fault", "sentence"), FAULTY, ids=lambda part: str(part[0]) if len(part) == 3 else "")
def test_a_fault_is_located(traced: TraceLayout, layout: tuple[str, ...], fault: tuple[str, int, int], sentence: str) -> None:
    departure = first_departure(traced(GPT, layout, fault), "fp32")
    assert departure is not None
    assert re.fullmatch(sentence, departure_sentence(departure))


def test_every_traced_tensor_of_every_rank_is_compared(traced: TraceLayout) -> None:
    """4 sequences over 2 replicas make 2 micro-batches, each with 5 tensors of 4 layers and 3 more; key biases are left out.

    Positions have an output too, of all sequences, and so no gradient of each.
    """
    differences = traced(GPT, ("cluster.gpus=2", "parallel.zero=1", "train.microbatch=1"))
    for rank in range(2):
        mine = [each for each in differences if each.rank == rank and each.step == 0]
        for kind in ("output", "output_gradient"):
            assert len({(each.name, each.micro) for each in mine if each.kind == kind}) == len([each for each in mine if each.kind == kind])
            assert len([each for each in mine if each.kind == kind]) == 2 * (4 * 5 + 3 + (kind == "output"))
    assert not [each.name for each in differences if each.name.endswith("key.bias")]
    weights = {each.name for each in differences if each.kind == "gradient"}
    assert len(weights) == 4 * 16 + 4 - 4  # 16 of each layer except key biases; embedding, positions, the last norm's two


def test_recorded_gradients_are_those_of_the_mean_loss(ranks: RankPool, tmp_path: Path) -> None:
    """Over the samples of a step, the gradients of the logits times the head's inputs are the gradient of the head's weight."""
    _run(ranks, tmp_path, (*GPT, "model.tied=false", "cluster.gpus=1"), tmp_path / "recording", None)
    reader = RecordedTensorReader(tmp_path / "recording")
    logits, inputs = (reader.samples(0, kind, name, range(4)) for kind, name in (("output_gradient", "head"), ("output", "norm")))  # type: ignore[arg-type]
    by_weight = torch.einsum("bsh,bsv->hv", inputs, logits)
    assert torch.allclose(by_weight, reader.weight(0, "gradient", "head.weight"), atol=1e-8)
    with pytest.raises(KeyError):
        reader.samples(0, "output", "layers.9", range(1))


def test_prove_prints_where_a_layout_departs(ranks: RankPool, tmp_path: Path) -> None:
    shown = list[str]()
    screen = Printer(show=shown.append, tell=lambda problems: None, live=lambda line: None)
    choose_program(tmp_path, "spoiled", {"dp2": "same_samples"})
    arguments = ["conf=quickstart", *BASE[1:], *GPT, "layouts=dp2", "steps=2", f"log.dir={tmp_path}"]
    assert prove_recipe(arguments, None, screen, as_json=False, reasons=True, start_server=lambda *_: nullcontext(ranks.server)) == 1
    output = " ".join(" ".join(shown).split())
    assert re.search(r"step 1, micro-batch 1, embedding on rank 1 \(dp 1\): its output differs from the reference", output)
    assert not list(tmp_path.rglob("traced"))


def test_a_recording_serves_the_steps_that_were_traced_and_no_others(tmp_path: Path) -> None:
    """The step after them has weights alone: a layout that departs one step later needs it whole."""
    assert not has_recording(tmp_path, [0])
    (tmp_path / "trace.json").write_text(json.dumps({"steps": [0, 1, 2], "recording": str(tmp_path / "recording")}))
    for step in range(3):
        (tmp_path / "recording" / f"step_{step}").mkdir(parents=True)
    assert not has_recording(tmp_path, [0, 1, 2])  # it ended before its last step did
    (tmp_path / "recording" / "step_3").mkdir()
    assert has_recording(tmp_path, [0, 1, 2])
    assert has_recording(tmp_path, [0, 1])
    assert not has_recording(tmp_path, [0, 2, 3])
