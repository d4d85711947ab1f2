"""Links that are too slow to be true: a bandwidth in gigabytes or a latency in microseconds that was written without its unit."""

from __future__ import annotations

from collections.abc import Iterator

from ..spec.keys.units import LINK
from ..spec.problem import Problem
from .costs.cost_context import CostContext
from .layout.layout import Layout
from .layout_cost import LayoutCost
from .plan_data import Throughput

SLOW_LINK, LATE_LINK = 1e7, 0.1  # bytes/s and seconds: every link between accelerators is faster


def implausible_links(context: CostContext, layout: Layout, cost: LayoutCost, throughput: Throughput | None) -> Iterator[Problem]:
    """Warn of rates of links and of the host's memory that no accelerator has."""
    cluster = context.run.cluster
    for name, unit in (("link", LINK), ("bandwidth", "bytes/s")):
        rate = getattr(cluster.host, name)
        if layout.offloads and rate is not None and rate < SLOW_LINK:
            says = f"cluster.host.{name}={rate:g} is {rate:g} bytes/s"
            yield Problem(rule="link", says=says, mend=f"{unit}, write it as 25e9 or 25GB/s")
    for name, link in (("inside", cluster.inside), ("between", cluster.between)):
        if link is not None and link.bandwidth is not None and link.bandwidth < SLOW_LINK:
            says = f"cluster.{name}.bandwidth={link.bandwidth:g} is {link.bandwidth:g} bytes/s"
            yield Problem(rule="link", says=says, mend=f"{LINK}, write it as 300e9 or 300GB/s")
        if link is not None and link.latency is not None and link.latency > LATE_LINK:
            yield Problem(
                rule="link", says=f"cluster.{name}.latency={link.latency:g} is {link.latency:g} s", mend="write 5us for microseconds"
            )
