"""muP: rates and initial values of a wider model follow the width, in every layout as in one process of plain torch."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.parallel.test_native import BASE, GPT, LLAMA, LONGER, MOE, NATIVE, check_curve, check_messages  # noqa: E402
from distrain.trainer.models.build import build_model, named_weights  # noqa: E402
from distrain.trainer.plan.engines import engine_for, engine_reason  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.tests.fakes.rank_pool import RankPool

Words = tuple[str, ...]

UNTIED = (*GPT, "model.tied=false")
MUP = ("optim.mup=16", LONGER)
# fmt: off
LAYOUTS = [
    (UNTIED, 1, ()),
    (LLAMA,  2, ("parallel.zero=2",)),
    (UNTIED, 4, ("parallel.tp=2", "parallel.sequence=true", "parallel.zero=1")),
    (LLAMA,  4, ("parallel.pp=2", "parallel.zero=3", "parallel.schedule=zb_h1")),
    (MOE,    2, ("parallel.ep=2", "parallel.zero=1", "model.tied=false", "model.expert_bias=true")),
    (LLAMA,  2, ("parallel.zero=1", "parallel.offload.optimizer=true")),
]
# fmt: on


@pytest.mark.parametrize(("curve", "gpus", "words"), LAYOUTS)
def test_every_layout_has_the_rates_of_the_width(ranks: RankPool, tmp_path: Path, curve: Words, gpus: int, words: Words) -> None:
    model = tuple(word for word in words if word.startswith("model."))
    check_curve(ranks, tmp_path / "run", (*curve, *model, *MUP), *words, f"cluster.gpus={gpus}", NATIVE, "log.ledger=true")
    check_messages(tmp_path / "run")


@pytest.mark.parametrize("curve", [UNTIED, (*MOE, "model.tied=false"), (*LLAMA, "model.init={std: 0.01, scale_residual: false}")])
def test_initial_values_are_those_of_the_narrow_model_over_powers_of_the_width(curve: Words) -> None:
    """arXiv:2203.03466 table 3: the variance of a hidden matrix falls as 1 / width, that of an output's as 1 / width^2."""
    run, plain = (load_recipe(BASE[0], (*BASE[1:], *curve, *words)) for words in (("optim.mup=16",), ()))
    wider, cpu = run.model.hidden / 16, torch.device("cpu")
    assert wider == 4
    found, before = (dict(named_weights(build_model(each, device=cpu, dtype=torch.float32, seed=3), each)) for each in (run, plain))
    for name, tensor in found.items():
        divisor = 1.0 if tensor.dim() == 1 or name in ("embedding.weight", "positions.weight") else sqrt(wider)
        divisor = wider if name == "head.weight" or name.endswith("router.weight") else divisor
        torch.testing.assert_close(tensor, before[name] / divisor)


@pytest.mark.parametrize(
    ("words", "engine", "says"),
    [
        ((), "native", ""),
        (("engine=zero",), "zero", "engine zero does not run optim.mup=16"),
        (("engine=pipe", "parallel.pp=2"), "pipe", "engine pipe does not run optim.mup=16"),
    ],
)
def test_engine_native_alone_has_rates_by_width(words: Words, engine: str, says: str) -> None:
    run = load_recipe(BASE[0], (*BASE[1:], *LLAMA, "cluster.gpus=2", "optim.mup=16", *words))
    row, limits = engine_for(run, run.parallel)
    assert row
    assert row.name == engine
    assert (limits[0].says if limits else "") == says
    if not says:
        assert engine_reason(run, run.parallel, "native") == "it alone runs optim.mup=16"
