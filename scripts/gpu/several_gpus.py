"""The check of several GPUs: ranks that send each other messages over NCCL train the curve of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...trainer.prove.fork_client import ForkServer
from ...trainer.prove.trials.layouts import ProveLayout
from .check_context import CheckContext
from .finding import CheckBroken, CheckSkipped, Finding
from .fit_runs import RECIPE, UNTIMED, FitRun, fit
from .loss_checks import FIVE, FLOAT32_LOSS
from .loss_differences import most_apart
from .proved_layouts import prove_layouts

MOST = 8  # ranks, among which the tiny model's batch is shared out
BATCH = ("train.batch=16", "train.microbatch=1")
# Eight layers make two parts for each of four stages. Messages of the data axis have few elements, so that a step sends many at once.
WORDS = ("model=tiny_llama", "model.layers=8", "data=synthetic", "train.seq=64", *BATCH, "train.precision=fp32", "parallel.bucket=20000")
EXPERTS = (*WORDS, "model=tiny_moe", "model.layers=2")
FIT_WORDS = (*FIVE, "model=tiny_llama", "engine=native", *BATCH, "train.precision=fp32")


def train_on_several(context: CheckContext) -> Finding:
    """Train layouts on the machine's GPUs, the greatest power of two of them, and judge them as `prove` does, their messages too; then
    `fit` on all of these at once, whose losses must be those of one GPU. Raises CheckSkipped where there is one. A rehearsal has two
    processes, gloo, and one layout: the check of two ranks rehearses others."""
    ranks = most_ranks(torch.cuda.device_count()) if context.on_gpu else 2
    if ranks < 2:
        raise CheckSkipped("it needs two GPUs, and this machine has one")
    if context.on_gpu:
        found = prove_layouts(context, "several_gpus", WORDS, layouts_of(ranks), _start_server)
        mixture = prove_layouts(context, "several_gpus.experts", EXPERTS, expert_layouts_of(ranks), _start_server)
    else:
        found = prove_layouts(context, "several_gpus", (*WORDS, "model.layers=4"), layouts_of(ranks)[6:7], _start_server)
        mixture = Finding(figures={}, departures=())
    departures, losses = [*found.departures, *mixture.departures], list[Sequence[float]]()
    for each in (1, ranks):  # a fit that fails leaves what the layouts have shown
        try:
            losses.append(fit(FitRun(name=f"on.{each}", recipe=RECIPE, words=fit_words(each, context)), context, UNTIMED).losses)
        except CheckBroken as error:
            departures.append(f"fit on {each} GPUs: {error}")
    apart = most_apart(*losses) if len(losses) > 1 else None
    if apart is not None and not apart <= FLOAT32_LOSS:
        departures.append(f"fit on {ranks} GPUs is {apart:.1e} nats from one")
    figures = {**found.figures, "experts": mixture.figures, "ranks": ranks, "fit, from one GPU, nats": apart}
    return Finding(figures=figures, departures=tuple(departures))


def most_ranks(gpus: int) -> int:
    """Return how many of a machine's GPUs train: a power of two, which divides the batch."""
    return min(MOST, 1 << gpus.bit_length() - 1) if gpus else 0


def layouts_of(ranks: int) -> tuple[ProveLayout, ...]:
    """Return layouts of so many ranks, a power of two: each axis with data parallel beside it, several axes at once, and pipelines of up to
    four stages, in which a rank has two neighbours."""
    rest, stages = ranks // 2, min(4, ranks)
    together = {4: (ProveLayout(tp=2, pp=2),), 8: (ProveLayout(tp=2, cp=2, pp=2), ProveLayout(dp=2, tp=2, pp=2, zero=1))}
    layouts = (
        ProveLayout(dp=rest, tp=2),
        ProveLayout(dp=rest, cp=2),
        ProveLayout(dp=rest, pp=2),
        ProveLayout(dp=ranks, zero=1),
        ProveLayout(dp=ranks, zero=2, engine="native"),
        ProveLayout(dp=ranks, zero=3),
        ProveLayout(dp=ranks, zero=3, engine="native"),
        ProveLayout(dp=rest, tp=2, sequence=True, engine="native"),
        ProveLayout(dp=rest, cp=2, all_to_all=True),
        *together.get(ranks, ()),
        *([ProveLayout(dp=ranks, zero=3, shard=rest, engine="native")] if rest > 1 else []),
        *(ProveLayout(dp=ranks // stages, pp=stages, schedule=each) for each in ("1f1b", "dualpipev")),
        *(
            ProveLayout(dp=ranks // stages, pp=stages, schedule=each, engine="native")
            for each in ("1f1b", "interleaved", "zb_v", "dualpipev_w")
        ),
    )
    return tuple(dict.fromkeys(layouts))


def expert_layouts_of(ranks: int) -> tuple[ProveLayout, ...]:
    """Return layouts of so many ranks, a power of two, in which two ranks have half of the experts each."""
    rest = ranks // 2
    return (
        ProveLayout(dp=ranks, ep=2),
        ProveLayout(dp=ranks, ep=2, zero=2),
        ProveLayout(dp=ranks, ep=2, zero=2, engine="native"),
        *([ProveLayout(dp=rest, ep=2, tp=2, sequence=True, zero=1)] if rest > 1 else []),
    )


def fit_words(ranks: int, context: CheckContext) -> tuple[str, ...]:
    """Return the overrides of `fit` on so many GPUs: two tensor ranks, and data parallel."""
    tensor = min(2, ranks)
    return (*context.words(ranks), *FIT_WORDS, f"parallel.dp={ranks // tensor}", f"parallel.tp={tensor}")


def _start_server(log: Path, environment: Mapping[str, str]) -> ForkServer:
    return ForkServer(log, {**environment, **UNTIMED})
