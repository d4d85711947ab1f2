"""What one rank of a run does: python -m distrain.trainer.loop.rank RUN_DIR/run.json."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from ..engines.engine import Engine
from ..launch.lifeline import hold_from_environment
from ..launch.talk import STOPPED, Talk
from ..parallel.grid import Grid, grid
from ..parallel.stage import heads_of, stage
from ..parallel.world import World, join, leave
from ..plan.plan import make_plan
from ..plan.seat import seat
from ..spec.problem import Unreadable
from ..spec.run import Run
from .checkpoint import LoadFailed, over, resume
from .data.batches import Batches
from .data.corpus import Corpus
from .data.prepare import cache_folder, prepare
from .meter import planned
from .placing import whole_model
from .poison import Poisoned
from .saving import begin, restore
from .sinks import Sinks
from .train import Course, Stop, Unsaved, train

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    """Train the run that the command line names; the exit status of this rank."""
    return run_rank(Path(sys.argv[1]), Talk.from_environment())


def run_rank(path: Path, talk: Talk) -> int:
    """Train the run of RUN_DIR/run.json as the rank that the environment names; its exit status."""
    stop = Stop()
    faulthandler.register(signal.SIGUSR2)  # a run that hangs is asked where: all threads' stacks go to the log
    hold_from_environment()
    run = msgspec.json.decode(path.read_bytes(), type=Run)
    torch.set_num_threads(max(1, torch.get_num_threads()))
    world = join(run.cluster.device.kind)
    try:
        finished = _train(run, path.parent, world, talk, stop)
    except (Unreadable, LoadFailed, Poisoned, Unsaved) as error:
        if world.first:
            talk.problem(str(error).splitlines()[0])
        return 1
    leave()
    stop.over()
    if not finished:
        return STOPPED
    talk.done()
    return 0


def _train(run: Run, folder: Path, world: World, talk: Talk, stop: Stop) -> bool:
    host = dist.new_group(backend="gloo")
    corpus = _corpus(run, world, talk)
    made = make_plan(run)
    place = grid(world, seat(run, world.rank), copies=heads_of(run, run.parallel.tp).copies)
    engine = _engine(run, place, made.engine)
    found = resume(folder / "checkpoints", run.checkpoint.resume, whole_model(run), rank=world.rank, world=world.size, gather=over(host))
    batches = Batches(corpus, seed=run.train.seed, seq=run.train.seq)
    if found.checkpoint:
        restore(run, engine, place, batches, found.checkpoint, talk.say)
    elif run.model.weights:
        begin(run, engine, place)
    sinks = Sinks(run, folder, talk.say) if world.first else None
    if world.first:
        for reason in found.passed:
            talk.say(f"passed over {reason}")
        if found.checkpoint:
            talk.say(f"goes on from step {found.checkpoint.step}")
        elif run.model.weights:
            talk.say(f"begins from the weights in {run.model.weights}")
        talk.say(f"unigram entropy of the training text: {corpus.entropy:.4f} nats a token")
    course = Course(
        plan=made,
        train=batches,
        validation=Batches(corpus, seed=run.train.seed, seq=run.train.seq, split="validation") if _evaluates(run) else None,
        engine=engine,
        grid=place,
        talk=talk,
        sinks=sinks,
        folder=folder,
        host=host,
    )
    finished = train(run, course, found, stop)
    if sinks:
        sinks.close(planned(course.plan))
    return finished


def _engine(run: Run, place: Grid, name: str | None) -> Engine:
    """The engine that the plan names, around this rank's parts of the model."""
    device, dtype = place.world.device, DTYPES[run.train.precision]
    seed = None if run.model.weights else run.train.seed
    stages = [stage(run, place, part, device=device, dtype=dtype, seed=seed) for part in place.seat.parts]
    if run.train.compile:
        for each in stages:
            each.module.compile()
    else:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed compiles parts of itself otherwise: seconds a rank
    match name:
        case "pipe":
            from ..engines.pipe import PipeEngine

            return PipeEngine(run, stages, place)
        case _:
            from ..engines.zero import ZeroEngine

            return ZeroEngine(run, stages, place)


def _evaluates(run: Run) -> bool:
    return run.train.evaluate.every > 0


def _corpus(run: Run, world: World, talk: Talk) -> Corpus:
    """The corpus, made by rank 0 and opened by all."""
    vocab, seq, cache = run.model.vocab, run.train.seq, cache_folder(run.data)
    if world.first:
        prepare(run.data, vocab=vocab, seq=seq, cache=cache, progress=_progress(talk))
    dist.barrier()
    return prepare(run.data, vocab=vocab, seq=seq, cache=cache, progress=lambda what, done, total: None, verify=False)


def _progress(talk: Talk) -> Callable[[str, int, int], None]:
    def show(what: str, done: int, total: int) -> None:
        if total:
            talk.status(f"{what}: {100 * done / total:.0f} %")
        else:
            talk.say(what)

    return show


if __name__ == "__main__":
    raise SystemExit(main())
