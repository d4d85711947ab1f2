"""Where a layout departs from one process: a trace names the module, the rank and the micro-batch, and nothing where all is well."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

from distrain.cli.config.load import load
from distrain.cli.verbs.prove import Screen, prove
from distrain.trainer.layers.transformer import recomputed
from distrain.trainer.loop.trace.recorder import TRACED, Recorder
from distrain.trainer.loop.trace.reference import Reader
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.prove.finding import Finding, Kind, first, order, read, told
from distrain.trainer.prove.fork_client import Server

SERVER = Path(__file__).parents[1] / "rank_programs" / "trace_ranks.py"

# The verdict.


def found(step: int, micro: int, name: str, kind: Kind, apart: float = 1.0, scale: float = 1.0, rank: int = 0) -> Finding:
    return Finding(step=step, micro=micro, name=name, kind=kind, apart=apart, scale=scale, rank=rank, place="")


IN_ORDER = (
    found(0, -1, "embedding.weight", "weight"),
    found(0, -1, "layers.0.mlp.up.weight", "weight"),
    found(0, 0, "embedding", "output"),
    found(0, 0, "layers.0.norm1", "output"),
    found(0, 0, "layers.0.attention", "output"),
    found(0, 0, "layers.0.attention", "output", rank=1),
    found(0, 0, "layers.0.norm2", "output"),
    found(0, 0, "layers.0.mlp", "output"),
    found(0, 0, "layers.0", "output"),
    found(0, 0, "layers.2.norm1", "output"),
    found(0, 0, "layers.10.norm1", "output"),
    found(0, 0, "norm", "output"),
    found(0, 0, "head", "output"),
    found(0, 1, "embedding", "output"),
    found(0, 0, "head", "output_gradient"),
    found(0, 0, "norm", "output_gradient"),
    found(0, 0, "layers.10", "output_gradient"),
    found(0, 0, "layers.10.mlp", "output_gradient"),
    found(0, 0, "layers.10.norm1", "output_gradient"),
    found(0, 0, "layers.2", "output_gradient"),
    found(0, 0, "embedding", "output_gradient"),
    found(0, 1, "head", "output_gradient"),
    found(0, -1, "positions.weight", "gradient"),
    found(0, -1, "layers.0.norm1.weight", "gradient"),
    found(0, -1, "head.weight", "gradient"),
    found(1, -1, "embedding.weight", "weight"),
    found(1, 0, "embedding", "output"),
)


def test_findings_are_in_the_order_in_which_a_step_computes_them() -> None:
    shuffled = list(IN_ORDER)
    Random(3).shuffle(shuffled)
    assert sorted(shuffled, key=order) == list(IN_ORDER)
    assert first(shuffled, "fp32") == IN_ORDER[0]


def test_what_rounding_explains_is_no_departure() -> None:
    small = [found(0, 0, "embedding", "output", 1e-5), found(3, 0, "embedding", "output", 5e-4), found(1, -1, "a.weight", "weight", 1e-3)]
    assert first(small, "fp32") is None
    assert first([*small, found(3, 0, "head", "output", 5e-3)], "fp32") == found(3, 0, "head", "output", 5e-3)
    assert first([*small, found(3, 0, "head", "output", 5e-3)], "bf16") is None


def test_what_is_no_number_departs() -> None:
    assert first([found(0, 0, "embedding", "output", float("nan"))], "fp32") is not None
    assert first([found(0, 0, "embedding", "output", 1e-9, 0.0)], "fp32") is not None
    assert first([found(0, 0, "embedding", "output", 0.0, 0.0)], "fp32") is None


def test_a_departure_is_one_sentence() -> None:
    where = {"micro": 0, "name": "layers.2.attention", "apart": 3.14e-2, "scale": 0.8, "rank": 5, "place": "pp 1 dp 1 tp 0"}
    after = "on rank 5 (pp 1 dp 1 tp 0)"
    assert told(Finding(**where, step=2, kind="output")) == (  # type: ignore[arg-type]
        f"step 3, micro-batch 1, layers.2.attention {after}: its output differs from the reference by 3.1e-02 of 0.8"
    )
    said = told(Finding(**where | {"name": "layers.2.norm2"}, step=2, kind="output_gradient"))  # type: ignore[arg-type]
    assert said.endswith("the gradient of its output, which layers.2.mlp makes in backward, differs from the reference by 3.1e-02 of 0.8")
    said = told(Finding(**where | {"name": "norm.weight", "micro": -1}, step=2, kind="gradient"))  # type: ignore[arg-type]
    assert said == f"step 3, norm.weight {after}: its gradient differs from the reference by 3.1e-02 of 0.8"
    said = told(Finding(**where | {"name": "norm.weight", "micro": -1}, step=2, kind="weight"))  # type: ignore[arg-type]
    assert said == f"after step 2, norm.weight {after}: it differs from the reference by 3.1e-02 on average, and nothing did before"


# The recorder.


class Stack(nn.Module):
    """Two layers, the second recomputed on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 3)
        self.layers = nn.ModuleDict({"4": nn.Linear(3, 3), "5": nn.Linear(3, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers["4"](self.embedding(x))
        made: Tensor = recomputed(self.layers["5"], x)
        return made.sum()


def test_each_output_and_its_gradient_is_taken_once_though_it_is_computed_twice() -> None:
    torch.manual_seed(0)
    stack, taken = Stack(), list[tuple[int, str, str]]()
    with Recorder([stack], lambda micro, name, kind, tensor: taken.append((micro, name, kind))).open():
        losses = [stack(torch.randn(2, 3)) for _ in range(2)]  # a pipeline has several on the way
        for loss in losses:
            loss.backward()
    names = ["embedding", "layers.4", "layers.5"]
    forward = [(micro, name, "output") for micro in range(2) for name in names]
    backward = [(micro, name, "output_gradient") for micro in range(2) for name in reversed(names)]
    assert taken == forward + backward
    stack(torch.randn(2, 3)).backward()
    assert len(taken) == len(forward + backward), "nothing is taken when it is closed"


def test_the_residual_stream_is_traced_wherever_a_module_writes_to_it() -> None:
    names = ["embedding", "norm", "head", "layers.3", *(f"layers.3.{part}" for part in ("norm1", "attention", "norm2", "mlp"))]
    assert all(TRACED.fullmatch(name) for name in names)
    assert not any(TRACED.fullmatch(name) for name in ("", "layers", "positions", "layers.3.attention.out", "layers.3.dropout1"))


# Layouts.

# fmt: off
BASE = (
    "quickstart", "data=synthetic", "train.steps=3", "train.seq=32", "train.evaluate.every=0", "log.every=1", "optim.warmup=0",
    "train.batch=8", "train.microbatch=2", "train.precision=fp32",
)
GPT = ("model=tiny", "model.layers=4")
LLAMA = ("model=tiny_llama", "model.layers=2", "model.kv_heads=2", "model.vocab=250", "model.vocab_multiple=16", "train.attention=math")
HALF = (*GPT, "train.precision=bf16")
FINE = (
    (GPT,   ("cluster.gpus=4", "parallel.zero=3", "train.microbatch=1")),
    (GPT,   ("cluster.gpus=4", "parallel.tp=2", "parallel.dp=2", "parallel.sequence=true", "parallel.zero=1", "parallel.recompute=full")),
    (GPT,   ("cluster.gpus=4", "parallel.pp=4")),
    (GPT,   ("cluster.gpus=4", "parallel.pp=2", "parallel.dp=2", "parallel.schedule=dualpipev", "parallel.zero=1", "train.microbatch=1")),
    (LLAMA, ("cluster.gpus=8", "parallel.tp=4", "parallel.dp=2", "parallel.zero=2")),
    (HALF,  ("cluster.gpus=4", "parallel.tp=2", "parallel.dp=2", "parallel.sequence=true", "parallel.zero=2")),
    (HALF,  ("cluster.gpus=2", "parallel.pp=2", "parallel.recompute=selective")),
)
SPOILED = (
    (("cluster.gpus=2", "parallel.zero=1"), ("louder", 1, 1),
     r"step 1, micro-batch 1, layers\.1\.mlp on rank 1 \(dp 1\): its output differs from the reference by 3\.\de-05 of 0\.0\d+"),
    (("cluster.gpus=2", "parallel.zero=3", "parallel.recompute=full"), ("louder", 2, 0),
     r"step 1, micro-batch 1, layers\.2\.mlp on rank 0 \(dp 0\): its output .*"),
    (("cluster.gpus=2", "parallel.zero=2"), ("steeper", 2, 1),
     r"step 1, micro-batch 1, layers\.2\.norm1 on rank 1 \(dp 1\): the gradient of its output, which layers\.2\.attention makes .*"),
    (("cluster.gpus=4", "parallel.dp=2", "parallel.tp=2"), ("unsummed", 2, 3),
     r"step 1, micro-batch 1, layers\.2\.attention on rank 3 \(dp 1 tp 1\): its output .*"),
    (("cluster.gpus=8", "parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "parallel.sequence=true", "parallel.recompute=full"),
     ("unsummed", 3, 5), r"step 1, micro-batch 1, layers\.3\.attention on rank 5 \(pp 1 dp 0 tp 1\): its output .*"),
    (("cluster.gpus=2", "parallel.tp=2", "parallel.sequence=true"), ("unshared", 0, 0),
     r"step 1, positions\.weight on rank 0 \(tp 0\): its gradient differs .*"),
    (("cluster.gpus=2", "parallel.zero=2"), ("faster", 0, 0),
     r"after step 1, embedding\.weight on rank 0 \(dp 0\): it differs from the reference by \S+ on average, and nothing did before"),
)
# fmt: on


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A fork server whose ranks can be spoiled."""
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(log, environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, command=[sys.executable, str(SERVER)]) as made:
        yield made


Traced = Callable[..., list[Finding]]


@pytest.fixture(scope="module")
def traced(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Trains a layout under a trace; what its ranks found. What it is held against is made once a model."""
    references: dict[tuple[str, ...], Path] = {}

    def of(model: tuple[str, ...], layout: tuple[str, ...], spoiler: tuple[str, int, int] | None = None) -> list[Finding]:
        if model not in references:
            references[model] = tmp_path_factory.mktemp("reference")
            _run(server, tmp_path_factory.mktemp("one"), (*model, "cluster.gpus=1"), references[model], None)
        return _run(server, tmp_path_factory.mktemp("layout"), (*model, *layout), references[model], spoiler)

    return of


def _run(server: Server, top: Path, words: Sequence[str], reference: Path, spoiler: tuple[str, int, int] | None) -> list[Finding]:
    from msgspec import json as encoder

    folder = top / "run"
    folder.mkdir()
    run = load(BASE[0], [*BASE[1:], *words, f"log.dir={top}", "name=run"])
    (folder / "run.json").write_bytes(encoder.encode(run))
    (folder / "trace.json").write_text(json.dumps({"steps": [0, 1], "reference": str(reference)}))
    if spoiler:
        (folder / "spoiler").write_text(json.dumps(dict(zip(("how", "layer", "rank"), spoiler, strict=True))))
    crew = server.trained(folder / "run.json", make_plan(run).world, seconds=60)
    assert not any(crew.codes), crew.says
    return [each for file in folder.glob("departure/*.json") for each in read(json.loads(file.read_text()))]


@pytest.mark.parametrize(("model", "layout"), FINE, ids=lambda words: " ".join(word.rpartition(".")[2] for word in words))
def test_a_layout_that_computes_what_one_process_does_departs_nowhere(
    traced: Traced, model: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    findings = traced(model, layout)
    assert first(findings, "bf16" if model is HALF else "fp32") is None
    assert {each.kind for each in findings} == {"weight", "output", "output_gradient", "gradient"}
    assert {(each.step, each.kind) for each in findings} >= {(step, kind) for step in range(2) for kind in ("output", "gradient")}


@pytest.mark.parametrize(("layout", "spoiler", "says"), SPOILED, ids=lambda part: str(part[0]) if len(part) == 3 else "")
def test_a_spoiled_layout_is_told_where_it_departs(
    traced: Traced, layout: tuple[str, ...], spoiler: tuple[str, int, int], says: str
) -> None:
    departure = first(traced(GPT, layout, spoiler), "fp32")
    assert departure is not None
    assert re.fullmatch(says, told(departure))


def test_every_traced_tensor_of_every_rank_is_compared(traced: Traced) -> None:
    """8 sequences over 2 replicas are 2 micro-batches, of 4 layers' 5 tensors and three more; keys' biases are left out."""
    findings = traced(GPT, ("cluster.gpus=2", "parallel.zero=1"))
    for rank in range(2):
        mine = [each for each in findings if each.rank == rank and each.step == 0]
        for kind in ("output", "output_gradient"):
            assert len({(each.name, each.micro) for each in mine if each.kind == kind}) == len([each for each in mine if each.kind == kind])
            assert len([each for each in mine if each.kind == kind]) == 2 * (4 * 5 + 3)
    assert not [each.name for each in findings if each.name.endswith("key.bias")]
    weights = {each.name for each in findings if each.kind == "gradient"}
    assert len(weights) == 4 * 16 + 4 - 4  # 16 of a layer but keys' biases; embedding, positions, the last norm's two


def test_a_reference_is_in_the_units_of_the_mean_loss(server: Server, tmp_path: Path) -> None:
    """The gradients of all logits add up to 0 over words; over a step's samples the head's, with those of the inputs, to the weight's."""
    _run(server, tmp_path, (*GPT, "model.tied=false", "cluster.gpus=1"), tmp_path / "reference", None)
    reader = Reader(tmp_path / "reference")
    logits, inputs = (reader.samples(0, kind, name, range(8)) for kind, name in (("output_gradient", "head"), ("output", "norm")))  # type: ignore[arg-type]
    by_weight = torch.einsum("bsh,bsv->hv", inputs, logits)
    assert torch.allclose(by_weight, reader.weight(0, "gradient", "head.weight"), atol=1e-8)
    with pytest.raises(KeyError):
        reader.samples(0, "output", "layers.9", range(1))


def test_prove_says_where_a_layout_departs(tmp_path: Path) -> None:
    shown = list[str]()
    screen = Screen(show=shown.append, tell=lambda problems: None, live=lambda line: None)
    rank_server = Path(__file__).parents[1] / "rank_programs" / "spoiled_ranks.py"
    serving = partial(Server, command=[sys.executable, str(rank_server), "dp2=same_samples"])
    words = ["conf=quickstart", *BASE[1:], *GPT, "layouts=dp2", "steps=2", f"log.dir={tmp_path}"]
    assert prove(words, None, screen, as_json=False, reasons=True, serving=serving) == 1
    said = " ".join(" ".join(shown).split())
    assert re.search(r"step 1, micro-batch 1, embedding on rank 1 \(dp 1\): its output differs from the reference", said)
    assert not list(tmp_path.rglob("traced"))
