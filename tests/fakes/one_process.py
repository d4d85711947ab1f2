"""The reference of multi-rank tests: one process of plain torch, without DeepSpeed, that takes each global batch whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.rounded_states import RoundedOptimizer
from distrain.tests.fakes.torch_muon import TorchMuon
from distrain.trainer.layers.counter_rng import dropout_keys
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.layers.transformer.multi_token_prediction import further_arguments
from distrain.trainer.loop.data.prepare import cache_folder, prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.models.build import build_model, named_constants
from distrain.trainer.spec.run import Run
from distrain.trainer.spec.sections.lr_schedule import learning_rate


def reference_curve(words: tuple[str, ...], left_out: frozenset[int] = frozenset()) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of the run of conf=`words[0]` with the other words as overrides; the optimizer skips `left_out` (from 0)."""
    losses, norms, *_ = _train(words, left_out)
    return losses, norms


def reference_moments(words: tuple[str, ...]) -> dict[tuple[str, str], Tensor]:
    """The moments in bf16 or 8 bits after the run's last step, by their kind in checkpoints and the weight's logical name."""
    return _train(words, frozenset()).moments


def reference_further_losses(words: tuple[str, ...]) -> list[float]:
    """The mean of the losses of the modules that predict further tokens, in each step of a run."""
    return _train(words, frozenset()).further


def reference_routing(words: tuple[str, ...]) -> list[dict[str, float]]:
    """What rows say of the routing of a mixture in each step of a run."""
    return _train(words, frozenset()).routing


def reference_rank_loads(words: tuple[str, ...], ranks: int) -> list[float]:
    """The tokens of the busiest of so many ranks of experts over an even share, at most what experts' capacity allows, on average over
    layers, in each step of a run."""
    most, steps = load_recipe(words[0], words[1:]).model.most_ep_load, _train(words, frozenset()).loads
    return [fmean(min(most, float(load.view(ranks, -1).sum(1).max() / load.sum() * ranks)) for load in layers) for layers in steps]


class Trained(NamedTuple):
    """What one process trains: its losses, norms, losses of further tokens, tokens of each layer's experts, figures of routing, moments in
    bf16 or 8 bits."""

    losses: list[float]
    norms: list[float]
    further: list[float]
    loads: list[list[Tensor]]
    routing: list[dict[str, float]]
    moments: dict[tuple[str, str], Tensor]


@cache
def _train(words: tuple[str, ...], left_out: frozenset[int]) -> Trained:
    run = load_recipe(words[0], words[1:])
    steps = run.train.steps or 0
    corpus = prepare_corpus(run.data, vocab=run.model.vocab, seq=run.train.seq, cache=cache_folder(run.data), progress=lambda *_: None)
    batches = Batches(corpus, seed=run.train.seed, seq=run.train.seq)
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=run.train.seed)
    optimizer = plain_optimizer(run, module)
    losses, norms, further, loads, routing = [], [], [], [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, step, steps) * group.get("rate", 1)
        loss = _mean_loss(run, module, batches, step)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), run.train.clip or torch.inf)))
        if step not in left_out:
            optimizer.step()
        loads.append([each[:-2].double() for each in getattr(module, "routing_counts", {}).values()])
        routing += routing_figures(run, module)
        _step_biases(run, module, skip=step in left_out)
        losses.append(loss.item())
        further += [float(each) for each in further_means(module, batches, step, run)]
    return Trained(losses, norms, further, loads, routing, optimizer.moments() if run.optim.moments != "fp32" else {})


def further_means(module: nn.Module, batches: Batches, step: int, run: Run) -> list[Tensor]:
    """Return the mean over a step's labels of the losses of further tokens of the forward just done; none without such modules."""
    held = getattr(module, "further_losses", [])
    means = [each / (batches.batch(step * run.train.batch, run.train.batch).labels != IGNORED).sum() for each in held]
    held.clear()
    return means


def routing_figures(run: Run, module: nn.Module) -> list[dict[str, float]]:
    """Return what a row says of the routing of the forward just done, of data whose labels all count; nothing without experts."""
    counts: list[Tensor] = list(getattr(module, "routing_counts", {}).values())
    if not counts:
        return []
    loads = [each[:-2].double() for each in counts]
    peaks, idle = [float(each.max() / each.mean()) for each in loads], sum(int((each == 0).sum()) for each in loads)
    found: dict[str, float] = {
        "expert_load": max(peaks),
        "busiest_layer": peaks.index(max(peaks)) + run.model.dense_layers,
        "idle_experts": idle,
    }
    if run.model.capacity:
        found["dropped_copies"] = 1 - sum(float(each[-2]) for each in counts) / sum(float(each.sum()) for each in loads)
    if added := getattr(module, "added_losses", []):
        found["router_loss"] = float(sum(added)) / (run.train.batch * run.train.seq)
        added.clear()
    return [found]


