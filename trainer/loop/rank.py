"""What one rank of a run does: python -m distrain.trainer.loop.rank RUN_DIR/run.json."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from ..engines.zero import ZeroEngine
from ..launch.lifeline import hold_from_environment
from ..launch.talk import STOPPED, Talk
from ..models.build import trained
from ..parallel.world import World, join, leave
from ..plan.plan import make_plan
from ..spec.problem import Unreadable
from ..spec.run import Run
from .checkpoint import LoadFailed, over, resume
from .data.batches import Batches
from .data.corpus import Corpus
from .data.prepare import cache_folder, prepare
from .meter import planned
from .saving import begin, restore
from .sinks import Sinks
from .train import Course, Stop, train

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    """Train the run that the command line names; the exit status of this rank."""
    return run_rank(Path(sys.argv[1]), Talk.from_environment())


def run_rank(path: Path, talk: Talk) -> int:
    """Train the run of RUN_DIR/run.json as the rank that the environment names; its exit status."""
    stop = Stop()
    hold_from_environment()
    run = msgspec.json.decode(path.read_bytes(), type=Run)
    torch.set_num_threads(max(1, torch.get_num_threads()))
    world = join(run.cluster.device.kind)
    try:
        finished = _train(run, path.parent, world, talk, stop)
    except (Unreadable, LoadFailed) as error:
        if world.first:
            talk.problem(str(error).splitlines()[0])
        return 1
    leave()
    if not finished:
        return STOPPED
    talk.done()
    return 0


def _train(run: Run, folder: Path, world: World, talk: Talk, stop: Stop) -> bool:
    host = dist.new_group(backend="gloo")
    corpus = _corpus(run, world, talk)
    module = trained(run, device=world.device, dtype=DTYPES[run.train.precision], seed=None if run.model.weights else run.train.seed)
    if run.train.compile:
        module.compile()
    else:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed compiles parts of itself otherwise: seconds a rank
    engine = ZeroEngine(run, module, world)
    gather = over(host)
    found = resume(folder / "checkpoints", run.checkpoint.resume, engine.shapes(), rank=world.rank, world=world.size, gather=gather)
    if found.checkpoint:
        restore(engine, found.checkpoint)
    elif run.model.weights:
        begin(engine, run)
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
        plan=make_plan(run),
        train=Batches(corpus, seed=run.train.seed, seq=run.train.seq),
        validation=Batches(corpus, seed=run.train.seed, seq=run.train.seq, split="validation") if _evaluates(run) else None,
        engine=engine,
        world=world,
        talk=talk,
        sinks=sinks,
        folder=folder,
        host=host,
    )
    finished = train(run, course, found, stop)
    if sinks:
        sinks.close(planned(course.plan))
    return finished


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
