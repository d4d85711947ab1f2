"""The reference of preferences: log probabilities of answers under the weights that a run begins with, from a forward pass before its first
step, so that no second model is held."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...engines.engine import Engine
from ...launch.rank.channel import STOPPED_UNSAVED, Channel
from ...layers.preference_loss import take_pair_results
from ...parallel.process_groups import Grid
from ...rundir.reference_header import Reads, samples_read, union_of_reads
from ...spec.numbers.as_text import seconds_text
from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ...system.stop_requests import StopFlag
from ..checkpoint import SavedCheckpoint
from ..data.samples.batches import Batches
from ..data.samples.order import Indices
from ..step.model_inputs import model_inputs
from .reference_file import HeldReference, Identity, References, read_reference, reference_identity, write_reference

WRITE_INTERVAL = 30.0  # seconds between two writes of the file: what a crash loses at most
_LOOKED_UP = 1 << 16  # samples at a time
_WINDOW_BITS = 40  # of an integer that names a source and a window in it


class StoppedInReference(Exception):
    """A stop request came before all of the reference was computed; the file has what was. All ranks raise it."""


class Windows(NamedTuple):
    """Windows of a split: their sources [n] and their numbers there [n]."""

    batches: Batches
    source: Indices
    window: Indices

    def pairs(self) -> tuple[Indices, Indices, Indices]:
        """Return source and number of each pair [pairs], window by window, and how many pairs each window has [n]."""
        packed = self.batches.packed_windows
        numbers = [packed[source].examples(window) for source, window in zip(self.source.tolist(), self.window.tolist(), strict=True)]
        counts = np.array([len(each) for each in numbers], np.int64)
        return np.repeat(self.source, counts), np.concatenate([np.zeros(0, np.int64), *numbers]), counts

    def part(self, first: int, size: int) -> Windows:
        """Return so many windows from the first on."""
        return Windows(self.batches, self.source[first : first + size], self.window[first : first + size])


@dataclass(frozen=True, kw_only=True)
class KnownReference:
    """The log probabilities of answers by corpus, source and pair, nan where not known; the windows whose pairs a run reads and that are
    not known; what they depend on; the samples that the run reads, and on rank 0 those whose pairs RUN_DIR has all, if any are known."""

    values: References
    missing: Sequence[Windows]
    identity: Identity
    reads: Reads
    held_reads: Reads | None

    @property
    def is_complete(self) -> bool:
        """Whether all that the run reads is known."""
        return not any(len(each.window) for each in self.missing)

    def give(self, batches: Batches) -> None:
        """Give batches the log probabilities of their pairs."""
        batches.references, batches.reference_identity = self.values[batches.corpus.key], self.identity


def find_reference(
    run: Run, folder: Path, grid: Grid, splits: Sequence[tuple[Batches, range]], channel: Channel, host: dist.ProcessGroup
) -> KnownReference:
    """Return what RUN_DIR holds of the reference, which rank 0 reads; `splits` are the samples that the run reads of each split of its
    corpora, those of its training corpus first."""
    corpora, held = {batches.corpus.key: batches.corpus for batches, _ in splits}, HeldReference({}, {})
    if grid.world.is_rank0:
        held = read_reference(folder, reference_identity(run, splits[0][0].corpus))
        if held.problem:
            channel.say(f"{held.problem}: the reference is computed again")
    unknown = {key: [np.full((each.examples, 2), np.nan) for each in corpus.examples] for key, corpus in corpora.items()}
    values = {key: held.values.get(key, each) for key, each in unknown.items()}
    identity = [held.identity]
    dist.broadcast_object_list(identity, 0, group=host)
    for each in (array for reference in values.values() for array in reference):
        dist.broadcast(torch.from_numpy(each), 0, group=host)
    missing = [_unknown(_windows(batches, samples, channel), values, channel) for batches, samples in splits]
    reads = samples_read(run, splits[0][1].start, splits[0][1].stop)
    return KnownReference(values=values, missing=missing, identity=identity[0], reads=reads, held_reads=held.reads)


def check_same_start(checkpoint: SavedCheckpoint | None, known: KnownReference) -> None:
    """Raise Unreadable where a checkpoint's preferences refer to other start weights than those that the run names now."""
    began = checkpoint.extra.get("data", {}).get("reference", {}).get("weights") if checkpoint else None
    if began is not None and began != known.identity["weights"]:
        says = "the run began with other weights than it names now, and its preferences are relative to those"
        mend = "set model.weights (or train.seed, of drawn weights) to what it began with, or set log.dir to another folder"
        raise Unreadable([Problem(rule="resume", says=says, mend=mend)])


def compute_reference(
    run: Run, folder: Path, grid: Grid, engine: Engine, known: KnownReference, channel: Channel, host: dist.ProcessGroup, stop: StopFlag
) -> None:
    """Compute what is missing with the weights that the engine has, as an evaluation runs, and write the file: now and then, and at the
    end. All ranks call this together; where the file can't be written, rank 0 says so.

    A stop request ends the pass after the forward that runs: raises StoppedInReference, or SystemExit where the file can't be written.
    """
    size = grid.size("dp") * run.train.microbatch
    rounds = [(split, first) for split in known.missing for first in range(0, len(split.window), size)]
    whole = sum(int(split.pairs()[2].sum()) for split in known.missing)
    progress = _PassProgress(folder, known, channel, whole, is_shown=grid.world.is_rank0)
    for done, (split, first) in enumerate(rounds):
        channel.report_progress("reference")
        progress.report(done / len(rounds))
        if _compute_round(run, grid, engine, known, split.part(first, size), host, stop):
            if _any_rank(not progress.write(), host):
                raise SystemExit(STOPPED_UNSAVED)
            progress.say_stopped()
            raise StoppedInReference
    progress.end()


