"""Trains one rank of a run: joins the ranks, sets up training, trains, and leaves them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..engines.native.kernel_loading import load_kernels_before_messages
from ..launch.rank.channel import STOPPED, Channel
from ..launch.rank.foreign_launcher import keep_log
from ..parallel.process_groups import make_grid
from ..parallel.rank_model import head_shards
from ..parallel.world import World, join_ranks, leave_ranks, new_host_group
from ..plan.layout.gradient_routes import inner_ranks
from ..plan.layout.workers import worker_ranks
from ..plan.mesh_position import mesh_position
from ..plan.plan import make_plan
from ..plan.plan_data import Plan
from ..rundir.files import write_launch_files
from ..spec.numbers.as_text import plural
from ..spec.read import value_text
from ..spec.run import Run
from ..system.stop_requests import StopFlag
from .build import build_engine
from .checkpoint import Gather, gather_over
from .data.prepare import cache_folder, prepare_corpus
from .data.samples.batches import Batches
from .data.samples.corpus import Corpus
from .data.samples.corpus_stats import corpus_stats, document_noun, stats_line
from .data.source_reader import Progress
from .data.validation_sets import prepare_validation_sets
from .failures.fail_together import fail_together
from .failures.failure import AllRanksFailed, report_failure
from .failures.out_of_memory import full_device, out_of_memory_text
from .metrics.sinks import SinkContext, Sinks
from .metrics.throughput import planned_figures
from .state.reference_pass import StoppedInReference
from .state.start_state import load_initial_state
from .state.training_setup import TrainingSetup
from .step.evaluate import Validation, validations_of
from .step.train_progress import TrainProgress
from .train import train


def train_rank(path: Path, channel: Channel, stop: StopFlag, started: Path | None = None) -> int:
    """Train the run of RUN_DIR/run.json, or of the file `started`, as the rank that the environment names. Return its exit status."""
    run = msgspec.json.decode((started or path).read_bytes(), type=Run)
    if run.train.deterministic:
        take_deterministic_kernels()
    load_kernels_before_messages(run.parallel.pp, run.parallel.schedule)
    world = join_ranks(run.cluster.device.kind)
    host = new_host_group()
    stop.listen()
    keep_log(path.parent)
    writes = started is not None and world.is_rank0
    setup: TrainingSetup | None = None
    with ExitStack() as at_end:  # closes sinks after a failure is reported: a sink may be slow to close
        try:
            if writes and not path.exists():
                _write_run(run, make_plan(run), path.parent, channel)
            setup = set_up_training(run, path.parent, world, host, channel, at_end, stop)
            if writes and setup.start.step < setup.start.last_step(run):  # else run.json stays that of the run that trained
                _write_run(run, setup.plan, path.parent, channel)
            is_finished = train(run, setup, stop)
        except StoppedInReference:
            is_finished = False
        except Exception as error:
            report_failure(error, channel, world.rank, says=_memory_words(error, run, setup.plan if setup else None, world.rank))
            if isinstance(error, AllRanksFailed):
                _wait_for_all(host)
            return 1
        except SystemExit:
            _wait_for_all(host)
            raise
    leave_ranks()
    stop.ignore_further()
    if not is_finished:
        return STOPPED
    channel.report_done()
    return 0


def _memory_words(error: Exception, run: Run, plan: Plan | None, rank: int) -> str:
    """Return what is said of an error for want of memory; "" of any other. Whatever goes wrong here, the error itself is reported."""
    with suppress(Exception):
        if device := full_device(error):
            return out_of_memory_text(device, run, plan or make_plan(run), rank)
    return ""


def _write_run(run: Run, plan: Plan, folder: Path, channel: Channel) -> None:
    """Write the run.json and plan.json of a run that no `fit` started; a checkpoint records its run too."""
    try:
        write_launch_files(run, plan, folder)
    except OSError as error:
        channel.say(f"warning: {folder / 'run.json'} can't be written: {error.strerror or error}")


def take_deterministic_kernels() -> None:
    """Have torch take only kernels that give the same bits each time; it warns where it has none. Call it before the first kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads when it is first used
    torch.use_deterministic_algorithms(True, warn_only=True)


def _wait_for_all(host: dist.ProcessGroup) -> None:
    """Wait for the other ranks, which are about to end too, because another rank may still read from this one."""
    with suppress(RuntimeError):  # another rank has died
        dist.barrier(group=host)


