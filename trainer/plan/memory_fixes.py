"""Fixes of a run that does not fit: the smallest changes with which it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations

from ..models.families import is_made_by_transformers
from ..spec.changed_run import Change, overrides, with_changes
from ..spec.keys.units import gib_text
from ..spec.problem import Problem
from ..spec.run import Run
from .costs.precision import widths
from .engines import data_ranks, engine_for
from .estimate import Estimate, Estimator
from .fixes import SHOWN
from .layout.mesh import replica_size
from .layout.schedule_of_run import schedule_of
from .plan_data import Memory

LOSS_CHUNKS = 8  # for which logits are offered to be cut where they take a share of the device's memory of at least LOGITS_SHARE
LOGITS_SHARE = 1 / 32
MOST_COMBINED = 3  # changes of which every combination is tried
OFFLOADS = ("parallel.offload.optimizer", "parallel.offload.parameters")
WHOLE_SEQUENCE = ("parallel.sequence", False)  # which DeepSpeed wants of tensor-parallel ranks that offload
MORE_NODES = (2, 4, 8, 16, 32, 64, 128)  # times the nodes of a run
LARGER_DEGREES = ("parallel.ep", "parallel.tp", "parallel.pp", "parallel.cp")
MOMENTS = ("bf16", "int8")  # the optimizer's that are narrower than fp32; they change what is trained a little


def memory_problem(run: Run, memory: Memory) -> Problem:
    """Return the problem of a run that does not fit: bytes of the fullest stage by kind, and the smallest changes with which it fits."""
    if host := memory.full_host:
        held, where = asdict(host.rank), "of a rank "
        needs = f"{gib_text(host.node)} GiB of {gib_text(host.capacity or 0)} on each node's host"
    else:
        held, where = asdict(memory.stages[memory.stage].bytes), ""
        needs = f"{gib_text(memory.peak)} GiB of {gib_text(memory.capacity)} on stage {memory.stage}"
    rows = sorted(((size, kind) for kind, size in held.items() if kind != "total"), reverse=True)
    largest = ", ".join(f"{kind} {gib_text(size)}" for size, kind in rows[:3] if size or not where)
    says = f"needs {needs}: {where}{largest}"
    fits = list(fitting_changes(run))[:SHOWN]
    changes = tuple(overrides(change) for change, _ in fits)
    if not fits:
        return Problem(rule="memory", says=says, mend="no change of layout was found that fits on this cluster")
    names = [f"{' '.join(each)} ({gib_text(peak)})" for each, (_, peak) in zip(changes, fits, strict=True)]
    return Problem(rule="memory", says=says, mend=f"fits with {' or '.join(names)}", changes=changes)


def fitting_changes(run: Run) -> Iterator[tuple[Change, int]]:
    """Yield changes with which a run fits, and the peak bytes then: of one key; if there are none, of two, then of three, then one of more
    keys; then one with narrower moments, and those with more nodes.

    The order is by cost, from the least: saves that training waits for, compiled layers, the loss in chunks, recomputing attention's core,
    a schedule that holds less, sharding over all replicas, splitting what tensor parallelism left whole, sharding more, a smaller
    micro-batch, recomputing all, more ranks for the experts, then for the model, the host's memory, the engine that leaves less on the
    device, narrower moments, more nodes.
    """
    single, peaks = list(dict.fromkeys(_single_changes(run))), _ChangedPeaks(run)
    for size in range(1, MOST_COMBINED + 1):
        found = [each for change in _combined_changes(single, size) if (each := peaks.fitting_change(change)) is not None]
        if found:
            yield from found
            return
    several = next(_changes_of_many_keys(single, peaks), None)
    if several is not None:
        yield several
        return
    yield from _changes_with_narrower_moments(single, peaks)
    yield from _changes_with_more_nodes(run, single, peaks)


def _changes_with_narrower_moments(single: list[Change], peaks: _ChangedPeaks) -> Iterator[tuple[Change, int]]:
    """Yield one change with which a run fits whose moments are narrower, but no narrower than they need be."""
    for width in MOMENTS:
        several = next(_changes_of_many_keys(single, peaks, (("optim.moments", width),)), None)
        if several is not None:
            yield several
            return


def _changes_with_more_nodes(run: Run, single: list[Change], peaks: _ChangedPeaks) -> Iterator[tuple[Change, int]]:
    """Yield the fewest times the nodes with which a run fits after up to two other changes; before it a change of more keys with which
    fewer nodes do, if there is one."""
    changes = [(), *single, *_combined_changes(single, 2)]
    several: tuple[Change, int] | None = None
    for times in MORE_NODES:
        nodes = ("cluster.nodes", run.cluster.nodes * times)
        few = next((each for change in changes if (each := peaks.fitting_change((nodes, *change))) is not None), None)
        if few is not None:
            yield few
            return
        if several is None and (several := next(_changes_of_many_keys(single, peaks, (nodes,)), None)) is not None:
            yield several


def _changes_of_many_keys(single: list[Change], peaks: _ChangedPeaks, first: Change = ()) -> Iterator[tuple[Change, int]]:
    """Yield changes of many keys with which a run fits: beside the `first`, or each set of at most two larger degrees, the strongest value
    of every other key that is legal with them, less each change that is not needed."""
    degrees = [change for change in single if change[0][0] in LARGER_DEGREES]
    whole = [change[:1] for change in single if change[0] == WHOLE_SEQUENCE]
    strongest = {change[0][0]: change for change in single if len(change) == 1 and change not in degrees}
    for start in ((), *whole, *(() if first else (*degrees, *_combined_changes(degrees, 2)))):
        for left_out in (0, 1, 2):  # of the two that move states to the host, whose memory may not hold them
            some = [change for key, change in strongest.items() if key not in OFFLOADS[2 - left_out :]]
            taken = peaks.legal_together([(pair,) for pair in (*first, *start)], some)
            if peaks.fitting_change(_joined(taken)) is not None:
                least = min((_without_needless(order, taken, peaks) for order in (taken[::-1], taken)), key=len)
                each = peaks.fitting_change(_joined(least))
                assert each is not None
                yield each


def _without_needless(order: list[Change], taken: list[Change], peaks: _ChangedPeaks) -> list[Change]:
    """Return those of the changes taken without which a run does not fit; they are left out one after another, in this order."""
    kept = taken
    for change in order:
        fewer = [each for each in kept if each != change]
        if peaks.fitting_change(_joined(fewer)) is not None:
            kept = fewer
    return kept


def _joined(changes: list[Change]) -> Change:
    """Return changes of different keys as one."""
    return tuple([pair for change in changes for pair in change])


def _combined_changes(changes: list[Change], size: int) -> Iterator[Change]:
    """Yield all changes of `size` different keys that some of these make together."""
    for many in range(size, 0, -1):
        for several in combinations(changes, many):
            keys = [key for change in several for key, _ in change]
            if len(keys) == len(set(keys)) == size:
                yield _joined(list(several))


class _ChangedPeaks:
    """Peak bytes of a run under changes. Changes of parallel.* and the micro-batch alone share an estimator, which keeps their costs; each
    set of other keys has an estimator of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        engine, limits = engine_for(run, run.parallel)
        self._has_engine, self._exceeded = engine is not None, {each.key for each in limits}
        self._estimators: dict[Change, Estimator | None] = {}

    def fitting_change(self, change: Change) -> tuple[Change, int] | None:
        """Return the change and the peak bytes with it, if the run is then legal, fits, and still has an engine if it had one."""
        found = self.estimate(change)
        if found is None or not found.fits or found.peak is None:
            return None
        return _filling_change(self.run, change), found.peak

    def estimate(self, change: Change) -> Estimate | None:
        """Return the estimate of the changed run; None if it isn't legal, or has no engine that runs it where the run had one."""
        changed = with_changes(self.run, _filling_change(self.run, change))
        estimator = self._estimator(changed, change)
        if estimator is None:
            return None
        found = estimator(changed.parallel, changed.train.microbatch)
        return found if found.legal and self._has_engine_for(changed) else None

    def legal_together(self, first: Sequence[Change], some: Sequence[Change]) -> list[Change]:
        """Return changes, and all of some others or, one after another, those that are legal with the ones before."""
        if self.estimate(_joined([*first, *some])) is not None:
            return [*first, *some]
        taken = [*first]
        for change in some:
            if self.estimate(_joined([*taken, change])) is not None:
                taken = [*taken, change]
        return taken

    def _has_engine_for(self, changed: Run) -> bool:
        """Whether the changed run has an engine and exceeds none of its limits but those that the run does; true where the run has none."""
        engine, limits = engine_for(changed, changed.parallel)
        return not self._has_engine or (engine is not None and {each.key for each in limits} <= self._exceeded)

    def _estimator(self, changed: Run, change: Change) -> Estimator | None:
        """The estimator of the changed run; None where it breaks a rule in every layout."""
        key = tuple([pair for pair in change if not pair[0].startswith("parallel.") and pair[0] != "train.microbatch"])
        if key not in self._estimators:
            try:
                self._estimators[key] = Estimator(changed)
            except ValueError:
                self._estimators[key] = None
        return self._estimators[key]


