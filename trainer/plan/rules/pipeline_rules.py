"""Rules of pipelines: stages and parts of the model, and the micro-batches that a schedule needs."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.changed_run import Change
from ...spec.numbers.as_text import plural
from ...spec.numbers.divisors import divisors
from ...spec.problem import suggest_name
from ...spec.run import Parallel, Run
from ..layout.schedule_of_run import is_file, read_lists, schedule_of
from ..layout.schedules import SCHEDULES
from .broken_rule import BrokenRule
from .degrees import micro_batches, nearest_divisors

MOST_STAGES = 10_000


def pipeline_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Each stage, and each chunk of it, has a layer. Chunks are for interleaved schedules, which need micro-batches in rounds."""
    layers, stages, chunks = run.model.repeated_layers, parallel.pp, parallel.chunks
    if stages > MOST_STAGES:
        yield BrokenRule("pp", f"parallel.pp={stages} is more than the {MOST_STAGES:,} stages that a plan has", ((("parallel.pp", 1),),))
    elif stages * chunks > layers:
        each = f"parallel.pp={stages}" + (f" x parallel.chunks={chunks}" if chunks > 1 else "")
        fewer: tuple[Change, ...] = ((("parallel.chunks", max(1, layers // stages)),),) if chunks > 1 and stages <= layers else ()
        yield BrokenRule("pp", f"{each} is more than {_layers_text(run)}", fewer + nearest_divisors("parallel.pp", stages, layers))
    if problem := _schedule_problem(parallel):
        yield problem
        return
    schedule = schedule_of(parallel)
    if stages > 1 and schedule.simulated:
        yield from _file_rules(run, parallel, microbatch)
        yield from _stages_rules(run, parallel, stages * schedule.parts(chunks)) if parallel.stages else ()
        return
    if chunks > 1 and not schedule.chunked:
        either: tuple[Change, ...] = ((("parallel.schedule", "interleaved"),), (("parallel.chunks", 1),))
        yield BrokenRule("chunks", f"parallel.chunks={chunks} is for schedule interleaved, not {parallel.schedule}", either)
    if stages > 1 and parallel.stages:
        yield from _stages_rules(run, parallel, stages * schedule.parts(chunks))
    if stages > 1 and schedule.chunked:
        yield from _interleaved_rules(run, parallel, microbatch)
    if stages > 1 and schedule.folded:
        yield from _folded_rules(run, parallel, microbatch)
    if stages > 1 and schedule.delay and not schedule.delay.each_micro_batch:
        yield from _late_step_rules(run, parallel, microbatch)


def _layers_text(run: Run) -> str:
    """The layers that stages share out, in words: those that are not in the first part whatever the stages are."""
    model = run.model
    behind = f", of which the first {model.dense_layers} are dense and in one part" if model.dense_layers else ""
    grouped = f" in groups of {model.layers_in_group}" if model.layers_in_group > 1 else ""
    return f"{'the ' * bool(behind)}model.layers={model.layers}{grouped}{behind}"


def _schedule_problem(parallel: Parallel) -> BrokenRule | None:
    """A schedule has a name that is known, or is a file that lists actions for each stage."""
    name = parallel.schedule
    if not is_file(name):
        if name in SCHEDULES:
            return None
        return BrokenRule("name", f"parallel.schedule={name} is not known", fix=suggest_name(name, SCHEDULES))
    if parallel.pp == 1:
        return None
    try:
        read_lists(parallel.actions or "", parallel.pp)
    except ValueError as error:
        return BrokenRule("schedule", f"parallel.schedule={name}: {error}", fix="fix the file, or name a schedule")
    return None


def _file_rules(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A file's lists have as many micro-batches as a step, and as many parts a stage as there are chunks."""
    lists, micros = read_lists(parallel.actions or "", parallel.pp), micro_batches(run, parallel, microbatch)
    if micros is not None and micros != lists.micros:
        says = (
            f"parallel.schedule={parallel.schedule} lists {lists.micros} micro-batch{'es' * (lists.micros != 1)}, and a step has {micros}"
        )
        yield BrokenRule("microbatches", says, ((("train.batch", run.train.batch // micros * lists.micros),),))
    chunks = 1 if lists.folded else lists.chunks
    if parallel.chunks != chunks:
        says = f"parallel.schedule={parallel.schedule} has {plural(lists.chunks, 'part')} a stage, and parallel.chunks is {parallel.chunks}"
        yield BrokenRule("chunks", says, ((("parallel.chunks", chunks),),))
    elif lists.folded and run.model.repeated_layers < 2 * parallel.pp:
        says = f"parallel.schedule={parallel.schedule} needs {2 * parallel.pp} parts, more than {_layers_text(run)}"
        yield BrokenRule("pp", says, ((("parallel.schedule", "1f1b"),),))


def _stages_rules(run: Run, parallel: Parallel, parts: int) -> Iterator[BrokenRule]:
    """parallel.stages has a number of layers for each part of the model, and they add up to the model's. The first part has all dense
    layers, and one more."""
    given, layers, dense = parallel.stages or (), run.model.layer_groups, run.model.dense_layers
    balanced: tuple[Change, ...] = ((("parallel.stages", None),),)
    words = f"parallel.stages={list(given)}".replace(" ", "")
    if len(given) != parts:
        yield BrokenRule("stages", f"{words} has {len(given)} entries, and the pipeline has {parts} parts", balanced)
    elif sum(given) != layers:
        one, group = f"model.layers={run.model.layers}", run.model.layers_in_group
        has = f"{sum(given)} layers, not to {one}" if group == 1 else f"{sum(given)}, not to {layers} groups of {group} layers: {one}"
        yield BrokenRule("stages", f"{words} adds up to {has}", balanced)
    elif dense and given[0] <= dense:
        says = f"{words} begins with {given[0]}, not more than model.dense_layers={dense}, which are in the first part with another layer"
        yield BrokenRule("stages", says, balanced)


def _interleaved_rules(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A schedule with chunks needs at least two, and micro-batches in rounds of its stages."""
    plain: Change = (("parallel.schedule", "1f1b"), ("parallel.chunks", 1))
    if parallel.chunks == 1:
        says = f"parallel.schedule={parallel.schedule} needs parallel.chunks of 2 or more"
        yield BrokenRule("chunks", says, ((("parallel.chunks", 2),), plain))
    micros, stages = micro_batches(run, parallel, microbatch), parallel.pp
    if micros is not None and micros % stages:
        says = f"{micros} micro-batches a step are not a multiple of parallel.pp={stages}, which schedule {parallel.schedule} needs"
        more = run.train.batch // micros * -(-micros // stages) * stages
        yield BrokenRule("microbatches", says, ((("train.batch", more),), plain))


def _late_step_rules(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Where weights are one step late on every stage, a step has a micro-batch for each stage: else the first stage would begin a step
    before it has made the update that this step needs (arXiv:2006.09503 section 3.1)."""
    micros, stages = micro_batches(run, parallel, microbatch), parallel.pp
    if micros is None or micros >= stages:
        return
    says = f"{micros} micro-batches a step are fewer than parallel.pp={stages}, which schedule {parallel.schedule} needs"
    share = micros * microbatch  # sequences of a replica
    smaller: tuple[Change, ...] = ((("train.microbatch", max(divisors(share, share // stages))),),) if share >= stages else ()
    more: Change = (("train.batch", run.train.batch // micros * stages),)
    yield BrokenRule("microbatches", says, (*smaller, more, (("parallel.schedule", "pipedream"),)))


def _folded_rules(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A folded schedule gives each stage two parts of the model, and needs a micro-batch for each part of the model."""
    layers, parts = run.model.repeated_layers, 2 * parallel.pp
    plain: Change = (("parallel.schedule", "1f1b"),)
    if parallel.pp <= layers < parts:
        says = f"parallel.schedule={parallel.schedule} needs 2 x parallel.pp={parallel.pp} parts, more than {_layers_text(run)}"
        yield BrokenRule("pp", says, (plain, *nearest_divisors("parallel.pp", layers // 2, layers)))
    micros = micro_batches(run, parallel, microbatch)
    if micros is not None and micros < parts:
        says = f"{micros} micro-batches a step are fewer than 2 x parallel.pp={parallel.pp}, which schedule {parallel.schedule} needs"
        yield BrokenRule("microbatches", says, ((("train.batch", run.train.batch // micros * parts),), plain))
