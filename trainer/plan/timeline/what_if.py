"""What a step would take if links, devices or the pipeline were other than they are: each answer is a step simulated again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from ...spec.derived.batch_levels import run_at_batch
from ...spec.run import Cluster, Device, Link, NodeHost, Run
from ..rules.rules import broken_rules
from .simulated_seconds import simulated_seconds, varied_seconds
from .step_costs import PlannedPass, StepCosts, step_costs
from .timeline import PASS_KINDS

FREE = 1e9  # times the bandwidth of a link at which a message takes no time that matters
SLOW = 1.1  # times as long as planned: what a stage with a slow device takes
VARIATION = 0.05  # of a pass's time, its standard deviation
LEAST_STEPS, MOST_STEPS = 6, 100  # whose mean is taken where passes vary: the more, the fewer passes a step has
MOST_VARIED = 20_000  # passes of a step for which that is done, and for which one of twice the batch is simulated
LEAST_CHANGE = 5e-4  # share of the step; less is not shown
NO_LAUNCHES = "kernels were launched in no time"


class WhatIf(NamedTuple):
    """A condition, and the seconds of a step under it."""

    says: str
    seconds: float


def what_ifs(run: Run, costs: StepCosts, slowest: int) -> list[WhatIf]:
    """Return the conditions that change a legal run's step, the largest gain first; `slowest` is the stage that most others wait for."""
    now = simulated_seconds(costs)
    found = [*_other_clusters(run), *_other_pipelines(run, costs, slowest)]
    return sorted((each for each in found if abs(each.seconds / now - 1) >= LEAST_CHANGE), key=lambda each: each.seconds)


def _other_clusters(run: Run) -> Iterator[WhatIf]:
    """The run on faster links and devices."""
    cluster = run.cluster
    device = cluster.device
    clusters = (
        ("links between nodes were twice as fast", replace(cluster, between=_faster(cluster.between, 2))),
        ("links inside nodes were twice as fast", replace(cluster, inside=_faster(cluster.inside, 2))),
        ("no message took time", replace(cluster, between=_faster(cluster.between, FREE), inside=_faster(cluster.inside, FREE))),
        ("devices computed twice as fast", _with_device(cluster, peak={name: 2 * peak for name, peak in device.peak.items()})),
        ("devices had twice the memory bandwidth", _with_device(cluster, bandwidth=2 * (device.bandwidth or 0.0))),
        ("hosts and their links were twice as fast", replace(cluster, host=_faster_host(cluster.host))),
        (NO_LAUNCHES, _with_device(cluster, launch=0.0, dispatch=0.0)),
    )
    for says, each in clusters:
        if each != cluster and (costs := step_costs(replace(run, cluster=each))):
            yield WhatIf(says, simulated_seconds(costs))


def _faster(link: Link | None, times: float) -> Link | None:
    """A link with more bandwidth; one that takes no time has no latency either."""
    return link and replace(link, bandwidth=link.bandwidth * times, latency=0.0 if times == FREE else link.latency)


def _faster_host(host: NodeHost) -> NodeHost:
    """A host twice as fast as one whose rates are stated."""
    return replace(host, **{name: 2 * rate for name in ("bandwidth", "link") if (rate := getattr(host, name)) is not None})


def _with_device(cluster: Cluster, **changes: object) -> Cluster:
    device: Device = replace(cluster.device, **changes)  # type: ignore[arg-type]
    return replace(cluster, device=device)


def _other_pipelines(run: Run, costs: StepCosts, slowest: int) -> Iterator[WhatIf]:
    """The run's pipeline with even stages, with hidden sends, with a slow device, with passes that vary, with more micro-batches."""
    layout, stages = costs.layout, costs.layout.mesh.pp
    where = f"of stage {slowest} " if stages > 1 else ""
    yield WhatIf(f"a device {where}took 10 % longer to compute", simulated_seconds(costs, {slowest: SLOW}))
    if stages == 1:
        return
    yield WhatIf("all stages took equally long", simulated_seconds(costs._replace(passes=_even_passes(costs))))
    yield WhatIf("sends between stages took no time", simulated_seconds(costs._replace(send=0.0)))
    passes = 2 * len(layout.partition.parts) * layout.micros
    is_short = passes <= MOST_VARIED
    if layout.delay is None and is_short:
        mean, error = varied_seconds(costs, VARIATION, min(MOST_STEPS, max(LEAST_STEPS, MOST_VARIED // passes)))
        if abs(mean - simulated_seconds(costs)) > 2 * error:
            yield WhatIf(f"passes varied by {100 * VARIATION:g} %", mean)
    larger = run_at_batch(run, 2 * run.train.batch)
    is_legal = not layout.schedule.simulated and not broken_rules(larger, larger.parallel, larger.train.microbatch)
    if is_legal and (twice := step_costs(larger)):  # a list of actions from a file fixes its micro-batches
        seconds = simulated_seconds(twice) if is_short else simulated_seconds(costs) * twice.planned / costs.planned
        yield WhatIf("the batch were twice as large (half of its step)", seconds / 2)


def _even_passes(costs: StepCosts) -> dict[tuple[str, int], PlannedPass]:
    """The mean of each kind of pass, on all parts of the model."""
    parts = range(len(costs.layout.partition.parts))
    found: dict[tuple[str, int], PlannedPass] = {}
    for kind in PASS_KINDS:
        each = [costs.passes[kind, part] for part in parts]
        mean = PlannedPass(fmean(one.computing for one in each), fmean(one.messages for one in each))
        found |= {(kind, part): mean for part in parts}
    return found
