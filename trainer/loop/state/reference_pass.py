"""The reference of preferences: log probabilities of answers under the weights that a run begins with, from a forward pass before its first
step, so that no second model is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...engines.engine import Engine
from ...launch.rank.channel import Channel
from ...layers.preference_loss import take_pair_results
from ...parallel.process_groups import Grid
from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ..checkpoint import SavedCheckpoint
from ..data.samples.batches import Batches
from ..data.samples.order import Indices
from ..step.model_inputs import model_inputs
from .reference_file import HeldReference, Identity, Reference, read_reference, reference_identity, write_reference

_LOOKED_UP = 1 << 16  # samples at a time
_WINDOW_BITS = 40  # of an integer that names a source and a window in it


class Windows(NamedTuple):
    """Windows of a split: their sources [n] and their numbers there [n]."""

    batches: Batches
    source: Indices
    window: Indices


@dataclass(frozen=True, kw_only=True)
class KnownReference:
    """The log probabilities of answers by source and pair, nan where not known; the windows whose pairs a run reads and that are not known;
    what they depend on."""

    values: Reference
    missing: Sequence[Windows]
    identity: Identity

    @property
    def is_complete(self) -> bool:
        """Whether all that the run reads is known."""
        return not any(len(each.window) for each in self.missing)


def find_reference(
    run: Run, folder: Path, grid: Grid, splits: Sequence[tuple[Batches, range]], channel: Channel, host: dist.ProcessGroup
) -> KnownReference:
    """Return what RUN_DIR holds of the reference, which rank 0 reads; `splits` are the samples that the run reads of each split of one
    corpus."""
    corpus, held = splits[0][0].corpus, HeldReference(None, {})
    assert all(batches.corpus is corpus for batches, _ in splits), "a reference is of the pairs of one corpus"
    if grid.world.is_rank0:
        held = read_reference(folder, reference_identity(run, corpus))
        if held.problem:
            channel.say(f"{held.problem}: the reference is computed again")
    values = held.values or [np.full((each.examples, 2), np.nan) for each in corpus.examples]
    identity = [held.identity]
    dist.broadcast_object_list(identity, 0, group=host)
    for each in values:
        dist.broadcast(torch.from_numpy(each), 0, group=host)
    missing = [_unknown(_windows(batches, samples, channel), values, channel) for batches, samples in splits]
    return KnownReference(values=values, missing=missing, identity=identity[0])


def check_same_start(checkpoint: SavedCheckpoint | None, known: KnownReference) -> None:
    """Raise Unreadable where a checkpoint's preferences refer to other start weights than those that the run names now."""
    began = checkpoint.extra.get("data", {}).get("reference", {}).get("weights") if checkpoint else None
    if began is not None and began != known.identity["weights"]:
        says = "the run began with other weights than it names now, and its preferences are relative to those"
        mend = "set model.weights (or train.seed, of drawn weights) to what it began with, or set log.dir to another folder"
        raise Unreadable([Problem(rule="resume", says=says, mend=mend)])


def compute_reference(
    run: Run, folder: Path, grid: Grid, engine: Engine, known: KnownReference, channel: Channel, host: dist.ProcessGroup
) -> None:
    """Compute what is missing with the weights that the engine has, as an evaluation runs, and write the file. All ranks call this
    together; where the file can't be written, rank 0 says so."""
    size = grid.size("dp") * run.train.microbatch
    found = [np.zeros_like(each) for each in known.values]
    rounds = [(split, first) for split in known.missing for first in range(0, len(split.window), size)]
    for done, (split, first) in enumerate(rounds):
        channel.report_progress("reference")
        if grid.world.is_rank0:
            channel.report_status(f"reference: {100 * done / len(rounds):.0f} %")
        for source, number, value in _computed_pairs(run, grid, engine, split, first):
            found[source][number] = value
    pairs = 0
    for index, (values, summed) in enumerate(zip(known.values, found, strict=True)):
        dist.all_reduce(torch.from_numpy(summed), group=host)
        for split in known.missing:
            numbers = _pairs(split, index)
            values[numbers] = summed[numbers]
            pairs += len(numbers)
    if grid.world.is_rank0:
        channel.report_status("")
        channel.say(f"reference: log probabilities of the answers of {pairs:,} pairs, under the weights that the run begins with")
        try:
            write_reference(folder, known.values, known.identity)
        except OSError as error:
            says = f"the reference could not be written ({error.strerror or error}): a resume computes it again"
            channel.say(f"warning: {says}")


def _computed_pairs(run: Run, grid: Grid, engine: Engine, split: Windows, first: int) -> Iterator[tuple[int, int, Any]]:
    """Compute this rank's windows of the round from `first` on. Yield, on one rank of a replica, source and number of each pair, and the
    log probabilities of its answers."""
    size, count = run.train.microbatch, len(split.window)
    rows = np.arange(size) + first + grid.coordinate("dp") * size
    places = np.minimum(rows, count - 1)  # micro-batches are full: what is behind the last window does not count
    batch = split.batches.read(rows, split.source[places], split.window[places]).before(count)
    tokens, labels, further = model_inputs(run, batch, grid, None)
    engine.evaluate(tokens, labels, **further)
    results = [each for part in engine.parts for each in take_pair_results(part.module)]
    assert batch.pairs is not None
    if results and not grid.coordinate("tp") and not grid.coordinate("cp"):
        values = results[0].log_ratios.cpu().numpy()  # of batches without a reference: log probabilities
        yield from zip(batch.pairs.source.tolist(), batch.pairs.number.tolist(), values, strict=True)


def _windows(batches: Batches, samples: range, channel: Channel) -> Windows:
    """Return the windows of samples, each once."""
    found = [np.zeros(0, np.int64)]
    for first in range(samples.start, samples.stop, _LOOKED_UP):
        channel.report_progress("reference")
        source, window = batches.locate(np.arange(first, min(first + _LOOKED_UP, samples.stop)))
        found.append(np.unique(source << _WINDOW_BITS | window))
    each = np.unique(np.concatenate(found))
    return Windows(batches, each >> _WINDOW_BITS, each & (1 << _WINDOW_BITS) - 1)


def _unknown(split: Windows, values: Reference, channel: Channel) -> Windows:
    """Return the windows that hold a pair whose log probabilities are not known."""
    packed, chosen = split.batches.packed_windows, np.zeros(len(split.window), bool)
    for at, (source, window) in enumerate(zip(split.source.tolist(), split.window.tolist(), strict=True)):
        if at % _LOOKED_UP == 0:
            channel.report_progress("reference")
        chosen[at] = np.isnan(values[source][packed[source].examples(window)]).any()
    return Windows(split.batches, split.source[chosen], split.window[chosen])


def _pairs(split: Windows, source: int) -> Indices:
    """Return the pairs of a source that windows hold [n]."""
    packed = split.batches.packed_windows[source]
    return np.concatenate([np.zeros(0, np.int64), *(packed.examples(int(each)) for each in split.window[split.source == source])])
