"""From run.json to the loop and back: a rank meets the others, opens the corpus, builds its engine and goes on from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ..engines.engine import Engine
from ..launch.rank.channel import STOPPED, Talk, hush
from ..parallel.process_groups import Grid, grid
from ..parallel.rank_model import heads_of, stage
from ..parallel.world import World, join, leave
from ..plan.mesh_position import seat
from ..plan.plan import make_plan
from ..rundir.changes import Changes, compare
from ..rundir.record import CONFIG, read_config, recorded_run
from ..spec.problem import Unreadable
from ..spec.run import Run
from ..system.stop_requests import Stop
from .checkpoint import Checkpoint, Found, Gather, LoadFailed, over, resume
from .data.batches import Batches
from .data.corpus import Corpus
from .data.corpus_stats import facts, sentence
from .data.prepare import cache_folder, prepare
from .engine_state import begin, restore
from .failure import AllFailed, told
from .placement import whole_model
from .position import BEGINNING, Position, resumed_position
from .resume_check import compared
from .sinks import Opening, Sinks
from .throughput import planned
from .train import Course, train

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# One rank prepares a corpus, writes a larger part of a checkpoint or hashes more of it than the others, who wait on the host for
# as long as that takes: whether a run hangs is for its watchdog to say.
PATIENT = timedelta(days=7)

Got = TypeVar("Got")


def trained(path: Path, talk: Talk, stop: Stop) -> int:
    """Train the run of RUN_DIR/run.json as the rank that the environment names; its exit status."""
    run = msgspec.json.decode(path.read_bytes(), type=Run)
    torch.set_num_threads(max(1, torch.get_num_threads()))
    world = join(run.cluster.device.kind)
    host = dist.new_group(backend="gloo", timeout=PATIENT)
    with ExitStack() as last:  # done when it has been said why this rank fails: a sink may be slow to close
        try:
            finished = _train(run, path.parent, world, host, talk, stop, last)
        except Exception as error:
            told(error, talk, world.rank)
            if isinstance(error, AllFailed):
                _part(host)
            return 1
        except SystemExit:
            _part(host)
            raise
    leave()
    stop.over()
    if not finished:
        return STOPPED
    talk.done()
    return 0


def _part(host: dist.ProcessGroup) -> None:
    """Wait for the others, who are about to end too: none is cut off while it still reads."""
    with suppress(RuntimeError):  # one dies of something else
        dist.barrier(group=host)


def _train(run: Run, folder: Path, world: World, host: dist.ProcessGroup, talk: Talk, stop: Stop, last: ExitStack) -> bool:
    gather = over(host)
    corpus = _corpus(run, world, talk, gather)
    made = make_plan(run)
    place = grid(world, seat(run, world.rank), copies=heads_of(run, run.parallel.tp).copies)
    engine = _engine(run, place, made.engine)
    batches = Batches(corpus, seed=run.train.seed, seq=run.train.seq)
    found, start = _resumed(run, folder, place, engine, batches, talk, gather)
    sinks = None
    if world.first:
        sinks = Sinks(Opening(run=run, plan=made, folder=folder, first=start.step, say=talk.say))
        last.callback(sinks.close, planned(made))
        _describe(run, corpus, start, talk)
    course = Course(
        plan=made,
        train=batches,
        validation=Batches(corpus, seed=run.train.seed, seq=run.train.seq, split="validation") if _evaluates(run) else None,
        engine=engine,
        grid=place,
        talk=talk,
        start=start,
        sinks=sinks,
        folder=folder,
        host=host,
    )
    return train(run, course, found, stop)


def _describe(run: Run, corpus: Corpus, start: Position, talk: Talk) -> None:
    """Say how much text there is, how often the run reads it, and what a model that knows only how common each token is would lose."""
    if run.data.name != "synthetic":
        talk.say(sentence(facts(corpus), start.after(run, max(start.step, start.last_step(run))).tokens))
    talk.say(f"unigram entropy of the training text: {corpus.entropy:.4f} nats a token")


def _each(gather: Gather, work: Callable[[], Got]) -> Got:
    """What the work gives on this rank. Raises AllFailed on all ranks where it can't be done on any: the first of those tells why."""
    says, cause = "", None
    try:
        done = work()
    except (Unreadable, LoadFailed) as error:
        says, cause = str(error).partition("\n")[0], error
    for rank, fault in enumerate(gather(says)):
        if fault:
            raise AllFailed(fault, rank) from cause
    return done