def set_up_training(
    run: Run, folder: Path, world: World, host: dist.ProcessGroup, channel: Channel, at_end: ExitStack, stop: StopFlag
) -> TrainingSetup:
    """Open the data, build the engine, load its initial state and open the sinks; all ranks call this together."""
    gather = gather_over(host)
    corpus, sets = _open_data(run, world, channel, gather)
    batches, validations = Batches(corpus, seed=run.train.seed, seq=run.train.seq), validations_of(run, corpus, sets)

    plan = make_plan(run)
    copies = head_shards(run, run.parallel.tp).copies
    position, shard = mesh_position(run, world.rank), run.parallel.shard if run.parallel.zero else "all"
    worker = worker_ranks(run.parallel, position.mesh, run.cluster.gpus)
    inner = inner_ranks(run.parallel, position.mesh, run.cluster.gpus)
    groups = make_grid(world, position, copies=copies, shard=shard, worker=worker, inner=inner, alone=run.parallel.offload.parameters)
    engine = build_engine(run, groups, plan.engine)
    state = load_initial_state(run, folder, groups, engine, batches, validations, channel, gather, host, stop)

    sinks = None
    if world.is_rank0:
        sinks = _open_sinks(run, plan, folder, state.progress, channel, at_end)
        _report_data(run, corpus, state.progress, channel)
        _report_validation_sets(run, sets, validations, channel)
    return TrainingSetup(
        plan=plan,
        batches=batches,
        validations=validations,
        engine=engine,
        grid=groups,
        channel=channel,
        start=state.progress,
        recent=state.recent,
        lacks_validation=state.lacks_validation,
        sinks=sinks,
        folder=folder,
        host=host,
    )


def _open_data(run: Run, world: World, channel: Channel, gather: Gather) -> tuple[Corpus, dict[str, Corpus]]:
    """Prepare and open the corpus and the validation sets on rank 0, then open them on the others; raises AllRanksFailed."""
    show = _data_progress(channel, remarks=run.launch.name != "local")
    opened = fail_together(gather, lambda: _read_data(run, show, verify=True) if world.is_rank0 else None)
    corpus, sets = fail_together(gather, lambda: opened or _read_data(run, lambda what, done, total: None, verify=False))
    _check_same_data(run, corpus, sets, gather)
    return corpus, sets


def _check_same_data(run: Run, corpus: Corpus, sets: Mapping[str, Corpus], gather: Gather) -> None:
    """Raise AllRanksFailed where a rank has opened other data than rank 0: hosts may have other files under one name."""
    keys = {f"data.path={value_text(run.data.path)}" if run.data.path else f"data={run.data.name}": corpus.key}
    keys |= {f"data.validate.{name}": each.key for name, each in sets.items()}
    first, *others = [line.split() for line in gather(" ".join(keys.values()))]
    for rank, each in enumerate(others, 1):
        for what, own, wanted in zip(keys, each, first, strict=True):
            if own != wanted:
                raise AllRanksFailed(f"{what} holds other tokens here than on rank 0: give all hosts the same files", rank)


def _read_data(run: Run, progress: Progress, *, verify: bool) -> tuple[Corpus, dict[str, Corpus]]:
    where: dict[str, Any] = {"vocab": run.model.vocab, "seq": run.train.seq, "cache": cache_folder(run.data)}
    corpus = prepare_corpus(run.data, **where, progress=progress, verify=verify)
    sets = prepare_validation_sets(run.data, **where, progress=progress, verify=verify) if run.train.evaluate.every else {}
    return corpus, sets


def _data_progress(channel: Channel, *, remarks: bool) -> Callable[[str, int, int], None]:
    """Return a callback that shows how far the preparation of data is, and each remark once.

    Without `remarks` those without a total are dropped: `fit` read the data before it started the ranks, and has shown them.
    """

    said = set[str]()

    def show(what: str, done: int, total: int) -> None:
        if total:
            channel.report_status(f"{what}: {100 * done / total:.0f} %")
        elif remarks and what not in said:
            said.add(what)
            channel.say(what)

    return show


def _open_sinks(run: Run, plan: Plan, folder: Path, start: TrainProgress, channel: Channel, at_end: ExitStack) -> Sinks:
    context = SinkContext(run=run, plan=plan, folder=folder, first=start.step, last=start.last_step(run), say=channel.say)
    sinks = Sinks(context, lambda: channel.report_progress("sinks"))
    at_end.callback(sinks.close, planned_figures(plan), lambda: channel.report_progress("end"))
    return sinks


def _report_validation_sets(run: Run, sets: Mapping[str, Corpus], validations: Sequence[Validation], channel: Channel) -> None:
    """Report the size of each validation set, and how much of it each evaluation reads."""
    by_name = {each.name: each for each in validations}
    for name, corpus in sets.items():
        each, (source,) = by_name[name], corpus.sources
        documents = f" in {plural(source.documents, document_noun(run.data))}" if source.documents is not None else ""
        many, whole = len(each.samples), sum(each.batches.windows)
        read = f"all {plural(whole, 'sequence')}" if many == whole else f"{many:,} of {plural(whole, 'sequence')}"
        channel.say(f"validation set {name}: {corpus.size('validation'):,} tokens{documents}, {read} each time")


def _report_data(run: Run, corpus: Corpus, start: TrainProgress, channel: Channel) -> None:
    """Report how much text there is, how often the run reads it, and the loss in tokens of a model that knows their frequencies only."""
    if run.data.name != "synthetic":
        last = start.last_step(run)
        tokens = start.after(run, max(start.step, last)).tokens  # a run that is resumed past its end has read more than its length asks
        channel.say(stats_line(corpus_stats(corpus, run.train.seq), run.data, tokens, is_done=start.step >= last))
    if run.data.has_preferences:
        return  # the loss is not of tokens
    what = f"{'completions' if corpus.examples else 'text'}{' of the first stage' if run.data.stages else ''}"
    channel.say(f"unigram entropy of the training {what}: {corpus.entropy:.4f} nats a token")
