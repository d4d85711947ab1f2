"""Measures the overhead of `distrain fit` over a bare loop with the same module: tokens/s of both, in the same processes.

Run `python -m distrain.scripts.bench_overhead [KEY=VALUE ...]`. Each step of `fit` is followed by one of the bare loop (torch alone at
one process, DeepSpeed as in its tutorial at two), so that other load on the machine affects both alike. The ratio is the median over
these pairs of steps.
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

from ..trainer.launch.rank.channel import Channel
from ..trainer.spec.run import Run

if TYPE_CHECKING:
    from ..trainer.loop.data.samples.batches import Batches

WARM_UP = 5  # steps that are not counted
OVERRIDES = ("train.steps=45", "train.batch=8", "train.microbatch=4", "train.evaluate.every=0", "log.every=10", "name=overhead")
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


class OverheadChannel(Channel):
    """Takes a step of the bare loop whenever the training loop reports a step, and records the seconds of both loops' steps."""

    def __init__(self, fd: int | None) -> None:
        super().__init__(fd)
        self.make_bare_loop: Callable[[], Step]  # called once the ranks have joined
        self.bare_step: Step | None = None
        self.fit_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.fit_step_began = 0.0

    def report_step(self, step: int) -> None:
        """End a step of `fit`, take a bare step, and begin the next step of `fit`."""
        now = perf_counter()
        if self.bare_step is None:
            self.bare_step = self.make_bare_loop()
        else:
            self.fit_seconds.append(now - self.fit_step_began)
        began = perf_counter()
        self.bare_step(step)
        self.fit_step_began = perf_counter()
        self.bare_seconds.append(self.fit_step_began - began)


def run_case_rank(path: Path) -> int:
    """Run one rank of a case; rank 0 writes the seconds of both loops to RUN_DIR/overhead.json."""
    from ..trainer.loop.rank import run_rank

    run = msgspec.json.decode(path.read_bytes(), type=Run)
    channel = cast(OverheadChannel, OverheadChannel.from_environment())
    channel.make_bare_loop = partial(bare_torch if int(os.environ["WORLD_SIZE"]) == 1 else bare_deepspeed, run)
    status = run_rank(path, channel)
    if os.environ["RANK"] == "0":
        seconds = [channel.fit_seconds[WARM_UP:], channel.bare_seconds[WARM_UP:-1]]
        (path.parent / "overhead.json").write_bytes(msgspec.json.encode(seconds))
    return status


def bare_torch(run: Run) -> Step:
    """The loop of a first torch script."""
    from torch.nn.utils import clip_grad_norm_

    from ..trainer.engines.torch_optimizer import torch_optimizer
    from ..trainer.spec.lr_schedule import learning_rate

    module, batches = module_and_batches(run)
    optimizer, size = torch_optimizer(run, module.parameters()), run.train.microbatch

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.optim, number, run.train.steps or 1)
        for first in range(0, run.train.batch, size):
            batch = batches.batch(number * run.train.batch + first, size)
            loss, _ = module(batch.tokens, batch.labels)
            (loss / (run.train.batch * run.train.seq)).backward()
        clip_grad_norm_(module.parameters(), run.train.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_deepspeed(run: Run) -> Step:
    """The loop of DeepSpeed's tutorial."""
    from torch.distributed import get_rank, get_world_size

    from ..trainer.engines.deepspeed.import_deepspeed import import_deepspeed
    from ..trainer.engines.torch_optimizer import torch_optimizer
    from ..trainer.plan.deepspeed.ds_config import deepspeed_config

    module, batches = module_and_batches(run)
    rank, ranks, size = get_rank(), get_world_size(), run.train.microbatch
    engine, *_ = import_deepspeed().initialize(
        model=module, optimizer=torch_optimizer(run, module.parameters()), config=deepspeed_config(run, ranks)
    )

    def step(number: int) -> None:
        first = number * run.train.batch + rank * size
        for micro in range(run.train.batch // (ranks * size)):
            batch = batches.batch(first + micro * ranks * size, size)
            loss, labels = engine(batch.tokens, batch.labels)
            engine.backward(loss / labels)
            engine.step()

    return step


def module_and_batches(run: Run) -> tuple[Any, Batches]:
    """A second copy of the module and the batches that `fit` trains."""
    import torch

    from ..trainer.loop.build import DTYPES
    from ..trainer.loop.data.prepare import cache_folder, prepare_corpus
    from ..trainer.loop.data.samples.batches import Batches
    from ..trainer.models.build import build_model

    corpus = prepare_corpus(
        run.data,
        vocab=run.model.vocab,
        seq=run.train.seq,
        cache=cache_folder(run.data),
        progress=lambda what, done, total: None,
        verify=False,
    )
    module = build_model(run, device=torch.device("cpu"), dtype=DTYPES[run.train.precision], seed=run.train.seed)
    return module, Batches(corpus, seed=run.train.seed, seq=run.train.seq)


def measure_case(overrides: Sequence[str], folder: Path) -> tuple[list[float], list[float], int]:
    """Run one case; (seconds of each step of `fit`, of each bare step, tokens of a step). Exits if it fails."""
    from ..cli.config.load import load_recipe
    from ..trainer.launch.single_host import launch_local_ranks
    from ..trainer.plan.plan import make_plan

    run = load_recipe("quickstart", overrides)
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    outcome = launch_local_ranks(
        [sys.executable, "-m", "distrain.scripts.bench_overhead", "--rank", str(folder / "run.json")],
        ranks=make_plan(run).world,
        folder=folder,
        environment=os.environ,
        show=lambda line: None,
        grace=5.0,
    )
    if outcome.status:
        sys.exit("\n".join([outcome.says, *outcome.tail]))
    fit_seconds, bare_seconds = msgspec.json.decode((folder / "overhead.json").read_bytes(), type=tuple[list[float], list[float]])
    return fit_seconds, bare_seconds, run.train.batch * run.train.seq


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(run_case_rank(Path(sys.argv[2])))
    print(f"{'processes':>9}{'ZeRO':>6}  {'against':<10}{'its tokens/s':>14}{'fit tokens/s':>14}{'ratio':>8}  middle half of steps")
    with TemporaryDirectory() as folder:
        for number, (processes, zero, against) in enumerate(CASES):
            layout = (f"cluster.gpus={processes}", f"parallel.zero={zero}")
            fit_seconds, bare_seconds, tokens = measure_case((*OVERRIDES, *layout, *sys.argv[1:]), Path(folder) / str(number))
            low, ratio, high = quantiles((bare / fit for fit, bare in zip(fit_seconds, bare_seconds, strict=True)), n=4)
            mark = f"  below {AIM}" if processes == 1 and ratio < AIM else ""
            speeds = f"{tokens / median(bare_seconds):>14,.0f}{tokens / median(fit_seconds):>14,.0f}"
            print(f"{processes:>9}{zero:>6}  {against:<10}{speeds}{ratio:>8.3f}  {low:.2f} to {high:.2f}{mark}", flush=True)


if __name__ == "__main__":
    main()
