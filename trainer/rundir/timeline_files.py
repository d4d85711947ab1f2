"""RUN_DIR/timeline/RANK.json: what each rank did in the steps of log.timeline."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from ..plan.timeline.timed_spans import TimedStep
from ..spec.derived.document_pairs import document_lengths
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from ..system.atomic_file import write_atomically
from ..system.regular_file import read_plain

FOLDER, VERSION = "timeline", 1
MOST_RANKS = 256  # whose files are read
AGAIN = "train with log.timeline=[first,last] again"


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """The timed steps of a rank; seconds are from the same moment on all ranks of an attempt.

    Clocks of other machines than rank 0's are known to `clock_error` seconds. `layout` tells runs apart whose steps cost otherwise.
    """

    version: int
    attempt: str
    layout: str
    rank: int
    world: int
    device: str  # cpu or cuda
    machine: str
    cores: tuple[int, ...]  # on which the process may run
    threads: int
    clock_error: float
    steps: tuple[TimedStep, ...]


class _Version(msgspec.Struct):
    version: int


def layout_key(run: Run) -> str:
    """Return a key of all that a step's costs follow from: the model, the layout, the batch, the engine."""
    train = run.train
    told = (run.model, run.parallel, run.cluster, run.engine, train.batch, train.microbatch, train.seq, train.precision, train.compile)
    chunks = [train.loss_chunks] if train.loss_chunks > 1 else []
    ramp = [train.rampup] if train.rampup.batches else []
    pairs = [run.train.preference] if run.data.has_preferences else []
    documents = [lengths] if (lengths := document_lengths(run)) else []
    moments = [run.optim.moments, run.optim.rounding] if run.optim.moments != "fp32" else []
    average = ["ema"] if run.optim.ema else []
    linear = ["fla"] if run.train.linear_attention == "fla" else []
    return sha256(msgspec.json.encode([*told, *chunks, *ramp, *moments, *average, *linear, *pairs, *documents])).hexdigest()[:16]


def write_rank_timeline(folder: Path, timeline: RankTimeline) -> None:
    """Write a rank's file of RUN_DIR; raises OSError, and then the file is as it was."""
    (folder / FOLDER).mkdir(exist_ok=True)
    write_atomically(folder / FOLDER / f"{timeline.rank}.json", msgspec.json.encode(timeline))


def read_timelines(folder: Path, run: Run) -> list[RankTimeline]:
    """Return the timelines of a run's ranks, by rank; of more than MOST_RANKS ranks, those of the first replica.

    Raises Unreadable with what is wrong with the first file that is not as a run writes it.
    """
    if not (folder / FOLDER / "0.json").is_file():
        raise _unreadable(f"{folder} has no timeline", "train with log.timeline=[first,last], the steps to time")
    first = _read(folder, 0)
    world = run.cluster.nodes * run.cluster.gpus
    if first.layout != layout_key(run) or first.world != world:
        raise _unreadable(f"{_name(folder, 0)} is of another layout, model or version than {folder / 'run.json'}", AGAIN)
    every = 1 if world <= MOST_RANKS else world // run.parallel.pp
    found = [first, *(_read(folder, rank) for rank in range(every, world, every))]
    for each in found:
        if (each.attempt, each.world) != (first.attempt, first.world):
            raise _unreadable(f"{_name(folder, each.rank)} is of another attempt than 0.json", AGAIN)
        if [step.step for step in each.steps] != [step.step for step in first.steps] or not each.steps:
            raise _unreadable(f"{_name(folder, each.rank)} has other steps than 0.json", AGAIN)
    return found


def _read(folder: Path, rank: int) -> RankTimeline:
    file = _name(folder, rank)
    content = b""
    with suppress(OSError):
        content = read_plain(folder / FOLDER / f"{rank}.json")
    if not content:
        raise _unreadable(f"{file} is missing or can't be read", AGAIN)
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if version != VERSION:
            raise _unreadable(f"{file} is of version {version}, and this distrain reads version {VERSION}", AGAIN)
        found = msgspec.json.decode(content, type=RankTimeline)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _unreadable(f"{file} is damaged", AGAIN) from None
    if found.rank != rank:
        raise _unreadable(f"{file} is that of rank {found.rank}", AGAIN)
    return found


def _name(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"{rank}.json"


def _unreadable(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="timeline", says=says, mend=mend)])
