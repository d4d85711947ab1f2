"""The reference of pipelines without a flush: one process of plain torch that steps with gradients of earlier weights.

It shares the model, the data and the learning rate with the engine, and nothing of how that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec.json import decode
from torch import Tensor, nn
from torch.func import functional_call

from ...layers.counter_rng import dropout_keys
from ...layers.cross_entropy import IGNORED
from ...models.build import build_model
from ...plan.mesh_position import mesh_position
from ...spec.lr_schedule import learning_rate
from ...spec.run import Parallel, Run
from ..checkpoint import LoadFailed
from ..data.prepare import cache_folder, prepare_corpus
from ..data.samples.batches import Batch, Batches
from ..train import is_due
from .weight_diff import furthest_weight, read_last_weights

Weights = Mapping[str, Tensor]  # by logical name


@dataclass(frozen=True, kw_only=True)
class SimulatedCurve:
    """The mean loss of each step, the root mean square of its updates' gradient norms, the loss of the evaluation at the end (None: there
    is none), and the weights at the end."""

    losses: list[float]
    norms: list[float]
    evaluation: float | None
    weights: Weights


def delayed_curve(run: Run) -> SimulatedCurve:
    """Train a run of schedule pipedream or pipedream_2bw, in any layout, by delayed gradients in one process."""
    train, parallel, steps = run.train, run.parallel, run.train.steps or 0
    late, sequences = _updates_late(parallel), _sequences_of_update(run)
    stages = _weights_of_stages(run)
    data, whole = run_batches(run, "train"), replace(run, parallel=Parallel())
    module = build_model(whole, device=torch.device("cpu"), dtype=torch.float32, seed=train.seed)
    newest = dict(module.named_parameters())
    optimizers = [plain_optimizer(run, [newest[name] for name in names]) for names in stages]
    history = deque([_copy(newest)], maxlen=parallel.pp + 1)  # the weights after each update since the last flush
    losses, norms = [], []
    for step in range(steps):
        totals, squares = [], []
        for first in range(step * train.batch, (step + 1) * train.batch, sequences):
            met = dict[str, Tensor]()  # of each stage the weights `late` updates before, at most those of the flush
            for stage, names in enumerate(stages):
                version = history[-1 - min(late(stage), len(history) - 1)]
                met |= {name: version[name].requires_grad_() for name in names}
            loss = _mean_loss(run, module, met, data.batch(first, sequences), step)
            gradients = dict(zip(met, torch.autograd.grad(loss, list(met.values())), strict=True))
            for names, optimizer in zip(stages, optimizers, strict=True):
                for name in names:
                    newest[name].grad = gradients[name]
                squares.append(float(nn.utils.clip_grad_norm_([newest[name] for name in names], train.clip or torch.inf)) ** 2)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(run.optim, step, steps)
                optimizer.step()
            history.append(_copy(newest))
            totals.append(loss.item())
        losses.append(sum(totals) / len(totals))
        norms.append((sum(squares) / len(totals)) ** 0.5)
        if is_due(train.evaluate.every, step + 1) or is_due(run.checkpoint.every, step + 1):
            history = deque([history[-1]], maxlen=parallel.pp + 1)  # a flush: the next sequences meet the newest weights
    evaluation = evaluation_loss(run, module, newest) if train.evaluate.every else None
    return SimulatedCurve(losses=losses, norms=norms, evaluation=evaluation, weights=newest)


def _updates_late(parallel: Parallel) -> Callable[[int], int]:
    """By how many updates a stage's weights are old when a gradient is computed (stages from 0): pipedream's by those that the stages
    behind it have under way (arXiv:1806.03377), with vertical sync all like the first stage's; pipedream_2bw's by one
    (arXiv:2006.09503 section 3.1)."""
    if parallel.schedule == "pipedream_2bw":
        return lambda stage: 1
    return lambda stage: parallel.pp - 1 - (0 if parallel.vertical else stage)


def _sequences_of_update(run: Run) -> int:
    """The sequences of an update: pipedream's are a micro-batch of each replica, pipedream_2bw's a step."""
    data = run.cluster.nodes * run.cluster.gpus // (run.parallel.tp * run.parallel.pp * run.parallel.cp)
    return run.train.batch if run.parallel.schedule == "pipedream_2bw" else data * run.train.microbatch


def _weights_of_stages(run: Run) -> list[list[str]]:
    """The names of each stage's weights."""
    stages: dict[int, list[str]] = {}
    for rank in range(run.cluster.nodes * run.cluster.gpus):
        position = mesh_position(run, rank)
        held = [shard.name for part in position.parts for shard in position.weight_shards(run, part)]
        stages[position.coordinates["pp"]] = list(dict.fromkeys([*stages.get(position.coordinates["pp"], []), *held]))
    return [stages[stage] for stage in sorted(stages)]


def _copy(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def plain_optimizer(run: Run, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = {"params": [each for each in parameters if each.dim() > 1], "weight_decay": run.optim.weight_decay}
    vectors = {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0}
    if run.optim.name == "sgd":
        return torch.optim.SGD([matrices, vectors], lr=run.optim.lr, momentum=run.optim.momentum)
    return torch.optim.AdamW([matrices, vectors], lr=run.optim.lr, betas=run.optim.betas, eps=run.optim.eps)


def run_batches(run: Run, split: Any) -> Batches:
    corpus = prepare_corpus(run.data, vocab=run.model.vocab, seq=run.train.seq, cache=cache_folder(run.data), progress=lambda *_: None)
    return Batches(corpus, seed=run.train.seed, seq=run.train.seq, split=split)


def _mean_loss(run: Run, module: nn.Module, weights: Weights, batch: Batch, step: int | None) -> Tensor:
    """Return the mean loss over a batch's labels; without a step there is no dropout."""
    keys = None
    if run.model.dropout and step is not None:
        keys = dropout_keys(run.train.seed, step, batch.samples, torch.arange(run.train.seq))
    total, labels = functional_call(module, dict(weights), (batch.tokens, batch.labels), {"documents": batch.documents, "keys": keys})
    assert int(labels) == int((batch.labels != IGNORED).sum())
    loss: Tensor = total / labels
    return loss


def evaluation_loss(run: Run, module: nn.Module, weights: Weights) -> float:
    with torch.no_grad():
        module.eval()
        batch = run_batches(run, "validation").batch(0, run.train.evaluate.batches * run.train.batch)
        return float(_mean_loss(run, module, weights, batch, None))


def delayed_gradients(layout: str) -> dict[str, Any]:
    """Train the run of a run folder by delayed gradients, and compare the weights with those that it ended with.

    Returns {"losses", "norms", "evaluation", "weights": the largest difference, "weight": its name, "left_out": names of weights that are
    not compared}. Raises LoadFailed if the run has no checkpoint, or begins with other weights than drawn ones.
    """
    run = decode((Path(layout) / "run.json").read_bytes(), type=Run)
    if run.model.weights or run.model.lora.rank:
        raise LoadFailed("delayed gradients are simulated from drawn weights, all of them trained: leave model.weights and model.lora out")
    curve, saved = delayed_curve(run), read_last_weights(Path(layout))
    compared = furthest_weight(run, ((name, curve.weights[name].detach(), tensor) for name, tensor in saved))
    return {"losses": curve.losses, "norms": curve.norms, "evaluation": curve.evaluation, **compared}
