"""Measures what `distrain fit` costs beside the same module in a bare loop: tokens/s of both, in the same processes.

Run `python -m distrain.scripts.bench_overhead [KEY=VALUE ...]`. Each step of `fit` is followed by one of the bare loop, torch
alone at one process and DeepSpeed as its tutorial has it at two, so that what else the machine does weighs on both alike. The
ratio is the median over these pairs of steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..trainer.launch.rank.channel import Talk
from ..trainer.spec.run import Run

if TYPE_CHECKING:
    from ..trainer.loop.data.batches import Batches

WARM = 5  # steps that are not counted
WORDS = ("train.steps=45", "train.batch=8", "train.microbatch=4", "train.evaluate.every=0", "log.every=10", "name=overhead")
# fmt: off
CASES = (  # processes, ZeRO stage, the bare loop
    (1, 0, "torch"),
    (1, 1, "torch"),
    (2, 1, "DeepSpeed"),
    (2, 2, "DeepSpeed"),
    (2, 3, "DeepSpeed"),
)
# fmt: on
AIM = 0.95  # of bare torch's tokens/s, at one process

Step = Callable[[int], None]


class Beside(Talk):
    """At each beat of the loop takes a step of the bare one; the seconds of every step of both."""

    def __init__(self, fd: int | None) -> None:
        super().__init__(fd)
        self.bare: Callable[[], Step]  # makes the bare loop, once the ranks have met
        self.step: Step | None = None
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.since = 0.0

    def beat(self, step: int) -> None:
        """The end of one of our steps, a bare one, and the beginning of our next."""
        now = perf_counter()
        if self.step is None:
            self.step = self.bare()
        else:
            self.ours.append(now - self.since)
        began = perf_counter()
        self.step(step)
        self.since = perf_counter()
        self.theirs.append(self.since - began)


def rank(path: Path) -> int:
    """One rank of a case; rank 0 leaves the seconds of both in RUN_DIR/overhead.json."""
    from ..trainer.loop.rank import run_rank

    run = msgspec.json.decode(path.read_bytes(), type=Run)
    talk = cast(Beside, Beside.from_environment())
    talk.bare = partial(bare_torch if int(os.environ["WORLD_SIZE"]) == 1 else bare_deepspeed, run)
    status = run_rank(path, talk)
    if os.environ["RANK"] == "0":
        (path.parent / "overhead.json").write_bytes(msgspec.json.encode([talk.ours[WARM:], talk.theirs[WARM:-1]]))
    return status


def bare_torch(run: Run) -> Step:
    """The loop that everybody writes first."""
    from torch.nn.utils import clip_grad_norm_

    from ..trainer.engines.deepspeed.settings import optimizer
    from ..trainer.loop.lr_schedule import rate

    module, batches = module_and_batches(run)
    stepper, each = optimizer(run, module.parameters()), run.train.microbatch

    def step(number: int) -> None:
        for group in stepper.param_groups:
            group["lr"] = rate(run.optim, number, run.train.steps or 1)
        for first in range(0, run.train.batch, each):
            batch = batches.batch(number * run.train.batch + first, each)
            loss, _ = module(batch.tokens, batch.labels)
            (loss / (run.train.batch * run.train.seq)).backward()
        clip_grad_norm_(module.parameters(), run.train.clip)
        stepper.step()
        stepper.zero_grad()

    return step


def bare_deepspeed(run: Run) -> Step:
    """The loop of DeepSpeed's tutorial."""
    from torch.distributed import get_rank, get_world_size

    from ..trainer.engines.deepspeed.settings import config, deepspeed, optimizer

    module, batches = module_and_batches(run)
    number_of, size, each = get_rank(), get_world_size(), run.train.microbatch
    engine, *_ = deepspeed().initialize(model=module, optimizer=optimizer(run, module.parameters()), config=config(run, size))

    def step(number: int) -> None:
        first = number * run.train.batch + number_of * each
        for micro in range(run.train.batch // (size * each)):
            batch = batches.batch(first + micro * size * each, each)
            loss, counted = engine(batch.tokens, batch.labels)
            engine.backward(loss / counted)
            engine.step()

    return step


def module_and_batches(run: Run) -> tuple[Any, Batches]:
    """A second copy of what `fit` trains."""
    import torch

    from ..trainer.loop.data.batches import Batches
    from ..trainer.loop.data.prepare import cache_folder, prepare
    from ..trainer.loop.setup import DTYPES
    from ..trainer.models.build import build

    corpus = prepare(
        run.data,
        vocab=run.model.vocab,
        seq=run.train.seq,
        cache=cache_folder(run.data),
        progress=lambda what, done, total: None,
        verify=False,
    )
    module = build(run, device=torch.device("cpu"), dtype=DTYPES[run.train.precision], seed=run.train.seed)
    return module, Batches(corpus, seed=run.train.seed, seq=run.train.seq)


def measured(words: Sequence[str], folder: Path) -> tuple[list[float], list[float], int]:
    """(seconds of our steps, of the bare ones, tokens of a step) of one case."""
    from ..cli.config.load import load
    from ..trainer.launch.single_host import launch
    from ..trainer.plan.plan import make_plan

    run = load("quickstart", words)
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    ended = launch(
        [sys.executable, "-m", "distrain.scripts.bench_overhead", "--rank", str(folder / "run.json")],
        ranks=make_plan(run).world,
        folder=folder,
        environment=os.environ,
        show=lambda line: None,
        grace=5.0,
    )
    if ended.status:
        sys.exit("\n".join([ended.says, *ended.tail]))
    ours, theirs = msgspec.json.decode((folder / "overhead.json").read_bytes(), type=tuple[list[float], list[float]])
    return ours, theirs, run.train.batch * run.train.seq


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank(Path(sys.argv[2])))
    print(f"{'processes':>9}{'ZeRO':>6}  {'against':<10}{'its tokens/s':>14}{'fit tokens/s':>14}{'ratio':>8}  middle half of steps")
    with TemporaryDirectory() as folder:
        for at, (processes, zero, against) in enumerate(CASES):
            layout = (f"cluster.gpus={processes}", f"parallel.zero={zero}")
            ours, theirs, tokens = measured((*WORDS, *layout, *sys.argv[1:]), Path(folder) / str(at))
            low, ratio, high = quantiles((b / a for a, b in zip(ours, theirs, strict=True)), n=4)
            mark = f"  below {AIM}" if processes == 1 and ratio < AIM else ""
            speeds = f"{tokens / median(theirs):>14,.0f}{tokens / median(ours):>14,.0f}"
            print(f"{processes:>9}{zero:>6}  {against:<10}{speeds}{ratio:>8.3f}  {low:.2f} to {high:.2f}{mark}", flush=True)


if __name__ == "__main__":
    main()
