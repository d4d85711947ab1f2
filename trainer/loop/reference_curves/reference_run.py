"""What references of other curves share: one process of plain torch that trains a run's model on its data, as it is told to.

It shares the model, the data and the learning rate with the engines, and nothing of how they train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

import torch
from msgspec.json import decode
from torch import Tensor, nn
from torch.func import functional_call

from ...layers.block_quantization import code_tables, round_in_blocks
from ...layers.counter_rng import dropout_keys
from ...layers.cross_entropy import IGNORED
from ...layers.stochastic_rounding import column_words, random_words, round_at_random, row_words, tensor_key
from ...layers.transformer.multi_token_prediction import further_arguments
from ...models.build import build_model, named_constants
from ...plan.costs.precision import MOMENT_BLOCK
from ...rundir.effective_values import moment_kinds
from ...rundir.metric_rows import validation_key
from ...spec.derived.weight_decay import is_decayed
from ...spec.derived.width_scaling import is_rate_divided, width_factor
from ...spec.run import Parallel, Run
from ..checkpoint import LoadFailed
from ..data.prepare import cache_folder, prepare_corpus
from ..data.samples.batches import Batch, Batches
from ..data.samples.corpus import Corpus
from ..data.validation_sets import prepare_validation_sets
from ..offline.weight_diff import furthest_weight, read_last_weights
from ..step.evaluate import validations_of

Weights = Mapping[str, Tensor]  # by logical name


@dataclass(frozen=True, kw_only=True)
class ReferenceCurve:
    """The mean loss of each step, the root mean square of its updates' gradient norms, the losses of the evaluation at the end by their
    keys in rows ({}: there is none), and the weights at the end."""

    losses: list[float]
    norms: list[float]
    evaluations: Mapping[str, float]
    weights: Weights


def whole_model(run: Run) -> nn.Module:
    """Return the run's model, whole, with its drawn weights, on the CPU in float32."""
    whole = replace(run, parallel=Parallel())
    return build_model(whole, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed)


def copy_weights(weights: Weights) -> dict[str, Tensor]:
    """Return the values of weights, apart from them."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def plain_optimizer(run: Run, weights: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the run's optimizer of some weights, by logical name: matrices decay, and optim.mup divides the rates of some. After each step
    moments that the run keeps in bf16 or 8 bits are rounded as those are, of whole weights, and stay float32."""
    groups = []
    for name, each in weights.items():
        divisor = width_factor(run) if is_rate_divided(run, name, each.dim()) else 1.0
        groups.append(
            {"params": [each], "weight_decay": run.optim.weight_decay * divisor * is_decayed(name, each.dim()), "divisor": divisor}
        )
    made: torch.optim.Optimizer
    match run.optim.name:
        case "sgd":
            made = torch.optim.SGD(groups, lr=run.optim.lr, momentum=run.optim.momentum)
        case "adamw" | "muon":
            made = torch.optim.AdamW(groups, lr=run.optim.lr, betas=run.optim.betas, eps=run.optim.eps)
        case _:
            assert_never(run.optim.name)
    if run.optim.moments != "fp32":
        taken = torch.zeros((), dtype=torch.int64)
        made.register_step_post_hook(lambda *_: _round_moments(run, weights, made, taken.add_(1)))
    return made


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step of a `plain_optimizer`."""
    for group in optimizer.param_groups:
        group["lr"] = lr / group["divisor"]


@torch.no_grad()
def _round_moments(run: Run, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, taken: Tensor) -> None:
    """Round the moments of whole weights after step number `taken`."""
    if run.optim.moments == "int8":
        for held, kind in ((optimizer.state[each].get(kind), kind) for each in weights.values() for kind in moment_kinds(run.optim)):
            if held is not None:
                held.copy_(round_in_blocks(held, MOMENT_BLOCK, code_tables(held.device, signed=kind != "exp_avg_sq")))
        return
    for name, weight in weights.items():
        columns = weight.shape[-1]
        rows = row_words(tensor_key(run.train.seed, name), taken, torch.arange(weight.numel() // columns))
        words = random_words(rows, column_words(torch.arange(columns)))
        state = optimizer.state[weight]
        for half, held in enumerate(state[kind] for kind in moment_kinds(run.optim) if kind in state):
            near = run.optim.rounding == "nearest"
            held.copy_(held.to(torch.bfloat16) if near else round_at_random(held.view(words.shape), words, half).view(held.shape))


def read_batches(run: Run) -> Batches:
    """Return the samples that a run trains on."""
    return Batches(_corpus(run), seed=run.train.seed, seq=run.train.seq)


def _corpus(run: Run) -> Corpus:
    return prepare_corpus(run.data, **_where(run))


def _where(run: Run) -> dict[str, Any]:
    """Return how the run reads its data."""
    cache = cache_folder(run.data)
    return {"vocab": run.model.vocab, "seq": run.train.seq, "cache": cache, "progress": lambda *_: None}


def mean_loss(run: Run, module: nn.Module, weights: Weights, batch: Batch, step: int | None) -> Tensor:
    """Return the mean loss over a batch's labels; without a step there is no dropout, and no further token."""
    keys = None
    if run.model.dropout and step is not None:
        keys = dropout_keys(run.train.seed, step, batch.samples, torch.arange(run.train.seq))
    given: dict[str, Any] = {"documents": batch.documents, "keys": keys}
    if step is not None:
        given |= further_arguments(run.model, batch.tokens, batch.labels, batch.documents)
    total, labels = functional_call(module, dict(weights), (batch.tokens, batch.labels), given)
    assert int(labels) == int((batch.labels != IGNORED).sum())
    loss: Tensor = total / labels
    return loss


def evaluation_losses(run: Run, module: nn.Module, weights: Weights) -> dict[str, float]:
    """Return the losses of weights on what the run evaluates, by their keys in rows; {} where it evaluates nothing."""
    sets = prepare_validation_sets(run.data, **_where(run)) if run.train.evaluate.every else {}
    with torch.no_grad():
        module.eval()
        batches = {validation_key(each.name): each.batches.batch(0, len(each.samples)) for each in validations_of(run, _corpus(run), sets)}
        return {key: float(mean_loss(run, module, weights, batch, None)) for key, batch in batches.items()}


def compare_with_run(layout: str, simulate: Callable[[Run], ReferenceCurve]) -> dict[str, Any]:
    """Simulate the run of a run folder, and compare the weights with those that it ended with.

    Returns {"losses", "norms", "evaluations", "weights": the largest difference, "weight": its name, "left_out": names of weights that are
    not compared}. Raises LoadFailed if the run has no checkpoint, or begins with other weights than drawn ones.
    """
    run = decode((Path(layout) / "run.json").read_bytes(), type=Run)
    if run.model.weights or run.model.lora.rank:
        raise LoadFailed("another curve is simulated from drawn weights, all of them trained: leave model.weights and model.lora out")
    curve, saved = simulate(run), read_last_weights(Path(layout))
    weights = {**dict(named_constants(whole_model(run))), **curve.weights}
    compared = furthest_weight(run, ((name, weights[name].detach()[: len(tensor)], tensor) for name, tensor in saved))  # unpadded rows
    return {"losses": curve.losses, "norms": curve.norms, "evaluations": curve.evaluations, **compared}
