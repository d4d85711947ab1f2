"""Layouts that may be proved: what each says of `parallel`, the run that it makes of a recipe, and which few show most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal, cast

from ..plan.divisors import divisors
from ..plan.engines import ENGINES
from ..spec.run import Parallel, Run
from .covering import covering

AXES = ("dp", "ep", "tp", "cp", "pp")
ZEROS = (0, 1, 2, 3)
RECOMPUTES = ("selective", "full")
SCHEDULES = tuple(dict.fromkeys(name for engine in ENGINES for name in engine.schedules))
FEW = 12  # layouts that are proved where none are named

Recompute = Literal["selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a layout says of `parallel`; None leaves it to the recipe."""

    dp: int = 1
    ep: int = 1  # of the data ranks
    tp: int = 1
    cp: int = 1
    pp: int = 1
    zero: int = 0
    sequence: bool = False
    schedule: str = SCHEDULES[0]
    recompute: Recompute | None = None

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def word(self) -> str:
        """The word that reads as it; what is as always is not said."""
        said = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1] or ["dp1"]
        said += [f"zero{self.zero}"] if self.zero else []
        said += ["sequence"] if self.sequence else []
        said += [self.schedule] if self.schedule != SCHEDULES[0] else []
        return ".".join([*said, *([self.recompute] if self.recompute else [])])

    @property
    def choices(self) -> tuple[int | str | None, ...]:
        """Its choice of each factor; None where a factor has no say."""
        return (
            self.dp,
            self.ep,
            self.tp,
            self.cp,
            self.pp,
            self.zero,
            str(self.sequence) if self.tp > 1 else None,
            self.schedule if self.pp > 1 else None,
        )


ALONE = Layout()  # one process: what every other is held against
SIMPLE = (Layout(dp=2), Layout(dp=2, ep=2), Layout(tp=2), Layout(cp=2), Layout(pp=2))  # what each axis does alone


def every(ranks: int, *, experts: bool = False) -> Iterator[Layout]:
    """Every layout of at most so many ranks, in powers of two, smallest first; with experts, those that split them too."""
    degrees = [2**power for power in range(ranks.bit_length()) if 2**power <= ranks]
    meshes = sorted((mesh for mesh in product(degrees, repeat=4) if 1 < prod(mesh) <= ranks), key=lambda mesh: (prod(mesh), mesh))
    for dp, tp, cp, pp in meshes:
        shards = [each for each in degrees if each <= dp] if experts else [1]
        zeros = ZEROS if dp * cp > 1 else ZEROS[:1]
        schedules = SCHEDULES if pp > 1 else SCHEDULES[:1]
        for ep, zero, sequence, schedule in product(shards, zeros, (False, True) if tp > 1 else (False,), schedules):
            yield Layout(dp=dp, ep=ep, tp=tp, cp=cp, pp=pp, zero=zero, sequence=sequence, schedule=schedule)


def few(layouts: Sequence[Layout], first: Sequence[Layout]) -> list[Layout]:
    """`first`, and of the others as few as may be in which every two choices meet that meet in any: at most FEW in all."""
    of = {each.choices: each for each in layouts}
    chosen = list(covering(of, taken=[each.choices for each in first]))
    return sorted([*first, *(of[each] for each in chosen[: FEW - len(first)])], key=_order)


def _order(layout: Layout) -> tuple[object, ...]:
    """Few ranks first; of as many, those of the data axis, then tensor, context, pipeline."""
    return layout.ranks, -layout.dp, layout.ep, -layout.tp, -layout.cp, layout.word


def own(run: Run) -> Layout | None:
    """A recipe's own layout, its data degree filled in; None where words can't say it, or it is one process."""
    parallel = run.parallel
    others, world = parallel.tp * parallel.cp * parallel.pp, run.cluster.nodes * run.cluster.gpus
    dp = world // others if parallel.dp == "auto" else parallel.dp
    layout = Layout(
        dp=max(1, dp),
        ep=parallel.ep,
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        zero=parallel.zero,
        sequence=parallel.sequence and parallel.tp > 1,
        schedule=parallel.schedule if parallel.pp > 1 else SCHEDULES[0],
    )
    said = parallel.chunks == 1 and layout.schedule in SCHEDULES
    return layout if said and layout.ranks == world and layout != ALONE else None


def laid(run: Run, layout: Layout) -> Run:
    """The run in that layout on one node of as many devices; of `parallel` only what can't change a curve stays the recipe's."""
    kept = run.parallel
    parallel = Parallel(
        dp=layout.dp,
        ep=layout.ep,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        zero=cast(Literal[0, 1, 2, 3], layout.zero),
        schedule=layout.schedule,
        sequence=layout.sequence,
        recompute=layout.recompute or kept.recompute,
        bucket=kept.bucket,
        overlap=kept.overlap,
    )
    return replace(
        run,
        name=layout.word,
        reading=None,
        parallel=parallel,
        cluster=replace(run.cluster, nodes=1, gpus=layout.ranks),
        train=replace(run.train, microbatch=microbatch(run, layout)),
    )


def microbatch(run: Run, layout: Layout) -> int:
    """Sequences of a micro-batch: the recipe's, or the most below that divide a replica's share of the batch.

    A pipeline has at least as many micro-batches as stages, twice as many under a schedule that runs through it both ways.
    """
    share, rest = divmod(run.train.batch, layout.dp)
    if rest:
        return run.train.microbatch  # refused, whatever it is
    least = layout.pp * (2 if layout.schedule == "dualpipev" else 1) if layout.pp > 1 else 1
    return max((size for size in divisors(share, run.train.microbatch) if share // size >= least), default=1)