def _filling_change(run: Run, change: Change) -> Change:
    """Return a change of degrees or nodes, with a data degree that fills the cluster again where the user set one."""
    new = with_changes(run, change)
    ranks, others = new.cluster.nodes * new.cluster.gpus, replica_size(new.parallel)
    if run.parallel.dp in ("auto", ranks // others) or ranks % others:
        return change
    return (*change, ("parallel.dp", ranks // others))


def _single_changes(run: Run) -> Iterator[Change]:
    """Yield changes that save memory, the cheapest first; most are of one key."""
    parallel, train, is_gpu = run.parallel, run.train, run.cluster.device.kind == "cuda"
    for applies, key, value in (
        (run.checkpoint.in_background, "checkpoint.background", False),
        (not train.compile and parallel.zero < 3 and is_gpu, "train.compile", True),
        (train.loss_chunks == 1 and _has_large_logits(run), "train.loss_chunks", LOSS_CHUNKS),
        (parallel.recompute == "none" and (train.attention == "math" or run.model.dropout), "parallel.recompute", "selective"),
        (parallel.pp > 1 and schedule_of(parallel).forward_first, "parallel.schedule", "1f1b"),
        (parallel.zero and parallel.shard != "all", "parallel.shard", "all"),
        (parallel.tp > 1 and not parallel.sequence, "parallel.sequence", True),
        *((True, "parallel.zero", zero) for zero in range(parallel.zero + 1, 4)),
        *((True, "train.microbatch", micro) for micro in _smaller_microbatches(train.microbatch)),
        (parallel.recompute != "full", "parallel.recompute", "full"),
        (train.attention == "math", "train.attention", "flash"),
        *((True, key, degree) for key, degree in _larger_degrees(run)),
        (not parallel.offload.optimizer, "parallel.offload.optimizer", True),
        (not parallel.offload.parameters, "parallel.offload.parameters", True),  # legal with ZeRO 3 and the optimizer there
    ):
        if applies:
            yield ((key, value),)
    if parallel.tp > 1 and parallel.sequence and not parallel.offload.optimizer:
        yield WHOLE_SEQUENCE, ("parallel.offload.optimizer", True)
    if moved := parallel.offload.names:
        yield tuple([(f"parallel.offload.{name}", False) for name in moved])
    if run.engine == "auto" and data_ranks(run, parallel) == 1 and is_gpu:
        yield (("engine", "zero"),)  # which leaves fewer gradients on the device beside an offloaded optimizer


def _smaller_microbatches(microbatch: int) -> Iterator[int]:
    """Yield a half, a quarter, and one sequence, those that divide the micro-batch."""
    for micro in (microbatch // 2, microbatch // 4, 1):
        if 0 < micro < microbatch and microbatch % micro == 0:
            yield micro


def _larger_degrees(run: Run) -> Iterator[tuple[str, int]]:
    """Yield (key, degree): twice, four and eight times the ranks of an axis that splits experts or the model, as far as they go."""
    axes = (("ep", run.model.experts), ("tp", run.cluster.gpus), ("pp", run.model.repeated_layers), ("cp", run.cluster.gpus))
    for axis, most in axes:
        for times in (2, 4, 8):
            degree = getattr(run.parallel, axis) * times
            if degree <= most and (axis != "tp" or run.model.heads % degree == 0):  # rather than pad
                yield f"parallel.{axis}", degree


def _has_large_logits(run: Run) -> bool:
    """Whether the logits of a micro-batch on a rank, of our own head, are a large part of what a device holds."""
    parallel, train = run.parallel, run.train
    elements = train.microbatch * train.seq * run.model.vocab / (parallel.cp * parallel.tp)
    return not is_made_by_transformers(run.model) and elements * widths(run).activation >= LOGITS_SHARE * int(run.cluster.device.memory)
