"""Rules of a batch that grows (`train.rampup`)."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from itertools import pairwise
from math import gcd

from ...spec.changed_run import Change
from ...spec.derived.batch_levels import MOST_LEVELS, batches_of_levels, common_divisor, is_valid_rampup
from ...spec.numbers.as_text import plural
from ...spec.numbers.divisors import divisors
from ...spec.read import value_text
from ...spec.run import Parallel, Run, Train
from ..layout.schedule_of_run import is_file, legal_schedule
from .broken_rule import BrokenRule
from .degrees import replicas

RULE = "rampup"
SHOWN = 3  # increments that are tried
NONE: Change = (("train.rampup.batch", None), ("train.rampup.until", None), ("train.rampup.by", None))


def rampup_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A ramp-up has a batch, and the tokens that end it; batches and tokens rise, and increments divide what they rise by."""
    rampup, words = run.train.rampup, _batches_text(run.train)
    many, ends = len(rampup.batches), len(rampup.ends)
    without = _without(run.train)
    if many == 0:
        if rampup.batch is not None:
            yield BrokenRule(RULE, "train.rampup.batch=[] names no batch", (without,))
        elif without:
            given = f"until={_ends_text(run.train)}" if ends else f"by={rampup.by}"
            yield BrokenRule(RULE, f"train.rampup.{given} without train.rampup.batch, the batch of the first steps", (without,))
        return
    if ends == 0:
        says = f"train.rampup.batch={words} without train.rampup.until"
        yield BrokenRule(RULE, says, fix="set train.rampup.until to the tokens of the run that end it, as train.rampup.until=20e9")
        return
    if many != ends:
        says = f"train.rampup.batch={words} names {many} batch{'es' * (many > 1)}, and train.rampup.until {plural(ends, 'end')}"
        yield BrokenRule(RULE, says, fix="give each batch the tokens that end it")
        return
    if any(later <= earlier for earlier, later in pairwise(rampup.ends)):
        yield BrokenRule(RULE, f"train.rampup.until={_ends_text(run.train)} does not rise", fix="put the earlier end first")
    rises = [later - earlier for earlier, later in pairwise((*rampup.batches, run.train.batch))]
    if min(rises) <= 0:
        says = f"train.rampup.batch={words} does not rise to train.batch={run.train.batch}"
        larger: tuple[Change, ...] = ((("train.batch", 2 * max(rampup.batches)),),) if min(rises[:-1], default=1) > 0 else ()
        yield BrokenRule(RULE, says, (*larger, without), fix="put the smaller batch first")
        return
    by, common = rampup.by or 0, gcd(*rises)
    if by and common % by:
        says = f"train.rampup.by={by} does not divide the rise of {_rises_text(run.train)} sequences"
    elif by and sum(rises) // by > MOST_LEVELS:
        says = f"train.rampup.by={by} makes {sum(rises) // by:,} levels, more than {MOST_LEVELS:,}"
    else:
        return
    few = [each for each in divisors(common) if sum(rises) // each <= MOST_LEVELS]
    nearest = nsmallest(SHOWN, few, key=lambda each: (abs(each - by), each))
    yield BrokenRule(RULE, says, tuple((("train.rampup.by", each),) for each in nearest), fix="set train.rampup.by=null")


def _batches_text(train: Train) -> str:
    return value_text(train.rampup.batch)


def _ends_text(train: Train) -> str:
    ends = ",".join(f"{each:.10g}".replace("e+", "e") for each in train.rampup.ends)
    return f"[{ends}]" if isinstance(train.rampup.until, tuple) else ends


def _rises_text(train: Train) -> str:
    return " and ".join(f"{later - earlier} from {earlier} to {later}" for earlier, later in pairwise((*train.rampup.batches, train.batch)))


def rampup_layout_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Every batch is a whole number of micro-batches on each replica, as many as the schedule needs. A schedule whose micro-batches go on
    from step to step, or are listed in a file, has one number of them."""
    train, dp = run.train, replicas(run, parallel)
    if not train.rampup.batches or dp is None or train.batch % (dp * microbatch) or not is_valid_rampup(train):
        return
    unit, words = dp * microbatch, f"train.rampup.batch={_batches_text(train)}"
    if odd := next((each for each in batches_of_levels(train) if each % unit), 0):
        says = f"{words}: its step of {plural(odd, 'sequence')} is not a multiple of dp {dp} x train.microbatch={microbatch}"
        yield BrokenRule(RULE, says, (*_whole_microbatches(run, dp, microbatch), _without(train)))
        return
    schedule, stages = legal_schedule(parallel), parallel.pp
    if schedule is None:
        return
    plain: Change = (("parallel.schedule", "1f1b"), *((("parallel.chunks", 1),) if parallel.chunks > 1 else ()))
    if schedule.delay or is_file(parallel.schedule):
        why = "does not flush, and needs" if schedule.delay else "lists"
        says = f"{words}: parallel.schedule={parallel.schedule} {why} as many micro-batches in every step"
        yield BrokenRule(RULE, says, (plain, _without(train)))
        return
    least, multiple = (2 * stages if schedule.folded else 1), (stages if schedule.chunked else 1)
    if few := next((each for each in batches_of_levels(train) if each // unit < least or each // unit % multiple), 0):
        needs = f"not a multiple of parallel.pp={stages}" if few // unit % multiple else f"fewer than 2 x parallel.pp={stages}"
        says = f"{words}: its step of {plural(few, 'sequence')} has {few // unit} micro-batch{'es' * (few > unit)}, {needs}"
        fewer = _whole_microbatches(run, dp * max(least, multiple), microbatch) if schedule.chunked or schedule.folded else ()
        yield BrokenRule(RULE, f"{says}, which schedule {parallel.schedule} needs", (*fewer, plain, _without(train)))


def _without(train: Train) -> Change:
    """The change that leaves out the ramp-up."""
    return tuple(pair for pair in NONE if getattr(train.rampup, pair[0].rpartition(".")[2]) is not None)


def _whole_microbatches(run: Run, parts: int, microbatch: int) -> Iterator[Change]:
    """Yield changes after which `parts` x the micro-batch divides every batch: a smaller micro-batch, or larger batches and increments.
    `parts`: replicas, times the micro-batches of which the schedule needs a multiple."""
    train, unit = run.train, parts * microbatch
    common = common_divisor(train)
    if common % parts == 0:
        yield (("train.microbatch", divisors(common // parts, microbatch)[-1]),)
    batches = [-(-each // unit) * unit for each in train.rampup.batches]
    value = tuple(batches) if isinstance(train.rampup.batch, tuple) else batches[0]
    first: Change = (("train.rampup.batch", value),) if value != train.rampup.batch else ()
    if by := train.rampup.by:
        rise = gcd(*[later - earlier for earlier, later in pairwise((*batches, train.batch))])
        enough = [each for each in divisors(rise) if each % unit == 0] if rise else []
        nearest = min(enough, key=lambda each: (abs(each - by), each), default=0)
        if nearest:
            yield (*first, *((("train.rampup.by", nearest),) if nearest != by else ()))
    elif first:
        yield first
