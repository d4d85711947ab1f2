"""The bounds by which a search discards layouts are no more than what a layout costs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from distrain.tests.plan.test_search import CASES, run_of
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.layout_cost import LayoutCost, has_times, layout_cost
from distrain.trainer.plan.layout_of_run import layout_on
from distrain.trainer.plan.search.bounds import pass_seconds
from distrain.trainer.plan.search.search import Allowance, LayoutSearch, Pass
from distrain.trainer.plan.search.space import Space, StateChoice
from distrain.trainer.plan.search.state_bounds import LeastStates
from distrain.trainer.spec.run import Parallel, Run

FACTORS = {"gpt": 4, "llama": 8, "moe": 4}  # of the batch, so that pipelines have more micro-batches than stages


def larger(name: str) -> Run:
    """The run on nodes of 8 GPUs, with more sequences in a batch and more layers."""
    run = run_of(name)
    cluster = replace(run.cluster, gpus=8)
    model = replace(run.model, layers=8)
    return replace(run, cluster=cluster, model=model, train=replace(run.train, batch=run.train.batch * FACTORS[name]))


def costed(search: LayoutSearch, each: Pass, states: list[StateChoice]) -> Iterator[tuple[StateChoice, Allowance, LayoutCost, bool]]:
    """(states, what the bounds allow, cost, whether its seconds are known) of every layout of a pass."""
    for state in states:
        for allowed in search.allowances(each, search.bounds.forms(state.zero), timed=True, fixed=0.0):
            for engine in search.space.engines(each.parallel, state, allowed.staged.choice):
                assert engine
                parallel = search.space.layout(each.parallel, state, allowed.staged.choice)
                layout = layout_on(ENGINES[engine], search.context, parallel, each.microbatch)
                yield state, allowed, layout_cost(search.context, layout), has_times(search.context, layout)


@pytest.mark.parametrize("name", CASES)
def test_no_layout_costs_less_than_its_bounds(name: str) -> None:
    search, seen = LayoutSearch(Space(larger(name)), rows=1), 0
    search.capacity = 1 << 60
    for mesh in search.space.meshes():
        states = [each for each in search.space.states(mesh) if not each.offload.parameters][::2]
        for each in search.passes(mesh):
            for state, allowed, cost, is_timed in costed(search, each, states):
                seen += 1
                fixed = search.bounds.fixed_bytes(mesh, state.zero, state.offload)
                assert fixed + search.least_kept(each) <= cost.peak
                assert fixed + allowed.kept <= cost.peak
                if is_timed and cost.seconds:
                    assert search.bounds.seconds(each.parallel) <= cost.seconds.step
                    assert allowed.seconds <= cost.seconds.step
                    assert search.bounds.pass_seconds(mesh.pp, each.micros, pass_seconds(cost.blocks)) <= cost.seconds.step
    assert seen > 500


@pytest.mark.parametrize("runnable", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_no_layout_costs_less_than_the_bounds_of_its_states(name: str, runnable: bool) -> None:
    """Bounds of states are kept over meshes and passes, so each one is held against layouts of others than its own."""
    run = larger(name)
    if name == "gpt":  # on several nodes, so that ZeRO shards over some of the ranks in several ways
        run = replace(run, cluster=replace(run.cluster, nodes=4), model=replace(run.model, layers=4))
    search = StatesOfEveryLayout(Space(run, runnable=runnable), rows=1)
    search.capacity = 1 << 60
    search.run_all()
    assert search.held > 500
    assert search.shared > search.held // 4


class StatesOfEveryLayout(LayoutSearch):
    """A search that discards nothing, and holds the bounds of states against the cost of every third layout, and against
    those of its own mesh."""

    seen = held = shared = 0

    def _may_matter(self, parallel: Parallel, seconds: float, peak: float) -> bool:
        return True

    def _least_states_of(self, each: Pass, state: StateChoice, allowed: Allowance, engine: str | None) -> LeastStates:
        self.shared -= 1
        return super()._least_states_of(each, state, allowed, engine)

    def _cost(self, each: Pass, state: StateChoice, allowed: Allowance, engine: str | None, least: LeastStates) -> None:
        self.seen += 1
        self.shared += 1  # less one for each bound: the layouts that another one's bound is held against
        if self.seen % 3:
            return
        self.held += 1
        layout = self._layout(each, state, allowed, engine)[1]
        cost = layout_cost(self.context, layout)
        own = super()._least_states_of(each, state, allowed, engine)
        assert tuple(least) == pytest.approx(tuple(own), rel=1e-9, abs=1e-12)
        assert least.bytes(allowed.kept) <= cost.peak
        if has_times(self.context, layout) and cost.seconds:
            assert allowed.seconds + least.seconds(each.micros) <= cost.seconds.step