class _PassProgress:
    """How far the pass is, which rank 0 shows and writes to the file; it lasts minutes to hours. Other ranks do neither."""

    def __init__(self, folder: Path, known: KnownReference, channel: Channel, pairs: int, *, is_shown: bool) -> None:
        self._folder, self._known, self._channel, self._pairs, self._is_shown = folder, known, channel, pairs, is_shown
        self._began = self._written = time.monotonic()
        self._said = 0  # tenths of the pass

    def report(self, share: float) -> None:
        """Show which share of the pass is done; write the file where that was long ago, and say so at each tenth of the pass."""
        if not self._is_shown:
            return
        now = time.monotonic()
        left = f", {seconds_text((now - self._began) * (1 - share) / share)} left" if share else ""
        self._channel.report_status(f"reference: {100 * share:.0f} %{left}")
        if share and now >= self._written + WRITE_INTERVAL:
            if int(10 * share) > self._said:
                self._said = int(10 * share)
                self._channel.say(f"reference: {100 * share:.0f} % of {self._pairs:,} pairs{left}")
            self.write()

    def write(self, *, is_whole: bool = False) -> bool:
        """Write the file; return whether that went well, on ranks that write none True."""
        if not self._is_shown:
            return True
        self._written = time.monotonic()
        try:
            known = self._known
            reads = union_of_reads(known.held_reads, known.reads) if is_whole else known.held_reads
            write_reference(self._folder, known.values, known.identity, is_whole=is_whole, reads=reads)
        except OSError as error:
            says = f"the reference could not be written ({error.strerror or error}): a resume computes it again"
            self._channel.say(f"warning: {says}")
            return False
        return True

    def say_stopped(self) -> None:
        """Say how much a pass that was stopped has computed."""
        if self._is_shown:
            left = sum(int(_unknown(each, self._known.values, self._channel).pairs()[2].sum()) for each in self._known.missing)
            self._channel.say(f"reference: stopped after {self._pairs - left:,} of {self._pairs:,} pairs, which are kept")

    def end(self) -> None:
        """Show and write that the pass is done."""
        if self._is_shown:
            self._channel.report_status("")
            says = f"log probabilities of the answers of {self._pairs:,} pairs, under the weights that the run begins with"
            self._channel.say(f"reference: {says}")
            self.write(is_whole=True)


def _compute_round(
    run: Run, grid: Grid, engine: Engine, known: KnownReference, windows: Windows, host: dist.ProcessGroup, stop: StopFlag
) -> bool:
    """Compute a micro-batch of windows on each replica, and share what all have found. Return whether any rank was asked to stop."""
    source, number, counts = windows.pairs()
    first = grid.coordinate("dp") * run.train.microbatch  # of this replica's windows
    before, own = int(counts[:first].sum()), int(counts[first : first + run.train.microbatch].sum())
    message = np.zeros((len(number) + 1, 2))
    if (computed := _computed_pairs(run, grid, engine, windows, first)) is not None:
        message[before : before + own] = computed
    message[-1, 0] = stop.requested
    dist.all_reduce(torch.from_numpy(message), group=host)
    for index, values in enumerate(known.values[windows.batches.corpus.key]):
        values[number[source == index]] = message[:-1][source == index]
    return bool(message[-1, 0])


def _computed_pairs(run: Run, grid: Grid, engine: Engine, windows: Windows, first: int) -> NDArray[np.float64] | None:
    """Compute this replica's windows, from the first on. Return on one of its ranks the log probabilities of their answers [pairs, 2]."""
    rows, count = np.arange(run.train.microbatch) + first, len(windows.window)
    places = np.minimum(rows, count - 1)  # micro-batches are full: what is behind the last window does not count
    batch = windows.batches.read(rows, windows.source[places], windows.window[places]).before(count)
    tokens, labels, further = model_inputs(run, batch, grid, None)
    engine.evaluate(tokens, labels, **further)
    results = [each for part in engine.parts for each in take_pair_results(part.module)]
    if not results or grid.coordinate("tp") or grid.coordinate("cp"):
        return None
    values: NDArray[np.float64] = results[0].log_ratios.cpu().numpy()  # of batches without a reference: log probabilities
    return values


def _any_rank(flag: bool, host: dist.ProcessGroup) -> bool:
    anywhere = torch.tensor(int(flag))
    dist.all_reduce(anywhere, group=host)
    return bool(anywhere)


def _windows(batches: Batches, samples: range, channel: Channel) -> Windows:
    """Return the windows of samples, each once."""
    found = [np.zeros(0, np.int64)]
    for first in range(samples.start, samples.stop, _LOOKED_UP):
        channel.report_progress("reference")
        source, window = batches.locate(np.arange(first, min(first + _LOOKED_UP, samples.stop)))
        found.append(np.unique(source << _WINDOW_BITS | window))
    each = np.unique(np.concatenate(found))
    return Windows(batches, each >> _WINDOW_BITS, each & (1 << _WINDOW_BITS) - 1)


def _unknown(split: Windows, references: References, channel: Channel) -> Windows:
    """Return the windows that hold a pair whose log probabilities are not known."""
    packed, values, chosen = split.batches.packed_windows, references[split.batches.corpus.key], np.zeros(len(split.window), bool)
    for at, (source, window) in enumerate(zip(split.source.tolist(), split.window.tolist(), strict=True)):
        if at % _LOOKED_UP == 0:
            channel.report_progress("reference")
        chosen[at] = np.isnan(values[source][packed[source].examples(window)]).any()
    return Windows(split.batches, split.source[chosen], split.window[chosen])
