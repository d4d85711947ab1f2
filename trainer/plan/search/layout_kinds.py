"""The kinds of layouts whose models have different ops: whether layers are compiled, and how ranks that share a sequence see each other's
tokens (parallel.cp_comm). A search costs the layouts of one kind in one context."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...models.families import op_table
from ...spec.run import CpComm, Run
from ..rules.rules import OF_RUN, broken_rules
from .space import ZEROS, Candidate, Zero


class LayoutKind(NamedTuple):
    """Layouts with the same ops: their parallel.cp_comm, whether their ranks share sequences (None: either), and their ZeRO stages; a run
    of this kind, from which their ops and train.compile follow. With `runnable` they are those that an engine trains alone."""

    comm: CpComm
    shares: bool | None
    zeros: tuple[Zero, ...]
    run: Run
    runnable: bool = False

    def holds(self, candidate: Candidate) -> bool:
        """Whether a layout is of this kind."""
        parallel = candidate.parallel
        is_shared = self.shares is None or self.shares is (parallel.cp > 1)
        is_same = parallel.cp_comm == self.comm and candidate.compiled is self.run.train.compile
        return is_same and is_shared and parallel.zero in self.zeros


def layout_kinds(run: Run, fixed: frozenset[str]) -> list[LayoutKind]:
    """Return the kinds of a run's layouts, each of one kind: keys in `fixed` stay as the run has them.

    The other train.compile is searched on GPUs, for layouts that an engine trains. Those of ZeRO 3, which compiles no layer, are left
    out: they are the same with either.
    """
    kinds = _sequence_kinds(run, fixed)
    other = replace(run, train=replace(run.train, compile=not run.train.compile))
    if "train.compile" in fixed or run.cluster.device.kind != "cuda" or broken_rules(other, other.parallel, other.train.microbatch, OF_RUN):
        return kinds
    read = [(kind, tuple([zero for zero in kind.zeros if zero < 3])) for kind in _sequence_kinds(other, fixed)]
    return [*kinds, *(kind._replace(zeros=zeros, runnable=True) for kind, zeros in read if zeros)]


def _sequence_kinds(run: Run, fixed: frozenset[str]) -> list[LayoutKind]:
    """Return the kinds of layouts with the run's train.compile. Layouts whose ranks do not share sequences are those of the run's own
    parallel.cp_comm, which they do not read."""
    own: CpComm = run.parallel.cp_comm
    other: CpComm = "all_to_all" if own == "all_gather" else "all_gather"
    alone = _kind(run, fixed, own, shares=False)
    shared = [_kind(run, fixed, comm, shares=True) for comm in (own, other)[: 1 + ("parallel.cp_comm" not in fixed)]]
    if op_table(shared[0].run) == op_table(alone.run):
        return [LayoutKind(own, None, ZEROS, run), *shared[1:]]
    return [alone, *shared]


def _kind(run: Run, fixed: frozenset[str], comm: CpComm, *, shares: bool) -> LayoutKind:
    parallel = replace(run.parallel, cp_comm=comm)
    if "parallel.cp" not in fixed:
        parallel = replace(parallel, cp=2 if shares else 1)
    if "parallel.zero" not in fixed:
        parallel = replace(parallel, zero=0)
    return LayoutKind(comm, shares, ZEROS, replace(run, parallel=parallel))