def _resumed(run: Run, folder: Path, place: Grid, engine: Engine, batches: Batches, talk: Talk, gather: Gather) -> tuple[Found, Position]:
    """Give the engine what the newest checkpoint that verifies holds, or the weights that the run begins from, and say so."""
    world, say = place.world, talk.say if place.world.first else hush
    judge = partial(_changes, run, batches)
    policy = partial(resume, folder / "checkpoints", run.checkpoint.resume, whole_model(run), judge, pulse=talk.pulse)
    found = _each(gather, partial(policy, rank=world.rank, world=world.size, gather=gather))
    for reason in found.passed:
        say(f"passed over {reason}")
    checkpoint, start = found.checkpoint, BEGINNING
    if checkpoint:
        changes, before = judge(checkpoint), recorded_run(checkpoint.extra) or run
        start = resumed_position(checkpoint.step, checkpoint.extra, before, run, other_data=changes.other_data)
        _each(gather, partial(restore, engine, checkpoint, changes.new_moments, talk.pulse))
        talk.phase("compare")
        compared(run, engine, place, batches, checkpoint.step, checkpoint.extra)
        for remark in changes.remarks(checkpoint.step):
            say(remark)
        say(f"goes on from step {checkpoint.step}")
    elif run.model.weights:
        _each(gather, partial(begin, run, engine, place, talk.pulse))
        say(f"begins from the weights in {run.model.weights}")
    return found, start


def _changes(run: Run, batches: Batches, checkpoint: Checkpoint) -> Changes:
    """What the run has changed since a checkpoint was saved; one of an earlier version tells of the data's key alone."""
    extra = checkpoint.extra
    key = extra.get("data", {}).get("key")
    return compare(
        recorded_run(extra) or run,
        run,
        step=checkpoint.step,
        same_data=None if key is None else key == batches.corpus.key,
        configs=(extra.get(CONFIG, {}), read_config(run)),
    )


def _engine(run: Run, place: Grid, name: str | None) -> Engine:
    """The engine that the plan names, around this rank's parts of the model."""
    device, dtype = place.world.device, DTYPES[run.train.precision]
    seed = None if run.model.weights else run.train.seed
    if not run.train.compile:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed compiles parts of itself otherwise: seconds a rank
    made_one = _shared_out(run, place) if run.parallel.zero == 3 and name == "zero" else None
    stages = [stage(run, place, part, device=device, dtype=dtype, seed=seed, made_one=made_one) for part in place.seat.parts]
    if run.train.compile:
        for each in stages:
            each.module.compile()
    match name:
        case "pipe":
            from ..engines.deepspeed.pipe import PipeEngine

            return PipeEngine(run, stages, place)
        case _:
            from ..engines.deepspeed.zero import ZeroEngine

            return ZeroEngine(run, stages, place)


def _shared_out(run: Run, place: Grid) -> Callable[[nn.Parameter], None]:
    from ..engines.deepspeed.zero import shared_out

    return shared_out(run, place)


def _evaluates(run: Run) -> bool:
    return run.train.evaluate.every > 0


def _corpus(run: Run, world: World, talk: Talk, gather: Gather) -> Corpus:
    """The corpus, made by rank 0 and opened by all."""
    prepared = partial(prepare, run.data, vocab=run.model.vocab, seq=run.train.seq, cache=cache_folder(run.data))
    _each(gather, lambda: prepared(progress=_progress(talk, remarks=run.launch.name != "local")) if world.first else None)
    return _each(gather, lambda: prepared(progress=lambda what, done, total: None, verify=False))


def _progress(talk: Talk, *, remarks: bool) -> Callable[[str, int, int], None]:
    """Show how far it is; where `fit` has read the data before it started the ranks, it has shown the remarks."""

    def show(what: str, done: int, total: int) -> None:
        if total:
            talk.status(f"{what}: {100 * done / total:.0f} %")
        elif remarks:
            talk.say(what)

    return show
