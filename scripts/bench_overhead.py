"""Measures the overhead of `distrain fit` over a bare loop with the same module: tokens/s of both, in the same processes.

Run `python -m distrain.scripts.bench_overhead [processes=1] [KEY=VALUE ...]`; `processes` is the most of a case. Each step of `fit` is
followed by one of the bare loop (torch alone at one process, DeepSpeed as in its tutorial at two), so that other load on the machine
affects both alike. A pair is a few such steps of each, by their medians; the ratio is the median of the pairs, beside the least and the
greatest. The ratio of processor seconds hardly feels other load, but does not count what a process waits for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import msgspec

from ..trainer.launch.rank.channel import Channel
from ..trainer.spec.run import Run
from .show_help import show_help

if TYPE_CHECKING:
    from ..trainer.loop.data.samples.batches import Batches

WARM_UP = 5  # steps that are not counted
PAIRS, PAIR_STEPS = 9, 5
STEPS = WARM_UP + PAIRS * PAIR_STEPS + 1  # before the first no bare step is taken
OVERRIDES = (f"train.steps={STEPS}", "train.batch=8", "train.microbatch=4", "train.evaluate.every=0", "log.every=10", "name=overhead")
# fmt: off
CASES = (  # processes, engine, ZeRO stage, the bare loop
    (1, "native", 0, "torch"),
    (1, "zero",   0, "torch"),
    (1, "zero",   1, "torch"),
    (2, "native", 1, "DeepSpeed"),
    (2, "zero",   1, "DeepSpeed"),
    (2, "native", 2, "DeepSpeed"),
    (2, "zero",   2, "DeepSpeed"),
    (2, "zero",   3, "DeepSpeed"),
)
# fmt: on
AIMS = {"native": 0.99, "zero": 0.95}  # of bare torch's tokens/s, at one process

Step = Callable[[int], None]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each counted step of `fit` and of the bare loop after it, by the clock and of this process's processors."""

    fit: list[float]
    bare: list[float]
    fit_processor: list[float]
    bare_processor: list[float]


class OverheadChannel(Channel):
    """Takes a step of the bare loop whenever the training loop reports a step, and records the seconds of both loops' steps."""

    def __init__(self, fd: int | None) -> None:
        super().__init__(fd)
        self.make_bare_loop: Callable[[], Step]  # called once the ranks have joined
        self.bare_step: Step | None = None
        self.fit: list[tuple[float, float]] = []  # by the clock, of the processors
        self.bare: list[tuple[float, float]] = []
        self.fit_began = (0.0, 0.0)

    def report_step(self, step: int) -> None:
        """End a step of `fit`, take a bare step, and begin the next step of `fit`."""
        if self.bare_step is None:
            self.bare_step = self.make_bare_loop()
        else:
            self.fit.append(_since(self.fit_began))
            began = _now()
            self.bare_step(step)
            self.bare.append(_since(began))
        self.fit_began = _now()

    @property
    def times(self) -> Times:
        """The steps that count."""
        (fit, fit_processor), (bare, bare_processor) = (map(list, zip(*each[WARM_UP:], strict=True)) for each in (self.fit, self.bare))
        return Times(fit=fit, bare=bare, fit_processor=fit_processor, bare_processor=bare_processor)


def _now() -> tuple[float, float]:
    return perf_counter(), process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    clock, processor = _now()
    return clock - began[0], processor - began[1]


def run_case_rank(path: Path) -> int:
    """Run one rank of a case; rank 0 writes the seconds of both loops to RUN_DIR/overhead.json."""
    from ..trainer.loop.rank import run_rank

    run = msgspec.json.decode(path.read_bytes(), type=Run)
    channel = OverheadChannel.from_environment()
    channel.make_bare_loop = partial(bare_torch if int(os.environ["WORLD_SIZE"]) == 1 else bare_deepspeed, run)
    status = run_rank(path, channel)
    if os.environ["RANK"] == "0":
        (path.parent / "overhead.json").write_bytes(msgspec.json.encode(channel.times))
    return status


def bare_torch(run: Run) -> Step:
    """The loop of a first torch script."""
    from torch.nn.utils import clip_grad_norm_

    from ..trainer.engines.torch_optimizer import torch_optimizer
    from ..trainer.spec.sections.lr_schedule import learning_rate

    module, batches = module_and_batches(run)
    optimizer, size = torch_optimizer(run, module), run.train.microbatch

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
    engine, *_ = import_deepspeed().initialize(model=module, optimizer=torch_optimizer(run, module), config=deepspeed_config(run, ranks))

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

    from ..trainer.layers.dtypes import PRECISION_DTYPES
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
    module = build_model(run, device=torch.device("cpu"), dtype=PRECISION_DTYPES[run.train.precision], seed=run.train.seed)
    return module, Batches(corpus, seed=run.train.seed, seq=run.train.seq)


def measure_case(overrides: Sequence[str], folder: Path) -> tuple[Times, int]:
    """Run one case; (its times, tokens of a step). Exits if it fails."""
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
    return msgspec.json.decode((folder / "overhead.json").read_bytes(), type=Times), run.train.batch * run.train.seq


def pair_ratios(fit: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Each pair's speed of `fit` as a share of the bare loop's, in order of size."""
    starts = range(0, len(fit), PAIR_STEPS)
    return sorted(median(bare[start : start + PAIR_STEPS]) / median(fit[start : start + PAIR_STEPS]) for start in starts)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(run_case_rank(Path(sys.argv[2])))
    overrides = [each for each in sys.argv[1:] if not each.startswith("processes=")]
    most = next((int(each.partition("=")[2]) for each in sys.argv[1:] if each.startswith("processes=")), 2)
    heads = f"{'its tokens/s':>12}{'fit':>8}{'ratio':>7}{'processor':>11}  range"
    print(f"{'processes':>9} {'engine':<7}{'ZeRO':>4}  {'against':<10}{heads}")
    with TemporaryDirectory() as folder:
        for number, (processes, engine, zero, against) in enumerate(each for each in CASES if each[0] <= most):
            layout = (f"cluster.gpus={processes}", f"parallel.zero={zero}", f"engine={engine}")
            times, tokens = measure_case((*OVERRIDES, *layout, *overrides), Path(folder) / str(number))
            ratios, processor = pair_ratios(times.fit, times.bare), median(pair_ratios(times.fit_processor, times.bare_processor))
            ratio = median(ratios)
            mark = f"  below {AIMS[engine]}" if processes == 1 and ratio < AIMS[engine] else ""
            speeds = f"{tokens / median(times.bare):>12,.0f}{tokens / median(times.fit):>8,.0f}"
            case = f"{processes:>9} {engine:<7}{zero:>4}  {against:<10}"
            print(f"{case}{speeds}{ratio:>7.3f}{processor:>10.3f}  {ratios[0]:.3f}, {ratios[-1]:.3f}{mark}", flush=True)


if __name__ == "__main__":
    show_help(__doc__)
    main()