def _step_biases(run: Run, module: nn.Module, *, skip: bool) -> None:
    """arXiv:2408.15664 algorithm 1: b_e += rate x sign(mean load - load of e)."""
    counts = getattr(module, "routing_counts", {})
    for (_, bias), (*load, _, _) in zip(named_constants(module), counts.values(), strict=bool(run.model.router.bias_rate)):
        chosen = torch.tensor(load, dtype=torch.float64)
        bias += (not skip) * run.model.router.bias_rate * torch.sign(chosen.mean() - chosen).float()
    counts.clear()


def plain_optimizer(run: Run, module: nn.Module) -> Any:
    if run.optim.name == "muon":
        return TorchMuon(run, module)
    if run.optim.moments != "fp32":
        return RoundedOptimizer(run, module)
    if run.optim.mup:
        return torch.optim.AdamW(list(_mup_groups(run, module)), lr=run.optim.lr, betas=run.optim.betas, eps=run.optim.eps)
    named = dict(module.named_parameters())
    matrices = {"params": [each for name, each in named.items() if name in with_decay(named)], "weight_decay": run.optim.weight_decay}
    vectors = {"params": [each for name, each in named.items() if name not in with_decay(named)], "weight_decay": 0.0}
    if run.optim.name == "sgd":
        return torch.optim.SGD([matrices, vectors], lr=run.optim.lr, momentum=run.optim.momentum)
    return torch.optim.AdamW([matrices, vectors], lr=run.optim.lr, betas=run.optim.betas, eps=run.optim.eps)


def with_decay(weights: Mapping[str, Tensor]) -> set[str]:
    """The names of the weights that decay: matrices and tables, which are all called "weight"; a bias of experts has two dims too."""
    return {name for name, each in weights.items() if each.dim() > 1 and name.endswith(".weight")}


def _mup_groups(run: Run, module: nn.Module) -> Iterator[dict[str, Any]]:
    """arXiv:2203.03466 table 3: all matrices but the tables of tokens and positions have Adam's rate over the width; rate x decay stays."""
    wider = run.model.hidden / (run.optim.mup or 0)
    for name, each in module.named_parameters():
        is_matrix = each.dim() > 1 and name.endswith(".weight")
        rate = 1 / wider if is_matrix and name not in ("embedding.weight", "positions.weight") else 1.0
        yield {"params": [each], "rate": rate, "weight_decay": run.optim.weight_decay / rate if is_matrix else 0.0}


def _mean_loss(run: Run, module: nn.Module, batches: Batches, step: int) -> Tensor:
    batch = batches.batch(step * run.train.batch, run.train.batch)
    dropout = (
        dropout_keys(run.train.seed, step, batch.samples, torch.arange(run.train.seq))
        if run.model.dropout or run.model.lora.dropout
        else None
    )
    further = further_arguments(run.model, batch.tokens, batch.labels, batch.documents)
    total, labels = module(batch.tokens, batch.labels, documents=batch.documents, keys=dropout, **further)
    assert int(labels) == int((batch.labels != IGNORED).sum())
    loss: Tensor = total / labels
    return loss


def sample_text() -> str:
    """The same random lines of words each time."""
    draw = Random(7)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(300)]
    return "".join(" ".join(draw.choices(words, k=draw.randint(1, 12))) + "\n" for _ in range(400))


def write_documents(folder: Path) -> tuple[str, ...]:
    """Write the first words of each line of the sample text as a file, and so as a document; return the overrides that read them."""
    texts = folder / "texts"
    texts.mkdir()
    for number, line in enumerate(sample_text().splitlines()):
        (texts / f"{number:03}.txt").write_text(" ".join(line.split()[:3]))
    return f"data.path={texts}", f"data.cache={folder / 'cache'}"


def ignored_labels(words: tuple[str, ...]) -> int:
    """How many labels of the first global batch of a run don't count: those that begin a document."""
    run = load_recipe(words[0], words[1:])
    corpus = prepare_corpus(run.data, vocab=run.model.vocab, seq=run.train.seq, cache=cache_folder(run.data), progress=lambda *_: None)
    return int((Batches(corpus, seed=run.train.seed, seq=run.train.seq).batch(0, run.train.batch).labels == IGNORED).sum())
